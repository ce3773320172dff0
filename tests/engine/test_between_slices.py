"""Work that goes in slices meets what happens between two of them."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from engine.engines import ROOT, T0, T1, LoopHouse, ManualHouse
from engine.test_compaction import COMPACT, contents, end_segment, put
from faults.failing_disk import FailingDisk
from faults.simulated_disk import SURVIVALS
from log.making import batch
from millstream.clock import SystemClock
from millstream.engine import local
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.pending import Pending
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import EngineStopped, OutcomeUnknown, StorageFailed, TooManyFiles
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionSettings

if TYPE_CHECKING:
    from pathlib import Path

    from faults.simulated_disk import SimulatedDisk
    from millstream.log.store import Topic

# Every step is a slice of its own, and nothing is done but what a test asks for.
BY_STEPS = UpkeepSettings(
    slice_s=0.0,
    fsync_interval_s=1e9,
    checkpoint_interval_s=1e9,
    retention_interval_s=1e9,
    compaction_interval_s=1e9,
)


def turn_until(house: ManualHouse, is_reached: Callable[[], bool]) -> None:
    while not is_reached():
        assert house.scheduler.turn()


def failing_house(operation: str, error: int) -> tuple[ManualHouse, FailingDisk]:
    disks: list[FailingDisk] = []

    def through(disk: SimulatedDisk) -> FailingDisk:
        disks.append(FailingDisk(disk, operation, 0, error))
        return disks[0]

    return ManualHouse(upkeep=BY_STEPS, through=through), disks[0]


# ---- compaction


def compactable_house() -> ManualHouse:
    house = ManualHouse(upkeep=BY_STEPS, settings_for=lambda _: COMPACT)
    house.create(COMPACT, 2)
    for id in (T0, T1):
        for n in range(20):
            put(house, b"k", b"%d" % n, id)
        end_segment(house, id)
    return house


def test_a_run_of_compaction_does_not_begin_inside_another() -> None:
    house = compactable_house()
    house.upkeep.compact()
    for _ in range(100):
        # Whichever step the timer falls on.
        house.upkeep.compact()
        house.scheduler.turn()
    assert (house.upkeep.counts.compactions, house.upkeep.counts.compactions_failed) == (2, 0)
    assert [contents(house, id) for id in (T0, T1)] == [[(b"k", b"19")]] * 2
    house.upkeep.compact()
    house.run()
    assert house.upkeep.counts.compactions == 2


def test_a_delete_is_no_failure_of_the_compaction_that_was_under_way() -> None:
    house = compactable_house()
    house.upkeep.compact()
    house.scheduler.turn()
    house.store.forget_topic("t")
    house.run()
    assert (house.upkeep.counts.compactions, house.upkeep.counts.compactions_failed) == (0, 0)


# ---- checkpoints


def checkpoint_of(house: ManualHouse) -> bytes:
    return house.disk.files()[f"{ROOT}/checkpoint"]


def test_a_checkpoint_is_given_up_when_a_sync_fails_before_it_is_in_place() -> None:
    """The kernel tells of bytes that it lost once. Who syncs the same file next hears nothing."""
    house, disk = failing_house("sync", errno.EIO)
    house.create(partitions=2)
    house.append(batch(b"small"))
    before = checkpoint_of(house)
    house.upkeep.checkpoint()
    last = house.partition(T1)
    turn_until(house, lambda: not last.changed)
    house.scheduler.turn()
    thread = house.scheduler._ready.popleft()
    # A big batch syncs its segment by itself: the one that the checkpoint is about to sync.
    big = house.engine.append(T0, batch(b"v" * 100_000))
    disk.break_now()
    house.run()
    house.scheduler.soon(thread)
    house.run()
    with pytest.raises(OutcomeUnknown):
        big.result()
    assert house.upkeep.is_idle()
    assert checkpoint_of(house) == before
    again = house.again(house.disk.crash("nothing"))
    assert contents(again)[:1] == [(None, b"small")]


def test_a_segment_is_not_sealed_when_another_was_told_that_a_sync_of_it_failed() -> None:
    house, disk = failing_house("sync", errno.EIO)
    house.create()
    house.append(batch(b"small"))
    partition = house.partition()
    partition.apply()
    partition.roll(house.now_ms)
    house.upkeep.seal(partition)
    thread = house.scheduler._ready.popleft()
    # Before its own segment, a big batch syncs the one before.
    big = house.engine.append(T0, batch(b"v" * 100_000))
    disk.break_now()
    house.run()
    house.scheduler.soon(thread)
    house.run()
    with pytest.raises(OutcomeUnknown):
        big.result()
    assert house.names(".seal") == []
    again = house.again(house.disk.crash("nothing"))
    assert contents(again)[:1] == [(None, b"small")]


def test_the_journal_is_not_cut_any_further_when_the_engine_has_stopped() -> None:
    house = ManualHouse(upkeep=BY_STEPS)
    house.create()
    for _ in range(60):
        house.append(batch(b"v" * 1000))

    def journal_files() -> int:
        names = house.disk.list_directory(f"{ROOT}/journal")
        return sum(name.endswith(".journal") for name in names)

    many = journal_files()
    assert many > 4
    house.upkeep.checkpoint()
    turn_until(house, lambda: journal_files() < many)
    left = journal_files()
    house.engine.close()
    house.run()
    assert journal_files() == left


# ---- changes of topics


def test_changes_that_wait_keep_a_stop_waiting() -> None:
    house = ManualHouse()
    changes = house.engine._changes
    assert changes is not None
    asked = [house.engine.create(name, 1, PartitionSettings()) for name in "abc"]
    while not all(pending.is_done for pending in asked):
        assert not changes.is_idle()
        assert house.scheduler.turn()
    house.run()
    assert changes.is_idle()


@pytest.mark.parametrize("turns", range(12))
def test_every_change_is_answered_whenever_the_engine_is_closed(turns: int) -> None:
    house = ManualHouse()
    engine = house.engine
    asked: tuple[Pending[Topic] | Pending[None], ...] = (
        engine.create("a", 2, PartitionSettings()),
        engine.alter("a", settings=PartitionSettings(), partitions=3),
        engine.delete("a"),
        engine.create("a", 1, PartitionSettings()),
    )
    for _ in range(turns):
        house.scheduler.turn()
    engine.close()
    house.run()
    assert all(pending.is_done for pending in asked)
    assert all(isinstance(one.error, EngineStopped | None) for one in asked)
    assert not house.disk._handles


@pytest.mark.parametrize("operation", ["make_directory", "open"])
def test_a_topic_that_was_refused_is_not_there_after_a_crash_and_leaves_nothing(
    operation: str,
) -> None:
    house, disk = failing_house(operation, errno.EMFILE)
    # One of them is made; the second is the one that fails.
    disk._fail_at = disk.calls[operation] + 2
    refused = house.engine.create("t", 2, PartitionSettings())
    house.run()
    with pytest.raises(TooManyFiles):
        refused.result()
    assert house.disk.list_directory(f"{ROOT}/topics") == []
    for survival in SURVIVALS:
        again = house.again(house.disk.crash(survival))
        assert again.engine.topics() == []


CALLS: dict[str, Callable[[LocalEngine], Pending[Any]]] = {
    "append": lambda engine: engine.append(T0, batch(b"v")),
    "append_atomic": lambda engine: engine.append_atomic([(T0, batch(b"v"))]),
    "producer_id": lambda engine: engine.producer_id(),
    "read": lambda engine: engine.read(T0, 0, 100),
    "find": lambda engine: engine.find(T0, 0),
    "trim": lambda engine: engine.trim(T0, 0),
    "create": lambda engine: engine.create("u", 1, PartitionSettings()),
    "alter": lambda engine: engine.alter("t", partitions=1),
    "delete": lambda engine: engine.delete("unknown"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_whatever_comes_while_the_engine_stops_is_answered(
    tmp_path: Path, call: Callable[[LocalEngine], Pending[Any]]
) -> None:
    house = LoopHouse(str(tmp_path))
    engine = house.engine
    house.done(engine.create("t", 1, PartitionSettings()))
    house.done(engine.append(T0, batch(b"v")))
    asked: list[Pending[Any]] = []

    async def stop() -> None:
        assert engine._upkeep is not None
        stopping = asyncio.ensure_future(engine.stop())
        while not stopping.done():
            if engine._upkeep._is_stopped:
                asked.append(call(engine))
            await asyncio.sleep(0)
        await stopping

    house.loop.run_until_complete(stop())
    house.stop()
    assert asked
    assert all(pending.is_done for pending in asked)
    assert isinstance(asked[-1].error, EngineStopped)


class SlowDisk(SystemDisk):
    """Syncs wait for as long as a test says."""

    __slots__ = ("may_sync",)

    def __init__(self) -> None:
        super().__init__()
        self.may_sync = threading.Event()
        self.may_sync.set()

    def sync(self, file: int) -> None:
        self.may_sync.wait()
        super().sync(file)


def test_a_stop_that_cannot_wait_any_longer_answers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "STOP_WAIT_S", 0.05)

    async def run() -> None:
        disk = SlowDisk()
        options = LocalOptions()
        options.store.journal_file_bytes = 1 << 20
        engine = LocalEngine(disk, str(tmp_path), SystemClock(), options)
        await engine.start()
        await engine.create("t", 1, PartitionSettings())
        disk.may_sync.clear()
        first = engine.append(T0, batch(b"in flight"))
        await asyncio.sleep(0)
        second = engine.append(T0, batch(b"in the queue"))
        stopping = asyncio.ensure_future(engine.stop())
        while engine._store is not None:  # noqa: ASYNC110  there is no event for it
            await asyncio.sleep(0.005)
        disk.may_sync.set()
        await asyncio.wait_for(stopping, 60)
        assert isinstance(first.error, OutcomeUnknown)
        assert isinstance(second.error, StorageFailed)

    asyncio.run(run())
