"""What group commit does for every append: making it, placing it, answering it.

A disk takes tens of thousands of syncs a second at most, so many appends share one, and what is
done for each of them decides how many there are. So there are two implementations: a compiled one,
taken where it was built, and one in plain Python, also taken when `MILLSTREAM_PURE` is set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

IMPLEMENTATION: Literal["compiled", "pure"]

if TYPE_CHECKING:
    from millstream.engine._appends_pure import (
        Append,
        Pending,
        advance,
        answer,
        largest_of,
        place,
        queue,
        size_of,
    )
else:
    try:
        if os.environ.get("MILLSTREAM_PURE", "") not in ("", "0"):
            raise ImportError("the pure twin was asked for")
        from millstream.engine import _appends as _twin

        IMPLEMENTATION = "compiled"
    except ImportError:
        from millstream.engine import _appends_pure as _twin

        IMPLEMENTATION = "pure"
    Append = _twin.Append
    Pending = _twin.Pending
    advance = _twin.advance
    answer = _twin.answer
    largest_of = _twin.largest_of
    place = _twin.place
    queue = _twin.queue
    size_of = _twin.size_of

__all__ = [
    "IMPLEMENTATION",
    "Append",
    "Pending",
    "advance",
    "answer",
    "largest_of",
    "place",
    "queue",
    "size_of",
]
