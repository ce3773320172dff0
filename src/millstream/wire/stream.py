"""Messages of the WebSocket `/v1/topics/{topic}/stream` in binary frames. No I/O.

A frame is one message of the protocol. Numbers are big-endian; `id` is -1 where there is none.

    publish    1   id i32, acks u8 (0 none, 1 leader, 2 all), key of idempotency: u16 length and
                   ASCII (0: none), count u32, then the records
    published  2   id i32, duplicate u8, count u32, then of each record:
                   partition i32, offset i64, timestamp i64
    open       3   id i32, partition i32 (-1: all), start i64 (-1 latest, -2 earliest),
                   consumer id: u16 length and ASCII (0: a new one)
    opened     4   id i32, consumer id as above, count u32, then of each partition: partition i32,
                   position i64
    next       5   credit u32
    messages   6   count u32, then the records
    ack        7   id i32, partition i32, offset i64
    acked      8   id i32, partition i32, position i64
    error      9   id i32, then the JSON of the error: u32 length and text

    record         partition i32, offset i64, timestamp i64 (-1: none; towards the broker the
                   offset is -1 too, and a partition of -1 lets the broker choose),
                   key: i32 length (-1: none) and bytes, value: likewise,
                   headers: u16 count, of each u16 length and UTF-8, then a value like the key's
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

Headers: TypeAlias = Sequence[tuple[str, bytes | None]]

PUBLISH, PUBLISHED, OPEN, OPENED, NEXT, MESSAGES, ACK, ACKED, ERROR = range(1, 10)
ACKS = ("none", "leader", "all")
NO_ID = -1
LATEST, EARLIEST = -1, -2

_I32 = struct.Struct(">i")
_U32 = struct.Struct(">I")
_U16 = struct.Struct(">H")
_KIND_ID = struct.Struct(">Bi")
_PLACE = struct.Struct(">iqq")
_POSITION = struct.Struct(">iq")
_ACKS_OF = {name: number for number, name in enumerate(ACKS)}


class StreamFrameError(Exception):
    """A binary frame that does not have the form of any message."""


class Record(NamedTuple):
    """A record on its way: without a place yet, or from its place."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = -1
    partition: int = -1
    offset: int = -1


class Place(NamedTuple):
    partition: int
    offset: int
    timestamp_ms: int


class Publish(NamedTuple):
    id: int
    records: list[Record]
    acks: str = "all"
    idempotency_key: str = ""


class Published(NamedTuple):
    id: int
    placed: list[Place]
    is_duplicate: bool = False


class Open(NamedTuple):
    id: int
    consumer_id: str = ""
    partition: int = -1
    # An offset, or LATEST, or EARLIEST.
    start: int = EARLIEST


class Opened(NamedTuple):
    id: int
    consumer_id: str
    # Of each partition the first offset that is not acked.
    positions: dict[int, int]


class Next(NamedTuple):
    credit: int


class Messages(NamedTuple):
    records: list[Record]


class Ack(NamedTuple):
    id: int
    partition: int
    offset: int


class Acked(NamedTuple):
    id: int
    partition: int
    position: int


class Failed(NamedTuple):
    id: int
    # The same that JSON clients get.
    error: bytes


Message: TypeAlias = Publish | Published | Open | Opened | Next | Messages | Ack | Acked | Failed


# ---- writing


def encode(message: Message) -> bytes:
    """One frame's payload."""
    match message:
        case Publish(id, records, acks, key):
            head = _KIND_ID.pack(PUBLISH, id) + bytes((_ACKS_OF[acks],)) + _short(key.encode())
            return b"".join((head, _U32.pack(len(records)), *map(_record, records)))
        case Published(id, placed, is_duplicate):
            head = _KIND_ID.pack(PUBLISHED, id) + bytes((is_duplicate,)) + _U32.pack(len(placed))
            return b"".join((head, *(_PLACE.pack(*place) for place in placed)))
        case Open(id, consumer, partition, start):
            head = _KIND_ID.pack(OPEN, id) + _POSITION.pack(partition, start)
            return head + _short(consumer.encode())
        case Opened(id, consumer, positions):
            head = _KIND_ID.pack(OPENED, id) + _short(consumer.encode())
            listed = (_POSITION.pack(*one) for one in positions.items())
            return b"".join((head, _U32.pack(len(positions)), *listed))
        case Next(credit):
            return bytes((NEXT,)) + _U32.pack(credit)
        case Messages(records):
            return encode_messages(records)
        case Ack(id, partition, offset):
            return _KIND_ID.pack(ACK, id) + _POSITION.pack(partition, offset)
        case Acked(id, partition, position):
            return _KIND_ID.pack(ACKED, id) + _POSITION.pack(partition, position)
        case Failed(id, error):
            return _KIND_ID.pack(ERROR, id) + _U32.pack(len(error)) + error


def encode_messages(records: Sequence[Record]) -> bytes:
    return b"".join((bytes((MESSAGES,)), _U32.pack(len(records)), *map(_record, records)))


def _record(record: Record) -> bytes:
    key, value, headers, timestamp_ms, partition, offset = record
    pieces = [_PLACE.pack(partition, offset, timestamp_ms), _long(key), _long(value)]
    pieces.append(_U16.pack(len(headers)))
    for name, data in headers:
        pieces += (_short(name.encode()), _long(data))
    return b"".join(pieces)


def _short(data: bytes) -> bytes:
    return _U16.pack(len(data)) + data


def _long(data: bytes | None) -> bytes:
    return _I32.pack(-1) if data is None else _I32.pack(len(data)) + data


# ---- reading


def decode(data: bytes) -> Message:
    """The message of a frame; StreamFrameError when it is none."""
    if not data:
        raise StreamFrameError("the frame is empty")
    read = _READERS.get(data[0])
    if read is None:
        raise StreamFrameError(f"there is no message of kind {data[0]}; kinds are 1 to {ERROR}")
    reader = _Reader(data)
    message = read(reader)
    if reader.position != len(data):
        raise StreamFrameError(f"{len(data) - reader.position} bytes follow the message")
    return message


class _Reader:
    """Bytes from front to back; what lies past the end is an error."""

    __slots__ = ("data", "position")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 1

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        values: tuple[int, ...] = form.unpack(self.take(form.size))
        return values

    def number(self, form: struct.Struct) -> int:
        return self.unpack(form)[0]

    def byte(self) -> int:
        return self.take(1)[0]

    def take(self, length: int) -> bytes:
        start, end = self.position, self.position + length
        if end > len(self.data):
            raise StreamFrameError(
                f"the frame ends too early: it has {len(self.data)} bytes, and what begins at byte "
                f"{start} has {length}"
            )
        self.position = end
        return self.data[start:end]

    def short(self) -> str:
        start, text = self.position, self.take(self.number(_U16))
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise StreamFrameError(f"the text at byte {start} is not UTF-8") from None

    def long(self) -> bytes | None:
        length = self.number(_I32)
        if length < -1:
            raise StreamFrameError(f"a length is {length}; the least is -1, for none")
        return None if length == -1 else self.take(length)

    def count(self, bytes_min: int) -> int:
        """A count that the rest can hold, so that nothing is allocated for a lie."""
        count = self.number(_U32)
        if count * bytes_min > len(self.data) - self.position:
            raise StreamFrameError(f"a count of {count} reaches past the end")
        return count

    def record(self) -> Record:
        partition, offset, timestamp_ms = self.unpack(_PLACE)
        key, value = self.long(), self.long()
        headers = [(self.short(), self.long()) for _ in range(self.number(_U16))]
        return Record(key, value, tuple(headers), timestamp_ms, partition, offset)

    def records(self) -> list[Record]:
        return [self.record() for _ in range(self.count(_RECORD_BYTES_MIN))]


_RECORD_BYTES_MIN = _PLACE.size + 2 * _I32.size + _U16.size


def _publish(reader: _Reader) -> Publish:
    id, acks, key = reader.number(_I32), reader.byte(), reader.short()
    if acks >= len(ACKS):
        raise StreamFrameError(f"acks is {acks}; it must be 0 (none), 1 (leader) or 2 (all)")
    return Publish(id, reader.records(), ACKS[acks], key)


def _published(reader: _Reader) -> Published:
    id, is_duplicate = reader.number(_I32), reader.byte()
    placed = [Place(*reader.unpack(_PLACE)) for _ in range(reader.count(_PLACE.size))]
    return Published(id, placed, is_duplicate != 0)


def _open(reader: _Reader) -> Open:
    id = reader.number(_I32)
    partition, start = reader.unpack(_POSITION)
    return Open(id, reader.short(), partition, start)


def _opened(reader: _Reader) -> Opened:
    id, consumer = reader.number(_I32), reader.short()
    positions: dict[int, int] = {}
    for _ in range(reader.count(_POSITION.size)):
        partition, positions[partition] = reader.unpack(_POSITION)
    return Opened(id, consumer, positions)


def _failed(reader: _Reader) -> Failed:
    return Failed(reader.number(_I32), reader.take(reader.number(_U32)))


_READERS: dict[int, Callable[[_Reader], Message]] = {
    PUBLISH: _publish,
    PUBLISHED: _published,
    OPEN: _open,
    OPENED: _opened,
    NEXT: lambda reader: Next(reader.number(_U32)),
    MESSAGES: lambda reader: Messages(reader.records()),
    ACK: lambda reader: Ack(reader.number(_I32), *reader.unpack(_POSITION)),
    ACKED: lambda reader: Acked(reader.number(_I32), *reader.unpack(_POSITION)),
    ERROR: _failed,
}
