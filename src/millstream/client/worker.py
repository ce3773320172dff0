"""Workers: functions that handle leased messages, and what runs them.

A handler that returns has its message acked. One that raises has it nacked, with what it raised as
the error text; `Reject` sends it to the dead letters, `Retry` says when it is to come again, and
`Release` gives it back uncounted. Leases are kept while a handler runs, however long it takes.

When workers stop they take no more, release what waits, and give handlers that run a while to end.
What is not done then is cancelled and released. A handler that is a plain function runs in a
thread; a thread cannot be cancelled, so its message is released and its result ignored.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias, TypeVar

from millstream.client.leases import Leased, Settled, nack_of
from millstream.client.work import Work
from millstream.errors import ParameterInvalid
from millstream.wire.leases import Settle

Handler: TypeAlias = Callable[[Leased], Awaitable[object]] | Callable[[Leased], object]
H = TypeVar("H", bound=Callable[[Leased], Any])

# What the broker keeps of an error text.
ERROR_TEXT_MAX = 1_000


class Reject(Exception):
    """This message can never be handled: to the dead letters with it, and why."""


class Retry(Exception):
    """Not now: the message comes again after `delay_s`, or after the topic's backoff. It counts."""

    def __init__(self, error: str = "", *, delay_s: float | None = None) -> None:
        super().__init__(error)
        self.delay_s = delay_s


class Release(Exception):
    """Not here: the message comes again at once, to whoever asks. It does not count."""


class WorkerStatistics(NamedTuple):
    """What became of messages. `refused` are those whose lease was gone when they were settled, or
    whose settling did not get to the broker."""

    acked: int
    nacked: int
    rejected: int
    released: int
    refused: int
    running: int


class Worker:
    """A handler at work, several messages at a time. Made by `AsyncClient.worker`."""

    def __init__(
        self,
        make_work: Callable[[int], Work],
        handler: Handler,
        *,
        concurrency: int,
        prefetch: int | None,
        grace_s: float,
    ) -> None:
        if concurrency < 1:
            raise ParameterInvalid(
                f"concurrency is {concurrency}; it must be at least 1", parameter="concurrency"
            )
        self._handler = handler
        self._concurrency = concurrency
        self._work = make_work(concurrency if prefetch is None else prefetch)
        self._grace_s = grace_s
        self._threads: ThreadPoolExecutor | None = None
        if not _is_async(handler):
            self._threads = ThreadPoolExecutor(concurrency, "millstream-worker")
        self._stopping = asyncio.Event()
        self._running = 0
        # Settlings that nobody waits for.
        self._settling: set[asyncio.Future[Settled]] = set()
        self._counts = dict.fromkeys(("ack", "nack", "reject", "release"), 0)
        self._refused = 0

    def stop(self) -> None:
        """Take no more; `run` ends when what is under way is done, or was given back."""
        self._stopping.set()

    async def run(self) -> None:
        """Until `stop`, or until what the broker refuses for good is raised."""
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._serve()) for _ in range(self._concurrency)]
        stopping = loop.create_task(self._stopping.wait())
        try:
            await asyncio.wait((*tasks, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await asyncio.shield(self._wind_up(tasks))
        for task in tasks:
            if not task.cancelled():
                task.result()

    def statistics(self) -> WorkerStatistics:
        counts = self._counts
        return WorkerStatistics(
            counts["ack"],
            counts["nack"],
            counts["reject"],
            counts["release"],
            self._refused,
            self._running,
        )

    # ---- one message

    async def _serve(self) -> None:
        while (message := await self._work.take()) is not None:
            self._running += 1
            try:
                await self._handle(message)
            finally:
                self._running -= 1

    async def _handle(self, message: Leased) -> None:
        try:
            if self._threads is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._threads, self._handler, message)
            else:
                await self._handler(message)  # type: ignore[misc]
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                # Something of the handler's own was cancelled, not this.
                self._settle(message, nack_of(message, "CancelledError", None))
                return
            self._settle(message, Settle("release", message.receipt))
            raise
        except Release:
            self._settle(message, Settle("release", message.receipt))
        except Reject as error:
            self._settle(message, Settle("reject", message.receipt, error=_text(error)))
        except Retry as error:
            self._settle(message, nack_of(message, _text(error), error.delay_s))
        except Exception as error:  # noqa: BLE001  whatever a handler raises is its message's
            what = f"{type(error).__name__}: {_text(error)}"[:ERROR_TEXT_MAX]
            self._settle(message, nack_of(message, what, None))
        else:
            self._settle(message, Settle("ack", message.receipt))

    def _settle(self, message: Leased, settle: Settle) -> None:
        """Said together with what others say; the next message does not wait for it."""
        if message not in self._work:
            # The handler settled it by itself, or the lease was lost.
            return
        self._work.let_go(message)
        self._counts[settle.kind] += 1
        future = self._work.settler.settle(settle)
        self._settling.add(future)
        future.add_done_callback(self._settled)

    def _settled(self, future: asyncio.Future[Settled]) -> None:
        self._settling.discard(future)
        if (
            future.cancelled()
            or future.exception() is not None
            or future.result().error is not None
        ):
            self._refused += 1

    # ---- the end

    async def _wind_up(self, tasks: list[asyncio.Task[None]]) -> None:
        # Giving back needs the broker, which may be away: handlers have their time meanwhile.
        giving_back = asyncio.ensure_future(self._work.stop())
        _, left = await asyncio.wait(tasks, timeout=self._grace_s)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        await self._work.close()
        for future in self._settling:
            # There was no time to say it.
            future.cancel()
        await asyncio.gather(giving_back, return_exceptions=True)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


class Workers:
    """All of a client, run together."""

    def __init__(self) -> None:
        self._makers: list[Callable[[], Worker]] = []
        self._running: list[Worker] = []

    def add(self, make: Callable[[], Worker]) -> None:
        self._makers.append(make)

    async def run(self) -> None:
        if not self._makers:
            raise ParameterInvalid(
                "there is no worker: decorate a function with `client.worker`", parameter="worker"
            )
        self._running = [make() for make in self._makers]
        tasks = [asyncio.ensure_future(one.run()) for one in self._running]
        try:
            # One that fails ends the others in order, and is raised.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            task.result()

    def stop(self) -> None:
        for worker in self._running:
            worker.stop()

    def statistics(self) -> list[WorkerStatistics]:
        return [worker.statistics() for worker in self._running]


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004  an object with such a method is one too
    )


def _text(error: Exception) -> str:
    return str(error)[:ERROR_TEXT_MAX]
