"""Groups of Kafka's consumer protocol: the broker deals out, members give up before others get."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.grouping import Consumer
from broker.kafka_members import kafka_house, pass_time
from broker.making import House
from millstream.broker.consumer_groups import NAMES_SLICE, Beat, Beaten
from millstream.errors import MillstreamError
from millstream.log.partition import PartitionId

SESSION_S = 30.0


def ids(*numbers: int, topic: str = "orders") -> frozenset[PartitionId]:
    return frozenset(PartitionId(topic, number) for number in numbers)


@dataclass
class Member:
    """Does as clients do: it says what it has when that changed."""

    house: House
    id: str
    group: str = "g"
    instance_id: str | None = None
    epoch: int = 0
    owned: set[PartitionId] = field(default_factory=set)
    target: frozenset[PartitionId] | None = None

    def beat(self, **changes: Any) -> Beaten:
        said: dict[str, Any] = {
            "member_id": self.id,
            "epoch": self.epoch,
            "instance_id": self.instance_id,
        }
        beating = self.house.broker.consumer_groups.heartbeat(self.group, Beat(**(said | changes)))
        beaten = self.house.done(beating)
        self.epoch = beaten.epoch
        if beaten.assignment is not None:
            self.target = frozenset(beaten.assignment)
        return beaten

    def join(self, **changes: Any) -> Member:
        changes.setdefault("topics", frozenset(("orders",)))
        self.epoch = 0
        self.beat(owned=frozenset(), rebalance_timeout_ms=10_000, **changes)
        return self

    def follow(self) -> Member:
        """Take what it was given, give up what it was told to, and say so."""
        assert self.target is not None
        self.owned = set(self.target)
        self.beat(owned=frozenset(self.owned))
        return self

    def refused(self, **changes: Any) -> str:
        said: dict[str, Any] = {
            "member_id": self.id,
            "epoch": self.epoch,
            "instance_id": self.instance_id,
        }
        beating = self.house.broker.consumer_groups.heartbeat(self.group, Beat(**(said | changes)))
        error = self.house.failed(beating)
        assert isinstance(error, MillstreamError)
        return error.code

    @property
    def numbers(self) -> list[int]:
        assert self.target is not None
        return sorted(one.number for one in self.target)


def settle(*members: Member) -> None:
    for _ in range(4):
        for one in members:
            one.follow()


def test_the_first_member_has_everything_at_once() -> None:
    house = kafka_house()
    member = Member(house, "a").join()
    assert member.epoch == 1
    assert member.numbers == [0, 1, 2, 3]


def test_a_partition_is_given_only_when_who_had_it_says_that_it_has_not() -> None:
    house = kafka_house()
    a = Member(house, "a").join().follow()
    b = Member(house, "b").join()
    assert b.numbers == []
    a.beat()
    assert len(a.numbers) == 2
    # It uses the new epoch, and still has all of them.
    a.beat()
    b.beat()
    assert b.numbers == []
    a.beat(owned=ids(0, 1, 2, 3))
    b.beat()
    assert b.numbers == []
    a.follow()
    b.beat()
    assert sorted(a.numbers + b.numbers) == [0, 1, 2, 3]
    assert len(b.numbers) == 2


def test_who_does_not_give_up_in_time_is_out_and_others_get_what_it_had() -> None:
    house = kafka_house()
    a = Member(house, "a").join().follow()
    b = Member(house, "b").join()
    a.beat()
    for _ in range(11):
        pass_time(house, 1)
        b.beat()
        if house.broker.consuming.group_offsets.count_members("g") == 2:
            a.beat()
    assert a.refused() == "member_unknown"
    b.beat()
    assert b.numbers == [0, 1, 2, 3]


def test_an_answer_that_was_lost_is_given_again() -> None:
    house = kafka_house()
    a = Member(house, "a").join().follow()
    Member(house, "b").join()
    before = a.epoch
    first = a.beat()
    a.epoch = before
    again = a.beat()
    assert (again.epoch, again.assignment) == (first.epoch, first.assignment)


def test_nothing_is_told_twice_to_who_heard_it() -> None:
    house = kafka_house()
    member = Member(house, "a").join().follow()
    assert member.beat().assignment is None
    assert member.beat(topics=frozenset(("orders",))).assignment == tuple(sorted(ids(0, 1, 2, 3)))


@pytest.mark.parametrize("change", [1, -1])
def test_an_epoch_that_it_never_had_or_has_left_behind_is_refused(change: int) -> None:
    house = kafka_house()
    a = Member(house, "a").join().follow()
    Member(house, "b").join()
    a.beat()
    a.follow()
    assert a.refused(epoch=a.epoch + change) == "stale_generation"


def test_a_member_that_begins_anew_has_the_same_again() -> None:
    house = kafka_house()
    a = Member(house, "a").join().follow()
    before = a.numbers
    a.join()
    assert a.numbers == before
    assert house.broker.consuming.group_offsets.count_members("g") == 1


def test_a_member_that_leaves_makes_room_and_one_that_falls_silent_too() -> None:
    house = kafka_house()
    a, b, c = (Member(house, name).join() for name in "abc")
    settle(a, b, c)
    a.beat(epoch=-1)
    settle(b, c)
    assert sorted(b.numbers + c.numbers) == [0, 1, 2, 3]
    assert Member(house, "a", epoch=1).refused() == "member_unknown"
    pass_time(house, SESSION_S - 1)
    c.beat()
    pass_time(house, 2)
    settle(c)
    assert c.numbers == [0, 1, 2, 3]
    assert b.refused() == "member_unknown"


def test_a_static_member_that_leaves_for_a_while_has_what_it_had_under_a_new_id() -> None:
    house = kafka_house()
    a = Member(house, "a", instance_id="one").join()
    b = Member(house, "b", instance_id="two").join()
    settle(a, b)
    taking = Member(house, "c", instance_id="one")
    assert taking.refused(epoch=0, topics=frozenset(("orders",))) == "member_not_released"
    had = a.numbers
    a.beat(epoch=-2)
    b.beat()
    assert len(b.numbers) == 2
    taking.join()
    assert taking.numbers == had
    assert Member(house, "a", instance_id="one", epoch=3).refused() == "member_fenced"
    assert taking.refused(instance_id="two") == "member_fenced"


def test_a_static_member_that_does_not_come_back_is_out_after_its_session() -> None:
    house = kafka_house()
    a = Member(house, "a", instance_id="one").join()
    b = Member(house, "b").join()
    settle(a, b)
    a.beat(epoch=-2)
    pass_time(house, SESSION_S / 2)
    b.beat()
    pass_time(house, SESSION_S / 2 + 1)
    settle(b)
    assert b.numbers == [0, 1, 2, 3]
    assert b.refused(epoch=-2) == "parameter_invalid"


def test_topics_that_are_made_later_come_by_themselves() -> None:
    house = kafka_house()
    member = Member(house, "a").join(topics=frozenset(("orders", "later"))).follow()
    assert len(member.numbers) == 4
    house.done(house.broker.topics.create("later", 2))
    member.beat()
    assert member.target == ids(0, 1, 2, 3) | ids(0, 1, topic="later")
    house.done(house.broker.topics.delete("orders"))
    member.beat()
    assert member.target == ids(0, 1, topic="later")


def test_a_pattern_stands_for_topics_that_are_there_and_that_come() -> None:
    house = kafka_house()
    house.done(house.broker.topics.create("old", 1))
    member = Member(house, "a").join(topics=None, pattern="^or.*|old").follow()
    assert member.target == ids(0, 1, 2, 3) | ids(0, topic="old")
    house.done(house.broker.topics.create("orchids", 2))
    house.done(house.broker.topics.create("other", 2))
    member.beat()
    assert member.target == ids(0, 1, 2, 3) | ids(0, topic="old") | ids(0, 1, topic="orchids")
    house.done(house.broker.topics.delete("old"))
    member.beat()
    assert member.target == ids(0, 1, 2, 3) | ids(0, 1, topic="orchids")
    member.beat(topics=frozenset(("other",)))
    member.follow()
    assert member.target == ids(0, 1, 2, 3) | ids(0, 1, topic="orchids") | ids(0, 1, topic="other")
    member.beat(pattern="")
    member.follow()
    assert member.target == ids(0, 1, topic="other")


def test_a_name_that_is_taken_back_stays_when_the_pattern_fits_it() -> None:
    house = kafka_house()
    member = Member(house, "a").join(pattern="or.*").follow()
    member.beat(topics=frozenset())
    member.follow()
    assert member.target == ids(0, 1, 2, 3)


def test_a_pattern_is_tried_on_all_topics_however_many() -> None:
    house = kafka_house()
    for number in range(NAMES_SLICE + 10):
        house.broker.topics.by_name[f"t{number}"] = house.broker.topics.get("orders")._replace(
            name=f"t{number}", partitions=1
        )
    member = Member(house, "a").join(topics=None, pattern="t.*9")
    assert member.target is not None
    assert len(member.target) == len([n for n in range(NAMES_SLICE + 10) if n % 10 == 9])


def test_what_is_no_pattern_is_refused() -> None:
    house = kafka_house()
    assert Member(house, "a").refused(pattern="(") == "pattern_invalid"
    assert Member(house, "a").refused(pattern="") == "parameter_invalid"


def test_a_member_may_want_other_topics_than_before() -> None:
    house = kafka_house()
    house.done(house.broker.topics.create("later", 2))
    member = Member(house, "a").join().follow()
    member.beat(topics=frozenset(("later",)))
    member.follow()
    assert member.target == ids(0, 1, topic="later")


def test_members_choose_how_partitions_are_dealt_out() -> None:
    house = kafka_house()
    a = Member(house, "a").join(assignor="range")
    b = Member(house, "b").join(assignor="range")
    settle(a, b)
    assert (a.numbers, b.numbers) == ([0, 1], [2, 3])
    facts = house.broker.consumer_groups.facts("g")
    assert (facts.assignor, facts.is_stable) == ("range", True)
    assert [one.assignment for one in facts.members] == [one.target for one in facts.members]
    joining = Member(house, "c")
    assert joining.refused(topics=frozenset(("orders",)), assignor="best") == "assignor_unknown"


@pytest.mark.parametrize(
    "changes",
    [
        {"topics": None},
        {"topics": frozenset()},
        {"member_id": "", "epoch": 3},
        {"member_id": "", "epoch": -1},
        {"member_id": "a b", "topics": frozenset(("orders",))},
        {"member_id": "a" * 201, "topics": frozenset(("orders",))},
        {"epoch": -3},
        {"topics": frozenset(map(str, range(1001)))},
        {"topics": frozenset(("orders",)), "rebalance_timeout_ms": 0},
        {"topics": frozenset(("orders",)), "instance_id": "a b"},
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    assert Member(kafka_house(), "a").refused(**changes) == "parameter_invalid"


def test_ids_that_clients_chose_may_have_all_that_can_be_seen() -> None:
    house = kafka_house()
    assert Member(house, "n+H/zA==").join().numbers == [0, 1, 2, 3]
    joining = Member(house, "a\n")
    assert joining.refused(topics=frozenset(("orders",))) == "parameter_invalid"


def test_the_broker_gives_an_id_to_who_has_none() -> None:
    house = kafka_house()
    beaten = Member(house, "").join().beat
    del beaten
    (member,) = house.broker.consumer_groups.facts("g").members
    assert len(member.member_id) == 32


def test_a_group_has_at_most_so_many_members() -> None:
    house = kafka_house(groups={"members_max": 1})
    Member(house, "a").join()
    assert Member(house, "b").refused(topics=frozenset(("orders",))) == "too_many_members"


def test_members_of_http_and_of_kafka_are_not_in_one_group() -> None:
    house = kafka_house()
    Consumer(house, group="h").join()
    member = Member(house, "a", group="h")
    assert member.refused(topics=frozenset(("orders",))) == "group_protocol_mismatch"
    kafka = Member(house, "a").join()
    groups = house.broker.groups
    error = house.failed(groups.heartbeat("g", kafka.id, kafka.epoch))
    assert isinstance(error, MillstreamError)
    assert error.code == "member_unknown"


def test_only_who_is_in_the_group_and_in_its_epoch_may_commit() -> None:
    house = kafka_house()
    a = Member(house, "a").join().follow()
    groups = house.broker.consumer_groups
    groups.check_commit("g", "a", a.epoch)
    for member_id, epoch, code in (
        ("a", a.epoch + 1, "stale_generation"),
        ("b", a.epoch, "member_unknown"),
    ):
        with pytest.raises(MillstreamError) as refusal:
            groups.check_commit("g", member_id, epoch)
        assert refusal.value.code == code
