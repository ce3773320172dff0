"""An engine in memory, for tests: those of the broker, and those of its users.

It answers as the local log does: at the end of the turn, with the same offsets and the same
errors. Nothing survives `stop`, and nothing goes but by `trim` and `delete`: retention,
compaction and the modes of durability mean nothing here.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from millstream.engine.admission import admit, require_one_frame
from millstream.engine.pending import Pending
from millstream.engine.protocol import Capabilities, Extent, Health, Metric, Offsets
from millstream.errors import (
    EngineStopped,
    MillstreamError,
    OffsetOutOfRange,
    PartitionCountInvalid,
    TopicExists,
)
from millstream.log import batch as batches
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.producers import Producer, Producers, has_sequence
from millstream.log.segment import Chunk
from millstream.log.store import (
    Topic,
    check_partition_count,
    check_topic_name,
    new_uuid,
    partition_unknown,
    topic_unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from millstream.engine.protocol import Files, Part
    from millstream.log.batch import Data, Header
    from millstream.log.view_snapshot import ViewSnapshot

T = TypeVar("T")


class _Batch(NamedTuple):
    base_offset: int
    next_offset: int
    data: bytes


@dataclass(slots=True, eq=False)
class _Partition:
    id: PartitionId
    settings: PartitionSettings
    start_offset: int = 0
    next_offset: int = 0
    log: list[_Batch] = field(default_factory=list)
    producers: Producers = field(default_factory=Producers)
    waiting: list[tuple[int, Pending[None]]] = field(default_factory=list)
    is_deleted: bool = False

    def outside(self, offset: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"{self.id} has offsets {self.start_offset} to {self.next_offset}; {offset} is outside",
            topic=self.id.topic,
            partition=self.id.number,
            offset=offset,
            start=self.start_offset,
            end=self.next_offset,
        )

    def index_of(self, offset: int) -> int:
        """Of the batch that holds an offset."""
        return bisect_right(self.log, offset, key=_base_offset) - 1


class _Part(NamedTuple):
    """One batch on its way into one partition."""

    partition: _Partition
    data: bytes
    header: Header


class MemoryEngine:
    __slots__ = ("_is_open", "_next_id", "_partitions", "_soon", "_topics", "_turn", "appends")

    def __init__(self, soon: Callable[[Callable[[], None]], object] | None = None) -> None:
        """`soon` calls at the end of the turn; by default, that of the running event loop."""
        self._soon = soon
        self._is_open = False
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[PartitionId, _Partition] = {}
        self._turn: list[Callable[[], None]] = []
        self._next_id = 0
        self.appends = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(atomic=True, durable=False, exclusive=True)

    async def start(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon
        self.open()

    def open(self) -> None:
        self._is_open = True

    async def stop(self) -> None:
        self.close()

    def close(self) -> None:
        self._end_turn()
        for partition in self._partitions.values():
            _end_waits(partition, _stopped())
        self._topics.clear()
        self._partitions.clear()
        self._is_open = False

    # ---- appending

    def append(self, id: PartitionId, batch: Data, header: Header | None = None) -> Pending[int]:
        try:
            parts = [self._part(id, batch, header)]
        except MillstreamError as error:
            return Pending.failed(error)
        return self._at_end_of_turn(lambda: self._append(parts)[0])

    def append_atomic(self, entries: Sequence[Part]) -> Pending[list[int]]:
        try:
            parts = [self._part(*entry) for entry in entries]
            require_one_frame(len(part.data) for part in parts)
        except MillstreamError as error:
            return Pending.failed(error)
        if not parts:
            return Pending.of([])
        return self._at_end_of_turn(lambda: self._append(parts))

    def _part(self, id: PartitionId, batch: Data, header: Header | None = None) -> _Part:
        partition = self._partition(id)
        return _Part(partition, bytes(batch), admit(batch, header, partition.settings))

    def _append(self, parts: list[_Part]) -> list[int]:
        """Give every part its offset, then keep them all; or none, when one is refused."""
        ends: dict[_Partition, int] = {}
        undo: list[tuple[Producers, int, Producer | None]] = []
        offsets: list[int] = []
        placed: list[tuple[_Part, int]] = []
        try:
            for part in parts:
                partition, header = part.partition, part.header
                if partition.is_deleted:
                    raise topic_unknown(partition.id.topic)
                offset = ends.get(partition, partition.next_offset)
                if has_sequence(header):
                    original = partition.producers.check(header)
                    if original is not None:
                        offsets.append(original)
                        continue
                    before = partition.producers.note(header, offset, header.max_timestamp)
                    undo.append((partition.producers, header.producer_id, before))
                offsets.append(offset)
                placed.append((part, offset))
                ends[partition] = offset + header.last_offset_delta + 1
        except MillstreamError:
            for producers, producer_id, before in reversed(undo):
                producers.undo(producer_id, before)
            raise
        for part, offset in placed:
            prefix, rest = batches.placed(part.data, offset, 0)
            end = offset + part.header.last_offset_delta + 1
            part.partition.log.append(_Batch(offset, end, prefix + rest))
            part.partition.next_offset = end
        self.appends += 1
        for partition in ends:
            _wake(partition)
        return offsets

    def producer_id(self) -> Pending[int]:
        def take() -> int:
            self._next_id += 1
            return self._next_id - 1

        return self._at_end_of_turn(take)

    # ---- reading

    def read(self, id: PartitionId, offset: int, bytes_max: int) -> Pending[Chunk]:
        try:
            partition = self._partition(id)
            if not partition.start_offset <= offset <= partition.next_offset:
                raise partition.outside(offset)
        except MillstreamError as error:
            return Pending.failed(error)
        if offset == partition.next_offset:
            return Pending.of(Chunk(memoryview(b""), offset))
        first = last = partition.index_of(offset)
        size = len(partition.log[first].data)
        while last + 1 < len(partition.log):
            size += len(partition.log[last + 1].data)
            if size > bytes_max:
                break
            last += 1
        chosen = partition.log[first : last + 1]
        data = b"".join(batch.data for batch in chosen)
        return Pending.of(Chunk(memoryview(data), chosen[-1].next_offset))

    def locate(self, id: PartitionId, offset: int, bytes_max: int) -> None:
        """Nothing is in a file."""
        del id, offset, bytes_max

    def wait(self, id: PartitionId, offset: int) -> Pending[None]:
        try:
            partition = self._partition(id)
        except MillstreamError as error:
            return Pending.failed(error)
        if partition.next_offset > offset:
            return Pending.of(None)
        pending: Pending[None] = Pending()
        partition.waiting.append((offset, pending))
        return pending

    def forget(self, id: PartitionId, waiting: Pending[None]) -> None:
        partition = self._partitions.get(id)
        if partition is not None:
            partition.waiting = [one for one in partition.waiting if one[1] is not waiting]

    def offsets(self, id: PartitionId) -> Offsets:
        partition = self._partition(id)
        return Offsets(partition.start_offset, partition.next_offset)

    def extent(self, id: PartitionId) -> Extent:
        """No files, and one start."""
        return Extent(sum(len(one.data) for one in self._partition(id).log), 0, 0)

    def files(self, id: PartitionId) -> Files | None:
        self._partition(id)
        return None

    def leader_epoch(self, id: PartitionId) -> int:
        self._partition(id)
        return 0

    def producer(self, id: PartitionId, producer_id: int) -> Producer | None:
        return self._partition(id).producers.by_id.get(producer_id)

    def set_producer(self, id: PartitionId, producer_id: int, known: Producer | None) -> None:
        self._partition(id).producers.put(producer_id, known)

    def forget_producers(self, id: PartitionId, before: int) -> None:
        self._partition(id).producers.forget_before(before)

    def epoch_end(self, id: PartitionId, epoch: int) -> tuple[int, int]:
        partition = self._partition(id)
        return (-1, -1) if epoch < 0 or not partition.next_offset else (0, partition.next_offset)

    def find(self, id: PartitionId, timestamp: int) -> Pending[tuple[int, int] | None]:
        try:
            partition = self._partition(id)
        except MillstreamError as error:
            return Pending.failed(error)
        for batch in partition.log:
            for record in batches.decode(batch.data):
                if record.timestamp >= timestamp and record.offset >= partition.start_offset:
                    return Pending.of((record.offset, record.timestamp))
        return Pending.of(None)

    # ---- topics

    def topics(self) -> list[Topic]:
        self._running()
        return list(self._topics.values())

    def create(
        self,
        name: str,
        partitions: int,
        settings: PartitionSettings,
        uuid: bytes | None = None,
    ) -> Pending[Topic]:
        def change() -> Topic:
            check_topic_name(name)
            check_partition_count(partitions)
            if name in self._topics:
                raise TopicExists(f"there is a topic {name} already", topic=name)
            return self._grow(Topic(name, uuid or new_uuid(), 0), partitions, settings)

        return self._after_appends(change)

    def alter(
        self,
        name: str,
        *,
        settings: PartitionSettings | None = None,
        partitions: int | None = None,
    ) -> Pending[Topic]:
        def change() -> Topic:
            topic = self._topic(name)
            numbers = [PartitionId(name, number) for number in range(topic.partitions)]
            if partitions is not None:
                check_partition_count(partitions)
                if partitions < topic.partitions:
                    raise PartitionCountInvalid(
                        f"topic {name} has {topic.partitions} partitions; it cannot have fewer",
                        topic=name,
                        partitions=partitions,
                    )
                known = settings or self._partitions[numbers[0]].settings
                topic = self._grow(topic, partitions, known)
            if settings is not None:
                for id in numbers:
                    self._partitions[id].settings = settings
            return topic

        return self._after_appends(change)

    def _grow(self, topic: Topic, partitions: int, settings: PartitionSettings) -> Topic:
        for number in range(topic.partitions, partitions):
            id = PartitionId(topic.name, number)
            self._partitions[id] = _Partition(id, settings)
        topic = self._topics[topic.name] = topic._replace(partitions=partitions)
        return topic

    def hold(self, first_kept: Callable[[PartitionId], int | None]) -> None:
        """There is no retention."""

    def trim(self, id: PartitionId, offset: int) -> Pending[None]:
        try:
            partition = self._partition(id)
            if not 0 <= offset <= partition.next_offset:
                raise partition.outside(offset)
        except MillstreamError as error:
            return Pending.failed(error)

        def change() -> None:
            partition.start_offset = max(partition.start_offset, offset)
            first = bisect_right(partition.log, partition.start_offset, key=_next_offset)
            del partition.log[:first]

        return self._at_end_of_turn(change)

    def delete(self, name: str) -> Pending[None]:
        def change() -> None:
            topic = self._topic(name)
            del self._topics[name]
            for number in range(topic.partitions):
                partition = self._partitions.pop(PartitionId(name, number))
                partition.is_deleted = True
                _end_waits(partition, topic_unknown(name))

        return self._after_appends(change)

    def load_view(self, id: PartitionId, view: str) -> Pending[ViewSnapshot | None]:
        """There is none: nothing here survives, and all is quick to read."""
        del id, view
        return Pending.of(None)

    def save_view(self, id: PartitionId, view: str) -> Pending[int | None]:
        del id, view
        return Pending.of(None)

    def claim(self, shard: str) -> Pending[None]:
        del shard
        return Pending.of(None) if self._is_open else Pending.failed(_stopped())

    # ---- seen from outside

    def health(self) -> Health:
        return Health(self._is_open, None if self._is_open else "the engine is not open")

    def metrics(self) -> list[Metric]:
        size = sum(len(batch.data) for one in self._partitions.values() for batch in one.log)
        rows = [
            ("appends", "counter", "Appends answered.", self.appends),
            ("memory_bytes", "gauge", "Bytes of the batches that are kept.", size),
            ("topics", "gauge", "Topics.", len(self._topics)),
            ("partitions", "gauge", "Partitions.", len(self._partitions)),
        ]
        return [Metric(f"millstream_log_{name}", kind, text, n) for name, kind, text, n in rows]

    # ---- inside

    def _running(self) -> None:
        if not self._is_open:
            raise _stopped()

    def _topic(self, name: str) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            raise topic_unknown(name)
        return topic

    def _partition(self, id: PartitionId) -> _Partition:
        self._running()
        found = self._partitions.get(id)
        if found is None:
            raise partition_unknown(id, self._topic(id.topic))
        return found

    def _at_end_of_turn(self, call: Callable[[], T]) -> Pending[T]:
        if not self._is_open:
            return Pending.failed(_stopped())
        pending: Pending[T] = Pending()
        if not self._turn:
            assert self._soon is not None
            self._soon(self._end_turn)
        self._turn.append(lambda: _settle(pending, call))
        return pending

    def _after_appends(self, change: Callable[[], T]) -> Pending[T]:
        """At once, or behind what was asked for earlier in this turn."""
        if self._turn or not self._is_open:
            return self._at_end_of_turn(change)
        pending: Pending[T] = Pending()
        _settle(pending, change)
        return pending

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, []
        for call in turn:
            call()


def _settle(pending: Pending[T], call: Callable[[], T]) -> None:
    try:
        value = call()
    except MillstreamError as error:
        pending.fail(error)
    else:
        pending.succeed(value)


def _wake(partition: _Partition) -> None:
    waiting, partition.waiting = partition.waiting, []
    for offset, pending in waiting:
        if offset >= partition.next_offset:
            partition.waiting.append((offset, pending))
    for offset, pending in waiting:
        if offset < partition.next_offset:
            pending.succeed(None)


def _end_waits(partition: _Partition, error: MillstreamError) -> None:
    waiting, partition.waiting = partition.waiting, []
    for _, pending in waiting:
        pending.fail(error)


def _stopped() -> EngineStopped:
    return EngineStopped("the engine is not open; the broker is starting or stopping")


def _base_offset(batch: _Batch) -> int:
    return batch.base_offset


def _next_offset(batch: _Batch) -> int:
    return batch.next_offset
