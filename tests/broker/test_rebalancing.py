"""Partitions that move between members: who gives up, who gets, who comes back, who is gone."""

from __future__ import annotations

from broker.grouping import Consumer, house_with, owned, publish, refused, settle
from millstream.broker.group_values import Commit, Poll
from millstream.errors import (
    MemberFenced,
    MemberUnknown,
    PartitionNotAssigned,
    StaleGeneration,
)


def test_a_newcomer_gets_its_share_without_a_pause_for_the_others() -> None:
    house = house_with()
    first = Consumer(house).join()
    waiting = first.start_poll(wait_ms=30_000)
    second = Consumer(house).join()
    # The long poll of the first ends at once and tells it what to give up.
    assert first.hear(house.done(waiting.pending)) == []
    assert len(first.standing.revoking) == 2
    assert second.numbers == []
    publish(house, *"0", partition=first.numbers[0])
    assert first.poll() == ["0"]
    second.heartbeat()
    assert len(second.numbers) == 2
    assert len(owned(first, second)) == 4
    assert not second.standing.is_rebalancing


def test_a_waiting_poll_hears_of_partitions_that_came_free() -> None:
    house = house_with()
    first = Consumer(house).join()
    second = Consumer(house).join()
    polling = second.start_poll(wait_ms=30_000)
    first.heartbeat()
    first.heartbeat()
    second.hear(house.done(polling.pending))
    assert len(second.numbers) == 2


def test_a_waiting_poll_reads_partitions_that_a_heartbeat_heard_of() -> None:
    house = house_with(partitions=2)
    first = Consumer(house).join()
    second = Consumer(house).join()
    settle(first, second)
    polling = first.start_poll(wait_ms=30_000)
    house.scheduler.run()
    theirs = second.numbers[0]
    second.leave()
    first.heartbeat()
    polled = house.done(polling.pending)
    assert len(polled.standing.assignment) == 2
    polling = first.start_poll(wait_ms=30_000)
    publish(house, "x", partition=theirs)
    assert first.hear(house.done(polling.pending)) == ["x"]


def test_a_poll_with_the_generation_before_waits_too() -> None:
    """A member that still works on what it has to give up must not be answered in a circle."""
    house = house_with()
    first = Consumer(house).join()
    old = first.standing.generation
    Consumer(house).join()
    first.heartbeat()
    polling = house.broker.groups.poll("g", first.id, old, Poll(wait_ms=1_000))
    house.scheduler.run()
    assert not polling.pending.is_done
    publish(house, "x", partition=first.numbers[0])
    polled = house.done(polling.pending)
    assert polled.standing.generation > old
    assert polled.standing.revoking
    assert len(polled.parts) == 1


def test_a_poll_under_way_hears_that_its_static_member_was_replaced() -> None:
    house = house_with()
    first = Consumer(house).join(instance_id="one")
    polling = first.start_poll(wait_ms=30_000)
    house.scheduler.run()
    Consumer(house).join(instance_id="one")
    refused(house, polling.pending, MemberFenced)


def test_a_poll_under_way_ends_when_its_member_joins_again() -> None:
    house = house_with()
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=30_000)
    house.scheduler.run()
    member.join(member_id=member.id)
    assert house.done(polling.pending).parts == []
    publish(house, "x")
    assert member.poll() == ["x"]


def test_what_is_given_up_goes_on_where_it_was_handled() -> None:
    house = house_with(partitions=2)
    publish(house, "a", "b", "c", partition=0)
    publish(house, "x", "y", partition=1)
    first = Consumer(house).join()
    assert first.poll() == ["a", "b", "c", "x", "y"]
    second = Consumer(house).join()
    first.poll()
    # The call with the new generation gives up one of the two, with all of it handled.
    first.poll()
    second.heartbeat()
    assert len(second.numbers) == 1
    assert second.poll() == []


def test_a_member_that_commits_by_itself_decides_what_comes_again() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b", "c")
    first = Consumer(house).join(auto_commit=False)
    assert first.poll() == ["a", "b", "c"]
    assert first.poll() == []
    first.commit(1)
    first.leave()
    assert Consumer(house).join().poll() == ["b", "c"]


def test_a_member_that_does_not_give_up_in_time_is_stale() -> None:
    house = house_with(rebalance_timeout_ms=10_000, session_timeout_ms=60_000)
    first = Consumer(house).join()
    old = first.standing.generation
    second = Consumer(house).join()
    first.heartbeat()
    for _ in range(4):
        house.scheduler.advance(3)
        second.heartbeat()
        if second.numbers:
            break
        house.done(house.broker.groups.heartbeat("g", first.id, old))
    assert len(second.numbers) == 2
    refused(house, house.broker.groups.heartbeat("g", first.id, old), StaleGeneration)
    assert house.broker.groups.counts.rebalances["revoked"] == 1
    first.join(member_id=first.id)
    assert len(owned(first, second)) == 4


def test_a_stale_member_changes_nothing() -> None:
    house = house_with()
    publish(house, "a", "b")
    first = Consumer(house).join(auto_commit=False)
    old = first.standing.generation
    second = Consumer(house).join()
    settle(first, second)
    commits = [Commit("orders", first.numbers[0], 0)]
    groups = house.broker.groups
    refused(house, groups.commit("g", commits, first.id, old), StaleGeneration)
    refused(house, groups.poll("g", first.id, old).pending, StaleGeneration)
    theirs = second.numbers[0]
    error = refused(
        house,
        groups.commit("g", [Commit("orders", theirs, 0)], first.id, first.standing.generation),
        PartitionNotAssigned,
    )
    assert error.fields["partition"] == theirs


def test_fifty_members_share_two_hundred_partitions() -> None:
    house = house_with(partitions=200, session_timeout_ms=10_000)
    members = [Consumer(house).join() for _ in range(50)]
    settle(*members)
    assert len(owned(*members)) == 200
    assert {len(one.numbers) for one in members} == {4}
    # One more comes, one goes, one dies: the others keep what they have, up to their share.
    before = {one.id: set(one.numbers) for one in members}
    members.append(Consumer(house).join())
    settle(*members)
    assert len(owned(*members)) == 200
    assert sum(len(before[one.id] - set(one.numbers)) for one in members[:50]) == 3
    members.pop(7).leave()
    settle(*members)
    dead = members.pop(30)
    house.scheduler.advance(6)
    settle(*members)
    house.scheduler.advance(6)
    settle(*members)
    assert len(owned(*members)) == 200
    assert {len(one.numbers) for one in members} == {4, 5}
    assert dead.id not in {one.id for one in members}


def test_who_goes_leaves_its_partitions_to_the_others() -> None:
    house = house_with()
    members = [Consumer(house).join() for _ in range(3)]
    settle(*members)
    members[1].leave()
    rest = [members[0], members[2]]
    settle(*rest)
    assert len(owned(*rest)) == 4
    refused(
        house,
        house.broker.groups.heartbeat("g", members[1].id, members[1].standing.generation),
        MemberUnknown,
    )


def test_a_silent_member_is_taken_for_gone() -> None:
    house = house_with(session_timeout_ms=10_000)
    silent, other = Consumer(house).join(), Consumer(house).join()
    settle(silent, other)
    for _ in range(4):
        house.scheduler.advance(3)
        other.heartbeat()
    assert len(other.numbers) == 4
    assert house.broker.groups.counts.rebalances["expired"] == 1
    refused(house, silent.start_poll().pending, MemberUnknown)


def test_who_waits_in_a_poll_is_not_silent() -> None:
    house = house_with(session_timeout_ms=10_000)
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=30_000)
    house.scheduler.advance(29)
    publish(house, "a")
    assert member.hear(house.done(polling.pending)) == ["a"]
    house.scheduler.advance(9)
    member.heartbeat()


def test_a_static_member_comes_back_to_what_it_had() -> None:
    house = house_with(session_timeout_ms=10_000)
    publish(house, "a", "b", partition=0)
    first = Consumer(house).join(instance_id="one", auto_commit=False)
    second = Consumer(house).join(instance_id="two")
    settle(first, second)
    had, before = first.numbers, first.id
    generation = second.standing.generation
    first.leave()
    house.scheduler.advance(5)
    second.heartbeat()
    assert second.standing.generation == generation
    first.join(instance_id="one")
    assert first.numbers == had
    assert first.id != before
    refused(house, house.broker.groups.heartbeat("g", before, 1), MemberFenced)
    # What it had been given and not committed is given again.
    assert (0 in had) == (first.poll() == ["a", "b"])


def test_a_static_member_that_stays_away_is_gone() -> None:
    house = house_with(session_timeout_ms=10_000)
    first, second = Consumer(house).join(instance_id="one"), Consumer(house).join()
    settle(first, second)
    first.leave()
    for _ in range(4):
        house.scheduler.advance(3)
        second.heartbeat()
    assert len(second.numbers) == 4


def test_new_partitions_are_dealt_out() -> None:
    house = house_with(partitions=1)
    member = Consumer(house).join(auto_offset_reset="latest")
    house.done(house.broker.topics.add_partitions("orders", 3))
    member.heartbeat()
    assert member.numbers == [0, 1, 2]
    assert house.broker.groups.counts.rebalances["topics"] == 1


def test_a_topic_that_is_deleted_and_made_again_begins_anew() -> None:
    house = house_with(partitions=1)
    publish(house, "a", "b", "c")
    member = Consumer(house).join()
    assert member.poll() == ["a", "b", "c"]
    old = member.standing.generation
    polling = member.start_poll(wait_ms=30_000)
    house.done(house.broker.topics.delete("orders"))
    house.scheduler.run()
    assert member.hear(polling.pending.result()) == []
    assert member.numbers == []
    house.done(house.broker.topics.create("orders", 1))
    publish(house, "x")
    member.heartbeat()
    assert member.poll() == ["x"]
    # An answer to the old topic's records must not touch the new one.
    refused(
        house,
        house.broker.groups.commit("g", [Commit("orders", 0, 1)], member.id, old),
        StaleGeneration,
    )


def test_a_standing_tells_a_topic_from_one_that_was_made_again() -> None:
    house = house_with(partitions=1)
    topics, groups = house.broker.topics, house.broker.groups
    house.done(topics.create("other", 1))
    publish(house, "a", "b", "c")
    member = Consumer(house, topics=("orders", "other")).join()
    ids = {name: str(topics.get(name).uuid) for name in ("orders", "other")}
    assert member.standing.topic_ids == ids
    house.done(topics.delete("orders"))
    house.done(topics.create("orders", 1))
    # Offset 3 lies past the end of the new topic, but what is wrong is that the member was not
    # told of it.
    late = groups.commit("g", [Commit("orders", 0, 3)], member.id, member.standing.generation)
    refused(house, late, PartitionNotAssigned)
    assert member.poll() == []
    assert member.standing.topic_ids == ids | {"orders": str(topics.get("orders").uuid)}
    assert member.standing.topic_ids["orders"] != ids["orders"]
    house.done(topics.delete("orders"))
    assert set(member.heartbeat().topic_ids) == {"other"}


def test_a_poll_in_the_middle_of_a_deletion_does_not_turn_the_loop_for_ever() -> None:
    house = house_with(partitions=1)
    member = Consumer(house).join()
    polling = member.start_poll(wait_ms=30_000)
    house.scheduler.run()
    deleting = house.engine.delete("orders")
    house.done(deleting)
    house.scheduler.advance(31)
    assert polling.pending.is_done


def test_who_gets_partitions_of_a_topic_that_is_just_going_hears_of_it_later() -> None:
    house = house_with(partitions=1)
    first, second = Consumer(house).join(), Consumer(house).join()
    settle(first, second)
    heir = second if first.numbers else first
    (first if first.numbers else second).leave()
    # The log of the topic is gone, and the broker does not know yet.
    house.done(house.engine.delete("orders"))
    heir.heartbeat()
    assert heir.poll() == []
    house.broker.groups._topic_deleted(house.broker.topics.get("orders"))
    heir.heartbeat()
    assert heir.numbers == []
