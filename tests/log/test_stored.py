"""Where a chunk lies, for a kernel that sends it from there: the same bytes as are read."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, batch
from millstream.log.disk import SystemDisk
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.stored import STORED_BYTES_MIN, StoredChunk

# Of one batch: a few records of random bytes, which no two batches have alike.
SIZES = (200, 5_000, 40_000, 100_000)
BATCHES = 60
SETTINGS = PartitionSettings(segment_bytes=1 << 20)


def new_partition(disk: SystemDisk | SimulatedDisk, directory: str) -> Partition:
    disk.make_directory(directory)
    partition = Partition(
        disk, directory, id=PartitionId("t", 0), uuid=bytes(16), settings=SETTINGS, leader_epoch=0
    )
    partition.start_empty(NOW_MS, 0)
    return partition


def fill(partition: Partition) -> None:
    for number in range(BATCHES):
        size = SIZES[number % len(SIZES)]
        partition.append(batch(b"%d" % number, os.urandom(size), b"end"), NOW_MS)
    while (job := partition.next_seal()) is not None:
        job.run()
        partition.sealed()


@pytest.fixture
def partition(tmp_path: Path) -> Iterator[Partition]:
    partition = new_partition(SystemDisk(), str(tmp_path / "p"))
    fill(partition)
    yield partition
    for segment in partition.segments:
        segment.close()


def locate(partition: Partition, offset: int, bytes_max: int) -> StoredChunk | None:
    plan = partition.plan_read(offset, bytes_max)
    return None if plan is None else plan.locate()


@pytest.mark.parametrize("bytes_max", [110_000, 150_000, 1 << 20, 1 << 30])
def test_a_chunk_that_is_located_is_the_one_that_is_read(
    partition: Partition, bytes_max: int
) -> None:
    located = 0
    for offset in range(partition.high_watermark):
        found = locate(partition, offset, bytes_max)
        if found is None:
            continue
        located += 1
        chunk = partition.read(offset, bytes_max)
        assert bytes(found.data) == bytes(chunk.data)
        assert found.next_offset == chunk.next_offset
        assert len(found.data) == len(chunk.data) <= bytes_max
        assert found.data.read(1_000) == bytes(chunk.data[1_000:])
    assert located


def test_a_short_chunk_is_left_to_be_read(partition: Partition) -> None:
    partition.append(batch(b"a short one"), NOW_MS)
    assert locate(partition, 0, STORED_BYTES_MIN - 1) is None
    assert locate(partition, partition.high_watermark - 1, 1 << 20) is None
    assert locate(partition, partition.high_watermark, 1 << 20) is None


def test_a_batch_larger_than_was_asked_for_is_left_to_be_read(partition: Partition) -> None:
    partition.append(batch(os.urandom(900_000)), NOW_MS)
    assert locate(partition, partition.high_watermark - 1, STORED_BYTES_MIN) is None
    assert locate(partition, partition.high_watermark - 1, 1 << 20) is not None


def test_blocks_that_were_not_checked_since_they_were_opened_are_read_once(
    partition: Partition,
) -> None:
    first = partition.segments[0]
    first.close()
    first.open()
    assert locate(partition, 0, 1 << 20) is None
    partition.read(0, 1 << 20)
    assert locate(partition, 0, 1 << 20) is not None


def test_damage_is_never_located(partition: Partition) -> None:
    first = partition.segments[0]
    first.close()
    with open(first.path + ".log", "r+b") as file:
        # Inside the first value, where no header tells of it.
        file.seek(150)
        file.write(b"\xff\x00\xff")
    first.open()
    assert locate(partition, 0, 1 << 20) is None
    assert locate(partition, 4, 1 << 20) is None


def evict(path: str) -> bool:
    """Whether the file is out of the page cache: a file system in memory keeps it."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
        except BlockingIOError:
            return True
    return False


def test_what_would_come_from_the_device_is_left_to_be_read(partition: Partition) -> None:
    assert locate(partition, 0, 1 << 20) is not None
    if not evict(partition.segments[0].path + ".log"):
        pytest.skip("this file system keeps all of a file in memory")
    assert locate(partition, 0, 1 << 20) is None
    partition.read(0, 1 << 20)
    assert locate(partition, 0, 1 << 20) is not None


@contextmanager
def opened(disk: SystemDisk, path: Path) -> Iterator[int]:
    file = disk.open(str(path), "read")
    try:
        yield file
    finally:
        disk.close(file)


def test_a_file_is_in_the_page_cache_with_all_of_its_pages_or_not(tmp_path: Path) -> None:
    path, page = tmp_path / "f", mmap.PAGESIZE
    path.write_bytes(os.urandom(512 * page))
    disk = SystemDisk()
    with opened(disk, path) as file:
        assert disk.can_send(file, 512 * page, 0)
        assert disk.can_send(file, 3, 5 * page - 1)
        if not evict(str(path)):
            pytest.skip("this file system keeps all of a file in memory")
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        disk.read(file, page, 4 * page)
        assert disk.can_send(file, page, 4 * page)
        assert not disk.can_send(file, 512 * page, 0)
        assert not disk.can_send(file, 2 * page, 4 * page + 1)


def test_a_file_that_is_no_file_is_not_sent() -> None:
    assert not SystemDisk().can_send(-1, 4096, 0)


def test_a_segment_that_is_deleted_keeps_its_bytes_for_who_holds_them(
    partition: Partition,
) -> None:
    expected = bytes(partition.read(0, 1 << 20).data)
    found = locate(partition, 0, 1 << 20)
    assert found is not None
    segment, file = partition.segments[0], found.data.file
    segment.close()
    os.unlink(segment.path + ".log")
    # Its number is not given to another file meanwhile.
    with open(os.devnull, "rb") as other:
        assert other.fileno() != file
        assert bytes(found.data) == expected
    del found
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_a_file_that_has_become_shorter_is_an_error(partition: Partition) -> None:
    found = locate(partition, 0, 1 << 20)
    assert found is not None
    os.truncate(partition.segments[0].path + ".log", 70_000)
    with pytest.raises(OSError, match="is shorter than it was"):
        bytes(found.data)


def test_a_disk_that_is_none_of_the_system_has_nothing_to_send() -> None:
    partition = new_partition(SimulatedDisk(), "/p")
    fill(partition)
    assert locate(partition, 0, 1 << 20) is None
    assert len(partition.read(0, 1 << 20).data) > STORED_BYTES_MIN
