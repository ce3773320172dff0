"""Receives that wait, and what happens in the very moment in which they begin to."""

from __future__ import annotations

import pytest

from broker.leasing import (
    delivery_options,
    house_of,
    pass_time,
    publish,
    receive,
    settle,
    start,
    values,
)
from broker.making import House, local_house
from faults.lease_script import pass_on
from faults.simulated_disk import SimulatedDisk
from millstream.broker.delivery_values import Received, Settle
from millstream.broker.granting import Granting, Steps, Taking
from millstream.broker.polling import Polling
from millstream.broker.publishing import Outgoing
from millstream.broker.reading import Reader
from millstream.broker.shares import Share
from millstream.engine.pending import Pending


def durable_house(settings: dict[str, object] | None = None) -> House:
    house = local_house(None, delivery_options()).start()
    house.done(house.broker.topics.create("jobs", 1, settings or {}))
    return house


def got(receiving: Polling[Received]) -> list[str] | None:
    return values(receiving.pending.result().records) if receiving.pending.is_done else None


@pytest.mark.parametrize("turns", range(12))
def test_a_record_that_comes_while_a_held_one_is_noted_is_given_out_at_once(turns: int) -> None:
    house = durable_house({"delivery_order": "key"})
    publish(house, "k1", key="hot")
    receive(house, visibility_ms=100_000)
    publish(house, "k2", key="hot")
    receiving = start(house, wait_ms=20_000)
    for _ in range(turns):
        house.scheduler.turn()
    house.broker.publisher.publish("jobs", [Outgoing(b"cold", b"c", partition=0)])
    house.scheduler.run()
    pass_time(house, 0.02)
    assert got(receiving) == ["c"]


def test_a_key_that_is_freed_while_its_next_record_is_noted_as_held_goes_on_at_once() -> None:
    house = durable_house({"delivery_order": "key"})
    publish(house, "k1", key="hot")
    (record,) = receive(house)
    publish(house, "k2", key="hot")
    receiving = start(house, wait_ms=20_000)
    house.broker.delivery.settle([Settle("ack", record.receipt)])
    house.scheduler.run()
    pass_time(house, 0.02)
    assert got(receiving) == ["k2"]


def test_a_record_that_comes_during_a_slow_read_of_what_retention_took_is_given_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_of()
    publish(house, "a")
    receive(house, visibility_ms=1000)
    pass_time(house, 1.1)
    house.done(house.engine.trim(house.broker.topics.partition_of("jobs", 0), 1))
    real, slow = Reader.fetch, Pending[None]()

    def fetch(self: Reader, *asked: object) -> Pending[object]:
        pending: Pending[object] = Pending()
        slow.then(lambda _: pass_on(_failing(real, self, asked), pending))
        return pending

    monkeypatch.setattr(Reader, "fetch", fetch)
    receiving = start(house, wait_ms=20_000)
    publish(house, "b")
    slow.succeed(None)
    house.scheduler.run()
    pass_time(house, 0.02)
    assert got(receiving) == ["b"]


def _failing(real: object, reader: Reader, asked: tuple[object, ...]) -> Pending[object]:
    try:
        return real(reader, *asked)  # type: ignore[operator, no-any-return]
    except Exception as error:  # noqa: BLE001  as a slow read fails
        return Pending.failed(error)


def test_a_receive_that_waits_for_nothing_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not to look again and again because it once had to wait for the disk."""
    house = durable_house({"delivery_order": "key"})
    publish(house, "k1", key="hot")
    receive(house, visibility_ms=100_000)
    publish(house, "k2", key="hot")
    start(house, wait_ms=20_000)
    pass_time(house, 1)
    looks: list[object] = []
    take = Granting.take

    def counted(granting: Granting, share: Share, taking: Taking) -> Steps:
        looks.append(taking)
        return take(granting, share, taking)

    monkeypatch.setattr(Granting, "take", counted)
    pass_time(house, 5)
    assert not looks


@pytest.mark.parametrize("waiting", [2, 5])
def test_all_receives_of_a_member_that_wait_for_its_limit_get_what_becomes_free(
    waiting: int,
) -> None:
    house = house_of(member_inflight_max=5)
    publish(house, *"abcdefghij")
    first = receive(house, member="w", count_max=5)
    receivings = [start(house, member="w", count_max=1, wait_ms=5000) for _ in range(waiting)]
    house.scheduler.run()
    settle(house, "ack", *first)
    house.scheduler.run()
    assert [got(one) for one in receivings] == [[value] for value in "fghij"[:waiting]]


def test_a_group_that_begins_at_the_end_has_all_that_came_after_also_after_a_crash() -> None:
    house = durable_house()
    publish(house, "old")
    assert receive(house, start="latest") == []
    publish(house, "new")
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    again = local_house(
        disk.crash("nothing"), house.options, now_ms=house.scheduler.clock.now_ms
    ).start()
    assert values(receive(again, start="latest")) == ["new"]
