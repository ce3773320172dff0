"""Dead letters: where a topic's are kept, and how records get there.

The dead letters of `orders` are in the topic `orders.dlq`, an ordinary topic that anybody may
read. It is made when the first record is to go there. A record goes to the partition that it had
in its topic, as it is, with headers that say why (dead_letter_values.py), in one atomic append
with the settling of its delivery: after any crash it is in one place, and not in both.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from millstream.broker.dead_letter_values import (
    HEADERS_BYTES_MAX,
    NORMAL_LANE,
    DeadFacts,
    DeadLetter,
    dead_headers,
    dead_letter_topic,
    is_dead_letter_topic,
)
from millstream.broker.topic_settings import MESSAGE_BYTES_MAX, UNLIMITED
from millstream.broker.views import BATCH_BYTES, BATCH_RECORDS, Entry
from millstream.engine.pending import Pending, follow
from millstream.errors import TopicExists
from millstream.log import batch as batches
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic

__all__ = ["DeadFacts", "DeadLetter", "DeadLetters", "dead_letter_topic", "is_dead_letter_topic"]

# A batch larger than this is compressed. It is one record that was compressed when it came, or
# nearly so large as an atomic append may be.
PLAIN_BYTES_MAX = 16 * 1024 * 1024


class DeadLetters:
    """Those of all topics."""

    __slots__ = ("_around", "_ensuring", "counts")

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        # By topic and reason, since the start; of topics that there are.
        self.counts: dict[str, dict[str, int]] = {}
        around.topics.watch_deleted(self._forget)
        # Dead letter topics that are being made or changed.
        self._ensuring: dict[str, Pending[Topic]] = {}

    # ---- where they go

    def ensure(self, topic: Topic) -> Pending[Topic]:
        """The topic of a topic's dead letters, with as many partitions and room for the headers;
        made, or changed, where it is not like that."""
        assert not is_dead_letter_topic(topic.name), topic.name
        name = dead_letter_topic(topic.name)
        found = self._around.topics.by_name.get(name)
        if found is not None and _fits(topic, found) and not _needs_lanes(topic, found):
            return Pending.of(found)
        waiting = self._ensuring.get(name)
        if waiting is None:
            waiting = self._ensuring[name] = follow(self._ensure(topic, name))
            waiting.then(lambda _: self._ensuring.__delitem__(name))
        return waiting

    def _ensure(self, topic: Topic, name: str) -> Generator[Pending[Any], Any, Topic]:
        topics = self._around.topics
        if name not in topics.by_name:
            # Somebody else may have made it meanwhile.
            with suppress(TopicExists):
                yield topics.create(name, topic.partitions, _settings_for(topic))
        dlq = topics.get(name)
        if dlq.partitions < topic.partitions:
            dlq = yield topics.add_partitions(name, topic.partitions)
        if not _fits(topic, dlq):
            changes = {"message_bytes_max": _message_bytes_max(topic), "compact": False}
            dlq = yield topics.alter(name, changes)
        if _needs_lanes(topic, dlq):
            # Before the first record of another lane than normal is in it.
            dlq = yield topics.use_lanes(name)
        return dlq

    def _forget(self, topic: Topic) -> None:
        self.counts.pop(topic.name, None)

    def count(self, topic: Topic, reason: str, records: int) -> None:
        """So many are dead letters now."""
        reasons = self.counts.setdefault(topic.name, {})
        reasons[reason] = reasons.get(reason, 0) + records

    def entries(self, topic: Topic, dlq: Topic, letters: Sequence[DeadLetter]) -> list[Entry]:
        """Batches of dead letters, for one atomic append with the settling of their deliveries.

        Each holds records of one partition and one lane, in the order in which they came.
        """
        entries: list[Entry] = []
        # Of each partition and lane: the batch that is not full.
        open_: dict[tuple[int, int], tuple[list[batches.Fields], int]] = {}
        for letter in letters:
            place = (letter.partition, letter.lane)
            fields, size = open_.pop(place, ([], 0))
            record = letter.record
            headers = dead_headers(topic.name, letter)
            more = _size_of(record.key, record.value, headers)
            if fields and (size + more > BATCH_BYTES or len(fields) == BATCH_RECORDS):
                entries.append(_encoded(dlq, *place, fields, size))
                fields, size = [], 0
            fields.append((record.timestamp, record.key, record.value, headers))
            open_[place] = (fields, size + more)
        entries += [_encoded(dlq, *place, *batch) for place, batch in open_.items()]
        return entries


def _settings_for(topic: Topic) -> dict[str, object]:
    """What a new topic of dead letters is set to; all else is the broker's default.

    A dead letter keeps the time of its record. It would be gone soon after it came if it were
    kept no longer than its topic keeps records; twice as long gives it the same time once more.
    """
    kept_ms = topic.settings.retention_ms
    return {
        "fsync": topic.settings.fsync,
        "message_bytes_max": _message_bytes_max(topic),
        "compact": False,
        "retention_ms": UNLIMITED if kept_ms is None else 2 * kept_ms,
    }


def _message_bytes_max(topic: Topic) -> int:
    return min(topic.settings.message_bytes_max + HEADERS_BYTES_MAX, MESSAGE_BYTES_MAX)


def _fits(topic: Topic, dlq: Topic) -> bool:
    """A compacted topic would refuse records without a key, and lose those with one."""
    return (
        dlq.partitions >= topic.partitions
        and dlq.settings.message_bytes_max >= _message_bytes_max(topic)
        and not dlq.settings.compact
    )


def _needs_lanes(topic: Topic, dlq: Topic) -> bool:
    return topic.uses_lanes and not dlq.uses_lanes


def _size_of(key: bytes | None, value: bytes | None, headers: batches.Headers) -> int:
    size = len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(text or b"") for name, text in headers)


def _encoded(
    dlq: Topic, partition: int, lane: int, fields: list[batches.Fields], size: int
) -> Entry:
    data = batches.encode(
        fields,
        compression="none" if size <= PLAIN_BYTES_MAX else "zstd",
        lane=None if lane == NORMAL_LANE else batches.LANES[lane],
    )
    return Entry(PartitionId(dlq.name, partition), data, batches.read_header(data))
