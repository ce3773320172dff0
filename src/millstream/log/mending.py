"""What the block checksums can tell and put right, where a batch's own CRC cannot.

A batch's CRC leaves out its offset and its leader epoch; a block's checksum covers every byte. So:

1. A checksum also finds a single flipped bit: no two places in a block give the same difference,
   because CRC-32C detects every error of two bits in far more than a block. The bit is flipped
   back when the log is then whole for longer than it was.
2. An epoch that is wrong otherwise is put back from what the partition remembers: at which offset
   each epoch began.
3. A wrong offset cannot hide in a log without gaps. In a compacted one it can, and nobody knows
   what was right: the batches of that block cannot be trusted.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from typing import NamedTuple

from crc32c import crc32c

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.checks import BLOCK_BYTES, BlockChecks
from millstream.log.disk import Disk, write_all
from millstream.log.segment import Scanner

_EPOCH = struct.Struct(">i")
_EPOCH_AT = 12
# CRC-32C's polynomial, low bits first.
_POLYNOMIAL = 0x82F63B78


class Place(NamedTuple):
    """A batch that is right by its own CRC, whatever its offset says."""

    position: int
    header: batches.Header


def bad_blocks(disk: Disk, file: int, expected: BlockChecks) -> list[int]:
    """The blocks that are not what the checksums say, as far as the file goes."""
    size = min(expected.size, disk.size(file))
    bad: list[int] = []
    for block in range(-(-size // BLOCK_BYTES)):
        start, end = block * BLOCK_BYTES, expected.block_end(block)
        if end <= size and not expected.is_right(block, disk.read(file, end - start, start)):
            bad.append(block)
    return bad


def restore_bit(scan: Scanner, block: int, expected: BlockChecks, *, exact: bool) -> int | None:
    """Flip back the one bit that makes a block right again, and answer its position; None when
    there is no such bit, or when the log would not be whole for longer than the scan found it."""
    start = block * BLOCK_BYTES
    size = expected.block_end(block) - start
    data = bytearray(scan.disk.read(scan.file, size, start))
    right = expected.whole[block] if block < len(expected.whole) else expected.partial
    found = _flipped_bit(crc32c(data) ^ right, size)
    if found is None:
        return None
    at, mask = found
    before = bytes([data[at]])
    write_all(scan.disk, scan.file, [bytes([data[at] ^ mask])], start + at)
    again = Scanner(scan.disk, scan.file, scan.base_offset, scan.intervals)
    log_bytes = scan.disk.size(scan.file)
    again.run(log_bytes, exact=exact)
    if again.end <= scan.end and again.end < log_bytes:
        write_all(scan.disk, scan.file, [before], start + at)
        return None
    return start + at


def _flipped_bit(difference: int, size: int) -> tuple[int, int] | None:
    """Byte and bit whose flip changes the checksum of so many bytes by this difference."""
    register = 1
    for bits_from_end in range(size * 8):
        register = (register >> 1) ^ (_POLYNOMIAL if register & 1 else 0)
        if register == difference:
            return size - 1 - bits_from_end // 8, 0x80 >> bits_from_end % 8
    return None


def restore_epochs(
    disk: Disk, file: int, places: list[Place], epochs: list[tuple[int, int]]
) -> int:
    """Put back the epochs that the partition remembers; answers how many were wrong."""
    restored = 0
    for position, header in places:
        at = bisect_right(epochs, header.base_offset, key=lambda entry: entry[1]) - 1
        if at >= 0 and epochs[at][0] != header.leader_epoch:
            write_all(disk, file, [_EPOCH.pack(epochs[at][0])], position + _EPOCH_AT)
            restored += 1
    return restored


def places_in(disk: Disk, file: int, block: int) -> tuple[list[Place], int]:
    """The batches that begin in a block, and where the one after them begins. They are none when
    one that begins there, or before, is wrong by its own CRC: that explains the checksum."""
    places: list[Place] = []
    position, size = 0, disk.size(file)
    while position < min((block + 1) * BLOCK_BYTES, size):
        try:
            header = batches.read_header(disk.read(file, batches.HEADER_BYTES, position))
            if header.size > size - position:
                return [], position
            # The first 16 bytes of a batch may reach into the block from the one before.
            if position + batches.PLACE_BYTES > block * BLOCK_BYTES:
                data = disk.read(file, header.size, position)
                batches.verify(data, bytes_max=header.size, exact_count=False)
                places.append(Place(position, header))
        except BatchInvalid:
            return [], position
        position += header.size
    return places, position
