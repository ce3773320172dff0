"""Rows that cannot be records, on their way to the dead letters of their topic.

They say why in the headers that the broker's own dead letters have. They were never in their
topic, so they have no offset there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.log.batch import LANE_HEADER, LANES, Fields, encode
from millstream.spark.encoding import BadRow
from millstream.spark.row_columns import HEADER_OVERHEAD_BYTES
from millstream.wire import dead_letters as dead
from millstream.wire.lanes import lane_headers, lane_name
from millstream.wire.partitioning import partition_of_key
from millstream.wire.staged import StagedEntry

REASON = "rejected"
NAME_BYTES_MAX = 255


def dead_entries(
    chunk: Any, bad: Sequence[BadRow], topic: str, *, writer: str, partitions: int, now_ms: int
) -> list[StagedEntry]:
    """Each bad row of one topic as a batch of its own; there are few."""
    entries = []
    for row in bad:
        assert row.topic == topic
        fields = _fields(chunk, row, writer, now_ms)
        key = fields[1]
        partition = row.partition
        if partition is None:
            partition = 0 if key is None else partition_of_key(bytes(key), partitions)
        batch = encode([fields], lane=lane_name(row.lane))
        entries.append(StagedEntry(dead.dead_letter_topic(topic), partition, 0, batch))
    return entries


def _fields(chunk: Any, bad: BadRow, writer: str, now_ms: int) -> Fields:
    [row] = chunk.slice(bad.at, 1).to_pylist()
    time = row.get("timestamp")
    timestamp_ms = now_ms if time is None else max(0, round(time.timestamp() * 1000))
    facts = (
        (dead.TOPIC_HEADER, bad.topic or ""),
        (dead.PARTITION_HEADER, None if bad.partition is None else str(bad.partition)),
        (dead.GROUP_HEADER, writer),
        (dead.DELIVERIES_HEADER, "1"),
        (dead.REASON_HEADER, REASON),
        (dead.ERROR_HEADER, dead.bounded_error(bad.reason)),
        (dead.FIRST_FAILURE_HEADER, str(now_ms)),
        (dead.LAST_FAILURE_HEADER, str(now_ms)),
    )
    said = tuple((name, text.encode()) for name, text in facts if text is not None)
    headers = (*_own_headers(row.get("headers")), *said)
    return timestamp_ms, _raw(row.get("key")), _raw(row["value"]), lane_headers(headers, bad.lane)


def _own_headers(pairs: Any) -> tuple[tuple[str, bytes | None], ...]:
    """Those of the row; what cannot be a header's name is cut, so that the row has a place."""
    found = []
    for pair in pairs or ():
        if pair is None:
            continue
        name = (pair["key"] or "").encode()[:NAME_BYTES_MAX].decode(errors="ignore") or "null"
        if name != LANE_HEADER and not name.startswith(dead.HEADER_PREFIX):
            found.append((name, pair["value"]))
    return tuple(found)


def _raw(content: str | bytes | None) -> bytes | None:
    return content.encode() if isinstance(content, str) else content


def bytes_wanted(bad: Sequence[BadRow]) -> int:
    """The message_bytes_max that the topic of dead letters must have for all of these."""
    names = len(LANE_HEADER) + max(map(len, LANES)) + HEADER_OVERHEAD_BYTES
    most = max(row.bytes for row in bad)
    return most + dead.HEADERS_BYTES_MAX + names
