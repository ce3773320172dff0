"""Firing: what is due goes to its topic, with the mark that says so, in one atomic append.

A firing takes some hundreds of schedules: it reads them, finds the partition of each, and appends.
Several are under way at a time. What a topic does not take any more is told apart by halving.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from millstream.broker.schedule_values import (
    PARTITION,
    Plan,
    State,
    mark_entry,
    plan_of,
)
from millstream.broker.views import BATCH_BYTES, BATCH_RECORDS, Entry, encoded
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    KeyRequired,
    LogDamaged,
    MillstreamError,
    OffsetOutOfRange,
    OutcomeUnknown,
    TopicUnknown,
)
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.wire.lanes import lane_name
from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.schedule_state import Owner, ScheduleState
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.broker.traffic import Traffic
    from millstream.engine.protocol import Engine

# Of one firing: about 3 ms of work between two waits.
RECORDS_MAX = 512
# Enough to keep the disk busy while the next are read.
FIRINGS_MAX = 8
# Of one atomic append, unless one record alone is larger.
APPEND_BYTES = 4 * 1024 * 1024
RECORD_OVERHEAD_BYTES = 64
# Read at once: where schedules lie close together, and where they do not.
DENSE_BYTES, SPARSE_BYTES = 256 * 1024, 16 * 1024
DENSE_OFFSETS = 256


class Due(NamedTuple):
    place: int
    owner: Owner
    due_ms: int


class Later(NamedTuple):
    """What becomes of those that are not fired: refused, and tried again; or not to be fired."""

    refused: Callable[[MillstreamError, list[Due]], None]
    given_back: Callable[[list[Due]], None]


class _Read(NamedTuple):
    due: Due
    # None where the disk has lost it.
    plan: Plan | None


class Firing:
    """All firings of one broker."""

    __slots__ = ("_around", "_engine", "_later", "_next", "_state", "_traffic", "under_way")

    def __init__(
        self,
        engine: Engine,
        around: Surroundings,
        state: ScheduleState,
        traffic: Traffic,
        later: Later,
    ) -> None:
        self._engine = engine
        self._around = around
        self._state = state
        self._traffic = traffic
        self._later = later
        # Where records without a key go next.
        self._next = 0
        self.under_way = 0

    def fire(self, dues: list[Due]) -> Pending[None]:
        """Each is free; done when each is over, or is to be tried again."""
        done: Pending[None] = Pending()
        self._state.occupy([(one.place, one.owner) for one in dues], done)
        self.under_way += 1

        def finish(outcome: Pending[None]) -> None:
            self.under_way -= 1
            if outcome.error is not None:
                # These stay busy: the engine writes no more, or there is a mistake in here. What
                # became of them, the next start will see.
                _logger().error("schedules not fired", why=repr(outcome.error), count=len(dues))
                done.fail(outcome.error)
            else:
                done.succeed(None)

        follow(self._fire(dues)).then(finish)
        return done

    def _fire(self, dues: list[Due]) -> Generator[Pending[Any], Any, None]:
        try:
            read = yield from self._read(dues)
        except MillstreamError as error:
            self._later.refused(error, dues)
            return
        part: list[_Read] = []
        size = 0
        for one in read:
            more = _size_of(one.plan)
            if part and size + more > APPEND_BYTES:
                yield from self._append(part)
                part, size = [], 0
            part.append(one)
            size += more
        if part:
            yield from self._append(part)

    # ---- reading

    def _read(self, dues: list[Due]) -> Generator[Pending[Any], Any, list[_Read]]:
        """In the order in which they are due."""
        places = sorted(one.place for one in dues)
        found: dict[int, Plan] = {}
        at = 0
        while at < len(places):
            first = places[at]
            ahead = places[min(at + 16, len(places) - 1)]
            bytes_max = DENSE_BYTES if ahead - first <= DENSE_OFFSETS else SPARSE_BYTES
            try:
                chunk = yield self._engine.read(PARTITION, first, bytes_max)
            except (LogDamaged, OffsetOutOfRange) as error:
                last = error.fields.get("last")
                at = _after(places, at, last if isinstance(last, int) else first)
                continue
            if not len(chunk.data):
                break
            wanted = set(places[at : _after(places, at, chunk.next_offset - 1)])
            _pick(chunk.data, wanted, found)
            at = _after(places, at, max(first, chunk.next_offset - 1))
        ordered = sorted(dues, key=lambda one: (one.due_ms, one.place))
        return [_Read(one, found.get(one.place)) for one in ordered]

    # ---- appending

    def _append(self, read: list[_Read]) -> Generator[Pending[Any], Any, None]:
        ended = [one.due for one in read if _ends(one.due)]
        if ended:
            # Purged while they were read: an append now would come after the purge.
            self._later.given_back(ended)
            read = [one for one in read if not _ends(one.due)]
            if not read:
                return
        outcomes: dict[State, list[Due]] = {}
        fired: list[tuple[Due, Plan, Topic]] = []
        for one in read:
            topic = self._topic_of(one.due.owner)
            if one.plan is None:
                outcomes.setdefault(State.DAMAGED, []).append(one.due)
            elif topic is None:
                outcomes.setdefault(State.TOPIC_DELETED, []).append(one.due)
            elif topic.settings.compact and one.plan.key is None:
                outcomes.setdefault(State.REFUSED, []).append(one.due)
            else:
                fired.append((one.due, one.plan, topic))
        if fired:
            outcomes[State.FIRED] = [due for due, _, _ in fired]
        now_ms = self._around.clock.wall_ms()
        entries = self._entries(fired, now_ms)
        for state, dues in outcomes.items():
            entries.append(mark_entry(now_ms, state, [one.place for one in dues]))
        try:
            yield self._engine.append_atomic(entries)
        except MillstreamError as error:
            yield from self._refused(error, read)
            return
        self._count(fired)
        for state, dues in outcomes.items():
            self._finish(state, dues)

    def _topic_of(self, owner: Owner) -> Topic | None:
        topic = self._around.topics.by_name.get(owner.name)
        return topic if topic is not None and topic.uuid.bytes == owner.uuid else None

    def _entries(self, fired: Sequence[tuple[Due, Plan, Topic]], now_ms: int) -> list[Entry]:
        """Batches of one partition and lane each, in the order in which they are due."""
        entries: list[Entry] = []
        open_: dict[tuple[str, int, int], tuple[Topic, list[batches.Fields], int]] = {}
        self._next += 1
        for _, plan, topic in fired:
            place = (topic.name, self._partition(plan, topic), plan.lane)
            _, fields, size = open_.get(place, (topic, [], 0))
            more = _size_of(plan)
            if fields and (size + more > BATCH_BYTES or len(fields) == BATCH_RECORDS):
                entries.append(_encoded(topic, place, fields))
                fields, size = [], 0
            own_ms = None if topic.is_append_time else plan.timestamp_ms
            time_ms = now_ms if own_ms is None else own_ms
            fields.append((time_ms, plan.key, plan.value, plan.headers))
            open_[place] = (topic, fields, size + more)
        rest = [_encoded(one, place, fields) for place, (one, fields, _) in open_.items()]
        return entries + rest

    def _partition(self, plan: Plan, topic: Topic) -> int:
        """As the topic is now: it may have more partitions than when this was scheduled."""
        if plan.partition is not None:
            return plan.partition
        if plan.key is not None:
            return partition_of_key(plan.key, topic.partitions, topic.settings.partitioner)
        return self._next % topic.partitions

    def _refused(
        self, error: MillstreamError, read: list[_Read]
    ) -> Generator[Pending[Any], Any, None]:
        """Nothing of it is stored, unless nobody knows."""
        if isinstance(error, OutcomeUnknown):
            raise error
        dues = [one.due for one in read]
        if error.retriable or not _is_of_records(error):
            self._later.refused(error, dues)
        elif len(read) > 1:
            middle = len(read) // 2
            yield from self._append(read[:middle])
            yield from self._append(read[middle:])
        else:
            _logger().error("a schedule was refused", why=error.message, code=error.code)
            now_ms = self._around.clock.wall_ms()
            state = State.TOPIC_DELETED if isinstance(error, TopicUnknown) else State.REFUSED
            try:
                yield self._engine.append(*mark_entry(now_ms, state, [dues[0].place]))
            except MillstreamError as again:
                self._later.refused(again, dues)
            else:
                self._finish(state, dues)

    def _count(self, fired: Sequence[tuple[Due, Plan, Topic]]) -> None:
        now_ms = self._around.clock.wall_ms()
        late = self._state.counts.late
        for due, plan, topic in fired:
            late(now_ms - due.due_ms)
            traffic = self._traffic.of(topic.name)
            traffic.messages_in += 1
            traffic.bytes_in += _size_of(plan)

    def _finish(self, state: State, dues: list[Due]) -> None:
        for one in dues:
            self._state.finish(one.place, state)
        counts = self._state.counts
        if state == State.FIRED:
            counts.fired += len(dues)
        else:
            counts.expired += len(dues)
            _logger().warning("schedules expired", why=state.why, count=len(dues))


def _ends(due: Due) -> bool:
    return due.owner.endings > 0 or due.place < due.owner.purged_before


def _is_of_records(error: MillstreamError) -> bool:
    """Whether it is about what was to be appended, and not about the disk."""
    return error.code.startswith(("batch_", "topic_", "partition_", "message_", "append_")) or (
        isinstance(error, KeyRequired)
    )


def _pick(data: memoryview, wanted: set[int], found: dict[int, Plan]) -> None:
    for position, header in batches.walk(data):
        here = wanted.intersection(range(header.base_offset, header.next_offset))
        if not here:
            continue
        for record in batches.decode(data[position : position + header.size]):
            if record.offset in here:
                found[record.offset] = plan_of(record)


def _after(places: list[int], at: int, last: int) -> int:
    """Where the places go on that lie after one."""
    while at < len(places) and places[at] <= last:
        at += 1
    return at


def _size_of(plan: Plan | None) -> int:
    if plan is None:
        return RECORD_OVERHEAD_BYTES
    size = len(plan.key or b"") + len(plan.value or b"") + RECORD_OVERHEAD_BYTES
    if plan.headers:
        size += sum(len(name) + len(text or b"") for name, text in plan.headers)
    return size


def _encoded(topic: Topic, place: tuple[str, int, int], fields: list[batches.Fields]) -> Entry:
    name, number, lane = place
    id = PartitionId(name, number)
    return encoded(id, fields, lane_name(lane), is_append_time=topic.is_append_time)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
