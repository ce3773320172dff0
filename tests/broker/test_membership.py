"""Membership: nobody shares a partition, all get one in the end, and who keeps one keeps on."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from log.effort import effort
from millstream.broker.group_values import ASSIGNORS, Assignor
from millstream.broker.membership import Member, Membership
from millstream.errors import (
    MemberFenced,
    MemberUnknown,
    PartitionNotAssigned,
    StaleGeneration,
)
from millstream.log.partition import PartitionId


def group_of(partitions: int = 4) -> Membership:
    membership = Membership("g", "sticky")
    membership.set_partitions("a", partitions)
    return membership


def joined(membership: Membership, name: str, instance_id: str | None = None) -> Member:
    member = Member(name, "client", frozenset({"a"}), instance_id)
    membership.add(member)
    membership.reconcile(member)
    member.acknowledged = member.generation
    return member


def call(membership: Membership, member: Member, generation: int | None = None) -> None:
    """What a heartbeat does."""
    generation = member.generation if generation is None else generation
    membership.acknowledge(membership.called(member.id, generation), generation)
    membership.reconcile(member)


def test_a_newcomer_gets_what_another_has_given_up_and_not_before() -> None:
    membership = group_of()
    first = joined(membership, "first")
    assert len(first.owned) == 4
    second = joined(membership, "second")
    assert not second.owned
    old = first.generation
    call(membership, first)
    assert len(first.owned) == len(first.revoking) == 2
    # It has been told, but calls with the generation before: it may not have heard.
    call(membership, first, old)
    call(membership, second)
    assert not second.owned
    call(membership, first)
    call(membership, second)
    assert second.owned.keys() == set(membership.owners) - first.owned.keys()
    assert membership.is_settled


def test_a_generation_is_stale_once_a_newer_one_was_used() -> None:
    membership = group_of()
    first = joined(membership, "first")
    old = first.generation
    joined(membership, "second")
    call(membership, first)
    membership.called("first", old)
    call(membership, first)
    with pytest.raises(StaleGeneration) as caught:
        membership.called("first", old)
    assert caught.value.fields["current"] == first.generation
    with pytest.raises(StaleGeneration):
        membership.called("first", first.generation + 1)


def test_a_member_that_does_not_give_up_in_time_is_stale() -> None:
    membership = group_of()
    first = joined(membership, "first")
    old = first.generation
    second = joined(membership, "second")
    call(membership, first)
    membership.force(first)
    call(membership, second)
    assert len(second.owned) == 2
    with pytest.raises(StaleGeneration):
        membership.called("first", old)
    kept = set(first.owned)
    membership.rejoin(first, first.topics, None)
    assert set(first.owned) == kept
    membership.called("first", first.generation)


def test_a_static_member_comes_back_to_what_it_had() -> None:
    membership = group_of()
    before = joined(membership, "before", "one")
    other = joined(membership, "other")
    call(membership, before)
    call(membership, before)
    call(membership, other)
    had = set(before.owned)
    after = Member("after", "client", frozenset({"a"}), "one")
    membership.take_over(before, after)
    assert set(after.owned) == had
    assert membership.is_settled
    assert after.generation > before.generation
    with pytest.raises(MemberFenced):
        membership.called("before", before.generation)


def test_a_member_may_commit_what_it_has_and_what_it_gives_up_and_nothing_else() -> None:
    membership = group_of()
    first = joined(membership, "first")
    second = joined(membership, "second")
    call(membership, first)
    for one in (*first.owned, *first.revoking):
        membership.may_commit(first, first.generation, one)
        with pytest.raises(PartitionNotAssigned):
            membership.may_commit(second, second.generation, one)
    revoked = list(first.revoking)
    call(membership, first)
    with pytest.raises(PartitionNotAssigned):
        membership.may_commit(first, first.generation, revoked[0])


def test_an_old_generation_cannot_commit_to_a_topic_made_again() -> None:
    membership = group_of()
    member = joined(membership, "m")
    old = member.generation
    membership.set_partitions("a", 0)
    assert not member.owned
    membership.set_partitions("a", 4)
    call(membership, member)
    assert len(member.owned) == 4
    with pytest.raises(PartitionNotAssigned):
        membership.may_commit(member, old, PartitionId("a", 0))
    membership.may_commit(member, member.generation, PartitionId("a", 0))


def test_a_member_is_told_when_its_topic_is_gone() -> None:
    membership = group_of()
    member = joined(membership, "m")
    old = member.generation
    membership.set_partitions("a", 0)
    assert membership.has_news(member)
    call(membership, member)
    assert member.generation > old
    assert membership.is_settled


def test_unknown_members_are_told_so() -> None:
    with pytest.raises(MemberUnknown):
        group_of().called("nobody", 1)


class Members(RuleBasedStateMachine):
    """Members that come, go, call with what they heard last, lose answers and wake late."""

    def __init__(self) -> None:
        super().__init__()
        self.membership = Membership("g", "sticky")
        self.serial = 0
        # What each member has heard: its generation, and what it works on.
        self.heard: dict[str, tuple[int, frozenset[PartitionId]]] = {}
        # Topics that were deleted since a member heard of anything.
        self.gone: set[tuple[str, str]] = set()
        self.newest = 0

    def hear(self, member: Member) -> None:
        self.gone = {one for one in self.gone if one[0] != member.id}
        self.heard[member.id] = (member.generation, frozenset(member.owned))

    def some(self, data: st.DataObject) -> Member:
        return self.membership.members[data.draw(st.sampled_from(sorted(self.heard)))]

    @rule(
        topics=st.frozensets(st.sampled_from("abc"), min_size=1),
        assignor=st.sampled_from([None, *ASSIGNORS]),
        instance=st.sampled_from([None, None, "i1", "i2"]),
    )
    def join(self, topics: frozenset[str], assignor: Assignor | None, instance: str | None) -> None:
        self.serial += 1
        member = Member(f"m{self.serial}", "c", topics, instance, assignor)
        static = self.membership.static_member(instance) if instance is not None else None
        if static is not None:
            had = set(static.owned)
            self.membership.take_over(static, member)
            assert set(member.owned) == had
            del self.heard[static.id]
        else:
            self.membership.add(member)
        self.membership.reconcile(member)
        member.acknowledged = member.generation
        self.hear(member)

    @precondition(lambda self: self.heard)
    @rule(data=st.data(), is_heard=st.booleans())
    def call(self, data: st.DataObject, is_heard: bool) -> None:
        """A member calls with what it heard last. When the answer is lost, or the member is not
        yet done with what it has to give up, it goes on with what it has."""
        member = self.some(data)
        generation, had = self.heard[member.id]
        self.membership.acknowledge(self.membership.called(member.id, generation), generation)
        kept = had & member.owned.keys()
        self.membership.reconcile(member)
        if is_heard:
            self.hear(member)
        # What is to stay with a member is not taken from it for a moment.
        target = self.membership.wanted(member)
        assert {one for one in kept if one in target} <= member.owned.keys()

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        member = self.some(data)
        self.membership.remove(member)
        del self.heard[member.id]

    @precondition(lambda self: self.heard)
    @rule(data=st.data())
    def take_too_long(self, data: st.DataObject) -> None:
        """Everything a member was told to give up is taken; it joins again with its id."""
        member = self.some(data)
        self.membership.force(member)
        self.membership.rejoin(member, member.topics, member.assignor)
        self.hear(member)

    @rule(topic=st.sampled_from("abc"), count=st.integers(0, 6))
    def set_partitions(self, topic: str, count: int) -> None:
        # A topic grows, or is deleted; it never shrinks.
        known = self.membership._counts.get(topic, 0)
        self.membership.set_partitions(topic, count and max(count, known))
        if not count:
            self.gone |= {(member_id, topic) for member_id in self.heard}

    @invariant()
    def a_partition_has_one_owner(self) -> None:
        owners: dict[PartitionId, str] = {}
        for member in self.membership.members.values():
            for one in (*member.owned, *member.revoking):
                assert one not in owners, f"{one} is with {owners[one]} and {member.id}"
                owners[one] = member.id
        assert {one: member.id for one, member in self.membership.owners.items()} == owners

    @invariant()
    def what_a_member_works_on_is_its_own(self) -> None:
        """Also while it has not heard yet that it has to give it up; unless the topic went."""
        for member_id, (_, works_on) in self.heard.items():
            for one in works_on:
                if (member_id, one.topic) not in self.gone:
                    assert self.membership.owners[one].id == member_id

    @invariant()
    def generations_rise(self) -> None:
        assert self.membership.generation >= self.newest
        self.newest = self.membership.generation

    def teardown(self) -> None:
        """When nothing changes any more, a few rounds of calls settle everything."""
        for _ in range(4):
            for member in self.membership.members.values():
                call(self.membership, member)
        assert self.membership.is_settled
        wanted = {topic for one in self.membership.members.values() for topic in one.topics}
        expected = {
            PartitionId(topic, number)
            for topic, count in self.membership._counts.items()
            if topic in wanted
            for number in range(count)
        }
        assert self.membership.owners.keys() == expected
        for member in self.membership.members.values():
            before = member.generation
            call(self.membership, member)
            assert member.generation == before, "a settled group does not move"


Members.TestCase.settings = effort(60)
TestMembers = Members.TestCase
