"""The asyncio client: one object for a broker, and everything else made from it."""

from __future__ import annotations

import math
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Literal, Self, TypeAlias
from weakref import WeakSet

from millstream.client.consumer import Consumer
from millstream.client.dead_letters import DeadLetters
from millstream.client.groups import Groups
from millstream.client.leases import (
    LeaseCalls,
    Leased,
    LeaseStart,
    ReceiveOptions,
    Settled,
    receipts_of,
)
from millstream.client.membership import Assignor, JoinOptions, OffsetReset
from millstream.client.producer import Producer
from millstream.client.queues import Queues
from millstream.client.reading import ReadOptions, Start, read, read_chunks
from millstream.client.schedules import Schedules
from millstream.client.stream import TopicStream
from millstream.client.topics import Acks, Topics
from millstream.client.transport import Transport
from millstream.client.values import Delay, HeaderMap, Key, Place, Received, Value, When
from millstream.client.work import RECEIVE_MAX, Work
from millstream.client.worker import H, Worker, Workers, WorkerStatistics
from millstream.client.writers import Writers
from millstream.errors import ParameterInvalid
from millstream.wire.leases import Settle
from millstream.wire.places import server_of
from millstream.wire.retry import RetryPolicy

Compression: TypeAlias = Literal["none", "gzip", "snappy", "lz4", "zstd"]


class AsyncClient:
    """A broker, as a context manager. What was made from it is closed with it.

    `retry_s` is how long a call goes on trying while the broker is away, busy or restarting;
    `answer_s` how long one try waits for its answer.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        retry_s: float = 30.0,
        answer_s: float = 30.0,
        connections_max: int = 32,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._transport = Transport(
            server_of(server, os.environ),
            connections_max=connections_max,
            retry=RetryPolicy(timeout_s=retry_s),
            answer_s=answer_s,
            tls=tls,
        )
        self.queues = Queues(self._transport)
        self.topics = Topics(self._transport)
        self.groups = Groups(self._transport)
        self.dead_letters = DeadLetters(self._transport)
        self._leases = LeaseCalls(self._transport)
        self._workers = Workers()
        self.schedules = Schedules(self._transport)
        self.writers = Writers(self._transport)
        # Those that nobody holds any more have nothing to close.
        self._made: WeakSet[Producer | Consumer | Work] = WeakSet()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Deliver what producers have, leave groups, and end all connections."""
        for made in list(self._made):
            await made.close()
        await self._transport.close()

    @property
    def server(self) -> str:
        return self._transport.place.url

    async def publish(
        self,
        topic: str,
        value: Value,
        *,
        key: Key = None,
        headers: HeaderMap | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        lane: str | int | None = None,
        delay: Delay | None = None,
        deliver_at: When | None = None,
        acks: Acks = "all",
        idempotency_key: str | None = None,
    ) -> Place:
        """Store one record, once, and answer where. For many, use a producer."""
        return await self.topics.publish(
            topic,
            value,
            key=key,
            headers=headers,
            timestamp_ms=timestamp_ms,
            partition=partition,
            lane=lane,
            delay=delay,
            deliver_at=deliver_at,
            acks=acks,
            idempotency_key=idempotency_key,
        )

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
    ) -> Producer:
        """Many records in few requests; each with a report. `async with` delivers all of them."""
        producer = Producer(
            self._transport,
            batch_records=batch_records,
            batch_bytes=batch_bytes,
            linger_ms=linger_ms,
            buffer_bytes=buffer_bytes,
            delivery_timeout_s=delivery_timeout_s,
            acks=acks,
            compression=compression,
        )
        self._made.add(producer)
        return producer

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
    ) -> Consumer:
        """A member of a group. `async with` joins and leaves; `async for` gives the records.

        `patience_s` is how long a broker that is away is waited for, each time.
        """
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        options = JoinOptions(
            topics=names,
            client_id=client_id,
            instance_id=instance_id,
            assignor=assignor,
            session_timeout_ms=session_timeout_ms,
            auto_offset_reset=auto_offset_reset,
        )
        consumer = Consumer(
            self._transport,
            group,
            options,
            commit=commit,
            commit_interval_s=commit_interval_s,
            poll_records=poll_records,
            buffer_records=buffer_records,
            patience_s=patience_s,
        )
        self._made.add(consumer)
        return consumer

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
    ) -> AsyncIterator[Received]:
        """Records of a topic, from an offset or a time, or the `last` few of each partition, to
        the end as it is now; with `follow`, and on from there. The broker keeps nothing."""
        options = ReadOptions(topic, partition, offset, time_ms, last, follow, patience_s)
        return read(self._transport, options)

    def read_chunks(
        self,
        topic: str,
        *,
        partition: int | None = None,
        offset: Start = "earliest",
        time_ms: int | None = None,
        last: int | None = None,
        follow: bool = False,
        patience_s: float = 30.0,
    ) -> AsyncIterator[list[Received]]:
        """The same, in lists of as many as come together."""
        options = ReadOptions(topic, partition, offset, time_ms, last, follow, patience_s)
        return read_chunks(self._transport, options)

    # ---- work queues

    async def receive(
        self,
        topics: str | Iterable[str],
        *,
        group: str,
        count: int = 1,
        wait_s: float = 0.0,
        visibility_s: float | None = None,
        member: str | None = None,
        start: LeaseStart | None = None,
    ) -> list[Leased]:
        """Up to so many records, leased, waiting while there is none. Settle each before its lease
        runs out; nobody extends it for you: `work` and `worker` do."""
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        options = ReceiveOptions(names, group, visibility_s, member, start)
        return (await self._leases.receive(options, count, wait_s)).messages

    async def ack(self, messages: Leased | str | Iterable[Leased | str]) -> list[Settled]:
        """Done: many in one request, by message or by receipt, each with its result. What is
        refused says so there, and raises nothing."""
        settles = [Settle("ack", receipt) for receipt in receipts_of(messages)]
        return await self._leases.settle(settles)

    async def settle(self, settles: Sequence[Settle]) -> list[Settled]:
        """Many in one request, each in its own way."""
        return await self._leases.settle(settles)

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
    ) -> Work:
        """Leased messages as they come, for `async for`; settle each by its own methods. Leases
        are extended until then. Closing it releases what was received ahead.

        `patience_s` is how long a broker that is away is waited for, each time.
        """
        if not 1 <= prefetch <= RECEIVE_MAX:
            raise ParameterInvalid(
                f"prefetch is {prefetch}; it must be 1 to {RECEIVE_MAX}", parameter="prefetch"
            )
        names = (topics,) if isinstance(topics, str) else tuple(topics)
        member = member or f"python-{secrets.token_hex(4)}"
        options = ReceiveOptions(names, group, visibility_s, member, start)
        work = Work(self._leases, options, prefetch=prefetch, patience_s=patience_s)
        self._made.add(work)
        return work

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
    ) -> Callable[[H], H]:
        """Decorates a function that handles a message: `run_workers` runs it, so many at a time.
        Returning acks, raising nacks; see `Reject`, `Retry` and `Release`. When workers stop,
        handlers have `grace_s` to end."""

        def decorate(handler: H) -> H:
            def make_work(room: int) -> Work:
                return self.work(
                    topics,
                    group=group,
                    prefetch=room,
                    visibility_s=visibility_s,
                    member=member,
                    start=start,
                    patience_s=patience_s,
                )

            def make() -> Worker:
                return Worker(
                    make_work,
                    handler,
                    concurrency=concurrency,
                    prefetch=prefetch,
                    grace_s=grace_s,
                )

            self._workers.add(make)
            return handler

        return decorate

    async def run_workers(self) -> None:
        """Until `stop_workers`, or until this is cancelled, or until the broker refuses something
        for good; handlers that run are given their time first."""
        await self._workers.run()

    def stop_workers(self) -> None:
        self._workers.stop()

    def worker_statistics(self) -> list[WorkerStatistics]:
        """Of the workers that run, or ran last, in the order in which they were made."""
        return self._workers.statistics()

    def stream(self, topic: str) -> TopicStream:
        """A topic over one WebSocket: publish, read in order, acknowledge."""
        return TopicStream(self._transport, topic)
