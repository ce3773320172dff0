"""Assignors: everything to exactly one who wants it, evenly, and sticky when it is said to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.assignors import Assignment, Wish, assign
from millstream.broker.group_values import ASSIGNORS, Assignor
from millstream.log.partition import PartitionId

TOPICS = ("a", "b", "c")


def wishes_of(*members: str, topics: tuple[str, ...] = ("a",)) -> dict[str, Wish]:
    return {member: Wish(frozenset(topics)) for member in members}


def numbers(assignment: Assignment, member: str, topic: str = "a") -> list[int]:
    return sorted(one.number for one in assignment[member] if one.topic == topic)


def sizes(assignment: Assignment) -> list[int]:
    return sorted(map(len, assignment.values()))


def after(wishes: dict[str, Wish], assignment: Assignment) -> dict[str, Wish]:
    """The same wishes by members that have what they were assigned."""
    return {
        name: Wish(wish.topics, frozenset(assignment.get(name, ())))
        for name, wish in wishes.items()
    }


def test_range_gives_runs_of_each_topic() -> None:
    wishes = wishes_of("x", "y", "z", topics=("a", "b"))
    assignment = assign("range", wishes, {"a": 7, "b": 2})
    assert [numbers(assignment, member) for member in "xyz"] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [numbers(assignment, member, "b") for member in "xyz"] == [[0], [1], []]


def test_round_robin_deals_all_topics_in_turn() -> None:
    wishes = wishes_of("x", "y", topics=("a", "b"))
    assignment = assign("round_robin", wishes, {"a": 3, "b": 3})
    assert [numbers(assignment, "x"), numbers(assignment, "x", "b")] == [[0, 2], [1]]
    assert [numbers(assignment, "y"), numbers(assignment, "y", "b")] == [[1], [0, 2]]


def test_sticky_takes_only_what_a_newcomer_needs() -> None:
    wishes = wishes_of("x", "y")
    first = assign("sticky", wishes, {"a": 6})
    second = assign("sticky", after(wishes, first) | wishes_of("z"), {"a": 6})
    assert sizes(second) == [2, 2, 2]
    for member in ("x", "y"):
        assert second[member] < first[member]


def test_sticky_leaves_those_alone_who_stay_when_one_goes() -> None:
    wishes = wishes_of("x", "y", "z")
    first = assign("sticky", wishes, {"a": 9})
    rest = {name: wish for name, wish in after(wishes, first).items() if name != "y"}
    second = assign("sticky", rest, {"a": 9})
    assert sizes(second) == [4, 5]
    assert first["x"] < second["x"]
    assert first["z"] < second["z"]


def test_sticky_is_fair_to_members_with_different_wishes() -> None:
    wishes = {
        "both": Wish(frozenset("ab"), frozenset(PartitionId("a", n) for n in range(4))),
        "only": Wish(frozenset("a")),
    }
    assignment = assign("sticky", wishes, {"a": 4, "b": 2})
    assert sizes(assignment) == [3, 3]
    assert numbers(assignment, "both", "b") == [0, 1]


def test_two_who_claim_the_same_partition_do_not_both_get_it() -> None:
    claim = frozenset({PartitionId("a", 0)})
    wishes = {"x": Wish(frozenset("a"), claim), "y": Wish(frozenset("a"), claim)}
    assignment = assign("sticky", wishes, {"a": 2})
    assert sizes(assignment) == [1, 1]


@pytest.mark.parametrize("assignor", ASSIGNORS)
def test_topics_that_are_not_there_and_groups_without_members_are_no_trouble(
    assignor: Assignor,
) -> None:
    assert assign(assignor, wishes_of("x"), {}) == {"x": set()}
    assert assign(assignor, {}, {"a": 3}) == {}


WISHES = st.dictionaries(
    st.sampled_from(["m1", "m2", "m3", "m4", "m5"]),
    st.builds(
        Wish,
        st.frozensets(st.sampled_from(TOPICS)),
        st.frozensets(st.builds(PartitionId, st.sampled_from(TOPICS), st.integers(0, 6))),
    ),
)
COUNTS = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 5))


@given(st.sampled_from(ASSIGNORS), WISHES, COUNTS)
def test_each_partition_goes_to_exactly_one_who_wants_it(
    assignor: Assignor, wishes: dict[str, Wish], counts: dict[str, int]
) -> None:
    assignment = assign(assignor, wishes, counts)
    assert assignment.keys() == wishes.keys()
    dealt = [one for mine in assignment.values() for one in mine]
    wanted = {topic for wish in wishes.values() for topic in wish.topics}
    assert sorted(dealt) == sorted(
        PartitionId(topic, n) for topic in counts if topic in wanted for n in range(counts[topic])
    )
    for member, mine in assignment.items():
        assert {one.topic for one in mine} <= wishes[member].topics


@given(WISHES, COUNTS)
def test_sticky_is_even_and_stays_as_it_is(wishes: dict[str, Wish], counts: dict[str, int]) -> None:
    assignment = assign("sticky", wishes, counts)
    for giver, mine in assignment.items():
        for one in mine:
            for taker, wish in wishes.items():
                if one.topic in wish.topics:
                    assert len(mine) - len(assignment[taker]) < 2, (giver, taker)
    assert assign("sticky", after(wishes, assignment), counts) == assignment
