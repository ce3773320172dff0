"""A loop that a test turns by hand: same order every time, and it owns the clock."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from millstream.clock import ManualClock
from millstream.log.compaction import CompactionJob, CompactionResult, compact
from millstream.log.view_snapshot import SnapshotJob, SnapshotResult, take

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.engine.scheduler import Done
    from millstream.log.disk import Disk

T = TypeVar("T")


@dataclass(slots=True)
class _Timer:
    call: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass(slots=True)
class ManualScheduler:
    """Threads and children are calls in the queue, so a test can put anything between them."""

    disk: Disk
    clock: ManualClock = field(default_factory=ManualClock)
    _ready: deque[Callable[[], None]] = field(default_factory=deque)
    _timers: list[tuple[float, int, _Timer]] = field(default_factory=list)
    _order: count[int] = field(default_factory=count)

    def soon(self, call: Callable[[], None]) -> None:
        self._ready.append(call)

    def at_end(self, call: Callable[[], None]) -> None:
        # So that a test can put anything between them as well.
        self._ready.append(call)

    def later(self, seconds: float, call: Callable[[], None]) -> _Timer:
        timer = _Timer(call)
        at = self.clock.monotonic() + seconds
        heapq.heappush(self._timers, (at, next(self._order), timer))
        return timer

    def sync(self, work: Callable[[], None], done: Done[None]) -> None:
        self._work(work, done)

    def background(self, work: Callable[[], T], done: Done[T]) -> None:
        self._work(work, done)

    def compact(self, job: CompactionJob, done: Done[CompactionResult]) -> None:
        self._work(lambda: compact(self.disk, job), done)

    def snapshot_view(self, job: SnapshotJob, done: Done[SnapshotResult]) -> None:
        self._work(lambda: take(self.disk, job), done)

    def _work(self, work: Callable[[], T], done: Done[T]) -> None:
        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  what a thread would hand over
                self._ready.append(lambda error=error: done(None, error))  # type: ignore[misc]
            else:
                self._ready.append(lambda: done(result, None))

        self._ready.append(run)

    def turn(self) -> bool:
        """One call; False when there is none."""
        if not self._ready:
            return False
        self._ready.popleft()()
        return True

    def run(self) -> None:
        """Until nothing is left to do now."""
        while self.turn():
            pass

    def advance(self, seconds: float) -> None:
        """Move both clocks, and run the timers that come due, in order."""
        end = self.clock.monotonic() + seconds
        while self._timers and self._timers[0][0] <= end:
            at, _, timer = heapq.heappop(self._timers)
            self.clock.advance(max(0.0, at - self.clock.monotonic()))
            if not timer.is_cancelled:
                timer.call()
            self.run()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))
        self.run()
