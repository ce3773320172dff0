"""Small data directories to look at and to damage: the same bytes on every run."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from millstream.log import batch as batches
from millstream.log.compaction import CompactionJob, Source, compact
from millstream.log.disk import Disk, SystemDisk
from millstream.log.journal import producer_ids_entry
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.store import Store, StoreOptions, open_store

# 2026-01-02 03:04:05 UTC.
NOW_MS = 1_767_323_045_000
UUID = bytes.fromhex("0123456789abcdef" * 2)
DIRECTORY = f"topics/orders@{UUID.hex()}/0"

# A batch of three records has 129 bytes: a segment takes four of them, which is 12 offsets.
SETTINGS = PartitionSettings(segment_bytes=600)
BATCHES = 10
RECORDS = 3


def open_at(root: str | Path, disk: Disk | None = None) -> Store:
    options = StoreOptions(settings_for=lambda _: SETTINGS, journal_file_bytes=8192)
    return open_store(disk or SystemDisk(), str(root), NOW_MS, options)


def batch(number: int, **options: str) -> bytes:
    """Three records, the first with a key, the second in a lane, the third a tombstone."""
    time = NOW_MS + 1000 * number
    return batches.encode(
        [
            (time, b"user-%d" % (number % 4), b"order %d" % number, [("trace", b"%d" % number)]),
            (time + 1, None, bytes([0xFF, number]), [("ms-lane", b"high")]),
            (time + 2, b"user-%d" % number, None, []),
        ],
        **options,  # type: ignore[arg-type]
    )


def build(root: str | Path, *, disk: Disk | None = None, count: int = BATCHES) -> None:
    """The topic `orders` with 2 partitions; 10 batches in the first, in three segments."""
    store = open_at(root, disk)
    store.create_topic("orders", UUID, 2, SETTINGS, NOW_MS)
    fill(store, count)
    store.checkpoint(NOW_MS)
    store.close()


def fill(store: Store, count: int, first: int = 0) -> Partition:
    partition = store.partition(PartitionId("orders", 0))
    for number in range(first, first + count):
        partition.append(batch(number), NOW_MS + 1000 * number)
        seal_all(partition)
    return partition


def seal_all(partition: Partition) -> None:
    while (job := partition.next_seal()) is not None:
        job.run()
        partition.sealed()


def build_crashed(root: str | Path, *, frames: int = 2) -> None:
    """As `build`, then frames in the journal that have not reached their segment."""
    build(root)
    store = open_at(root)
    partition = store.partition(PartitionId("orders", 0))
    for number in range(frames):
        data = batch(BATCHES + number)
        placed = partition.reserve(data, batches.read_header(data), NOW_MS)
        store.journal.write([placed, *producer_ids_entry(1000 + number)])
        store.journal.sync()
    store.close()


def build_compacted(root: str | Path) -> None:
    """As `build`, with the sealed segments replaced by a compacted one."""
    build(root)
    store = open_at(root)
    partition = store.partition(PartitionId("orders", 0))
    old = [one for one in partition.segments if one.sealed]
    job = CompactionJob(
        directory=partition.directory,
        sources=[Source(o.base_offset, o.generation, o.next_offset, o.size) for o in old],
        segment_bytes=1 << 20,
        index_bytes=4096,
        time_ms=1000,
        tombstones_before_ms=0,
    )
    compact(store.disk, job)
    store.close()
    # The next start takes away what was replaced.
    store = open_at(root)
    store.close()


def digest(root: str | Path) -> str:
    """A hash of every name and byte below a directory."""
    hashed = hashlib.sha256()
    for directory, below, names in os.walk(root):
        below.sort()
        for name in sorted(names):
            path = Path(directory, name)
            hashed.update(str(path.relative_to(root)).encode() + b"\0")
            hashed.update(path.read_bytes())
        hashed.update(repr(below).encode())
    return hashed.hexdigest()


def flip(path: Path, position: int, mask: int = 1) -> None:
    """Flip bits of one byte; a negative position counts from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= mask
    path.write_bytes(data)
