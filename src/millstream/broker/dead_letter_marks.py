"""Marks of dead letters that are gone: kept right while topics are purged, trimmed and deleted.

Marks of one topic are changed by one at a time. Each change is made from the marks that are there;
were one refused that another is built on, the other would bring the marks of the first to disk.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import structlog

from millstream.broker.dead_letter_view import DeadLetterView, Place
from millstream.broker.deadletters import is_dead_letter_topic
from millstream.engine.pending import Pending, follow
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.broker.views import Change
    from millstream.engine.protocol import Engine

# How many keys one append changes at the start: a megabyte or two.
CHANGES_MAX = 2_000


class DeadLetterMarks:
    __slots__ = ("_busy", "_engine", "around", "view")

    def __init__(self, engine: Engine, around: Surroundings) -> None:
        self._engine = engine
        self.around = around
        self.view = DeadLetterView()
        around.views.add(self.view)
        # Topics whose marks are being changed: done when the change is.
        self._busy: dict[str, Pending[None]] = {}
        around.topics.watch_deleted(self._topic_deleted)
        around.topics.watch_purged(self._topic_purged)

    # ---- looking

    def is_there(self, dlq: Topic) -> bool:
        """Whether it is still the same topic."""
        found = self.around.topics.by_name.get(dlq.name)
        return found is not None and found.uuid == dlq.uuid

    def left(self, dlq: Topic) -> int:
        """How many dead letters there are."""
        left = 0
        for number in range(dlq.partitions):
            start, end = self.around.reader.offsets(dlq.name, number)
            left += end - start - self.view.count(Place(dlq.uuid.bytes, number), start)
        return left

    # ---- changing

    def free(self, dlq: Topic) -> Generator[Pending[Any], Any, None]:
        """Wait until nobody else changes the marks of a topic."""
        while dlq.name in self._busy:
            yield self._busy[dlq.name]

    @contextmanager
    def changing(self, dlq: Topic) -> Iterator[None]:
        done = self._busy[dlq.name] = Pending[None]()
        try:
            yield
        finally:
            del self._busy[dlq.name]
            done.succeed(None)

    def tidy(self, dlq: Topic, number: int) -> Pending[None]:
        """Trim what is gone at the front of a partition, then forget its marks. A failure leaves
        the marks, and the next one tries again."""
        tidied = follow(self._tidy(dlq, number))
        tidied.then(_log_failure)
        return tidied

    def _tidy(self, dlq: Topic, number: int) -> Generator[Pending[Any], Any, None]:
        # Marks that are not on disk yet must not trim anything.
        yield from self.free(dlq)
        if not self.is_there(dlq):
            return
        place = Place(dlq.uuid.bytes, number)
        start, end = self.around.reader.offsets(dlq.name, number)
        first = min(self.view.first_left(place, start), end)
        with self.changing(dlq):
            if first > start:
                # First this, and the marks when it is on disk: else they would come back.
                yield self._engine.trim(PartitionId(dlq.name, number), first)
            changes = self.view.before(place, max(first, start))
            if changes:
                yield self.around.views.change(self.view, changes)

    def _topic_purged(self, topic: Topic) -> None:
        if is_dead_letter_topic(topic.name):
            for number in range(topic.partitions):
                self.tidy(topic, number)

    def _topic_deleted(self, topic: Topic) -> None:
        if is_dead_letter_topic(topic.name):
            follow(self._forget()).then(_log_failure)

    # ---- the start

    def start(self) -> Generator[Pending[Any], Any, None]:
        """After topics: no mark may lie past the end of what recovery has found. A topic in a
        weaker mode may have lost its tail, and will give those offsets to new records."""
        topics = self.around.topics.by_name.values()
        changes: list[Change] = []
        for topic in topics:
            for number in range(topic.partitions):
                place = Place(topic.uuid.bytes, number)
                start, end = self.around.reader.offsets(topic.name, number)
                changes += self.view.before(place, start) + self.view.past(place, end)
        yield from self._change(changes)
        yield from self._forget()

    def _forget(self) -> Generator[Pending[Any], Any, None]:
        """The marks of topics that are not there any more."""
        uuids = {topic.uuid.bytes for topic in self.around.topics.by_name.values()}
        changes: list[Change] = []
        for place in self.view.places():
            if place.uuid not in uuids:
                changes += self.view.past(place, 0)
        yield from self._change(changes)

    def _change(self, changes: Sequence[Change]) -> Generator[Pending[Any], Any, None]:
        for first in range(0, len(changes), CHANGES_MAX):
            yield self.around.views.change(self.view, changes[first : first + CHANGES_MAX])


def _log_failure(done: Pending[None]) -> None:
    if done.error is not None:
        structlog.get_logger("millstream.broker").warning(
            "dead letters that are gone were not trimmed; later changes try again",
            error=str(done.error),
        )
