"""Many small steps on the loop, without anybody waiting for all of them.

What is done for each of a thousand partitions takes tens of milliseconds together. So it is done
in slices: one ends with the step that reaches its end, and the rest has another turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from millstream.clock import Clock
    from millstream.engine.scheduler import Scheduler

# How long one slice takes, without its last step.
SLICE_S = 0.002


class Slices:
    __slots__ = ("_clock", "_scheduler", "_seconds")

    def __init__(self, clock: Clock, scheduler: Scheduler, seconds: float = SLICE_S) -> None:
        """With 0 seconds every step is a slice of its own."""
        self._clock = clock
        self._scheduler = scheduler
        self._seconds = seconds

    def run(
        self,
        steps: Iterator[None],
        done: Callable[[], None],
        turn: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:
        """Take all steps, then call `done`. `turn` says when a slice may be had; without it, each
        is a call of its own on the loop."""
        ask = turn or self._scheduler.soon

        def have_slice() -> None:
            end = self._clock.monotonic() + self._seconds
            for _ in steps:
                if self._clock.monotonic() >= end:
                    ask(have_slice)
                    return
            done()

        ask(have_slice)
