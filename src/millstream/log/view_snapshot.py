"""A snapshot of a view: the newest value of each key of a partition, up to an offset.

Made by a child process, from the snapshot before and the sealed segments that follow it, so that
the broker's loop does nothing for it. It is a cache: damaged, stale or deleted, the view is loaded
from the log. The file is `<offset>.snapshot`, big endian:

    at  bytes  field
     0    8    magic             `msview 1`
     8   16    UUID of the topic
    24    8    offset            the first that is not in here any more
    32    8    records
    40         batches of records with key and value, one after the other
    end   4    CRC-32C of all before
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from crc32c import crc32c

from millstream.log import batch as batches
from millstream.log.child import work_for_parent
from millstream.log.compaction import WRITE_BYTES, Source, batches_of, open_source
from millstream.log.disk import close_file, read_file, write_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millstream.log.disk import Disk

HEAD = struct.Struct(">8s16sQQ")
CRC = struct.Struct(">I")
MAGIC = b"msview 1"
SUFFIX = ".snapshot"
NAME = re.compile(r"([0-9]{20})\.snapshot")
# Records of a batch, so that a reader can take a breath between two of them.
BATCH_RECORDS = 4096


class ViewSnapshot(NamedTuple):
    """The state as of an offset: batches of records with key and value."""

    offset: int
    data: memoryview


class SnapshotJob(msgspec.Struct, frozen=True):
    # The partition's directory, and its sealed segments.
    directory: str
    sources: list[Source]
    uuid: str
    # Where snapshots of the view lie, and the one to start from.
    folder: str
    previous: int | None


class SnapshotResult(msgspec.Struct, frozen=True):
    offset: int
    records: int


def take(disk: Disk, job: SnapshotJob) -> SnapshotResult:
    """Write the next snapshot, and take away all others."""
    uuid = bytes.fromhex(job.uuid)
    state: dict[bytes, bytes] = {}
    offset = 0
    if job.previous is not None:
        before = read_snapshot(disk, f"{job.folder}/{file_name(job.previous)}", uuid)
        if before is not None:
            offset = before.offset
            _apply(state, before.data)
    for source in job.sources:
        if source.next_offset > offset:
            segment = open_source(disk, job.directory, source)
            try:
                for _, _, data in batches_of(segment):
                    _apply(state, data, offset)
            finally:
                segment.close()
    end = job.sources[-1].next_offset
    _write(disk, job.folder, HEAD.pack(MAGIC, uuid, end, len(state)), end, _encoded(state))
    for name in disk.list_directory(job.folder):
        if name != file_name(end):
            disk.unlink(f"{job.folder}/{name}")
    return SnapshotResult(end, len(state))


def _apply(state: dict[bytes, bytes], data: memoryview, offset: int = 0) -> None:
    for position, header in batches.walk(data):
        for record in batches.decode(data[position : position + header.size]):
            if record.key is None or record.offset < offset:
                continue
            if record.value is None:
                state.pop(record.key, None)
            else:
                state[record.key] = record.value


def _encoded(state: dict[bytes, bytes]) -> Iterator[bytes]:
    fields: list[batches.Fields] = []
    done = 0
    for key, value in state.items():
        fields.append((0, key, value, ()))
        if len(fields) == BATCH_RECORDS:
            yield batches.encode(fields, base_offset=done)
            done += len(fields)
            fields = []
    if fields:
        yield batches.encode(fields, base_offset=done)


def _write(disk: Disk, folder: str, head: bytes, offset: int, parts: Iterable[bytes]) -> None:
    """Beside its place, then there by a rename: a crash leaves the old one or the new one."""
    path = f"{folder}/{file_name(offset)}"
    temporary = path + ".new"
    file = disk.open(temporary, "create")
    try:
        disk.truncate(file, 0)
        position = write_all(disk, file, [head], 0)
        crc = crc32c(head)
        unsynced = 0
        for part in parts:
            position += write_all(disk, file, [part], position)
            crc = crc32c(part, crc)
            unsynced += len(part)
            if unsynced >= WRITE_BYTES:
                # No long flush at the end, that would hold up the syncs of others.
                disk.sync(file)
                unsynced = 0
        write_all(disk, file, [CRC.pack(crc)], position)
        disk.sync(file)
    finally:
        close_file(disk, file)
    disk.rename(temporary, path)
    disk.sync_directory(folder)


def read_snapshot(disk: Disk, path: str, uuid: bytes) -> ViewSnapshot | None:
    """None for one that is not there, is damaged, or belongs to another topic."""
    data = read_file(disk, path)
    if data is None or len(data) < HEAD.size + CRC.size:
        return None
    view = memoryview(data)
    magic, owner, offset, _ = HEAD.unpack_from(data)
    (crc,) = CRC.unpack_from(data, len(data) - CRC.size)
    if magic != MAGIC or owner != uuid or crc32c(view[: -CRC.size]) != crc:
        return None
    return ViewSnapshot(offset, view[HEAD.size : -CRC.size])


def newest_snapshot(
    disk: Disk, folder: str, uuid: bytes, first: int, last: int
) -> ViewSnapshot | None:
    """The newest one between two offsets that can be used."""
    if disk.size_of(folder) is None:
        return None
    matches = [NAME.fullmatch(name) for name in disk.list_directory(folder)]
    offsets = sorted((int(match[1]) for match in matches if match is not None), reverse=True)
    for offset in offsets:
        if first <= offset <= last:
            found = read_snapshot(disk, f"{folder}/{file_name(offset)}", uuid)
            if found is not None and found.offset == offset:
                return found
    return None


def file_name(offset: int) -> str:
    return f"{offset:020d}{SUFFIX}"


def main() -> None:
    work_for_parent(SnapshotJob, take)


if __name__ == "__main__":
    main()
