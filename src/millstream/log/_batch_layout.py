"""The layout of a batch, and all that can be done with one without opening its records.

The batch is Kafka's record batch, magic 2. Big endian, no padding:

    at  bytes  field
     0    8    base offset            given by the partition; outside the CRC
     8    4    length                 of what follows this field, so the whole is 12 more
    12    4    leader epoch           given by the partition; outside the CRC
    16    1    magic                  2
    17    4    CRC-32C                of everything from byte 21 to the end
    21    2    attributes             bits 0-2 compression, 3 append time, 4 transactional,
                                      5 control, 6 delete horizon, 8-10 lane hint (ours)
    23    4    last offset delta      last offset - base offset, also after compaction
    27    8    base timestamp         milliseconds; records hold their difference to it
    35    8    max timestamp          or the append time of all of them, when bit 3 is set
    43    8    producer id            -1 without idempotence
    51    2    producer epoch         -1 without
    53    4    base sequence          -1 without
    57    4    count                  of records; less than last offset delta + 1 once compacted
    61         the records, compressed as a whole (layout: `_batch_pure.py`)

The lane hint is the lane's index in `LANES` plus one; zero means no hint. The truth is each
record's `ms-lane` header: the hint only saves opening a batch to learn it.
"""

from __future__ import annotations

import operator
import struct
from typing import Literal, NamedTuple, TypeAlias

from crc32c import crc32c

from millstream.errors import (
    BatchChecksumMismatch,
    BatchCompressionInvalid,
    BatchCountInvalid,
    BatchInvalid,
    BatchLengthInvalid,
    BatchMagicUnsupported,
    BatchRecordInvalid,
    BatchTooLarge,
)

Data: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]

HEADER = struct.Struct(
    ">q"  # base offset
    "i"  # length
    "i"  # leader epoch
    "b"  # magic
    "I"  # CRC-32C
    "h"  # attributes
    "i"  # last offset delta
    "q"  # base timestamp
    "q"  # max timestamp
    "q"  # producer id
    "h"  # producer epoch
    "i"  # base sequence
    "i"  # count
)
PLACE = struct.Struct(">qii")  # base offset, length, leader epoch: what lies before the magic
HEADER_BYTES = 61
PLACE_BYTES = 16
LENGTH_END = 12  # where the length field ends and starts to count
CRC_START = 21  # the first byte that the CRC covers
LENGTH_MIN = HEADER_BYTES - LENGTH_END
MAGIC = 2
BODY_BYTES_MAX = 2**31 - 1 - LENGTH_MIN  # what the length field can say

COMPRESSION_MASK = 0x07
APPEND_TIME_MASK = 0x08
TRANSACTIONAL_MASK = 0x10
CONTROL_MASK = 0x20
DELETE_HORIZON_MASK = 0x40
LANE_MASK = 0x0700
LANE_SHIFT = 8

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
LANES = ("critical", "high", "normal", "low", "background")
LANE_HEADER = "ms-lane"
PARTITIONERS = ("murmur2", "murmur3")

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)

# Length, attributes, timestamp delta, offset delta, key length, value length, header count: each
# at least a byte. So a count that the body cannot hold is seen before anything is allocated.
RECORD_BYTES_MIN = 7

# A view of a batch costs more than a copy of so many bytes, and gives the collector work.
COPIED_BYTES_MAX = 1024

# What one batch may grow to when it is decompressed. The largest batch that a broker takes by
# default is 1 MiB; real data shrinks 2 to 20 times, so 64 times is far from honest use.
INFLATED_BYTES_MAX = 64 * 2**20


class Header(NamedTuple):
    """The fields as they stand in the bytes, in their order."""

    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    count: int  # type: ignore[assignment]  # hides the method of tuples, which nobody needs here

    @property
    def size(self) -> int:
        """Bytes of the whole batch, this header included."""
        return LENGTH_END + self.length

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def compression(self) -> str:
        code = self.attributes & COMPRESSION_MASK
        return COMPRESSIONS[code] if code < len(COMPRESSIONS) else f"unknown-{code}"

    @property
    def is_append_time(self) -> bool:
        return self.attributes & APPEND_TIME_MASK != 0

    @property
    def is_transactional(self) -> bool:
        return self.attributes & TRANSACTIONAL_MASK != 0

    @property
    def is_control(self) -> bool:
        return self.attributes & CONTROL_MASK != 0

    @property
    def lane(self) -> str | None:
        """The hint; None when there is none, which says nothing about the records."""
        index = ((self.attributes & LANE_MASK) >> LANE_SHIFT) - 1
        return LANES[index] if 0 <= index < len(LANES) else None

    @property
    def last_sequence(self) -> int:
        """Sequences wrap from 2^31 - 1 to 0; -1 when the producer is not idempotent."""
        if self.base_sequence < 0:
            return -1
        return (self.base_sequence + self.last_offset_delta) & INT32_MAX


# As Header._make, without its check of the length: the struct has as many fields.
_header_of = tuple.__new__


class Scan(NamedTuple):
    """How far a run of batches is whole and right."""

    end: int  # the position after the last good batch
    next_offset: int
    batches: list[tuple[int, Header]]  # position and header of each good one
    reason: Literal["end", "partial", "invalid"]  # stopped at the end, a cut-off or a wrong one


class BinaryColumn(NamedTuple):
    """Arrow's variable-size layout: item i is `data[offsets[i]:offsets[i + 1]]`."""

    nulls: int
    validity: Data | None  # a bit an item, low bits first; None when nothing is null
    offsets: Data  # int32, one more than there are items
    data: Data


class Columns(NamedTuple):
    """Records as columns, in the buffers of Arrow's format, native byte order."""

    rows: int
    offset: Data  # int64
    timestamp: Data  # int64, milliseconds
    key: BinaryColumn
    value: BinaryColumn
    header_offsets: Data  # int32: row i has the headers from header_offsets[i] to [i + 1]
    header_count: int
    header_key: BinaryColumn  # valid UTF-8: what is not was replaced by U+FFFD
    header_value: BinaryColumn
    lane_nulls: int
    lane_validity: Data | None
    lane: Data  # int8, index in LANES


class RowColumns(NamedTuple):
    """Rows that are to become records, in the buffers of Arrow's format, from its item 0 on."""

    rows: int
    timestamp: Data  # int64, milliseconds
    key: BinaryColumn
    value: BinaryColumn
    header_offsets: Data | None  # int32, as in Columns; None when no row has headers
    header_count: int
    header_key: BinaryColumn | None
    header_value: BinaryColumn | None


def read_header(data: Data, position: int = 0) -> Header:
    """The header at `position`; says nothing about the CRC, or whether the rest is there."""
    if position < 0 or len(data) - position < HEADER_BYTES:
        raise BatchLengthInvalid(
            f"{len(data) - position} bytes are left, a batch header takes {HEADER_BYTES}"
        )
    header = _header_of(Header, HEADER.unpack_from(data, position))
    if header.magic != MAGIC:
        raise magic_unsupported(header.magic)
    if header.length < LENGTH_MIN:
        raise length_too_small(header.length)
    return header


def walk(data: Data) -> list[tuple[int, Header]]:
    """Position and header of each batch, one after the other; a partial last one is left out."""
    batches = []
    position = 0
    while len(data) - position >= HEADER_BYTES:
        header = read_header(data, position)
        if header.size > len(data) - position:
            break
        batches.append((position, header))
        position += header.size
    return batches


def placed(data: Data, base_offset: int, leader_epoch: int) -> tuple[bytes, bytes | memoryview]:
    """One whole batch at its place in the log: its new first 16 bytes, and the others; a view of
    them, unless copying is quicker.

    Both fields lie outside the CRC, so the producer's bytes are written as they came.
    """
    size = len(data)
    prefix = PLACE.pack(base_offset, size - LENGTH_END, leader_epoch)
    if size <= COPIED_BYTES_MAX and type(data) is bytes:
        return prefix, data[PLACE_BYTES:]
    return prefix, memoryview(data)[PLACE_BYTES:]


def require_counts(header: Header, exact_count: bool) -> None:
    """Raise unless count and offsets fit each other."""
    count, delta = header.count, header.last_offset_delta
    if delta < 0 or header.base_offset > INT64_MAX - 1 - delta:
        raise BatchCountInvalid(f"the last offset delta {delta} is not possible")
    if count != delta + 1 if exact_count else not 0 <= count <= delta + 1:
        raise BatchCountInvalid(f"the batch says {count} records for {delta + 1} offsets")


def require_fit(count: int, body_bytes: int) -> None:
    """Raise when the body, decompressed, is too small for so many records."""
    if count > body_bytes // RECORD_BYTES_MIN:
        raise BatchCountInvalid(f"{body_bytes} bytes cannot hold {count} records")


def require_compression(attributes: int) -> None:
    code = attributes & COMPRESSION_MASK
    if code >= len(COMPRESSIONS):
        raise BatchCompressionInvalid(f"there is no compression with the code {code}")


def require_crc(data: Data, header: Header) -> None:
    """`data` is exactly one batch."""
    actual = crc32c(memoryview(data)[CRC_START:])
    if actual != header.crc:
        raise checksum_mismatch(header.crc, actual)


def require_whole(data: Data, header: Header) -> None:
    if header.size != len(data):
        raise length_wrong(header.size, len(data))


def sealed(header: Header, body: Data) -> bytes:
    """The batch of this header and body, with length and CRC as they must be."""
    if len(body) > BODY_BYTES_MAX:
        raise too_large("the batch", BODY_BYTES_MAX)
    length = LENGTH_MIN + len(body)
    head = bytearray(HEADER_BYTES)
    HEADER.pack_into(head, 0, header.base_offset, length, *header[2:])
    crc = crc32c(body, crc32c(memoryview(head)[CRC_START:]))
    head[CRC_START - 4 : CRC_START] = crc.to_bytes(4, "big")
    return b"".join((head, body))


def stamped(data: Data, header: Header, append_time: int) -> tuple[bytes, Header]:
    """The batch with one time for all its records, which stay as they are; and its new header."""
    attributes = header.attributes | APPEND_TIME_MASK
    header = header._replace(attributes=attributes, max_timestamp=append_time)
    batch = sealed(header, memoryview(data)[HEADER_BYTES:])
    return batch, read_header(batch)


def timestamp_of(number: int, index: int) -> int:
    """A timestamp, or the difference of two, that is to be written."""
    number = operator.index(number)
    if not INT64_MIN <= number <= INT64_MAX:
        raise record_fault(FAULT_TIMESTAMP, index)
    return number


def header_name_bytes(name: str, index: int) -> bytes:
    # Bytes that were not UTF-8 when they were read go out again as they came.
    try:
        return str.encode(name, "utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise record_fault(FAULT_HEADER_NAME, index) from None


def attributes_of(
    *, compression: str, transactional: bool, control: bool, append_time: bool, lane: str | None
) -> int:
    if compression not in COMPRESSIONS:
        raise BatchCompressionInvalid(
            f"there is no compression {compression!r}; take one of {', '.join(COMPRESSIONS)}"
        )
    if lane is not None and lane not in LANES:
        raise ValueError(f"there is no lane {lane!r}; take one of {', '.join(LANES)}")
    return (
        COMPRESSIONS.index(compression)
        | (APPEND_TIME_MASK if append_time else 0)
        | (TRANSACTIONAL_MASK if transactional else 0)
        | (CONTROL_MASK if control else 0)
        | ((LANES.index(lane) + 1) << LANE_SHIFT if lane is not None else 0)
    )


def require_partitioner(partitioner: str, partitions: int, run: int) -> None:
    if partitioner not in PARTITIONERS:
        raise ValueError(
            f"there is no partitioner {partitioner!r}; take one of {', '.join(PARTITIONERS)}"
        )
    if partitions < 1 or run < 1:
        raise ValueError(f"{partitions} partitions in runs of {run} cannot be dealt out")


# ---- what can be wrong, worded once for both twins

FAULT_VARINT = 1
FAULT_LENGTH = 2
FAULT_OFFSET = 3
FAULT_TIMESTAMP = 4
FAULT_SLACK = 5
FAULT_TRAILING = 6
FAULT_COUNT = 7
FAULT_HEADER_NAME = 8

_FAULTS = {
    FAULT_VARINT: "a varint does not end in time",
    FAULT_LENGTH: "a length is negative or reaches past the end",
    FAULT_OFFSET: "the offset does not follow the one before, or lies past the last",
    FAULT_TIMESTAMP: "the timestamp does not fit in 64 bits",
    FAULT_SLACK: "bytes are left over at the end of the record",
    FAULT_TRAILING: "bytes are left over after the last record",
    FAULT_COUNT: "the bytes end before this record",
    FAULT_HEADER_NAME: "the name of a header cannot be written as UTF-8",
}


def record_fault(fault: int, index: int) -> BatchInvalid:
    kind = BatchCountInvalid if fault == FAULT_COUNT else BatchRecordInvalid
    return kind(f"record {index} of the batch: {_FAULTS[fault]}", record=index)


def magic_unsupported(magic: int) -> BatchInvalid:
    return BatchMagicUnsupported(f"the magic byte is {magic}; only batches of magic 2 are read")


def length_too_small(length: int) -> BatchInvalid:
    return BatchLengthInvalid(f"the length field says {length}, the least is {LENGTH_MIN}")


def length_wrong(size: int, given: int) -> BatchInvalid:
    return BatchLengthInvalid(f"the batch says it has {size} bytes, but {given} were given")


def checksum_mismatch(written: int, actual: int) -> BatchInvalid:
    return BatchChecksumMismatch(
        f"the CRC-32C is {actual:#010x}, the batch says {written:#010x}; send it again"
    )


def too_large(what: str, limit_bytes: int) -> BatchInvalid:
    return BatchTooLarge(f"{what} is larger than {limit_bytes} bytes", limit_bytes=limit_bytes)


def column_short(size: int, bytes_min: int) -> ValueError:
    return ValueError(f"a column's buffer has {size} bytes, its rows take {bytes_min}")


def cell_outside(row: int) -> ValueError:
    return ValueError(f"row {row}: an offset reaches past its column, or a header has no name")


def group_unknown(group: int, row: int) -> ValueError:
    return ValueError(f"row {row} is of group {group}, which there is not")
