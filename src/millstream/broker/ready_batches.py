"""Batches that come ready-made: checked from outside and from inside, and stored as they came.

They are opened once, because what does not open would stop every reader that comes to it, and
because a message in one of them may be too large for its topic.
"""

from __future__ import annotations

from operator import add, sub
from typing import TYPE_CHECKING

from millstream.broker.lanes import LANE_COUNT, NORMAL, lane_of
from millstream.broker.outgoing import (
    HEADER_OVERHEAD_BYTES,
    Outgoing,
    key_required,
    require_size,
)
from millstream.broker.topics import partition_unknown
from millstream.broker.views import Entry
from millstream.errors import BatchCountInvalid, BatchInvalid, BatchTooLarge, MillstreamError
from millstream.log import batch as batches
from millstream.log.batch import LANE_HEADER, LANES
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.topics import Topic


def check_batches(
    topic: Topic, entries: Sequence[tuple[int, bytes]], bytes_max: int
) -> list[Entry]:
    """All of them; the error of the first that is wrong has its index in the field `batch`."""
    if not entries:
        raise BatchCountInvalid("there is no batch to publish")
    return [_check(topic, number, data, bytes_max, at) for at, (number, data) in enumerate(entries)]


def _check(topic: Topic, number: int, data: bytes, bytes_max: int, at: int) -> Entry:
    if not 0 <= number < topic.partitions:
        error = partition_unknown(topic, number)
        error.fields["batch"] = at
        raise error
    try:
        header = _examine(topic, data, bytes_max)
        if header.is_control:
            raise BatchInvalid("a control batch is for the broker to write, not for a client")
        if header.is_transactional:
            raise BatchInvalid("there are no transactions; send the batch without one")
        if topic.settings.compact:
            _require_keys(topic, batches.keys(data))
        if header.attributes & batches.LANE_MASK:
            _check_lane(header, data)
    except MillstreamError as error:
        error.fields["batch"] = at
        raise
    return Entry(PartitionId(topic.name, number), data, header)


def _examine(topic: Topic, data: bytes, bytes_max: int) -> batches.Header:
    """Its records are looked at one by one only when one of them could be larger than the topic
    allows, which most batches as a whole are not."""
    limit = topic.settings.message_bytes_max
    if len(data) <= batches.HEADER_BYTES + limit:
        try:
            return batches.examine(data, bytes_max=bytes_max, inflated_bytes_max=limit)
        except BatchTooLarge:
            # Decompressed it is larger than one message may be; as a whole it may still be.
            pass
    header = batches.examine(data, bytes_max=bytes_max)
    _require_sizes(topic, batches.decode_columns(data, check_crc=False))
    return header


def _require_sizes(topic: Topic, columns: batches.Columns) -> None:
    """Of columns, because a batch may decompress to millions of records, and so many objects
    would take gigabytes."""
    first, names, values = columns.header_offsets, columns.header_key, columns.header_value
    sizes = map(add, _lengths(columns.key.offsets), _lengths(columns.value.offsets))
    if columns.header_count:
        ends = map(add, _int32s(names.offsets), _int32s(values.offsets))
        before = [end + at * HEADER_OVERHEAD_BYTES for at, end in enumerate(ends)]
        spans = [before[at] for at in _int32s(first)]
        sizes = map(add, sizes, map(sub, spans[1:], spans))
    for at, size in enumerate(sizes):
        if size > topic.settings.message_bytes_max:
            found = range(*_int32s(first)[at : at + 2])
            headers = tuple((_item(names, one).decode(), _item(values, one)) for one in found)
            record = Outgoing(_item(columns.key, at), _item(columns.value, at), headers)
            require_size(topic, record, at)


def _lengths(offsets: batches.Data) -> map[int]:
    ends = _int32s(offsets)
    return map(sub, ends[1:], ends)


def _int32s(data: batches.Data) -> memoryview[int]:
    return memoryview(data).cast("B").cast("i")


def _item(column: batches.BinaryColumn, at: int) -> bytes:
    start, end = _int32s(column.offsets)[at : at + 2]
    return bytes(memoryview(column.data)[start:end])


def uses_lanes(ready: Sequence[Entry]) -> bool:
    """Whether one of them is of another lane than normal."""
    return any(lane_of(one.header.attributes) != NORMAL for one in ready)


def _check_lane(header: batches.Header, data: bytes) -> None:
    """A batch is served by what its header says, its records show what they say themselves."""
    if header.lane is None:
        number = (header.attributes & batches.LANE_MASK) >> batches.LANE_SHIFT
        raise BatchInvalid(f"attribute bits 8 to 10 are {number}; lanes are 1 to {LANE_COUNT}")
    for at, record in enumerate(batches.decode(data)):
        lane = record.lane
        if lane != header.lane and (lane is not None or header.lane != LANES[NORMAL]):
            raise BatchInvalid(
                f"the batch is of lane {header.lane}, and record {at} in it says {lane}; each "
                f"record needs the header {LANE_HEADER} with the lane of its batch",
                record=at,
            )


def _require_keys(topic: Topic, keys: list[tuple[int, bytes | None, bool]]) -> None:
    for at, (_, key, _) in enumerate(keys):
        if key is None:
            raise key_required(topic, at)
