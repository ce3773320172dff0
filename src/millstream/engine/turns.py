"""What engine and broker need of an event loop beside deadlines, so that a test can be the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

# What ends a turn may ask for more that ends it: work is gathered by who took it, by the journal of
# leases, and by the log. One more waits for the next turn: sockets are not kept waiting for long.
STAGES = 3


class Turns(Protocol):
    """The scheduler of the local engine is one too."""

    def soon(self, call: Callable[[], None]) -> None:
        """In the next turn of the loop, after what has come by then."""
        ...

    def at_end(self, call: Callable[[], None]) -> None:
        """At the end of this turn: for who gathers what comes in one, and passes it on. Nothing
        that has come since is looked at before; so what is asked for at the end of a turn gathers
        as much, and is done as soon, as if it were one call."""
        ...


class LoopTurns:
    """Those of the running event loop. Who gathers for others, and they, have the same one."""

    __slots__ = ("_at_end", "_is_set", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at_end: list[Callable[[], None]] = []
        self._is_set = False

    def soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

    def at_end(self, call: Callable[[], None]) -> None:
        self._at_end.append(call)
        if not self._is_set:
            self._is_set = True
            self._loop.call_soon(self._end)

    def _end(self) -> None:
        for _ in range(STAGES):
            calls, self._at_end = self._at_end, []
            for call in calls:
                try:
                    call()
                except Exception as error:  # noqa: BLE001  as the loop does: the others have theirs
                    said = {"message": f"{call!r} failed", "exception": error}
                    self._loop.call_exception_handler(said)
        self._is_set = bool(self._at_end)
        if self._is_set:
            self._loop.call_soon(self._end)
