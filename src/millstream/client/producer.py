"""A producer: many records in few requests, each with an exact report of what became of it.

Records for one partition gather in a batch until it is full (100 records or 64 KiB) or old (5 ms).
Batches of a partition go out one at a time, in order, as ready-made record batches that the broker
stores without opening them. Each carries a producer id and a sequence number, so a batch that is
sent again, because its answer was lost, is stored once.

    send ──▶ open batch ──▶ line of the partition ──▶ broker
      ▲                                                 │
      └───────── room, when reports come back ◀─────────┘

What has no report yet is bounded in bytes: when there is no room, `send` waits.

A report is a place (partition, offset, timestamp) or an error. OutcomeUnknown means that the record
may be stored or not, and that the producer stopped asking; every other error means that it is not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Self, get_args

from millstream.client.batches import RECORD_OVERHEAD_BYTES, Batch, Delivery
from millstream.client.lanes import LaneOptions, TopicLanes
from millstream.client.topics import Acks, Topics
from millstream.client.transport import Transport
from millstream.client.values import (
    HeaderMap,
    Key,
    Value,
    encode_headers,
    encode_key,
    encode_value,
)
from millstream.errors import ClientClosed, ParameterInvalid
from millstream.wire.batches import COMPRESSIONS, Headers
from millstream.wire.lanes import NORMAL, lane_headers, lane_of_word
from millstream.wire.retry import RetryPolicy

# How long the number of a topic's partitions is taken for granted.
FRESH_S = 10.0


class ProducerStatistics(NamedTuple):
    waiting: int  # records without a report
    waiting_bytes: int
    delivered: int
    failed: int
    batches: int
    retries: int


class Producer:
    """Made by `AsyncClient.producer`; a context manager that delivers everything before it ends."""

    def __init__(
        self,
        transport: Transport,
        *,
        batch_records: int = 100,
        batch_bytes: int = 64 * 1024,
        linger_ms: float = 5.0,
        buffer_bytes: int = 32 * 2**20,
        delivery_timeout_s: float = 120.0,
        acks: Acks = "all",
        compression: str = "none",
    ) -> None:
        for name, number, least in (
            ("batch_records", batch_records, 1),
            ("batch_bytes", batch_bytes, 1),
            ("buffer_bytes", buffer_bytes, 1),
            ("linger_ms", linger_ms, 0),
            ("delivery_timeout_s", delivery_timeout_s, 0),
        ):
            if not number >= least:
                raise ParameterInvalid(
                    f"{name} is {number}; it must be at least {least}", parameter=name
                )
        for name, choice, choices in (
            ("acks", acks, get_args(Acks)),
            ("compression", compression, COMPRESSIONS),
        ):
            if choice not in choices:
                raise ParameterInvalid(
                    f"{name} is {choice!r}; it must be one of {', '.join(choices)}", parameter=name
                )
        self._topics_api = Topics(transport)
        self._options = LaneOptions(
            transport=transport,
            records_max=batch_records,
            bytes_max=batch_bytes,
            linger_s=linger_ms / 1000,
            retry=RetryPolicy(timeout_s=delivery_timeout_s),
            acks=acks,
            compression=compression,
            settled=self._settled,
        )
        self._batch_records = batch_records
        self._buffer_bytes = buffer_bytes
        self._used_bytes = 0
        self._waiting = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._topics: dict[str, TopicLanes] = {}
        self._looking: dict[str, asyncio.Task[TopicLanes]] = {}
        self._is_closed = False
        self._delivered = self._failed = self._batches = self._retries = 0
        # Called when there are new reports.
        self.on_reports: Callable[[], None] | None = None

    async def send(  # noqa: PLR0912  every record passes here: calls would cost
        self,
        topic: str,
        value: Value,
        *,
        key: Key = None,
        headers: HeaderMap | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        lane: str | int | None = None,
    ) -> Delivery:
        """Take a record, waiting while there is no room. Await what is answered for the record's
        place, or for the error."""
        data: bytes | None
        own: Headers = ()
        if type(value) is bytes:
            data = value
        else:
            data, own = encode_value(value)
        size = RECORD_OVERHEAD_BYTES
        if data is not None:
            size += len(data)
        key_bytes: bytes | None = None
        if key is not None:
            # A text as it is, in one step: this is the way of every record.
            key_bytes = key.encode() if type(key) is str else encode_key(key)
            assert key_bytes is not None
            size += len(key_bytes)
        level = NORMAL if lane is None else lane_of_word(lane)
        if headers or own or level != NORMAL:
            own = lane_headers(own + encode_headers(headers), level)
            size += sum(len(name) + len(text or b"") for name, text in own)
        if partition is not None or timestamp_ms is not None:
            _check(partition or 0, timestamp_ms or 0)
        lanes = self._topics.get(topic)
        if lanes is None or lanes.is_stale:
            lanes = await self._look_up(topic)
        if self._used_bytes + size > self._buffer_bytes or self._line or self._is_closed:
            await self._enter(size)
        else:
            self._used_bytes += size
        line = lanes.lane_for(key_bytes, partition, level)
        batch = line.room_for(size)
        records = batch.records
        index = len(records)
        records.append(
            (batch.timestamp_ms if timestamp_ms is None else timestamp_ms, key_bytes, data, own)
        )
        if line.partition is None:
            batch.partitions.append(partition)
        elif partition is not None:
            batch.named.append(index)
        batch.size += size
        self._waiting += 1
        if index + 1 >= self._batch_records:
            line.close_batch()
            # Somebody who sends in a tight loop would else never let the batch go out.
            await asyncio.sleep(0)
        elif self._line:
            self._make_room()
        return Delivery(batch, index)

    async def flush(self) -> None:
        """Wait until all that was sent has its report. What failed says so in its report only."""
        under_way = [batch.done for lanes in self._lanes() for batch in lanes.flush()]
        if under_way:
            await asyncio.wait(under_way)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Deliver what was sent, and take no more. What has no report after `timeout_s` is
        reported as failed."""
        self._is_closed = True
        for _, waiter in self._line:
            if not waiter.done():
                waiter.set_exception(_closed())
        self._line.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self.flush()
        except TimeoutError:
            pass
        finally:
            for task in self._looking.values():
                task.cancel()
            for lanes in self._lanes():
                await lanes.abandon()

    def statistics(self) -> ProducerStatistics:
        return ProducerStatistics(
            self._waiting,
            self._used_bytes,
            self._delivered,
            self._failed,
            self._batches,
            self._retries,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---- room

    async def _enter(self, size: int) -> None:
        """Wait in line for room. A record larger than the buffer goes in alone."""
        if self._is_closed:
            raise _closed()
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((size, waiter))
        self._let_in()
        self._make_room()
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._free(size)
            raise

    def _let_in(self) -> None:
        while self._line:
            size, waiter = self._line[0]
            if waiter.done():
                self._line.popleft()
                continue
            if self._used_bytes and self._used_bytes + size > self._buffer_bytes:
                return
            self._line.popleft()
            self._used_bytes += size
            waiter.set_result(None)

    def _free(self, size: int) -> None:
        self._used_bytes -= size
        if self._line:
            self._let_in()
            self._make_room()

    def _make_room(self) -> None:
        """Somebody waits for room. When no report is on its way that could give it, what is open
        goes out now, however young it is."""
        if self._line and not any(lanes.is_busy for lanes in self._lanes()):
            for lanes in self._lanes():
                lanes.close_batches()

    def _settled(self, batch: Batch, is_delivered: bool) -> None:
        count = len(batch.records)
        self._batches += 1
        self._retries += batch.tries - 1 if batch.tries else 0
        self._waiting -= count
        if is_delivered:
            self._delivered += count
        else:
            self._failed += count
        self._free(batch.size)
        if self.on_reports is not None:
            self.on_reports()

    # ---- topics

    async def _look_up(self, topic: str) -> TopicLanes:
        """The lanes of a topic, asked for once however many wait for them."""
        if self._is_closed:
            raise _closed()
        known = self._topics.get(topic)
        task = self._looking.get(topic)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask_for(topic, known))
            self._looking[topic] = task
            task.add_done_callback(lambda _: self._looking.pop(topic, None))
        if known is not None:
            # Old facts are good enough until new ones are there.
            known.is_stale = False
            task.add_done_callback(_forget_failure)
            return known
        return await asyncio.shield(task)

    async def _ask_for(self, topic: str, known: TopicLanes | None) -> TopicLanes:
        lanes = known or TopicLanes(topic, self._options)
        await lanes.look(self._topics_api)
        self._topics[topic] = lanes
        asyncio.get_running_loop().call_later(FRESH_S, lanes.grow_stale)
        return lanes

    def _lanes(self) -> list[TopicLanes]:
        return list(self._topics.values())


def _check(partition: int, timestamp_ms: int) -> None:
    for name, number, most in (
        ("partition", partition, 2**31 - 1),
        ("timestamp_ms", timestamp_ms, 2**63 - 1),
    ):
        if not 0 <= number <= most:
            raise ParameterInvalid(
                f"{name} is {number}; it must be from 0 to {most}", parameter=name
            )


def _forget_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def _closed() -> ClientClosed:
    return ClientClosed("this producer was closed; make another")
