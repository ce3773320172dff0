"""What becomes of a receive, and of the records that it took, when some cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from broker.leasing import house_of, outcome, publish, receive, settle, start, values
from broker.making import House
from millstream.broker.delivery_values import Receive, Received
from millstream.broker.polling import Polling
from millstream.broker.reading import Reader
from millstream.engine.pending import Pending
from millstream.errors import StorageFailed


@contextmanager
def unreadable(topic: str, partition: int = 0) -> Iterator[None]:
    real = Reader.fetch

    def fetch(self: Reader, name: str, number: int, *more: Any) -> Pending[Any]:
        if (name, number) == (topic, partition):
            return Pending.failed(StorageFailed("input/output error"))
        return real(self, name, number, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "fetch", fetch)
        yield


@contextmanager
def slow_reads() -> Iterator[list[Callable[[], None]]]:
    """Each read waits until it is called, as one from a cold disk does."""
    real = Reader.fetch
    waiting: list[Callable[[], None]] = []

    def fetch(self: Reader, *asked: Any) -> Pending[Any]:
        pending: Pending[Any] = Pending()
        found = real(self, *asked)
        waiting.append(lambda: pending.succeed(found.result()))
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "fetch", fetch)
        yield waiting


def receive_both(house: House) -> Polling[Received]:
    return house.broker.delivery.receive("g", Receive(("jobs", "more"), count_max=10))


def test_what_cannot_be_read_in_one_topic_does_not_keep_back_those_of_another() -> None:
    house = house_of()
    house.done(house.broker.topics.create("more", 1, {}))
    publish(house, "a")
    publish(house, "b", topic="more")
    with unreadable("more"):
        (record,) = house.done(receive_both(house).pending).records
        assert values([record]) == ["a"]
        assert outcome(house, "ack", record) == "acked"
        assert isinstance(house.failed(receive_both(house).pending), StorageFailed)
    assert values(house.done(receive_both(house).pending).records) == ["b"]


def test_what_came_back_and_cannot_be_read_goes_out_when_it_can() -> None:
    house = house_of(2)
    publish(house, *"ab", partition=0)
    publish(house, *"yz", partition=1)
    settle(house, "release", *receive(house))
    with unreadable("jobs", 1):
        # Each time another partition is first.
        found = [house.broker.delivery.receive("g", Receive(("jobs",), None)) for _ in range(2)]
        house.scheduler.run()
        good = [one for one in found if one.pending.error is None]
        assert [values(one.pending.result().records) for one in good] == [["a"]]
    assert sorted(values(receive(house))) == ["b", "y", "z"]


def test_two_receives_of_a_member_that_read_at_once_have_no_more_than_one_may() -> None:
    house = house_of(2, member_inflight_max=3)
    publish(house, *"abc", partition=0)
    publish(house, *"xyz", partition=1)
    with slow_reads() as waiting:
        first = start(house, member="w", count_max=2, wait_ms=1000)
        second = start(house, member="w", count_max=2, wait_ms=1000)
        house.scheduler.run()
        while waiting:
            waiting.pop(0)()
            house.scheduler.run()
        found = [*house.done(first.pending).records, *house.done(second.pending).records]
    assert len(found) == 3
    settle(house, "ack", *found)
    assert len(receive(house, member="w")) == 3
