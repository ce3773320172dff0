"""Whatever is done for a thousand partitions, no call keeps the loop for longer than a slice and a
step: on a clock that moves with every operation of the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import pytest

from engine.engines import T0, ManualHouse
from engine.manual import ManualScheduler, _Timer
from log.making import batch
from millstream.engine.pending import Pending
from millstream.engine.slices import SLICE_S, Slices
from millstream.engine.upkeep import UpkeepSettings
from millstream.log.checkpoint import Capture, capture
from millstream.log.partition import Partition, PartitionId, PartitionSettings, SyncJob

if TYPE_CHECKING:
    from millstream.engine.scheduler import Done

T = TypeVar("T")

PARTITIONS = 1000
# What an operation of the disk takes; and what it takes to capture one partition, or to take the
# result of a job over, which uses no disk.
OPERATION_S = 0.0001
CAPTURE_S = 0.00003
FINISH_S = 0.00001
# The longest step: a new segment, or a journal file that takes the place of another.
STEP_S = 4 * OPERATION_S


@dataclass
class TimedScheduler(ManualScheduler):
    """Takes the time of every call. What threads and children do takes none of the loop's."""

    longest_s: float = 0.0
    calls: int = 0
    _aside_s: float = 0.0

    def later(self, seconds: float, call: Callable[[], None]) -> _Timer:
        return super().later(seconds, lambda: self.soon(call))

    def _work(self, work: Callable[[], T], done: Done[T]) -> None:
        def aside() -> T:
            started = self.clock.monotonic()
            try:
                return work()
            finally:
                self._aside_s += self.clock.monotonic() - started

        super()._work(aside, done)

    def turn(self) -> bool:
        started, aside = self.clock.monotonic(), self._aside_s
        had_one = super().turn()
        took = self.clock.monotonic() - started - (self._aside_s - aside)
        self.longest_s = max(self.longest_s, took)
        self.calls += had_one
        return had_one

    def begin(self) -> None:
        self.longest_s, self.calls = 0.0, 0


class StallHouse(ManualHouse):
    """A thousand partitions, and a clock that the disk moves."""

    scheduler: TimedScheduler

    def __init__(self, settings: PartitionSettings | None = None) -> None:
        never = 1e9
        super().__init__(
            upkeep=UpkeepSettings(
                fsync_interval_s=never,
                checkpoint_interval_s=never,
                retention_interval_s=never,
                compaction_interval_s=never,
                file_delete_delay_s=never,
            ),
            journal_file_bytes=1 << 20,
            make_scheduler=TimedScheduler,
        )
        self.create(settings, PARTITIONS)
        self.disk.on_operation = lambda _, __: self.scheduler.clock.advance(OPERATION_S)

    def append_to_all(self) -> list[Pending[int]]:
        return [
            self.engine.append(PartitionId("t", number), batch(b"v", timestamp=self.now_ms))
            for number in range(PARTITIONS)
        ]

    def check(self, least_s: float) -> None:
        """So much was done since `begin`, and never for too long at once."""
        assert self.scheduler.longest_s <= SLICE_S + STEP_S
        assert self.scheduler.calls >= least_s / (SLICE_S + STEP_S)


@pytest.fixture
def costly(monkeypatch: pytest.MonkeyPatch) -> Callable[[StallHouse], None]:
    """Makes the steps take time that use no disk."""

    def make(house: StallHouse) -> None:
        clock = house.scheduler.clock
        finish = SyncJob.finish

        def slow_capture(partition: Partition) -> Capture:
            clock.advance(CAPTURE_S)
            return capture(partition)

        def slow_finish(job: SyncJob) -> None:
            clock.advance(FINISH_S)
            finish(job)

        monkeypatch.setattr("millstream.log.store.capture", slow_capture)
        monkeypatch.setattr(SyncJob, "finish", slow_finish)

    return make


def test_a_topic_of_many_partitions_is_made_beside_the_loop() -> None:
    house = StallHouse()
    house.scheduler.begin()
    before = house.disk.operations
    house.done(house.engine.create("u", PARTITIONS, PartitionSettings()))
    house.done(house.engine.alter("u", partitions=2 * PARTITIONS))
    assert house.disk.operations > before + 4 * PARTITIONS
    assert house.scheduler.longest_s <= STEP_S
    assert house.done(house.engine.append(PartitionId("u", 2 * PARTITIONS - 1), batch(b"a"))) == 0


def test_journalled_batches_are_written_to_their_segments_in_slices() -> None:
    house = StallHouse()
    house.scheduler.begin()
    pendings = house.append_to_all()
    house.run()
    assert all(pending.is_done for pending in pendings)
    assert len(house.committer.unapplied()) == PARTITIONS
    house.scheduler.advance(1.0)
    assert not house.committer.unapplied()
    house.check(PARTITIONS * OPERATION_S)


def test_a_checkpoint_of_many_partitions_is_made_in_slices(
    costly: Callable[[StallHouse], None],
) -> None:
    house = StallHouse()
    house.append_to_all()
    house.run()
    costly(house)
    house.scheduler.begin()
    house.upkeep.checkpoint()
    house.run()
    assert house.upkeep.counts.checkpoints == 1
    assert not any(partition.changed for partition in house.store.partitions.values())
    house.check(PARTITIONS * (OPERATION_S + CAPTURE_S + FINISH_S))


def test_appends_are_answered_between_the_slices_of_a_checkpoint(
    costly: Callable[[StallHouse], None],
) -> None:
    house = StallHouse()
    house.append_to_all()
    house.run()
    costly(house)
    answered: list[float] = []

    def append() -> None:
        house.engine.append(T0, batch(b"more")).then(answer)

    def answer(_: Pending[int]) -> None:
        if not house.upkeep.is_idle():
            answered.append(house.scheduler.clock.monotonic())
            append()

    house.upkeep.checkpoint()
    append()
    house.scheduler.begin()
    house.run()
    house.check(PARTITIONS * (OPERATION_S + CAPTURE_S + FINISH_S))
    assert len(answered) > PARTITIONS * (OPERATION_S + CAPTURE_S) / (SLICE_S + STEP_S) / 2
    again = house.again(house.disk.crash("nothing"))
    assert again.engine.offsets(T0).high_watermark == 2 + len(answered)


def test_interval_syncs_of_many_partitions_begin_and_end_in_slices(
    costly: Callable[[StallHouse], None],
) -> None:
    house = StallHouse(PartitionSettings(fsync="interval"))
    house.append_to_all()
    house.run()
    costly(house)
    house.scheduler.begin()
    house.upkeep.sync_interval()
    house.run()
    assert not any(partition.has_weak_tail for partition in house.store.partitions.values())
    house.check(PARTITIONS * FINISH_S)


def test_retention_over_many_partitions_is_done_in_slices() -> None:
    house = StallHouse(PartitionSettings(retention_age_ms=1000))
    house.append_to_all()
    house.run()
    house.scheduler.advance(10)
    # Their active segments are old: they are rolled and sealed, and the next time removed.
    house.scheduler.begin()
    house.upkeep.retain()
    house.run()
    assert house.upkeep.counts.seals == PARTITIONS
    house.upkeep.retain()
    house.run()
    assert house.upkeep.counts.segments_retired == PARTITIONS
    house.check(2 * PARTITIONS * OPERATION_S)


def test_a_slice_ends_with_the_step_that_reaches_its_end() -> None:
    house = StallHouse()
    clock = house.scheduler.clock
    taken: list[int] = []

    def steps() -> Iterator[None]:
        for number in range(10):
            clock.advance(SLICE_S / 4)
            taken.append(number)
            yield

    slices = Slices(clock, house.scheduler, SLICE_S)
    slices.run(steps(), lambda: taken.append(-1))
    assert taken == []
    house.scheduler.turn()
    assert taken == [0, 1, 2, 3]
    house.scheduler.turn()
    assert taken == [0, 1, 2, 3, 4, 5, 6, 7]
    house.scheduler.turn()
    assert taken == [*range(10), -1]
