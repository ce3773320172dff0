"""What becomes of a batch once it has its place: an entry of the journal, and bytes of a segment.

Both are made for every append, many at once, so there are two implementations: a compiled one,
taken where it was built, and one in plain Python, also taken when `MILLSTREAM_PURE` is set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from millstream.log._batch_layout import PLACE_BYTES
from millstream.log._placing_layout import BATCH_KIND, ENTRY, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from millstream.log._batch_layout import Data
    from millstream.log._placing_pure import (
        End,
        Mark,
        Placed,
        body_bytes,
        joined_batches,
        joined_entries,
        next_noted,
    )
else:
    try:
        if os.environ.get("MILLSTREAM_PURE", "") not in ("", "0"):
            raise ImportError("the pure twin was asked for")
        from millstream.log import _placing as _twin
    except ImportError:
        from millstream.log import _placing_pure as _twin
    End = _twin.End
    Mark = _twin.Mark
    Placed = _twin.Placed
    body_bytes = _twin.body_bytes
    joined_batches = _twin.joined_batches
    joined_entries = _twin.joined_entries
    next_noted = _twin.next_noted

__all__ = [
    "BATCH_KIND",
    "ENTRY",
    "End",
    "Mark",
    "Placed",
    "body_bytes",
    "entry_buffers",
    "joined_batches",
    "joined_entries",
    "key_of",
    "next_noted",
    "segment_buffers",
]


def entry_buffers(entries: Sequence[Placed | Data]) -> Iterator[Data]:
    """As `joined_entries`, without copying the batches."""
    for entry in entries:
        if isinstance(entry, Placed):
            yield entry.entry_head()
            yield entry.prefix()
            yield memoryview(entry.data)[PLACE_BYTES:]
        else:
            yield entry


def segment_buffers(run: Sequence[Placed]) -> Iterator[Data]:
    """As `joined_batches`, without copying them."""
    for one in run:
        yield one.prefix()
        yield memoryview(one.data)[PLACE_BYTES:]
