"""The log of schedules: read at a start, and kept short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from millstream.broker.schedule_values import (
    MARK,
    MOVED_ON,
    PARTITION,
    PURGE,
    SCHEDULE,
    SETTINGS,
    State,
    id_in,
    mark_entry,
    moved_fields,
    plan_of,
    read_mark,
    uuid_in,
)
from millstream.broker.views import READ_BYTES, encoded
from millstream.engine.pending import Pending
from millstream.errors import LogDamaged
from millstream.log import batch as batches

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.broker.schedule_state import ScheduleState
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns
    from millstream.log.segment import Chunk

# How long the loop is kept by the start before others have a turn.
SLICE_S = 0.01
RECOUNTED_AT_ONCE = 50_000
# Fewer offsets than these are not worth moving anything for.
SPAN_MIN = 100_000
# Moved on are those in front when less than this part of all that is kept is pending.
PENDING_PART = 4
MOVED_AT_ONCE = 256
# Ids of schedules that were moved on are remembered, at about 200 bytes each.
MOVED_MAX = 250_000


class ScheduleLog:
    __slots__ = ("_clock", "_engine", "_state", "_turns")

    def __init__(self, engine: Engine, state: ScheduleState, clock: Clock, turns: Turns) -> None:
        self._engine = engine
        self._state = state
        self._clock = clock
        self._turns = turns

    # ---- the start

    def load(self) -> Generator[Pending[Any], Any, None]:
        engine, state = self._engine, self._state
        if PARTITION.topic in {topic.name for topic in engine.topics()}:
            yield engine.alter(PARTITION.topic, settings=SETTINGS)
        else:
            yield engine.create(PARTITION.topic, 1, SETTINGS)
        yield engine.claim(PARTITION.topic)
        offset = state.base = engine.offsets(PARTITION).start
        slice_end_s = self._clock.monotonic() + SLICE_S
        while offset < engine.offsets(PARTITION).high_watermark:
            try:
                chunk: Chunk = yield engine.read(PARTITION, offset, READ_BYTES)
            except LogDamaged as error:
                _logger().error("schedules lost to damage", **error.fields)
                last = error.fields.get("last")
                if not isinstance(last, int) or last < offset:
                    raise
                offset = last + 1
                continue
            for position, header in batches.walk(chunk.data):
                self._replay(chunk.data[position : position + header.size], header)
            offset = chunk.next_offset
            if self._clock.monotonic() >= slice_end_s:
                yield self._breath()
                slice_end_s = self._clock.monotonic() + SLICE_S
        state.extend(offset)
        yield from self._recount()

    def _recount(self) -> Generator[Pending[Any], Any, None]:
        """How many each topic has: marks do not say whose schedules they are about."""
        state = self._state
        state.pending = 0
        for owner in state.owners:
            owner.pending = 0
        count = 0
        for slot in state.table.slots():
            for _, place, number in slot.rows():
                count += 1
                if count % RECOUNTED_AT_ONCE == 0:
                    yield self._breath()
                owner, at = state.owners[number], place - state.base
                if state.states[at] == State.PENDING:
                    if place >= owner.purged_before:
                        owner.pending += 1
                    else:
                        state.states[at] = owner.why
        state.pending = sum(owner.pending for owner in state.owners)

    def _replay(self, data: memoryview, header: batches.Header) -> None:
        """One batch: by columns, because there may be ten million records."""
        state = self._state
        columns = batches.decode_columns(data)
        bounds = memoryview(columns.key.offsets).cast("B").cast("i")
        keys = memoryview(columns.key.data)
        first_key = bytes(keys[bounds[0] : bounds[1]])
        kind = first_key[:1]
        if kind == SCHEDULE:
            dues = memoryview(columns.timestamp).cast("B").cast("q")
            base = header.base_offset
            if base < state.base:
                # The log is cut between batches only by what lies before the start.
                dues = dues[state.base - base :]
                base = state.base
            state.add(state.owner(uuid_in(first_key)), base, dues)
            return
        for record in batches.decode(data):
            key, value = record.key or b"", record.value or b""
            if key[:1] == MARK:
                self._apply(*read_mark(value))
            elif key[:1] == PURGE:
                owner = state.owner(key[1:])
                owner.purged_before, owner.why = record.offset, State(value[0])
            elif key[:1] == MOVED_ON and record.offset >= state.base:
                state.add(state.owner(uuid_in(key)), record.offset, (record.timestamp,))
                self._note_moved(id_in(key), record.offset)
            elif key[:1] == SCHEDULE and record.offset >= state.base:
                state.add(state.owner(uuid_in(key)), record.offset, (record.timestamp,))
        state.extend(header.next_offset)

    def _apply(self, mark: State, places: tuple[int, ...]) -> None:
        state = self._state
        for place in places:
            at = place - state.base
            if at < 0 or state.states[at] != State.PENDING:
                continue
            state.states[at] = mark
            if mark != State.MOVED:
                state.forget_id(place)

    def _note_moved(self, id: int, place: int) -> None:
        state = self._state
        before = state.places.get(id)
        if before is not None:
            state.ids.pop(before, None)
        state.places[id] = place
        state.ids[place] = id

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending

    # ---- keeping it short

    def shorten(self) -> Generator[Pending[Any], Any, None]:
        """Cut what is over, and move on what keeps much more than itself."""
        state = self._state
        while self._is_long():
            if not (yield from self._move_on()):
                break
        first = state.first_pending()
        if first > state.base:
            yield self._engine.trim(PARTITION, first)
            state.cut(first)

    def _is_long(self) -> bool:
        state = self._state
        span = state.end - state.first_pending()
        return (
            span >= SPAN_MIN
            and state.pending * PENDING_PART < span
            and len(state.ids) + MOVED_AT_ONCE <= MOVED_MAX
        )

    def _move_on(self) -> Generator[Pending[Any], Any, bool]:
        """The oldest ones that are pending; whether there were any."""
        state = self._state
        first = state.first_pending()
        chunk: Chunk = yield self._engine.read(PARTITION, first, READ_BYTES)
        moving: list[tuple[int, int, int, batches.Fields]] = []
        for position, header in batches.walk(chunk.data):
            if len(moving) >= MOVED_AT_ONCE:
                break
            for record in batches.decode(chunk.data[position : position + header.size]):
                place = record.offset
                if place < first or state.state(place) != State.PENDING:
                    continue
                owner = state.owners_by_uuid[uuid_in(record.key or b"")]
                if place < owner.purged_before:
                    state.states[place - state.base] = owner.why
                elif place not in state.busy:
                    plan = plan_of(record)
                    fields = moved_fields(record, plan.id)
                    moving.append((place, plan.id, owner.number, fields))
        if not moving:
            return state.first_pending() > first
        places = [place for place, *_ in moving]
        done: Pending[None] = Pending()
        owners = state.owners
        state.occupy([(place, owners[number]) for place, _, number, _ in moving], done)
        entries = [encoded(PARTITION, [fields]) for _, _, _, fields in moving]
        now_ms = self._clock.wall_ms()
        entries.append(mark_entry(now_ms, State.MOVED, places))
        try:
            offsets = yield self._engine.append_atomic(entries)
        except BaseException:
            for place, _, number, fields in moving:
                owner = owners[number]
                if state.release(place, owner) and place in state.dropped:
                    state.table.add((fields[0],), (place,), (number,))
                state.dropped.discard(place)
            done.succeed(None)
            raise
        for (place, id, number, fields), new in zip(moving, offsets, strict=False):
            state.finish(place, State.MOVED)
            state.add(owners[number], new, (fields[0],))
            self._note_moved(id, new)
        state.counts.moved += len(moving)
        done.succeed(None)
        return True


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
