"""Time that passes only in sleeps."""

from __future__ import annotations

from collections.abc import Callable


class MovedClock:
    """`at_sleep` is called with the number of each sleep, from 1, when it is over."""

    def __init__(self, at_sleep: Callable[[int], None] = lambda _: None) -> None:
        self.now_s = 1_000.0
        self.slept_s: list[float] = []
        self._at_sleep = at_sleep

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
        self._at_sleep(len(self.slept_s))
