"""What the local engine needs of an event loop, so that a test can be the loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar

from millstream.engine.child import Children
from millstream.engine.turns import LoopTurns, Turns
from millstream.log.compaction import CompactionJob, CompactionResult
from millstream.log.view_snapshot import SnapshotJob, SnapshotResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

T = TypeVar("T")
if TYPE_CHECKING:
    Done: TypeAlias = Callable[[T | None, BaseException | None], None]

# Threads for cold reads, seals and checkpoints: each waits for the disk, so a few are enough.
BACKGROUND_THREADS = 4


class Cancel(Protocol):
    def cancel(self) -> object: ...


class Scheduler(Turns, Protocol):
    """`done` is always called on the loop, with a result or an error."""

    def later(self, seconds: float, call: Callable[[], None]) -> Cancel: ...

    def sync(self, work: Callable[[], None], done: Done[None]) -> None:
        """In the one thread that syncs for rounds of appends."""
        ...

    def background(self, work: Callable[[], T], done: Done[T]) -> None:
        """In some other thread."""
        ...

    def compact(self, job: CompactionJob, done: Done[CompactionResult]) -> None:
        """In a child process."""
        ...

    def snapshot_view(self, job: SnapshotJob, done: Done[SnapshotResult]) -> None:
        """In a child process."""
        ...


class SyncThread:
    """One thread and one queue: handing a sync over and back takes half of what a pool does."""

    __slots__ = ("_loop", "_queue", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: SimpleQueue[tuple[Callable[[], None], Done[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="millstream-sync", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], None], done: Done[None]) -> None:
        self._queue.put((work, done))

    def shutdown(self) -> None:
        """Waits for what was submitted."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            work, done = job
            try:
                work()
            except BaseException as error:  # noqa: BLE001  handed to the loop, which decides
                self._loop.call_soon_threadsafe(done, None, error)
            else:
                self._loop.call_soon_threadsafe(done, None, None)


class LoopScheduler:
    """The running event loop, threads beside it, and child processes."""

    __slots__ = ("_background", "_children", "_loop", "_sync", "at_end", "soon")

    def __init__(self, loop: asyncio.AbstractEventLoop, turns: LoopTurns | None = None) -> None:
        """With the turns of who gathers for the engine, its work is done at the end of them."""
        self._loop = loop
        turns = turns or LoopTurns(loop)
        self.soon, self.at_end = turns.soon, turns.at_end
        self._sync = SyncThread(loop)
        self._background = ThreadPoolExecutor(BACKGROUND_THREADS, "millstream-disk")
        self._children = Children(loop)

    def later(self, seconds: float, call: Callable[[], None]) -> Cancel:
        return self._loop.call_later(seconds, call)

    def sync(self, work: Callable[[], None], done: Done[None]) -> None:
        self._sync.submit(work, done)

    def background(self, work: Callable[[], T], done: Done[T]) -> None:
        self._run(self._background, work, done)

    def _run(self, pool: ThreadPoolExecutor, work: Callable[[], T], done: Done[T]) -> None:
        loop = self._loop

        def in_thread() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001  handed to the loop, which decides
                loop.call_soon_threadsafe(done, None, error)
            else:
                loop.call_soon_threadsafe(done, result, None)

        pool.submit(in_thread)

    def compact(self, job: CompactionJob, done: Done[CompactionResult]) -> None:
        self._children.run("millstream.log.compaction", job, CompactionResult, done)

    def snapshot_view(self, job: SnapshotJob, done: Done[SnapshotResult]) -> None:
        self._children.run("millstream.log.view_snapshot", job, SnapshotResult, done)

    async def close(self) -> None:
        """End child processes and threads; a job in a thread is waited for."""
        await self._children.close()
        for shutdown in (self._sync.shutdown, self._background.shutdown):
            await self._loop.run_in_executor(None, shutdown)
