"""Sequential consumers: one reader, in order, from where it stopped.

The broker gives a consumer its id and keeps its position durably: the first record of each
partition that it has not acked. `next` gives records in the order of their partition; `ack` says
that a record and all before it in its partition are done. Whoever comes back with the id goes on
at the first record that was not acked. A topic of one partition has one order for all records.

Who reads all partitions reads those too that the topic gets later, from their start.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from millstream.broker.group_values import Commit
from millstream.broker.topics import partition_unknown
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    ConsumerFenced,
    ConsumerUnknown,
    MillstreamError,
    OffsetOutOfRange,
    ParameterInvalid,
    PartitionUnknown,
    TooManyGroups,
    TopicUnknown,
)
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.reading import Reader, Waiting
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.log.batch import Record

CONSUMER_ID = re.compile(r"[0-9a-f]{24}")
CONSUMER_ID_BYTES = 12
# How much one `next` reads unless it says otherwise.
NEXT_BYTES = 1024 * 1024
# Consumers whose place between two calls is remembered. One more, and the one that was quiet for
# longest begins again at its first record that is not acked, as after a restart.
OPEN_MAX = 10_000
# Beside the position of a consumer that reads one partition of a topic and leaves the others.
ALONE = "alone"

Start: TypeAlias = Literal["earliest", "latest"] | int


class Delivered(NamedTuple):
    partition: int
    record: Record


class SequentialConsumer:
    """One consumer at work. It is fenced when the same id is opened again."""

    __slots__ = (
        "_is_whole",
        "_known_to",
        "_next",
        "_offsets",
        "_reader",
        "_reading",
        "_turn",
        "_waitings",
        "called_s",
        "id",
        "is_fenced",
        "is_held",
        "is_new",
        "skipped",
        "topic",
        "uuid",
    )

    def __init__(
        self,
        id: str,
        topic: Topic,
        positions: dict[int, int],
        *,
        offsets: GroupOffsets,
        reader: Reader,
        is_new: bool,
        is_whole: bool,
        known_to: dict[int, int],
    ) -> None:
        self.id = id
        self.topic = topic.name
        self.is_new = is_new
        self.is_fenced = False
        # A connection has it, whether it says anything or not.
        self.is_held = False
        # When somebody last asked for it, on the monotonic clock.
        self.called_s = 0.0
        # Offsets that retention removed before they were given.
        self.skipped = 0
        self.uuid = topic.uuid.bytes
        self._next = positions
        # All partitions are read, those too that the topic does not have yet.
        self._is_whole = is_whole
        # Who comes back may have been given all that was there then, by an earlier connection or
        # before a restart, and may ack it though it was not given again.
        self._known_to = known_to
        self._offsets = offsets
        self._reader = reader
        self._turn = 0
        self._reading: Pending[None] | None = None
        self._waitings: set[Waiting] = set()

    @property
    def partitions(self) -> tuple[int, ...]:
        return tuple(self._next)

    def positions(self) -> dict[int, int]:
        """The first offset of each partition that is not acked."""
        return {number: self._position(number) for number in self._next}

    def next(self, count_max: int, bytes_max: int | None = None) -> Pending[list[Delivered]]:
        """What there is, in order, behind what was given before; nothing when there is nothing.
        Calls are served one after the other."""
        return follow(self._give(count_max, bytes_max or NEXT_BYTES))

    def _give(
        self, count_max: int, bytes_max: int
    ) -> Generator[Pending[Any], Any, list[Delivered]]:
        while self._reading is not None:
            yield self._reading
        reading = self._reading = Pending[None]()
        try:
            return (yield from self._read(count_max, bytes_max))
        finally:
            self._reading = None
            reading.succeed(None)

    def _read(
        self, count_max: int, bytes_max: int
    ) -> Generator[Pending[Any], Any, list[Delivered]]:
        """A partition that cannot be read fails the call only when no other has anything to give:
        what was found counts as given, so it must come out."""
        found: list[Delivered] = []
        failure: MillstreamError | None = None
        try:
            yield from self._grow()
        except MillstreamError as error:
            failure = error
        numbers = self.partitions
        for place in range(len(numbers)):
            number = numbers[(self._turn + place) % len(numbers)]
            self._check()
            start, end = self._reader.offsets(self.topic, number)
            if self._next[number] < start:
                self.skipped += start - self._next[number]
                self._next[number] = start
            if self._next[number] >= end:
                continue
            begin = self._next[number]
            try:
                fetched = yield self._reader.fetch(
                    self.topic, number, begin, count_max - len(found), bytes_max
                )
            except OffsetOutOfRange:
                # Trimmed just now: the next call steps over what is gone.
                continue
            except MillstreamError as error:
                failure = failure or error
                continue
            self._check()
            if self._next[number] != begin:
                # Acked meanwhile, as somebody who came back may.
                continue
            self._next[number] = fetched.next_offset
            found += [Delivered(number, record) for record in fetched.records]
            bytes_max -= sum(len(one.value or b"") for one in fetched.records)
            if len(found) >= count_max or bytes_max <= 0:
                self._turn = (self._turn + place + 1) % len(numbers)
                break
        if failure is not None and not found:
            raise failure
        return found

    def _grow(self) -> Generator[Pending[Any], Any, None]:
        """Partitions that were added: all of their records are new. Their positions are kept
        before any of them is given, so that it can be acked."""
        added = self._added(self._check())
        if not added:
            return
        starts = {number: self._reader.offsets(self.topic, number)[0] for number in added}
        pins = [Commit(self.topic, number, at, "") for number, at in starts.items()]
        yield self._offsets.write(self.id, pins)
        self._next |= starts

    def _added(self, topic: Topic) -> list[int]:
        if not self._is_whole or len(self._next) == topic.partitions:
            return []
        return [number for number in range(topic.partitions) if number not in self._next]

    def wait(self, seconds: float) -> Waiting:
        """Until there is more to give, or the topic has more partitions, or the time is over."""
        places = {PartitionId(self.topic, number): at for number, at in self._next.items()}
        waiting = self._reader.wait_any(places, seconds)
        self._waitings.add(waiting)
        waiting.pending.then(lambda _: self._waitings.discard(waiting))
        return waiting

    def topic_grown(self, topic: Topic) -> None:
        """Whoever waits reads again, and finds what was added."""
        if topic.uuid.bytes == self.uuid and self._added(topic):
            self._wake()

    def ack(self, partition: int, offset: int) -> Pending[int]:
        """The record and all before it are done; the new position, once that is durable."""
        return follow(self._ack(partition, offset))

    def _ack(self, partition: int, offset: int) -> Generator[Pending[Any], Any, int]:
        topic = self._check()
        if partition not in self._next:
            raise self._not_mine(topic, partition)
        given = max(self._next[partition], self._known_to.get(partition, 0))
        if not 0 <= offset < given:
            raise OffsetOutOfRange(
                f"{self.topic}/{partition} was given up to {given}; {offset} cannot be acked",
                topic=self.topic,
                partition=partition,
                offset=offset,
                start=self._position(partition),
                end=given,
            )
        position = self._position(partition)
        if offset < position:
            yield self._offsets.settled()
            return position
        entry = self._offsets.table.get(self.id, self.uuid, partition)
        if entry is None:
            # A position alone would bring it back without the mark of what it reads.
            raise consumer_unknown(self.topic, self.id)
        commit = Commit(self.topic, partition, offset + 1, entry.metadata)
        yield self._offsets.write(self.id, [commit])
        # What is done need not be given any more.
        self._next[partition] = max(self._next[partition], offset + 1)
        return offset + 1

    def _not_mine(self, topic: Topic, partition: int) -> PartitionUnknown:
        if not 0 <= partition < topic.partitions:
            return partition_unknown(topic, partition)
        mine = ", ".join(map(str, self.partitions))
        return PartitionUnknown(
            f"consumer {self.id} reads {self.topic}/{mine} and was given nothing of partition "
            f"{partition}",
            topic=self.topic,
            partition=partition,
        )

    def close(self) -> None:
        """Whoever still waits hears of it."""
        self.is_fenced = True
        self._wake()

    def _wake(self) -> None:
        for waiting in list(self._waitings):
            waiting.wake()

    def _position(self, partition: int) -> int:
        position = self._offsets.position(self.id, self.topic, partition)
        return position if position is not None else 0

    def _check(self) -> Topic:
        topic = self._offsets.topic(self.topic)
        if topic.uuid.bytes != self.uuid:
            raise TopicUnknown(
                f"topic {self.topic} was deleted and made again; open a new consumer",
                topic=self.topic,
            )
        if self.is_fenced:
            raise ConsumerFenced(
                f"consumer {self.id} was opened again elsewhere, or closed; open it again to go on",
                consumer_id=self.id,
                topic=self.topic,
            )
        return topic


class Sequential:
    """All sequential consumers of a broker."""

    __slots__ = (
        "_clock",
        "_consumers_max",
        "_offsets",
        "_open",
        "_random_hex",
        "_reader",
        "_topics",
    )

    def __init__(
        self,
        around: Surroundings,
        offsets: GroupOffsets,
        consumers_max: int,
        random_hex: Callable[[int], str],
    ) -> None:
        self._topics = around.topics
        self._reader = around.reader
        self._clock = around.clock
        self._offsets = offsets
        self._consumers_max = consumers_max
        self._random_hex = random_hex
        self._open: OrderedDict[str, SequentialConsumer] = OrderedDict()
        around.topics.watch_partitions(self._topic_grown)
        offsets.count_members_by("http", lambda consumer_id: int(self.is_used(consumer_id)))

    def __len__(self) -> int:
        """How many are known, open or not."""
        return self._offsets.table.row_groups

    def is_used(self, consumer_id: str) -> bool:
        """Somebody has it, or asked for it not long ago, though it had nothing to ack."""
        consumer = self._open.get(consumer_id)
        if consumer is None or consumer.is_fenced:
            return False
        quiet_ms = (self._clock.monotonic() - consumer.called_s) * 1000
        retention_ms = self._offsets.retention_ms
        return consumer.is_held or retention_ms is None or quiet_ms < retention_ms

    def open(
        self,
        topic: str,
        consumer_id: str | None = None,
        partition: int | None = None,
        start: Start = "earliest",
    ) -> Pending[SequentialConsumer]:
        """A new consumer, or one that comes back. `start` is for partitions in which it has no
        position yet. Without a partition one that comes back reads what it read before, and a new
        one all of them, each in order."""
        return follow(self._open_steps(topic, consumer_id, partition, start))

    def _open_steps(
        self, name: str, consumer_id: str | None, partition: int | None, start: Start
    ) -> Generator[Pending[Any], Any, SequentialConsumer]:
        topic = self._topics.get(name)
        if partition is not None and not 0 <= partition < topic.partitions:
            raise partition_unknown(topic, partition)
        is_new = consumer_id is None
        if consumer_id is None:
            if len(self) >= self._consumers_max:
                raise TooManyGroups(
                    f"there are {self._consumers_max} sequential consumers, which is the limit; "
                    "delete one, or raise `consumers_max`",
                    consumers_max=self._consumers_max,
                )
            consumer_id = self._random_hex(CONSUMER_ID_BYTES)
        else:
            self._known(topic, consumer_id)
            self._require_same(topic, consumer_id, partition)
        known_to: dict[int, int] = {}
        alone = self._alone(topic, consumer_id) if partition is None else [partition]
        mark = "" if partition is None else ALONE
        positions: dict[int, int] = {}
        pins: list[Commit] = []
        for number in alone or range(topic.partitions):
            at = self._offsets.position(consumer_id, name, number)
            if at is None:
                at = self._begin(name, number, start)
                pins.append(Commit(name, number, at, mark))
            else:
                known_to[number] = self._reader.offsets(name, number).high_watermark
            positions[number] = at
        consumer = SequentialConsumer(
            consumer_id,
            topic,
            positions,
            offsets=self._offsets,
            reader=self._reader,
            is_new=is_new,
            is_whole=not alone,
            known_to=known_to,
        )
        before = self._open.pop(consumer_id, None)
        if before is not None:
            before.close()
        self._open[consumer_id] = consumer
        consumer.called_s = self._clock.monotonic()
        if len(self._open) > OPEN_MAX:
            _, quiet = self._open.popitem(last=False)
            quiet.close()
        try:
            yield self._offsets.write(consumer_id, pins) if pins else self._offsets.settled()
        except MillstreamError:
            # Who asks for it again begins where its position is, or hears that it has none.
            consumer.close()
            if self._open.get(consumer_id) is consumer:
                del self._open[consumer_id]
            raise
        return consumer

    def _alone(self, topic: Topic, consumer_id: str) -> list[int]:
        """The partition that the consumer asked for alone; none when it reads all."""
        entries = self._offsets.table.of_topic(consumer_id, topic.uuid.bytes)
        return [one.partition for one in entries if one.metadata == ALONE]

    def _topic_grown(self, topic: Topic) -> None:
        for consumer in [one for one in self._open.values() if one.topic == topic.name]:
            consumer.topic_grown(topic)

    def _require_same(self, topic: Topic, consumer_id: str, partition: int | None) -> None:
        """With another partition it would read both from then on."""
        alone = self._alone(topic, consumer_id)
        if partition is not None and alone and partition not in alone:
            raise ParameterInvalid(
                f"consumer {consumer_id} reads {topic.name}/{alone[0]} alone; open another one for "
                f"partition {partition}",
                parameter="partition",
            )

    def _begin(self, topic: str, number: int, start: Start) -> int:
        first, end = self._reader.offsets(topic, number)
        if start == "earliest":
            return first
        if start == "latest":
            return end
        self._reader.require(topic, number, start)
        return start

    def find(self, topic: str, consumer_id: str) -> Pending[SequentialConsumer]:
        """The one that is at work, or opened again: for calls that come one by one."""
        consumer = self._open.get(consumer_id)
        if consumer is None or consumer.topic != topic or not self._has_position(consumer):
            return self.open(topic, consumer_id)
        self._open.move_to_end(consumer_id)
        consumer.called_s = self._clock.monotonic()
        return Pending.of(consumer)

    def _has_position(self, consumer: SequentialConsumer) -> bool:
        return self._offsets.table.has_topic(consumer.id, consumer.uuid)

    def delete(self, topic: str, consumer_id: str) -> Pending[None]:
        """Forget a consumer and its position."""
        return follow(self._delete(topic, consumer_id))

    def _delete(self, name: str, consumer_id: str) -> Generator[Pending[Any], Any, None]:
        self._known(self._topics.get(name), consumer_id)
        consumer = self._open.pop(consumer_id, None)
        if consumer is not None:
            consumer.close()
        yield self._offsets.delete_group(consumer_id)

    def _known(self, topic: Topic, consumer_id: str) -> None:
        if CONSUMER_ID.fullmatch(consumer_id) and self._offsets.table.has_topic(
            consumer_id, topic.uuid.bytes
        ):
            return
        raise consumer_unknown(topic.name, consumer_id)


def consumer_unknown(topic: str, consumer_id: str) -> ConsumerUnknown:
    return ConsumerUnknown(
        f"topic {topic} has no consumer {consumer_id[:100]!r}, or it was quiet for too long; open "
        "one without an id",
        consumer_id=consumer_id[:100],
        topic=topic,
    )
