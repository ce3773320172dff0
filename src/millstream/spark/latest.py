"""Where the partitions of a stream end, looked up when that is old.

Spark asks a stream for its latest offsets about ninety times a second. The broker is asked at most
twenty times, and less often the longer it takes to answer, so that an idle stream costs it next to
nothing. What it answers counts only when the topics were the same ones before and after, and what
it does not know counts as deleted only when it does not know it a while later either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from millstream.spark.kafka_client import GONE_S, Kafka
from millstream.spark.positions import LATEST, Part, Position

# Between two looks at the broker; and so many times as long as a look takes.
POLL_S = 0.05
POLL_S_MAX = 1.0
POLL_PAUSE_FACTOR = 30
# Between two looks for new topics and partitions, while nothing else happens.
TOPICS_S = 1.0


class Known(NamedTuple):
    """What there is: partitions, and the ids of their topics."""

    parts: frozenset[Part]
    ids: Mapping[str, str]


class Asking(Protocol):
    """Who knows the broker, and what is read of it."""

    @property
    def kafka(self) -> Kafka: ...

    def known(self, *, is_start: bool) -> Known: ...


class Latest:
    """The ends of all partitions, looked up when they are old."""

    def __init__(
        self, driver: Asking, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._sleep = sleep
        self.position: Position | None = None
        self._is_fixed = False
        self._known: Known | None = None
        self._next_s = self._next_topics_s = 0.0
        # Looked for twice, and not there.
        self._gone: set[Part] = set()

    def get(self, start: Position) -> Position:
        position = self._fresh()
        missing = start.offsets.keys() - position.offsets.keys()
        self._gone &= missing
        if missing <= self._gone:
            return position
        self._sleep(GONE_S)
        self._learn()
        again = self._look(self._clock())
        self._gone = missing - again.offsets.keys()
        if self._is_fixed:
            # What was seen at first stays as it was, and what came since does not count.
            found = {part: again.offsets[part] for part in missing & again.offsets.keys()}
            topics = {topic for topic, _ in found}
            ids = {topic: id for topic, id in again.ids.items() if topic in topics}
            again = Position({**found, **position.offsets}, {**ids, **position.ids})
        self.position = again
        return again

    def _fresh(self) -> Position:
        now = self._clock()
        if self.position is not None and (self._is_fixed or now < self._next_s):
            return self.position
        position = self._look(now)
        took_s = self._clock() - now
        self._next_s = now + min(max(POLL_S, POLL_PAUSE_FACTOR * took_s), POLL_S_MAX)
        self.position = position
        return position

    def fix(self) -> None:
        self._next_s = self._next_topics_s = 0.0
        self._fresh()
        self._is_fixed = True

    def _look(self, now: float) -> Position:
        if self._known is None or now >= self._next_topics_s:
            self._learn()
        while True:
            assert self._known is not None
            before = self._known
            offsets = self._ends(before)
            is_new = self.position is None or offsets != self.position.offsets
            if not is_new:
                return Position(offsets, before.ids)
            # What is handed out is of the topics that were there before and after.
            self._learn()
            if self._known == before:
                return Position(offsets, before.ids)

    def _ends(self, known: Known) -> dict[Part, int]:
        asked = dict.fromkeys(known.parts, LATEST)
        found = self._driver.kafka.list_offsets(asked) if asked else {}
        return {part: offset for part, offset in found.items() if offset is not None}

    def _learn(self) -> None:
        now = self._clock()
        self._known = self._driver.known(is_start=False)
        took_s = self._clock() - now
        self._next_topics_s = now + max(TOPICS_S, 100 * took_s)
