"""Group commit on the local engine: what is written and synced, when, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.engines import T0, T1, ManualHouse, all_values
from engine.watching import FAILED, NO_ROOM, WatchedDisk
from log.making import batch, values
from millstream.engine import commit
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import (
    DiskFull,
    EngineBusy,
    OutcomeUnknown,
    StorageFailed,
    TopicUnknown,
)
from millstream.log.partition import PartitionId, PartitionSettings

if TYPE_CHECKING:
    from millstream.engine.pending import Pending
    from millstream.log.store import Topic

BYPASS_BYTES = 64 * 1024
WEAK = PartitionSettings(fsync="none")
QUIET = UpkeepSettings(
    checkpoint_interval_s=1e6, retention_interval_s=1e6, compaction_interval_s=1e6
)


def started(
    settings: PartitionSettings | None = None, partitions: int = 2
) -> tuple[WatchedDisk, ManualHouse]:
    """Nothing is left to be done but what the test asks for."""
    disk = WatchedDisk()
    house = ManualHouse(disk, upkeep=QUIET, journal_file_bytes=1 << 20)
    house.create(settings, partitions)
    house.append(batch(b"first"))
    disk.clear()
    return disk, house


def turn_until(house: ManualHouse, disk: WatchedDisk, syncs: int) -> None:
    while len(disk.synced) < syncs:
        assert house.scheduler.turn(), "nothing is left to do"


def sized(size: int) -> bytes:
    """A batch of exactly this size, which must be large enough for a length of three bytes."""
    data = batch(bytes(size - len(batch(bytes(20_000))) + 20_000))
    assert len(data) == size
    return data


# ---- one sync for many


def test_appends_of_one_turn_are_one_frame_and_one_sync() -> None:
    disk, house = started()
    pendings = [house.engine.append(PartitionId("t", n % 2), batch(b"%d" % n)) for n in range(100)]
    pendings.append(house.engine.append(T1, batch(b"last")))
    assert not disk.written
    house.run()
    assert all(pending.is_done for pending in pendings)
    [path] = disk.synced
    assert path.endswith(".journal")
    assert disk.written == [path]


def test_appends_that_arrive_during_a_sync_share_the_next() -> None:
    disk, house = started()
    more: list[Pending[int]] = []

    def arrive(_: str) -> None:
        if not more:
            more.extend(house.engine.append(T0, batch(b"%d" % n)) for n in range(20))

    disk.on_sync = arrive
    house.append(batch(b"a"))
    assert [pending.result() for pending in more] == list(range(2, 22))
    assert len(disk.synced) == 2


def test_a_round_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "FRAME_BYTES", 1000)
    disk, house = started()
    pendings = [house.engine.append(T0, batch(bytes(100))) for _ in range(30)]
    house.run()
    assert [pending.result() for pending in pendings] == list(range(1, 31))
    assert 3 <= len(disk.synced) <= 10


def test_journalled_batches_are_in_their_segment_before_they_are_read() -> None:
    disk, house = started()
    house.append(batch(b"a"))
    assert not [path for path in disk.written if path.endswith(".log")]
    assert all_values(house) == [b"first", b"a"]
    assert [path for path in disk.written if path.endswith(".log")]
    assert len(disk.synced) == 1


def test_journalled_batches_are_in_their_segments_after_a_while() -> None:
    disk, house = started()
    house.append(batch(b"a"))
    house.scheduler.advance(1)
    assert [path for path in disk.written if path.endswith(".log")]
    assert len(disk.synced) == 1


# ---- big batches


def test_a_big_batch_skips_the_journal_and_one_byte_less_does_not() -> None:
    disk, house = started()
    position = house.store.journal.position
    house.append(sized(BYPASS_BYTES))
    assert house.store.journal.position == position
    assert [path[-4:] for path in disk.synced] == [".log"]
    assert [path[-4:] for path in disk.written if path.endswith(".log")] == [".log"] * len(
        disk.written
    )
    disk.clear()
    house.append(sized(BYPASS_BYTES - 1))
    assert house.store.journal.position > position + BYPASS_BYTES - 1
    [path] = disk.synced
    assert path.endswith(".journal")


def test_small_big_and_atomic_appends_of_one_turn_keep_their_order() -> None:
    disk, house = started()
    big = [bytes([n]) * BYPASS_BYTES for n in range(3)]
    engine = house.engine
    pendings: list[Pending[int]] = []
    atomics: list[Pending[list[int]]] = []
    for n in range(3):
        pendings.append(engine.append(T0, batch(b"small %d" % n)))
        pendings.append(engine.append(T0, batch(big[n])))
        atomics.append(engine.append_atomic([(T1, batch(b"other")), (T0, batch(b"atomic %d" % n))]))
        pendings.append(engine.append(T0, batch(b"after %d" % n)))
    house.run()
    assert [pending.result() for pending in pendings] == [1, 2, 4, 5, 6, 8, 9, 10, 12]
    assert [pending.result()[1] for pending in atomics] == [3, 7, 11]
    expected = [b"first"]
    for n in range(3):
        expected += [b"small %d" % n, big[n], b"atomic %d" % n, b"after %d" % n]
    assert all_values(house) == expected
    crashed = house.again(disk.crash("nothing"))
    assert all_values(crashed) == expected
    assert all_values(crashed, T1) == [b"other"] * 3


def test_a_big_batch_in_a_new_segment_survives_a_crash_while_a_checkpoint_runs() -> None:
    disk, house = started(PartitionSettings(segment_bytes=100_000))
    house.append(sized(BYPASS_BYTES))
    partition = house.partition()
    partition.apply()
    partition.roll(house.now_ms)
    # The checkpoint has begun, and its thread has not.
    house.upkeep.checkpoint()
    pending = house.engine.append(T0, sized(BYPASS_BYTES))
    turns = 0
    while not pending.is_done and turns < 3:
        jobs = house.scheduler._ready
        jobs.rotate(-1)  # the thread of the checkpoint is slow
        house.scheduler.turn()
        turns += 1
    while not pending.is_done:
        assert house.scheduler.turn()
    crashed = house.again(disk.crash("nothing"))
    assert crashed.engine.offsets(T0).high_watermark >= pending.result() + 1


# ---- durable before seen


@pytest.mark.parametrize("size", [10, BYPASS_BYTES])
def test_nothing_is_seen_before_it_is_synced(size: int) -> None:
    disk, house = started()
    waiting = house.engine.wait(T0, 1)
    seen: list[tuple[int, int, bool]] = []

    def look(_: str) -> None:
        chunk = house.engine.read(T0, 1, 1 << 20).result()
        is_woken = waiting.is_done or house.engine.wait(T0, 1).is_done
        seen.append((house.engine.offsets(T0).high_watermark, len(chunk.data), is_woken))

    disk.on_sync = look
    pending = house.engine.append(T0, batch(bytes(size)))
    house.run()
    assert seen == [(1, 0, False)]
    assert pending.result() == 1
    assert waiting.is_done
    assert values(house.engine.read(T0, 1, 1 << 20).result().data) == [bytes(size)]


def test_what_was_answered_survives_whatever_is_lost_with_the_page_cache() -> None:
    disk, house = started()
    done: list[int] = []
    checked: list[int] = []

    def crash(_index: int, _name: str) -> None:
        if house.engine.offsets(T0).high_watermark > max(checked, default=0):
            checked.append(house.engine.offsets(T0).high_watermark)
            crashed = house.again(disk.crash("nothing"))
            assert crashed.engine.offsets(T0).high_watermark >= checked[-1]
            crashed.engine.close()

    disk.on_operation = crash
    for n in range(12):
        size = BYPASS_BYTES if n % 5 == 4 else 10
        done.append(house.append(batch(bytes(size))))
    assert done == list(range(1, 13))
    assert len(checked) > 5


# ---- weaker modes


@pytest.mark.parametrize("mode", ["interval", "none"])
def test_weaker_modes_answer_without_a_sync(mode: str) -> None:
    disk, house = started(PartitionSettings(fsync="interval" if mode == "interval" else "none"))
    pendings = [house.engine.append(T0, batch(b"%d" % n)) for n in range(10)]
    house.run()
    assert [pending.result() for pending in pendings] == list(range(1, 11))
    assert disk.synced == []
    assert len(disk.written) == 1
    assert len(all_values(house)) == 11
    lost = house.again(disk.crash("nothing"))
    assert lost.engine.offsets(T0).high_watermark == 0
    assert lost.append(batch(b"again")) == 0


def test_in_mode_interval_everything_is_durable_after_a_second() -> None:
    disk, house = started(PartitionSettings(fsync="interval", segment_bytes=500))
    for n in range(20):
        house.append(batch(bytes(50)), PartitionId("t", n % 2))
    house.scheduler.advance(1.0)
    crashed = house.again(disk.crash("nothing"))
    assert crashed.engine.offsets(T0) == (0, 11)
    assert crashed.engine.offsets(T1) == (0, 10)
    disk.clear()
    house.scheduler.advance(10.0)
    assert disk.synced == []


def test_in_mode_none_nothing_is_synced_until_the_checkpoint() -> None:
    disk, house = started(WEAK)
    house.append(batch(b"a"))
    house.scheduler.advance(50.0)
    assert disk.synced == []
    house.upkeep.checkpoint()
    house.run()
    crashed = house.again(disk.crash("nothing"))
    assert crashed.engine.offsets(T0) == (0, 2)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_an_atomic_append_is_not_durable_before_what_lies_before_it(checkpoints: bool) -> None:
    disk, house = started(PartitionSettings(fsync="none", segment_bytes=400))
    for n in range(20):
        house.append(batch(b"weak %d" % n, bytes(50)))
    if checkpoints:
        house.upkeep.checkpoint()
    pending = house.engine.append_atomic([(T0, batch(b"atomic")), (T1, batch(b"other"))])
    while not pending.is_done:
        assert house.scheduler.turn()
    crashed = house.again(disk.crash("nothing"))
    assert crashed.engine.offsets(T0) == (0, 42)
    assert all_values(crashed)[-1] == b"atomic"
    assert not [one for one in crashed.engine.findings if one.what in ("gap", "damage")]


def test_a_weak_append_may_follow_an_atomic_one_at_once() -> None:
    disk, house = started(WEAK)
    followed: list[Pending[int]] = []
    pending = house.engine.append_atomic([(T0, batch(b"atomic"))])
    pending.then(lambda _: followed.append(house.engine.append(T0, batch(b"weak"))))
    house.run()
    assert followed[0].result() == 2
    assert all_values(house) == [b"first", b"atomic", b"weak"]
    assert disk.synced


def test_weak_appends_behind_an_atomic_one_of_their_turn_keep_their_order() -> None:
    _, house = started(WEAK)
    engine = house.engine
    one = engine.append(T0, batch(b"one"))
    two = engine.append_atomic([(T0, batch(b"two"))])
    three = engine.append(T0, batch(b"three"))
    other = engine.append(T1, batch(b"other"))
    house.run()
    assert (one.result(), two.result(), three.result(), other.result()) == (1, [2], 3, 0)
    assert all_values(house) == [b"first", b"one", b"two", b"three"]


def test_a_topic_that_becomes_stricter_syncs_what_it_had() -> None:
    disk, house = started(WEAK)
    house.append(batch(b"weak"))
    house.done(house.engine.alter("t", settings=PartitionSettings()))
    house.append(batch(b"strict"))
    crashed = house.again(disk.crash("nothing"))
    assert all_values(crashed) == [b"first", b"weak", b"strict"]


def test_a_topic_that_becomes_weaker_keeps_the_order() -> None:
    disk, house = started()
    strict = house.engine.append(T0, batch(b"strict"))
    altered = house.engine.alter("t", settings=WEAK)
    weak = house.engine.append(T0, batch(b"weak"))
    house.run()
    altered.result()
    assert (strict.result(), weak.result()) == (1, 2)
    assert house.append(batch(b"weaker")) == 3
    assert all_values(house) == [b"first", b"strict", b"weak", b"weaker"]
    crashed = house.again(disk.crash("nothing"))
    assert all_values(crashed)[:2] == [b"first", b"strict"]


# ---- limits


def test_appends_are_taken_up_to_the_limit_and_refused_past_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, house = started()
    data = batch(b"x" * 100)
    monkeypatch.setattr(commit, "QUEUE_BYTES_MAX", 3 * len(data))
    taken = [house.engine.append(T0, data) for _ in range(3)]
    past = house.engine.append(T0, batch(b""))
    atomic = house.engine.append_atomic([(T0, data)])
    for refused in (past, atomic):
        assert isinstance(refused.error, EngineBusy)
        assert refused.error.retriable
        assert refused.error.fields == {"limit_bytes": 3 * len(data)}
    house.run()
    assert [pending.result() for pending in taken] == [1, 2, 3]
    # What was answered leaves its room to others.
    taken = [house.engine.append(T0, data) for _ in range(3)]
    house.run()
    assert [pending.result() for pending in taken] == [4, 5, 6]


# ---- deletes, while others write


@pytest.mark.parametrize("mode", ["every", "none"])
def test_a_delete_between_a_round_and_an_append_refuses_the_append(mode: str) -> None:
    disk, house = started()
    weak = PartitionId("w", 0)
    settings = WEAK if mode == "none" else PartitionSettings()
    house.done(house.engine.create("w", 1, settings))
    house.append(batch(b"a"), weak)
    disk.clear()
    round_ = house.engine.append(T0, batch(b"b"))
    turn_until(house, disk, 1)
    gone = house.engine.delete("w")
    late = house.engine.append(weak, batch(b"late"))
    house.run()
    gone.result()
    assert round_.result() == 1
    assert isinstance(late.error, TopicUnknown)
    assert house.engine.health().ok
    assert house.append(batch(b"c")) == 2


def test_a_delete_while_a_checkpoint_runs_does_it_no_harm() -> None:
    _, house = started()
    house.done(house.engine.create("w", 1, PartitionSettings()))
    house.append(batch(b"a"), PartitionId("w", 0))
    house.upkeep.checkpoint()
    gone = house.engine.delete("w")
    house.run()
    gone.result()
    assert house.engine.health().ok
    assert house.append(batch(b"b")) == 1


def test_a_full_disk_is_made_room_on_by_a_delete() -> None:
    disk, house = started()
    house.done(house.engine.create("w", 1, PartitionSettings()))
    house.append(batch(b"a"), PartitionId("w", 0))
    disk.full = NO_ROOM
    house.scheduler.advance(1)
    house.done(house.engine.delete("w"))
    disk.full = None
    house.scheduler.advance(1)
    assert house.append(batch(b"b")) == 1
    assert house.engine.health().ok


# ---- failures


def test_a_full_disk_refuses_appends_and_loses_none() -> None:
    disk, house = started()
    disk.full = NO_ROOM
    for size in (10, BYPASS_BYTES):
        with pytest.raises(DiskFull):
            house.append(batch(bytes(size)))
    with pytest.raises(DiskFull):
        house.done(house.engine.append_atomic([(T0, batch(b"a")), (T1, batch(b"b"))]))
    assert house.engine.health().ok
    disk.full = None
    assert house.append(batch(b"a")) == 1
    assert all_values(house) == [b"first", b"a"]


@pytest.mark.parametrize("size", [10, BYPASS_BYTES])
def test_a_sync_that_fails_ends_all_writing(size: int) -> None:
    disk, house = started()
    disk.broken = FAILED
    unknown = house.engine.append(T0, batch(bytes(size)))
    made = house.engine.create("u", 1, PartitionSettings())
    id_ = house.engine.producer_id()
    waiting: list[Pending[int]] = []
    disk.on_sync = lambda _: waiting.append(house.engine.append(T1, batch(b"a")))
    house.run()
    disk.broken = disk.on_sync = None
    assert isinstance(unknown.error, OutcomeUnknown)
    assert isinstance(waiting[0].error, StorageFailed)
    assert isinstance(id_.error, (OutcomeUnknown, StorageFailed))
    assert made.is_done
    health = house.engine.health()
    assert not health.ok
    assert "sync failed" in (health.reason or "")
    operations = disk.operations
    for pending in (
        house.engine.append(T0, batch(b"a")),
        house.engine.create("v", 1, PartitionSettings()),
        house.engine.trim(T0, 1),
    ):
        house.run()
        assert isinstance(pending.error, StorageFailed)
    assert disk.operations == operations
    # Reading goes on.
    assert values(house.engine.read(T0, 0, 1).result().data) == [b"first"]


def test_changes_that_wait_for_a_round_that_fails_are_answered() -> None:
    disk, house = started()
    disk.broken = FAILED
    altered: list[Pending[Topic]] = []
    deleted: list[Pending[None]] = []

    def ask(_: str) -> None:
        altered.append(house.engine.alter("t", settings=PartitionSettings()))
        deleted.append(house.engine.delete("t"))
        house.upkeep.checkpoint()

    disk.on_sync = ask
    house.engine.append(T0, batch(b"a"))
    house.run()
    assert [type(pending.error) for pending in altered] == [StorageFailed]
    assert [type(pending.error) for pending in deleted] == [StorageFailed]
    assert house.upkeep.is_idle()
    house.engine.close()


# ---- limits of a round, and of what waits for its segment


def test_a_round_takes_so_many_appends_and_the_rest_is_the_next_one() -> None:
    _, house = started()
    before = house.committer.counts.rounds
    pendings = [house.engine.append(T0, batch(b"a")) for _ in range(commit.ROUND_OPERATIONS)]
    house.run()
    assert house.committer.counts.rounds == before + 1
    pendings += [house.engine.append(T0, batch(b"a")) for _ in range(commit.ROUND_OPERATIONS + 1)]
    house.run()
    assert house.committer.counts.rounds == before + 3
    assert [pending.result() for pending in pendings] == list(range(1, len(pendings) + 1))


def test_a_round_takes_so_many_notes_and_the_rest_is_the_next_one() -> None:
    _, house = started(partitions=commit.ROUND_NOTES + 1)
    for number in range(commit.ROUND_NOTES + 1):
        house.append(batch(b"a"), PartitionId("t", number))
    before = house.committer.counts.rounds
    trims = [
        house.engine.trim(PartitionId("t", number), 1) for number in range(commit.ROUND_NOTES + 1)
    ]
    house.run()
    assert [trim.error for trim in trims] == [None] * len(trims)
    assert house.committer.counts.rounds == before + 2


def test_rounds_wait_when_too_much_has_not_come_to_its_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commit, "UNAPPLIED_BYTES", 1000)
    monkeypatch.setattr(commit, "UNAPPLIED_BYTES_MAX", 4000)
    house = ManualHouse(upkeep=UpkeepSettings(slice_s=0.0), journal_file_bytes=1 << 20)
    house.create(partitions=100)
    seen: list[int] = []
    left = [20] * 100

    def append(number: int) -> None:
        house.engine.append(PartitionId("t", number), batch(b"v")).then(lambda _: again(number))

    def again(number: int) -> None:
        seen.append(house.committer._unapplied_bytes)
        left[number] -= 1
        if left[number]:
            append(number)

    for number in range(100):
        append(number)
    house.run()
    assert left == [0] * 100
    # One round of a hundred, at most, comes on top.
    a_round = 100 * (len(batch(b"v")) + 100)
    assert 1000 < max(seen) <= 4000 + a_round
    house.scheduler.advance(1.0)
    assert not house.committer.unapplied()
    assert len(all_values(house.again(house.disk.crash("nothing")), T0)) == 20


def test_rounds_and_what_is_done_between_them_take_turns() -> None:
    _, house = started()
    order: list[str] = []

    def append(_: object = None) -> None:
        order.append("append")
        if len(order) < 20:
            house.engine.append(T0, batch(b"a")).then(append)

    def between() -> None:
        order.append("between")
        if len(order) < 20:
            house.committer.between_rounds(between)

    house.engine.append(T0, batch(b"a")).then(append)
    house.committer.between_rounds(between)
    house.run()
    assert order[:20] in (["append", "between"] * 10, ["between", "append"] * 10)
