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
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from millstream.broker.idempotency import mark_key
from millstream.broker.inspected_producers import FAILED, ON_ITS_WAY, InspectedProducers
from millstream.broker.outgoing import Outgoing
from millstream.engine.pending import Pending
from millstream.errors import BatchRecordInvalid, MillstreamError
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.log.producers import Producers, has_sequence
from millstream.log.store import topic_unknown
from millstream.wire.lanes import LANE_HEADER, NORMAL, lane_of_word
from millstream.wire.times import delay_ms_of, time_ms_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.idempotency import Idempotency
    from millstream.broker.outgoing import Published
    from millstream.broker.publishing import Publisher
    from millstream.broker.topics import Topic, Topics
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
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

    __slots__ = (
        "_clock",
        "_closed",
        "_engine",
        "_idempotency",
        "_lines",
        "_producers",
        "_publisher",
        "_topics",
    )

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        topics: Topics,
        idempotency: Idempotency,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._idempotency = idempotency
        self._publisher = publisher
        self._topics = topics
        self._clock = clock
        self._producers = InspectedProducers()
        # By topic, partition and producer, the last batch that is on its way as it is.
        self._closed: dict[tuple[str, int, int], Pending[int]] = {}
        # By UUID of a topic, those that wait until it may have records of all lanes.
        self._lines: dict[bytes, deque[tuple[Store, Pending[int]]]] = {}
        topics.watch_deleted(self._forget)

    def minds(self, topic: Topic, number: int, header: Header) -> bool:
        """Whether a batch must pass here though its topic is not inspected any more."""
        uuid = topic.uuid.bytes
        return uuid in self._lines or (
            self._producers.of((uuid, number), header.producer_id) is not None
        )

    def append(
        self, topic: Topic, number: int, data: Data, header: Header, closed: Store
    ) -> Pending[int]:
        """The offset of the first record that is not for later. `closed` stores the batch as it
        is, when nothing in it asks for anything. Raises for what is refused at once."""
        known = None
        if has_sequence(header):
            settling = self._settling(topic, number, header)
            if settling is not None:
                return _after(settling, lambda: self.append(topic, number, data, header, closed))
            known = self._known(topic, number, header)
            if known is not None and known not in (ON_ITS_WAY, FAILED):
                return Pending.of(known)
            if known is None and not topic.settings.inspect:
                self._hand_over(topic, number, header.producer_id)
        is_open = topic.settings.inspect or known is not None
        records = batches.decode(data) if is_open else []
        is_asking = any(name in HEADERS for one in records for name, _ in one.headers)
        lanes = False
        if is_asking or (is_open and has_sequence(header)):
            asked = [_outgoing(record, number) for record in records]
            lanes = any(one.lane != NORMAL for one in asked)
            key, old = None, []
            if has_sequence(header):
                key = _key(header, number, header.producer_epoch, header.base_sequence)
                if known is None:
                    gone = self._producers.falling_out((topic.uuid.bytes, number), header)
                    old = [mark_key(topic, _key(header, number, *one)) for one in gone]

            def store() -> Pending[int]:
                return self._publish(topic, asked, key, old)
        else:

            def store() -> Pending[int]:
                # What was gathered in this turn came first.
                self._publisher.submit(topic.name, number)
                return closed()

        stored = self._in_line(topic, store, needs_lanes=lanes)
        if is_open and has_sequence(header) and known != ON_ITS_WAY and stored.error is None:
            self._watch(topic, number, header, stored, is_new=known is None)
        return stored

    def closed(self, name: str, number: int, header: Header, stored: Pending[int]) -> None:
        """Told of a batch that is on its way to the log as it is."""
        who = (name, number, header.producer_id)
        self._closed[who] = stored

        def done(_: Pending[int]) -> None:
            if self._closed.get(who) is stored:
                del self._closed[who]

        stored.then(done)

    def _settling(self, topic: Topic, number: int, header: Header) -> Pending[None] | None:
        """The wait for the last batch of a producer that went to the log closed: before that is
        stored, the log cannot say what it knows of the producer."""
        last = self._closed.get((topic.name, number, header.producer_id))
        if last is None or not topic.settings.inspect:
            return None
        settled: Pending[None] = Pending()
        last.then(lambda _: settled.succeed(None))
        return settled

    def _known(self, topic: Topic, number: int, header: Header) -> int | None:
        """As `InspectedProducers.check`, with what the log knows of one that is not known here."""
        place, id = (topic.uuid.bytes, number), PartitionId(topic.name, number)
        if topic.settings.inspect and self._producers.of(place, header.producer_id) is None:
            before = self._engine.producer(id, header.producer_id)
            if before is not None:
                alone = Producers()
                alone.put(header.producer_id, before)
                # Raises, and then it stays the log's: a batch of it may be on its way there.
                alone.check(header)
                self._engine.set_producer(id, header.producer_id, None)
                self._producers.put(place, header.producer_id, before)
        return self._producers.check(place, header)

    def _hand_over(self, topic: Topic, number: int, producer_id: int) -> None:
        """From now on its sequences are checked by the log, as its batches stay closed."""
        known = self._producers.take((topic.uuid.bytes, number), producer_id)
        if known is not None:
            self._engine.set_producer(PartitionId(topic.name, number), producer_id, known)

    def _watch(
        self, topic: Topic, number: int, header: Header, stored: Pending[int], *, is_new: bool
    ) -> None:
        place = (topic.uuid.bytes, number)
        if is_new:
            self._producers.note(place, header, self._clock.wall_ms())
        else:
            self._producers.settled(place, header, ON_ITS_WAY)

        def settled(one: Pending[int]) -> None:
            if one.error is None:
                self._producers.settled(place, header, one.result())
                return
            self._producers.failed(place, header)
            if self._producers.of(place, header.producer_id) is None:
                # Handed over meanwhile: what the log was told of it is not true.
                with suppress(MillstreamError):
                    id = PartitionId(topic.name, number)
                    self._engine.set_producer(id, header.producer_id, None)

        stored.then(settled)

    def _forget(self, topic: Topic) -> None:
        self._producers.forget(topic.uuid.bytes, topic.partitions)

    def _in_line(self, topic: Topic, store: Store, *, needs_lanes: bool) -> Pending[int]:
        line = self._lines.get(topic.uuid.bytes)
        if line is None and (not needs_lanes or topic.uses_lanes):
            return store()
        stored: Pending[int] = Pending()
        if line is not None:
            line.append((store, stored))
            return stored
        # It is in line before the call, which may be done at once.
        self._lines[topic.uuid.bytes] = deque([(store, stored)])
        self._topics.use_lanes(topic.name).then(lambda noted: self._go_on(topic, noted))
        return stored

    def _go_on(self, topic: Topic, noted: Pending[Topic]) -> None:
        error = noted.error
        if error is None and noted.result().uuid != topic.uuid:
            # Another one has that name by now.
            error = topic_unknown(topic.name)
        for store, stored in self._lines.pop(topic.uuid.bytes):
            if error is not None:
                stored.fail(error)
            else:
                _after(Pending.of(None), store, stored)

    def _publish(
        self, topic: Topic, asked: list[Outgoing], key: str | None, old: list[bytes]
    ) -> Pending[int]:
        done: Pending[int] = Pending()
        mark = mark_key(topic, key) if key is not None and old else None
        if mark is not None:
            self._idempotency.drop_with(mark, old)

        def published(one: Pending[Published]) -> None:
            if mark is not None:
                self._idempotency.drop_with(mark, [])
            if one.error is not None:
                done.fail(one.error)
                return
            result = one.result()
            now = (at for at in range(len(result.placed)) if at not in result.scheduled)
            first = next(now, None)
            done.succeed(NO_OFFSET if first is None else result.placed[first].offset)

        self._publisher.publish(topic.name, asked, idempotency_key=key).then(published)
        return done


def _key(header: Header, number: int, epoch: int, sequence: int) -> str:
    return f"kafka-{header.producer_id}-{epoch}-{number}-{sequence}"


def _after(ready: Pending[None], call: Store, stored: Pending[int] | None = None) -> Pending[int]:
    """What a call answers that is to come later."""
    answer: Pending[int] = Pending() if stored is None else stored

    def go_on(one: Pending[None]) -> None:
        try:
            if one.error is not None:
                raise one.error
            _pass(call(), answer)
        except MillstreamError as error:
            answer.fail(error)

    ready.then(go_on)
    return answer


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
