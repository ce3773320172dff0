"""Sparse indexes of one segment: from an offset to a place, and from a time to an offset.

    .index       entries of 8 bytes: offset relative to the segment's base, position; both u32
    .timeindex   entries of 12 bytes: newest timestamp so far (i64), relative offset (u32)

Both are caches: a reader checks an entry against the batch that it points to, and a missing or
wrong file is made again from the log. Every entry lies on the first byte of a batch, so an entry
is also a place where a read may end.
"""

from __future__ import annotations

import struct
import sys
from array import array
from bisect import bisect_left, bisect_right

# Entries are u32, so a segment may span neither more bytes nor more offsets than this.
SPAN_MAX = 2**31 - 1

TIME_ENTRY = struct.Struct(">qI")
NO_TIMESTAMP = -1


class OffsetIndex:
    """Offsets (relative to the segment's base) and positions, side by side."""

    __slots__ = ("offsets", "positions")

    def __init__(self) -> None:
        self.offsets = array("I")
        self.positions = array("I")

    def __len__(self) -> int:
        return len(self.positions)

    def add(self, relative_offset: int, position: int) -> None:
        self.offsets.append(relative_offset)
        self.positions.append(position)

    def floor(self, relative_offset: int) -> tuple[int, int]:
        """The last entry at or before an offset; the segment's first byte when there is none."""
        at = bisect_right(self.offsets, relative_offset) - 1
        return (self.offsets[at], self.positions[at]) if at >= 0 else (0, 0)

    def boundary(self, position: int) -> tuple[int, int]:
        """The last entry at or before a position."""
        at = bisect_right(self.positions, position) - 1
        return (self.offsets[at], self.positions[at]) if at >= 0 else (0, 0)

    def truncate(self, count: int) -> None:
        """Keep only the first entries."""
        del self.offsets[count:]
        del self.positions[count:]

    def encode(self, first: int = 0) -> bytes:
        pairs = array("I", bytes(8 * (len(self) - first)))
        pairs[0::2] = self.offsets[first:]
        pairs[1::2] = self.positions[first:]
        return _big_endian(pairs).tobytes()

    @classmethod
    def decode(cls, data: bytes) -> OffsetIndex | None:
        """None when the bytes cannot be an index: entries must rise."""
        if len(data) % 8:
            return None
        pairs = array("I")
        pairs.frombytes(data)
        _big_endian(pairs)
        index = cls()
        index.offsets, index.positions = pairs[0::2], pairs[1::2]
        return index if _rises(index.offsets) and _rises(index.positions) else None


class TimeIndex:
    """Newest timestamp so far, and the offset of the batch that brought it."""

    __slots__ = ("offsets", "timestamps")

    def __init__(self) -> None:
        self.timestamps = array("q")
        self.offsets = array("I")

    def __len__(self) -> int:
        return len(self.timestamps)

    @property
    def newest(self) -> int:
        return self.timestamps[-1] if self.timestamps else NO_TIMESTAMP

    def add(self, timestamp: int, relative_offset: int) -> None:
        self.timestamps.append(timestamp)
        self.offsets.append(relative_offset)

    def before(self, timestamp: int) -> tuple[int, int]:
        """The last entry that is older than a time: nothing before it can be newer."""
        at = bisect_left(self.timestamps, timestamp) - 1
        return (self.timestamps[at], self.offsets[at]) if at >= 0 else (NO_TIMESTAMP, 0)

    def truncate(self, count: int) -> None:
        """Keep only the first entries."""
        del self.timestamps[count:]
        del self.offsets[count:]

    def encode(self, first: int = 0) -> bytes:
        pairs = zip(self.timestamps[first:], self.offsets[first:], strict=True)
        return b"".join(TIME_ENTRY.pack(timestamp, offset) for timestamp, offset in pairs)

    @classmethod
    def decode(cls, data: bytes) -> TimeIndex | None:
        """None when the bytes cannot be a time index: entries must rise."""
        if len(data) % TIME_ENTRY.size:
            return None
        index = cls()
        for timestamp, offset in TIME_ENTRY.iter_unpack(data):
            index.add(timestamp, offset)
        return index if _rises(index.timestamps) and _rises(index.offsets) else None


def _rises(values: array[int]) -> bool:
    return all(map(int.__lt__, values, values[1:]))


def _big_endian(values: array[int]) -> array[int]:
    if sys.byteorder == "little":
        values.byteswap()
    return values
