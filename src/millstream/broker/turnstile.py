"""So many may pass at a time; the others wait in line."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from millstream.engine.pending import Pending

if TYPE_CHECKING:
    from collections.abc import Generator


class Turnstile:
    __slots__ = ("_at_once", "_inside", "_line")

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._inside = 0
        self._line: deque[Pending[None]] = deque()

    def enter(self) -> Generator[Pending[Any], Any, None]:
        """Until there is a place. Whoever enters must leave."""
        if self._inside < self._at_once:
            self._inside += 1
            return
        turn: Pending[None] = Pending()
        self._line.append(turn)
        yield turn

    def leave(self) -> None:
        """The place goes to the first in line, if there is one."""
        if self._line:
            self._line.popleft().succeed(None)
        else:
            self._inside -= 1
