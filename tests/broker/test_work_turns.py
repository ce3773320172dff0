"""Receives and acks of one turn of the loop go through the broker together, and differ in nothing
for who waits for them."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from broker.leasing import house_of, pass_time, publish, receive, values
from broker.making import House, RefusingDisk, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.delivery_values import Delivered, Receive, Received, Settled
from millstream.broker.polling import Polling
from millstream.broker.work_turns import Asking, WorkTurns
from millstream.errors import MillstreamError

WISH = Receive(("jobs",), visibility_ms=5_000)


class Worker:
    """One who waits for a record, or for the end of its ack."""

    def __init__(self, *, is_there: bool = True) -> None:
        self.is_there = is_there
        self.records: list[Delivered | None] = []
        self.limited_by: str | None = None
        self.settled_as: list[Any] = []
        self.code = ""

    def received(self, one: Delivered | None, found: Received) -> bool:
        self.records.append(one)
        self.limited_by = found.limited_by
        return self.is_there

    def settled(self, one: Settled) -> None:
        error = one.error
        self.settled_as.append(one.outcome if error is None else error.code)

    def fail(self, error: BaseException) -> None:
        assert isinstance(error, MillstreamError)
        self.code = error.code

    @property
    def value(self) -> str | None:
        (one,) = self.records
        return None if one is None else (one.record.value or b"").decode()

    @property
    def receipt(self) -> str:
        (one,) = self.records
        assert one is not None
        return one.receipt


def ask(house: House, count: int, wish: Receive = WISH, group: str = "g") -> list[Worker]:
    workers, asking = [Worker() for _ in range(count)], Asking(group, wish)
    for worker in workers:
        house.broker.work_turns.receive(worker, asking)
    house.scheduler.run()
    return workers


def ack(house: House, *workers: Worker, group: str | None = None) -> None:
    for worker in workers:
        house.broker.work_turns.ack(worker, worker.receipt, group)
    house.scheduler.run()


def test_each_gets_another_record_and_the_last_ones_none() -> None:
    house = house_of()
    publish(house, "a", "b", "c")
    workers = ask(house, 5)
    assert [one.value for one in workers] == ["a", "b", "c", None, None]
    assert {one.limited_by for one in workers} == {None}
    assert len({one.receipt for one in workers[:3]}) == 3


def test_acks_of_one_turn_have_their_own_results() -> None:
    house = house_of()
    publish(house, "a", "b", "c")
    first, second, third = ask(house, 3)
    ack(house, first, second, first)
    assert first.settled_as == ["acked", "receipt_stale"]
    assert second.settled_as == ["acked"]
    ack(house, third, group="another")
    assert third.settled_as == ["receipt_unknown"]
    pass_time(house, 6)
    assert values(receive(house)) == ["c"]


def test_more_workers_than_one_receive_gives() -> None:
    house = house_of(receive_records_max=2)
    publish(house, *"abcde")
    assert [one.value for one in ask(house, 5)] == list("abcde")


def test_large_records_are_dealt_out_all_the_same() -> None:
    house = house_of(receive_bytes_max=100)
    large = ["x" * 200, "y" * 200, "z" * 200]
    publish(house, *large)
    assert [one.value for one in ask(house, 4)] == [*large, None]


def test_those_who_ask_otherwise_are_apart() -> None:
    house = house_of()
    publish(house, "a", "b")
    others = Worker()
    house.broker.work_turns.receive(others, Asking("g", Receive(("nowhere",))))
    (mine,) = ask(house, 1)
    (of_another_group,) = ask(house, 1, group="h")
    assert others.code == "topic_unknown"
    assert (mine.value, of_another_group.value) == ("a", "a")


def test_the_limit_of_a_member_is_told_to_those_who_get_nothing() -> None:
    house = house_of(member_inflight_max=2)
    publish(house, "a", "b", "c")
    workers = ask(house, 3, WISH._replace(member="m"))
    assert [one.value for one in workers] == ["a", "b", None]
    assert workers[2].limited_by == "member"


def test_what_nobody_is_there_for_is_given_back() -> None:
    house = house_of()
    publish(house, "a", "b")
    gone, there, asking = Worker(is_there=False), Worker(), Asking("g", WISH)
    for worker in (gone, there):
        house.broker.work_turns.receive(worker, asking)
    house.scheduler.run()
    again = receive(house)
    assert values(again) == ["a"]
    assert again[0].deliveries == 1


def test_a_refused_append_is_told_to_all_and_the_records_come_again() -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> RefusingDisk:
        disks.append(RefusingDisk(disk))
        return disks[-1]

    house = local_house(through=through).start()  # type: ignore[arg-type]
    house.done(house.broker.topics.create("jobs", 1, {}))
    publish(house, "known", "a", "b")
    ack(house, *ask(house, 1))
    disks[0].is_full = True
    assert {one.code for one in ask(house, 2)} == {"disk_full"}
    disks[0].is_full = False
    first, second = ask(house, 2)
    assert (first.value, second.value) == ("a", "b")
    disks[0].is_full = True
    ack(house, first, second)
    disks[0].is_full = False
    ack(house, first, second)
    assert first.settled_as == second.settled_as == ["disk_full", "acked"]


def test_what_was_given_goes_when_the_worker_lets_go_of_it() -> None:
    """A cycle would keep it, and slow everything down that is made after it."""
    house = house_of()
    publish(house, "a", "b")
    ack(house, *ask(house, 1))
    gc.collect()
    gc.disable()
    try:
        workers = ask(house, 1)
        ack(house, *workers)
        workers.clear()
        left = [one for one in gc.get_objects() if isinstance(one, Polling | Received)]
    finally:
        gc.enable()
    assert left == []


def test_a_turn_that_fails_takes_nothing_of_the_next_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_of()
    publish(house, "a")
    turns = house.broker.work_turns
    first, second = Asking("g", WISH), Asking("h", WISH)
    with monkeypatch.context() as broken:
        broken.setattr(WorkTurns, "_receive", lambda *_: 1 // 0)
        for asking in (first, second):
            turns.receive(Worker(), asking)
        with pytest.raises(ZeroDivisionError):
            house.scheduler.run()
    workers = [Worker(), Worker()]
    for worker, asking in zip(workers, (first, second), strict=True):
        turns.receive(worker, asking)
    house.scheduler.run()
    assert [one.value for one in workers] == ["a", "a"]
