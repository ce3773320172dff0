"""Requests that wait for something to come: how many there may be, and how they end.

A wait ends when what it waits for is there, when its time is up, when the client goes away, or
when the broker stops. In the last case the client gets an answer with nothing in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from millstream.engine.pending import Pending
from millstream.errors import Busy, MillstreamError, Stopping

# Long polls and streams together. Each takes a few kilobytes, beside its connection.
WAITS_MAX = 10_000


class Waiting(Protocol):
    @property
    def pending(self) -> Pending[bool]: ...

    def cancel(self) -> None:
        """`pending` is done with False."""
        ...


class Held(Protocol):
    @property
    def pending(self) -> Pending[Any]: ...

    def cancel(self) -> None:
        """`pending` is never done."""
        ...


class Lost(Protocol):
    """Who can go away."""

    on_lost: Callable[[], None] | None


class Waits:
    __slots__ = ("_ends", "_held", "is_draining", "limit")

    def __init__(self, limit: int = WAITS_MAX) -> None:
        self.limit = limit
        self.is_draining = False
        # What ends a wait early, in the order in which they began.
        self._ends: dict[Callable[[], None], None] = {}
        self._held: dict[Held, None] = {}

    def __len__(self) -> int:
        return len(self._ends) + len(self._held)

    def until(self, call: Lost, waiting: Waiting) -> Pending[bool]:
        """Whether something came. It never completes when the client goes away."""
        outcome: Pending[bool] = Pending()
        end = waiting.cancel
        is_lost = False

        def lost() -> None:
            nonlocal is_lost
            is_lost = True
            waiting.cancel()

        def came(found: Pending[bool]) -> None:
            self.leave(end)
            call.on_lost = None
            if is_lost:
                return
            if found.error is not None:
                outcome.fail(found.error)
            else:
                outcome.succeed(found.result())

        try:
            self.enter(end)
        except MillstreamError as error:
            waiting.cancel()
            return Pending.of(False) if isinstance(error, Stopping) else Pending.failed(error)
        call.on_lost = lost
        waiting.pending.then(came)
        return outcome

    def hold(self, call: Lost, waiting: Held) -> None:
        """For a wait that the broker answers by itself when it stops."""

        def lost() -> None:
            self._held.pop(waiting, None)
            waiting.cancel()

        def came(_: object) -> None:
            self._held.pop(waiting, None)
            call.on_lost = None

        self._held[waiting] = None
        call.on_lost = lost
        waiting.pending.then(came)

    def enter(self, end: Callable[[], None]) -> None:
        """Something waits until `leave`; `end` is called when the broker stops."""
        if self.is_draining:
            raise Stopping("the broker stops; try another, or later")
        self.check_room()
        self._ends[end] = None

    def leave(self, end: Callable[[], None]) -> None:
        self._ends.pop(end, None)

    def check_room(self) -> None:
        if len(self) >= self.limit:
            raise Busy(
                f"{self.limit} requests wait for messages already; try again in a while, or "
                "without a timeout",
                limit=self.limit,
            )

    def drain(self) -> None:
        """The broker stops: all that wait are answered, and nobody waits any more."""
        self.is_draining = True
        for end in list(self._ends):
            end()
