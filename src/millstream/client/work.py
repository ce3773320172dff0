"""Work: leased messages as an async iterator, with their leases kept.

Messages are received ahead, as many as `prefetch` says. Whatever a worker holds, waiting here or in
the hands of its handler, is extended long before its lease runs out; so a slow handler loses
nothing, and a worker that dies loses its messages after one visibility timeout. What was taken and
dropped without a word is not kept: its lease runs out too.

When it is closed, what nobody has taken is released: others get it at once, and it does not count.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import NamedTuple, Self
from weakref import WeakSet

from millstream.client.leases import Helping, LeaseCalls, Leased, ReceiveOptions, Settler, extend_of
from millstream.errors import ClientClosed, MillstreamError
from millstream.wire.leases import Settle
from millstream.wire.retry import RetryPolicy

# How long the broker holds a receive while there is nothing.
WAIT_S = 20.0
# What one receive asks for, whatever there is room for: the broker's own limit by default.
RECEIVE_MAX = 1_000
# A lease is extended when no more than this part of it is left.
REST = 0.5
# How often leases are looked after, as a part of the shortest.
LOOK = 0.2
LOOK_S_MIN = 0.02
# However long a handler takes, one that hangs must not keep a record from others for ever.
HOLD_S_MAX = 12 * 3600.0
# How long giving back may take while everything ends.
CLOSE_S = 5.0


class WorkStatistics(NamedTuple):
    received: int
    buffered: int  # received and not yet taken
    held: int  # taken, and not yet settled
    extended: int
    lost: int  # leases that ran out in spite of it, or were taken away


class Work:
    """Made by `AsyncClient.work`. It begins with the first message that is asked for."""

    def __init__(
        self,
        calls: LeaseCalls,
        options: ReceiveOptions,
        *,
        prefetch: int,
        patience_s: float,
    ) -> None:
        self._calls = calls
        self._options = options
        self._prefetch = prefetch
        self._retry = RetryPolicy(timeout_s=patience_s)
        self.settler = Settler(calls, RetryPolicy(timeout_s=min(patience_s, 30.0)))
        self._buffer: deque[Leased] = deque()
        self._held: WeakSet[Leased] = WeakSet()
        # The shortest lease that was given; until one is, there is nothing to look after.
        self._visibility_s = 0.0
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._leased = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._is_ending = False
        self._is_closed = False
        self._received = self._extended = self._lost = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Leased:
        message = await self.take()
        if message is None:
            raise StopAsyncIteration
        return message

    async def take(self, timeout_s: float | None = None) -> Leased | None:
        """The next message; None when the time is up, or when it ends."""
        if not self._tasks and not self._is_ending:
            self._begin()
        if not self._buffer:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    while not (self._buffer or self._is_ending or self._error):
                        self._arrived.clear()
                        await self._arrived.wait()
            if self._error is not None and not self._buffer:
                raise self._error
        if not self._buffer or self._is_ending:
            return None
        message = self._buffer.popleft()
        if len(self._buffer) <= self._prefetch // 2:
            self._room.set()
        return message

    async def stop(self) -> None:
        """Take no more, and release what nobody has taken. Leases of what is in hand are kept."""
        if self._stopping is None:
            self._is_ending = True
            self._arrived.set()
            self._stopping = asyncio.ensure_future(self._give_back_unseen())
        # Whoever does not wait for the end of it leaves it to `close`, which does.
        await asyncio.shield(self._stopping)

    async def _give_back_unseen(self) -> None:
        for task in self._tasks[:1]:
            await _cancel(task)
        unseen, self._buffer = list(self._buffer), deque()
        await self.give_back(unseen)

    async def close(self) -> None:
        """The same, and have all that was settled said to the broker."""
        if self._is_closed:
            return
        self._is_closed = True
        # What cannot be said in time is learnt when leases run out.
        with suppress(TimeoutError, MillstreamError):
            async with asyncio.timeout(CLOSE_S):
                await self.stop()
                await self.settler.close()
        for task in (*self._tasks, self._stopping):
            if task is not None:
                await _cancel(task)
        self._held.clear()

    async def give_back(self, messages: list[Leased]) -> None:
        """Release what was not begun."""
        for message in messages:
            self.let_go(message)
        releases = [Settle("release", message.receipt) for message in messages]
        await asyncio.gather(*map(self.settler.settle, releases), return_exceptions=True)

    def __contains__(self, message: Leased) -> bool:
        """Whether its lease is looked after: it was neither settled nor lost."""
        return message in self._held

    def let_go(self, message: Leased) -> None:
        """It is being settled, and needs no lease any more."""
        self._held.discard(message)

    def statistics(self) -> WorkStatistics:
        buffered = len(self._buffer)
        return WorkStatistics(
            self._received, buffered, len(self._held) - buffered, self._extended, self._lost
        )

    # ---- beside the caller

    def _begin(self) -> None:
        if self._is_closed:
            raise ClientClosed("this work was closed; make another")
        loop = asyncio.get_running_loop()
        works = (self._receive_ahead(), self._keep_leases())
        self._tasks = [loop.create_task(self._watched(work)) for work in works]

    async def _watched(self, work: object) -> None:
        try:
            await work  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001  the caller is told, whatever it is
            self._error = error
            self._arrived.set()

    async def _receive_ahead(self) -> None:
        while True:
            room = self._prefetch - len(self._buffer)
            if room <= 0:
                self._room.clear()
                await self._room.wait()
                continue
            # Nothing here holds on to messages: one that the caller drops is to be noticed.
            self._take_in(
                await self._calls.receive(
                    self._options,
                    min(room, RECEIVE_MAX),
                    WAIT_S,
                    settler=self.settler,
                    keeper=self,
                    retry=self._retry,
                )
            )

    def _take_in(self, helping: Helping) -> None:
        if not helping.messages:
            return
        self._received += len(helping.messages)
        visibility_s = helping.visibility_ms / 1000
        if not self._visibility_s or visibility_s < self._visibility_s:
            self._visibility_s = visibility_s
            self._leased.set()
        self._held.update(helping.messages)
        self._buffer.extend(helping.messages)
        self._arrived.set()

    async def _keep_leases(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._visibility_s:
                await self._leased.wait()
            self._leased.clear()
            with suppress(TimeoutError):
                # A shorter lease than all before does not wait for the turn of those.
                async with asyncio.timeout(max(self._visibility_s * LOOK, LOOK_S_MIN)):
                    await self._leased.wait()
            await self._extend(self._due(loop.time()))

    def _due(self, now_s: float) -> list[Leased]:
        rest_s = self._visibility_s * REST
        return [
            message
            for message in self._held
            if message._until_s - now_s <= rest_s and now_s - message._since_s < HOLD_S_MAX
        ]

    async def _extend(self, due: list[Leased]) -> None:
        if not due:
            return
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        asked = [extend_of(message, self._options.visibility_s) for message in due]
        try:
            # Not in line behind settlings: those may wait for a slow disk.
            results = await self._calls.settle(asked, RetryPolicy(timeout_s=self._visibility_s))
        except MillstreamError:
            # In a moment again; the leases may still be there.
            return
        for message, result in zip(due, results, strict=True):
            if result.error is None:
                self._extended += 1
                message._until_s = asked_s + self._visibility_s
            elif message in self._held and not result.error.retriable:
                # Somebody else has it, or will: nobody should begin with it here.
                self._lost += 1
                self._held.discard(message)
                with suppress(ValueError):
                    self._buffer.remove(message)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
