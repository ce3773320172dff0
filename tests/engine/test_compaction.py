"""Compaction under the local engine: what stays, what is read meanwhile, which files go."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from engine.engines import T0, T1, House, LoopHouse, ManualHouse, read_all
from log.making import NOW_MS, batch
from millstream.engine.scheduler import LoopScheduler
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import StorageFailed
from millstream.log import batch as batches
from millstream.log.compaction import CompactionJob, CompactionResult
from millstream.log.partition import DAY_MS, PartitionId, PartitionSettings

if TYPE_CHECKING:
    from pathlib import Path

COMPACT = PartitionSettings(segment_bytes=600, compact=True)
# Only when a test says so.
BY_HAND = UpkeepSettings(compaction_interval_s=1e9)


def compacted_house(partitions: int = 1) -> ManualHouse:
    house = ManualHouse(upkeep=BY_HAND, settings_for=lambda _: COMPACT)
    house.create(COMPACT, partitions)
    return house


def put(house: ManualHouse, key: bytes | None, value: bytes | None, id: PartitionId = T0) -> None:
    house.append(batch(value, key=key, timestamp=house.now_ms), id)


def end_segment(house: ManualHouse, id: PartitionId = T0) -> None:
    """Everything so far is in sealed segments."""
    partition = house.partition(id)
    partition.apply()
    partition.roll(house.now_ms)
    house.upkeep.seal(partition)
    house.scheduler.run()
    assert all(segment.sealed for segment in partition.segments[:-1])


def compact(house: ManualHouse) -> None:
    house.upkeep.compact()
    house.scheduler.run()


def contents(house: House, id: PartitionId = T0) -> list[tuple[bytes | None, bytes | None]]:
    return [(record.key, record.value) for record in read_all(house, id)]


def test_of_each_key_the_newest_record_stays_at_its_offset() -> None:
    house = compacted_house()
    for n in range(60):
        put(house, b"k%d" % (n % 7), b"v%d" % n)
    end_segment(house)
    put(house, b"k0", b"active")
    compact(house)
    assert [(record.offset, record.value) for record in read_all(house, T0)] == [
        *((n, b"v%d" % n) for n in range(53, 60)),
        (60, b"active"),
    ]
    assert house.engine.offsets(T0) == (0, 61)
    assert house.upkeep.counts.records_compacted == 53


def test_batches_with_several_records_lose_only_what_is_superseded() -> None:
    house = compacted_house()
    rows: list[batches.Fields] = [(NOW_MS, b"%d" % (n % 3), b"%d" % n, []) for n in range(5)]
    house.append(batches.encode(rows, compression="lz4"))
    put(house, b"1", b"new")
    end_segment(house)
    compact(house)
    found = [(record.offset, record.key, record.value) for record in read_all(house, T0)]
    assert found == [(2, b"2", b"2"), (3, b"0", b"3"), (5, b"1", b"new")]
    for offset in range(6):
        chunk = house.done(house.engine.read(T0, offset, 1))
        assert chunk.next_offset > offset


def test_records_without_a_key_stay() -> None:
    house = compacted_house()
    for n in range(10):
        put(house, None, b"%d" % n)
        put(house, b"k", b"%d" % n)
    end_segment(house)
    compact(house)
    assert contents(house) == [*((None, b"%d" % n) for n in range(10)), (b"k", b"9")]


def test_control_batches_stay() -> None:
    house = compacted_house()
    for n in range(5):
        house.append(batch(b"marker", key=b"\0\0\0\1", control=True))
        put(house, b"\0\0\0\1", b"%d" % n)
    end_segment(house)
    compact(house)
    assert [value for _, value in contents(house)] == [b"marker"] * 5 + [b"4"]


def test_a_tombstone_stays_for_a_while_and_then_goes() -> None:
    house = compacted_house()
    put(house, b"k", b"v")
    put(house, b"k", None)
    put(house, b"other", b"v")
    end_segment(house)
    compact(house)
    assert contents(house) == [(b"k", None), (b"other", b"v")]
    house.scheduler.clock.advance(DAY_MS / 1000 + 1)
    put(house, b"later", b"v")
    end_segment(house)
    compact(house)
    assert contents(house) == [(b"other", b"v"), (b"later", b"v")]
    assert house.engine.offsets(T0) == (0, 4)


def test_what_comes_after_a_tombstone_stays() -> None:
    house = compacted_house()
    for value in (b"1", None, b"2"):
        put(house, b"k", value)
    end_segment(house)
    house.scheduler.clock.advance(2 * DAY_MS / 1000)
    compact(house)
    assert contents(house) == [(b"k", b"2")]


def test_a_segment_that_lost_everything_answers_for_its_offsets() -> None:
    house = compacted_house()
    for n in range(40):
        put(house, b"k", b"%d" % n)
    end_segment(house)
    compact(house)
    assert contents(house) == [(b"k", b"39")]
    for offset in range(40):
        chunk = house.done(house.engine.read(T0, offset, 1))
        assert chunk.next_offset == 40
    put(house, b"x", b"next")
    assert contents(house) == [(b"k", b"39"), (b"x", b"next")]


def test_reads_are_right_at_every_step_of_a_compaction() -> None:
    house = compacted_house()
    written: list[tuple[bytes, bytes]] = []
    for n in range(80):
        written.append((b"k%d" % (n * n % 11), b"v%d" % n))
        put(house, *written[-1])
    end_segment(house)
    newest = {key: (at, value) for at, (key, value) in enumerate(written)}
    house.upkeep.compact()
    steps = 0
    while True:
        found = {record.offset: (record.key, record.value) for record in read_some(house)}
        assert all(written[at] == record for at, record in found.items())
        assert {at for at, _ in newest.values()} <= set(found)
        if not house.scheduler.turn():
            break
        steps += 1
    assert steps >= 2
    assert len(found) == len(newest)


def read_some(house: ManualHouse) -> list[batches.Record]:
    """As `read_all`, without a turn of the loop: everything is cached, or read here."""
    partition = house.partition()
    offset = partition.start_offset
    found: list[batches.Record] = []
    while offset < partition.high_watermark:
        chunk = partition.read(offset, 300)
        for position, header in batches.walk(chunk.data):
            found += batches.decode(chunk.data[position : position + header.size])
        offset = chunk.next_offset
    return found


def test_a_reader_goes_on_across_the_swap() -> None:
    house = compacted_house()
    for n in range(60):
        put(house, b"k%d" % (n % 5), b"v%d" % n)
    end_segment(house)
    first = house.done(house.engine.read(T0, 0, 700))
    compact(house)
    offset, values = first.next_offset, set[bytes | None]()
    while offset < 60:
        chunk = house.done(house.engine.read(T0, offset, 700))
        for position, header in batches.walk(chunk.data):
            records = batches.decode(chunk.data[position : position + header.size])
            values |= {record.value for record in records}
        assert chunk.next_offset > offset
        offset = chunk.next_offset
    assert {b"v%d" % n for n in range(55, 60)} <= values


def test_the_old_files_stay_for_a_grace_and_then_go() -> None:
    house = compacted_house()
    for n in range(40):
        put(house, b"k%d" % (n % 3), b"v%d" % n)
    end_segment(house)
    before = set(house.names(".log"))
    compact(house)
    assert before < set(house.names(".log"))
    house.scheduler.advance(30)
    assert before < set(house.names(".log"))
    house.scheduler.advance(240)
    left = house.names(".log")
    assert len(left) == len(house.partition().segments)
    assert len(contents(house)) == 3
    again = house.again(house.disk.crash("nothing"))
    assert contents(again) == contents(house)


@pytest.mark.parametrize("survival", ["nothing", "all"])
def test_a_crash_after_a_compaction_loses_nothing_and_brings_nothing_back(survival: str) -> None:
    house = compacted_house()
    for n in range(40):
        put(house, b"k%d" % (n % 3), b"v%d" % n)
    put(house, b"k0", None)
    end_segment(house)
    compact(house)
    expected = contents(house)
    again = house.again(house.disk.crash("all" if survival == "all" else "nothing"))
    assert contents(again) == expected
    assert again.engine.offsets(T0) == house.engine.offsets(T0)
    put(again, b"k1", b"more")
    end_segment(again)
    compact(again)
    assert contents(again) == [*(row for row in expected if row[0] != b"k1"), (b"k1", b"more")]


def test_a_compaction_of_what_was_compacted_has_nothing_to_do() -> None:
    house = compacted_house()
    for n in range(40):
        put(house, b"k%d" % (n % 3), b"v%d" % n)
    end_segment(house)
    compact(house)
    compact(house)
    assert house.upkeep.counts.compactions == 1


def test_every_partition_gets_its_turn() -> None:
    house = compacted_house(partitions=3)
    for number in range(3):
        id = PartitionId("t", number)
        for n in range(10):
            put(house, b"k", b"%d" % n, id)
        end_segment(house, id)
    compact(house)
    assert house.upkeep.counts.compactions == 3
    assert [contents(house, PartitionId("t", n)) for n in range(3)] == [[(b"k", b"9")]] * 3


def test_a_trim_during_a_compaction_brings_nothing_back() -> None:
    house = compacted_house()
    put(house, None, bytes(300))
    end_segment(house)
    put(house, b"k", b"old")
    end_segment(house)
    for _ in range(3):
        put(house, None, bytes(300))
        end_segment(house)
    put(house, b"k", None)
    end_segment(house)
    house.scheduler.clock.advance(2 * DAY_MS / 1000)
    house.upkeep.compact()
    trimmed = house.engine.trim(T0, 1)
    # The trim is through before the child is.
    child = house.scheduler._ready.popleft()
    house.done(trimmed)
    house.scheduler.soon(child)
    house.scheduler.run()
    assert (b"k", b"old") not in contents(house)
    again = house.again(house.disk.crash("all"))
    assert (b"k", b"old") not in contents(again)


def test_a_delete_during_a_compaction_does_no_harm() -> None:
    house = compacted_house()
    for n in range(10):
        put(house, b"k", b"%d" % n)
    end_segment(house)
    house.upkeep.compact()
    house.engine.delete("t")
    house.scheduler.run()
    assert house.engine.health().ok
    assert not house.upkeep._is_compacting


# ---- in a child process


def test_a_child_process_compacts_while_the_broker_goes_on(tmp_path: Path) -> None:
    house = LoopHouse(str(tmp_path), BY_HAND)
    try:
        house.done(house.engine.create("t", 2, COMPACT))
        for n in range(100):
            house.done(house.engine.append(T0, batch(b"v%d" % n, key=b"k%d" % (n % 4))))
        upkeep = house.engine._upkeep
        assert upkeep is not None
        partition = house.engine._running().partition(T0)
        house.until(lambda: all(segment.sealed for segment in partition.segments[:-1]))
        upkeep.compact()
        assert house.done(house.engine.append(T1, batch(b"meanwhile"))) == 0
        house.until(lambda: upkeep.counts.compactions == 1)
        found = contents(house)
        assert len(found) < 20
        assert dict(found) == {b"k%d" % (n % 4): b"v%d" % n for n in range(96, 100)}
    finally:
        house.stop()
    house = LoopHouse(str(tmp_path), BY_HAND)
    try:
        assert contents(house) == found
    finally:
        house.stop()


NOWHERE = CompactionJob(
    directory="/nowhere",
    sources=[],
    segment_bytes=1,
    index_bytes=1,
    time_ms=1,
    tombstones_before_ms=0,
)


@pytest.mark.parametrize("program", [sys.executable, "/nowhere/python"])
def test_a_child_that_fails_or_does_not_start_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(sys, "executable", program)
    house = LoopHouse(str(tmp_path))
    outcomes: list[tuple[CompactionResult | None, BaseException | None]] = []
    try:
        scheduler = house.engine._scheduler
        assert isinstance(scheduler, LoopScheduler)
        scheduler.compact(NOWHERE, lambda result, error: outcomes.append((result, error)))
        house.until(lambda: bool(outcomes))
    finally:
        house.stop()
    [(result, error)] = outcomes
    assert result is None
    assert isinstance(error, (StorageFailed, OSError))
