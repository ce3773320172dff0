"""The journal of leases: events of all ledgers of topics of one durability mode.

An internal topic, in the same mode as the topics whose leases it keeps. Events of one turn of the
loop are one append, and there is one append under way at a time, so an append that is refused has
none behind it that built on it: all that was gathered meanwhile is refused with it, and whoever
noted an event takes it back. A ledger that was part of that writes its whole state before its next
event, because the journal knows nothing of what was taken back.

A state is what is in memory when its append is made, and events that were noted before are in the
same append behind it. Those of a ledger that was put elsewhere since (a reset) are left out: the
state has it that they never were.

When the mode of a topic changes, its ledgers go on in another journal. Their states are written
there after all that was noted in the old one is durable, and the old one forgets them after that:
a crash in between finds both, and takes the newer.

What is to happen together with other partitions, as a dead letter does, is an append of its own,
so that a batch that is refused elsewhere takes no other event along.

The journal is cut: when enough has come together, ledgers whose newest state is old write it
again, and everything before the oldest state is removed.
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
    from collections.abc import Generator, Iterable, Sequence

    from millstream.broker.turns import Turns
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
    from millstream.log.partition import FsyncMode

SEGMENT_BYTES = 8 * 1024 * 1024
BATCH_BYTES_MAX = 4 * 1024 * 1024
# A start replays at most about twice so many bytes, and leases and settlings of records.
CUT_BYTES = 32 * 1024 * 1024
CUT_RECORDS = 500_000
# States that are written again go in parts, so that no turn of the loop gets long.
STATES_MAX = 200


class _Parcel:
    """What goes into one append."""

    __slots__ = ("entries", "ledgers", "pending", "values")

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        # Whose event it is, of which epoch.
        self.values: list[tuple[Ledger | None, int, bytes]] = []
        self.ledgers: dict[Ledger, None] = {}
        self.entries = entries
        self.pending: Pending[None] = Pending()


class LeaseJournal:
    __slots__ = (
        "_clock",
        "_cut_bytes",
        "_cut_records",
        "_engine",
        "_flying",
        "_gates",
        "_is_cutting",
        "_is_submitting",
        "_left",
        "_next_number",
        "_turns",
        "_waiting",
        "ledgers",
        "mode",
        "partition",
    )

    def __init__(self, engine: Engine, clock: Clock, turns: Turns, mode: FsyncMode) -> None:
        self.mode = mode
        self.partition = PartitionId(f"__leases_{mode}", 0)
        self._engine = engine
        self._clock = clock
        self._turns = turns
        self.ledgers: dict[int, Ledger] = {}
        self._next_number = 1
        self._waiting: deque[_Parcel] = deque()
        self._flying: _Parcel | None = None
        self._is_submitting = False
        # Other journals that have something under way of ledgers that are now here.
        self._gates: list[Pending[None]] = []
        # Ledgers that went to another journal and are not durable there: number and anchor.
        self._left: dict[int, int] = {}
        # Since the last cut.
        self._cut_bytes = 0
        self._cut_records = 0
        self._is_cutting = False

    # ---- noting

    def adopt(self, ledger: Ledger) -> None:
        """From now on its events are noted here."""
        before = ledger.journal
        if before is self:
            return
        if before is not None:
            before.leave(ledger)
            self._gates.append(before.settled())
        ledger.journal = self
        ledger.number = self._next_number
        self._next_number += 1
        ledger.needs_state = True
        self.ledgers[ledger.number] = ledger

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

    def _forget_left(self, ledger: Ledger) -> None:
        left, ledger.left = ledger.left, []
        for journal, number in left:
            del journal._left[number]
            journal._note_dropped(number)

    def _note_dropped(self, number: int) -> Pending[None]:
        parcel = self._parcel()
        parcel.values.append((None, 0, events.encode(events.Dropped(number))))
        return parcel.pending

    def note(self, ledger: Ledger, event: events.Event, records: int) -> Pending[None]:
        """Done when it is durable. `records` is about how many of them it is for."""
        parcel = self._parcel()
        parcel.ledgers[ledger] = None
        parcel.values.append((ledger, ledger.epoch, events.encode(event)))
        self._cut_records += records
        return parcel.pending

    def note_with(
        self, ledger: Ledger, event: events.Event, entries: Sequence[Entry]
    ) -> Pending[None]:
        """The same in one atomic append with batches for other partitions."""
        parcel = _Parcel(entries)
        parcel.ledgers[ledger] = None
        parcel.values.append((ledger, ledger.epoch, events.encode(event)))
        self._waiting.append(parcel)
        self._soon()
        return parcel.pending

    def write_state(self, ledgers: Iterable[Ledger]) -> Pending[None]:
        """What changed otherwise than by an event."""
        parcel = self._parcel()
        for ledger in ledgers:
            ledger.needs_state = True
            parcel.ledgers[ledger] = None
        return parcel.pending

    def settled(self) -> Pending[None]:
        """Done when all that was noted so far is durable."""
        last = self._waiting[-1] if self._waiting else self._flying
        return Pending.of(None) if last is None else last.pending

    def _parcel(self) -> _Parcel:
        if not self._waiting or self._waiting[-1].entries:
            self._waiting.append(_Parcel())
            self._soon()
        return self._waiting[-1]

    def _soon(self) -> None:
        if self._flying is None and not self._is_submitting:
            self._is_submitting = True
            self._turns.soon(self._submit)

    def _submit(self) -> None:
        self._is_submitting = False
        if self._flying is not None or not self._waiting:
            return
        while self._gates:
            if not self._gates[-1].is_done:
                self._gates[-1].then(lambda _: self._submit())
                return
            self._gates.pop()
        parcel = self._flying = self._waiting.popleft()
        try:
            stated, entries = self._encoded(parcel)
        except Exception as error:  # noqa: BLE001  nobody may be left without an answer
            self._done(parcel, [], Pending.failed(error))
            return
        if not entries and not parcel.entries:
            self._done(parcel, [], Pending.of(-1))
            return
        entries += parcel.entries
        if len(entries) == 1:
            appended: Pending[Any] = self._engine.append(*entries[0])
        else:
            appended = self._engine.append_atomic(entries)
        appended.then(lambda one: self._done(parcel, stated, one))

    def _encoded(self, parcel: _Parcel) -> tuple[list[Ledger], list[Entry]]:
        """The ledgers whose states are part of it, and the batches."""
        stated = [one for one in parcel.ledgers if one.needs_state and one.journal is self]
        values: list[bytes] = []
        for ledger in stated:
            ledger.version += 1
            values += map(events.encode, ledger.state_events())
        values += [
            value
            for ledger, epoch, value in parcel.values
            if ledger is None or ledger.epoch == epoch or ledger not in stated
        ]
        now_ms = self._clock.wall_ms()
        entries: list[Entry] = []
        fields: list[batches.Fields] = []
        size = 0
        for value in values:
            if fields and (size + len(value) > BATCH_BYTES or len(fields) == BATCH_RECORDS):
                entries.append(encoded(self.partition, fields))
                fields, size = [], 0
            fields.append((now_ms, None, value, ()))
            size += len(value)
            self._cut_bytes += len(value)
        if fields:
            entries.append(encoded(self.partition, fields))
        for ledger in stated:
            ledger.needs_state = False
        return stated, entries

    def _done(self, parcel: _Parcel, stated: list[Ledger], appended: Pending[Any]) -> None:
        error = appended.error
        if error is None:
            self._flying = None
            if stated:
                result = appended.result()
                base = result if isinstance(result, int) else result[0]
                for ledger in stated:
                    ledger.anchor = base
                    if ledger.left:
                        self._forget_left(ledger)
            parcel.pending.succeed(None)
        else:
            refused = [parcel]
            if not parcel.entries:
                # Later ones were noted on top of what is not there.
                refused += self._waiting
                self._waiting.clear()
            self._flying = None
            for one in refused:
                for ledger in one.ledgers:
                    ledger.needs_state = True
            for one in refused:
                one.pending.fail(error)
        if self._waiting:
            # At once: these have waited for a round already.
            self._submit()
        self._cut_when_due()

    # ---- cutting

    def _cut_when_due(self) -> None:
        is_due = self._cut_bytes > CUT_BYTES or self._cut_records > CUT_RECORDS
        if is_due and not self._is_cutting:
            self._is_cutting = True
            self._cut_bytes = self._cut_records = 0
            follow(self._cut()).then(self._has_cut)

    def _has_cut(self, done: Pending[None]) -> None:
        self._is_cutting = False
        if done.error is not None:
            _logger().warning("the journal of leases was not cut", error=str(done.error))

    def _cut(self) -> Generator[Pending[Any], Any, None]:
        end = self._engine.offsets(self.partition).high_watermark
        old = [one for one in self.ledgers.values() if one.anchor < end]
        for first in range(0, len(old), STATES_MAX):
            part = [one for one in old[first : first + STATES_MAX] if one.journal is self]
            if part:
                yield self.write_state(part)
        anchors = [one.anchor for one in self.ledgers.values() if one.anchor >= 0]
        anchors += [anchor for anchor in self._left.values() if anchor >= 0]
        yield self._engine.trim(self.partition, min([end, *anchors]))

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

    def _replay(self, offset: int, event: events.Event) -> None:
        if isinstance(event, events.State):
            ledger = Ledger(event.group, event.topic, event.partition, 0)
            ledger.cursors = event.cursors
            ledger.number, ledger.version = event.ledger, event.version
            ledger.journal, ledger.anchor, ledger.needs_state = self, offset, False
            self.ledgers[event.ledger] = ledger
            self._next_number = max(self._next_number, event.ledger + 1)
        elif isinstance(event, events.Dropped):
            self.ledgers.pop(event.ledger, None)
        else:
            # Of one that is gone: what was noted before its end may come after it.
            known = self.ledgers.get(event.ledger)
            if known is not None:
                known.apply(event)

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
