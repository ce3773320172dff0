"""Deadlines on the monotonic clock: one wheel, turned by the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeAlias

from millstream.broker.wheel import TICK_S, Timer, Wheel

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.clock import Clock

    Later: TypeAlias = Callable[[float, Callable[[], None]], "Armed"]

# What deadlines may take of one turn of the loop.
TURN_S = 0.002
# A tick has to be over when the wheel is turned, also where a sum of fractions comes out less.
ROUNDING_S = 1e-6


class Armed(Protocol):
    def cancel(self) -> object: ...


class Timers:
    """Long polls, lease expiry, sessions: everything that has to happen after a while."""

    __slots__ = ("_armed", "_armed_s", "_clock", "_later", "_wheel")

    def __init__(self, clock: Clock, later: Later) -> None:
        """`later` is the loop's `call_later`."""
        self._clock = clock
        self._later = later
        self._wheel = Wheel(clock.monotonic())
        self._armed: Armed | None = None
        self._armed_s = 0.0

    def __len__(self) -> int:
        return len(self._wheel)

    def after(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Call after so many seconds: never earlier, at most a tick later."""
        timer = self._wheel.set(self._clock.monotonic() + seconds, call)
        if self._armed is None or timer.tick * TICK_S < self._armed_s:
            self._arm()
        return timer

    def cancel(self, timer: Timer) -> bool:
        return self._wheel.cancel(timer)

    def _arm(self) -> None:
        next_s = self._wheel.next_s()
        if next_s is None or (self._armed is not None and self._armed_s <= next_s):
            return
        if self._armed is not None:
            self._armed.cancel()
        self._armed_s = next_s
        delay = max(0.0, next_s - self._clock.monotonic()) + ROUNDING_S
        self._armed = self._later(delay, self._turn)

    def _turn(self) -> None:
        self._armed = None
        now = self._clock.monotonic()
        self._wheel.advance(now, lambda: self._clock.monotonic() - now > TURN_S)
        self._arm()
