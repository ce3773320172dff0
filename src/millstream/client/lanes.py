"""The way of records to their partitions: a lane for each, with one batch under way at a time.

A lane numbers its batches: a producer id that it makes up, and a sequence that counts records. A
batch keeps its number until its outcome is known, so that the broker recognises a repeat. When the
outcome will never be known (the lane gave up), the numbers that follow would make no sense to the
broker, and the lane goes on under a new id.

A topic that does not exist yet has one lane without a partition. Its batches go as JSON, which lets
a broker that makes topics on first use make it; an idempotency key takes the number's place.

A topic that was made again with fewer partitions refuses what was meant for the others. How many
there are is asked anew then, and records that named no partition are placed anew. Those of one lane
keep their order; what was sent since the count is known may come before them.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import random
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from millstream.client.batches import Batch, Delivery, size_of
from millstream.client.http import Reply
from millstream.client.topics import Acks, TopicFacts, Topics, topic_path
from millstream.client.transport import JSON, RAW, Transport
from millstream.client.values import Place, encode_json
from millstream.errors import (
    BatchTooLarge,
    BrokerUnreachable,
    ClientClosed,
    MessageTooLarge,
    MillstreamError,
    OutcomeUnknown,
    PartitionUnknown,
    SequenceDuplicate,
    SequenceOutOfOrder,
    TopicUnknown,
)
from millstream.wire.batches import OWN_PREFIX, TYPE_HEADER, TYPE_JSON, Data, Fields, encode
from millstream.wire.lanes import LANE_HEADER, NORMAL, lane_name
from millstream.wire.partitioning import Partitioner, partition_of_key
from millstream.wire.refusals import refusal, retry_after_s
from millstream.wire.retry import RetryPolicy

# For those who do not look at reports.
log = logging.getLogger("millstream.client")

# As much of a key as an error shows.
KEY_SHOWN = 100
_SEQUENCE_MASK = 2**31 - 1
_PARTITIONERS: tuple[Partitioner, ...] = ("murmur2", "murmur3")


def now_ms() -> int:
    return int(time.time() * 1000)


class LaneOptions(NamedTuple):
    transport: Transport
    records_max: int
    bytes_max: int
    linger_s: float
    retry: RetryPolicy
    acks: Acks
    compression: str
    settled: Callable[[Batch, bool], None]


class Lane:
    """Batches of one partition, in order. `partition` is None for a topic that is not there yet.
    Records of each level, which is what the broker calls a lane, go in batches of their own."""

    __slots__ = (
        "_home",
        "_loop",
        "_options",
        "_path",
        "_task",
        "level",
        "line",
        "open",
        "partition",
        "producer_id",
        "sequence",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        partition: int | None,
        options: LaneOptions,
        home: TopicLanes,
        *,
        level: int = NORMAL,
    ) -> None:
        self.level = level
        self.topic = topic
        self.partition = partition
        self.open: Batch | None = None
        self.line: deque[Batch] = deque()
        self._options = options
        self._home = home
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._path = self._make_path()
        self.producer_id = 0
        self.sequence = 0
        self._renew()

    def room_for(self, size: int) -> Batch:
        """The open batch, if it has room for so many bytes more; else a new one."""
        batch = self.open
        if batch is not None:
            if batch.size + size <= self._options.bytes_max:
                return batch
            self.close_batch()
        self.open = batch = Batch(self._loop, now_ms())
        batch.timer = self._loop.call_later(self._options.linger_s, self._linger_over, batch)
        return batch

    def close_batch(self) -> None:
        """Nothing more goes into the open batch."""
        batch, self.open = self.open, None
        if batch is None:
            return
        if batch.timer is not None:
            batch.timer.cancel()
            batch.timer = None
        self.line.append(batch)
        if self._task is None:
            self._task = self._loop.create_task(self._run())

    async def abandon(self) -> None:
        """Deliver nothing more: every batch is reported as not, or not surely, stored."""
        self.close_batch()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for batch in self.line:
            self._settle(batch, self._given_up(batch, ClientClosed("the producer was closed")))
        self.line.clear()

    def _linger_over(self, batch: Batch) -> None:
        if self.open is batch:
            self.close_batch()

    async def _run(self) -> None:
        try:
            while self.line:
                await self._deliver(self.line[0])
        finally:
            self._task = None
        self._home.idle(self)

    # ---- delivering

    async def _deliver(self, batch: Batch) -> None:
        """Try until it is stored, refused, or time is up; then it leaves the line."""
        pauses = self._options.retry.pauses()
        deadline_s = self._loop.time() + self._options.retry.timeout_s
        while True:
            wait_s = None
            try:
                reply = await self._try(batch)
            except BrokerUnreachable as caught:
                error: MillstreamError = caught
            except OutcomeUnknown as caught:
                batch.is_doubtful = True
                error = caught
            except MillstreamError as caught:
                # Nothing was sent: it cannot be written as a batch, or the client was closed.
                self._leave(batch, self._given_up(batch, caught))
                return
            except asyncio.CancelledError:
                batch.is_doubtful = True
                raise
            else:
                error_or_none = self._judge(batch, reply)
                if error_or_none is None:
                    return
                error = error_or_none
                if isinstance(error, PartitionUnknown) and await self._is_gone(batch, error):
                    return
                wait_s = retry_after_s(reply.headers.get(b"retry-after"))
            pause_s = pauses.next_s(wait_s)
            is_last = batch.is_doubtful and self._is_unnumbered
            if is_last or self._loop.time() + pause_s >= deadline_s:
                self._leave(batch, self._given_up(batch, error))
                return
            await asyncio.sleep(pause_s)

    async def _try(self, batch: Batch) -> Reply:
        batch.tries += 1
        transport = self._options.transport
        if self.partition is None:
            batch.key = batch.key or uuid.uuid4().hex
            return await transport.ask_once(
                "POST",
                self._path,
                _as_json(batch),
                media=JSON,
                headers={"idempotency-key": batch.key},
            )
        compression = self._options.compression
        if self._is_unnumbered:
            data = encode(batch.records, compression=compression, lane=lane_name(self.level))
        else:
            data = encode(
                batch.records,
                compression=compression,
                producer_id=self.producer_id,
                producer_epoch=0,
                base_sequence=self.sequence,
                lane=lane_name(self.level),
            )
        return await transport.ask_once("POST", self._path, data, media=RAW)

    def _judge(self, batch: Batch, reply: Reply) -> MillstreamError | None:
        """What an answer means: None when the batch is through, else why to try again."""
        if reply.status < 400:
            try:
                self._stored(batch, _placed.decode(reply.body).placed)
            except (msgspec.MsgspecError, IndexError, ValueError):
                batch.is_doubtful = True
                return OutcomeUnknown("the broker's answer does not say where the records are")
            return None
        error = refusal(self._options.transport.place.url, reply.status, reply.body)
        if isinstance(error, OutcomeUnknown):
            batch.is_doubtful = True
            return error
        if isinstance(error, SequenceOutOfOrder):
            # The broker has not stored it, nor all that came before: it lost what was not yet
            # synced, or removed it. Under a new id it is taken as it is.
            batch.is_doubtful = False
            self._renew()
            return error
        if isinstance(error, BatchTooLarge | MessageTooLarge):
            if len(batch.records) > 1:
                self._split(batch)
                return None
            error = self._record_too_large(batch.records[0], error)
        if isinstance(error, SequenceDuplicate):
            # It was stored, and the broker does not know any more where.
            batch.is_doubtful = True
            error = self._given_up(batch, error)
        may_go_elsewhere = isinstance(error, PartitionUnknown) and self.partition is not None
        if may_go_elsewhere or (error.retriable and not isinstance(error, BrokerUnreachable)):
            return error
        self._home.refused(error)
        self._leave(batch, error)
        return None

    async def _is_gone(self, batch: Batch, error: PartitionUnknown) -> bool:
        """Whether the topic has this partition no more; then nothing is left in line."""
        is_gone = await self._home.has_lost(self.partition or 0)
        if is_gone is None:
            # Nothing is known of where else it could go.
            self._home.refused(error)
            self._leave(batch, error)
            return True
        if not is_gone:
            return False
        self.close_batch()
        line = list(self.line)
        self.line.clear()
        self._renew()
        for one in line:
            self._place_anew(one, error)
        return True

    def _place_anew(self, batch: Batch, error: PartitionUnknown) -> None:
        """What named the partition fails; all else goes where it belongs now."""
        if len(batch.named) == len(batch.records):
            self._settle(batch, error)
            return
        failing = Batch(self._loop, batch.timestamp_ms)

        def place(record: Fields, is_named: bool) -> Delivery:
            if not is_named:
                return self._home.place(record, self.level)
            failing.records.append(record)
            failing.size += size_of(record)
            return Delivery(failing, len(failing.records) - 1)

        batch.move(place)
        if failing.records:
            self._settle(failing, error)

    def _split(self, batch: Batch) -> None:
        """Nothing of it was stored: its halves go by themselves, so that one record that is too
        large does not take the others with it."""
        self.line.popleft()
        self.line.extendleft(reversed(batch.split(self._loop)))

    def _record_too_large(self, record: Fields, error: MillstreamError) -> MessageTooLarge:
        """Alone in its batch: it is the record that is too large, and not the batch."""
        _, key, value, headers = record
        size = len(key or b"") + len(value or b"")
        size += sum(len(name) + len(text or b"") for name, text in headers)
        named = "without a key" if key is None else f"with the key {bytes(key[:KEY_SHOWN])!r}"
        where = self.topic if self.partition is None else f"{self.topic}/{self.partition}"
        why = error.message
        if isinstance(error, BatchTooLarge):
            why += "; raise `message_bytes_max` of the topic to allow more"
        fields = {"topic": self.topic, "partition": self.partition, "record_bytes": size}
        return MessageTooLarge(
            f"the record {named} for {where} has {size} bytes, which is too large: {why}",
            **error.fields | fields,
        )

    def _stored(self, batch: Batch, placed: list[_Placed]) -> None:
        if self.partition is None:
            places = [Place(one.partition, one.offset, one.timestamp_ms) for one in placed]
            if len(places) != len(batch.records):
                raise ValueError("so many places for so many records do not fit")
            batch.places = places
        else:
            batch.partition, batch.offset = self.partition, placed[0].offset
            self.sequence = (self.sequence + len(batch.records)) & _SEQUENCE_MASK
        self._leave(batch, None)

    def _given_up(self, batch: Batch, error: MillstreamError) -> MillstreamError:
        """What the report says when there are no more tries."""
        if not batch.is_doubtful:
            return error
        self._renew()
        if isinstance(error, OutcomeUnknown):
            return error
        return OutcomeUnknown(f"a try may have been stored, and then: {error.message}")

    def _leave(self, batch: Batch, error: MillstreamError | None) -> None:
        self.line.popleft()
        self._settle(batch, error)

    def _settle(self, batch: Batch, error: MillstreamError | None) -> None:
        batch.error = error
        if error is not None:
            count = len(batch.records)
            what = "a record" if count == 1 else f"{count} records"
            log.warning("%s for %s: %s", what, self.topic, error)
        if not batch.done.done():
            batch.done.set_result(None)
        self._options.settled(batch, error is None)

    @property
    def _is_unnumbered(self) -> bool:
        """With acks `none` nobody hears of a batch that is not stored after all. Numbers would
        make the broker refuse all that come after it; without them, a batch of which it is not
        known whether it was taken is not sent again."""
        return self._options.acks == "none" and self.partition is not None

    def _renew(self) -> None:
        # Above what a broker gives to Kafka clients one by one.
        self.producer_id = 2**62 | random.getrandbits(62)
        self.sequence = 0

    def _make_path(self) -> str:
        query = "" if self._options.acks == "all" else f"acks={self._options.acks}"
        if self.partition is None:
            return topic_path(self.topic, "batch", query=query)
        return topic_path(self.topic, "partitions", str(self.partition), "batches", query=query)


class TopicLanes:
    """A topic, and which lane a record takes."""

    __slots__ = (
        "_lanes",
        "_loop",
        "_next",
        "_options",
        "_partitioner",
        "_sticky",
        "_unplaced",
        "count",
        "is_stale",
        "topic",
    )

    def __init__(self, topic: str, options: LaneOptions) -> None:
        self.topic = topic
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._unplaced: Lane | None = None
        # Of each level, where records without a key go now.
        self._sticky: dict[int, Lane] = {}
        self._next = random.randrange(2**16)  # noqa: S311  where to begin, no secret
        self._partitioner: Partitioner = "murmur2"
        # Partitions; 0 while there is no such topic.
        self.count = 0
        self.is_stale = False

    async def look(self, topics: Topics) -> None:
        """Learn how many partitions there are."""
        try:
            facts: TopicFacts | None = await topics.describe(self.topic)
        except TopicUnknown:
            facts = None
        self.is_stale = False
        self.count = 0 if facts is None else facts.partitions
        self._sticky.clear()
        named = None if facts is None else facts.settings.get("partitioner")
        if named in _PARTITIONERS:
            self._partitioner = named
        if self._unplaced is None and not self.count:
            self._unplaced = Lane(self.topic, None, self._options, self)
        elif self._unplaced is not None:
            self.idle(self._unplaced)

    def lane_for(self, key: bytes | None, partition: int | None, level: int = NORMAL) -> Lane:
        if self._unplaced is not None:
            return self._unplaced
        if partition is not None:
            return self._lane(partition, level)
        if key is not None:
            return self._lane(partition_of_key(key, self.count, self._partitioner), level)
        # Without a key a batch is filled before the next partition has its turn: as even in the
        # long run as record by record, and many times fewer batches.
        sticky = self._sticky.get(level)
        if sticky is None or sticky.open is None:
            self._next += 1
            sticky = self._sticky[level] = self._lane(self._next % self.count, level)
        return sticky

    def place(self, record: Fields, level: int) -> Delivery:
        """Put a record that names no partition where it belongs now."""
        key = record[1]
        line = self.lane_for(None if key is None else bytes(key), None, level)
        size = size_of(record)
        batch = line.room_for(size)
        batch.records.append(record)
        batch.size += size
        if line.partition is None:
            batch.partitions.append(None)
        delivery = Delivery(batch, len(batch.records) - 1)
        if len(batch.records) >= self._options.records_max:
            line.close_batch()
        return delivery

    async def has_lost(self, partition: int) -> bool | None:
        """Whether the topic has so few partitions that this one is gone, and others are there;
        None when nobody knows."""
        if partition < self.count:
            try:
                await self.look(Topics(self._options.transport))
            except MillstreamError:
                return None
        return partition >= self.count if self.count else None

    @property
    def is_busy(self) -> bool:
        """Something is on its way to the broker."""
        return any(lane.line for lane in self._all())

    def close_batches(self) -> None:
        for lane in self._all():
            lane.close_batch()

    def flush(self) -> list[Batch]:
        """Send what is open; answers all batches that are not done."""
        batches: list[Batch] = []
        self.close_batches()
        for lane in self._all():
            batches += lane.line
        return batches

    async def abandon(self) -> None:
        for lane in self._all():
            await lane.abandon()

    def grow_stale(self) -> None:
        self.is_stale = True

    def _lane(self, partition: int, level: int) -> Lane:
        lane = self._lanes.get((partition, level))
        if lane is None:
            lane = Lane(self.topic, partition, self._options, self, level=level)
            self._lanes[partition, level] = lane
        return lane

    def idle(self, lane: Lane) -> None:
        """A topic that was made in the meantime gets its own lanes, once the others are through:
        records keep their order."""
        if lane is not self._unplaced or lane.open is not None or lane.line:
            return
        if self.count:
            self._unplaced = None
        else:
            self.is_stale = True

    def refused(self, error: MillstreamError) -> None:
        if isinstance(error, TopicUnknown | PartitionUnknown):
            self.is_stale = True

    def _all(self) -> list[Lane]:
        lanes = list(self._lanes.values())
        return lanes if self._unplaced is None else [*lanes, self._unplaced]


class _Placed(msgspec.Struct):
    partition: int
    offset: int
    timestamp_ms: int = 0


class _AllPlaced(msgspec.Struct):
    placed: list[_Placed]


_placed = msgspec.json.Decoder(_AllPlaced)


def _as_json(batch: Batch) -> bytes:
    """Times and bytes are the same as in a record batch."""
    pairs = zip(batch.records, batch.partitions, strict=True)
    return encode_json({"messages": [_message(*pair) for pair in pairs]})


def _message(record: Fields, partition: int | None) -> dict[str, object]:
    timestamp_ms, key, value, headers = record
    message: dict[str, object] = {"timestamp_ms": timestamp_ms, "value": None}
    if partition is not None:
        message["partition"] = partition
    if key is not None:
        message |= {"key": _base64(key), "key_encoding": "base64"}
    if (TYPE_HEADER, TYPE_JSON) in headers:
        message["value"] = msgspec.Raw(value or b"null")
    elif value is not None:
        message |= {"value": _base64(value), "encoding": "base64"}
    own = {
        name: None if text is None else {"base64": _base64(text)}
        for name, text in headers
        if not name.startswith(OWN_PREFIX)
    }
    lane = next((text for name, text in headers if name == LANE_HEADER), None)
    if lane is not None:
        message["lane"] = bytes(lane).decode()
    return message | ({"headers": own} if own else {})


def _base64(data: Data) -> str:
    return base64.b64encode(data).decode("ascii")
