"""The local engine: reads, restarts, epochs, times, and who may open a directory."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from engine.engines import ROOT, T0, T1, LoopHouse, ManualHouse, all_values, finish, read_all
from engine.watching import WatchedDisk
from faults.simulated_disk import SURVIVALS, SimulatedDisk
from log.making import NOW_MS, Sender, batch, split, values
from millstream.engine import upkeep
from millstream.errors import (
    FormatUnsupported,
    MillstreamError,
    OffsetOutOfRange,
    StoreLocked,
    TopicUnknown,
)
from millstream.log.partition import PartitionId, PartitionSettings

if TYPE_CHECKING:
    from pathlib import Path

    from millstream.engine.pending import Pending

SMALL = PartitionSettings(segment_bytes=500)


def with_segments(count: int, disk: SimulatedDisk | None = None) -> ManualHouse:
    """A partition of sealed segments, and an active one, of five batches each."""
    house = ManualHouse(disk, settings_for=lambda _: SMALL)
    house.create(SMALL)
    at = 0
    while len(house.partition().segments) <= count:
        house.append(batch(b"%020d" % at))
        at += 1
    house.scheduler.advance(2)
    assert all(segment.sealed for segment in house.partition().segments[:-1])
    return house


# ---- reading


def test_a_read_of_cached_bytes_is_done_at_once() -> None:
    house = ManualHouse()
    house.create()
    house.append(batch(b"a"))
    assert values(house.engine.read(T0, 0, 1).result().data) == [b"a"]
    assert (house.engine.reads.cached, house.engine.reads.cold) == (1, 0)


def test_a_read_that_would_wait_for_the_disk_is_done_in_a_thread() -> None:
    house = ManualHouse()
    house.create()
    house.append(batch(b"a"))
    house.disk.cold = True
    pending = house.engine.read(T0, 0, 1)
    assert not pending.is_done
    assert values(house.done(pending).data) == [b"a"]
    assert (house.engine.reads.cached, house.engine.reads.cold) == (0, 1)


def test_appends_go_on_while_a_cold_read_is_under_way() -> None:
    house = ManualHouse()
    house.create()
    house.append(batch(b"a"))
    house.disk.cold = True
    reading = house.engine.read(T0, 0, 1 << 20)
    assert house.append(batch(b"b")) == 1
    # The end of a read is the high watermark of when it was asked for.
    assert values(reading.result().data) == [b"a"]


def test_many_cold_reads_of_one_segment_open_it_once() -> None:
    disk = WatchedDisk()
    with_segments(3, disk).stop()
    house = ManualHouse(disk)
    reading = [house.engine.read(T0, 0, 1 << 20) for _ in range(10)]
    for pending in reading:
        assert values(house.done(pending).data)[0] == b"%020d" % 0
    first = house.partition().segments[0].path + ".log"
    assert disk.open_paths().count(first) == 1
    assert house.engine.reads.cold == 10
    house.done(house.engine.read(T0, 0, 1 << 20))
    assert house.engine.reads.cached == 1


def test_every_offset_is_read_right_cold_and_cached() -> None:
    house = with_segments(4)
    expected = [b"%020d" % n for n in range(house.engine.offsets(T0).high_watermark)]
    for cold in (True, False):
        house.disk.cold = cold
        for offset in range(len(expected)):
            for bytes_max in (1, 200, 1 << 20):
                chunk = house.done(house.engine.read(T0, offset, bytes_max))
                found = values(chunk.data)
                assert found == expected[offset : chunk.next_offset]
        assert all_values(house, bytes_max=300) == expected


def test_sealed_segments_that_stay_open_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "OPEN_SEGMENTS_MAX", 4)
    disk = WatchedDisk()
    house = with_segments(30, disk)
    assert len(disk.open_paths(".log")) <= 4 + 1
    house.stop()
    house = ManualHouse(disk, settings_for=lambda _: SMALL)
    assert len(disk.open_paths(".log")) == 1
    assert len(all_values(house)) == house.engine.offsets(T0).high_watermark
    assert len(disk.open_paths(".log")) <= 4 + 1
    house.stop()
    assert disk.open_paths() == []


def test_a_reader_of_a_deleted_topic_is_told_so() -> None:
    disk = SimulatedDisk()
    with_segments(2, disk).stop()
    house = ManualHouse(disk)
    reading = house.engine.read(T0, 0, 1)
    house.engine.delete("t")
    house.run()
    assert reading.error is None or isinstance(reading.error, TopicUnknown)


# ---- times


def test_find_is_exact_over_segments_and_times_out_of_order() -> None:
    random = Random(1)
    house = ManualHouse(settings_for=lambda _: SMALL)
    house.create(SMALL)
    times: list[int] = []
    for at in range(60):
        drift = random.choice([0, 0, 0, -5000, 5000])
        some = [NOW_MS + at * 700 + drift + random.randrange(-900, 900) for _ in range(3)]
        house.append(batch(b"a", b"b", b"c", times=some))
        times += some
    house.done(house.engine.trim(T0, 20))
    for cold in (False, True):
        house.disk.cold = cold
        for wanted in [*times, *(time + 1 for time in times), 0, NOW_MS * 2]:
            later = ((at, time) for at, time in enumerate(times) if time >= wanted and at >= 20)
            assert house.done(house.engine.find(T0, wanted)) == next(later, None)


def test_find_sees_nothing_past_the_high_watermark() -> None:
    disk = WatchedDisk()
    house = ManualHouse(disk)
    house.create()
    house.append(batch(b"a", timestamp=10))
    finding: list[Pending[tuple[int, int] | None]] = []
    disk.on_sync = lambda _: finding.append(house.engine.find(T0, 20))
    house.append(batch(b"b", timestamp=20))
    assert finding[0].result() is None
    disk.on_sync = None
    assert house.done(house.engine.find(T0, 20)) == (1, 20)


# ---- stopping and starting


def test_after_a_stop_there_is_nothing_to_replay_and_nothing_to_report() -> None:
    house = with_segments(3)
    before = all_values(house)
    house.stop()
    again = house.again()
    assert again.engine.findings == []
    assert [name for name in again.disk.list_directory(f"{ROOT}/journal") if "." in name] == []
    assert all_values(again) == before
    assert again.append(batch(b"next")) == len(before)


def test_a_stop_leaves_no_file_open() -> None:
    disk = WatchedDisk()
    house = with_segments(3, disk)
    house.done(house.engine.trim(T0, 7))
    all_values(house)
    house.stop()
    assert disk.open_paths() == []


def test_each_start_is_a_new_leader_epoch() -> None:
    house = ManualHouse()
    house.create()
    for _ in range(3):
        house.append(batch(b"a", b"b"))
        house.stop()
        house = house.again()
    house.append(batch(b"a"))
    epochs = [header.leader_epoch for header, _ in split(house.engine.read(T0, 0, 999).result()[0])]
    assert epochs == [0, 1, 2, 3]
    partition = house.partition()
    assert [partition.epoch_end(epoch) for epoch in range(5)] == [
        (0, 2),
        (1, 4),
        (2, 6),
        (3, 7),
        (3, 7),
    ]
    assert partition.epoch_end(-1) == (-1, -1)
    house.done(house.engine.trim(T0, 5))
    assert [partition.epoch_end(epoch) for epoch in (1, 2, 3)] == [(-1, -1), (2, 6), (3, 7)]


def test_an_epoch_in_which_nothing_was_written_ends_where_the_one_before_did() -> None:
    house = ManualHouse()
    house.create()
    house.append(batch(b"a"))
    for _ in range(2):
        house.stop()
        house = house.again()
    house.append(batch(b"b"))
    assert house.partition().epoch_end(1) == (0, 1)


@pytest.mark.parametrize("how", ["stop", "crash"])
def test_producer_ids_are_never_given_again(how: str) -> None:
    house = ManualHouse()
    ids: list[int] = []
    for _ in range(4):
        ids += finish(house, [house.engine.producer_id() for _ in range(600)])
        if how == "stop":
            house.stop()
            house = house.again()
        else:
            house = house.again(house.disk.crash("nothing"))
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("how", ["stop", "crash"])
def test_repeats_are_known_after_a_restart(how: str) -> None:
    house = ManualHouse(settings_for=lambda _: SMALL)
    house.create(SMALL)
    sent = [batch(b"%020d" % n, sender=Sender(7, sequence=n)) for n in range(30)]
    for one in sent:
        house.append(one)
    if how == "stop":
        house.stop()
        house = house.again()
    else:
        house = house.again(house.disk.crash("nothing"))
    for at in range(25, 30):
        assert house.append(sent[at]) == at
    assert house.append(batch(b"next", sender=Sender(7, sequence=30))) == 30


def test_settings_come_from_outside_at_a_start() -> None:
    weak = PartitionSettings(fsync="none")
    house = ManualHouse(settings_for=lambda topic: weak if topic == "t" else PartitionSettings())
    house.create(PartitionSettings())
    house.done(house.engine.create("u", 1, weak))
    house.stop()
    again = house.again()
    assert again.partition().settings is weak
    assert again.partition(PartitionId("u", 0)).settings.fsync == "every"


def test_the_start_of_the_log_survives_a_crash() -> None:
    house = with_segments(3)
    house.done(house.engine.trim(T0, 7))
    again = house.again(house.disk.crash("nothing"))
    assert again.engine.offsets(T0).start == 7
    with pytest.raises(OffsetOutOfRange):
        again.done(again.engine.read(T0, 6, 1))


def test_a_topic_made_again_after_a_delete_is_empty_after_a_crash_too() -> None:
    house = with_segments(2)
    house.done(house.engine.delete("t"))
    house.create()
    house.append(batch(b"new"))
    for survival in SURVIVALS:
        again = house.again(house.disk.crash(survival))
        assert all_values(again) == [b"new"]


# ---- who may open a directory


def test_a_second_engine_is_refused_with_the_process_id_of_the_first() -> None:
    house = ManualHouse()
    with pytest.raises(StoreLocked) as caught:
        ManualHouse(house.disk)
    assert caught.value.fields == {"path": ROOT, "pid": str(os.getpid())}
    house.stop()
    ManualHouse(house.disk).stop()


def test_a_second_engine_on_a_real_directory_is_refused_too(tmp_path: Path) -> None:
    house = LoopHouse(str(tmp_path))
    try:
        with pytest.raises(StoreLocked) as caught:
            LoopHouse(str(tmp_path))
        assert caught.value.fields["pid"] == str(os.getpid())
    finally:
        house.stop()
    LoopHouse(str(tmp_path)).stop()


@pytest.mark.parametrize("content", [b"millstream 2\n", b"", b"something else"])
def test_a_newer_or_foreign_format_is_refused_and_left_alone(content: bytes) -> None:
    house = ManualHouse()
    house.stop()
    house.disk.put(f"{ROOT}/format", content)
    before = house.disk.files()
    with pytest.raises(FormatUnsupported) as caught:
        ManualHouse(house.disk)
    assert caught.value.fields["path"] == ROOT
    assert house.disk.files() == before


# ---- bad input


def test_bad_input_writes_nothing() -> None:
    house = with_segments(1)
    house.disk.cold = False
    engine, good = house.engine, batch(b"a", b"b")
    operations = house.disk.operations
    wrong: list[Pending[Any]] = [
        *(
            engine.append(T0, data)
            for data in (
                b"",
                good[:60],
                good[:-1],
                good + b"\0",
                good[:16] + b"\1" + good[17:],
                good[:-1] + bytes([good[-1] ^ 1]),
                good[:57] + b"\0\0\0\7" + good[61:],
                good[:8] + b"\xff\xff\xff\xff" + good[12:],
                batch(bytes(2 << 20)),
            )
        ),
        engine.append(PartitionId("t", 1), good),
        engine.append(PartitionId("u", 0), good),
        engine.append(PartitionId("../t", 0), good),
        engine.append_atomic([(T0, good), (T1, good)]),
        engine.append_atomic([(T0, good), (T0, good[:-1])]),
        engine.read(T0, -1, 1),
        engine.read(T0, 1 << 40, 1),
        engine.trim(T0, -1),
        engine.trim(T0, 1 << 40),
        *(
            engine.create(name, 1, SMALL)
            for name in ("", ".", "..", "a/b", "../a", "a@b", "a\0b", "a" * 250, "t")
        ),
        *(engine.create("u", count, SMALL) for count in (-1, 0, 10_001)),
        *(engine.alter("t", partitions=count) for count in (-1, 0, 10_001)),
        engine.alter("u", partitions=2),
        engine.delete("u"),
    ]
    house.run()
    assert [type(one.error) for one in wrong if not isinstance(one.error, MillstreamError)] == []
    assert house.disk.operations == operations


# ---- as a broker has it


def test_on_a_real_disk_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    house = LoopHouse(str(tmp_path))
    house.done(house.engine.create("t", 2, SMALL))
    pendings = [house.engine.append(PartitionId("t", n % 2), batch(b"%d" % n)) for n in range(200)]
    finish(house, pendings)
    big = bytes(70_000)
    house.done(house.engine.append(T0, batch(big)))
    house.done(house.engine.append_atomic([(T0, batch(b"x")), (T1, batch(b"y"))]))
    before = [read_all(house, id) for id in (T0, T1)]
    house.stop()
    house = LoopHouse(str(tmp_path))
    try:
        assert house.engine.findings == []
        assert [read_all(house, id) for id in (T0, T1)] == before
        assert [record.value for record in before[0][-2:]] == [big, b"x"]
        assert house.done(house.engine.find(T0, 0)) == (0, NOW_MS)
    finally:
        house.stop()
