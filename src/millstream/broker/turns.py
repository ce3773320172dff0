"""What the broker needs of an event loop beside deadlines, so that a test can be the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable


class Turns(Protocol):
    """The scheduler of the local engine is one too."""

    def soon(self, call: Callable[[], None]) -> None:
        """At the end of this turn of the loop."""
        ...


class LoopTurns:
    """Those of the running event loop."""

    __slots__ = ("_loop",)

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)
