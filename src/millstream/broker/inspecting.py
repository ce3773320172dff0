"""Batches of Kafka's clients that are opened, because their topic's setting `inspect` asks for it:
their records may have a lane, or be for later, and say so in headers.

    ms-lane         one of the five lanes, or its number
    ms-delay        milliseconds, or a text such as `30s`
    ms-deliver-at   a time in milliseconds since 1970, or as ISO 8601

These headers are taken out: a record that is read and published again must not wait again. The
records are published like those of HTTP, in batches of the broker's own making.

Batches of a partition appear in it in the order in which they came, whether they were opened or
not. One whose records are of several lanes becomes a batch for each of them, so that records keep
their order within a lane. While a topic's first record of another lane than normal waits for that
to be noted, what comes after it waits too.

Sequences of idempotent producers are not in the batches that are stored. They are checked when a
batch comes (`inspected_producers.py`); what is repeated is known by that, or by an idempotency key.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias

from millstream.broker.inspected_producers import ON_ITS_WAY, InspectedProducers
from millstream.broker.outgoing import Outgoing
from millstream.engine.pending import Pending
from millstream.errors import BatchRecordInvalid, MillstreamError
from millstream.log import batch as batches
from millstream.log.producers import has_sequence
from millstream.wire.lanes import LANE_HEADER, NORMAL, lane_of_word
from millstream.wire.times import delay_ms_of, time_ms_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.outgoing import Published
    from millstream.broker.publishing import Publisher
    from millstream.broker.topics import Topic, Topics
    from millstream.clock import Clock
    from millstream.log.batch import Data, Header, Record

    # Stores a batch; its offset.
    Store: TypeAlias = Callable[[], Pending[int]]

DELAY_HEADER = "ms-delay"
TIME_HEADER = "ms-deliver-at"
HEADERS = frozenset((LANE_HEADER, DELAY_HEADER, TIME_HEADER))
# The answer when all records are for later: then no offset is known.
NO_OFFSET = -1


class Inspector:
    """Batches of topics that are inspected."""

    __slots__ = ("_clock", "_lines", "_producers", "_publisher", "_topics")

    def __init__(self, publisher: Publisher, topics: Topics, clock: Clock) -> None:
        self._publisher = publisher
        self._topics = topics
        self._clock = clock
        self._producers = InspectedProducers()
        # By topic, those that wait until it may have records of all lanes.
        self._lines: dict[str, deque[tuple[Store, Pending[int]]]] = {}
        topics.watch_deleted(self._forget)

    def append(
        self, topic: Topic, number: int, data: Data, header: Header, closed: Store
    ) -> Pending[int]:
        """The offset of the first record that is not for later. `closed` stores the batch as it
        is, when nothing in it asks for anything. Raises for what is refused at once."""
        place = (topic.uuid.bytes, number)
        known = self._producers.check(place, header) if has_sequence(header) else None
        if known is not None and known != ON_ITS_WAY:
            return Pending.of(known)
        records = batches.decode(data)
        is_asking = any(name in HEADERS for one in records for name, _ in one.headers)
        name, lanes = topic.name, False
        if is_asking or has_sequence(header):
            asked = [_outgoing(record, number) for record in records]
            lanes = any(one.lane != NORMAL for one in asked)
            key = _key(header, number) if has_sequence(header) else None

            def store() -> Pending[int]:
                return self._publish(name, asked, key)
        else:

            def store() -> Pending[int]:
                # What was gathered in this turn came first.
                self._publisher.submit(name, number)
                return closed()

        stored = self._in_line(topic, store, needs_lanes=lanes)
        if has_sequence(header) and known is None and stored.error is None:
            self._producers.note(place, header, self._clock.wall_ms())
            stored.then(lambda one: self._settled(place, header, one))
        return stored

    def _settled(self, place: tuple[bytes, int], header: Header, stored: Pending[int]) -> None:
        # One that failed stays as it is: when it is repeated its key is looked for, and not found.
        if stored.error is None:
            self._producers.settled(place, header, stored.result())

    def _forget(self, topic: Topic) -> None:
        self._producers.forget(topic.uuid.bytes, topic.partitions)

    def _in_line(self, topic: Topic, store: Store, *, needs_lanes: bool) -> Pending[int]:
        line = self._lines.get(topic.name)
        if line is None:
            if not needs_lanes or topic.uses_lanes:
                return store()
            line = self._lines[topic.name] = deque()
            self._topics.use_lanes(topic.name).then(lambda done: self._go_on(topic.name, done))
        stored: Pending[int] = Pending()
        line.append((store, stored))
        return stored

    def _go_on(self, name: str, noted: Pending[Topic]) -> None:
        for store, stored in self._lines.pop(name):
            if noted.error is not None:
                stored.fail(noted.error)
                continue
            try:
                _pass(store(), stored)
            except MillstreamError as error:
                stored.fail(error)

    def _publish(self, name: str, asked: list[Outgoing], key: str | None) -> Pending[int]:
        done: Pending[int] = Pending()

        def published(one: Pending[Published]) -> None:
            if one.error is not None:
                done.fail(one.error)
                return
            result = one.result()
            now = (at for at in range(len(result.placed)) if at not in result.scheduled)
            first = next(now, None)
            done.succeed(NO_OFFSET if first is None else result.placed[first].offset)

        self._publisher.publish(name, asked, idempotency_key=key).then(published)
        return done


def _key(header: Header, number: int) -> str:
    return f"kafka-{header.producer_id}-{header.producer_epoch}-{number}-{header.base_sequence}"


def _pass(source: Pending[int], target: Pending[int]) -> None:
    def done(one: Pending[int]) -> None:
        if one.error is not None:
            target.fail(one.error)
        else:
            target.succeed(one.result())

    source.then(done)


def _outgoing(record: Record, number: int) -> Outgoing:
    lane, delay_ms, due_ms = NORMAL, None, None
    kept = []
    for name, value in record.headers:
        if name not in HEADERS:
            kept.append((name, value))
            continue
        word = _word(name, value)
        if name == LANE_HEADER:
            lane = lane_of_word(word)
        elif name == DELAY_HEADER:
            delay_ms = delay_ms_of(word)
        else:
            due_ms = time_ms_of(word)
    return Outgoing(
        record.key,
        record.value,
        tuple(kept),
        max(record.timestamp, 0),
        number,
        lane,
        delay_ms,
        due_ms,
    )


def _word(name: str, value: bytes | None) -> str:
    try:
        return (value or b"").decode()
    except UnicodeDecodeError:
        raise BatchRecordInvalid(f"the header {name} of a record is not a text") from None
