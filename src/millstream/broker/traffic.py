"""How much goes through each topic, in plain numbers that the metrics page reads."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.broker.topics import Topic, Topics


@dataclass(slots=True)
class TopicTraffic:
    messages_in: int = 0
    bytes_in: int = 0
    # Records whose append was refused or failed.
    messages_failed: int = 0
    messages_out: int = 0
    bytes_out: int = 0
    # Publishes that were known by their idempotency key.
    repeats: int = 0

    def add(self, other: TopicTraffic) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class Traffic:
    """By topic, for as long as the topic is there."""

    by_topic: dict[str, TopicTraffic] = field(default_factory=dict)
    # Of topics that are gone, so that totals never fall.
    gone: TopicTraffic = field(default_factory=TopicTraffic)

    def follow(self, topics: Topics) -> None:
        topics.watch_deleted(self._deleted)

    def of(self, topic: str) -> TopicTraffic:
        found = self.by_topic.get(topic)
        if found is None:
            found = self.by_topic[topic] = TopicTraffic()
        return found

    def total(self) -> TopicTraffic:
        total = TopicTraffic()
        for one in (self.gone, *self.by_topic.values()):
            total.add(one)
        return total

    def _deleted(self, topic: Topic) -> None:
        last = self.by_topic.pop(topic.name, None)
        if last is not None:
            self.gone.add(last)
