"""A loop and its threads in an order that a seed decides, so that a race is a seed, too.

`ChancyScheduler` picks what runs next: the loop's next call, the next sync, or any job in the
background. `ChancyDisk` lets others run before each of its operations: the loop and other threads
go on in the middle of a job, and jobs in the middle of what the loop does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, TypeVar

from engine.manual import ManualScheduler
from faults.simulated_disk import SimulatedDisk
from millstream.log.compaction import CompactionJob, CompactionResult, compact

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from millstream.engine.scheduler import Cancel, Done
    from millstream.log.disk import Access

T = TypeVar("T")

# How often an operation of the disk lets others run, and how deep that may go.
BREATHE_SHARE = 0.12
DEPTH_MAX = 3


class ChancyDisk(SimulatedDisk):
    def __init__(self) -> None:
        super().__init__()
        self.breathe: Callable[[], None] = lambda: None

    def open(self, path: str, access: Access) -> int:
        self.breathe()
        return super().open(path, access)

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        self.breathe()
        return super().write(file, buffers, position)

    def sync(self, file: int) -> None:
        self.breathe()
        super().sync(file)
        self.breathe()

    def rename(self, source: str, target: str) -> None:
        self.breathe()
        super().rename(source, target)

    def unlink(self, path: str) -> None:
        self.breathe()
        super().unlink(path)

    def sync_directory(self, path: str) -> None:
        self.breathe()
        super().sync_directory(path)


@dataclass(slots=True)
class ChancyScheduler(ManualScheduler):
    random: Random = field(default_factory=Random)
    # What went wrong in a call that ran inside another: it must not pass for an error of that.
    trouble: BaseException | None = None
    _syncs: deque[Callable[[], None]] = field(default_factory=deque)
    _threads: list[Callable[[], None]] = field(default_factory=list)
    _is_looping: bool = False
    _is_syncing: bool = False
    _depth: int = 0

    def later(self, seconds: float, call: Callable[[], None]) -> Cancel:  # type: ignore[override]
        return super(ChancyScheduler, self).later(seconds, lambda: self.soon(call))

    def sync(self, work: Callable[[], None], done: Done[None]) -> None:
        self._syncs.append(self._job(work, done))

    def background(self, work: Callable[[], T], done: Done[T]) -> None:
        self._threads.append(self._job(work, done))

    def compact(self, job: CompactionJob, done: Done[CompactionResult]) -> None:
        self._threads.append(self._job(lambda: compact(self.disk, job), done))

    def _job(self, work: Callable[[], T], done: Done[T]) -> Callable[[], None]:
        def run() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001  what a thread would hand over
                self._ready.append(lambda error=error: done(None, error))  # type: ignore[misc]
            else:
                self._ready.append(lambda: done(result, None))

        return run

    def turn(self) -> bool:
        """Let one of those that can run do so; False when there is none."""
        if self.trouble is not None:
            raise self.trouble
        can_loop = bool(self._ready) and not self._is_looping
        can_sync = bool(self._syncs) and not self._is_syncing
        among = can_loop + can_sync + len(self._threads)
        if not among:
            return False
        chosen = self.random.randrange(among)
        if chosen < len(self._threads):
            self._threads.pop(chosen)()
        elif can_sync and chosen == len(self._threads):
            self._is_syncing = True
            self._syncs.popleft()()
            self._is_syncing = False
        else:
            self._is_looping = True
            self._ready.popleft()()
            self._is_looping = False
        return True

    def breathe(self) -> None:
        if self._depth >= DEPTH_MAX or self.random.random() >= BREATHE_SHARE:
            return
        self._depth += 1
        try:
            for _ in range(self.random.randint(1, 3)):
                self.turn()
        except BaseException as trouble:
            self.trouble = trouble
            raise
        finally:
            self._depth -= 1
