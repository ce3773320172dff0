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
        """In a turn of its own, so that what has come by then has one too."""
        ...

    def at_end(self, call: Callable[[], None]) -> None:
        """After the calls that are ready: for who gathers what comes in one turn, and passes it on.
        What is asked for from such a call follows at once, before anything else is read, so that a
        chain of such calls gathers as much, and is done as soon, as one call would be."""
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
        try:
            for _ in range(STAGES):
                calls, self._at_end = self._at_end, []
                for call in calls:
                    self._call(call)
        finally:
            self._is_set = bool(self._at_end)
            if self._is_set:
                self._loop.call_soon(self._end)

    def _call(self, call: Callable[[], None]) -> None:
        """As the loop does: one that fails keeps no other from its turn."""
        try:
            call()
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001
            said = {"message": f"{call!r} failed", "exception": error}
            self._loop.call_exception_handler(said)
