"""Schedules: records that are to appear in their topic later.

Published with a delay or a time, a record goes to the topic of schedules (`schedule_values.py` has
its layout), and its place there is its id. When it is due it goes to its topic and is marked, in
one atomic append: once, whatever crashes, and never early. A wheel on the wall clock says what is
due (`schedule_table.py`). The clock may be put forward or back: it is looked at again each second.

A key is hashed when its record fires, by the partitions that the topic has then. A purge or a
deletion of a topic ends its schedules; a topic made again under an old name has none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from millstream.broker.schedule_firing import FIRINGS_MAX, RECORDS_MAX, Due, Firing, Later
from millstream.broker.schedule_log import ScheduleLog
from millstream.broker.schedule_state import ScheduleState
from millstream.broker.schedule_table import TICK_MS
from millstream.broker.schedule_values import (
    PARTITION,
    Plan,
    State,
    mark_entry,
    plan_of,
    purge_entry,
    uuid_in,
)
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    LogDamaged,
    MillstreamError,
    OutcomeUnknown,
    ScheduleOver,
    ScheduleUnknown,
    TooManySchedules,
)
from millstream.log import batch as batches

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.schedule_state import Owner
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.broker.traffic import Traffic
    from millstream.broker.wheel import Timer
    from millstream.engine.protocol import Engine

# Of one turn of the loop.
TURN_S = 0.002
# How soon a jump of the wall clock is noticed.
LOOK_S = 1.0
# After a firing was refused, as by a full disk, so long until the next.
PAUSE_S = 1.0
SHORTEN_S = 10.0
# What one page of a list reads at most; where it ends, the next page goes on.
PAGE_BYTES = 8 * 1024 * 1024
READ_BYTES = 256 * 1024
# Schedules that are over are dropped from the wheel when there are more of them than pending ones,
# and than these: 20 bytes each.
ROWS_SPARE = 50_000
# Places that are looked at in one go after a purge.
SWEEP = 10_000


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    # 22 bytes of memory each.
    schedules_max: int = 20_000_000


class Page(NamedTuple):
    plans: list[Plan]
    # Where the next page begins; None when this is the last.
    next: int | None


class ScheduleStatistics(NamedTuple):
    pending: int
    # Since the start.
    scheduled: int
    fired: int
    cancelled: int
    expired: int
    # Of each level of the wheel, from what is due within seconds to what is due in years.
    levels: list[int]
    next_due_ms: int | None
    # For each bound, how many fired at most so late; the last one for all beyond.
    lateness: list[int]
    lateness_sum_s: float
    moved: int
    retries: int


class Schedules:
    __slots__ = (
        "_armed_ms",
        "_around",
        "_cancelling",
        "_engine",
        "_firing",
        "_is_soon",
        "_is_stopped",
        "_log",
        "_options",
        "_paused_until_s",
        "_shortening",
        "_state",
        "_timer",
    )

    def __init__(
        self, engine: Engine, around: Surroundings, traffic: Traffic, options: ScheduleOptions
    ) -> None:
        self._engine = engine
        self._around = around
        self._options = options
        self._state = ScheduleState(around.clock.wall_ms())
        self._log = ScheduleLog(engine, self._state, around.clock, around.turns)
        later = Later(self._try_later, self._give_back)
        self._firing = Firing(engine, around, self._state, traffic, later)
        self._timer: Timer | None = None
        self._armed_ms = 0
        self._shortening: Timer | None = None
        self._is_soon = False
        self._is_stopped = False
        self._paused_until_s = 0.0
        # Cancelled in this turn of the loop, and what is done when that is durable.
        self._cancelling: tuple[list[int], Pending[None]] | None = None
        around.topics.watch_purging(lambda topic: self._end(topic, State.TOPIC_PURGED))
        around.topics.watch_deleted(self._topic_deleted)

    # ---- the start and the end

    def start(self) -> Pending[None]:
        """After the topics: every schedule as it was, and what came due meanwhile fires."""
        return follow(self._start())

    def _start(self) -> Generator[Pending[Any], Any, None]:
        yield from self._log.load()
        names = {topic.uuid.bytes: topic.name for topic in self._around.topics.by_name.values()}
        for owner in self._state.owners:
            name = names.get(owner.uuid)
            if name is not None:
                owner.name = name
            elif owner.pending:
                # The topic was deleted just before the crash.
                yield from self._end_all(owner, State.TOPIC_DELETED)
        self._arm()
        self._shortening = self._around.timers.after(SHORTEN_S, self._shorten)

    def stop(self) -> None:
        self._is_stopped = True
        for timer in (self._timer, self._shortening):
            if timer is not None:
                self._around.timers.cancel(timer)

    # ---- for the publisher

    def require_room(self, count: int) -> None:
        if self._state.pending + count > self._options.schedules_max:
            raise TooManySchedules(
                f"{self._options.schedules_max} records are scheduled, and no more are allowed; "
                "schedule it later, or raise schedules_max",
                limit=self._options.schedules_max,
            )

    def added(self, topic: Topic, base: int, fields: Sequence[batches.Fields]) -> None:
        """Durable, at these places of the topic of schedules."""
        owner = self._state.owner(topic.uuid.bytes)
        owner.name = topic.name
        dues = [one[0] for one in fields]
        self._state.add(owner, base, dues)
        self._state.counts.added += len(dues)
        if self._timer is None or min(dues) < self._armed_ms:
            self._arm()

    # ---- looking

    @property
    def pending(self) -> int:
        return self._state.pending

    def count(self, topic: str) -> int:
        """How many of a topic are pending."""
        owner = self._owner_of(self._around.topics.get(topic))
        return 0 if owner is None else owner.pending

    def statistics(self) -> ScheduleStatistics:
        state = self._state
        counts = state.counts
        return ScheduleStatistics(
            pending=state.pending,
            scheduled=counts.added,
            fired=counts.fired,
            cancelled=counts.cancelled,
            expired=counts.expired,
            levels=state.table.sizes(),
            next_due_ms=state.table.next_ms(),
            lateness=list(counts.lateness),
            lateness_sum_s=counts.lateness_sum_s,
            moved=counts.moved,
            retries=counts.retries,
        )

    def page(
        self, topic: str, limit: int, after: int | None = None, skip: int = 0
    ) -> Pending[Page]:
        """Pending ones of a topic, in the order in which they were scheduled. A page may have fewer
        than the limit and not be the last."""
        return follow(self._page(topic, limit, after, skip))

    def _page(
        self, name: str, limit: int, after: int | None, skip: int
    ) -> Generator[Pending[Any], Any, Page]:
        topic = self._around.topics.get(name)
        state, owner = self._state, self._owner_of(topic)
        if owner is None:
            return Page([], None)
        plans: list[Plan] = []
        place, left = max(state.first_pending(), after or 0), PAGE_BYTES
        # What is left out costs a page nothing, or the next one would not know of it.
        while place < state.end and (left > 0 or skip):
            if left <= 0:
                yield self._breath()
            try:
                chunk = yield self._engine.read(PARTITION, place, READ_BYTES)
            except LogDamaged as error:
                last = error.fields.get("last")
                place = max(place, last if isinstance(last, int) else place) + 1
                continue
            left -= len(chunk.data)
            for position, header in batches.walk(chunk.data):
                if header.next_offset <= place:
                    continue
                for record in batches.decode(chunk.data[position : position + header.size]):
                    if record.offset < place or not self._is_shown(record, owner):
                        continue
                    if skip:
                        skip -= 1
                    elif len(plans) == limit:
                        return Page(plans, record.offset)
                    else:
                        plans.append(plan_of(record))
            place = chunk.next_offset
        return Page(plans, place if place < state.end else None)

    def _is_shown(self, record: batches.Record, owner: Owner) -> bool:
        state, place = self._state, record.offset
        return (
            state.state(place) == State.PENDING
            and state.is_live(place, owner)
            and uuid_in(record.key or b"") == owner.uuid
        )

    def find(self, topic: str, partition: int, offset: int) -> Pending[tuple[State, Plan]]:
        """A schedule by its id, and what became of it. What is over is known for a while."""
        return follow(self._find(topic, partition, offset))

    def _find(
        self, topic: str, partition: int, offset: int
    ) -> Generator[Pending[Any], Any, tuple[State, Plan]]:
        _, state, plan = yield from self._look(topic, partition, offset)
        return state, plan

    def _look(
        self, name: str, partition: int, id: int
    ) -> Generator[Pending[Any], Any, tuple[int, State, Plan]]:
        """Where it is, how it is, and what it says; ScheduleUnknown without one."""
        topic = self._around.topics.get(name)
        state, owner = self._state, self._owner_of(topic)
        unknown = ScheduleUnknown(
            f"topic {name} has no schedule {partition}/{id}, or it has been over for long",
            topic=name,
            partition=partition,
            offset=id,
        )
        while True:
            place = state.places.get(id, id)
            if owner is None or partition != 0 or state.state(place) == State.NONE:
                raise unknown
            if place in state.busy:
                # Whether it will have fired, nobody knows before it is durable.
                yield state.busy[place]
                continue
            chunk = yield self._engine.read(PARTITION, place, 1)
            if place in state.busy or state.places.get(id, id) != place:
                continue
            for record in batches.decode(chunk.data):
                if record.offset == place and uuid_in(record.key or b"") == owner.uuid:
                    plan = plan_of(record)
                    if plan.id == id:
                        is_purged = place < owner.purged_before
                        now = state.state(place)
                        if now == State.PENDING and is_purged:
                            now = owner.why
                        return place, now, plan
            raise unknown

    def _owner_of(self, topic: Topic) -> Owner | None:
        return self._state.owners_by_uuid.get(topic.uuid.bytes)

    # ---- cancelling

    def cancel(self, topic: str, partition: int, offset: int) -> Pending[Plan]:
        """It will not fire; done when that is durable. ScheduleOver when it has, or will not
        anyway."""
        return follow(self._cancel(topic, partition, offset))

    def _cancel(
        self, topic: str, partition: int, offset: int
    ) -> Generator[Pending[Any], Any, Plan]:
        place, now, plan = yield from self._look(topic, partition, offset)
        if now != State.PENDING:
            why = "" if now.why is None else f", because {now.why}"
            raise ScheduleOver(
                f"schedule {partition}/{offset} is {now.word} already{why}", state=now.word
            )
        state = self._state
        owner = state.owners_by_uuid[plan.uuid]
        done: Pending[None] = Pending()
        state.occupy([(place, owner)], done)
        try:
            yield self._mark_cancelled(place)
        except OutcomeUnknown as error:
            # It stays busy: the engine writes no more, and the next start will see.
            done.fail(error)
            raise
        except MillstreamError:
            if state.release(place, owner) and place in state.dropped:
                state.table.add((plan.due_ms,), (place,), (owner.number,))
            state.dropped.discard(place)
            done.succeed(None)
            self._arm()
            raise
        state.finish(place, State.CANCELLED)
        state.counts.cancelled += 1
        done.succeed(None)
        return plan

    def _mark_cancelled(self, place: int) -> Pending[None]:
        """Those of a turn are one mark."""
        gathered = self._cancelling
        if gathered is None:
            gathered = self._cancelling = ([], Pending())
            self._around.turns.soon(self._end_cancelling)
        gathered[0].append(place)
        return gathered[1]

    def _end_cancelling(self) -> None:
        assert self._cancelling is not None
        (places, done), self._cancelling = self._cancelling, None
        entry = mark_entry(self._around.clock.wall_ms(), State.CANCELLED, places)
        self._engine.append(*entry).then(
            lambda one: done.succeed(None) if one.error is None else done.fail(one.error)
        )

    # ---- topics that end

    def _topic_deleted(self, topic: Topic) -> None:
        self._end(topic, State.TOPIC_DELETED)

    def _end(self, topic: Topic, why: State) -> Pending[None]:
        """All schedules of a topic are over."""
        owner = self._owner_of(topic)
        if owner is None:
            return Pending.of(None)
        ending = follow(self._end_all(owner, why))
        ending.then(_log_failure)
        return ending

    def _end_all(self, owner: Owner, why: State) -> Generator[Pending[Any], Any, None]:
        """Whatever fires from here on, fires after this, so it does not fire."""
        entry = purge_entry(self._around.clock.wall_ms(), owner.uuid, why)
        owner.endings += 1
        try:
            before = yield self._engine.append(*entry)
        finally:
            owner.endings -= 1
        self._state.purge(owner, before, why)
        follow(self._sweep(owner)).then(_log_failure)

    def _sweep(self, owner: Owner) -> Generator[Pending[Any], Any, None]:
        """Note them as over, so that the log is cut. One that moves in the wheel meanwhile may be
        missed: it is met when it is due."""
        state, count = self._state, 0
        before = owner.purged_before
        for slot in state.table.slots():
            for _, place, number in slot.rows():
                at = place - state.base
                if number == owner.number and place < before and at >= 0:
                    is_pending = state.states[at] == State.PENDING
                    if is_pending and place not in state.busy:
                        state.states[at] = owner.why
                        state.forget_id(place)
                count += 1
                if count % SWEEP == 0:
                    yield self._breath()

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._around.turns.soon(lambda: pending.succeed(None))
        return pending

    # ---- firing

    def _arm(self) -> None:
        if self._is_stopped:
            return
        next_ms = self._state.table.next_ms()
        if self._timer is not None:
            self._around.timers.cancel(self._timer)
            self._timer = None
        if next_ms is None:
            return
        clock = self._around.clock
        wait_s = (next_ms - clock.wall_ms()) / 1000
        wait_s = max(wait_s, self._paused_until_s - clock.monotonic(), 0.0)
        self._armed_ms = next_ms
        self._timer = self._around.timers.after(min(wait_s, LOOK_S), self._timer_ran)

    def _timer_ran(self) -> None:
        self._timer = None
        self._turn()

    def _soon(self) -> None:
        """At the next turn of the loop: there is more to do."""
        if not self._is_soon:
            self._is_soon = True
            self._around.turns.soon(self._go_on)

    def _go_on(self) -> None:
        self._is_soon = False
        self._turn()

    def _turn(self) -> None:
        if self._is_stopped:
            return
        clock, table = self._around.clock, self._state.table
        start_s = clock.monotonic()

        def spent() -> bool:
            return clock.monotonic() - start_s > TURN_S

        now_ms = clock.wall_ms()
        is_open = table.advance(now_ms, spent)
        may_fire = start_s >= self._paused_until_s
        while table.ready and may_fire and self._firing.under_way < FIRINGS_MAX:
            dues = self._take_ready(now_ms)
            if dues:
                self._firing.fire(dues).then(self._fired)
            if spent():
                break
        if not is_open or (table.ready and may_fire and self._firing.under_way < FIRINGS_MAX):
            self._soon()
        elif not table.ready or not may_fire:
            self._arm()

    def _take_ready(self, now_ms: int) -> list[Due]:
        state, ready = self._state, self._state.table.ready
        slot = ready[0]
        part = slot.take(RECORDS_MAX)
        if not len(slot):
            ready.popleft()
        dues: list[Due] = []
        for due_ms, place, number in part.rows():
            owner, at = state.owners[number], place - state.base
            if at < 0 or state.states[at] != State.PENDING:
                continue
            if place in state.busy:
                state.dropped.add(place)
            elif place < owner.purged_before:
                state.states[at] = owner.why
                state.forget_id(place)
            elif due_ms > now_ms or owner.endings:
                # The clock was put back; or it ends, and if not, it is only a little late.
                state.table.add((max(due_ms, now_ms + TICK_MS),), (place,), (number,))
            else:
                dues.append(Due(place, owner, due_ms))
        return dues

    def _fired(self, _: Pending[None]) -> None:
        if not self._is_stopped:
            self._soon()

    def _try_later(self, error: MillstreamError, dues: list[Due]) -> None:
        state = self._state
        state.counts.retries += len(dues)
        self._paused_until_s = self._around.clock.monotonic() + PAUSE_S
        _logger().warning(
            "schedules are late; they are tried again", why=error.message, count=len(dues)
        )
        self._give_back(dues)

    def _give_back(self, dues: Sequence[Due]) -> None:
        """They are not fired now."""
        state = self._state
        for place, owner, due_ms in dues:
            if state.release(place, owner):
                state.table.add((due_ms,), (place,), (owner.number,))

    # ---- keeping the log short

    def _shorten(self) -> None:
        self._shortening = None
        follow(self._shortening_steps()).then(self._shortened)

    def _shortening_steps(self) -> Generator[Pending[Any], Any, None]:
        yield from self._tidy()
        yield from self._log.shorten()

    def _tidy(self) -> Generator[Pending[Any], Any, None]:
        """Drop from the wheel what was cancelled, purged or moved on: it may be years until it is
        met there."""
        state, looked = self._state, 0
        if len(state.table) <= 2 * state.pending + ROWS_SPARE:
            return
        for count in state.table.tidy(state.is_wanted):
            looked += count
            if looked >= SWEEP:
                looked = 0
                yield self._breath()

    def _shortened(self, done: Pending[None]) -> None:
        if done.error is not None:
            _logger().warning("the log of schedules was not cut", why=repr(done.error))
        if not self._is_stopped:
            self._shortening = self._around.timers.after(SHORTEN_S, self._shorten)
            self._arm()


def _log_failure(done: Pending[None]) -> None:
    if done.error is not None:
        why = done.error.message if isinstance(done.error, MillstreamError) else repr(done.error)
        _logger().error("schedules of a topic were not ended", why=why)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
