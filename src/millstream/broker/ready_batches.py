"""Batches that come ready-made: checked from outside and from inside, and stored as they came.

They are opened once, because what does not open would stop every reader that comes to it, and
because a message in one of them may be too large for its topic. A few bytes may decompress to
very many records. So there is a limit to those of one batch, which is checked in one turn of the
loop, and to those of one request; and others have a turn between batches.
"""

from __future__ import annotations

from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.topics import Topic
    from millstream.engine.pending import Pending

# Of one batch: a MiB of the smallest records there are. All are checked in one turn, which takes
# some 50 ms.
BATCH_RECORDS_MAX = 131_072
# Of one batch, headers of all its records; they cost as much as records.
BATCH_HEADERS_MAX = 500_000
# Of one request, in all its batches: half a second of checks.
REQUEST_RECORDS_MAX = 1_000_000
# Of one request, decompressed: what one batch may have too.
REQUEST_INFLATED_BYTES_MAX = batches.INFLATED_BYTES_MAX
# After so much was checked, others have a turn: a few milliseconds, which requests of many
# batches of ordinary size stay below.
BREATH_RECORDS = 10_000
BREATH_BYTES = 4 * 1024 * 1024


class Checked(NamedTuple):
    entry: Entry
    # As it is once decompressed.
    inflated_bytes: int


class Breaths:
    """When a long check lets others have a turn."""

    __slots__ = ("_bytes", "_records")

    def __init__(self) -> None:
        self._bytes = self._records = 0

    def is_due(self, records: int, inflated_bytes: int) -> bool:
        """After so much more was checked."""
        self._records += records
        self._bytes += inflated_bytes
        if self._records < BREATH_RECORDS and self._bytes < BREATH_BYTES:
            return False
        self._bytes = self._records = 0
        return True


def check_batches(
    topic: Topic,
    entries: Sequence[tuple[int, bytes]],
    bytes_max: int,
    breath: Callable[[], Pending[None]],
) -> Generator[Pending[Any], Any, list[Entry]]:
    """All of them; the error of the first that is wrong has its index in the field `batch`."""
    if not entries:
        raise BatchCountInvalid("there is no batch to publish")
    ready: list[Entry] = []
    breaths = Breaths()
    records = inflated_bytes = 0
    for at, (number, data) in enumerate(entries):
        try:
            one = check_batch(
                topic, number, data, bytes_max, REQUEST_INFLATED_BYTES_MAX - inflated_bytes
            )
            records += one.entry.header.count
            inflated_bytes += one.inflated_bytes
            if records > REQUEST_RECORDS_MAX:
                raise _too_many(
                    "the batches of one request have", REQUEST_RECORDS_MAX, "send fewer at once"
                )
        except MillstreamError as error:
            error.fields["batch"] = at
            raise
        ready.append(one.entry)
        if at + 1 < len(entries) and breaths.is_due(one.entry.header.count, one.inflated_bytes):
            yield breath()
    return ready


def require_partitions(topic: Topic, numbers: Sequence[int]) -> None:
    """The topic has all of them."""
    for at, number in enumerate(numbers):
        if not 0 <= number < topic.partitions:
            error = partition_unknown(topic, number)
            error.fields["batch"] = at
            raise error


def check_batch(
    topic: Topic,
    number: int,
    data: bytes,
    bytes_max: int,
    inflated_bytes_max: int = batches.INFLATED_BYTES_MAX,
) -> Checked:
    """One batch, for a partition of the topic."""
    if not 0 <= number < topic.partitions:
        raise partition_unknown(topic, number)
    header = batches.verify(data, bytes_max=bytes_max)
    require_count(header)
    opened = _opened(data, header, inflated_bytes_max)
    batches.examine(opened, bytes_max=len(opened))
    if header.is_control:
        raise BatchInvalid("a control batch is for the broker to write, not for a client")
    if header.is_transactional:
        raise BatchInvalid("there are no transactions; send the batch without one")
    _require_records(topic, header, opened)
    return Checked(Entry(PartitionId(topic.name, number), data, header), len(opened))


def require_count(header: batches.Header) -> None:
    """The batch has no more records than one may have."""
    if header.count > BATCH_RECORDS_MAX:
        raise _too_many("the batch has", BATCH_RECORDS_MAX, "make several of it")


def _opened(data: bytes, header: batches.Header, inflated_bytes_max: int) -> bytes:
    """The batch as it is without compression, so that it is decompressed once."""
    if len(data) > inflated_bytes_max:
        raise _too_large()
    try:
        return batches.opened(data, header, inflated_bytes_max)
    except BatchTooLarge:
        if inflated_bytes_max == batches.INFLATED_BYTES_MAX:
            raise
        raise _too_large() from None


def _require_records(topic: Topic, header: batches.Header, opened: bytes) -> None:
    """Its records are looked at one by one only when one of them could be larger than the topic
    allows, which most batches as a whole are not, or when they need something.

    Of columns, because an object for each would take ten times as long.
    """
    has_large = len(opened) > batches.HEADER_BYTES + topic.settings.message_bytes_max
    has_lane = bool(header.attributes & batches.LANE_MASK)
    if not (has_large or has_lane or topic.settings.compact):
        return
    columns = batches.decode_columns(opened, check_crc=False)
    if columns.header_count > BATCH_HEADERS_MAX:
        raise BatchTooLarge(
            f"the records of the batch have more than {BATCH_HEADERS_MAX} headers; make several "
            "of it",
            limit_headers=BATCH_HEADERS_MAX,
        )
    if has_large:
        _require_sizes(topic, columns)
    if topic.settings.compact and columns.key.nulls:
        raise key_required(topic, _first_null(columns.key.validity))
    if has_lane:
        _require_lane(header, columns)


def _require_sizes(topic: Topic, columns: batches.Columns) -> None:
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


def _require_lane(header: batches.Header, columns: batches.Columns) -> None:
    """A batch is served by what its header says, its records show what they say themselves."""
    if header.lane is None:
        number = (header.attributes & batches.LANE_MASK) >> batches.LANE_SHIFT
        raise BatchInvalid(f"attribute bits 8 to 10 are {number}; lanes are 1 to {LANE_COUNT}")
    wanted, has_nulls = LANES.index(header.lane), columns.lane_nulls > 0
    said = bytes(columns.lane)
    if not has_nulls and said.count(wanted) == columns.rows:
        return
    for at, lane in enumerate(said):
        is_null = has_nulls and _is_null(columns.lane_validity, at)
        if wanted != NORMAL if is_null else lane != wanted:
            raise BatchInvalid(
                f"the batch is of lane {header.lane}, and record {at} in it says "
                f"{None if is_null else LANES[lane]}; each record needs the header {LANE_HEADER} "
                "with the lane of its batch",
                record=at,
            )


def _first_null(validity: batches.Data | None) -> int:
    """There is one."""
    at = 0
    while not _is_null(validity, at):
        at += 1
    return at


def _is_null(validity: batches.Data | None, at: int) -> bool:
    assert validity is not None
    return not memoryview(validity).cast("B")[at >> 3] >> (at & 7) & 1


def _too_large() -> BatchTooLarge:
    most = REQUEST_INFLATED_BYTES_MAX
    return BatchTooLarge(
        f"decompressed, the batches of one request have more than {most} bytes; send fewer at once",
        limit_bytes=most,
    )


def _too_many(what: str, limit: int, remedy: str) -> BatchTooLarge:
    return BatchTooLarge(f"{what} more than {limit} records; {remedy}", limit_records=limit)
