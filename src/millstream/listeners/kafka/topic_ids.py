"""Topics by the ids that newer messages name them by."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from millstream.broker.topics import Topic, Topics
    from millstream.wire.kafka.group_beats import Partitions


class TopicIds:
    __slots__ = ("_topics",)

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    def find(self, id: bytes) -> Topic | None:
        return self._topics.by_id.get(id)

    def partitions(self, named: Partitions) -> list[PartitionId]:
        """Those of topics that are there."""
        found = []
        for id, numbers in named:
            topic = self.find(id)
            if topic is not None:
                found += [PartitionId(topic.name, number) for number in numbers]
        return found

    def named(self, ids: Iterable[PartitionId]) -> list[tuple[bytes, str, Sequence[int]]]:
        """By topic, with its id."""
        found: list[tuple[bytes, str, Sequence[int]]] = []
        for name, ones in groupby(sorted(ids), lambda one: one.topic):
            topic = self._topics.by_name.get(name)
            if topic is not None:
                found.append((topic.uuid.bytes, name, [one.number for one in ones]))
        return found
