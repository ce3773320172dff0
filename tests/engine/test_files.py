"""What the engine tells a reader of segment files: the bytes are there, and end where it says."""

from __future__ import annotations

import errno

from engine.engines import T0, T1, ManualHouse
from engine.manual import ManualScheduler
from faults.simulated_disk import SimulatedDisk
from log.making import batch
from millstream.engine.memory import MemoryEngine
from millstream.engine.protocol import Files
from millstream.log import batch as batches
from millstream.log.partition import PartitionSettings

SMALL = PartitionSettings(segment_bytes=500)


def read_files(disk: SimulatedDisk, files: Files, partition: int = 0) -> list[int]:
    """The offsets that a reader finds, in whole batches."""
    found: list[int] = []
    contents = disk.files()
    for segment in files.segments:
        data = contents[f"{files.directory}/{partition}/{segment.name}"][: segment.bytes]
        assert len(data) == segment.bytes
        walked = batches.walk(data)
        assert sum(header.size for _, header in walked) == segment.bytes
        assert not walked or walked[0][1].base_offset >= segment.base_offset
        found += [
            record.offset
            for at, header in walked
            for record in batches.decode(data[at : at + header.size])
        ]
    return found


def files_of(house: ManualHouse) -> Files:
    files = house.engine.files(T0)
    assert files is not None
    return files


def test_what_is_only_in_the_journal_is_written_first() -> None:
    disk = SimulatedDisk()
    house = ManualHouse(disk)
    house.create()
    for n in range(3):
        house.done(house.engine.append(T0, batch(b"%d" % n)))
    files = files_of(house)
    assert (files.start, files.high_watermark) == (0, 3)
    assert read_files(disk, files) == [0, 1, 2]


def test_segments_are_listed_up_to_the_high_watermark() -> None:
    disk = SimulatedDisk()
    house = ManualHouse(disk, settings_for=lambda _: SMALL)
    house.create(SMALL)
    for n in range(40):
        house.append(batch(b"%020d" % n))
        assert read_files(disk, files_of(house)) == list(range(n + 1))
    house.scheduler.advance(2)
    files = files_of(house)
    assert [one.is_sealed for one in files.segments[:-1]] == [True] * (len(files.segments) - 1)
    assert not files.segments[-1].is_sealed


def test_what_is_trimmed_is_before_the_start() -> None:
    disk = SimulatedDisk()
    house = ManualHouse(disk, settings_for=lambda _: SMALL)
    house.create(SMALL)
    for n in range(40):
        house.append(batch(b"%020d" % n))
    house.done(house.engine.trim(T0, 23))
    files = files_of(house)
    assert files.start == 23
    assert [one for one in read_files(disk, files) if one >= 23] == list(range(23, 40))
    house.done(house.engine.trim(T0, 40))
    files = files_of(house)
    assert (files.start, files.high_watermark) == (40, 40)
    assert [one for one in read_files(disk, files) if one >= 40] == []


def test_what_has_no_room_in_its_segment_yet_is_not_told_of() -> None:
    disk = SimulatedDisk()
    house = ManualHouse(disk)
    house.create()
    house.append(batch(b"a"))
    assert files_of(house).high_watermark == 1
    house.done(house.engine.append(T0, batch(b"b")))
    partition = house.partition()
    assert partition.unapplied
    write, disk.write = disk.write, _no_room  # type: ignore[method-assign,assignment]
    files = files_of(house)
    assert files.high_watermark == 1
    assert read_files(disk, files) == [0]
    disk.write = write  # type: ignore[method-assign]
    assert files_of(house).high_watermark == 2


def _no_room(*_: object) -> int:
    raise OSError(errno.ENOSPC, "no room")


def test_each_partition_has_its_own() -> None:
    disk = SimulatedDisk()
    house = ManualHouse(disk)
    house.create(partitions=2)
    house.append(batch(b"a"))
    other = house.engine.files(T1)
    assert other is not None
    assert (other.directory, other.high_watermark) == (files_of(house).directory, 0)
    assert read_files(disk, other, 1) == []


def test_an_engine_in_memory_has_none() -> None:
    scheduler = ManualScheduler(SimulatedDisk())
    engine = MemoryEngine(scheduler.soon)
    engine.open()
    made = engine.create("t", 1, PartitionSettings())
    scheduler.run()
    made.result()
    assert engine.files(T0) is None
