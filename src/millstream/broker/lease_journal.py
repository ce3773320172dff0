"""The journal of leases: events of all ledgers of topics of one durability mode.

An internal topic, in the same mode as the topics whose leases it keeps. Events of one turn of the
loop are one append, and there is one append under way at a time, so an append that is refused has
none behind it that built on it: all that was gathered meanwhile is refused with it, and whoever
noted an event takes it back. A ledger that was part of that writes its whole state before its next
event, because the journal knows nothing of what was taken back. That a ledger was dropped is not
taken back: it is noted again, with what is noted next or a moment later, or the ledger would be
there again after a restart.

A state may be larger than an append, and takes its time: it is a draft until it is closed. Each
piece of it is what is in memory when its append is made, and events that were noted before are
behind it, in the same append or a later one. An event between two pieces is good for both the old
state and the draft, and a draft that something happened to, such as a reset or an append that was
refused, is left as it is and begun anew. So a crash finds the old state with all events, or the
new one. Events of a ledger that was put elsewhere since (a reset) are left out: the state has it
that they never were.

When the mode of a topic changes, its ledgers go on in another journal. Their states are written
there after all that was noted in the old one is durable, and the old one forgets them after that:
a crash in between finds both, and takes the newer. What was noted in the new one before does not
wait for that, or two journals could wait for each other.

What is to happen together with other partitions, as a dead letter does, is an append of its own,
so that a batch that is refused elsewhere takes no other event along.

The journal is cut: when enough has come together, ledgers whose newest state is old write it
again, in between other events, and everything before the oldest state is removed. How much is
enough goes with what the states take: they would be written again and again otherwise.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import structlog

from millstream.broker import lease_events as events
from millstream.broker.ledger import Ledger
from millstream.broker.views import BATCH_BYTES, BATCH_RECORDS, READ_BYTES, Entry, encoded
from millstream.engine.pending import Pending, follow
from millstream.errors import LogDamaged
from millstream.log import batch as batches
from millstream.log.partition import PartitionId, PartitionSettings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from millstream.broker.surroundings import Surroundings
    from millstream.broker.wheel import Timer
    from millstream.engine.protocol import Engine
    from millstream.log.partition import FsyncMode

SEGMENT_BYTES = 8 * 1024 * 1024
BATCH_BYTES_MAX = 4 * 1024 * 1024
# A start replays at most about twice so many bytes, and leases and settlings of records; or three
# times what the states take, if that is more.
CUT_BYTES = 32 * 1024 * 1024
CUT_RECORDS = 500_000
# After a cut that failed the next one waits for so long, and twice as long each time.
CUT_PAUSE_S = 1.0
CUT_PAUSE_MAX_S = 60.0
# Ledgers whose end was refused are noted again after so long, if nothing else was noted before.
DROP_AGAIN_S = 1.0
# States go in parts of about so much, so that no turn of the loop gets long, and events in parts
# of so much: an atomic append may have 64 MiB.
PART_BYTES = 512 * 1024
PARCEL_BYTES = 8 * 1024 * 1024


class Draft:
    """A state that is being written."""

    __slots__ = ("base", "parts", "pieces")

    def __init__(self, pieces: Iterator[list[events.Event]]) -> None:
        self.pieces = pieces
        # How many events of it are written.
        self.parts = 0
        # Where it begins, or a little before; known when that is durable.
        self.base = -1


class _Parcel:
    """What goes into one append."""

    __slots__ = (
        "begun",
        "closed",
        "dropped",
        "entries",
        "has_states",
        "ledgers",
        "pending",
        "rewriting",
        "size",
        "values",
    )

    def __init__(
        self, entries: Sequence[Entry] = (), rewriting: deque[Ledger] | None = None
    ) -> None:
        # Whose event it is, of which epoch.
        self.values: list[tuple[Ledger, int, bytes]] = []
        # Ledgers that are to be forgotten, by number.
        self.dropped: list[int] = []
        self.size = 0
        # With their numbers.
        self.ledgers: dict[Ledger, int] = {}
        self.entries = entries
        # Of a part of a cut: whose states are to be written again. What is done is taken out.
        self.rewriting = rewriting
        self.has_states = False
        # Drafts that begin in it, and those that it closes.
        self.begun: list[Draft] = []
        self.closed: list[tuple[Ledger, Draft]] = []
        self.pending: Pending[None] = Pending()


class LeaseJournal:
    __slots__ = (
        "_clock",
        "_cut_bytes",
        "_cut_not_before",
        "_cut_pause_s",
        "_cut_records",
        "_drafts",
        "_drop_again",
        "_dropped",
        "_engine",
        "_flying",
        "_gate",
        "_gated",
        "_has_stopped",
        "_is_cutting",
        "_is_submitting",
        "_left",
        "_next_number",
        "_state_bytes",
        "_state_records",
        "_timers",
        "_turns",
        "_waiting",
        "ledgers",
        "mode",
        "partition",
    )

    def __init__(self, engine: Engine, around: Surroundings, mode: FsyncMode) -> None:
        self.mode = mode
        self.partition = PartitionId(f"__leases_{mode}", 0)
        self._engine = engine
        self._clock = around.clock
        self._timers = around.timers
        self._turns = around.turns
        self.ledgers: dict[int, Ledger] = {}
        self._next_number = 1
        self._waiting: deque[_Parcel] = deque()
        self._flying: _Parcel | None = None
        self._is_submitting = False
        # What the newest parcel waits for, if it is of ledgers that came from another journal.
        self._gate: Pending[None] | None = None
        self._gated: _Parcel | None = None
        # Ledgers that went to another journal and are not durable there, or whose end here is not:
        # number and anchor.
        self._left: dict[int, int] = {}
        # Ledgers whose end was refused: they go into the next parcel.
        self._dropped: list[int] = []
        self._drop_again: Timer | None = None
        # Since the last cut, without the states that it wrote; and what those took.
        self._cut_bytes = 0
        self._cut_records = 0
        self._state_bytes = 0
        self._state_records = 0
        self._is_cutting = False
        self._cut_not_before = 0.0
        self._cut_pause_s = CUT_PAUSE_S
        self._has_stopped = False
        # At a start: states that are not closed yet.
        self._drafts: dict[int, Ledger] = {}

    # ---- noting

    def adopt(self, ledger: Ledger) -> None:
        """From now on its events are noted here."""
        before = ledger.journal
        if before is self:
            return
        if before is not None:
            before.leave(ledger)
            self._wait_for(ledger, before.settled())
        ledger.journal = self
        ledger.number = self._next_number
        self._next_number += 1
        ledger.anchor = -1
        ledger.forget_state()
        self.ledgers[ledger.number] = ledger

    def _wait_for(self, ledger: Ledger, gate: Pending[None]) -> None:
        """Its state, and all that is noted after it. What was noted before goes ahead: so a parcel
        only ever waits for those that were there before it."""
        ledger.gate = gate
        if gate is not self._gate and not gate.is_done:
            self._gate, self._gated = gate, _Parcel()
            self._add(self._gated)

    def leave(self, ledger: Ledger) -> None:
        """It goes on elsewhere; here it is kept until it is durable there."""
        del self.ledgers[ledger.number]
        self._left[ledger.number] = ledger.anchor
        ledger.left.append((self, ledger.number))

    def drop(self, ledger: Ledger) -> Pending[None]:
        """Forget a ledger."""
        del self.ledgers[ledger.number]
        ledger.journal = None
        self._forget_left(ledger)
        return self._note_dropped(ledger.number)

    def dropped(self) -> Pending[None]:
        """Done when the end of every ledger that was dropped so far is durable."""
        if self._dropped:
            return self._parcel().pending
        for parcel in reversed(self._waiting):
            if parcel.dropped:
                return parcel.pending
        flying = self._flying
        return flying.pending if flying is not None and flying.dropped else Pending.of(None)

    def _forget_left(self, ledger: Ledger) -> None:
        left, ledger.left = ledger.left, []
        for journal, number in left:
            journal._note_dropped(number)

    def _note_dropped(self, number: int) -> Pending[None]:
        parcel = self._parcel()
        parcel.dropped.append(number)
        return parcel.pending

    def _note_dropped_again(self) -> None:
        self._drop_again = None
        if self._dropped:
            self._parcel()

    def note(self, ledger: Ledger, event: events.Event, records: int) -> Pending[None]:
        """Done when it is durable. `records` is about how many of them it is for."""
        parcel = self._parcel()
        value = events.encode(event)
        parcel.ledgers[ledger] = ledger.number
        parcel.values.append((ledger, ledger.epoch, value))
        parcel.size += len(value)
        self._cut_records += records
        return parcel.pending

    def note_with(
        self, ledger: Ledger, event: events.Event, entries: Sequence[Entry]
    ) -> Pending[None]:
        """The same in one atomic append with batches for other partitions."""
        parcel = _Parcel(entries)
        parcel.ledgers[ledger] = ledger.number
        parcel.values.append((ledger, ledger.epoch, events.encode(event)))
        self._add(parcel)
        return parcel.pending

    def write_state(self, ledgers: Iterable[Ledger]) -> Pending[None]:
        """What changed otherwise than by an event."""
        parcel = self._parcel()
        for ledger in ledgers:
            ledger.forget_state()
            parcel.ledgers[ledger] = ledger.number
        return parcel.pending

    def settled(self) -> Pending[None]:
        """Done when all that was noted so far is durable."""
        last = self._waiting[-1] if self._waiting else self._flying
        return Pending.of(None) if last is None else last.pending

    def _parcel(self) -> _Parcel:
        last = self._waiting[-1] if self._waiting else None
        if last is None or last.entries or last.rewriting is not None or last.size > PARCEL_BYTES:
            last = _Parcel()
            self._add(last)
        if self._dropped:
            last.dropped += self._dropped
            self._dropped = []
        return last

    def _add(self, parcel: _Parcel) -> None:
        self._waiting.append(parcel)
        self._soon()

    def _soon(self) -> None:
        if self._flying is None and not self._is_submitting:
            self._is_submitting = True
            self._turns.at_end(self._submit)

    def _is_submitted(self, parcel: _Parcel) -> None:
        if parcel is self._gated:
            # Whoever comes with the same gate needs a parcel of its own again: in the last one
            # there may be others by now, which were there before.
            self._gate = self._gated = None

    # ---- writing

    def _submit(self) -> None:
        self._is_submitting = False
        if self._flying is not None or not self._waiting:
            return
        parcel = self._waiting[0]
        needing = parcel.rewriting
        if needing is None:
            needing = self._needing(parcel)
            for ledger in needing:
                if ledger.gate is not None and not ledger.gate.is_done:
                    ledger.gate.then(lambda _: self._submit())
                    return
        try:
            values = self._states(parcel, needing) if needing else []
            if needing and parcel.rewriting is None:
                # More than one append may have: this part goes ahead of the events.
                parcel = _ahead(parcel)
            else:
                self._waiting.popleft()
                self._is_submitted(parcel)
                values += self._events(parcel)
            self._flying = parcel
            entries = self._entries(values, is_cut=parcel.rewriting is not None)
        except Exception as error:  # noqa: BLE001  nobody may be left without an answer
            if self._waiting and self._waiting[0] is parcel:
                self._waiting.popleft()
            self._flying = parcel
            self._done(parcel, Pending.failed(error))
            return
        if not entries and not parcel.entries:
            self._done(parcel, Pending.of(-1))
            return
        entries += parcel.entries
        if len(entries) == 1:
            appended: Pending[Any] = self._engine.append(*entries[0])
        else:
            appended = self._engine.append_atomic(entries)
        appended.then(lambda one: self._done(parcel, one))

    def _needing(self, parcel: _Parcel) -> deque[Ledger]:
        """The ledgers whose states are to be written before its events."""
        # One that left and came back since has another number, and a parcel of its own.
        return deque(
            one
            for one, number in parcel.ledgers.items()
            if one.needs_state and one.journal is self and one.number == number
        )

    def _states(self, parcel: _Parcel, needing: deque[Ledger]) -> list[bytes]:
        """States, as far as one append goes; those that are whole are taken out."""
        parcel.has_states = True
        values: list[bytes] = []
        size = 0
        while needing and size < PART_BYTES:
            ledger = needing[0]
            has_come = ledger.gate is None or ledger.gate.is_done
            if ledger.journal is not self or not has_come:
                # It went elsewhere since the cut began; or came back, and has a parcel of its own.
                needing.popleft()
                continue
            draft = ledger.draft
            if draft is None:
                ledger.version += 1
                draft = ledger.draft = Draft(ledger.state_events())
                parcel.begun.append(draft)
            parcel.ledgers[ledger] = ledger.number
            for piece in draft.pieces:
                draft.parts += len(piece)
                for event in piece:
                    part = events.encode(event)
                    size += len(part)
                    values.append(events.encode(events.Drafted(ledger.number, part)))
                if size >= PART_BYTES:
                    break
            else:
                values.append(events.encode(events.Closed(ledger.number, draft.parts)))
                parcel.closed.append((ledger, draft))
                needing.popleft()
        return values

    def _events(self, parcel: _Parcel) -> list[bytes]:
        """Without those of ledgers that begin anew by now: their states are before these."""
        return [
            value
            for ledger, epoch, value in parcel.values
            if ledger.epoch == epoch or ledger.journal is not self
        ] + [events.encode(events.Dropped(number)) for number in parcel.dropped]

    def _entries(self, values: list[bytes], *, is_cut: bool) -> list[Entry]:
        now_ms = self._clock.wall_ms()
        entries: list[Entry] = []
        fields: list[batches.Fields] = []
        size = total = 0
        for value in values:
            if fields and (size + len(value) > BATCH_BYTES or len(fields) == BATCH_RECORDS):
                entries.append(encoded(self.partition, fields))
                fields, size = [], 0
            fields.append((now_ms, None, value, ()))
            size += len(value)
            total += len(value)
        if fields:
            entries.append(encoded(self.partition, fields))
        if is_cut:
            self._state_bytes += total
        else:
            self._cut_bytes += total
        return entries

    def _done(self, parcel: _Parcel, appended: Pending[Any]) -> None:
        error = appended.error
        self._flying = None
        if error is None:
            if parcel.has_states:
                result = appended.result()
                self._has_written(parcel, result if isinstance(result, int) else result[0])
            for number in parcel.dropped:
                self._left.pop(number, None)
            parcel.pending.succeed(None)
        else:
            refused = [parcel]
            if not parcel.entries:
                # Later ones were noted on top of what is not there.
                refused += self._waiting
                self._waiting.clear()
            for one in refused:
                self._is_submitted(one)
                self._dropped += one.dropped
                for ledger in one.ledgers:
                    ledger.forget_state()
            if self._dropped and self._drop_again is None and not self._has_stopped:
                self._drop_again = self._timers.after(DROP_AGAIN_S, self._note_dropped_again)
            for one in refused:
                one.pending.fail(error)
        if self._waiting:
            if parcel.has_states:
                # States are many bytes: others have a turn.
                self._is_submitting = True
                self._turns.soon(self._submit)
            else:
                # At once: these have waited for a round already.
                self._submit()
        self._cut_when_due()

    def _has_written(self, parcel: _Parcel, base: int) -> None:
        for draft in parcel.begun:
            draft.base = base
        for ledger, draft in parcel.closed:
            if ledger.draft is not draft:
                continue
            ledger.draft = None
            ledger.needs_state = False
            ledger.anchor = draft.base
            if ledger.left:
                self._forget_left(ledger)

    def stop(self) -> None:
        """What is left undone stays so until the next start."""
        self._has_stopped = True
        if self._drop_again is not None:
            self._timers.cancel(self._drop_again)
            self._drop_again = None

    # ---- cutting

    def _cut_when_due(self) -> None:
        bytes_max = max(CUT_BYTES, 2 * self._state_bytes)
        records_max = max(CUT_RECORDS, 2 * self._state_records)
        is_due = self._cut_bytes > bytes_max or self._cut_records > records_max
        if is_due and not self._is_cutting and self._clock.monotonic() >= self._cut_not_before:
            self._is_cutting = True
            before = self._cut_bytes, self._cut_records
            self._cut_bytes = self._cut_records = 0
            follow(self._cut()).then(lambda done: self._has_cut(done, *before))

    def _has_cut(self, done: Pending[None], size: int, records: int) -> None:
        self._is_cutting = False
        if done.error is None:
            self._cut_pause_s = CUT_PAUSE_S
            return
        # It is still due.
        self._cut_bytes += size
        self._cut_records += records
        self._cut_not_before = self._clock.monotonic() + self._cut_pause_s
        self._cut_pause_s = min(2 * self._cut_pause_s, CUT_PAUSE_MAX_S)
        _logger().warning("the journal of leases was not cut", error=str(done.error))

    def _cut(self) -> Generator[Pending[Any], Any, None]:
        end = self._engine.offsets(self.partition).high_watermark
        old = deque(one for one in self.ledgers.values() if one.anchor < end)
        self._state_bytes = 0
        self._state_records = sum(len(one.open) + len(one.acking) for one in old)
        while old:
            parcel = _Parcel(rewriting=old)
            self._add(parcel)
            yield parcel.pending
        ledgers = self.ledgers.values()
        places = [
            *(one.anchor for one in ledgers),
            *(one.draft.base for one in ledgers if one.draft is not None),
            *self._left.values(),
        ]
        yield self._engine.trim(self.partition, min([end, *(one for one in places if one >= 0)]))

    # ---- the start

    def load(self) -> Pending[None]:
        """Every ledger as it was; their leases are not armed."""
        return follow(self._load())

    def _load(self) -> Generator[Pending[Any], Any, None]:
        id = self.partition
        settings = PartitionSettings(
            fsync=self.mode,
            segment_bytes=SEGMENT_BYTES,
            retention_age_ms=None,
            retention_bytes=None,
            batch_bytes_max=BATCH_BYTES_MAX,
        )
        if id.topic in {topic.name for topic in self._engine.topics()}:
            yield self._engine.alter(id.topic, settings=settings)
        else:
            yield self._engine.create(id.topic, 1, settings)
        yield self._engine.claim(id.topic)
        offset = self._engine.offsets(id).start
        while offset < self._engine.offsets(id).high_watermark:
            try:
                chunk = yield self._engine.read(id, offset, READ_BYTES)
            except LogDamaged as error:
                _logger().error("leases lost to damage; records may come again", **error.fields)
                last = error.fields.get("last")
                if not isinstance(last, int) or last < offset:
                    raise
                offset = last + 1
                continue
            for position, header in batches.walk(chunk.data):
                for record in batches.decode(chunk.data[position : position + header.size]):
                    if record.value is not None and record.offset >= offset:
                        self._replay(record.offset, events.decode(record.value))
            offset = chunk.next_offset
            yield self._breath()
        self._drafts.clear()

    def _replay(self, offset: int, event: events.Event) -> None:
        number = event.ledger
        match event:
            case events.State():
                self._drafts.pop(number, None)
                self.ledgers[number] = self._stated(offset, event)
            case events.Drafted():
                self._replay_draft(offset, number, events.decode(event.part))
            case events.Closed():
                self._close(event)
            case events.Dropped():
                self._drafts.pop(number, None)
                self.ledgers.pop(number, None)
            case _:
                # Of one that is gone: what was noted before its end may come after it.
                for known in (self.ledgers.get(number), self._drafts.get(number)):
                    if known is not None:
                        known.apply(event)

    def _stated(self, offset: int, state: events.State) -> Ledger:
        ledger = Ledger(state.group, state.topic, state.partition, 0)
        ledger.cursors = state.cursors
        ledger.number, ledger.version = state.ledger, state.version
        ledger.journal, ledger.anchor, ledger.needs_state = self, offset, False
        self._next_number = max(self._next_number, state.ledger + 1)
        return ledger

    def _replay_draft(self, offset: int, number: int, part: events.Event) -> None:
        if isinstance(part, events.State):
            ledger = self._drafts[number] = self._stated(offset, part)
            ledger.draft = Draft(iter(()))
        else:
            found = self._drafts.get(number)
            if found is None:
                # Its begin was cut off, so there is a newer one.
                return
            ledger = found
            ledger.apply(part)
        assert ledger.draft is not None
        ledger.draft.parts += 1

    def _close(self, event: events.Closed) -> None:
        ledger = self._drafts.pop(event.ledger, None)
        if ledger is None:
            # Its begin was cut off, so there is a newer one.
            return
        draft, ledger.draft = ledger.draft, None
        if draft is not None and draft.parts == event.parts:
            self.ledgers[event.ledger] = ledger
        else:
            # Damage took some of it. What was known before is older, but whole.
            _logger().error("a state of leases is not whole", ledger=event.ledger)

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending


def _ahead(parcel: _Parcel) -> _Parcel:
    """What was written of the states that a parcel needs, as a parcel that goes before it."""
    ahead = _Parcel()
    ahead.has_states = True
    ahead.ledgers = dict.fromkeys(parcel.ledgers, 0)
    ahead.begun, parcel.begun = parcel.begun, []
    ahead.closed, parcel.closed = parcel.closed, []
    return ahead


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
