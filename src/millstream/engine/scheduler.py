"""What the local engine needs of an event loop, so that a test can be the loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from millstream.errors import StorageFailed
from millstream.log.compaction import CompactionJob, CompactionResult

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


class Scheduler(Protocol):
    """`done` is always called on the loop, with a result or an error."""

    def soon(self, call: Callable[[], None]) -> None:
        """At the end of this turn."""
        ...

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

    __slots__ = ("_background", "_children", "_loop", "_sync")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sync = SyncThread(loop)
        self._background = ThreadPoolExecutor(BACKGROUND_THREADS, "millstream-disk")
        self._children: set[asyncio.Task[None]] = set()

    def soon(self, call: Callable[[], None]) -> None:
        self._loop.call_soon(call)

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
        task = self._loop.create_task(self._compact(job, done))
        self._children.add(task)
        task.add_done_callback(self._children.discard)

    async def _compact(self, job: CompactionJob, done: Done[CompactionResult]) -> None:
        try:
            result = await self._run_child(job)
        except (OSError, msgspec.MsgspecError, StorageFailed) as error:
            done(None, error)
        else:
            done(result, None)

    async def _run_child(self, job: CompactionJob) -> CompactionResult:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "millstream.log.compaction",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            # Left open: when this process is killed it closes, and the child ends too.
            child.stdin.write(msgspec.json.encode(job) + b"\n")
            output, errors = await asyncio.gather(child.stdout.read(), child.stderr.read())
            await child.wait()
        except asyncio.CancelledError:
            child.kill()
            await child.wait()
            raise
        finally:
            child.stdin.close()
        if child.returncode:
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            raise StorageFailed(f"compaction ended with {child.returncode}: {last}")
        return msgspec.json.decode(output, type=CompactionResult)

    async def close(self) -> None:
        """End child processes and threads; a job in a thread is waited for."""
        for task in self._children:
            task.cancel()
        await asyncio.gather(*self._children, return_exceptions=True)
        for shutdown in (self._sync.shutdown, self._background.shutdown):
            await self._loop.run_in_executor(None, shutdown)
