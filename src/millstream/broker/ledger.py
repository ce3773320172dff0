"""A ledger: what a group knows of one partition that it receives from by lease.

Records are given out in their order, lane by lane, so a cursor and the open records below it say
all there is to say: what is below the cursor and not open is settled. So memory grows with what is
in flight, never with the backlog, also when one lane races ahead of another.

    cursor    the next record that was never given out; one for all lanes, or one for each
    open      a grant   leased for the first time: nothing else is to be said of it
              ready     was given back, or its time came: goes out next
              leased    a worker has it, until its grant's deadline
              waiting   failed, comes back after a while
              held      passed by, because another record of its key is open
              leaving   failed for good, on its way to the dead letters
    acking    leased for the first time, and acked, but that is not durable yet

Most records are leased once and acked, so such a record has no object of its own: it costs one
place in a map, and a hundred of them are added and removed together.

Nothing here waits, reads or writes: `delivery` does, and tells the ledger when it is durable.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from millstream.broker import lease_events as events
from millstream.broker.lease_events import OpenRecord
from millstream.log.batch import LANES
from millstream.wire.dead_letters import bounded_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.broker.delivery_values import LeaseState
    from millstream.broker.lease_journal import Draft, LeaseJournal
    from millstream.broker.wheel import Timer
    from millstream.engine.pending import Pending

NORMAL = LANES.index("normal")
# How many open records one piece of a state has: with errors as long as they may be it takes the
# loop a few milliseconds.
PIECE_RECORDS = 500

READY, LEASED, WAITING, HELD, LEAVING = range(5)
# No receipt has it.
LEFT_NONCE = "-"
# What is said of a failure that nobody told us of.
RAN_OUT = "the visibility timeout ran out"
STATE_NAMES: tuple[LeaseState, ...] = ("ready", "leased", "waiting", "waiting", "waiting")


class Tally:
    """Records that are open in all ledgers of a group."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = 0


class Grant:
    """What one receive got of one lane of one partition; its records run out together."""

    __slots__ = (
        "deadline_ms",
        "duration_ms",
        "is_noted",
        "lane",
        "ledger",
        "left",
        "member",
        "nonce",
        "offsets",
        "opens",
        "timer",
    )

    def __init__(self, ledger: Ledger, lane: int) -> None:
        self.ledger = ledger
        self.lane = lane
        self.nonce = ""
        self.member: str | None = None
        self.duration_ms = 0
        self.deadline_ms = 0
        # Until then its records are taken, but nobody has them.
        self.is_noted = False
        # Those that are leased for the first time, and the others; some may be settled since.
        self.offsets: list[int] = []
        self.opens: list[Open] = []
        # How many of them are still leased under it.
        self.left = 0
        self.timer: Timer | None = None

    def begin(self, nonce: str, member: str | None, duration_ms: int, deadline_ms: int) -> None:
        self.nonce = nonce
        self.member = member
        self.duration_ms = duration_ms
        self.deadline_ms = deadline_ms
        self.is_noted = True


class Failure:
    """Why, and since when, a record comes back."""

    __slots__ = ("error", "first_ms", "last_ms")

    def __init__(self, first_ms: int, last_ms: int, error: str) -> None:
        self.first_ms = first_ms
        self.last_ms = last_ms
        # There may be many that wait: it is bounded here, whoever wrote it.
        self.error = bounded_error(error)


class Open:
    """A record below the cursor that is not settled, and of which there is something to say."""

    __slots__ = (
        "deliveries",
        "failure",
        "grant",
        "is_busy",
        "key",
        "lane",
        "offset",
        "state",
        "timer",
        "wait_ms",
        "when_ms",
    )

    def __init__(self, offset: int, lane: int, key: int = 0) -> None:
        self.offset = offset
        self.lane = lane
        self.key = key
        self.deliveries = 0
        self.state = READY
        # What was decided about it is not durable yet: nobody else may decide.
        self.is_busy = False
        self.grant: Grant | None = None
        self.failure: Failure | None = None
        # While it waits: until when, and how long that was when it began.
        self.when_ms = 0
        self.wait_ms = 0
        self.timer: Timer | None = None


class Ledger:
    __slots__ = (
        "acking",
        "anchor",
        "counts",
        "cursors",
        "draft",
        "epoch",
        "gate",
        "group",
        "is_reading",
        "journal",
        "keys",
        "last_served",
        "left",
        "needs_state",
        "number",
        "open",
        "partition",
        "passed",
        "ready",
        "taking",
        "tally",
        "topic",
        "version",
    )

    def __init__(self, group: str, topic: bytes, partition: int, cursor: int) -> None:
        self.group = group
        # By its UUID.
        self.topic = topic
        self.partition = partition
        self.cursors = [cursor]
        self.open: dict[int, Grant | Open] = {}
        self.acking: dict[int, Grant] = {}
        self.tally = Tally()
        # Offsets that are ready, by lane; some may be settled or taken since.
        self.ready: list[list[int]] = [[] for _ in LANES]
        # Keys of open records, where order is kept: the one that may go out, then those held.
        self.keys: dict[int, deque[Open]] = {}
        # Raised when all leases end at once, so that who waits for a read notices.
        self.epoch = 0
        # Somebody reads at the cursor; whoever else wants to waits for that.
        self.is_reading = False
        # What the cursor passed and nobody has noted: records that were taken by a receive that
        # goes on elsewhere, and those that are ready or held. Who notes a later cursor notes them
        # too, or a crash would lose them.
        self.taking: dict[Grant, None] = {}
        self.passed: dict[int, Open] = {}
        self.counts = [0] * len(LANES)
        self.last_served: list[float | None] = [None] * len(LANES)
        # Of the journal: where the newest state is, and whether the next event needs one first.
        self.journal: LeaseJournal | None = None
        self.number = 0
        self.version = 0
        self.anchor = -1
        self.needs_state = True
        # A state that is being written, in several appends.
        self.draft: Draft | None = None
        # What has to be durable elsewhere before a state is written.
        self.gate: Pending[None] | None = None
        # Journals that it was in before, and its numbers there, until it is durable in this one.
        self.left: list[tuple[LeaseJournal, int]] = []

    # ---- looking

    def cursor(self, lane: int) -> int:
        return self.cursors[lane] if len(self.cursors) > 1 else self.cursors[0]

    @property
    def first_cursor(self) -> int:
        """Of the lane that is furthest behind."""
        return min(self.cursors)

    def first_open(self) -> int | None:
        return min([min(some) for some in (self.open, self.acking) if some], default=None)

    def find(self, offset: int) -> Open | None:
        """A record that is open, as an object of its own from now on."""
        one = self.open.get(offset)
        if one is None or isinstance(one, Open):
            return one
        grant = one
        one = self.open[offset] = Open(offset, grant.lane)
        if grant.is_noted:
            one.deliveries = 1
            one.state = LEASED
            one.grant = grant
            grant.opens.append(one)
        return one

    def find_all(self, first: int = 0) -> list[Open]:
        """All that is open from an offset on, to be looked at: nothing is changed by it."""
        return [
            one if isinstance(one, Open) else _seen(offset, one)
            for some in (self.open, self.acking)
            for offset, one in some.items()
            if offset >= first
        ]

    def lane_counts(self) -> list[tuple[int, int]]:
        """Of each lane: how many are leased, and how many are ready again."""
        leased, ready = [0] * len(LANES), [0] * len(LANES)
        for one in self.open.values():
            if isinstance(one, Grant) or one.state == LEASED:
                leased[one.lane] += 1
            elif one.state == READY:
                ready[one.lane] += 1
        for grant in self.acking.values():
            leased[grant.lane] += 1
        return list(zip(leased, ready, strict=True))

    def find_ready(self, lane: int) -> Open | None:
        """The first that is ready, if any."""
        heap = self.ready[lane]
        while heap:
            found = self.open.get(heap[0])
            if isinstance(found, Open) and found.state == READY and not found.is_busy:
                return found
            heappop(heap)
        return None

    def take_ready(self, lane: int, count: int) -> list[Open]:
        """Up to so many of them, in their order, busy from now on."""
        taken: list[Open] = []
        heap = self.ready[lane]
        while len(taken) < count:
            found = self.find_ready(lane)
            if found is None:
                break
            heappop(heap)
            found.is_busy = True
            taken.append(found)
        return taken

    # ---- changing

    def use_lanes(self) -> None:
        """From now on each lane has a cursor of its own."""
        if len(self.cursors) == 1:
            self.cursors *= len(LANES)

    def move_cursor(self, lane: int, offset: int) -> None:
        at = lane if len(self.cursors) > 1 else 0
        self.cursors[at] = max(self.cursors[at], offset)

    def jump(self, offset: int) -> None:
        """Past what is not there any more."""
        self.cursors = [max(cursor, offset) for cursor in self.cursors]

    def take(self, offsets: list[int], grant: Grant) -> None:
        """Records that the cursor passes, for a receive that is under way."""
        self.open.update(dict.fromkeys(offsets, grant))
        self.tally.open += len(offsets)
        self.taking[grant] = None
        grant.offsets += offsets

    def add(self, offset: int, lane: int, key: int = 0) -> Open:
        """A record that the cursor passes. With a key it may have to wait for another."""
        one = self.open[offset] = self.passed[offset] = Open(offset, lane, key)
        self.tally.open += 1
        if key:
            line = self.keys.get(key)
            if line is None:
                self.keys[key] = deque((one,))
            else:
                one.state = HELD
                line.append(one)
        return one

    def lease(self, one: Open, grant: Grant) -> None:
        one.state = LEASED
        one.grant = grant
        one.deliveries += 1

    def make_ready(self, one: Open) -> None:
        one.grant = None
        one.is_busy = False
        one.state = READY
        heappush(self.ready[one.lane], one.offset)

    def remove(self, one: Open) -> Open | None:
        """Settled for good. Answers the record of its key that is ready for it, if any."""
        if self.open.pop(one.offset, None) is None:
            return None
        self.passed.pop(one.offset, None)
        self.tally.open -= 1
        one.grant = None
        line = self.keys.get(one.key) if one.key else None
        if line is None:
            return None
        if line[0] is not one:
            line.remove(one)
            return None
        line.popleft()
        if not line:
            del self.keys[one.key]
            return None
        self.make_ready(line[0])
        return line[0]

    def clear(self, cursor: int) -> list[Open]:
        """Begin anew at an offset. Answers what was open, all of it as objects."""
        self.open.update(self.acking)
        gone = [one for one in map(self.find, list(self.open)) if one is not None]
        self.tally.open -= len(gone)
        self.cursors = [cursor]
        self.open = {}
        self.acking = {}
        self.ready = [[] for _ in LANES]
        self.keys = {}
        self.taking = {}
        self.passed = {}
        self.epoch += 1
        self.forget_state()
        return gone

    def acked(self, offsets: list[int]) -> None:
        """Those that were leased for the first time are settled for good."""
        acking = self.acking
        for offset in offsets:
            del acking[offset]
        self.tally.open -= len(offsets)

    def clamp(self, start: int, end: int) -> bool:
        """Nothing may lie outside of what recovery has found; whether something did."""
        outside = [offset for offset in self.open if not start <= offset < end]
        if not outside and start <= min(self.cursors) and max(self.cursors) <= end:
            return False
        for offset in outside:
            del self.open[offset]
        self.cursors = [max(start, min(cursor, end)) for cursor in self.cursors]
        self.forget_state()
        return True

    # ---- events

    def forget_state(self) -> None:
        """What is in the journal of it does not hold any more, nor what is being written."""
        self.needs_state = True
        self.draft = None

    def state_events(self) -> Iterator[list[events.Event]]:
        """All that there is, as a restart is to find it, piece by piece. Each piece is as things
        are when it is asked for: events that are noted after the first one was are good for those
        that came before them, and for those that come after them."""
        cursors = list(self.cursors)
        state = events.State(
            self.number, self.version, self.group, self.topic, self.partition, cursors
        )
        offsets = [*self.open, *self.acking]
        yield [state]
        for first in range(0, len(offsets), PIECE_RECORDS):
            yield self._piece(offsets[first : first + PIECE_RECORDS], cursors)

    def _piece(self, offsets: list[int], cursors: list[int]) -> list[events.Event]:
        """Of those that are still open. The cursors are those of the first piece: what they have
        passed since is not in any piece."""
        leased: dict[Grant, list[int]] = {}
        records: list[OpenRecord] = []
        for offset in offsets:
            one = self.open.get(offset) or self.acking.get(offset)
            if one is None:
                continue
            if isinstance(one, Open):
                records.append(_recorded(one))
            elif one.is_noted:
                leased.setdefault(one, []).append(offset)
            else:
                records.append(OpenRecord(offset, one.lane, 0))
        piece: list[events.Event] = [
            self._granted(grant, _runs_of(sorted(some), grant.lane), [], [], cursors)
            for grant, some in leased.items()
        ]
        if records:
            piece.append(events.Opens(self.number, records))
        return piece

    def granted(self, grant: Grant) -> events.Granted:
        """A grant that was taken, and what else the cursor has passed."""
        runs = _runs_of(grant.offsets, grant.lane)
        for one in grant.opens:
            runs += (one.offset, 1, one.deliveries, one.lane)
        keys = [one.key for one in grant.opens]
        keys = [0] * len(grant.offsets) + keys if any(keys) else []
        self.taking.pop(grant, None)
        for one in grant.opens:
            self.passed.pop(one.offset, None)
        held = [number for one in self.passed.values() for number in _place(one)]
        self.passed = {}
        for other in self.taking:
            held += [number for offset in other.offsets for number in (offset, other.lane, 0)]
        return self._granted(grant, runs, keys, held, self.cursors)

    def _granted(
        self,
        grant: Grant,
        runs: list[int],
        keys: list[int],
        held: list[int],
        cursors: list[int],
    ) -> events.Granted:
        return events.Granted(
            self.number,
            grant.nonce,
            grant.member,
            grant.duration_ms,
            grant.deadline_ms,
            cursors,
            runs,
            keys,
            held,
        )

    def apply(self, event: events.Event) -> None:
        """At a start, in the order of the journal. Leases are armed later, when all is read."""
        match event:
            case events.Opens():
                for record in event.records:
                    self._restore(record)
            case events.Granted():
                self._apply_grant(event)
            case events.Done():
                runs, pop = event.runs, self.open.pop
                for at in range(0, len(runs), 2):
                    for offset in range(runs[at], runs[at] + runs[at + 1]):
                        pop(offset, None)
            case events.Returned():
                for offset, at in events.offsets_of(event.runs, 3):
                    one = self._opened(offset)
                    one.grant, one.state, one.when_ms = None, READY, 0
                    one.deliveries = event.runs[at + 2]
            case events.Retried():
                one = self._opened(event.offset)
                one.grant, one.state = None, WAITING
                one.when_ms, one.wait_ms = event.when_ms, event.wait_ms
                one.deliveries = event.deliveries
                one.failure = Failure(event.first_failure_ms, event.last_failure_ms, event.error)
            case events.Extended():
                self._apply_extended(event)
            case _:
                raise AssertionError(event)

    def _apply_grant(self, event: events.Granted) -> None:
        runs, keys = event.runs, event.keys
        grant = Grant(self, runs[3] if runs else NORMAL)
        grant.begin(event.nonce, event.member, event.duration_ms, event.deadline_ms)
        at = 0
        for run in range(0, len(runs), 4):
            first, count, deliveries, lane = runs[run : run + 4]
            offsets = range(first, first + count)
            is_first = deliveries == 1 and lane == grant.lane and not any(keys[at : at + count])
            if is_first and self.open.keys().isdisjoint(offsets):
                self.open.update(dict.fromkeys(offsets, grant))
            else:
                for n, offset in enumerate(offsets, at):
                    self._lease(grant, offset, deliveries, lane, keys[n] if keys else 0)
            at += count
        held = event.held
        for at in range(0, len(held), 3):
            self._opened(*held[at : at + 3])
        # A state that was written later may stand before this, and has passed more already.
        cursors = event.cursors
        if len(self.cursors) < len(cursors):
            self.use_lanes()
        elif len(cursors) < len(self.cursors):
            cursors = cursors * len(self.cursors)
        self.cursors = list(map(max, self.cursors, cursors))

    def _lease(self, grant: Grant, offset: int, deliveries: int, lane: int, key: int) -> None:
        one = self._opened(offset, lane, key)
        before = one.grant
        if before is not None and before.nonce != grant.nonce:
            # Nobody gave it back, so that lease ran out.
            ran_out_ms = before.deadline_ms
            first_ms = one.failure.first_ms if one.failure is not None else ran_out_ms
            one.failure = Failure(first_ms, ran_out_ms, RAN_OUT)
        one.state, one.grant, one.deliveries = LEASED, grant, deliveries

    def _apply_extended(self, event: events.Extended) -> None:
        """Those that have one deadline now are one grant."""
        grants: dict[tuple[str, str | None], Grant] = {}
        for offset, _ in events.offsets_of(event.runs):
            one = self.find(offset)
            if one is None or one.grant is None:
                continue
            name = (one.grant.nonce, one.grant.member)
            grant = grants.get(name)
            if grant is None:
                grant = grants[name] = Grant(self, one.lane)
                grant.begin(*name, event.duration_ms, event.deadline_ms)
            one.grant = grant

    def _opened(self, offset: int, lane: int = NORMAL, key: int = 0) -> Open:
        one = self.find(offset)
        if one is None:
            one = self.open[offset] = Open(offset, lane, key)
        return one

    def _restore(self, record: OpenRecord) -> None:
        one = self.open[record.offset] = Open(record.offset, record.lane, record.key)
        one.deliveries = record.deliveries
        if record.first_failure_ms:
            one.failure = Failure(record.first_failure_ms, record.last_failure_ms, record.error)
        if record.nonce:
            grant = Grant(self, record.lane)
            grant.begin(record.nonce, record.member, record.duration_ms, record.when_ms)
            one.state, one.grant = LEASED, grant
        elif record.when_ms:
            one.state = WAITING
            one.when_ms, one.wait_ms = record.when_ms, record.duration_ms

    def loaded(self) -> None:
        """All events are applied: find what is ready, and whose turn it is within each key."""
        self.keys = {}
        self.ready = [[] for _ in LANES]
        # Of a key, whoever was given out goes first: another lane may have been before its own.
        opens = [one for one in self.open.values() if isinstance(one, Open)]
        for one in sorted(opens, key=_turn):
            if one.key:
                line = self.keys.setdefault(one.key, deque())
                line.append(one)
                if line[0] is not one:
                    one.state, one.grant = HELD, None
                    continue
            if one.state == READY:
                heappush(self.ready[one.lane], one.offset)

    def grants(self) -> list[Grant]:
        """Those that have leased records, at a start: each with just those."""
        offsets: dict[Grant, list[int]] = {}
        opens: dict[Grant, list[Open]] = {}
        for offset, one in self.open.items():
            if isinstance(one, Grant):
                offsets.setdefault(one, []).append(offset)
            elif one.grant is not None:
                opens.setdefault(one.grant, []).append(one)
        found = list(offsets | opens)
        for grant in found:
            grant.offsets, grant.opens = offsets.get(grant, []), opens.get(grant, [])
            grant.left = len(grant.offsets) + len(grant.opens)
        return found


def _runs_of(offsets: list[int], lane: int) -> list[int]:
    """Of records that are leased for the first time, as `Granted` has them."""
    if not offsets:
        return []
    first = offsets[0]
    if offsets[-1] - first + 1 == len(offsets):
        return [first, len(offsets), 1, lane]
    pairs = events.runs_of(offsets)
    return [number for at in range(0, len(pairs), 2) for number in (*pairs[at : at + 2], 1, lane)]


def _place(one: Open) -> tuple[int, int, int]:
    return one.offset, one.lane, one.key


def _seen(offset: int, grant: Grant) -> Open:
    one = Open(offset, grant.lane)
    if grant.is_noted:
        one.state, one.deliveries, one.grant = LEASED, 1, grant
    return one


def _turn(one: Open) -> tuple[bool, bool, int]:
    return one.state == READY, not one.deliveries, one.offset


def _recorded(one: Open) -> OpenRecord:
    grant, failure = one.grant, one.failure
    first_ms, last_ms, error = (0, 0, "")
    if failure is not None:
        first_ms, last_ms, error = failure.first_ms, failure.last_ms, failure.error
    if one.state == LEAVING:
        # As a lease that ran out: whoever reads this tries again.
        lease: tuple[str, str | None, int, int] = (LEFT_NONCE, None, 1, 1)
    elif grant is not None:
        lease = (grant.nonce, grant.member, grant.duration_ms, grant.deadline_ms)
    elif one.state == WAITING:
        lease = ("", None, one.wait_ms, one.when_ms)
    else:
        lease = ("", None, 0, 0)
    return OpenRecord(
        one.offset, one.lane, one.deliveries, one.key, *lease, first_ms, last_ms, error
    )
