"""Rows as Arrow columns, on their way into record batches.

Rows are taken apart by topic, partition, lane and time of delivery. The rows of one such place
become batches, in their order. All that can be wrong with a row is found here, and told with the
row's number and why; nothing of a row is looked at one by one unless it is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.log.batch import BinaryColumn, RowColumns, encode_columns, key_partitions
from millstream.spark.row_columns import Parts, flat, parts_of
from millstream.wire.lanes import LANES, NORMAL, lane_name
from millstream.wire.staged import StagedEntry

HORIZON_MS = 10 * 365 * 24 * 60 * 60 * 1000
HEADER_NAME_BYTES_MAX = 255
_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
# One scheduled record.
SCHEDULE_BYTES_MAX = 32 * 1024 * 1024
# Of a wrong value, what is said back.
SHOWN_MAX = 40
INT32, INT64 = pa.int32(), pa.int64()
# A place where a record is to go, as one number: time, then partition, then lane.
LANE_COUNT = len(LANES)


class TopicShape(NamedTuple):
    """What there is to know of a topic before rows can be made records of it."""

    name: str
    partitions: int
    partitioner: str
    message_bytes_max: int
    is_compacted: bool
    # Of a batch that is not a single row; None: as the options say.
    batch_bytes_max: int | None = None
    # What sets the limit of a message.
    limited_by: str = "its message_bytes_max"


class BadRow(NamedTuple):
    """A row that cannot be a record."""

    # Its number among the rows of its task, from 0, and in the chunk.
    row: int
    at: int
    topic: str | None
    # Where it would have gone, where that is known.
    partition: int | None
    lane: int
    bytes: int
    reason: str


class Encoded(NamedTuple):
    entries: list[StagedEntry]
    bad: list[BadRow]


class Encoder:
    """Rows of one task."""

    __slots__ = ("_batch_bytes", "_compression", "_now_ms", "_shape_of", "_topic", "_turn")

    def __init__(
        self,
        *,
        topic: str | None,
        compression: str,
        batch_bytes: int,
        shape_of: Callable[[str], TopicShape | None],
        now_ms: Callable[[], int],
        first_turn: int = 0,
    ) -> None:
        self._topic = topic
        self._compression = compression
        self._batch_bytes = batch_bytes
        # None where there is no such topic, and none can be made.
        self._shape_of = shape_of
        self._now_ms = now_ms
        # Rows without a key take turns among the partitions, a batch at a time.
        self._turn = first_turn

    def encode(self, chunk: Any, first_row: int) -> Encoded:
        """The rows of an Arrow record batch, whose names and types `sink_schema.py` has checked."""
        done = Encoded([], [])
        if chunk.num_rows == 0:
            return done
        names = chunk.schema.names
        if self._topic is not None or "topic" not in names:
            self._encode_topic(done, self._topic, chunk, None, first_row)
            return done
        topics = flat(chunk.column("topic")).cast(pa.string())
        for topic in pc.unique(topics).to_pylist():
            mask = pc.is_null(topics) if topic is None else pc.equal(topics, topic)
            rows = pc.indices_nonzero(mask)
            if len(rows) == chunk.num_rows:
                self._encode_topic(done, topic, chunk, None, first_row)
            else:
                self._encode_topic(done, topic, chunk.take(rows), rows.to_pylist(), first_row)
        done.bad.sort()
        return done

    def _encode_topic(
        self, done: Encoded, topic: str | None, chunk: Any, at: list[int] | None, first_row: int
    ) -> None:
        """`at` has the places of these rows in the chunk, when they are not all of it."""
        shape = self._shape_of(topic) if topic else None
        parts = parts_of(chunk)
        faults: dict[int, str] = {}
        partitions = None
        if shape is None:
            faults = dict.fromkeys(range(parts.rows), _no_topic(topic))
        else:
            place = self._placed(shape, parts, faults)
            partitions = place.partitions
            done.entries.extend(self._entries(shape, parts, place, faults))
        for row, reason in sorted(faults.items()):
            here = row if at is None else at[row]
            done.bad.append(
                BadRow(
                    row=first_row + here,
                    at=here,
                    topic=topic,
                    partition=_known(partitions, row, shape),
                    lane=_known_lane(parts, row),
                    bytes=parts.sizes[row].as_py(),
                    reason=reason,
                )
            )

    def _placed(self, shape: TopicShape, parts: Parts, faults: dict[int, str]) -> _Placed:
        """Where each row goes. Rows that cannot be records are noted, the first reason of each."""
        now_ms = self._now_ms()
        due = _due(parts, now_ms, faults)
        times = _times(parts, now_ms, faults)
        _check_lanes(parts, faults)
        _check_headers(parts, faults)
        _check_sizes(shape, parts, due, faults)
        if shape.is_compacted:
            _note(faults, pc.is_null(parts.key), lambda _: "a compacted topic needs a key")
        partitions = self._partitions(shape, parts, due, faults)
        return _Placed(partitions, due, times)

    def _partitions(
        self, shape: TopicShape, parts: Parts, due: Any | None, faults: dict[int, str]
    ) -> Any:
        """By the column, else by the key, else by turn."""
        keyless = parts.key.null_count
        run = max(1, self._batch_bytes * parts.rows // max(parts.bytes, 1))
        found = key_partitions(
            column_of(parts.key),
            parts.rows,
            shape.partitions,
            partitioner=shape.partitioner,
            first=self._turn,
            run=run,
        )
        self._turn += -(-keyless // run)
        partitions = pa.Array.from_buffers(INT32, parts.rows, [None, pa.py_buffer(found)])
        if due is not None:
            # The broker finds it when the record is due: there may be more partitions by then.
            partitions = pc.if_else(pc.greater(due, 0), pa.scalar(-1, INT32), partitions)
        given = parts.partition
        if given is None:
            return partitions
        wrong = pc.or_(pc.less(given, 0), pc.greater_equal(given, shape.partitions))
        _note(
            faults,
            wrong,
            lambda row: (
                f"topic {shape.name} has no partition {given[row].as_py()}; it has 0 to "
                f"{shape.partitions - 1}"
            ),
        )
        return pc.coalesce(given, partitions)

    def _entries(
        self, shape: TopicShape, parts: Parts, place: _Placed, faults: dict[int, str]
    ) -> list[StagedEntry]:
        groups, places = _grouped(shape, parts, place, faults)
        batch_bytes = self._batch_bytes
        if shape.batch_bytes_max is not None:
            batch_bytes = min(batch_bytes, shape.batch_bytes_max)
        encoded = encode_columns(
            RowColumns(
                rows=parts.rows,
                timestamp=memoryview(place.times.buffers()[1]),
                key=column_of(parts.key),
                value=column_of(parts.value),
                header_offsets=parts.header_offsets,
                header_count=parts.header_count,
                header_key=None if parts.header_key is None else column_of(parts.header_key),
                header_value=None if parts.header_value is None else column_of(parts.header_value),
            ),
            memoryview(groups.buffers()[1]),
            lanes=[lane_name(lane) for _, _, lane in places],
            batch_bytes=batch_bytes,
            compression=self._compression,
        )
        return [
            StagedEntry(shape.name, partition, due_ms, batch)
            for (due_ms, partition, _), batches in zip(places, encoded, strict=True)
            for batch in batches
        ]


class _Placed(NamedTuple):
    partitions: Any  # int32
    due: Any | None  # int64, milliseconds; 0 is now
    times: Any  # int64, milliseconds


def column_of(column: Any) -> BinaryColumn:
    """The buffers of a column of bytes that begins at its first item."""
    assert column.offset == 0
    validity, offsets, data = column.buffers()
    return BinaryColumn(
        nulls=column.null_count,
        validity=memoryview(validity) if column.null_count else None,
        offsets=memoryview(offsets) if len(column) else b"\0\0\0\0",
        data=b"" if data is None else memoryview(data),
    )


def _grouped(
    shape: TopicShape, parts: Parts, place: _Placed, faults: dict[int, str]
) -> tuple[Any, list[tuple[int, int, int]]]:
    """The number of each row's place, -1 for rows that are left out, and what the numbers mean:
    due, partition and lane."""
    places: list[tuple[int, int, int]]
    if parts.lane is None and place.due is None:
        groups = place.partitions
        places = [(0, partition, NORMAL) for partition in range(shape.partitions)]
    else:
        code = pc.add(pc.cast(place.partitions, INT64), 1)
        dues = [0]
        if place.due is not None:
            by_time = pc.dictionary_encode(place.due)
            dues = by_time.dictionary.to_pylist()
            time = pc.multiply(pc.cast(by_time.indices, INT64), shape.partitions + 1)
            code = pc.add(code, time)
        lanes = NORMAL if parts.lane is None else pc.cast(pc.fill_null(parts.lane, NORMAL), INT64)
        code = pc.add(pc.multiply(code, LANE_COUNT), lanes)
        # Rows whose partition is wrong would make numbers that mean another place.
        code = _without(code, faults)
        by_place = pc.dictionary_encode(code)
        groups = by_place.indices
        places = []
        for number in by_place.dictionary.to_pylist():
            rest, lane = divmod(max(number, 0), LANE_COUNT)
            time, partition = divmod(rest, shape.partitions + 1)
            places.append((dues[time], partition - 1, lane))
    return flat(_without(pc.cast(groups, INT32), faults)), places


def _without(numbers: Any, faults: dict[int, str]) -> Any:
    if not faults:
        return numbers
    wrong = [False] * len(numbers)
    for row in faults:
        wrong[row] = True
    return pc.if_else(pa.array(wrong), pa.scalar(-1, numbers.type), numbers)


def _known(partitions: Any | None, row: int, shape: TopicShape | None) -> int | None:
    """The partition of a bad row, if that is not what is bad."""
    if partitions is None or shape is None:
        return None
    number: int = partitions[row].as_py()
    return number if 0 <= number < shape.partitions else None


def _known_lane(parts: Parts, row: int) -> int:
    lane: int | None = None if parts.lane is None else parts.lane[row].as_py()
    return NORMAL if lane is None else lane


# ---- what can be wrong with a row


def _note(faults: dict[int, str], mask: Any, reason: Callable[[int], str]) -> None:
    for row in pc.indices_nonzero(mask).to_pylist():
        faults.setdefault(row, reason(row))


def is_topic_name(topic: str) -> bool:
    """Whether a topic may have that name, here and with every broker of the Kafka protocol."""
    return _TOPIC_NAME.fullmatch(topic) is not None and topic not in (".", "..")


def _no_topic(topic: str | None) -> str:
    if topic is None:
        return "the topic is null; fill the column topic, or set the option topic"
    if not topic:
        return "the topic is an empty text"
    if not is_topic_name(topic):
        return f"{topic!r} is no topic's name: 1 to 249 of letters, digits, `.`, `_` and `-`"
    return f"there is no topic {topic}; create it, or let the broker make topics"


def _due(parts: Parts, now_ms: int, faults: dict[int, str]) -> Any | None:
    """When rows are to appear: 0 is now."""
    if parts.deliver_at is None:
        return None
    # Never early: part of a millisecond rounds up.
    whole = pc.divide(parts.deliver_at, 1000)
    due = pc.add(whole, pc.cast(pc.greater(parts.deliver_at, pc.multiply(whole, 1000)), INT64))
    _note(
        faults,
        pc.greater(due, now_ms + HORIZON_MS),
        lambda _: "deliver_at is more than ten years ahead",
    )
    due = pc.fill_null(due, 0)
    due = pc.if_else(pc.greater(due, now_ms), due, pa.scalar(0, INT64))
    return due if pc.any(pc.greater(due, 0)).as_py() else None


def _times(parts: Parts, now_ms: int, faults: dict[int, str]) -> Any:
    if parts.timestamp is None:
        return pa.repeat(pa.scalar(now_ms, INT64), parts.rows)
    _note(faults, pc.less(parts.timestamp, 0), lambda _: "timestamp is before 1970")
    return flat(pc.fill_null(pc.divide(parts.timestamp, 1000), now_ms))


def _check_lanes(parts: Parts, faults: dict[int, str]) -> None:
    if parts.lane is None or parts.lane_word is None:
        return
    words = parts.lane_word
    wrong = pc.and_(pc.is_null(parts.lane), pc.is_valid(words))
    _note(
        faults,
        wrong,
        lambda row: (
            f"there is no lane {words[row].as_py()[:SHOWN_MAX]!r}; take one of {', '.join(LANES)}"
        ),
    )


def _check_headers(parts: Parts, faults: dict[int, str]) -> None:
    if parts.header_key is None or not len(parts.header_key):
        return
    sizes = pc.fill_null(pc.binary_length(parts.header_key), 0)
    wrong = pc.or_(pc.less(sizes, 1), pc.greater(sizes, HEADER_NAME_BYTES_MAX))
    for header in pc.indices_nonzero(wrong).to_pylist():
        faults.setdefault(
            parts.row_of_header(header),
            f"the name of a header is null, or has not 1 to {HEADER_NAME_BYTES_MAX} bytes",
        )


def _check_sizes(shape: TopicShape, parts: Parts, due: Any | None, faults: dict[int, str]) -> None:
    sizes, most = parts.sizes, shape.message_bytes_max
    _note(
        faults,
        pc.greater(sizes, most),
        lambda row: (
            f"the record has {sizes[row].as_py()} bytes, topic {shape.name} takes {most}; raise "
            f"{shape.limited_by}, or make the value smaller"
        ),
    )
    if due is None or most <= SCHEDULE_BYTES_MAX:
        return
    _note(
        faults,
        pc.and_(pc.greater(due, 0), pc.greater(sizes, SCHEDULE_BYTES_MAX)),
        lambda row: (
            f"the record has {sizes[row].as_py()} bytes; one with a deliver_at has at most "
            f"{SCHEDULE_BYTES_MAX}"
        ),
    )
