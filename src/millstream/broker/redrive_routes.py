"""Where a dead letter goes when it is put back, and what it looks like there.

To its own partition where its topic still has that; else, and in another topic, to that of its
key; without a key to the partition of its number, or one for it when there are fewer. Its key,
value, lane and own headers stay. What it says of its end goes, and `ms-redrives` counts how often
it was put back, so that one that goes round in a circle is seen.

It gets the time of the redrive: with its old one, retention could remove it before anybody has
read it. The old one stays in `ms-first-time`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.dead_letter_values import (
    FIRST_TIME_HEADER,
    HEADER_PREFIX,
    NORMAL_LANE,
    REDRIVES_HEADER,
)
from millstream.broker.deadletters import PLAIN_BYTES_MAX
from millstream.broker.outgoing import size_of
from millstream.broker.views import BATCH_BYTES, Entry
from millstream.log import batch as batches
from millstream.log.batch import LANES
from millstream.log.partition import PartitionId
from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from millstream.broker.dead_letter_reading import Letter
    from millstream.broker.topics import Topic, Topics


class Target(NamedTuple):
    topic: Topic
    partition: int


def target_of(
    topics: Topics, letter: Letter, origin: str, to: str | None
) -> tuple[Target | None, str | None]:
    """Where a dead letter goes, or why it stays."""
    name = to or letter.facts.topic or origin
    topic = topics.by_name.get(name)
    if topic is None:
        return None, "topic_unknown"
    if topic.settings.compact:
        return None, "topic_compacted"
    if size_of(letter.record) > topic.settings.message_bytes_max:
        return None, "message_too_large"
    return Target(topic, _partition(topic, letter, is_origin=to is None)), None


def _partition(topic: Topic, letter: Letter, *, is_origin: bool) -> int:
    number, key = letter.partition, letter.record.key
    if is_origin and number < topic.partitions:
        return number
    if key is not None:
        return partition_of_key(key, topic.partitions, topic.settings.partitioner)
    return number % topic.partitions


def fields_of(letter: Letter, now_ms: int) -> batches.Fields:
    record, facts = letter.record, letter.facts
    headers = [
        one
        for one in record.headers
        if not one[0].startswith(HEADER_PREFIX) and one[0] != REDRIVES_HEADER
    ]
    headers.append((REDRIVES_HEADER, str(facts.redrives + 1).encode()))
    if all(name != FIRST_TIME_HEADER for name, _ in headers):
        headers.append((FIRST_TIME_HEADER, str(record.timestamp).encode()))
    return now_ms, record.key, record.value, headers


class _Open(NamedTuple):
    """A batch that is not full."""

    is_append_time: bool
    lane: int
    fields: list[batches.Fields]
    size: int


class Outgoings:
    """Records of one step, as batches of one partition and one lane each, in their order."""

    __slots__ = ("_open", "_ready")

    def __init__(self) -> None:
        self._ready: list[Entry] = []
        # Of each partition: the batch that is not full.
        self._open: dict[PartitionId, _Open] = {}

    def add(self, target: Target, lane: int, fields: batches.Fields, size: int) -> None:
        id = PartitionId(target.topic.name, target.partition)
        known = self._open.pop(id, None)
        if known is not None and (known.lane != lane or known.size + size > BATCH_BYTES):
            self._ready.append(_encoded(id, known))
            known = None
        batch = known or _Open(target.topic.is_append_time, lane, [], 0)
        batch.fields.append(fields)
        self._open[id] = batch._replace(size=batch.size + size)

    def entries(self) -> list[Entry]:
        rest = [_encoded(id, one) for id, one in self._open.items()]
        return self._ready + rest


def _encoded(id: PartitionId, batch: _Open) -> Entry:
    data = batches.encode(
        batch.fields,
        compression="none" if batch.size <= PLAIN_BYTES_MAX else "zstd",
        append_time=batch.fields[-1][0] if batch.is_append_time else None,
        lane=None if batch.lane == NORMAL_LANE else LANES[batch.lane],
    )
    return Entry(id, data, batches.read_header(data))
