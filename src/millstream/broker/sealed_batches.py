"""Batches that come ready-made and stay closed: those of Kafka's clients.

They are checked from outside: length, CRC, counts, and what their attributes say. A batch is opened
only for a topic that must see its records: a compacted one, where each needs a key, and one whose
setting `inspect` asks for it (`inspecting.py`). Where the topic keeps the time of the append, the
batch gets a new header around the same bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.inspecting import Inspector
from millstream.broker.outgoing import key_required
from millstream.broker.topic_settings import BATCH_OVERHEAD_BYTES
from millstream.broker.topics import partition_unknown
from millstream.errors import BatchInvalid, TimestampInvalid
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.log.producers import has_sequence

if TYPE_CHECKING:
    from millstream.broker.idempotency import Idempotency
    from millstream.broker.publishing import Publisher
    from millstream.broker.topics import Topic, Topics
    from millstream.broker.traffic import Traffic
    from millstream.clock import Clock
    from millstream.engine.pending import Pending
    from millstream.engine.protocol import Engine
    from millstream.log.batch import Data, Header

# What only the broker may say of a batch.
_OURS = (
    batches.TRANSACTIONAL_MASK
    | batches.CONTROL_MASK
    | batches.DELETE_HORIZON_MASK
    | batches.LANE_MASK
)
# Of a batch whose records have the times that their producers gave them.
NO_TIME = -1


class _Target:
    """A topic as this sees it."""

    __slots__ = ("bytes_max", "ids", "is_append_time", "is_compacted", "is_inspected", "topic")

    def __init__(self, topic: Topic, bytes_max: int) -> None:
        self.topic = topic
        self.ids = [PartitionId(topic.name, number) for number in range(topic.partitions)]
        self.is_append_time = topic.is_append_time
        self.is_compacted = topic.settings.compact
        self.is_inspected = topic.settings.inspect
        self.bytes_max = bytes_max


class SealedBatches:
    """Everything that Kafka's clients publish passes here."""

    __slots__ = ("_clock", "_engine", "_inspector", "_targets", "_topics", "_traffic")

    def __init__(
        self,
        engine: Engine,
        topics: Topics,
        publisher: Publisher,
        idempotency: Idempotency,
        traffic: Traffic,
        *,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._inspector = Inspector(engine, publisher, topics, idempotency, clock)
        self._topics = topics
        self._traffic = traffic
        self._clock = clock
        self._targets: dict[str, _Target] = {}
        topics.watch_deleted(self._forget)

    def append(self, name: str, number: int, data: Data) -> tuple[Pending[int], int]:
        """One batch. Its base offset (of the first time, when it was sent before), and the time of
        the append where the topic keeps that. Raises for what is refused at once."""
        target = self._targets.get(name)
        if target is None or target.topic is not self._topics.by_name.get(name):
            target = self._see(name)
        if not 0 <= number < len(target.ids):
            raise partition_unknown(target.topic, number)
        header = batches.verify(data, bytes_max=target.bytes_max)
        _check(header)
        if target.is_compacted:
            _require_keys(target.topic, data)
        append_time_ms = self._clock.wall_ms() if target.is_append_time else NO_TIME
        if target.is_inspected or self._inspector.minds(target.topic, number, header):
            pending = self._inspector.append(
                target.topic,
                number,
                data,
                header,
                lambda: self._append(target, number, data, header, append_time_ms),
            )
        else:
            pending = self._append(target, number, data, header, append_time_ms)
        return pending, append_time_ms

    def _append(
        self, target: _Target, number: int, data: Data, header: Header, append_time_ms: int
    ) -> Pending[int]:
        if target.is_append_time:
            data, header = batches.stamped(data, header, append_time_ms)
        pending = self._engine.append(target.ids[number], data, header)
        traffic = self._traffic.of(target.topic.name)

        def count(done: Pending[int]) -> None:
            if done.error is not None:
                traffic.messages_failed += header.count
                return
            traffic.messages_in += header.count
            traffic.bytes_in += header.size

        pending.then(count)
        if has_sequence(header):
            self._inspector.closed(target.topic.name, number, header, pending)
        return pending

    def _forget(self, topic: Topic) -> None:
        self._targets.pop(topic.name, None)

    def _see(self, name: str) -> _Target:
        topic = self._topics.get(name)
        # Who sets the largest message means the largest batch, as Kafka does; otherwise a batch of
        # many may be as large as any.
        if "message_bytes_max" in topic.given:
            bytes_max = topic.settings.message_bytes_max + BATCH_OVERHEAD_BYTES
        else:
            bytes_max = self._topics.batch_bytes_max(topic)
        target = self._targets[name] = _Target(topic, bytes_max)
        return target


def _check(header: Header) -> None:
    attributes = header.attributes
    if attributes & _OURS:
        if header.is_transactional:
            raise BatchInvalid("there are no transactions; send the batch without one")
        if header.is_control:
            raise BatchInvalid("a control batch is for the broker to write, not for a client")
        raise BatchInvalid(f"the attributes {attributes:#06x} have bits that are not for clients")
    if attributes & batches.APPEND_TIME_MASK:
        raise TimestampInvalid("the time of the append is for the broker to write")
    if header.producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise BatchInvalid("a batch with a producer id needs its epoch and its sequence")


def _require_keys(topic: Topic, data: Data) -> None:
    for at, (_, key, _) in enumerate(batches.keys(data)):
        if key is None:
            raise key_required(topic, at)
