"""What Kafka's messages are made of, read strictly and written.

    INT8 … INT64     big endian
    STRING           INT16 length, UTF-8; length -1 is null
    COMPACT_STRING   unsigned varint of length + 1, UTF-8; 0 is null
    ARRAY            INT32 count; -1 is null. Compact: unsigned varint of count + 1
    tagged fields    unsigned varint count; of each: tag, size, so many bytes

A message version is flexible or not: flexible ones have the compact forms, and tagged fields at
the end of each structure. Tagged fields that nobody knows are skipped.
"""

from __future__ import annotations

import struct
from struct import Struct
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence


class InFile(Protocol):
    """Bytes that the kernel can send from a file; `read` is for where it does not."""

    @property
    def file(self) -> int: ...

    @property
    def position(self) -> int: ...

    def __len__(self) -> int: ...

    def __bytes__(self) -> bytes: ...

    def read(self, start: int) -> bytes: ...


Piece: TypeAlias = bytes | memoryview | InFile
# What a message goes out as: pieces that are written one after the other, never joined.
Pieces: TypeAlias = list[Piece]

INT16, INT32, INT64 = Struct(">h"), Struct(">i"), Struct(">q")
VARINT_BYTES_MAX = 5
# Items of all arrays of a request, and its tagged fields. As many topics and partitions as a broker
# has by default: nobody has more to ask of. Each costs some microseconds, so that a request keeps
# the others waiting for some tenths of a second at most.
ITEMS_MAX = 30_000
NO_TAGS = b"\0"


class RequestInvalid(Exception):
    """The bytes are no such request. Nothing of it is done, and the connection ends: the protocol
    has no answer to what cannot be read."""


class Cursor:
    """A place in the bytes of a request."""

    __slots__ = ("at", "data", "flexible", "items")

    def __init__(
        self, data: bytes | bytearray | memoryview, at: int = 0, *, flexible: bool
    ) -> None:
        self.data = memoryview(data)
        self.at = at
        self.flexible = flexible
        # Those that were announced so far.
        self.items = 0

    def unpack(self, layout: Struct) -> tuple[int, ...]:
        at = self.at
        self.at = at + layout.size
        try:
            return layout.unpack_from(self.data, at)
        except struct.error:
            raise _too_short() from None

    def varint(self) -> int:
        """An unsigned one."""
        data, at = self.data, self.at
        value = shift = 0
        try:
            for _ in range(VARINT_BYTES_MAX):
                byte = data[at]
                at += 1
                value |= (byte & 0x7F) << shift
                if byte < 0x80:
                    self.at = at
                    return value
                shift += 7
        except IndexError:
            raise _too_short() from None
        raise RequestInvalid("a varint in the request does not end in time")

    def take(self, size: int) -> memoryview:
        end = self.at + size
        if size < 0 or end > len(self.data):
            raise _too_short()
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def nullable_string(self) -> str | None:
        size = self.varint() - 1 if self.flexible else self.unpack(INT16)[0]
        if size == -1:
            return None
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError:
            raise RequestInvalid("a text in the request is not UTF-8") from None

    def string(self) -> str:
        text = self.nullable_string()
        if text is None:
            raise RequestInvalid("a text that the request must have is null")
        return text

    def nullable_bytes(self) -> memoryview | None:
        size = self.varint() - 1 if self.flexible else self.unpack(INT32)[0]
        return None if size == -1 else self.take(size)

    def nullable_count(self, item_bytes_min: int) -> int | None:
        """Of an array; refused when the rest cannot hold so many, before anything is made."""
        count = self.varint() - 1 if self.flexible else self.unpack(INT32)[0]
        if count == -1:
            return None
        if count < 0 or count * item_bytes_min > len(self.data) - self.at:
            raise RequestInvalid(f"the request says {count} items and has no room for them")
        self._announce(count)
        return count

    def _announce(self, count: int) -> None:
        self.items += count
        if self.items > ITEMS_MAX:
            raise RequestInvalid(f"a request has at most {ITEMS_MAX} items in all its arrays")

    def count(self, item_bytes_min: int) -> int:
        """The same where null means none."""
        return self.nullable_count(item_bytes_min) or 0

    def int8s(self) -> bytes:
        """An array of them, which are not items of their own."""
        size = self.varint() - 1 if self.flexible else self.unpack(INT32)[0]
        return b"" if size == -1 else bytes(self.take(size))

    def skip_tags(self) -> None:
        """To the end of a structure."""
        if self.flexible:
            count = self.varint()
            if count:
                self._announce(count)
            for _ in range(count):
                self.varint()
                self.take(self.varint())

    def end(self) -> None:
        """The request must be over."""
        self.skip_tags()
        if self.at != len(self.data):
            raise RequestInvalid(f"{len(self.data) - self.at} bytes are left after the request")


def _too_short() -> RequestInvalid:
    return RequestInvalid("the request ends before it should")


def varint(value: int) -> bytes:
    """An unsigned one."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def string(text: str, flexible: bool) -> bytes:
    encoded = text.encode()
    if flexible:
        return varint(len(encoded) + 1) + encoded
    return INT16.pack(len(encoded)) + encoded


def nullable_string(text: str | None, flexible: bool) -> bytes:
    if text is None:
        return NO_TAGS if flexible else b"\xff\xff"
    return string(text, flexible)


def count(number: int, flexible: bool) -> bytes:
    """Of an array."""
    return varint(number + 1) if flexible else INT32.pack(number)


def size_of(pieces: Sequence[Piece]) -> int:
    return sum(map(len, pieces))
