"""What is staged, checked and made ready: after this, a commit only copies bytes.

All that can be wrong with a batch is found here, before anything of it is stored: its topic and
partition, its bytes, the keys that a compacted topic needs, its lane. Records that are for later
are made schedules here, so that committing them is copying too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.broker.lanes import NORMAL, lane_of
from millstream.broker.outgoing import Outgoing, check_record
from millstream.broker.ready_batches import Breaths, check_batch, require_count
from millstream.broker.schedule_values import (
    BATCH_RECORDS_MAX,
    check_schedule,
    due_of,
    schedule_fields,
)
from millstream.broker.staged_values import (
    ENTRY_BYTES_MAX,
    FOR_PARTITION,
    FOR_SCHEDULES,
    PARTITION,
    EntryKey,
    TopicRef,
)
from millstream.broker.topics import partition_unknown
from millstream.broker.views import BATCH_BYTES, Entry, encoded
from millstream.errors import BatchInvalid, DelayInvalid, MillstreamError
from millstream.log import batch as batches
from millstream.log.batch import LANE_HEADER, LANES

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.engine.pending import Pending
    from millstream.wire.staged import StagedEntry


class Ready:
    """What one request stages."""

    __slots__ = (
        "_open",
        "_open_bytes",
        "_open_records",
        "_step_bytes",
        "batches",
        "bytes",
        "counts",
        "inflated_bytes",
        "records",
        "scheduled",
        "topics",
    )

    def __init__(self, step_bytes: int) -> None:
        self._step_bytes = step_bytes
        # Batches of `__staged`, and how many records each is for.
        self.batches: list[Entry] = []
        self.counts: list[int] = []
        # Of the one that is not full.
        self._open: list[batches.Fields] = []
        self._open_bytes = self._open_records = 0
        self.records = 0
        self.scheduled = 0
        self.bytes = 0
        # What was checked, as it is once decompressed.
        self.inflated_bytes = 0
        self.topics: dict[bytes, str] = {}

    def add(self, key: EntryKey, data: bytes, records: int, now_ms: int) -> None:
        if self._open and self._open_bytes + len(data) > self._step_bytes:
            self.close()
        self._open.append((now_ms, key.encode(), data, ()))
        self._open_bytes += len(data)
        self._open_records += records
        self.topics[key.uuid] = key.topic
        self.records += records

    def close(self) -> None:
        if self._open:
            self.batches.append(encoded(PARTITION, self._open))
            self.counts.append(self._open_records)
            self._open, self._open_bytes, self._open_records = [], 0, 0

    def topic_refs(self) -> list[TopicRef]:
        return [TopicRef(uuid, name) for uuid, name in self.topics.items()]


def make_ready(
    around: Surroundings, entries: Sequence[StagedEntry], step_bytes: int
) -> Generator[Pending[Any], Any, Ready]:
    """Errors have the index of the bad one in the field `entry`; nothing is stored then. Topics
    that had to be made, stay."""
    topics = yield from _topics(around, entries)
    ready = Ready(step_bytes)
    breaths = Breaths()
    for at, entry in enumerate(entries):
        topic = topics[entry.topic]
        records, inflated_bytes = ready.records, ready.inflated_bytes
        try:
            add = _add_schedules if entry.deliver_at_ms else _add_batch
            if add(ready, topic, entry, around) and not topic.uses_lanes:
                topics[entry.topic] = yield around.topics.use_lanes(topic.name)
        except MillstreamError as error:
            error.fields["entry"] = at
            raise
        ready.bytes += len(entry.batch)
        if breaths.is_due(ready.records - records, ready.inflated_bytes - inflated_bytes):
            yield around.breath()
    ready.close()
    return ready


def _topics(
    around: Surroundings, entries: Sequence[StagedEntry]
) -> Generator[Pending[Any], Any, dict[str, Topic]]:
    found: dict[str, Topic] = {}
    for at, entry in enumerate(entries):
        if entry.topic not in found:
            try:
                found[entry.topic] = yield around.topics.ensure(entry.topic)
            except MillstreamError as error:
                error.fields["entry"] = at
                raise
    return found


def _add_batch(ready: Ready, topic: Topic, entry: StagedEntry, around: Surroundings) -> bool:
    """Whether it is of another lane than normal."""
    bytes_max = min(around.topics.batch_bytes_max(topic), ENTRY_BYTES_MAX)
    one, inflated_bytes = check_batch(topic, entry.partition, entry.batch, bytes_max)
    ready.inflated_bytes += inflated_bytes
    if one.header.producer_id >= 0:
        raise BatchInvalid(
            "a staged batch has no producer id: the writer and its batch say what counts once"
        )
    key = EntryKey(FOR_PARTITION, topic.uuid.bytes, entry.partition, 0, topic.name)
    ready.add(key, entry.batch, one.header.count, around.clock.wall_ms())
    return lane_of(one.header.attributes) != NORMAL


# ---- records that are for later


def _add_schedules(ready: Ready, topic: Topic, entry: StagedEntry, around: Surroundings) -> bool:
    """Whether some are of another lane than normal."""
    if entry.partition != -1 and not 0 <= entry.partition < topic.partitions:
        raise partition_unknown(topic, entry.partition)
    due_ms, now_ms = entry.deliver_at_ms, around.clock.wall_ms()
    if due_ms < 0:
        raise DelayInvalid(f"{due_ms} is not a time in milliseconds since 1970")
    bytes_max = min(around.topics.batch_bytes_max(topic), ENTRY_BYTES_MAX)
    require_count(batches.verify(entry.batch, bytes_max=bytes_max))
    header = batches.examine(entry.batch, bytes_max=bytes_max)
    if header.is_control or header.is_transactional:
        raise BatchInvalid("a batch of records for later is neither control nor transactional")
    fields: list[batches.Fields] = []
    size, has_lanes = 0, False
    for at, record in enumerate(batches.decode(entry.batch)):
        outgoing = _outgoing(record, entry)
        due_of(outgoing, now_ms, at)
        more = check_record(topic, outgoing, at)
        check_schedule(more, at)
        if fields and (len(fields) == BATCH_RECORDS_MAX or size + more > BATCH_BYTES):
            _add_batch_of_schedules(ready, topic, due_ms, fields, now_ms)
            fields, size = [], 0
        fields.append(schedule_fields(topic, outgoing, due_ms))
        size += more
        ready.inflated_bytes += more
        has_lanes = has_lanes or outgoing.lane != NORMAL
    if fields:
        _add_batch_of_schedules(ready, topic, due_ms, fields, now_ms)
    return has_lanes


def _outgoing(record: batches.Record, entry: StagedEntry) -> Outgoing:
    headers = tuple(one for one in record.headers if one[0] != LANE_HEADER)
    lane = NORMAL if record.lane is None else LANES.index(record.lane)
    partition = None if entry.partition < 0 else entry.partition
    timestamp_ms = max(record.timestamp, 0)
    due_ms = entry.deliver_at_ms
    return Outgoing(
        record.key, record.value, headers, timestamp_ms, partition, lane, deliver_at_ms=due_ms
    )


def _add_batch_of_schedules(
    ready: Ready, topic: Topic, due_ms: int, fields: list[batches.Fields], now_ms: int
) -> None:
    data = batches.encode(fields)
    key = EntryKey(FOR_SCHEDULES, topic.uuid.bytes, -1, due_ms, topic.name)
    ready.add(key, data, len(fields), now_ms)
    ready.scheduled += len(fields)
