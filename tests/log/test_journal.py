"""The journal: frames, files, cutting, replay."""

from __future__ import annotations

import pytest

from faults.simulated_disk import SimulatedDisk
from log.making import batch, header_of
from millstream.errors import AppendTooLarge
from millstream.log import journal as journals
from millstream.log.journal import (
    BODY_BYTES_MAX,
    FRAME,
    Damage,
    Frame,
    Journal,
    Kind,
    find_torn,
    journal_files,
    producer_ids_entry,
    read_frames,
    trim_entry,
)
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.placing import ENTRY

DIRECTORY = "/journal"
FILE_BYTES = 1000
UUID = bytes(range(16))


def new_disk() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.make_directory(DIRECTORY)
    disk.sync_directory("/")
    return disk


def new_journal(disk: SimulatedDisk, position: int = 0) -> Journal:
    return Journal(disk, DIRECTORY, position=position, file_bytes=FILE_BYTES)


def entry(n: int, size: int = 0) -> list[bytes | memoryview]:
    """A trim to `n`, or a batch of that offset with so many bytes."""
    if not size:
        return [*trim_entry(UUID, 0, n)]
    return [ENTRY.pack(Kind.BATCH, UUID, 0, 0, 0, n, size), bytes(size)]


def written(disk: SimulatedDisk, count: int, size: int = 0) -> Journal:
    journal = new_journal(disk)
    for n in range(count):
        journal.write(entry(n, size))
        journal.sync()
    return journal


def frames(disk: SimulatedDisk, start: int | None = 0) -> list[Frame]:
    found = list(read_frames(disk, DIRECTORY, start))
    assert not [one for one in found if isinstance(one, Damage)], found
    return [one for one in found if isinstance(one, Frame)]


def numbers(disk: SimulatedDisk, start: int | None = 0) -> list[int]:
    return [one.entries[0].offset for one in frames(disk, start)]


def names(disk: SimulatedDisk) -> list[str]:
    return disk.list_directory(DIRECTORY)


def test_entries_come_back_as_they_were_written() -> None:
    disk = new_disk()
    disk.make_directory("/p")
    partition = Partition(
        disk,
        "/p",
        id=PartitionId("t", 3),
        uuid=UUID,
        settings=PartitionSettings(),
        leader_epoch=9,
    )
    partition.start_empty(0, base_offset=500)
    data = batch(b"a", b"b")
    placed = partition.reserve(data, header_of(data), 0)
    journal = new_journal(disk)
    journal.write([placed, *trim_entry(UUID, 3, 77), *producer_ids_entry(2000)])
    [frame] = frames(disk)
    kinds = [one.kind for one in frame.entries]
    assert kinds == [Kind.BATCH, Kind.TRIM, Kind.PRODUCER_IDS]
    first, second, third = frame.entries
    assert (first.uuid, first.partition, first.segment) == (UUID, 3, 500)
    assert (first.place, first.offset) == (0, 500)
    header = header_of(first.data)
    assert (header.base_offset, header.leader_epoch) == (500, 9)
    assert bytes(first.data[16:]) == data[16:]
    assert (second.uuid, second.partition, second.offset) == (UUID, 3, 77)
    assert third.offset == 2000


def test_positions_go_on_from_file_to_file() -> None:
    disk = new_disk()
    journal = written(disk, 60)
    assert numbers(disk) == list(range(60))
    found = journal_files(disk, DIRECTORY)
    assert [one.first for one in found] == [at * FILE_BYTES for at in range(len(found))]
    assert len(found) > 3
    for frame in frames(disk):
        # No frame lies across two files.
        assert frame.position // FILE_BYTES == (frame.end - 1) // FILE_BYTES
    assert frames(disk)[-1].end == journal.position


def test_reading_starts_at_any_frame() -> None:
    disk = new_disk()
    written(disk, 40)
    everything = frames(disk)
    for at, frame in enumerate(everything):
        assert numbers(disk, frame.position) == list(range(at, 40))
        assert numbers(disk, frame.end) == list(range(at + 1, 40))
    assert numbers(disk, None) == list(range(40))


def test_what_was_synced_survives_and_what_was_not_may_not() -> None:
    disk = new_disk()
    journal = written(disk, 30)
    journal.write(entry(30))
    assert numbers(disk.crash("nothing")) == list(range(30))
    assert numbers(disk.crash("all")) == list(range(31))


def test_a_frame_larger_than_a_file_gets_one_of_its_size() -> None:
    disk = new_disk()
    journal = written(disk, 3)
    for large in (entry(3, 5 * FILE_BYTES), entry(4)):
        journal.write(large)
        journal.sync()
    assert numbers(disk.crash("nothing")) == [0, 1, 2, 3, 4]
    assert frames(disk)[3].entries[0].data == bytes(5 * FILE_BYTES)


def test_a_frame_past_the_largest_is_refused_and_nothing_is_written() -> None:
    disk = new_disk()
    journal = written(disk, 1)
    operations, position = disk.operations, journal.position
    with pytest.raises(AppendTooLarge) as caught:
        journal.write([memoryview(bytes(BODY_BYTES_MAX + 1))])
    assert caught.value.fields == {"limit_bytes": BODY_BYTES_MAX}
    assert (disk.operations, journal.position) == (operations, position)


def test_a_frame_of_the_largest_size_is_read_back() -> None:
    disk = new_disk()
    journal = new_journal(disk)
    size = BODY_BYTES_MAX - ENTRY.size
    journal.write(entry(7, size))
    [frame] = frames(disk)
    assert len(frame.entries[0].data) == size


# ---- cutting, and files used again


def test_a_cut_takes_files_that_end_before_the_position() -> None:
    disk = new_disk()
    journal = written(disk, 100)
    everything = frames(disk)
    for frame in everything[::7]:
        while journal.cut(frame.position):
            pass
        files = journal_files(disk, DIRECTORY)
        assert files[0].first <= frame.position < files[0].first + FILE_BYTES
        assert frames(disk, frame.position) == [
            one for one in everything if one.position >= frame.position
        ]
    assert names(disk).count("spare") == 1
    assert journal.length_bytes == journal.position - journal_files(disk, DIRECTORY)[0].first


def test_a_file_that_was_cut_is_used_again_without_being_filled() -> None:
    disk = new_disk()
    journal = written(disk, 40)
    while journal.cut(journal.position):
        pass
    assert "spare" in names(disk)
    done: list[str] = []
    disk.on_operation = lambda _, name: done.append(name)
    before = len(journal_files(disk, DIRECTORY))
    for n in range(40, 55):
        journal.write(entry(n))
        journal.sync()
    assert len(journal_files(disk, DIRECTORY)) > before
    assert "spare" not in names(disk)
    assert "truncate" not in done


def test_frames_of_a_file_in_its_earlier_life_are_not_read() -> None:
    disk = new_disk()
    journal = written(disk, 12)
    stale = disk.files()[journal_files(disk, DIRECTORY)[0].path]
    while journal.cut(journal.position):
        pass
    start = journal.position
    for n in range(12, 200):
        disk.put(f"{DIRECTORY}/spare", stale)
        journal.write(entry(n))
        journal.sync()
        assert numbers(disk, start) == list(range(12, n + 1))
        assert find_torn(disk, DIRECTORY, journal.position) is None


def test_a_spare_is_filled_and_then_taken() -> None:
    disk = new_disk()
    journal = new_journal(disk)
    wants = [journal.wants_spare]
    journal.prepare_spare()
    assert disk.size_of(f"{DIRECTORY}/spare") == FILE_BYTES
    wants.append(journal.wants_spare)
    journal.write(entry(0))
    assert "spare" not in names(disk)
    wants.append(journal.wants_spare)
    assert wants == [True, False, False]
    while journal.position <= FILE_BYTES // 2:
        journal.write(entry(0))
    assert journal.wants_spare


def test_a_spare_of_a_wrong_size_is_not_used() -> None:
    disk = new_disk()
    disk.put(f"{DIRECTORY}/spare", bytes(FILE_BYTES - 1))
    journal = new_journal(disk)
    assert journal.wants_spare
    journal.write(entry(0))
    assert disk.size_of(journal_files(disk, DIRECTORY)[0].path) == FILE_BYTES


def test_other_files_are_not_taken_for_journals() -> None:
    disk = new_disk()
    written(disk, 3)
    for name in ("spare", "1.journal", journals.file_name(5000) + ".new", "x.journal"):
        disk.put(f"{DIRECTORY}/{name}", b"MSJF")
    assert numbers(disk) == [0, 1, 2]


# ---- damage


def test_a_frame_that_went_missing_is_noticed_by_the_one_after_it() -> None:
    disk = new_disk()
    written(disk, 30)
    everything = frames(disk)
    files = journal_files(disk, DIRECTORY)
    for at in range(29):
        lost = everything[at]
        file = [one for one in files if one.first <= lost.position][-1]
        good = disk.files()[file.path]
        start, end = lost.position - file.first, lost.end - file.first
        disk.put(file.path, good[:start] + bytes(end - start) + good[end:])
        found = list(read_frames(disk, DIRECTORY, 0))
        damage = [one for one in found if isinstance(one, Damage)]
        assert damage == [Damage(everything[at - 1].end if at else 0, everything[at + 1].position)]
        kept = [one.entries[0].offset for one in found if isinstance(one, Frame)]
        assert kept == [n for n in range(30) if n != at]
        disk.put(file.path, good)


def test_a_missing_file_is_noticed() -> None:
    disk = new_disk()
    written(disk, 60)
    files = journal_files(disk, DIRECTORY)
    disk.unlink(files[1].path)
    damage = [one for one in read_frames(disk, DIRECTORY, 0) if isinstance(one, Damage)]
    assert len(damage) == 1
    assert damage[0].start <= files[1].first
    assert damage[0].end == files[2].first


def test_the_last_frame_cut_or_flipped_at_any_byte_is_the_end() -> None:
    disk = new_disk()
    written(disk, 10)
    last = frames(disk)[-1]
    file = journal_files(disk, DIRECTORY)[-1]
    good = disk.files()[file.path]
    for at in range(last.position, last.end):
        place = at - file.first
        for changed in (
            good[:place],
            good[:place] + bytes(len(good) - place),
            good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :],
        ):
            disk.put(file.path, changed)
            assert numbers(disk) == list(range(9)) or changed == good
    disk.put(file.path, good)


def test_a_torn_frame_is_found() -> None:
    disk = new_disk()
    journal = written(disk, 10)
    assert find_torn(disk, DIRECTORY, journal.position) is None
    last = frames(disk)[-1]
    file = journal_files(disk, DIRECTORY)[-1]
    good = disk.files()[file.path]
    for at in range(last.position + FRAME.size, last.end):
        disk.put(file.path, good[: at - file.first] + bytes(len(good) - (at - file.first)))
        assert find_torn(disk, DIRECTORY, last.position) in (None, last.position)
    disk.put(file.path, good[: last.position - file.first + FRAME.size + 1])
    assert find_torn(disk, DIRECTORY, last.position) == last.position


def test_a_body_that_looks_like_a_frame_is_not_one() -> None:
    disk = new_disk()
    journal = new_journal(disk)
    # A frame inside a frame, right for its place but for the body that it is part of.
    inner = FRAME.pack(journals.FRAME_MAGIC, 0, 0, FRAME.size + ENTRY.size, 0)
    journal.write([ENTRY.pack(Kind.BATCH, UUID, 0, 0, 0, 5, len(inner)), inner])
    journal.write(entry(6))
    assert numbers(disk) == [5, 6]


def test_a_write_that_fails_leaves_no_frame() -> None:
    disk = new_disk()
    journal = written(disk, 3)
    position = journal.position

    def fail(_index: int, name: str) -> None:
        if name == "write":
            raise OSError(28, "no space")

    disk.on_operation = fail
    for size in (0, 3 * FILE_BYTES):
        with pytest.raises(OSError, match="no space"):
            journal.write(entry(3, size))
    disk.on_operation = None
    assert numbers(disk) == [0, 1, 2]
    journal.write(entry(3))
    journal.sync()
    assert numbers(disk.crash("nothing")) == [0, 1, 2, 3]
    assert journal.position > position
