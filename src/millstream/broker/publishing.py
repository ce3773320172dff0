"""Publishing: records find their partition, and those of one turn of the loop and one lane make
one batch.

A call is checked as a whole before any of it is taken. Its records go into one partition, and
then into the batch that this turn gathers for it, or into several, and then all batches of the
call are one atomic append, after what was gathered for those partitions before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker import idempotency as keys
from millstream.broker.gathering import Gathering
from millstream.broker.outgoing import (
    Acks,
    Outgoing,
    Placed,
    Published,
    check_acks,
    check_record,
    check_records,
)
from millstream.broker.partitioners import Rotation
from millstream.broker.publish_calls import (
    BATCH_BYTES,
    RECORD_OVERHEAD_BYTES,
    SCHEDULED,
    Call,
    count_max,
    scheduled_in,
)
from millstream.broker.ready_batches import check_batches, require_partitions, uses_lanes
from millstream.broker.schedule_values import (
    PARTITION as SCHEDULES,
)
from millstream.broker.schedule_values import (
    check_schedule,
    due_of,
    schedule_fields,
)
from millstream.broker.views import Entry, encoded
from millstream.engine.pending import Pending, follow
from millstream.errors import BatchCountInvalid, MillstreamError, TopicUnknown
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.wire.lanes import NORMAL, lane_headers, lane_name
from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.gathering import Waiter
    from millstream.broker.idempotency import Idempotency
    from millstream.broker.schedules import Schedules
    from millstream.broker.topics import Topic, Topics
    from millstream.broker.traffic import TopicTraffic, Traffic
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns
    from millstream.log.batch import Headers

__all__ = ["Acks", "Outgoing", "Placed", "Published", "Publisher"]

# Publishes with idempotency keys that are one append together end here.
ONCE_BYTES = 1024 * 1024


class _Once(NamedTuple):
    """A publish with an idempotency key, and who waits for it."""

    call: Call
    mark_key: bytes
    pending: Pending[Published]


class Target:
    """A topic as the publisher sees it."""

    __slots__ = (
        "gathering",
        "is_append_time",
        "is_plain",
        "is_weak",
        "keyless_bytes",
        "laned",
        "message_bytes_max",
        "once",
        "once_bytes",
        "rotation",
        "topic",
        "traffic",
    )

    def __init__(self, topic: Topic, traffic: TopicTraffic) -> None:
        self.traffic = traffic
        self.rotation = Rotation(topic.partitions)
        # Of each partition, the batch that this turn makes; for other lanes than normal beside
        # it, so that who uses none pays nothing for them.
        self.gathering: list[Gathering | None] = []
        self.laned: dict[tuple[int, int], Gathering] = {}
        self.keyless_bytes = 0
        # Of this turn, publishes with idempotency keys.
        self.once: list[_Once] = []
        self.once_bytes = 0
        self.see(topic)

    def see(self, topic: Topic) -> None:
        """The topic as it is now; the same one as before, with other settings or partitions."""
        self.topic = topic
        self.message_bytes_max = topic.settings.message_bytes_max
        # Whether a key may be missing.
        self.is_plain = not topic.settings.compact
        self.is_weak = topic.settings.fsync != "every"
        self.is_append_time = topic.is_append_time
        more = topic.partitions - len(self.gathering)
        if self.gathering and more:
            self.rotation.grow(topic.partitions)
        self.gathering += [None] * more

    def gathered(self, place: tuple[int, int]) -> Gathering | None:
        return self.gathering[place[0]] if place[1] == NORMAL else self.laned.get(place)

    def choose(self, key: bytes | None, size: int) -> int:
        if key is not None:
            topic = self.topic
            return partition_of_key(key, topic.partitions, topic.settings.partitioner)
        self.keyless_bytes += size + RECORD_OVERHEAD_BYTES
        return self.rotation.current


class Publisher:
    """Everything that is published passes here."""

    __slots__ = (
        "_clock",
        "_engine",
        "_flying",
        "_gatherings",
        "_idempotency",
        "_now_ms",
        "_schedules",
        "_targets",
        "_topics",
        "_traffic",
        "_turn",
        "_turns",
    )

    def __init__(
        self,
        engine: Engine,
        topics: Topics,
        idempotency: Idempotency,
        schedules: Schedules,
        *,
        traffic: Traffic,
        clock: Clock,
        turns: Turns,
    ) -> None:
        self._engine = engine
        self._idempotency = idempotency
        self._schedules = schedules
        self._topics = topics
        self._traffic = traffic
        self._clock = clock
        self._turns = turns
        self._targets: dict[str, Target] = {}
        # Publishes with an idempotency key that are not durable yet: a repeat waits for them.
        self._flying: dict[bytes, _Once] = {}
        # Of this turn of the loop: what is gathered, the topics it is for, and the time.
        self._gatherings: list[tuple[Target, Gathering]] = []
        self._turn: dict[Target, None] = {}
        self._now_ms = 0
        topics.watch_deleted(self._forget)

    # ---- records

    def publish_one(  # noqa: PLR0917  the fields of a record, in their order
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
        lane: int = NORMAL,
        delay_ms: int | None = None,
        deliver_at_ms: int | None = None,
    ) -> Pending[Placed]:
        """One record, answered when it is as durable as its topic says."""
        if lane != NORMAL or delay_ms is not None or deliver_at_ms is not None:
            record = Outgoing(
                key, value, headers, timestamp_ms, partition, lane, delay_ms, deliver_at_ms
            )
            one: Pending[Placed] = Pending()
            _pass(self.publish(topic, (record,)), one, lambda published: published.placed[0])
            return one
        target = self._targets.get(topic)
        if target is None or target.topic is not self._topics.by_name.get(topic):
            found = self._find(topic, [Outgoing(key, value, headers, timestamp_ms, partition)])
            if isinstance(found, Pending):
                return _after(
                    found,
                    lambda: self.publish_one(topic, key, value, headers, timestamp_ms, partition),
                )
            target = found
        try:
            gathering, at = self._add(target, key, value, headers, timestamp_ms, partition)
        except MillstreamError as error:
            return Pending.failed(error)
        pending: Pending[Placed] = Pending()
        gathering.ones.append((pending, at))
        return pending

    def publish_for(  # noqa: PLR0917  as `publish_one`
        self,
        waiter: Waiter,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> bool:
        """As `publish_one`, for somebody who waits without a `Pending`: it is told later, and
        what is wrong with the record is raised. False when the topic has to be made first."""
        target = self._targets.get(topic)
        if target is None or target.topic is not self._topics.by_name.get(topic):
            found = self._find(topic)
            if isinstance(found, Pending):
                return False
            target = found
        gathering, at = self._add(target, key, value, headers, timestamp_ms, partition)
        gathering.waiters.append((waiter, at))
        return True

    def _add(  # noqa: PLR0917  the fields of a record, in their order
        self,
        target: Target,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int | None,
        partition: int | None,
    ) -> tuple[Gathering, int]:
        """Put a record into the batch of its partition; where it is there."""
        if target.is_append_time:
            timestamp_ms = None
        size = -1
        if value is not None and target.is_plain and timestamp_ms is partition is None:
            # As nearly all are: nothing to check but the size.
            size = len(value) if key is None else len(value) + len(key)
        if headers or not 0 <= size <= target.message_bytes_max:
            record = Outgoing(key, value, headers, timestamp_ms, partition)
            size = check_record(target.topic, record, 0)
        if target not in self._turn:
            self._begin(target)
        if partition is None:
            partition = target.choose(key, size)
        gathering = target.gathering[partition]
        if gathering is None or gathering.size + size > BATCH_BYTES:
            gathering = self._gather(target, (partition, NORMAL))
        gathering.size += size + RECORD_OVERHEAD_BYTES
        fields = gathering.fields
        fields.append((self._now_ms if timestamp_ms is None else timestamp_ms, key, value, headers))
        return gathering, len(fields) - 1

    def publish(
        self,
        topic: str,
        records: Sequence[Outgoing],
        *,
        acks: Acks = "all",
        idempotency_key: str | None = None,
    ) -> Pending[Published]:
        """All of the records or none. With acks `none` it is done at once, offsets are -1."""
        target = self._find(topic, records)
        if isinstance(target, Pending):
            return _after(
                target,
                lambda: self.publish(topic, records, acks=acks, idempotency_key=idempotency_key),
            )
        try:
            check_acks(acks)
            mark_key = None
            if idempotency_key is not None:
                mark_key = keys.mark_key(target.topic, idempotency_key)
                repeated = self._repeated(target, mark_key, len(records))
                if repeated is not None:
                    return repeated
            if not records:
                raise BatchCountInvalid("there is no record to publish")
            sizes = check_records(target.topic, records)
        except MillstreamError as error:
            return Pending.failed(error)
        if not target.topic.uses_lanes and any(record.lane != NORMAL for record in records):
            return _after(
                self._topics.use_lanes(topic),
                lambda: self.publish(topic, records, acks=acks, idempotency_key=idempotency_key),
            )
        self._begin(target)
        try:
            call = self._call(target, records, sizes)
        except MillstreamError as error:
            return Pending.failed(error)
        pending = self._take(call, mark_key)
        return Pending.of(call.unplaced()) if acks == "none" else pending

    def _call(self, target: Target, records: Sequence[Outgoing], sizes: list[int]) -> Call:
        """The records of a call, each with its place."""
        now_ms = self._now_ms
        places: list[tuple[int, int]] = []
        fields: list[batches.Fields] = []
        for at, (one, size) in enumerate(zip(records, sizes, strict=True)):
            due_ms = due_of(one, now_ms, at)
            if due_ms is not None:
                check_schedule(size, at)
                places.append(SCHEDULED)
                fields.append(schedule_fields(target.topic, one, due_ms))
                continue
            number = target.choose(one.key, size) if one.partition is None else one.partition
            places.append((number, one.lane))
            headers = lane_headers(one.headers, one.lane)
            own_ms = None if target.is_append_time else one.timestamp_ms
            fields.append((now_ms if own_ms is None else own_ms, one.key, one.value, headers))
        if SCHEDULED in places:
            self._schedules.require_room(places.count(SCHEDULED))
        return Call(target, fields, places, sizes)

    def _take(self, call: Call, mark_key: bytes | None) -> Pending[Published]:
        if mark_key is not None:
            return self._take_once(call, mark_key)
        target, places, fields = call.target, call.places, call.fields
        most = count_max(places[0])
        if call.size > BATCH_BYTES or len(places) > most or places.count(places[0]) != len(places):
            return self._append_parts(call, lambda entries: self._append_ready(target, entries))
        gathering = target.gathered(places[0])
        if (
            gathering is None
            or gathering.size + call.size > BATCH_BYTES
            or len(gathering.fields) + len(fields) > most
        ):
            gathering = self._gather(target, places[0])
        gathering.size += call.size
        pending: Pending[Published] = Pending()
        gathering.calls.append((pending, len(gathering.fields), len(fields)))
        gathering.fields += fields
        return pending

    # ---- ready-made batches

    def publish_batch(self, topic: str, partition: int, batch: bytes) -> Pending[int]:
        """A ready-made batch; its base offset. That of the first time when it was sent before."""
        done: Pending[int] = Pending()
        _pass(self.publish_batches(topic, [(partition, batch)]), done, lambda offsets: offsets[0])
        return done

    def publish_batches(
        self, topic: str, entries: Sequence[tuple[int, bytes]], *, acks: Acks = "all"
    ) -> Pending[list[int]]:
        """Ready-made batches for partitions: all of them, or none; their base offsets. With acks
        `none` it is done at once, offsets are -1."""
        return follow(self._publish_batches(topic, entries, acks))

    def _publish_batches(
        self, name: str, entries: Sequence[tuple[int, bytes]], acks: Acks
    ) -> Generator[Pending[Any], Any, list[int]]:
        check_acks(acks)
        numbers = [number for number, _ in entries]
        topic: Topic = yield self._topics.ensure(name, lambda one: require_partitions(one, numbers))
        bytes_max = self._topics.batch_bytes_max(topic)
        ready = yield from check_batches(topic, entries, bytes_max, self._breath)
        # Meanwhile it may have been made again, and then have other partitions and settings.
        self._require_same(topic)
        if not topic.uses_lanes and uses_lanes(ready):
            yield self._topics.use_lanes(name)
            self._require_same(topic)
        target = self._find(name)
        assert not isinstance(target, Pending)
        if target.is_append_time:
            now_ms = self._clock.wall_ms()
            ready = [
                Entry(id, *batches.stamped(data, header, now_ms)) for id, data, header in ready
            ]
        self._submit(target, {one.id.number for one in ready})
        pending = self._append_ready(target, ready)
        traffic = target.traffic

        def count(done: Pending[list[int]]) -> None:
            messages = sum(one.header.count for one in ready)
            if done.error is not None:
                traffic.messages_failed += messages
                return
            traffic.messages_in += messages
            traffic.bytes_in += sum(len(one.data) for one in ready)

        pending.then(count)
        # What is refused at once is said all the same.
        if acks == "none" and pending.error is None:
            return [-1] * len(ready)
        offsets: list[int] = yield pending
        return offsets

    def _require_same(self, topic: Topic) -> None:
        if self._topics.get(topic.name).uuid != topic.uuid:
            raise TopicUnknown(
                f"the topic {topic.name} was deleted and made again; publish to it again",
                topic=topic.name,
            )

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending

    # ---- finding and gathering

    def _find(self, name: str, records: Sequence[Outgoing] = ()) -> Target | Pending[Any]:
        """The topic, or what makes it; the error of one that is not there and is not made, as for
        records that would be refused."""
        topic = self._topics.by_name.get(name)
        if topic is None:
            return self._topics.ensure(name, lambda one: check_records(one, records))
        target = self._targets.get(name)
        if target is None:
            target = self._targets[name] = Target(topic, self._traffic.of(name))
        elif target.topic is not topic:
            target.see(topic)
        return target

    def _forget(self, topic: Topic) -> None:
        self._targets.pop(topic.name, None)

    def _begin(self, target: Target) -> None:
        turn = self._turn
        if not turn:
            self._turns.at_end(self._end_turn)
            self._now_ms = self._clock.wall_ms()
        turn[target] = None

    def _gather(self, target: Target, place: tuple[int, int]) -> Gathering:
        """The next batch for a partition and lane."""
        number, lane = place
        if target.once:
            self._append_once(target, {number})
        gathering = Gathering(_id_of(target, place), target.traffic, lane)
        if lane == NORMAL:
            target.gathering[number] = gathering
        else:
            target.laned[place] = gathering
        self._gatherings.append((target, gathering))
        return gathering

    def _end_turn(self) -> None:
        gatherings, self._gatherings = self._gatherings, []
        turn, self._turn = self._turn, {}
        for target, gathering in gatherings:
            self._append(target, gathering)
        for target in turn:
            self._append_once(target)
            if target.keyless_bytes:
                target.rotation.give(target.keyless_bytes)
                target.keyless_bytes = 0

    def submit(self, topic: str, partition: int) -> None:
        """What is gathered for a partition is appended now: something follows it that does not
        pass here."""
        target = self._targets.get(topic)
        if target is not None:
            self._submit(target, {partition})

    def _submit(self, target: Target, numbers: set[int]) -> None:
        """Append what is gathered for some partitions, because something follows it."""
        self._append_once(target, numbers)
        self._submit_gathered(target, numbers)

    def _submit_gathered(self, target: Target, numbers: set[int]) -> None:
        for one in [one for one in self._gatherings if one[0] is target]:
            if one[1].id.number in numbers:
                self._gatherings.remove(one)
                self._append(*one)

    def _append(self, target: Target, gathering: Gathering) -> None:
        number, lane = gathering.id.number, gathering.lane
        place = SCHEDULED if lane == SCHEDULED[1] else (number, lane)
        if lane != NORMAL:
            if target.laned.get(place) is gathering:
                del target.laned[place]
        elif target.gathering[number] is gathering:
            target.gathering[number] = None
        try:
            entry = _encoded(target, place, gathering.fields)
        except Exception as error:  # noqa: BLE001  nobody may be left without an answer
            gathering.done(Pending.failed(error))
            return
        appended = self._engine.append(*entry)
        if place == SCHEDULED:
            topic = target.topic
            appended.then(lambda one: self._note_scheduled(topic, one, gathering.fields))
        appended.then(gathering.done)

    def _note_scheduled(
        self, topic: Topic, appended: Pending[int], fields: list[batches.Fields]
    ) -> None:
        if appended.error is None:
            self._schedules.added(topic, appended.result(), fields)

    # ---- calls of several batches

    def _append_parts(
        self, call: Call, append: Callable[[list[Entry]], Pending[list[int]]]
    ) -> Pending[Published]:
        parts = call.parts()
        self._submit(call.target, call.numbers())
        fields, traffic, topic = call.fields, call.target.traffic, call.target.topic
        entries = [
            _encoded(call.target, place, [fields[at] for at in part]) for place, part in parts
        ]
        pending: Pending[Published] = Pending()

        def done(appended: Pending[list[int]]) -> None:
            if appended.error is not None:
                traffic.messages_failed += len(fields)
                pending.fail(appended.error)
                return
            for (place, part), base in zip(parts, appended.result(), strict=True):
                if place == SCHEDULED:
                    self._schedules.added(topic, base, [fields[at] for at in part])
                else:
                    traffic.messages_in += len(part)
            traffic.bytes_in += call.size
            pending.succeed(call.placed(parts, appended.result()))

        append(entries).then(done)
        return pending

    def _append_ready(self, target: Target, ready: list[Entry]) -> Pending[list[int]]:
        """One atomic append; in the weaker modes, which promise nothing through a crash, one for
        each batch, because an atomic one would wait for the disk."""
        if len(ready) > 1 and not target.is_weak:
            return self._engine.append_atomic(ready)
        return _together([self._engine.append(*one) for one in ready])

    # ---- idempotency keys

    def _take_once(self, call: Call, mark_key: bytes) -> Pending[Published]:
        """Those of a turn are one append, with their marks."""
        target = call.target
        try:
            self._idempotency.require_room(len(target.once))
        except MillstreamError as error:
            return Pending.failed(error)
        # Each record has the digest, to be found by.
        once = (keys.HEADER, keys.digest_of(mark_key))
        call.fields = [
            (when, key, value, (*headers, once)) for when, key, value, headers in call.fields
        ]
        self._submit_gathered(target, call.numbers())
        one = _Once(call, mark_key, Pending())
        target.once.append(one)
        target.once_bytes += call.size
        self._flying[mark_key] = one
        one.pending.then(lambda _: self._flying.__delitem__(mark_key))
        if target.once_bytes > ONCE_BYTES:
            self._append_once(target)
        return one.pending

    def _append_once(self, target: Target, numbers: set[int] | None = None) -> None:
        """What waits, if it is for one of these partitions, or for any."""
        if not target.once or (
            numbers is not None
            and all(numbers.isdisjoint(waiting.call.numbers()) for waiting in target.once)
        ):
            return
        waiting, target.once, target.once_bytes = target.once, [], 0
        whole = Call(
            target,
            [fields for one in waiting for fields in one.call.fields],
            [place for one in waiting for place in one.call.places],
            [size for one in waiting for size in one.call.sizes],
        )
        marks = [(one.mark_key, one.call.places) for one in waiting]

        def done(published: Pending[Published]) -> None:
            first = 0
            for call, _, pending in waiting:
                if published.error is not None:
                    pending.fail(published.error)
                    continue
                last = first + len(call.fields)
                placed = published.result().placed[first:last]
                pending.succeed(Published(placed, scheduled=scheduled_in(call.places)))
                first = last

        try:
            pending = self._append_parts(
                whole, lambda entries: self._idempotency.append(marks, entries)
            )
        except Exception as error:  # noqa: BLE001  nobody may be left without an answer
            pending = Pending.failed(error)
        pending.then(done)

    def _repeated(self, target: Target, mark_key: bytes, count: int) -> Pending[Published] | None:
        """What a publish of so many records gets whose key was used before; else None."""
        flying = self._flying.get(mark_key)
        if flying is not None:
            keys.require_count(len(flying.call.fields), count)
            target.traffic.repeats += 1
            repeated: Pending[Published] = Pending()
            _pass(flying.pending, repeated, lambda one: one._replace(is_duplicate=True))
            return repeated
        mark = self._idempotency.find(mark_key)
        if mark is None:
            return None
        keys.require_count(sum(part.count for part in mark.parts), count)
        target.traffic.repeats += 1
        return follow(self._placed_before(target.topic, mark_key, mark))

    def _placed_before(
        self, topic: Topic, mark_key: bytes, mark: keys.Mark
    ) -> Generator[Pending[Any], Any, Published]:
        places = yield from self._idempotency.places(topic, mark_key, mark)
        placed = [Placed(max(0, place.partition), *place[1:]) for place in places]
        scheduled = [at for at, place in enumerate(places) if place.partition == SCHEDULED[0]]
        return Published(placed, is_duplicate=True, scheduled=frozenset(scheduled))


def _id_of(target: Target, place: tuple[int, int]) -> PartitionId:
    return SCHEDULES if place == SCHEDULED else PartitionId(target.topic.name, place[0])


def _encoded(target: Target, place: tuple[int, int], fields: list[batches.Fields]) -> Entry:
    is_append_time = target.is_append_time and place != SCHEDULED
    lane = lane_name(place[1])
    return encoded(_id_of(target, place), fields, lane, is_append_time=is_append_time)


def _together(appends: list[Pending[int]]) -> Pending[list[int]]:
    """Done when all are; with the first error, when there is one."""
    done: Pending[list[int]] = Pending()
    left = len(appends)

    def one_done(_: Pending[int]) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            error = next((one.error for one in appends if one.error is not None), None)
            if error is not None:
                done.fail(error)
            else:
                done.succeed([one.result() for one in appends])

    for one in appends:
        one.then(one_done)
    return done


def _after(made: Pending[Any], call: Callable[[], Pending[Any]]) -> Pending[Any]:
    """Once there is a topic, publish."""
    done: Pending[Any] = Pending()

    def go_on(one: Pending[Any]) -> None:
        if one.error is not None:
            done.fail(one.error)
        else:
            _pass(call(), done, lambda value: value)

    made.then(go_on)
    return done


def _pass(source: Pending[Any], target: Pending[Any], change: Callable[[Any], Any]) -> None:
    def done(one: Pending[Any]) -> None:
        if one.error is not None:
            target.fail(one.error)
        else:
            target.succeed(change(one.result()))

    source.then(done)
