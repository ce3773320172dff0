"""One step of a commit: staged batches are read, and made entries of one atomic append.

A step is whole batches of `__staged`, about a mebibyte of them. What is in them is placed as it
is. What cannot be placed any more is left out and counted, because nothing may hold up a writer
for ever: its topic was deleted since, or its records lost to damage on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from millstream.broker.schedule_values import PARTITION as SCHEDULES
from millstream.broker.staged_values import (
    FOR_SCHEDULES,
    PARTITION,
    EntryKey,
    Place,
    read_key,
)
from millstream.broker.views import Entry
from millstream.errors import BatchInvalid, LogDamaged, OffsetOutOfRange
from millstream.log import batch as batches
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.schedules import Schedules
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.broker.traffic import Traffic
    from millstream.engine.pending import Pending
    from millstream.engine.protocol import Engine

# Why records of a commit are in no topic.
# topic_deleted: also when there is another of its name by now. key_required: the topic is compacted
# since. log_damaged: what was staged cannot be read.
SKIP_REASONS = ("topic_deleted", "key_required", "log_damaged")


class Step:
    """What one atomic append copies."""

    __slots__ = ("at", "entries", "records", "scheduled", "skipped", "topics")

    def __init__(self, at: int) -> None:
        # Of the commit's batches in `__staged`, how many are copied after this step.
        self.at = at
        self.entries: list[Entry] = []
        self.records = 0
        self.skipped: dict[str, int] = {}
        # Each topic as it was seen, with records and bytes for it.
        self.topics: dict[str, tuple[Topic, int, int]] = {}
        # Of schedules: which entry they are, their topic, and when they are due.
        self.scheduled: list[tuple[int, Topic, int, int]] = []

    def skip(self, why: str, count: int) -> None:
        self.skipped[why] = self.skipped.get(why, 0) + count

    def is_current(self, around: Surroundings) -> bool:
        """Whether its topics are still the same."""
        by_name = around.topics.by_name
        return all(by_name.get(name) is seen for name, (seen, _, _) in self.topics.items())

    def copied(self, traffic: Traffic, schedules: Schedules, offsets: Sequence[int]) -> None:
        """It is durable: tell those who count."""
        for name, (_, records, size) in self.topics.items():
            if records:
                counts = traffic.of(name)
                counts.messages_in += records
                counts.bytes_in += size
        for at, topic, due_ms, count in self.scheduled:
            fields = [(due_ms, None, None, ())] * count
            schedules.added(topic, offsets[at], fields)


class Copying:
    """Makes steps."""

    __slots__ = ("_around", "_engine", "_step_bytes")

    def __init__(self, engine: Engine, around: Surroundings, step_bytes: int) -> None:
        self._step_bytes = step_bytes
        self._engine = engine
        self._around = around

    def step(self, places: Sequence[Place], at: int) -> Generator[Pending[Any], Any, Step]:
        """From the batch `at` on."""
        step, size = Step(at), 0
        while step.at < len(places):
            place = places[step.at]
            if size and size + place.bytes > self._step_bytes:
                break
            size += place.bytes
            try:
                chunk = yield self._engine.read(PARTITION, place.offset, 1)
                header = batches.read_header(chunk.data)
                staged = batches.decode(chunk.data[: header.size], check_crc=True)
            except (LogDamaged, OffsetOutOfRange, BatchInvalid) as error:
                _logger().error(
                    "staged records lost to damage", offset=place.offset, error=error.message
                )
                step.skip("log_damaged", place.records)
            else:
                for record in staged:
                    assert record.key is not None
                    assert record.value is not None
                    self._add(step, read_key(record.key), record.value)
            step.at += 1
        return step

    def _add(self, step: Step, key: EntryKey, data: bytes) -> None:
        topic = self._around.topics.by_name.get(key.topic)
        header = batches.read_header(data)
        if topic is None or topic.uuid.bytes != key.uuid:
            step.skip("topic_deleted", header.count)
            return
        seen, records, size = step.topics.get(topic.name, (topic, 0, 0))
        step.records += header.count
        if key.kind == FOR_SCHEDULES:
            step.scheduled.append((len(step.entries), topic, key.due_ms, header.count))
            step.entries.append(Entry(SCHEDULES, data, header))
            step.topics[topic.name] = (seen, records, size)
            return
        if topic.settings.compact and any(one is None for _, one, _ in batches.keys(data)):
            step.records -= header.count
            step.skip("key_required", header.count)
            return
        if topic.is_append_time:
            data, header = batches.stamped(data, header, self._around.clock.wall_ms())
        step.entries.append(Entry(PartitionId(topic.name, key.partition), data, header))
        step.topics[topic.name] = (seen, records + header.count, size + header.size)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
