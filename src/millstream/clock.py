"""Time as a parameter: the real one, and one that a test moves by hand."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """The two clocks. Deadlines use the monotonic one, timestamps and schedules the wall."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970; may jump."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's own clocks."""

    __slots__ = ()

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass(slots=True)
class ManualClock:
    """Stands still until it is told to move, so that a test owns time."""

    now_ms: int = 1_700_000_000_000
    now_monotonic: float = 1_000.0

    def wall_ms(self) -> int:
        return self.now_ms

    def monotonic(self) -> float:
        return self.now_monotonic

    def advance(self, seconds: float) -> None:
        """Both clocks, in step: what is left of a millisecond counts with the next advance."""
        before = self.now_monotonic
        self.now_monotonic += seconds
        self.now_ms += _whole_ms(self.now_monotonic) - _whole_ms(before)


def _whole_ms(seconds: float) -> int:
    # A sum of fractions may come out a little less than it is.
    return int(seconds * 1000 + 1e-4)
