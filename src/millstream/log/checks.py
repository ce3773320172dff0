"""Checksums over a segment's blocks: the bytes that a batch's own CRC leaves out.

A batch's CRC-32C starts at byte 21: base offset, length and leader epoch lie outside it. So a
segment file has one CRC-32C for each block of 64 KiB, in its seal (and for the active segment in
the checkpoint). They are made from the file, in the thread that seals or makes the checkpoint: an
append does not wait for them. A reader checks a block once after it was opened; that costs 3
microseconds a block, however many batches are in it.
"""

from __future__ import annotations

import errno
from array import array
from typing import TYPE_CHECKING

from crc32c import crc32c

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from millstream.log.disk import Disk

BLOCK_BYTES = 64 * 1024
# How much is read at once to make them.
READ_BYTES = 256 * 1024


class BlockChecks:
    """The checksums of whole blocks, and of the last one as far as it goes."""

    __slots__ = ("partial", "size", "whole")

    def __init__(self, whole: bytes = b"", partial: int = 0, size: int = 0) -> None:
        self.whole = array("I")
        self.whole.frombytes(whole)
        self.partial = partial
        self.size = size
        assert len(self.whole) == size // BLOCK_BYTES

    def extend(self, buffer: Buffer) -> None:
        """Take in the bytes that follow."""
        length = memoryview(buffer).nbytes
        room = BLOCK_BYTES - self.size % BLOCK_BYTES
        if length < room:
            self.partial = crc32c(buffer, self.partial)
            self.size += length
            return
        view = memoryview(buffer)
        position = 0
        while length - position >= room:
            self.whole.append(crc32c(view[position : position + room], self.partial))
            position += room
            self.partial = 0
            room = BLOCK_BYTES
        if position < length:
            self.partial = crc32c(view[position:], 0)
        self.size += length

    def copy(self) -> BlockChecks:
        return BlockChecks(self.whole.tobytes(), self.partial, self.size)

    def is_right(self, block: int, data: Buffer) -> bool:
        """Whether these are the bytes of that block (of the last one: as far as it goes)."""
        expected = self.whole[block] if block < len(self.whole) else self.partial
        return crc32c(data) == expected

    def block_end(self, block: int) -> int:
        return min((block + 1) * BLOCK_BYTES, self.size)


def catch_up(disk: Disk, file: int, checks: BlockChecks, size: int) -> None:
    """Take in what a file has beyond the checksums, up to a size."""
    while checks.size < size:
        data = disk.read(file, min(READ_BYTES, size - checks.size), checks.size)
        if not data:
            raise OSError(errno.EIO, "the file is shorter than what was written to it")
        checks.extend(data)
