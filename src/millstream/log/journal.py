"""Frames of batches for many partitions: the one file sequence that is synced for all of them.

A position in the journal is a byte count since the store was made; it never goes back. A file is
named by its first position, and a frame that starts at `position` lies at `position - first`.

    frame   magic      u32  MSJF
            length     u32  of the body
            crc        u32  CRC-32C of position, previous and body
            position   u64  where this frame starts: bytes left over from a file's earlier life,
                            or copied to a wrong place, are never taken for a frame
            previous   u64  where the frame before ended: a frame that went missing is noticed
            body       entries, one after the other

    entry   kind       u8   batch, trim or producer ids
            uuid       16   of the topic
            partition  i32
            segment    i64  base offset of the segment that the batch goes to
            place      i64  position in that segment
            offset     i64  base offset (trim: the new start; producer ids: the next free one)
            length     u32  of the batch that follows

An entry says where its bytes go, so replay is writing them there, and may be interrupted and
repeated. A frame counts whole or not at all: that is what makes an append atomic.

The next frame is written only when the one before is synced, so a crash can tear only the last.
Files are filled with zeroes ahead of use and used again after a cut, because a sync that need not
grow the file takes less than half the time. The file in waiting is called `spare`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from millstream.errors import AppendTooLarge
from millstream.log.disk import Disk, close_file, write_all
from millstream.log.placing import (
    BATCH_KIND,
    ENTRY,
    body_bytes,
    entry_buffers,
    joined_entries,
)
from millstream.log.segment import JOIN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from millstream.log.batch import Data
    from millstream.log.placing import Placed

FRAME = struct.Struct(">IIIQQ")
_PLACE = struct.Struct(">QQ")
FRAME_MAGIC = 0x4D534A46
_MAGIC_BYTES = FRAME_MAGIC.to_bytes(4, "big")

# The largest body: what one atomic append may hold, and what a reader allocates for a frame.
BODY_BYTES_MAX = 64 * 1024 * 1024
# Zeroes are written in pieces of this size.
FILL_BYTES = 1024 * 1024


class Kind(IntEnum):
    BATCH = BATCH_KIND
    TRIM = 2
    PRODUCER_IDS = 3


class Entry(NamedTuple):
    kind: Kind
    uuid: bytes
    partition: int
    segment: int
    place: int
    offset: int
    data: memoryview


class Frame(NamedTuple):
    position: int
    previous: int
    end: int
    entries: list[Entry]


class Damage(NamedTuple):
    """Positions between which frames are missing that were durable once."""

    start: int
    end: int


class JournalFile(NamedTuple):
    """Name, and the position of the first byte."""

    path: str
    first: int


def file_name(first: int) -> str:
    return f"{first:020d}.journal"


def trim_entry(uuid: bytes, partition: int, start_offset: int) -> tuple[bytes]:
    return (ENTRY.pack(Kind.TRIM, uuid, partition, 0, 0, start_offset, 0),)


def producer_ids_entry(next_id: int) -> tuple[bytes]:
    return (ENTRY.pack(Kind.PRODUCER_IDS, bytes(16), 0, 0, 0, next_id, 0),)


@dataclass(slots=True)
class _Open:
    name: JournalFile
    file: int
    size: int


class Journal:
    """The writing side. One writer; `write` then `sync`, in turn."""

    __slots__ = (
        "_current",
        "_directory",
        "_disk",
        "_files",
        "_is_named",
        "_previous",
        "file_bytes",
        "position",
    )

    def __init__(self, disk: Disk, directory: str, *, position: int, file_bytes: int) -> None:
        self._disk = disk
        self._directory = directory
        self.file_bytes = file_bytes
        # Where the next frame starts, and where the last one ended.
        self.position = position
        self._previous = position
        self._files: list[JournalFile] = []
        self._current: _Open | None = None
        # Whether the current file's name is durable; if not, the next sync sees to it.
        self._is_named = True

    @property
    def length_bytes(self) -> int:
        """How much a replay would read, at most."""
        return self.position - self._files[0].first if self._files else 0

    @property
    def wants_spare(self) -> bool:
        """Whether the current file is half full and no other is ready."""
        current = self._current
        is_filling = current is None or self.position - current.name.first > current.size // 2
        return is_filling and self._disk.size_of(self._spare) != self.file_bytes

    def write(self, entries: Sequence[Placed | bytes | memoryview]) -> int:
        """Write one frame at the end, and answer how long its body is. No frame is there when it
        fails."""
        length = body_bytes(entries)
        if length > BODY_BYTES_MAX:
            raise AppendTooLarge(
                f"an append of {length} bytes does not fit in one journal frame "
                f"of {BODY_BYTES_MAX}; send it in parts",
                limit_bytes=BODY_BYTES_MAX,
            )
        current = self._room_for(FRAME.size + length)
        position, previous = self.position, self._previous
        crc = crc32c(_PLACE.pack(position, previous))
        buffers: list[Data]
        if length <= JOIN_BYTES * len(entries):
            frame = joined_entries(entries, FRAME.size)
            crc = crc32c(memoryview(frame)[FRAME.size :], crc)
            FRAME.pack_into(frame, 0, FRAME_MAGIC, length, crc, position, previous)
            buffers = [frame]
        else:
            buffers = list(entry_buffers(entries))
            for buffer in buffers:
                crc = crc32c(buffer, crc)
            buffers.insert(0, FRAME.pack(FRAME_MAGIC, length, crc, position, previous))
        write_all(self._disk, current.file, buffers, position - current.name.first)
        self.position = self._previous = position + FRAME.size + length
        return length

    def sync(self) -> None:
        """Make every frame written so far durable. Runs in a thread, never beside `write`."""
        if self._current is not None:
            self._disk.sync(self._current.file)
            if not self._is_named:
                self._disk.sync_directory(self._directory)
                self._is_named = True

    def prepare_spare(self) -> None:
        """Fill a file with zeroes for later. Runs in a thread."""
        fill(self._disk, self._spare, self.file_bytes)

    def cut(self, position: int) -> bool:
        """Let go of the first file, if all of it lies before a position; False if it does not.
        One file is kept as the spare."""
        if len(self._files) < 2 or self._files[1].first > position:
            return False
        old = self._files[0]
        is_regular = self._disk.size_of(old.path) == self.file_bytes
        if is_regular and self._disk.size_of(self._spare) is None:
            self._disk.rename(old.path, self._spare)
        else:
            self._disk.unlink(old.path)
        del self._files[0]
        return True

    def close(self) -> None:
        if self._current is not None:
            close_file(self._disk, self._current.file)
            self._current = None

    @property
    def _spare(self) -> str:
        return f"{self._directory}/spare"

    def _room_for(self, size: int) -> _Open:
        current = self._current
        first = self.position
        if current is not None:
            if self.position - current.name.first + size <= current.size:
                return current
            first = current.name.first + current.size
        fresh = self._start_file(size, first)
        if current is not None:
            close_file(self._disk, current.file)
        self._current = fresh
        self._files.append(fresh.name)
        self.position = first
        return fresh

    def _start_file(self, size: int, first: int) -> _Open:
        name = JournalFile(f"{self._directory}/{file_name(first)}", first)
        if size <= self.file_bytes and self._disk.size_of(self._spare) == self.file_bytes:
            self._disk.rename(self._spare, name.path)
            size = self.file_bytes
        else:
            size = max(size, self.file_bytes)
            fill(self._disk, name.path, size)
        self._is_named = False
        return _Open(name, self._disk.open(name.path, "write"), size)


def fill(disk: Disk, path: str, size: int) -> None:
    """A file of zeroes, synced so that later syncs need not grow it."""
    building = path + ".new"
    file = disk.open(building, "create")
    try:
        disk.truncate(file, 0)
        zeroes = memoryview(bytes(min(size, FILL_BYTES)))
        filled = 0
        while filled < size:
            filled += write_all(disk, file, [zeroes[: size - filled]], filled)
        disk.sync(file)
    finally:
        close_file(disk, file)
    disk.rename(building, path)


# ---- reading, for recovery and the offline tools


def journal_files(disk: Disk, directory: str) -> list[JournalFile]:
    found: list[JournalFile] = []
    for name in disk.list_directory(directory):
        first, _, suffix = name.partition(".")
        if suffix == "journal" and first.isdecimal() and len(first) == 20:
            found.append(JournalFile(f"{directory}/{name}", int(first)))
    return found


def read_frames(disk: Disk, directory: str, start: int | None) -> Iterator[Frame | Damage]:
    """All frames from a position on, in order; from the first one there is when it is None.

    Bytes that are no frame are the end of a file. Where frames are missing that a later one
    knows of, the damage is given out before it, and the reading goes on.
    """
    ended = start
    for name in journal_files(disk, directory):
        for frame in _frames_of(disk, name, start or 0):
            if ended is not None and frame.previous > ended:
                yield Damage(ended, frame.position)
            yield frame
            ended = frame.end


def _frames_of(disk: Disk, name: JournalFile, start: int) -> Iterator[Frame]:
    size = disk.size_of(name.path) or 0
    if name.first + size <= start:
        return
    file = disk.open(name.path, "read")
    try:
        data = memoryview(disk.read(file, size, 0))
    finally:
        close_file(disk, file)
    position = max(start, name.first)
    while True:
        frame = _frame_at(data, name.first, position) or _next_frame(data, name.first, position)
        if frame is None:
            return
        yield frame
        position = frame.end


def find_torn(disk: Disk, directory: str, ended: int) -> int | None:
    """The position of a frame that was begun behind the last whole one; None when there is
    none. Bytes of a file's earlier life are not one."""
    for name in journal_files(disk, directory):
        position = max(ended, name.first)
        size = disk.size_of(name.path) or 0
        if name.first + size <= position:
            continue
        file = disk.open(name.path, "read")
        try:
            data = memoryview(disk.read(file, size, 0))
        finally:
            close_file(disk, file)
        if _is_torn(data[position - name.first :], position):
            return position
    return None


def _is_torn(data: memoryview, position: int) -> bool:
    if len(data) < FRAME.size:
        return bytes(data[:4]) == _MAGIC_BYTES
    magic, _, _, own_position, _ = FRAME.unpack_from(data)
    if own_position == position:
        return True
    # One that is right for another position is left over; one that is wrong for its own is not.
    return magic == FRAME_MAGIC and _frame_at(data, own_position, own_position) is None


def _frame_at(data: memoryview, first: int, position: int) -> Frame | None:
    start = position - first
    if start + FRAME.size > len(data):
        return None
    magic, length, crc, own_position, previous = FRAME.unpack_from(data, start)
    if magic != FRAME_MAGIC or own_position != position or length > BODY_BYTES_MAX:
        return None
    body = data[start + FRAME.size : start + FRAME.size + length]
    if len(body) < length or crc32c(body, crc32c(_PLACE.pack(position, previous))) != crc:
        return None
    return Frame(position, previous, position + FRAME.size + length, _entries(body))


def _next_frame(data: memoryview, first: int, position: int) -> Frame | None:
    raw = bytes(data)
    at = raw.find(_MAGIC_BYTES, position - first + 1)
    while at >= 0:
        frame = _frame_at(data, first, first + at)
        if frame is not None:
            return frame
        at = raw.find(_MAGIC_BYTES, at + 1)
    return None


def _entries(body: memoryview) -> list[Entry]:
    entries: list[Entry] = []
    at = 0
    while at < len(body):
        kind, uuid, partition, segment, place, offset, length = ENTRY.unpack_from(body, at)
        at += ENTRY.size
        data = body[at : at + length]
        entries.append(Entry(Kind(kind), uuid, partition, segment, place, offset, data))
        at += length
    return entries
