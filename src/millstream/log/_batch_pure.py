"""The batch codec in plain Python: the twin that runs where there is no C compiler.

`_batch.pyx` does the same, quicker; one test suite holds both to the same answers and errors.
After the header (`_batch_layout.py`) and once decompressed, a batch is its records, each:

    length            varint    bytes of the record that follow
    attributes        1 byte    not used
    timestamp delta   varlong   to the base timestamp
    offset delta      varint    to the base offset; rises from record to record
    key length        varint    -1: no key
    key
    value length      varint    -1: no value (a tombstone)
    value
    header count      varint
    of each header    varint key length, key (UTF-8), varint value length or -1, value

A varint is 7 bits a byte, low bits first, high bit set on all but the last; signs are zigzag:
0, -1, 1, -2 are written 0, 1, 2, 3. It has at most 5 bytes, a varlong 10.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from millstream.errors import BatchCountInvalid, BatchInvalid, BatchLengthInvalid
from millstream.log._batch_compression import compress, decompress
from millstream.log._batch_layout import (
    BODY_BYTES_MAX,
    COMPRESSION_MASK,
    FAULT_COUNT,
    FAULT_LENGTH,
    FAULT_OFFSET,
    FAULT_SLACK,
    FAULT_TIMESTAMP,
    FAULT_TRAILING,
    FAULT_VARINT,
    HEADER_BYTES,
    INFLATED_BYTES_MAX,
    INT32_MAX,
    INT64_MAX,
    INT64_MIN,
    LANE_HEADER,
    LANES,
    MAGIC,
    BinaryColumn,
    Columns,
    Data,
    Header,
    Headers,
    RowColumns,
    Scan,
    attributes_of,
    cell_outside,
    column_short,
    group_unknown,
    header_name_bytes,
    read_header,
    record_fault,
    require_compression,
    require_counts,
    require_crc,
    require_fit,
    require_partitioner,
    require_whole,
    sealed,
    timestamp_of,
    too_large,
    walk,
)

UINT32_MAX = 0xFFFFFFFF
MURMUR2_SEED = 0x9747B28C
MURMUR2_M = 0x5BD1E995
VARINT_BYTES_MAX = 5
VARLONG_BYTES_MAX = 10


@dataclass(frozen=True, slots=True)
class Record:
    """One message, with its place in its partition."""

    offset: int
    timestamp: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Headers = ()

    @property
    def lane(self) -> str | None:
        """What the last `ms-lane` header says; None without one, or when it names no lane."""
        for name, value in reversed(self.headers):
            if name == LANE_HEADER:
                lane = None if value is None else value.decode("ascii", "replace")
                return lane if lane in LANES else None
        return None


# What a record is encoded from: timestamp in milliseconds, key, value, headers.
Fields: TypeAlias = tuple[int, Data | None, Data | None, Sequence[tuple[str, Data | None]]]


# A record as `_parse` finds it: where it starts and ends in the body, then a Record's fields.
_Parsed: TypeAlias = tuple[int, int, int, int, bytes | None, bytes | None, Headers]


# ---- checking


def verify(data: Data, *, bytes_max: int, exact_count: bool = True) -> Header:
    """Check one batch from outside: length, size, magic, CRC, counts. Nothing is opened.

    `exact_count` wants a record for every offset, as producers write them; without it gaps
    are fine, as compaction leaves them.
    """
    header = read_header(data)
    require_whole(data, header)
    if len(data) > bytes_max:
        raise too_large("the batch", bytes_max)
    _check(data, header, exact_count)
    return header


def examine(data: Data, *, bytes_max: int, inflated_bytes_max: int = INFLATED_BYTES_MAX) -> Header:
    """As `verify`, and then from inside too: decompressed, each record checked to its last byte.

    What passes can be decoded by anybody. Nothing of it is kept.
    """
    header = verify(data, bytes_max=bytes_max)
    _, body = open_batch(data, inflated_bytes_max)
    for _ in _parse(header, body):
        pass
    return header


def scan(data: Data, position: int, next_offset: int, *, exact: bool) -> Scan:
    """Follow batches from `position` on for as long as each is whole, right and in order.

    `exact` wants each to start where the last ended, and a record for every offset; without
    it offsets only have to rise, as in a compacted segment.
    """
    view = memoryview(data)
    batches: list[tuple[int, Header]] = []
    while position < len(view):
        left = len(view) - position
        if left < HEADER_BYTES:
            return Scan(position, next_offset, batches, "partial")
        try:
            header = read_header(view, position)
            if header.size > left:
                return Scan(position, next_offset, batches, "partial")
            _check(view[position : position + header.size], header, exact)
        except BatchInvalid:
            return Scan(position, next_offset, batches, "invalid")
        base_offset = header.base_offset
        if base_offset != next_offset if exact else base_offset < next_offset:
            return Scan(position, next_offset, batches, "invalid")
        batches.append((position, header))
        position += header.size
        next_offset = header.next_offset
    return Scan(position, next_offset, batches, "end")


def _check(data: Data, header: Header, exact_count: bool) -> None:
    require_compression(header.attributes)
    require_crc(data, header)
    require_counts(header, exact_count)
    compressed = header.attributes & COMPRESSION_MASK
    require_fit(header.count, INFLATED_BYTES_MAX if compressed else len(data) - HEADER_BYTES)


# ---- writing


def encode(
    records: Iterable[Fields | Record],
    *,
    base_offset: int = 0,
    leader_epoch: int = -1,
    compression: str = "none",
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    control: bool = False,
    append_time: int | None = None,
    lane: str | None = None,
) -> bytes:
    """One batch of these records, at the offsets from `base_offset` on.

    A Record's own offset is not looked at. `append_time` takes the place of every timestamp.
    `lane` is the hint in the attributes: the records must have it in their headers too.
    """
    attributes = attributes_of(
        compression=compression,
        transactional=transactional,
        control=control,
        append_time=append_time is not None,
        lane=lane,
    )
    parts: list[bytes] = []
    base_timestamp = max_timestamp = append_time
    for index, record in enumerate(records):
        timestamp, key, value, headers = (
            (record.timestamp, record.key, record.value, record.headers)
            if isinstance(record, Record)
            else record
        )
        timestamp = timestamp_of(timestamp if append_time is None else append_time, index)
        if base_timestamp is None or max_timestamp is None:
            base_timestamp = max_timestamp = timestamp
        max_timestamp = max(max_timestamp, timestamp)
        delta = timestamp_of(timestamp - base_timestamp, index)
        parts.append(_encode_record(index, delta, key, value, headers))
    if base_timestamp is None or max_timestamp is None or not parts:
        raise BatchCountInvalid("a batch needs at least one record")
    body = b"".join(parts)
    if len(body) > BODY_BYTES_MAX:
        raise too_large("the batch", BODY_BYTES_MAX)
    code = attributes & COMPRESSION_MASK
    header = Header(
        base_offset=base_offset,
        length=0,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=attributes,
        last_offset_delta=len(parts) - 1,
        base_timestamp=base_timestamp,
        max_timestamp=max_timestamp,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        count=len(parts),
    )
    return sealed(header, compress(code, body) if code else body)


def retain(
    data: Data, keep: Container[int], *, inflated_bytes_max: int = INFLATED_BYTES_MAX
) -> bytes | None:
    """The batch with only the records at these offsets; None when there is none of them.

    The offsets that it spans stay the same, and so do all else but the count and the newest
    timestamp: a gap is what tells a reader that compaction was here.
    """
    header, body = open_batch(data, inflated_bytes_max)
    kept = [record for record in _parse(header, body) if record[2] in keep]
    if not kept:
        return None
    if len(kept) == header.count:
        return bytes(data)
    newest = max(timestamp for _, _, _, timestamp, *_ in kept)
    header = header._replace(count=len(kept), max_timestamp=newest)
    left = b"".join([body[start:end] for start, end, *_ in kept])
    code = header.attributes & COMPRESSION_MASK
    return sealed(header, compress(code, left) if code else left)


def _encode_record(
    index: int,
    timestamp_delta: int,
    key: Data | None,
    value: Data | None,
    headers: Sequence[tuple[str, Data | None]],
) -> bytes:
    record = bytearray(1)
    _write_varint(record, timestamp_delta)
    _write_varint(record, index)
    _write_bytes(record, key)
    _write_bytes(record, value)
    _write_varint(record, len(headers))
    for name, content in headers:
        _write_bytes(record, header_name_bytes(name, index))
        _write_bytes(record, content)
    length = bytearray()
    _write_varint(length, len(record))
    return bytes(length + record)


def _write_bytes(buffer: bytearray, content: Data | None) -> None:
    if content is None:
        buffer.append(1)
        return
    raw = bytes(memoryview(content))
    _write_varint(buffer, len(raw))
    buffer += raw


def _write_varint(buffer: bytearray, number: int) -> None:
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    while rest > 0x7F:
        buffer.append(rest & 0x7F | 0x80)
        rest >>= 7
    buffer.append(rest)


# ---- reading


def decode(
    data: Data, *, check_crc: bool = False, inflated_bytes_max: int = INFLATED_BYTES_MAX
) -> list[Record]:
    """The records of one batch, each checked to the last byte."""
    header, body = open_batch(data, inflated_bytes_max, check_crc)
    return [Record(*record[2:]) for record in _parse(header, body)]


def keys(
    data: Data, *, inflated_bytes_max: int = INFLATED_BYTES_MAX
) -> list[tuple[int, bytes | None, bool]]:
    """Offset, key, and whether the value is missing, of each record: what compaction asks."""
    header, body = open_batch(data, inflated_bytes_max)
    return [(offset, key, value is None) for _, _, offset, _, key, value, _ in _parse(header, body)]


def open_batch(data: Data, inflated_bytes_max: int, crc: bool = False) -> tuple[Header, bytes]:
    """The header, checked, and the body, decompressed."""
    header = read_header(data)
    require_whole(data, header)
    if crc:
        require_crc(data, header)
    require_compression(header.attributes)
    require_counts(header, exact_count=False)
    body: Data = memoryview(data)[HEADER_BYTES:]
    code = header.attributes & COMPRESSION_MASK
    if code and header.count:
        body = decompress(code, body, inflated_bytes_max)
    require_fit(header.count, len(body))
    return header, bytes(body)


def _parse(header: Header, body: bytes) -> Iterator[_Parsed]:
    append_time = header.max_timestamp if header.is_append_time else None
    position, end, last_delta = 0, len(body), -1
    for index in range(header.count):
        start = position
        if position == end:
            raise record_fault(FAULT_COUNT, index)
        length, position = _read_varint(body, position, end, index)
        record_end = position + length
        if length < 1 or record_end > end:
            raise record_fault(FAULT_LENGTH, index)
        delta, position = _read_varint(body, position + 1, record_end, index, VARLONG_BYTES_MAX)
        timestamp = header.base_timestamp + delta
        if not INT64_MIN <= timestamp <= INT64_MAX:
            raise record_fault(FAULT_TIMESTAMP, index)
        offset_delta, position = _read_varint(body, position, record_end, index)
        if not last_delta < offset_delta <= header.last_offset_delta:
            raise record_fault(FAULT_OFFSET, index)
        last_delta = offset_delta
        key, position = _read_bytes(body, position, record_end, index)
        value, position = _read_bytes(body, position, record_end, index)
        headers, position = _read_headers(body, position, record_end, index)
        if position != record_end:
            raise record_fault(FAULT_SLACK, index)
        if append_time is not None:
            timestamp = append_time
        yield start, position, header.base_offset + offset_delta, timestamp, key, value, headers
    if position != end:
        raise record_fault(FAULT_TRAILING, max(header.count - 1, 0))


def _read_headers(body: bytes, position: int, end: int, index: int) -> tuple[Headers, int]:
    count, position = _read_varint(body, position, end, index)
    if count == 0:
        return (), position
    if not 0 < count <= (end - position) // 2:
        raise record_fault(FAULT_LENGTH, index)
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        name, position = _read_bytes(body, position, end, index)
        if name is None:
            raise record_fault(FAULT_LENGTH, index)
        value, position = _read_bytes(body, position, end, index)
        headers.append((name.decode("utf-8", "surrogateescape"), value))
    return tuple(headers), position


def _read_bytes(body: bytes, position: int, end: int, index: int) -> tuple[bytes | None, int]:
    length, position = _read_varint(body, position, end, index)
    if length == -1:
        return None, position
    if length < 0 or length > end - position:
        raise record_fault(FAULT_LENGTH, index)
    return body[position : position + length], position + length


def _read_varint(
    body: bytes, position: int, end: int, index: int, bytes_max: int = VARINT_BYTES_MAX
) -> tuple[int, int]:
    # One and two bytes, which is nearly all there are, without a loop.
    if end - position >= 2:
        number = body[position]
        if number < 0x80:
            return number >> 1 ^ -(number & 1), position + 1
        if (high := body[position + 1]) < 0x80:
            number = number & 0x7F | high << 7
            return number >> 1 ^ -(number & 1), position + 2
    number = shift = 0
    for byte in body[position : min(end, position + bytes_max)]:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if number >> (32 if bytes_max == VARINT_BYTES_MAX else 64):
                break
            return number >> 1 ^ -(number & 1), position + shift // 7
    raise record_fault(FAULT_VARINT, index)


# ---- columns


def decode_columns(
    data: Data,
    *,
    from_offset: int | None = None,
    until_offset: int | None = None,
    check_crc: bool = True,
    inflated_bytes_max: int = INFLATED_BYTES_MAX,
) -> Columns:
    """Many whole batches, one after the other, as columns; control batches are left out.

    Batches come whole, so records before `from_offset`, or from `until_offset` on, are dropped
    here. `inflated_bytes_max` holds for each batch; all together may have 2^31 - 1 bytes, which
    is what Arrow's offsets can say.
    """
    lowest = INT64_MIN if from_offset is None else from_offset
    end = INT64_MAX if until_offset is None else until_offset
    rows: list[Record] = []
    inflated_bytes = 0
    for batch, header in whole_batches(data):
        if check_crc:
            require_crc(batch, header)
        if header.is_control:
            continue
        require_compression(header.attributes)
        require_counts(header, exact_count=False)
        if header.next_offset <= lowest or header.base_offset >= end:
            continue
        _, body = open_batch(batch, inflated_bytes_max)
        inflated_bytes += len(body)
        if inflated_bytes > INT32_MAX:
            raise too_large("all records together", INT32_MAX)
        rows += [Record(*r[2:]) for r in _parse(header, body) if lowest <= r[2] < end]
    return _columns(rows)


def whole_batches(data: Data) -> list[tuple[memoryview, Header]]:
    """Each batch with its header; nothing may be left over."""
    view = memoryview(data)
    batches = [(view[at : at + header.size], header) for at, header in walk(view)]
    used = sum(len(batch) for batch, _ in batches)
    if used != len(view):
        raise BatchLengthInvalid(f"the last {len(view) - used} bytes are not a whole batch")
    return batches


def _columns(rows: list[Record]) -> Columns:
    headers = [header for row in rows for header in row.headers]
    starts = array("i", [0])
    for row in rows:
        starts.append(starts[-1] + len(row.headers))
    lanes = [row.lane for row in rows]
    indexes = array("b", [0 if lane is None else LANES.index(lane) for lane in lanes])
    return Columns(
        rows=len(rows),
        offset=array("q", [row.offset for row in rows]).tobytes(),
        timestamp=array("q", [row.timestamp for row in rows]).tobytes(),
        key=_binary_column([row.key for row in rows]),
        value=_binary_column([row.value for row in rows]),
        header_offsets=starts.tobytes(),
        header_count=len(headers),
        header_key=_binary_column([utf8_name(name) for name, _ in headers]),
        header_value=_binary_column([value for _, value in headers]),
        lane_nulls=lanes.count(None),
        lane_validity=_validity([lane is not None for lane in lanes]),
        lane=indexes.tobytes(),
    )


def utf8_name(name: str) -> bytes:
    """A header's name for a column of strings, which holds nothing but UTF-8."""
    raw = name.encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace").encode()


def _binary_column(items: list[bytes] | list[bytes | None]) -> BinaryColumn:
    ends = array("i", [0])
    total = 0
    for item in items:
        total += len(item or b"")
        if total > INT32_MAX:
            raise too_large("a column", INT32_MAX)
        ends.append(total)
    return BinaryColumn(
        nulls=sum(item is None for item in items),
        validity=_validity([item is not None for item in items]),
        offsets=ends.tobytes(),
        data=b"".join([item for item in items if item is not None]),
    )


def _validity(bits: list[bool]) -> bytes | None:
    if all(bits):
        return None
    number = sum(1 << place for place, bit in enumerate(bits) if bit)
    return number.to_bytes((len(bits) + 7) // 8, "little")


def encode_columns(
    columns: RowColumns,
    groups: Data,
    *,
    lanes: Sequence[str | None],
    batch_bytes: int,
    compression: str = "none",
) -> list[list[bytes]]:
    """Batches of at most so many bytes, before they are compressed, for each of several groups.

    Row i goes to the group `groups[i]` (int32), in order; to none when that is negative. Group g
    is of the lane `lanes[g]`, which its records then have as their last header. A record that is
    larger than a batch gets one of its own.
    """
    rows = _rows(columns)
    chosen: list[list[Fields]] = [[] for _ in lanes]
    for row, group in enumerate(_numbers("i", groups, columns.rows)):
        if group >= len(lanes):
            raise group_unknown(group, row)
        if group >= 0:
            timestamp, key, value, headers = rows[row]
            lane = lanes[group]
            own = () if lane is None else ((LANE_HEADER, lane.encode()),)
            chosen[group].append((timestamp, key, value, [*headers, *own]))
    body_bytes_max = max(batch_bytes, HEADER_BYTES) - HEADER_BYTES
    return [
        [encode(run, compression=compression, lane=lane) for run in _runs(group, body_bytes_max)]
        for group, lane in zip(chosen, lanes, strict=True)
    ]


def _runs(records: list[Fields], body_bytes_max: int) -> Iterator[list[Fields]]:
    """As many records as a batch has room for, again and again."""
    run: list[Fields] = []
    size = 0
    for record in records:
        more = 0
        if run:
            delta = timestamp_of(record[0] - run[0][0], len(run))
            more = len(_encode_record(len(run), delta, *record[1:]))
            if size + more > body_bytes_max:
                yield run
                run = []
        if not run:
            size, more = 0, len(_encode_record(0, 0, *record[1:]))
        run.append(record)
        size += more
    if run:
        yield run


def _rows(columns: RowColumns) -> list[Fields]:
    count = columns.rows
    timestamps = _numbers("q", columns.timestamp, count)
    keys, values = _cells(columns.key, count), _cells(columns.value, count)
    if columns.header_offsets is None or not count:
        return [(*row, ()) for row in zip(timestamps, keys, values, strict=True)]
    assert columns.header_key is not None
    assert columns.header_value is not None
    names = _cells(columns.header_key, columns.header_count)
    contents = _cells(columns.header_value, columns.header_count)
    starts = _numbers("i", columns.header_offsets, count + 1)
    rows: list[Fields] = []
    for row, (start, end) in enumerate(pairwise(starts)):
        if not 0 <= start <= end <= columns.header_count or None in names[start:end]:
            raise cell_outside(row)
        headers = [
            ((names[at] or b"").decode("utf-8", "surrogateescape"), contents[at])
            for at in range(start, end)
        ]
        rows.append((timestamps[row], keys[row], values[row], headers))
    return rows


def _numbers(kind: str, data: Data, count: int) -> Sequence[int]:
    size = struct.calcsize(kind)
    view = memoryview(data).cast("B")
    if view.nbytes < size * count:
        raise column_short(view.nbytes, size * count)
    return array(kind, view[: size * count].tobytes())


def _cells(column: BinaryColumn, count: int) -> list[bytes | None]:
    ends = _numbers("i", column.offsets, count + 1)
    data = bytes(column.data)
    bits = None if column.validity is None else memoryview(column.validity).cast("B")
    if bits is not None and bits.nbytes < (count + 7) // 8:
        raise column_short(bits.nbytes, (count + 7) // 8)
    cells: list[bytes | None] = []
    for item, (start, end) in enumerate(pairwise(ends)):
        if bits is not None and not bits[item >> 3] >> (item & 7) & 1:
            cells.append(None)
        elif 0 <= start <= end <= len(data):
            cells.append(data[start:end])
        else:
            raise cell_outside(item)
    return cells


# ---- keys


def key_partitions(
    keys: BinaryColumn,
    rows: int,
    partitions: int,
    *,
    partitioner: str = "murmur2",
    first: int = 0,
    run: int = 1,
) -> Data:
    """The partition of each key, as int32. Rows without a key go to one partition after the
    other, `run` of them to each, from the partition `first` on."""
    require_partitioner(partitioner, partitions, run)
    hashed = murmur2 if partitioner == "murmur2" else murmur3
    numbers = array("i")
    keyless = 0
    for key in _cells(keys, rows):
        if key is None:
            numbers.append((first + keyless // run) % partitions)
            keyless += 1
        else:
            numbers.append((hashed(key) & INT32_MAX) % partitions)
    return memoryview(numbers)


def murmur2(key: bytes) -> int:
    """The hash by which Kafka's clients find a key's partition: 32 bits without a sign."""
    size = len(key)
    number = (MURMUR2_SEED ^ size) & UINT32_MAX
    whole = size >> 2
    for word in struct.unpack_from(f"<{whole}I", key):
        word = (word * MURMUR2_M) & UINT32_MAX  # noqa: PLW2901  in place, as the reference has it
        word ^= word >> 24  # noqa: PLW2901
        number = ((number * MURMUR2_M) & UINT32_MAX) ^ ((word * MURMUR2_M) & UINT32_MAX)
    rest = size & 3
    if rest:
        number ^= int.from_bytes(key[-rest:], "little")
        number = (number * MURMUR2_M) & UINT32_MAX
    number ^= number >> 13
    number = (number * MURMUR2_M) & UINT32_MAX
    return number ^ (number >> 15)


def murmur3(key: bytes) -> int:
    """The 32-bit variant for x86 with the seed 0: 32 bits without a sign."""
    size = len(key)
    number = 0
    whole = size >> 2
    for word in struct.unpack_from(f"<{whole}I", key):
        number ^= _mixed3(word)
        number = ((number << 13) | (number >> 19)) & UINT32_MAX
        number = (number * 5 + 0xE6546B64) & UINT32_MAX
    rest = size & 3
    if rest:
        number ^= _mixed3(int.from_bytes(key[-rest:], "little"))
    number ^= size
    number ^= number >> 16
    number = (number * 0x85EBCA6B) & UINT32_MAX
    number ^= number >> 13
    number = (number * 0xC2B2AE35) & UINT32_MAX
    return number ^ (number >> 16)


def _mixed3(word: int) -> int:
    word = (word * 0xCC9E2D51) & UINT32_MAX
    word = ((word << 15) | (word >> 17)) & UINT32_MAX
    return (word * 0x1B873593) & UINT32_MAX
