"""The blocking face: `Client` has what `AsyncClient` has, for programs without an event loop.

An event loop runs in a thread of its own; each call is handed over and waited for. Only the
producer does more: it hands over many records at a time, so that a record costs no switch of
threads.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import (
    Literal,
    Self,
    Unpack,
)
from weakref import WeakSet

from millstream.client.blocking_producer import BlockingProducer
from millstream.client.blocking_work import BlockingLeased, BlockingWork
from millstream.client.client import AsyncClient, Compression
from millstream.client.consumer import Consumer, ConsumerStatistics
from millstream.client.dead_letters import DeadLetter, DeadLetters, GoneRun, LetterFilter
from millstream.client.groups import GroupDeliveries, Groups, Lease
from millstream.client.leases import LeaseStart, Settled
from millstream.client.membership import Assignor, OffsetReset, TopicPartition
from millstream.client.queues import Message, Queues
from millstream.client.reading import Start
from millstream.client.schedules import Schedules
from millstream.client.stream import TopicStream
from millstream.client.threads import LoopThread, blocking, iterate, next_of
from millstream.client.topics import Acks, Topics
from millstream.client.values import Received
from millstream.client.worker import WorkerStatistics
from millstream.client.writers import Writers
from millstream.errors import ClientClosed


class BlockingQueues:
    """As `AsyncClient.queues`."""

    def __init__(self, thread: LoopThread, inner: Queues) -> None:
        self.thread = thread
        self.inner = inner

    enqueue = blocking(Queues.enqueue)
    enqueue_bytes = blocking(Queues.enqueue_bytes)
    enqueue_batch = blocking(Queues.enqueue_batch)
    dequeue = blocking(Queues.dequeue)
    dequeue_batch = blocking(Queues.dequeue_batch)
    create = blocking(Queues.create)
    describe = blocking(Queues.describe)
    clear = blocking(Queues.clear)
    delete = blocking(Queues.delete)
    persist = blocking(Queues.persist)
    load = blocking(Queues.load)
    list = blocking(Queues.list)

    def stream(self, name: str) -> Iterator[Message]:
        """Messages as they come, until the caller stops."""
        return iterate(self.thread, self.inner.stream(name))


class BlockingTopics:
    """As `AsyncClient.topics`."""

    def __init__(self, thread: LoopThread, inner: Topics) -> None:
        self.thread = thread
        self.inner = inner

    create = blocking(Topics.create)
    describe = blocking(Topics.describe)
    alter = blocking(Topics.alter)
    add_partitions = blocking(Topics.add_partitions)
    delete = blocking(Topics.delete)
    purge = blocking(Topics.purge)
    offsets = blocking(Topics.offsets)
    publish = blocking(Topics.publish)
    publish_many = blocking(Topics.publish_many)
    list = blocking(Topics.list)


class BlockingGroups:
    """As `AsyncClient.groups`."""

    def __init__(self, thread: LoopThread, inner: Groups) -> None:
        self.thread = thread
        self.inner = inner

    describe = blocking(Groups.describe)
    alter = blocking(Groups.alter)
    delete = blocking(Groups.delete)
    offsets = blocking(Groups.offsets)
    lag = blocking(Groups.lag)
    reset = blocking(Groups.reset)
    list = blocking(Groups.list)

    def leases(self, name: str, *, topic: str | None = None) -> Iterator[Lease]:
        """Records that members of a group have, or that wait to come back, by place."""
        return iterate(self.thread, self.inner.leases(name, topic=topic))

    def deliveries(self) -> Iterator[GroupDeliveries]:
        """Of each group that receives by lease, how its deliveries ended."""
        return iterate(self.thread, self.inner.deliveries())


class BlockingSchedules:
    """As `AsyncClient.schedules`."""

    def __init__(self, thread: LoopThread, inner: Schedules) -> None:
        self.thread = thread
        self.inner = inner

    count = blocking(Schedules.count)
    pending = blocking(Schedules.pending)
    find = blocking(Schedules.find)
    cancel = blocking(Schedules.cancel)
    put = blocking(Schedules.put)
    get = blocking(Schedules.get)
    delete = blocking(Schedules.delete)
    list = blocking(Schedules.list)


class BlockingWriters:
    """As `AsyncClient.writers`."""

    def __init__(self, thread: LoopThread, inner: Writers) -> None:
        self.thread = thread
        self.inner = inner

    stage = blocking(Writers.stage)
    commit = blocking(Writers.commit)
    abort = blocking(Writers.abort)
    get = blocking(Writers.get)
    forget = blocking(Writers.forget)
    list = blocking(Writers.list)


class BlockingDeadLetters:
    """As `AsyncClient.dead_letters`."""

    def __init__(self, thread: LoopThread, inner: DeadLetters) -> None:
        self.thread = thread
        self.inner = inner

    counts = blocking(DeadLetters.counts)
    count = blocking(DeadLetters.count)
    get = blocking(DeadLetters.get)
    delete = blocking(DeadLetters.delete)
    purge = blocking(DeadLetters.purge)
    redrive = blocking(DeadLetters.redrive)
    redrive_facts = blocking(DeadLetters.redrive_facts)
    wait = blocking(DeadLetters.wait)
    cancel = blocking(DeadLetters.cancel)
    redrives = blocking(DeadLetters.redrives)

    def read(self, topic: str, **wanted: Unpack[LetterFilter]) -> Iterator[DeadLetter]:
        """Those that a filter means, by partition and offset."""
        return iterate(self.thread, self.inner.read(topic, **wanted))

    def gone(self, topic: str) -> Iterator[GoneRun]:
        """What to leave out when the topic of dead letters itself is read."""
        return iterate(self.thread, self.inner.gone(topic))


class BlockingConsumer:
    """As `Consumer`: a context manager, and an iterator of records."""

    def __init__(self, thread: LoopThread, inner: Consumer) -> None:
        self.thread = thread
        self.inner = inner

    take = blocking(Consumer.take)
    commit = blocking(Consumer.commit)
    close = blocking(Consumer.close)

    def __enter__(self) -> Self:
        self.thread.run(self.inner.__aenter__())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.thread.run(self.inner.close(is_done=kind is None))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Received:
        return next_of(self.thread, self.inner)

    @property
    def assignment(self) -> frozenset[TopicPartition]:
        return self.inner.assignment

    def statistics(self) -> ConsumerStatistics:
        return self.inner.statistics()


class BlockingStream:
    """As `TopicStream`."""

    def __init__(self, thread: LoopThread, inner: TopicStream) -> None:
        self.thread = thread
        self.inner = inner

    open = blocking(TopicStream.open)
    publish = blocking(TopicStream.publish)
    ack = blocking(TopicStream.ack)

    def __enter__(self) -> Self:
        self.thread.run(self.inner.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.run(self.inner.close())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Received:
        return next_of(self.thread, self.inner)


class Client:
    """A broker, as a context manager. See `AsyncClient`, which has the same methods."""

    def __init__(
        self,
        server: str | None = None,
        *,
        retry_s: float = 30.0,
        answer_s: float = 30.0,
        connections_max: int = 32,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.inner = AsyncClient(
            server,
            retry_s=retry_s,
            answer_s=answer_s,
            connections_max=connections_max,
            tls=tls,
        )
        self.thread = LoopThread()
        self.queues = BlockingQueues(self.thread, self.inner.queues)
        self.topics = BlockingTopics(self.thread, self.inner.topics)
        self.groups = BlockingGroups(self.thread, self.inner.groups)
        self.dead_letters = BlockingDeadLetters(self.thread, self.inner.dead_letters)
        self.schedules = BlockingSchedules(self.thread, self.inner.schedules)
        self.writers = BlockingWriters(self.thread, self.inner.writers)

        self._producers: WeakSet[BlockingProducer] = WeakSet()

    publish = blocking(AsyncClient.publish)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Deliver what producers have, leave groups, and end all connections and the thread."""
        with suppress(ClientClosed):
            for producer in list(self._producers):
                producer.close()
            self.thread.run(self.inner.close())
        self.thread.stop()

    @property
    def server(self) -> str:
        return self.inner.server

    def producer(
        self,
        *,
        batch_records: int = 100,
        batch_bytes: int = 64 * 1024,
        linger_ms: float = 5.0,
        buffer_bytes: int = 32 * 2**20,
        delivery_timeout_s: float = 120.0,
        acks: Acks = "all",
        compression: Compression = "none",
    ) -> BlockingProducer:
        """Many records in few requests; each with a report. `with` delivers all of them."""
        producer = self.inner.producer(
            batch_records=batch_records,
            batch_bytes=batch_bytes,
            linger_ms=linger_ms,
            buffer_bytes=buffer_bytes,
            delivery_timeout_s=delivery_timeout_s,
            acks=acks,
            compression=compression,
        )
        face = BlockingProducer(self.thread, producer)
        self._producers.add(face)
        return face

    def consumer(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        commit: Literal["auto", "manual"] = "auto",
        commit_interval_s: float = 5.0,
        auto_offset_reset: OffsetReset | None = None,
        assignor: Assignor | None = None,
        client_id: str = "python",
        instance_id: str | None = None,
        session_timeout_ms: int | None = None,
        poll_records: int = 500,
        buffer_records: int = 1000,
        patience_s: float = math.inf,
    ) -> BlockingConsumer:
        """A member of a group. `with` joins and leaves; `for` gives the records."""
        consumer = self.inner.consumer(
            topics,
            group=group,
            commit=commit,
            commit_interval_s=commit_interval_s,
            auto_offset_reset=auto_offset_reset,
            assignor=assignor,
            client_id=client_id,
            instance_id=instance_id,
            session_timeout_ms=session_timeout_ms,
            poll_records=poll_records,
            buffer_records=buffer_records,
            patience_s=patience_s,
        )
        return BlockingConsumer(self.thread, consumer)

    def read(
        self,
        topic: str,
        *,
        partition: int | None = None,
        offset: Start = "earliest",
        time_ms: int | None = None,
        last: int | None = None,
        follow: bool = False,
        patience_s: float = 30.0,
    ) -> Iterator[Received]:
        """Records of a topic, from an offset or a time on."""
        chunks = self.inner.read_chunks(
            topic,
            partition=partition,
            offset=offset,
            time_ms=time_ms,
            last=last,
            follow=follow,
            patience_s=patience_s,
        )
        for chunk in iterate(self.thread, chunks):
            yield from chunk

    # ---- work queues

    def receive(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        count: int = 1,
        wait_s: float = 0.0,
        visibility_s: float | None = None,
        member: str | None = None,
        start: LeaseStart | None = None,
    ) -> list[BlockingLeased]:
        """Up to so many records, leased; settle each before its lease runs out."""
        found = self.thread.run(
            self.inner.receive(
                topics,
                group=group,
                count=count,
                wait_s=wait_s,
                visibility_s=visibility_s,
                member=member,
                start=start,
            )
        )
        return [BlockingLeased(self.thread, one) for one in found]

    def ack(self, messages: BlockingLeased | str | Iterable[BlockingLeased | str]) -> list[Settled]:
        """Done: many in one request, by message or by receipt, each with its result."""
        ones = (messages,) if isinstance(messages, BlockingLeased | str) else messages
        plain = [one if isinstance(one, str) else one.inner for one in ones]
        return self.thread.run(self.inner.ack(plain))

    settle = blocking(AsyncClient.settle)

    def work(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        prefetch: int = 10,
        visibility_s: float | None = None,
        member: str | None = None,
        start: LeaseStart | None = None,
        patience_s: float = math.inf,
    ) -> BlockingWork:
        """Leased messages as they come, for `for`; settle each by its own methods."""
        work = self.inner.work(
            topics,
            group=group,
            prefetch=prefetch,
            visibility_s=visibility_s,
            member=member,
            start=start,
            patience_s=patience_s,
        )
        return BlockingWork(self.thread, work)

    def worker(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        concurrency: int = 1,
        prefetch: int | None = None,
        visibility_s: float | None = None,
        member: str | None = None,
        start: LeaseStart | None = None,
        grace_s: float = 10.0,
        patience_s: float = math.inf,
    ) -> Callable[[Callable[[BlockingLeased], object]], Callable[[BlockingLeased], object]]:
        """Decorates a function that handles a message, in a thread: `run_workers` runs it."""
        register = self.inner.worker(
            topics,
            group=group,
            concurrency=concurrency,
            prefetch=prefetch,
            visibility_s=visibility_s,
            member=member,
            start=start,
            grace_s=grace_s,
            patience_s=patience_s,
        )

        def decorate(
            handler: Callable[[BlockingLeased], object],
        ) -> Callable[[BlockingLeased], object]:
            register(lambda message: handler(BlockingLeased(self.thread, message)))
            return handler

        return decorate

    def run_workers(self) -> None:
        """Until `stop_workers`, which any thread may call, or Ctrl-C: then handlers that run are
        given their time first."""
        running = asyncio.run_coroutine_threadsafe(self.inner.run_workers(), self.thread.loop)
        try:
            running.result()
        except KeyboardInterrupt:
            self.stop_workers()
            running.result()
            raise

    def stop_workers(self) -> None:
        self.thread.loop.call_soon_threadsafe(self.inner.stop_workers)

    def worker_statistics(self) -> list[WorkerStatistics]:
        return self.inner.worker_statistics()

    def stream(self, topic: str) -> BlockingStream:
        """A topic over one WebSocket: publish, read in order, acknowledge."""
        return BlockingStream(self.thread, self.inner.stream(topic))
