"""A topic of append times: every batch in it says so, whichever way it came."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from broker.burying import bury, house_of, redrive
from broker.making import memory_house
from millstream.broker.named_schedules import Plan
from millstream.broker.publishing import Outgoing
from millstream.log import batch as batches
from millstream.log.batch import Header
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from broker.making import House

APPEND = {"timestamps": "append"}
LONG_AGO_MS = 5


@pytest.fixture
def house() -> House:
    house = memory_house()
    house.done(house.broker.topics.create("t", 2, APPEND))
    return house


def headers(house: House, topic: str = "t") -> list[Header]:
    found: list[Header] = []
    for number in range(house.broker.topics.get(topic).partitions):
        chunk = house.done(house.engine.read(PartitionId(topic, number), 0, 1 << 20))
        found += [header for _, header in batches.walk(chunk.data)]
    return found


def advance(house: House, seconds: float) -> None:
    house.scheduler.advance(seconds)
    house.scheduler.run()


def late(value: bytes, **more: Any) -> Outgoing:
    return Outgoing(None, value, (), LONG_AGO_MS)._replace(**more)


def require_stamped(found: list[Header], now_ms: int) -> None:
    assert found
    assert {(one.is_append_time, one.max_timestamp) for one in found} == {(True, now_ms)}


def test_what_is_published(house: House) -> None:
    publisher, now_ms = house.broker.publisher, house.scheduler.clock.now_ms
    house.done(publisher.publish_one("t", None, b"one", (), LONG_AGO_MS))
    house.done(publisher.publish("t", [late(b"two", partition=0)]))
    house.done(publisher.publish("t", [late(b"%d" % n, partition=n) for n in range(2)]))
    house.done(publisher.publish("t", [late(b"again")], idempotency_key="k"))
    require_stamped(headers(house), now_ms)


def test_what_is_scheduled_and_comes_due(house: House) -> None:
    house.done(house.broker.publisher.publish("t", [late(b"a", delay_ms=1000)]))
    assert headers(house) == []
    advance(house, 2)
    [header] = headers(house)
    assert header.is_append_time
    assert header.max_timestamp > LONG_AGO_MS


def test_what_a_named_schedule_publishes(house: House) -> None:
    plan = Plan(name="n", topic="t", every_ms=1000, value=b"v")
    house.done(house.broker.named_schedules.put(plan))
    advance(house, 1.5)
    assert [header.is_append_time for header in headers(house)] == [True]


def test_what_is_put_back() -> None:
    house = house_of()
    bury(house, "a", "b")
    house.done(house.broker.topics.alter("orders", APPEND))
    before = len(headers(house, "orders"))
    redrive(house)
    assert [header.is_append_time for header in headers(house, "orders")[before:]] == [True]


def test_a_topic_of_its_publishers_times_keeps_them(house: House) -> None:
    house.done(house.broker.topics.alter("t", {"timestamps": "create"}))
    house.done(house.broker.publisher.publish("t", [late(b"a")]))
    [header] = headers(house)
    assert (header.is_append_time, header.max_timestamp) == (False, LONG_AGO_MS)
