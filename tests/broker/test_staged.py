"""Staged writes: what is staged nobody sees, what is committed is there once."""

from __future__ import annotations

from typing import Any

import pytest

from broker.making import House, RefusingDisk
from broker.staging import (
    batch_of,
    commit,
    commit_soon,
    entry,
    facts,
    house_of,
    local_house_of,
    names,
    stage,
    stage_soon,
    staged_offsets,
    values,
)
from faults.simulated_disk import SimulatedDisk
from millstream.broker.staged_commits import Committed, Running
from millstream.broker.staged_steps import Copying
from millstream.broker.staged_values import PARTITION
from millstream.broker.staged_writes import Attempt
from millstream.engine.pending import follow
from millstream.errors import (
    BatchChecksumMismatch,
    BatchCommitted,
    BatchInvalid,
    BatchLengthInvalid,
    BodyInvalid,
    CommitRunning,
    DelayInvalid,
    DiskFull,
    EngineBusy,
    KeyRequired,
    ParameterInvalid,
    PartitionUnknown,
    StagedFull,
    StagedPartUnknown,
    StagedTopicGone,
    TooManyParts,
    TooManySchedules,
    TooManyWriters,
    TopicReserved,
    TopicUnknown,
    WriterNameInvalid,
    WriterUnknown,
)
from millstream.log import batch as batches
from millstream.log.batch import LANES
from millstream.log.partition import PartitionId
from millstream.wire.staged import NO_PART, StagedEntry, join_entries, split_entries


@pytest.fixture
def house() -> House:
    return house_of()


# ---- staging and committing


def test_nobody_sees_what_is_staged(house: House) -> None:
    stage(house, entry(b"a"))
    assert values(house) == []
    assert (facts(house).parts, facts(house).last_batch) == (1, None)


def test_a_commit_lets_the_parts_that_it_names_appear(house: House) -> None:
    first = stage(house, entry(b"a", b"b"), entry(b"c", partition=1), task=0)
    stage(house, entry(b"lost"), task=1)
    second = stage(house, entry(b"d", partition=1), task=1)
    done = commit(house, [first, second])
    assert done == Committed(0, 4, {}, already=False)
    assert values(house) == [b"a", b"b", b"c", b"d"]
    found = facts(house)
    assert (found.last_batch, found.last_records, found.parts, found.bytes) == (0, 4, 0, 0)


def test_the_bytes_of_a_batch_stay_as_they_are(house: House) -> None:
    data = batch_of(*names(0, 50), compression="zstd")
    commit(house, [stage(house, StagedEntry("t", 1, 0, data))])
    chunk = house.done(house.engine.read(PartitionId("t", 1), 0, 1 << 20))
    assert bytes(chunk.data[batches.PLACE_BYTES :]) == data[batches.PLACE_BYTES :]


def test_records_keep_their_order_over_many_steps(house: House) -> None:
    parts = []
    for task in range(5):
        ones = [entry(*names(100 * task + 10 * n, 10)) for n in range(6)]
        parts.append(stage(house, *ones, task=task))
    done = commit(house, parts)
    assert done.records == 300
    expected = [b"%d" % (100 * task + n) for task in range(5) for n in range(60)]
    assert values(house) == expected
    assert house.broker.staged_writes.statistics().commits.steps > 5


def test_a_batch_that_is_larger_than_a_step_goes_alone(house: House) -> None:
    ones = [entry(b"x" * 1000), entry(b"a"), entry(b"y" * 5000), entry(b"b")]
    assert commit(house, [stage(house, *ones)]).records == 4
    assert values(house) == [b"x" * 1000, b"a", b"y" * 5000, b"b"]


def test_an_empty_commit_moves_the_writer_on(house: House) -> None:
    assert commit(house, [], batch=7) == Committed(7, 0, {}, already=False)
    assert facts(house).last_batch == 7


def test_writers_do_not_know_of_each_other(house: House) -> None:
    ours = stage(house, entry(b"a"), writer="one")
    theirs = stage(house, entry(b"b"), writer="two")
    commit(house, [ours], writer="one")
    assert values(house) == [b"a"]
    assert facts(house, "two").parts == 1
    commit(house, [theirs], writer="two")
    assert house.broker.staged_writes.names() == ["one", "two"]


# ---- again


def test_a_commit_that_is_repeated_adds_nothing_whatever_it_names(house: House) -> None:
    part = stage(house, entry(b"a"))
    commit(house, [part])
    assert commit(house, [part]) == Committed(0, 1, {}, already=True)
    assert commit(house, []) == Committed(0, 1, {}, already=True)
    assert commit(house, ["nobody-knows-this"]).already
    assert values(house) == [b"a"]


def test_of_an_older_batch_nobody_knows_how_many_it_had(house: House) -> None:
    commit(house, [stage(house, entry(b"a"), batch=3)], batch=3)
    commit(house, [stage(house, entry(b"b"), batch=5)], batch=5)
    assert commit(house, [], batch=3) == Committed(3, None, {}, already=True)
    assert commit(house, [], batch=4).already
    assert values(house) == [b"a", b"b"]


def test_what_is_staged_again_after_the_commit_is_not_kept(house: House) -> None:
    commit(house, [stage(house, entry(b"a"))])
    before = staged_offsets(house)
    again = house.done(stage_soon(house, entry(b"a", b"b")))
    assert (again.part, again.records) == (NO_PART, 2)
    assert staged_offsets(house) == before
    assert commit(house, [again.part]).already
    assert values(house) == [b"a"]


def test_a_late_attempt_is_forgotten_when_its_batch_is_committed_meanwhile(house: House) -> None:
    part = stage(house, entry(b"a"))
    late = stage_soon(house, entry(b"late"), task=1)
    commit(house, [part])
    house.scheduler.run()
    assert late.result().part == NO_PART or facts(house).parts == 0
    assert facts(house).parts == 0
    assert values(house) == [b"a"]


def test_a_commit_forgets_what_earlier_batches_left(house: House) -> None:
    stage(house, entry(b"old"), batch=1)
    stage(house, entry(b"next"), batch=3)
    commit(house, [stage(house, entry(b"a"), batch=2)], batch=2)
    assert facts(house).parts == 1
    assert house.broker.staged_writes.statistics().commits.dropped == 1


def test_who_asks_for_a_running_commit_waits_for_it(house: House) -> None:
    parts = [stage(house, *[entry(*names(9 * n, 9)) for n in range(9)])]
    first, second = commit_soon(house, parts), commit_soon(house, parts)
    one, other = first.result(), second.result()
    assert isinstance(one, Running)
    assert one is other
    house.scheduler.run()
    assert one.outcome.result().records == 81
    assert len(values(house)) == 81


def test_a_running_commit_is_not_changed(house: House) -> None:
    parts = [stage(house, *[entry(*names(9 * n, 9)) for n in range(9)])]
    other = stage(house, entry(b"x"), batch=1)
    commit_soon(house, parts)
    assert isinstance(commit_soon(house, []).error, CommitRunning)
    assert isinstance(commit_soon(house, [other], batch=1).error, CommitRunning)
    writes = house.broker.staged_writes
    assert isinstance(writes.abort("w", 0).error, CommitRunning)
    assert isinstance(writes.forget("w").error, CommitRunning)
    house.scheduler.run()
    assert len(values(house)) == 81


def test_how_far_a_commit_is_can_be_seen() -> None:
    house = local_house_of()
    parts = [stage(house, *[entry(*names(9 * n, 9)) for n in range(18)])]
    commit_soon(house, parts)
    looks = []
    while house.scheduler.turn():
        looks.append(house.broker.staged_writes.facts(["w"]))
    found = [one.result()[0] for one in looks]
    running = [one for one in found if one.committing == 0]
    assert {one.done for one in running} == set(range(running[0].of))
    assert facts(house).committing is None


def test_no_more_commits_than_allowed_copy_at_once() -> None:
    house = house_of(commits_at_once=1)
    asked = []
    for n in range(4):
        part = stage(house, *[entry(*names(9 * n, 9)) for n in range(3)], writer=f"w{n}")
        asked.append(commit_soon(house, [part], writer=f"w{n}").result())
    house.scheduler.run()
    assert all(isinstance(one, Running) and one.outcome.result().records == 27 for one in asked)
    assert len(values(house)) == 4 * 27


# ---- what cannot be staged


@pytest.mark.parametrize(
    ("error", "one"),
    [
        (PartitionUnknown, entry(b"a", partition=2)),
        (PartitionUnknown, entry(b"a", partition=-1)),
        (PartitionUnknown, entry(b"a", partition=9, due_ms=5)),
        (TopicReserved, entry(b"a", topic="__staged")),
        (BatchChecksumMismatch, StagedEntry("t", 0, 0, batch_of(b"a")[:-1] + b"x")),
        (BatchInvalid, entry(b"a", control=True)),
        (BatchInvalid, entry(b"a", transactional=True)),
        (BatchInvalid, entry(b"a", control=True, due_ms=5)),
        (BatchInvalid, entry(b"a", producer_id=4, producer_epoch=0, base_sequence=0)),
        (DelayInvalid, entry(b"a", due_ms=-1)),
        (DelayInvalid, entry(b"a", due_ms=10**15)),
        (KeyRequired, entry(b"a", topic="compacted", key=None)),
    ],
)
def test_what_is_wrong_is_refused_and_nothing_stored(
    house: House, error: type[Exception], one: StagedEntry
) -> None:
    house.done(house.broker.topics.create("compacted", 1, {"compact": True}))
    before = staged_offsets(house)
    refusal = house.failed(stage_soon(house, entry(b"good"), one))
    assert isinstance(refusal, error)
    assert refusal.fields["entry"] == 1  # type: ignore[attr-defined]
    assert staged_offsets(house) == before
    assert house.broker.staged_writes.names() == []


def test_a_topic_is_made_only_where_that_is_allowed() -> None:
    house = house_of()
    stage(house, entry(b"a", topic="new"))
    assert "new" in house.broker.topics.by_name
    strict = local_house_of()
    strict.broker.topics._limits = strict.broker.topics._limits.__class__(is_auto_create=False)
    assert isinstance(strict.failed(stage_soon(strict, entry(b"a", topic="new"))), TopicUnknown)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ü", "x" * 250])
def test_a_writer_has_a_plain_name(house: House, name: str) -> None:
    assert isinstance(house.failed(stage_soon(house, entry(b"a"), writer=name)), WriterNameInvalid)
    assert isinstance(house.failed(commit_soon(house, [], writer=name)), WriterNameInvalid)


def test_a_body_is_read_strictly(house: House) -> None:
    body = join_entries([entry(b"a"), entry(b"b")])
    attempt = Attempt("w", 0, 0, 0)
    for size in range(1, len(body)):
        if size != len(body) // 2:
            error = house.failed(house.broker.staged_writes.stage(attempt, body[:size]))
            assert isinstance(error, BodyInvalid | BatchLengthInvalid)
    assert isinstance(house.failed(house.broker.staged_writes.stage(attempt, b"")), BodyInvalid)
    assert split_entries(body) == [entry(b"a"), entry(b"b")]
    bad = b"\x00\x01\xff" + body[3:]
    assert isinstance(house.failed(house.broker.staged_writes.stage(attempt, bad)), BodyInvalid)
    assert house.broker.staged_writes.names() == []


def test_handles_are_of_their_writer_and_batch(house: House) -> None:
    ours = stage(house, entry(b"a"))
    assert isinstance(house.failed(commit_soon(house, ["x"])), StagedPartUnknown)
    assert isinstance(house.failed(commit_soon(house, [ours], batch=1)), StagedPartUnknown)
    assert isinstance(house.failed(commit_soon(house, [ours], writer="v")), StagedPartUnknown)
    assert isinstance(house.failed(commit_soon(house, [ours, ours])), ParameterInvalid)
    assert values(house) == []
    assert commit(house, [ours]).records == 1


# ---- limits


def test_there_are_no_more_writers_than_allowed() -> None:
    house = house_of(writers_max=2)
    stage(house, entry(b"a"), writer="one")
    commit(house, [], writer="two")
    assert isinstance(house.failed(stage_soon(house, entry(b"a"), writer="x")), TooManyWriters)
    assert isinstance(house.failed(commit_soon(house, [], writer="x")), TooManyWriters)
    stage(house, entry(b"a"), writer="two", batch=1)
    house.done(house.broker.staged_writes.forget("one"))
    stage(house, entry(b"a"), writer="x")


def test_there_are_no_more_parts_than_allowed() -> None:
    house = house_of(parts_max=2)
    parts = [stage(house, entry(b"a")), stage(house, entry(b"b"))]
    assert isinstance(house.failed(stage_soon(house, entry(b"c"))), TooManyParts)
    commit(house, parts)
    stage(house, entry(b"c"), batch=1)


def test_what_one_append_does_not_forget_is_forgotten_later(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.staged_commits.FORGOTTEN_AT_ONCE", 2)
    parts = [stage(house, entry(b"%d" % n), task=n) for n in range(5)]
    kept = stage(house, entry(b"next"), batch=1)
    assert commit(house, parts).records == 5
    assert facts(house).parts == 4
    house.scheduler.advance(61)
    assert facts(house).parts == 1
    assert commit(house, [kept], batch=1).records == 1


def test_a_commit_names_no_more_parts_than_allowed() -> None:
    house = house_of(commit_parts_max=2)
    parts = [stage(house, entry(b"a")) for _ in range(3)]
    assert isinstance(house.failed(commit_soon(house, parts)), BodyInvalid)
    assert commit(house, parts[:2]).records == 2


def test_no_more_bytes_are_staged_than_allowed() -> None:
    size = len(join_entries([entry(b"a")]))
    house = house_of(bytes_max=2 * size)
    one = stage(house, entry(b"a"))
    stage(house, entry(b"b"))
    assert isinstance(house.failed(stage_soon(house, entry(b"c"))), StagedFull)
    commit(house, [one])
    stage(house, entry(b"c"), batch=1)


def test_no_more_is_on_its_way_than_memory_may_hold(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(join_entries([entry(b"a")]))
    monkeypatch.setattr("millstream.broker.staged_writes.INCOMING_BYTES_MAX", 2 * size)
    asked = [stage_soon(house, entry(b"a")) for _ in range(3)]
    assert isinstance(asked[2].error, EngineBusy)
    house.scheduler.run()
    assert facts(house).parts == 2
    stage(house, entry(b"a"))


def test_requests_wait_in_line_to_be_stored() -> None:
    house = house_of(stages_at_once=1)
    asked = [stage_soon(house, entry(b"%d" % n)) for n in range(4)]
    broken = stage_soon(house, entry(b"x", partition=9))
    last = stage_soon(house, entry(b"4"))
    house.scheduler.run()
    assert isinstance(broken.error, PartitionUnknown)
    assert commit(house, [one.result().part for one in (*asked, last)]).records == 5


def test_what_is_on_its_way_counts_as_staged() -> None:
    size = len(join_entries([entry(b"a")]))
    house = house_of(bytes_max=2 * size, parts_max=2)
    asked = [stage_soon(house, entry(b"a")) for _ in range(3)]
    house.scheduler.run()
    assert [one.error is None for one in asked] == [True, True, False]


# ---- abort, forget, expiry


def test_an_abort_forgets_the_parts_of_a_batch(house: House) -> None:
    part = stage(house, entry(b"a"), batch=1)
    kept = stage(house, entry(b"b"), batch=2)
    writes = house.broker.staged_writes
    assert house.done(writes.abort("w", 1)) == 1
    assert house.done(writes.abort("w", 1)) == 0
    assert house.done(writes.abort("nobody", 1)) == 0
    assert isinstance(house.failed(commit_soon(house, [part], batch=1)), StagedPartUnknown)
    commit(house, [kept], batch=2)
    assert isinstance(house.failed(writes.abort("w", 2)), BatchCommitted)
    assert values(house) == [b"b"]


def test_a_writer_that_is_forgotten_starts_anew(house: House) -> None:
    commit(house, [stage(house, entry(b"a"), batch=5)], batch=5)
    stage(house, entry(b"b"), batch=6)
    writes = house.broker.staged_writes
    house.done(writes.forget("w"))
    assert writes.names() == []
    assert isinstance(house.failed(writes.forget("w")), WriterUnknown)
    assert isinstance(house.failed(writes.facts(["w"])), WriterUnknown)
    commit(house, [stage(house, entry(b"again"), batch=0)], batch=0)
    assert values(house) == [b"a", b"again"]


def test_what_nobody_commits_expires() -> None:
    house = house_of(retention_ms=60_000)
    old = stage(house, entry(b"old"))
    house.scheduler.advance(50)
    young = stage(house, entry(b"young"))
    house.scheduler.advance(20)
    assert isinstance(house.failed(commit_soon(house, [old])), StagedPartUnknown)
    assert commit(house, [young]).records == 1
    house.scheduler.advance(100)
    assert facts(house).last_batch == 0
    assert house.broker.staged_writes.statistics().counts.expired == 1


def test_what_is_being_committed_does_not_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.staged_writes.CHANGES_MAX", 1)
    house = house_of(retention_ms=60_000)
    parts = [stage(house, *[entry(b"x" * 300)] * 3) for _ in range(3)]
    house.scheduler.clock.now_ms += 70_000
    sweeping = follow(house.broker.staged_writes._expire())
    assert facts_now(house) == 2
    running = commit_soon(house, parts[1:]).result()
    assert isinstance(running, Running)
    house.done(sweeping)
    assert running.outcome.result().records == 6


def facts_now(house: House) -> int:
    return house.broker.staged_writes.statistics().parts


def test_the_log_of_what_is_staged_is_cut(house: House) -> None:
    house = house_of(cut_bytes=1)
    first = stage(house, entry(b"a"))
    kept = stage(house, entry(b"b"), writer="v")
    commit(house, [first])
    house.scheduler.run()
    start, end = staged_offsets(house)
    assert (start, end) == (1, 2)
    commit(house, [kept], writer="v")
    house.scheduler.run()
    assert staged_offsets(house) == (2, 2)


def test_what_keeps_the_log_long_is_moved_to_its_end() -> None:
    house = house_of(cut_bytes=1, move_bytes=2000)
    old = stage(house, entry(b"old"), entry(b"x" * 400), writer="slow")
    for n in range(30):
        commit(house, [stage(house, entry(b"%d" % n, b"y" * 100), batch=n)], batch=n)
    start, end = staged_offsets(house)
    assert end - start < 30
    assert house.broker.staged_writes.statistics().moved > 0
    commit(house, [old], writer="slow")
    assert values(house)[-2:] == [b"old", b"x" * 400]


# ---- topics that change meanwhile


def test_a_topic_that_was_deleted_since_is_told_before_the_commit(house: House) -> None:
    part = stage(house, entry(b"a"))
    house.done(house.broker.topics.delete("t"))
    assert isinstance(house.failed(commit_soon(house, [part])), StagedTopicGone)
    house.done(house.broker.topics.create("t", 2))
    assert isinstance(house.failed(commit_soon(house, [part])), StagedTopicGone)
    again = stage(house, entry(b"a"))
    assert commit(house, [again]).records == 1
    assert values(house) == [b"a"]


def test_a_topic_that_is_deleted_during_the_commit_is_left_out() -> None:
    house = local_house_of()
    house.done(house.broker.topics.create("other", 1))
    ones = [entry(*names(9 * n, 9), topic=("t", "other")[n % 2]) for n in range(10)]
    running = commit_soon(house, [stage(house, *ones)]).result()
    assert isinstance(running, Running)
    while running.progress.at < 3:
        assert house.scheduler.turn()
    house.done(house.broker.topics.delete("other"))
    done = running.outcome.result()
    assert done.records is not None
    assert done.records + done.skipped["topic_deleted"] == 90
    assert len(values(house)) == 45
    assert facts(house).last_skipped == done.skipped
    assert commit(house, [], batch=0).skipped == done.skipped


def test_records_without_keys_are_left_out_of_a_topic_that_is_compacted_since(
    house: House,
) -> None:
    part = stage(house, entry(b"a", key=None), entry(b"b"))
    house.done(house.broker.topics.alter("t", {"compact": True}))
    done = commit(house, [part])
    assert (done.records, done.skipped) == (1, {"key_required": 1})
    assert values(house) == [b"b"]


def test_a_topic_of_append_times_gets_them(house: House) -> None:
    house.done(house.broker.topics.create("timed", 1, {"timestamps": "append"}))
    part = stage(house, entry(b"a", topic="timed"))
    house.scheduler.advance(5)
    commit(house, [part])
    fetched = house.done(house.broker.reader.fetch("timed", 0, 0, 10, 1 << 20))
    [record] = fetched.records
    assert record.timestamp == house.scheduler.clock.now_ms


def test_staged_records_that_a_disk_lost_are_left_out(house: House) -> None:
    lost = stage(house, entry(b"a", b"b"), entry(b"c" * 400))
    kept = stage(house, entry(b"d"))
    _, end = staged_offsets(house)
    house.done(house.engine.trim(PARTITION, end - 1))
    done = commit(house, [lost, kept])
    assert (done.records, done.skipped) == (1, {"log_damaged": 3})
    assert values(house) == [b"d"]


def test_a_commit_that_a_fault_of_ours_ended_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = local_house_of()
    parts = [stage(house, *[entry(*names(9 * n, 9)) for n in range(12)])]
    step, faults = Copying.step, iter([False, False, False, True])

    def faulty(self: Copying, places: Any, at: int) -> Any:
        if next(faults, False):
            raise RuntimeError("a fault of ours")
        return step(self, places, at)

    monkeypatch.setattr(Copying, "step", faulty)
    running = commit_soon(house, parts).result()
    assert isinstance(running, Running)
    house.scheduler.run()
    assert isinstance(running.outcome.error, RuntimeError)
    some = len(values(house))
    assert 0 < some < 108
    other = stage_soon(house, entry(b"x"), batch=0)
    assert isinstance(house.failed(commit_soon(house, [])), CommitRunning)
    assert commit(house, parts).records == 108
    assert values(house) == [b"%d" % n for n in range(108)]
    assert other.is_done


# ---- lanes and schedules


def test_lanes_are_kept(house: House) -> None:
    part = stage(house, entry(b"urgent", lane="critical"), entry(b"plain"))
    assert house.broker.topics.get("t").uses_lanes
    commit(house, [part])
    fetched = house.done(house.broker.reader.fetch("t", 0, 0, 10, 1 << 20))
    assert [record.lane for record in fetched.records] == ["critical", None]


def test_records_with_a_time_appear_when_they_are_due(house: House) -> None:
    due_ms = house.scheduler.clock.now_ms + 60_000
    later = entry(*names(0, 70), key=b"k", partition=-1, due_ms=due_ms, lane="high")
    named = entry(b"named", partition=1, due_ms=due_ms)
    done = commit(house, [stage(house, later, named, entry(b"now"))])
    assert done.records == 72
    assert values(house) == [b"now"]
    assert house.broker.schedules.count("t") == 71
    house.scheduler.advance(59)
    assert values(house) == [b"now"]
    house.scheduler.advance(2)
    assert sorted(one or b"" for one in values(house)) == sorted([b"now", b"named", *names(0, 70)])
    fetched = house.done(house.broker.reader.fetch("t", 1, 0, 100, 1 << 20))
    assert b"named" in [record.value for record in fetched.records]
    lanes = {record.lane for record in fetched.records} - {None}
    assert lanes <= set(LANES)


def test_a_time_that_is_past_at_the_commit_is_now(house: House) -> None:
    due_ms = house.scheduler.clock.now_ms + 1_000
    part = stage(house, entry(b"a", due_ms=due_ms), entry(b"b", due_ms=1))
    house.scheduler.advance(50)
    commit(house, [part])
    house.scheduler.advance(1)
    assert sorted(one or b"" for one in values(house)) == [b"a", b"b"]


def test_a_commit_has_room_for_its_schedules() -> None:
    house = house_of()
    due_ms = house.scheduler.clock.now_ms + 60_000
    house.broker.schedules._options = house.broker.schedules._options.__class__(schedules_max=2)
    part = stage(house, entry(b"a", b"b", b"c", due_ms=due_ms))
    assert isinstance(house.failed(commit_soon(house, [part])), TooManySchedules)
    assert commit(house, [stage(house, entry(b"a", b"b", due_ms=due_ms))]).records == 2


# ---- a disk that refuses


def full_house() -> tuple[House, RefusingDisk]:
    refusing: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Any:
        refusing.append(RefusingDisk(disk))
        return refusing[0]

    house = local_house_of(through=through)
    return house, refusing[0]


def test_a_full_disk_refuses_what_is_staged() -> None:
    house, disk = full_house()
    disk.is_full = True
    assert isinstance(house.failed(stage_soon(house, entry(b"a"))), DiskFull)
    disk.is_full = False
    assert commit(house, [stage(house, entry(b"b"))]).records == 1
    assert values(house) == [b"b"]


def test_a_small_commit_that_is_refused_can_be_asked_for_again() -> None:
    house, disk = full_house()
    part = stage(house, entry(b"a"))
    disk.is_full = True
    running = commit_soon(house, [part]).result()
    assert isinstance(running, Running)
    house.scheduler.run()
    assert isinstance(running.outcome.error, DiskFull)
    disk.is_full = False
    assert facts(house).last_batch is None
    assert commit(house, [part]) == Committed(0, 1, {}, already=False)
    assert values(house) == [b"a"]


def test_a_large_commit_goes_on_when_there_is_room_again() -> None:
    house, disk = full_house()
    part = stage(house, *[entry(*names(9 * n, 9)) for n in range(20)])
    running = commit_soon(house, [part]).result()
    assert isinstance(running, Running)
    while running.progress.at < 5:
        assert house.scheduler.turn()
    disk.is_full = True
    house.scheduler.advance(3)
    assert not running.outcome.is_done
    assert "room" in (facts(house).trouble or "")
    disk.is_full = False
    house.scheduler.advance(2)
    assert running.outcome.result().records == 180
    assert values(house) == [b"%d" % n for n in range(180)]


def test_writers_are_as_they_were_after_a_restart() -> None:
    disk = SimulatedDisk()
    house = local_house_of(disk)
    commit(house, [stage(house, entry(b"a"), batch=4)], batch=4)
    part = stage(house, entry(b"b"), batch=5)
    house.scheduler.run()
    again = local_house_of(disk.crash("nothing"))
    assert facts(again).last_batch == 4
    assert facts(again).parts == 1
    assert commit(again, [part], batch=4).already
    assert commit(again, [part], batch=5).records == 1
    assert values(again) == [b"a", b"b"]
