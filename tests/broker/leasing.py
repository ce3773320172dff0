"""Workers for tests, on a loop that the test turns."""

from __future__ import annotations

from typing import Any

from broker.making import House, memory_house, options
from millstream.broker.broker import BrokerOptions
from millstream.broker.delivery_values import (
    Delivered,
    DeliveryOptions,
    Receive,
    Received,
    Settle,
    Settled,
)
from millstream.broker.polling import Polling
from millstream.broker.publishing import Outgoing
from millstream.errors import MillstreamError


def delivery_options(**changes: Any) -> BrokerOptions:
    base = options()
    return BrokerOptions(
        base.topic_defaults, base.topic_limits, delivery=DeliveryOptions(**changes)
    )


def house_of(
    partitions: int = 1, settings: dict[str, object] | None = None, **changes: Any
) -> House:
    house = memory_house(delivery_options(**changes))
    house.done(house.broker.topics.create("jobs", partitions, settings or {}))
    return house


def publish(
    house: House, *values: str, topic: str = "jobs", partition: int = 0, key: str | None = None
) -> None:
    raw = key.encode() if key is not None else None
    records = [Outgoing(raw, value.encode(), partition=partition) for value in values]
    house.done(house.broker.publisher.publish(topic, records))


def start(house: House, group: str = "g", topic: str = "jobs", **how: Any) -> Polling[Received]:
    how.setdefault("count_max", 10)
    return house.broker.delivery.receive(group, Receive((topic,), **how))


def receive(house: House, group: str = "g", topic: str = "jobs", **how: Any) -> list[Delivered]:
    """What there is at once."""
    return house.done(start(house, group, topic, **how).pending).records


def values(records: list[Delivered]) -> list[str]:
    return [(one.record.value or b"").decode() for one in records]


def settle(house: House, kind: Any, *records: Delivered, **how: Any) -> list[Settled]:
    settles = [Settle(kind, one.receipt, **how) for one in records]
    return house.done(house.broker.delivery.settle(settles))


def outcome(house: House, kind: Any, record: Delivered, **how: Any) -> str:
    """What became of it, or the code of its error."""
    (settled,) = settle(house, kind, record, **how)
    if settled.error is not None:
        assert isinstance(settled.error, MillstreamError)
        return settled.error.code
    assert settled.outcome is not None
    return settled.outcome


def pass_time(house: House, seconds: float) -> None:
    house.scheduler.advance(seconds)
    house.scheduler.run()


def committed(house: House, partition: int = 0, group: str = "g") -> int | None:
    found = house.done(house.broker.group_offsets.committed(group))
    return {one.partition: one.offset for one in found}.get(partition)
