"""Positions of a member: nothing skipped, and nothing counts as handled that was not."""

from __future__ import annotations

from millstream.broker.positions import Positions
from millstream.log.partition import PartitionId

A, B = PartitionId("t", 0), PartitionId("t", 1)


def at(**offsets: int) -> Positions:
    positions = Positions()
    for name, offset in offsets.items():
        positions.place({"a": A, "b": B}[name], offset)
    return positions


def test_what_was_given_is_handled_at_the_next_call() -> None:
    positions = at(a=0, b=0)
    positions.give({A: 5})
    assert not positions.has_handled
    positions.receive(None)
    assert positions.take_handled() == {A: 5}
    assert not positions.has_handled


def test_a_lost_answer_is_given_again_and_is_not_handled() -> None:
    positions = at(a=0)
    first = positions.give({A: 5})
    positions.receive(first)
    positions.give({A: 9})
    positions.receive(first)
    assert positions[A] == 5
    second = positions.give({A: 8})
    positions.receive(second)
    assert positions.take_handled() == {A: 8}


def test_two_lost_answers_in_a_row_lose_nothing() -> None:
    positions = at(a=0)
    first = positions.give({A: 5})
    positions.receive(first)
    positions.give({A: 9})
    positions.receive(first)
    positions.give({A: 7})
    positions.receive(first)
    assert positions[A] == 5


def test_taking_back_does_not_undo_a_later_place() -> None:
    positions = at(a=0)
    positions.give({A: 5})
    positions.place(A, 100)
    positions.take_back()
    assert positions[A] == 100


def test_what_could_not_be_committed_is_kept_unless_more_was_handled() -> None:
    positions = at(a=0, b=0)
    positions.give({A: 5, B: 5})
    positions.receive(None)
    taken = positions.take_handled()
    positions.give({A: 9})
    positions.receive(None)
    positions.drop([B])
    positions.put_back_handled(taken)
    assert positions.take_handled() == {A: 9}


def test_a_partition_that_went_leaves_nothing_behind() -> None:
    positions = at(a=0, b=0)
    positions.give({A: 5, B: 5})
    positions.receive(None)
    positions.give({A: 6, B: 6})
    positions.drop([A])
    positions.receive(None)
    assert A not in positions
    assert positions.take_handled([B]) == {B: 6}
    positions.drop_topic("t")
    assert B not in positions


def test_a_commit_by_the_member_is_not_repeated_by_the_broker() -> None:
    positions = at(a=0)
    positions.give({A: 5})
    positions.receive(None)
    positions.committed(A)
    assert not positions.has_handled
