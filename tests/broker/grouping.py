"""Members of groups for tests, on a loop that the test turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from broker.making import House, memory_house, options
from millstream.broker.broker import BrokerOptions
from millstream.broker.consuming import ConsumingOptions
from millstream.broker.group_values import Commit, Committed, Join, Poll, Polled, Standing
from millstream.broker.joining import GroupOptions
from millstream.broker.polling import Polling
from millstream.broker.publishing import Outgoing
from millstream.broker.reading import Fetched, Reader
from millstream.engine.pending import Pending
from millstream.errors import LogDamaged, MillstreamError
from millstream.log.partition import PartitionId


def group_options(consuming: ConsumingOptions | None = None, **changes: Any) -> BrokerOptions:
    base = options()
    return BrokerOptions(
        base.topic_defaults,
        base.topic_limits,
        consuming=consuming or ConsumingOptions(group=GroupOptions(**changes)),
    )


def house_with(topic: str = "orders", partitions: int = 4, **changes: Any) -> House:
    house = memory_house(group_options(**changes))
    house.done(house.broker.topics.create(topic, partitions))
    return house


def publish(house: House, *values: str, topic: str = "orders", partition: int = 0) -> None:
    """A value is the record's own name, so that a test can tell them apart."""
    records = [Outgoing(None, value.encode(), partition=partition) for value in values]
    house.done(house.broker.publisher.publish(topic, records))


@dataclass
class Consumer:
    """A member that does as clients should: it uses the newest generation it heard."""

    house: House
    group: str = "g"
    topics: tuple[str, ...] = ("orders",)
    standing: Standing = field(init=False)
    number: int | None = None

    def join(self, **wishes: Any) -> Consumer:
        wishes.setdefault("auto_offset_reset", "earliest")
        joining = self.house.broker.groups.join(self.group, Join(self.topics, **wishes))
        self.standing = self.house.done(joining).standing
        return self

    @property
    def id(self) -> str:
        return self.standing.member_id

    @property
    def numbers(self) -> list[int]:
        return [one.number for one in self.standing.assignment]

    def heartbeat(self, generation: int | None = None) -> Standing:
        generation = self.standing.generation if generation is None else generation
        beat = self.house.broker.groups.heartbeat(self.group, self.id, generation)
        self.standing = self.house.done(beat)
        return self.standing

    def start_poll(self, **how: Any) -> Polling[Polled]:
        return self.house.broker.groups.poll(
            self.group, self.id, self.standing.generation, Poll(**how)
        )

    def hear(self, polled: Polled) -> list[str]:
        self.standing = polled.standing
        self.number = polled.number
        return [(record.value or b"").decode() for part in polled.parts for record in part.records]

    def poll(self, **how: Any) -> list[str]:
        """The values that came at once."""
        how.setdefault("wait_ms", 0)
        return self.hear(self.house.done(self.start_poll(**how).pending))

    def commit(self, offset: int, partition: int = 0, **more: Any) -> list[Committed]:
        topic = more.pop("topic", self.topics[0])
        commits = [Commit(topic, partition, offset, more.pop("metadata", ""))]
        generation = more.pop("generation", self.standing.generation)
        groups = self.house.broker.groups
        return self.house.done(groups.commit(self.group, commits, self.id, generation))

    def leave(self) -> None:
        self.house.done(self.house.broker.groups.leave(self.group, self.id))


def make_unreadable(monkeypatch: pytest.MonkeyPatch, *partitions: int) -> None:
    """Reading these fails until the patch is undone."""
    fetch = Reader.fetch

    def fail(self: Reader, topic: str, partition: int, *how: int) -> Pending[Fetched]:
        if partition in partitions:
            return Pending.failed(LogDamaged(f"partition {partition} is damaged"))
        return fetch(self, topic, partition, *how)

    monkeypatch.setattr(Reader, "fetch", fail)


def committed(house: House, partition: int = 0, group: str = "g") -> int | None:
    found = house.done(house.broker.group_offsets.committed(group))
    return {one.partition: one.offset for one in found}.get(partition)


def settle(*consumers: Consumer) -> None:
    """Heartbeats until nothing moves any more."""
    for _ in range(3):
        for one in consumers:
            one.heartbeat()


def owned(*consumers: Consumer) -> set[PartitionId]:
    """All that they have together; nothing twice."""
    ids = [id for one in consumers for id in one.standing.assignment]
    assert len(ids) == len(set(ids))
    return set(ids)


def refused(house: House, pending: object, error: type[MillstreamError]) -> MillstreamError:
    found = house.failed(pending)  # type: ignore[arg-type]
    assert isinstance(found, error), found
    return found
