"""Reading by offset or time, and waiting for more.

The engine hands out whole batches. They are opened one by one, for as many records as were asked
for; what is left of the last one is kept for a while, for a reader that goes on where it stopped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.engine.pending import Pending, follow
from millstream.errors import OffsetOutOfRange
from millstream.log import batch as batches
from millstream.log.batch import Record

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from uuid import UUID

    from millstream.broker.timers import Timers
    from millstream.broker.topics import Topics
    from millstream.broker.traffic import Traffic
    from millstream.broker.wheel import Timer
    from millstream.engine.protocol import Engine, Offsets
    from millstream.log.partition import PartitionId

Stored = Record

# What is asked of the engine at once.
READ_BYTES_MAX = 1024 * 1024
READ_BYTES_MIN = 16 * 1024
# Reads that may go on where they stopped without asking the engine, and what they hold together.
AHEAD_MAX = 256
AHEAD_BYTES_MAX = 64 * 1024 * 1024
# About what a record takes beside its key, value and headers.
RECORD_OVERHEAD_BYTES = 20


class Fetched(NamedTuple):
    records: list[Stored]
    # Where to go on; past the last record, or past records that compaction removed.
    next_offset: int
    high_watermark: int
    start: int


class Waiting:
    """A wait for records in any of several partitions."""

    __slots__ = ("_engine", "_timer", "_timers", "_waits", "pending")

    def __init__(self, engine: Engine, timers: Timers) -> None:
        self._engine = engine
        self._timers = timers
        self._waits: list[tuple[PartitionId, Pending[None]]] = []
        self._timer: Timer | None = None
        # True when there is something to read, False when the time is over.
        self.pending: Pending[bool] = Pending()

    def begin(self, positions: Mapping[PartitionId, int], seconds: float) -> None:
        for id, offset in positions.items():
            one = self._engine.wait(id, offset)
            self._waits.append((id, one))
            one.then(self._woken)
            if one.is_done:
                return
        self._timer = self._timers.after(seconds, lambda: self._end(False))

    def wake(self) -> None:
        """There is news of another kind: the read that follows says so."""
        self._end(True)

    def cancel(self) -> None:
        """Nobody waits any more; `pending` is done with False."""
        self._end(False)

    def _woken(self, one: Pending[None]) -> None:
        # A topic that was deleted wakes too: the read that follows says so.
        del one
        self._end(True)

    def _end(self, is_ready: bool) -> None:
        if self.pending.is_done:
            return
        for id, one in self._waits:
            if not one.is_done:
                self._engine.forget(id, one)
        if self._timer is not None:
            self._timers.cancel(self._timer)
        self.pending.succeed(is_ready)


class _Ahead:
    """Where a read stopped: the rest of an opened batch, and the bytes after it."""

    __slots__ = ("at", "data", "next_offset", "position", "records", "size", "uuid")

    def __init__(self, uuid: UUID, data: memoryview) -> None:
        # Of the topic: one made again under the old name has other records.
        self.uuid = uuid
        self.data = data
        # The next batch in `data`; of the one before it the next record, and what follows it.
        self.position = 0
        self.records: list[Stored] = []
        self.at = 0
        self.next_offset = 0
        # About what all this takes in memory.
        self.size = 0

    def open_next(self) -> None:
        start = self.position
        header = batches.read_header(self.data, start)
        self.position = start + header.size
        self.records = batches.decode(self.data[start : self.position])
        self.at = 0
        self.next_offset = header.next_offset
        self.size = len(self.data) + header.size
        if header.attributes & batches.COMPRESSION_MASK:
            self.size += sum(len(record.value or b"") for record in self.records)


class Reader:
    """Everything that is read by offset passes here."""

    __slots__ = ("_ahead", "_ahead_bytes", "_engine", "_timers", "_topics", "_traffic")

    def __init__(self, engine: Engine, topics: Topics, traffic: Traffic, timers: Timers) -> None:
        self._engine = engine
        self._topics = topics
        self._traffic = traffic
        self._timers = timers
        # By partition and offset to go on at; the one used last stands last.
        self._ahead: dict[tuple[PartitionId, int], _Ahead] = {}
        self._ahead_bytes = 0

    def fetch(
        self, topic: str, partition: int, offset: int, count_max: int, bytes_max: int
    ) -> Pending[Fetched]:
        """Records from an offset on; at least one, if there is one."""
        return follow(self._fetch(topic, partition, offset, count_max, bytes_max))

    def _fetch(
        self, topic: str, partition: int, offset: int, count_max: int, bytes_max: int
    ) -> Generator[Pending[Any], Any, Fetched]:
        id = self._topics.partition_of(topic, partition)
        uuid = self._topics.get(topic).uuid
        found: list[Stored] = []
        left = bytes_max
        ahead = self._resume(id, uuid, offset)
        while True:
            if ahead is None:
                size = min(max(left, READ_BYTES_MIN), READ_BYTES_MAX)
                chunk = yield self._engine.read(id, offset, size)
                if not len(chunk.data):
                    # The end, or past records that compaction removed from there on.
                    offset = max(offset, chunk.next_offset)
                    break
                ahead = _Ahead(uuid, chunk.data)
            offset, left, is_full = _take(ahead, offset, found, count_max, left)
            if is_full:
                self._keep(id, offset, ahead)
                break
            ahead = None
        start, high_watermark = self._engine.offsets(id)
        traffic = self._traffic.of(topic)
        traffic.messages_out += len(found)
        traffic.bytes_out += bytes_max - left
        return Fetched(found, offset, high_watermark, start)

    def _resume(self, id: PartitionId, uuid: UUID, offset: int) -> _Ahead | None:
        ahead = self._ahead.pop((id, offset), None)
        if ahead is not None:
            self._ahead_bytes -= ahead.size
        if ahead is None or ahead.uuid != uuid or offset < self._engine.offsets(id).start:
            return None
        return ahead

    def _keep(self, id: PartitionId, offset: int, ahead: _Ahead) -> None:
        if ahead.at == len(ahead.records) and ahead.position == len(ahead.data):
            return
        key = (id, offset)
        known = self._ahead.pop(key, None)
        self._ahead[key] = ahead
        self._ahead_bytes += ahead.size - (0 if known is None else known.size)
        while len(self._ahead) > AHEAD_MAX or self._ahead_bytes > AHEAD_BYTES_MAX:
            self._ahead_bytes -= self._ahead.pop(next(iter(self._ahead))).size

    def read_batches(
        self, topic: str, partition: int, offset: int, bytes_max: int
    ) -> Pending[bytes]:
        """Whole batches as they are, from the one that holds the offset; empty at the end."""
        return follow(self._read_batches(topic, partition, offset, bytes_max))

    def _read_batches(
        self, topic: str, partition: int, offset: int, bytes_max: int
    ) -> Generator[Pending[Any], Any, bytes]:
        id = self._topics.partition_of(topic, partition)
        chunk = yield self._engine.read(id, offset, bytes_max)
        return bytes(chunk.data)

    def wait(self, topic: str, positions: Mapping[int, int], seconds: float) -> Waiting:
        """For something to read at one of the positions, by partition."""
        ids = {self._topics.partition_of(topic, n): offset for n, offset in positions.items()}
        return self.wait_any(ids, seconds)

    def wait_any(self, positions: Mapping[PartitionId, int], seconds: float) -> Waiting:
        """The same over several topics."""
        waiting = Waiting(self._engine, self._timers)
        waiting.begin(positions, seconds)
        return waiting

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> Pending[int]:
        """Of the first record at or after a time; the high watermark when all are older."""
        return follow(self._offset_at(topic, partition, timestamp_ms))

    def _offset_at(
        self, topic: str, partition: int, timestamp_ms: int
    ) -> Generator[Pending[Any], Any, int]:
        id = self._topics.partition_of(topic, partition)
        found = yield self._engine.find(id, timestamp_ms)
        return self._engine.offsets(id).high_watermark if found is None else found[0]

    def offsets(self, topic: str, partition: int) -> Offsets:
        return self._engine.offsets(self._topics.partition_of(topic, partition))

    def require(self, topic: str, partition: int, offset: int) -> None:
        """Raises where reading cannot begin: before the start, or past the end."""
        start, end = self.offsets(topic, partition)
        if not start <= offset <= end:
            raise OffsetOutOfRange(
                f"{topic}/{partition} has offsets {start} to {end}; {offset} is outside",
                topic=topic,
                partition=partition,
                offset=offset,
                start=start,
                end=end,
            )


def _take(
    ahead: _Ahead, offset: int, found: list[Stored], count_max: int, left: int
) -> tuple[int, int, bool]:
    """Move records from what was read to what is given out, batch by batch.

    Answers the offset to go on at, the bytes that are left, and whether there is no more room. At
    least one record is always taken.
    """
    while True:
        records, at = ahead.records, ahead.at
        while at < len(records):
            record = records[at]
            if record.offset >= offset:
                if len(found) >= count_max or (left <= 0 and found):
                    ahead.at = at
                    return record.offset, left, True
                key, value = record.key, record.value
                left -= RECORD_OVERHEAD_BYTES
                if value is not None:
                    left -= len(value)
                if key is not None:
                    left -= len(key)
                found.append(record)
            at += 1
        ahead.at = at
        # Also past records that compaction removed from the end of the batch.
        offset = max(offset, ahead.next_offset)
        if len(found) >= count_max or (left <= 0 and found):
            return offset, left, True
        if ahead.position >= len(ahead.data):
            return offset, left, False
        ahead.open_next()
