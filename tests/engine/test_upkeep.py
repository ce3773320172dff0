"""What the local engine does beside appends: checkpoints, the journal's files, retention."""

from __future__ import annotations

import pytest

from engine.engines import ROOT, T0, ManualHouse, all_values
from engine.watching import WatchedDisk
from log.making import NOW_MS, batch
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import OffsetOutOfRange
from millstream.log.partition import PartitionId, PartitionSettings

FILE_BYTES = 8192


def journal_names(house: ManualHouse) -> list[str]:
    names = house.disk.list_directory(f"{ROOT}/journal")
    return [name for name in names if name.endswith(".journal")]


def fill(house: ManualHouse, count: int, size: int = 100) -> None:
    for n in range(count):
        house.append(batch(b"%d" % n + bytes(size), timestamp=house.now_ms))


# ---- checkpoints and the journal


def test_a_checkpoint_cuts_the_journal() -> None:
    house = ManualHouse()
    house.create()
    fill(house, 150)
    assert len(journal_names(house)) >= 3
    house.scheduler.advance(60)
    assert house.upkeep.counts.checkpoints == 1
    assert len(journal_names(house)) == 1
    assert house.store.journal.length_bytes <= FILE_BYTES
    again = house.again(house.disk.crash("nothing"))
    assert len(all_values(again)) == 150


def test_a_long_journal_is_cut_before_its_time() -> None:
    house = ManualHouse(upkeep=UpkeepSettings(journal_bytes=4 * FILE_BYTES))
    house.create()
    fill(house, 600)
    assert house.upkeep.counts.checkpoints >= 2
    assert len(journal_names(house)) <= 6
    assert len(all_values(house.again(house.disk.crash("nothing")))) == 600


def test_a_checkpoint_is_not_written_when_nothing_changed() -> None:
    disk = WatchedDisk()
    house = ManualHouse(disk)
    house.create()
    fill(house, 3)
    house.scheduler.advance(120)
    disk.clear()
    house.scheduler.advance(600)
    assert [path for path in disk.written if "checkpoint" in path] == []


def test_appends_go_on_while_a_checkpoint_is_written() -> None:
    disk = WatchedDisk()
    house = ManualHouse(disk)
    house.create()
    fill(house, 20)
    appended: list[int] = []

    def append(path: str) -> None:
        if "checkpoint" in path:
            house.engine.append(T0, batch(b"during")).then(
                lambda done: appended.append(done.result())
            )

    disk.on_sync = append
    house.upkeep.checkpoint()
    house.run()
    disk.on_sync = None
    assert appended == [20]
    assert all_values(house.again(disk.crash("nothing")))[-1] == b"during"


def test_the_next_journal_file_is_ready_before_it_is_needed() -> None:
    disk = WatchedDisk()
    house = ManualHouse(disk)
    house.create()
    assert disk.size_of(f"{ROOT}/journal/spare") == FILE_BYTES
    fill(house, 1)
    assert disk.size_of(f"{ROOT}/journal/spare") is None
    while house.store.journal.position - house.store.journal._files[-1].first <= FILE_BYTES // 2:
        fill(house, 1)
    assert disk.size_of(f"{ROOT}/journal/spare") == FILE_BYTES
    disk.clear()
    fill(house, 150)
    # No round had to fill a file: the only writes to files in the making are to the spare.
    assert {path for path in disk.written if path.endswith(".new")} <= {f"{ROOT}/journal/spare.new"}


def test_an_append_larger_than_a_journal_file_has_a_file_of_its_own() -> None:
    house = ManualHouse()
    house.create()
    fill(house, 3)
    house.append(batch(bytes(3 * FILE_BYTES)))
    fill(house, 3)
    again = house.again(house.disk.crash("nothing"))
    assert len(all_values(again)) == 7


# ---- retention


def test_retention_by_age_takes_whole_segments_that_are_old() -> None:
    settings = PartitionSettings(segment_bytes=500, retention_age_ms=3_600_000)
    house = ManualHouse()
    house.create(settings)
    fill(house, 12)
    house.scheduler.advance(3000)
    fill(house, 12)
    assert house.engine.offsets(T0).start == 0
    house.scheduler.advance(1200)
    start = house.engine.offsets(T0).start
    # The segment in which old and new meet stays whole.
    assert 8 <= start <= 12
    assert house.partition().segments[0].base_offset == start
    assert house.upkeep.counts.segments_retired >= 2
    with pytest.raises(OffsetOutOfRange):
        house.done(house.engine.read(T0, start - 1, 1))
    assert len(all_values(house)) == 24 - start


def test_retention_by_age_empties_a_partition_to_which_nobody_writes() -> None:
    settings = PartitionSettings(segment_bytes=500, retention_age_ms=3_600_000)
    house = ManualHouse()
    house.create(settings)
    fill(house, 13)
    house.scheduler.advance(2 * 3600)
    assert house.engine.offsets(T0) == (13, 13)
    assert all_values(house) == []
    house.scheduler.advance(120)
    assert len(house.names(".log")) == 1
    house.append(batch(b"next"))
    again = house.again(house.disk.crash("nothing"))
    assert again.engine.offsets(T0) == (13, 14)


def test_retention_by_bytes_keeps_at_least_so_many() -> None:
    settings = PartitionSettings(segment_bytes=500, retention_bytes=2000)
    house = ManualHouse()
    house.create(settings)
    fill(house, 60)
    house.scheduler.advance(300)
    size = house.partition().size_bytes
    assert 2000 <= size < 2000 + 500
    assert house.engine.offsets(T0).start > 40


def test_without_limits_nothing_is_retired() -> None:
    house = ManualHouse()
    house.create(PartitionSettings(segment_bytes=500, retention_age_ms=None))
    fill(house, 30)
    house.scheduler.clock.advance(30 * 24 * 3600)
    house.scheduler.advance(900)
    assert house.engine.offsets(T0) == (0, 30)


def test_records_without_a_time_are_not_old() -> None:
    house = ManualHouse()
    house.create(PartitionSettings(segment_bytes=500, retention_age_ms=1000))
    for _ in range(20):
        house.append(batch(bytes(100), timestamp=-1))
    house.scheduler.advance(3600)
    assert house.engine.offsets(T0).start == 0


def test_a_segment_ends_by_age_with_and_without_appends() -> None:
    settings = PartitionSettings(segment_age_ms=3_600_000)
    house = ManualHouse()
    house.create(settings, partitions=2)
    fill(house, 1)
    house.append(batch(b"idle"), PartitionId("t", 1))
    house.scheduler.advance(3600 + 300)
    assert [one.base_offset for one in house.partition(PartitionId("t", 1)).segments] == [0, 1]
    house.append(batch(b"late"))
    assert [one.base_offset for one in house.partition().segments] == [0, 1]
    assert all(segment.sealed for segment in house.partition().segments[:-1])
    house.scheduler.advance(3 * 3600)
    # An empty segment does not end, however old it is.
    assert len(house.partition(PartitionId("t", 1)).segments) == 2


# ---- trims and files


def test_trimmed_segments_are_unlinked_after_a_grace() -> None:
    house = ManualHouse()
    house.create(PartitionSettings(segment_bytes=500))
    fill(house, 40)
    files = len(house.names(".log"))
    house.done(house.engine.trim(T0, 30))
    house.run()
    assert len(house.names(".log")) == files
    house.scheduler.advance(30)
    assert len(house.names(".log")) == files
    house.scheduler.advance(120)
    left = house.names(".log")
    assert len(left) == len(house.partition().segments) < files
    for suffix in (".seal", ".index", ".timeindex", ".state"):
        assert {name.rpartition(".")[0] for name in house.names(suffix)} <= {
            name.rpartition(".")[0] for name in left
        }
    assert len(all_values(house)) == 10


def test_a_purge_gives_the_disk_back() -> None:
    house = ManualHouse()
    house.create(PartitionSettings(segment_bytes=500))
    fill(house, 40)
    house.done(house.engine.trim(T0, 40))
    house.scheduler.advance(600)
    assert house.partition().size_bytes == 0
    assert len(house.names(".log")) == 1
    assert house.engine.offsets(T0) == (40, 40)


def test_a_read_that_is_under_way_keeps_its_files() -> None:
    house = ManualHouse(upkeep=UpkeepSettings(file_delete_delay_s=0.0))
    house.create(PartitionSettings(segment_bytes=500))
    fill(house, 40)
    segment = house.partition().segments[0]
    segment.hold()
    house.done(house.engine.trim(T0, 40))
    house.scheduler.advance(600)
    assert [name for name in house.names(".log") if name.startswith("0" * 20)]
    segment.release()
    house.scheduler.advance(120)
    assert len(house.names(".log")) == 1


def test_the_files_of_a_deleted_topic_go() -> None:
    house = ManualHouse()
    house.create(PartitionSettings(segment_bytes=500))
    fill(house, 40)
    house.done(house.engine.delete("t"))
    assert house.disk.list_directory(f"{ROOT}/topics") == []


def test_segments_are_sealed_when_they_have_all_their_batches() -> None:
    house = ManualHouse()
    house.create(PartitionSettings(segment_bytes=500))
    for n in range(20):
        house.engine.append(T0, batch(b"%d" % n + bytes(100), timestamp=NOW_MS))
    house.run()
    house.scheduler.advance(5)
    segments = house.partition().segments
    assert len(segments) > 3
    assert all(segment.sealed for segment in segments[:-1])
    assert house.upkeep.counts.seals == len(segments) - 1
    assert len(house.names(".seal")) == len(segments) - 1
