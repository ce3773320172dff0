"""Stores to measure on: made with the log's own code, checkpointed and closed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

from typing_extensions import Buffer

from bench.harness import NotMeasured
from bench.machine import free_bytes
from millstream.clock import SystemClock
from millstream.log import batch as batches
from millstream.log.disk import Access, Disk, SystemDisk
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.store import Store, StoreOptions, new_uuid, open_store

TOPIC = "bench"
# What a record costs beside key and value, about.
RECORD_OVERHEAD_BYTES = 12
# A store may take at most this share of what is free, so that a run fills no disk.
FREE_SHARE = 0.5
HOLE_START = 4096


class SparseDisk(SystemDisk):
    """Leaves out zeroes: of a batch it writes the first 4 KiB, the file grows over the rest.

    For batches whose value is zeroes the bytes that a reader gets are the same, so that seals and
    checksums hold, and a store of many gigabytes takes seconds to make.
    """

    __slots__ = ("_logs",)

    def __init__(self) -> None:
        super().__init__()
        self._logs: set[int] = set()

    def open(self, path: str, access: Access) -> int:
        file = super().open(path, access)
        if path.endswith(".log"):
            self._logs.add(file)
        return file

    def close(self, file: int) -> None:
        self._logs.discard(file)
        super().close(file)

    def write(self, file: int, buffers: Sequence[Buffer], position: int) -> int:
        if file not in self._logs:
            return super().write(file, buffers, position)
        start = position
        for buffer in buffers:
            view = memoryview(buffer)
            os.pwrite(file, view[:HOLE_START], position)
            position += view.nbytes
        if os.fstat(file).st_size < position:
            os.ftruncate(file, position)
        return position - start


def now_ms() -> int:
    return SystemClock().wall_ms()


def require_room(path: Path, wanted_bytes: int) -> None:
    room = int(free_bytes(path) * FREE_SHARE)
    if room < wanted_bytes:
        raise NotMeasured(f"{wanted_bytes} bytes are needed, {room} may be used; choose --dir")


def plain_settings(**changes: object) -> PartitionSettings:
    """No fsync and no retention: what is measured is the log, not its upkeep."""
    settings: dict[str, object] = {"fsync": "none", "retention_age_ms": None, **changes}
    return PartitionSettings(**settings)  # type: ignore[arg-type]


def batch_of(size: int, value_bytes: int = 100) -> bytes:
    """A batch of `size` bytes, the last record a little longer than the others to make it so; or
    of one record, when that alone is larger."""
    count = max(1, (size - batches.HEADER_BYTES) // (value_bytes + RECORD_OVERHEAD_BYTES))
    stamp = now_ms()
    values = [os.urandom(value_bytes) for _ in range(count)]
    data = batches.encode((stamp, None, value, ()) for value in values)
    while len(data) < size:
        values[-1] += bytes(size - len(data))
        data = batches.encode((stamp, None, value, ()) for value in values)
        # Its length took a byte more, too.
        if len(data) > size:
            values[-1] = values[-1][: size - len(data)]
            data = batches.encode((stamp, None, value, ()) for value in values)
    return data


def zero_batch(size: int) -> bytes:
    """One record of zeroes; only its first bytes are anything else, as `SparseDisk` needs."""
    data = batches.encode([(now_ms(), None, bytes(size), ())])
    # The last byte says that there are no record headers: a zero too.
    assert not any(data[HOLE_START:])
    return data


def keyed_batches(total_bytes: int, size: int, value_bytes: int) -> Iterator[bytes]:
    """Batches whose keys come back, twice on average, so that compaction has work to do."""
    count = max(1, size // (value_bytes + RECORD_OVERHEAD_BYTES + 9))
    numbers = random.Random(1)
    keys = max(1, total_bytes // size * count // 2)
    values = os.urandom(value_bytes + 4096)
    stamp = now_ms()
    made = 0
    while made < total_bytes:
        records = []
        for _ in range(count):
            at = numbers.randrange(4096)
            key = b"k%08d" % numbers.randrange(keys)
            records.append((stamp, key, values[at : at + value_bytes], ()))
        data = batches.encode(records)
        made += len(data)
        yield data


def build(
    root: Path,
    batches_: Iterator[bytes],
    *,
    partitions: int = 1,
    settings: PartitionSettings,
    disk: Disk | None = None,
) -> None:
    """A clean store with one topic, filled round robin, every full segment sealed."""
    store = open_store(disk or SystemDisk(), str(root), now_ms(), StoreOptions())
    try:
        store.create_topic(TOPIC, new_uuid(), partitions, settings, now_ms())
        fill(store, batches_)
        store.checkpoint(now_ms())
    finally:
        store.close()


def fill(store: Store, batches_: Iterator[bytes]) -> None:
    targets = cycle(list(store.partitions.values()))
    stamp = now_ms()
    for data in batches_:
        partition = next(targets)
        partition.append(data, stamp)
        seal(partition)


def seal(partition: Partition) -> None:
    while (job := partition.next_seal()) is not None:
        job.run()
        closed = partition.closing[0].segment
        partition.sealed()
        closed.close()


def repeated(some: Sequence[bytes], total_bytes: int) -> Iterator[bytes]:
    """The same batches over and over."""
    return islice(cycle(some), max(1, total_bytes // len(some[0])))


def partition_in(root: Path, name: str, settings: PartitionSettings) -> Partition:
    """A partition alone, without a store around it."""
    directory = root / name
    directory.mkdir()
    partition = Partition(
        SystemDisk(),
        str(directory),
        id=PartitionId(TOPIC, 0),
        uuid=new_uuid(),
        settings=settings,
        leader_epoch=1,
    )
    partition.start_empty(now_ms())
    return partition
