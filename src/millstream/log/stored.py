"""Bytes of a segment that stay where they are: the kernel sends them from the page cache.

Whoever reads has the bytes copied out of the page cache, and whoever sends them has them copied
back into the kernel. For long runs of batches that go to a socket as they are, that is most of the
work. So a read may ask where the bytes lie instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.checks import BLOCK_BYTES

if TYPE_CHECKING:
    from millstream.log.segment import Loaded, Segment

# Less than this is read as quickly as it is looked for.
STORED_BYTES_MIN = 64 * 1024


class Stored:
    """A stretch of a segment's file. The file stays open for as long as somebody has this: it may
    be deleted, and its number must not come to mean another one meanwhile."""

    __slots__ = ("_segment", "_size", "file", "position")

    def __init__(self, segment: Segment, file: int, position: int, size: int) -> None:
        segment.hold()
        self._segment = segment
        self._size = size
        self.file = file
        self.position = position

    def __del__(self) -> None:
        # An answer may be dropped in many ways; each of them ends here.
        self._segment.release()

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self.read(0)

    def read(self, start: int) -> bytes:
        """The bytes from `start` on, for where the kernel does not take them; OSError when they
        are not all there."""
        size = self._size - start
        data = self._segment.disk.read(self.file, size, self.position + start)
        if len(data) < size:
            raise OSError(f"{self._segment.place} is shorter than it was")
        return data


class StoredChunk(NamedTuple):
    """As `Chunk`."""

    data: Stored
    next_offset: int


def locate(
    segment: Segment, loaded: Loaded, offset: int, bytes_max: int, end: tuple[int, int]
) -> StoredChunk | None:
    """What `Segment.read` would give, where it lies.

    None where that is no gain, or may not be: a short chunk, one with blocks that were not checked
    yet, one that would have to come from the device. Whoever is told so reads, and hears from that
    what is wrong, if anything is.
    """
    stop, next_offset = end
    _, first = loaded.index.floor(offset - segment.base_offset)
    if min(bytes_max, stop - first) < STORED_BYTES_MIN:
        return None
    if not segment.disk.can_send(loaded.file, 1, first):
        # Nowhere on this system, or not this one: no header is looked for.
        return None
    at = _batch_of(segment, loaded, offset, first, stop)
    if at is None:
        return None
    if stop - at > bytes_max:
        relative, stop = loaded.index.boundary(at + bytes_max)
        next_offset = segment.base_offset + relative
    if stop - at < STORED_BYTES_MIN or not _is_checked(loaded, first, stop):
        return None
    if not segment.disk.can_send(loaded.file, stop - at, at):
        return None
    return StoredChunk(Stored(segment, loaded.file, at, stop - at), next_offset)


def _batch_of(segment: Segment, loaded: Loaded, offset: int, at: int, stop: int) -> int | None:
    """Where the batch that holds an offset begins, or the next one when it was compacted away."""
    while at < stop:
        head = segment.disk.read_cached(loaded.file, batches.HEADER_BYTES, at)
        if head is None or len(head) < batches.HEADER_BYTES:
            return None
        try:
            header = batches.read_header(head)
        except BatchInvalid:
            return None
        if header.next_offset > offset:
            return at
        at += header.size
    return None


def _is_checked(loaded: Loaded, first: int, stop: int) -> bool:
    """Whether nothing from `first` to `stop` is in a block that has to be checked."""
    if not loaded.unverified:
        return True
    low, high = first // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
    return all(loaded.verified[low : high + 1])
