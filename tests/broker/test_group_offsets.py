"""Committed offsets: they survive, they are reset, they go with their topic and with time."""

from __future__ import annotations

import pytest

from broker.grouping import Consumer, committed, group_options, house_with, publish
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.consuming import ConsumingOptions
from millstream.broker.group_offsets import SWEEP_SECONDS, ResetKind, ResetTo
from millstream.broker.group_values import Commit
from millstream.broker.reading import Reader
from millstream.broker.shares import Shares
from millstream.engine.pending import Pending
from millstream.errors import (
    ConsumerUnknown,
    GroupNotEmpty,
    GroupUnknown,
    MemberUnknown,
    OffsetOutOfRange,
    PartitionUnknown,
    TopicUnknown,
)

DAY_S = 24 * 60 * 60.0


def restarted(house: House) -> House:
    """The same disk after the power went, without what was not synced."""
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    return local_house(disk.crash("nothing"), now_ms=house.scheduler.clock.now_ms + 1000).start()


def local_with(partitions: int = 2) -> House:
    house = local_house().start()
    house.done(house.broker.topics.create("orders", partitions))
    return house


def pass_time(house: House, seconds: float) -> None:
    """In one go: what falls due in between is done at the end, once."""
    house.scheduler.clock.advance(seconds)
    house.scheduler.advance(SWEEP_SECONDS / 100)


# ---- surviving


def test_what_was_committed_is_there_after_the_power_went() -> None:
    house = local_with()
    publish(house, "a", "b", "c")
    member = Consumer(house).join(auto_commit=False)
    member.commit(2, metadata="kept")
    house = restarted(house)
    found = house.done(house.broker.group_offsets.committed("g", "orders"))
    assert [(one.partition, one.offset, one.metadata) for one in found] == [
        (0, 2, "kept"),
        (1, 0, ""),
    ]
    assert Consumer(house).join().poll() == ["c"]


def test_members_join_again_after_a_restart_with_higher_generations() -> None:
    house = local_with()
    member = Consumer(house).join()
    house = restarted(house)
    beat = house.broker.groups.heartbeat("g", member.id, member.standing.generation)
    assert isinstance(house.failed(beat), MemberUnknown)
    again = Consumer(house).join()
    assert again.standing.generation > member.standing.generation


def test_offsets_past_the_recovered_end_are_clamped_for_good() -> None:
    """A topic in a weaker mode lost its tail; its offsets will be given to other records."""
    house = local_house().start()
    house.done(house.broker.topics.create("weak", 1, {"fsync": "none"}))
    publish(house, "a", "b", "c", topic="weak")
    house.done(house.broker.groups.commit("g", [Commit("weak", 0, 3)]))
    reader = house.done(house.broker.sequential.open("weak"))
    house.done(reader.next(10))
    house.done(reader.ack(0, 2))
    house = restarted(house)
    assert house.broker.reader.offsets("weak", 0).high_watermark == 0
    assert committed(house) == 0
    publish(house, "other", topic="weak")
    house = restarted(house)
    back = house.done(house.broker.sequential.open("weak", reader.id))
    assert back.positions() == {0: 0}


# ---- resetting


@pytest.mark.parametrize(
    ("kind", "value", "after"),
    [("earliest", 0, 0), ("latest", 0, 3), ("offset", 2, 2), ("time", 1_700_000_005_000, 1)],
)
def test_a_group_is_reset(kind: ResetKind, value: int, after: int) -> None:
    house = house_with(partitions=2)
    for name in "abc":
        publish(house, name)
        house.scheduler.advance(5)
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 1)]))
    offsets = house.broker.group_offsets
    to = ResetTo(kind, value)
    tried = house.done(offsets.reset("g", "orders", to, [0], is_dry_run=True))
    assert committed(house) == 1
    done = house.done(offsets.reset("g", "orders", to, [0]))
    assert tried == done
    assert [(one.before, one.after) for one in done] == [(1, after)]
    assert committed(house) == after
    assert committed(house, 1) is None


def test_a_reset_takes_all_partitions_and_may_make_a_group() -> None:
    house = house_with(partitions=3)
    publish(house, "a", partition=1)
    done = house.done(house.broker.group_offsets.reset("new", "orders", ResetTo("latest")))
    assert [one.after for one in done] == [0, 1, 0]
    assert {one.before for one in done} == {None}
    assert Consumer(house, "new").join().poll() == []


def test_a_reset_that_cannot_be_changes_nothing() -> None:
    house = house_with(partitions=2)
    publish(house, "a")
    offsets = house.broker.group_offsets
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 1)]))
    # The offset is good for the first partition and not for the second.
    resetting = offsets.reset("g", "orders", ResetTo("offset", 1))
    assert isinstance(house.failed(resetting), OffsetOutOfRange)
    assert isinstance(
        house.failed(offsets.reset("g", "orders", ResetTo("earliest"), [0, 2])), PartitionUnknown
    )
    assert isinstance(
        house.failed(offsets.reset("g", "nothing", ResetTo("earliest"))), TopicUnknown
    )
    Consumer(house).join()
    resetting = offsets.reset("g", "orders", ResetTo("earliest"))
    assert isinstance(house.failed(resetting), GroupNotEmpty)
    assert committed(house) == 1


def test_a_topic_made_again_while_times_are_looked_up_is_not_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with(partitions=1)
    offsets, gate = house.broker.group_offsets, Pending[int]()
    monkeypatch.setattr(Reader, "offset_at", lambda *_: gate)
    resetting = offsets.reset("g", "orders", ResetTo("time", 5))
    house.done(house.broker.topics.delete("orders"))
    house.done(house.broker.topics.create("orders", 1))
    gate.succeed(7)
    assert isinstance(house.failed(resetting), TopicUnknown)
    assert isinstance(house.failed(offsets.committed("g")), GroupUnknown)


def test_who_joins_while_a_reset_is_written_goes_on_where_it_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b")
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 2)]))
    gate = Pending[None]()
    monkeypatch.setattr(Shares, "reset", lambda *_: gate)
    resetting = house.broker.group_offsets.reset("g", "orders", ResetTo("earliest"))
    member = Consumer(house).join()
    assert member.poll() == ["a", "b"]
    member.commit(2)
    gate.succeed(None)
    house.done(resetting)
    assert committed(house) == 2


def test_offsets_of_one_topic_are_forgotten() -> None:
    house = house_with()
    house.done(house.broker.topics.create("bills", 1))
    groups, offsets = house.broker.groups, house.broker.group_offsets
    house.done(groups.commit("g", [Commit("orders", 0, 0), Commit("bills", 0, 0)]))
    assert house.done(offsets.forget("g", "orders")) == 1
    assert [one.topic for one in house.done(offsets.committed("g"))] == ["bills"]
    assert isinstance(house.failed(offsets.committed("nobody")), GroupUnknown)


# ---- going


def test_a_topic_takes_its_offsets_along() -> None:
    house = local_with()
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0), Commit("orders", 1, 0)]))
    house.done(house.broker.topics.delete("orders"))
    house.scheduler.run()
    assert house.broker.group_offsets.table.count == 0
    house.done(house.broker.topics.create("orders", 2))
    house = restarted(house)
    assert house.broker.group_offsets.table.count == 0


def test_what_a_deletion_left_behind_goes_at_the_start() -> None:
    house = local_with()
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0)]))
    # The topic goes without the broker's doing, as in a crash halfway.
    house.done(house.engine.delete("orders"))
    house = restarted(house)
    house.scheduler.run()
    assert house.broker.group_offsets.table.count == 0


def test_groups_long_gone_are_forgotten_and_others_are_not() -> None:
    house = house_with()
    groups = house.broker.groups
    house.done(groups.commit("gone", [Commit("orders", 0, 0)]))
    reader = house.done(house.broker.sequential.open("orders"))
    member = Consumer(house, "alive").join(session_timeout_ms=1_800_000)
    for _ in range(int(6.9 * DAY_S / 1500)):
        pass_time(house, 1500)
        member.heartbeat()
    house.done(groups.commit("recent", [Commit("orders", 0, 0)]))
    assert len(house.done(house.broker.directory.summaries())) == 3
    for _ in range(int(0.2 * DAY_S / 1500) + 1):
        pass_time(house, 1500)
        member.heartbeat()
    assert [one.group for one in house.done(house.broker.directory.summaries())] == [
        "alive",
        "recent",
    ]
    assert house.broker.group_offsets.expired_groups == 1
    back = house.broker.sequential.open("orders", reader.id)
    assert isinstance(house.failed(back), ConsumerUnknown)


@pytest.mark.parametrize("days", [3650, -3650])
def test_a_wall_clock_that_is_put_forgets_nothing(days: int) -> None:
    house = house_with()
    groups, sequential = house.broker.groups, house.broker.sequential
    house.done(groups.commit("g", [Commit("orders", 0, 0)]))
    before = house.done(sequential.open("orders"))
    house.scheduler.clock.now_ms += days * int(DAY_S) * 1000
    house.done(groups.commit("h", [Commit("orders", 0, 0)]))
    after = house.done(sequential.open("orders"))
    house.scheduler.advance(SWEEP_SECONDS + 1)
    assert committed(house) == 0
    assert committed(house, group="h") == 0
    for one in (before, after):
        assert house.done(sequential.open("orders", one.id)).positions() == one.positions()


def test_a_sequential_consumer_at_work_is_not_forgotten_though_it_acks_nothing() -> None:
    house = house_with(partitions=2)
    sequential = house.broker.sequential
    gone = house.done(sequential.open("orders"))
    held = house.done(sequential.open("orders", partition=1))
    held.is_held = True
    asking = house.done(sequential.open("orders"))
    for _ in range(9):
        pass_time(house, DAY_S)
        assert house.done(house.done(sequential.find("orders", asking.id)).next(1)) == []
    publish(house, "a", partition=1)
    assert isinstance(house.failed(sequential.find("orders", gone.id)), ConsumerUnknown)
    for one in (held, asking):
        assert len(house.done(one.next(1))) == 1
        assert house.done(one.ack(1, 0)) == 1
    # What belongs to a connection that has ended has as long as all others.
    held.close()
    pass_time(house, 8 * DAY_S)
    assert isinstance(house.failed(sequential.open("orders", held.id)), ConsumerUnknown)


def test_an_ack_does_not_bring_a_forgotten_consumer_back() -> None:
    house = house_with(partitions=2)
    sequential = house.broker.sequential
    publish(house, "a", partition=1)
    alone = house.done(sequential.open("orders", partition=1))
    assert len(house.done(alone.next(1))) == 1
    pass_time(house, 8 * DAY_S)
    assert isinstance(house.failed(alone.ack(1, 0)), ConsumerUnknown)
    assert isinstance(house.failed(sequential.open("orders", alone.id)), ConsumerUnknown)


def test_offsets_are_kept_for_ever_when_that_is_asked_for() -> None:
    house = local_house(options_=group_options(ConsumingOptions(offsets_retention_ms=None))).start()
    house.done(house.broker.topics.create("orders", 1))
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0)]))
    pass_time(house, 8 * DAY_S)
    assert committed(house) == 0
