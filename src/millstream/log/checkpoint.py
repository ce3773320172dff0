"""How far the segments are known to be synced, so that recovery reads only what lies after.

The file `checkpoint` holds the same bytes twice, and is replaced in one step:

    copy   magic    8s   MSCHECK1
           length   u32  of the body
           crc      u32  CRC-32C of the body
           body     msgpack of `Checkpoint`

A flipped bit takes one copy; the other still counts. Without any, recovery reads everything.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from crc32c import crc32c

from millstream.log.checks import BlockChecks, catch_up
from millstream.log.disk import Disk, read_file, write_file

if TYPE_CHECKING:
    from millstream.log.partition import Partition
    from millstream.log.segment import Segment

COPY = struct.Struct(">8sII")
MAGIC = b"MSCHECK1"


class PartitionState(msgspec.Struct, frozen=True, array_like=True):
    """One partition as of a moment: everything before `next_offset` is synced."""

    uuid: bytes
    partition: int
    start_offset: int
    # The active segment: its base offset, how much of it is meant, and its block checksums.
    segment: int
    size: int
    next_offset: int
    max_timestamp: int
    created_ms: int
    checks_whole: bytes
    checks_partial: int
    # The active segment's indexes, as far as they are in their files.
    index_count: int
    index_crc: int
    time_count: int
    time_crc: int
    # See state.py.
    state: bytes


class Checkpoint(msgspec.Struct, frozen=True, array_like=True):
    leader_epoch: int
    # Frames before this position are applied, and their segments synced.
    journal_position: int
    next_producer_id: int
    partitions: list[PartitionState]


@dataclass(slots=True)
class Capture:
    """A partition's state at one moment, but for the checksums, which `finish` makes."""

    segment: Segment
    file: int
    checks: BlockChecks
    state: PartitionState

    def finish(self, disk: Disk) -> None:
        """Runs in a thread."""
        catch_up(disk, self.file, self.checks, self.state.size)
        self.state = msgspec.structs.replace(
            self.state,
            checks_whole=self.checks.whole.tobytes(),
            checks_partial=self.checks.partial,
        )


def capture(partition: Partition) -> Capture:
    """A partition's state now. Everything reserved must have been written."""
    active = partition.active
    flushed = active.flushed
    loaded = active.loaded
    assert loaded is not None
    assert active.size == partition.tail
    assert not partition.unapplied
    state = PartitionState(
        uuid=partition.uuid,
        partition=partition.id.number,
        start_offset=partition.start_offset,
        segment=active.base_offset,
        size=active.size,
        next_offset=active.next_offset,
        max_timestamp=active.max_timestamp,
        created_ms=active.created_ms,
        checks_whole=b"",
        checks_partial=0,
        index_count=flushed.index_count,
        index_crc=flushed.index_crc,
        time_count=flushed.time_count,
        time_crc=flushed.time_crc,
        state=partition.encode_state(),
    )
    return Capture(active, loaded.file, loaded.checks.copy(), state)


def write_checkpoint(disk: Disk, path: str, checkpoint: Checkpoint) -> None:
    body = msgspec.msgpack.encode(checkpoint)
    copy = COPY.pack(MAGIC, len(body), crc32c(body)) + body
    write_file(disk, path, copy + copy)


def read_checkpoint(disk: Disk, path: str) -> Checkpoint | None:
    """None when there is none, or both copies are damaged."""
    first, second = read_copies(disk, path)
    return first or second


def read_copies(disk: Disk, path: str) -> tuple[Checkpoint | None, Checkpoint | None]:
    """Both copies, each None when it is damaged."""
    data = read_file(disk, path) or b""
    half = len(data) // 2
    return _decode(data[:half]), _decode(data[half:])


def _decode(copy: bytes) -> Checkpoint | None:
    if len(copy) < COPY.size:
        return None
    magic, length, crc = COPY.unpack_from(copy)
    body = copy[COPY.size : COPY.size + length]
    if magic != MAGIC or len(body) != length or crc32c(body) != crc:
        return None
    return msgspec.msgpack.decode(body, type=Checkpoint)
