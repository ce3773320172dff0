"""Granting: which records go out next, and the leases they go out with.

Records that were given back go first, then those that nobody had yet. Where a topic uses lanes,
they take turns (`lanes`). Records are read before they are leased, so that what cannot be read is
never given out; while somebody reads at a cursor, others take what is elsewhere.

A grant is noted in the journal of leases, and answered when that is durable. If it is refused, its
records are ready again, as if nobody had asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import structlog

from millstream.broker import lease_events as events
from millstream.broker.delivery_values import Delivered, Received
from millstream.broker.ledger import HELD, NORMAL, Grant, Ledger, Open
from millstream.engine.pending import Pending
from millstream.errors import LogDamaged, OffsetOutOfRange
from millstream.log import batch as batches
from millstream.log.batch import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.reading import Fetched
    from millstream.broker.shares import Share, Shares
    from millstream.log.batch import Record

Steps: TypeAlias = "Generator[Pending[Any], Any, None]"

# Nobody guesses it: half of what a random UUID has.
NONCE_BYTES = 8
# A record takes about so much beside its key and value.
RECORD_BYTES = 20
# The largest record is smaller than that.
BYTES_MAX = 1 << 30


class Wish(NamedTuple):
    """What a receive asks for, checked and filled in."""

    count_max: int
    bytes_max: int
    visibility_ms: int | None
    member: str | None


@dataclass(frozen=True, slots=True)
class Room:
    """How many records a receive may have, how many of them nobody had yet, and what keeps there
    from being more."""

    count: int
    fresh: int
    limited_by: Literal["member", "group"] | None


class _Part:
    """What a receive takes of one ledger."""

    __slots__ = ("epoch", "fresh", "held", "ledger", "records", "taken")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.epoch = ledger.epoch
        self.taken: list[Open] = []
        self.records: list[Record] = []
        # Records that the cursor passed, because others of their keys are open.
        self.held: list[Open] = []
        # How many of all these nobody had before.
        self.fresh = 0


class Taking:
    """A receive that gathers records of several partitions and topics."""

    __slots__ = ("bytes_left", "count_left", "fresh_left", "parts", "taken")

    def __init__(self, room: Room, bytes_max: int) -> None:
        self.count_left = room.count
        self.fresh_left = room.fresh
        self.bytes_left = bytes_max
        self.taken = 0
        self.parts: dict[Ledger, tuple[Share, _Part]] = {}

    def part(self, share: Share, ledger: Ledger) -> _Part:
        found = self.parts.get(ledger)
        if found is None or found[1].epoch != ledger.epoch:
            found = self.parts[ledger] = (share, _Part(ledger))
        return found[1]

    def add(self, part: _Part, one: Open, record: Record) -> None:
        part.taken.append(one)
        part.records.append(record)
        self.taken += 1
        self.count_left -= 1
        size = RECORD_BYTES + (0 if record.value is None else len(record.value))
        self.bytes_left -= size if record.key is None else size + len(record.key)

    @property
    def is_full(self) -> bool:
        return self.count_left <= 0 or (self.bytes_left <= 0 and self.taken > 0)


class Granting:
    __slots__ = ("_expired", "_random_hex", "_shares")

    def __init__(
        self,
        shares: Shares,
        expired: Callable[[Share, Grant], None],
        random_hex: Callable[[int], str],
    ) -> None:
        """`expired` is told when a grant's time is over."""
        self._shares = shares
        self._expired = expired
        self._random_hex = random_hex

    def room(self, share: Share, wish: Wish) -> Room:
        """What is in flight already, and came back, may always go out again: it would block the
        group for good if it had to wait for room that it takes itself."""
        crew, options = share.crew, self._shares.options
        count = wish.count_max
        fresh = options.group_inflight_max - crew.open_count
        limited_by: Literal["member", "group"] | None = "group" if fresh < count else None
        if wish.member is not None:
            of_member = options.member_inflight_max - crew.inflight.get(wish.member, 0)
            if of_member < count:
                count = max(of_member, 0)
                limited_by = "member" if count <= fresh else "group"
        return Room(count, max(min(fresh, count), 0), limited_by)

    # ---- taking

    def take(self, share: Share, taking: Taking) -> Steps:
        """As much as there is room for."""
        if not share.topic.uses_lanes:
            for ledger in share.in_turn():
                if taking.is_full or share.is_gone:
                    return
                yield from self._take_lane(share, ledger, NORMAL, taking, taking.count_left)
            return
        yield from self._catch_up(share)
        empty = [False] * len(LANES)
        while not taking.is_full and not share.is_gone:
            now = self._shares.around.clock.monotonic()
            has = [
                not empty[lane] and any(self._has(share, one, lane) for one in share.ledgers)
                for lane in range(len(LANES))
            ]
            if share.turns is None or not any(has):
                return
            lane, most = share.turns.choose(has, now)
            before = taking.taken
            for ledger in share.in_turn():
                left = most - (taking.taken - before)
                if left <= 0 or taking.is_full:
                    break
                yield from self._take_lane(share, ledger, lane, taking, left)
            share.turns.served(lane, taking.taken - before, now)
            # Somebody reads there, or it was held: not again in this receive.
            empty[lane] = taking.taken == before

    def _catch_up(self, share: Share) -> Steps:
        for ledger in list(share.ledgers):
            self._shares.index(share, ledger)
            waiting = self._shares.lanes.catch_up(share.topic, ledger.partition)
            if waiting is not None:
                yield waiting

    def _has(self, share: Share, ledger: Ledger, lane: int) -> bool:
        if ledger.find_ready(lane) is not None:
            return True
        return not ledger.is_reading and self._fresh(share, ledger, lane) is not None

    def _fresh(self, share: Share, ledger: Ledger, lane: int) -> tuple[int, int] | None:
        """Where the next records of a lane are that nobody had yet: first, and the end."""
        offset = ledger.cursor(lane)
        if share.topic.uses_lanes:
            index = self._shares.index(share, ledger)
            return index.next_run(lane, offset) if index is not None else None
        _, end = self._shares.around.reader.offsets(share.topic.name, ledger.partition)
        return (offset, end) if offset < end else None

    def _take_lane(
        self, share: Share, ledger: Ledger, lane: int, taking: Taking, most: int
    ) -> Steps:
        before = taking.taken
        while ledger.ready[lane] and taking.taken - before < most and not taking.is_full:
            left = min(most - (taking.taken - before), taking.count_left)
            if not (yield from self._take_ready(share, ledger, lane, taking, left)):
                break
        while not (taking.is_full or share.is_gone or ledger.is_reading):
            left = min(most - (taking.taken - before), taking.fresh_left)
            if ledger.keys and share.crew.open_count >= self._shares.options.group_inflight_max:
                # What is held for its key counts too, or one busy key would hold everything.
                return
            place = self._fresh(share, ledger, lane) if left > 0 else None
            if place is None:
                return
            ledger.is_reading = True
            epoch = ledger.epoch
            try:
                fetched = yield from self._read_fresh(share, ledger, place, left, taking)
            finally:
                ledger.is_reading = False
            if ledger.epoch != epoch or fetched is None:
                continue
            if not fetched.records and fetched.next_offset <= place[0]:
                return
            self._pass(share, ledger, lane, place[1], fetched, taking)

    def _read_fresh(
        self, share: Share, ledger: Ledger, place: tuple[int, int], left: int, taking: Taking
    ) -> Generator[Pending[Any], Any, Fetched | None]:
        """None when the cursor had to jump over what is not there any more."""
        first, end = place
        topic, number = share.topic.name, ledger.partition
        reader = self._shares.around.reader
        start = reader.offsets(topic, number).start
        epoch = ledger.epoch
        if first >= start:
            count = min(left, taking.count_left, end - first)
            try:
                fetched: Fetched = yield reader.fetch(
                    topic, number, first, count, max(taking.bytes_left, 1)
                )
            except OffsetOutOfRange:
                start = reader.offsets(topic, number).start
            except LogDamaged as error:
                last = error.fields.get("last")
                if not isinstance(last, int) or last < first:
                    raise
                _logger().error("records not given out, because they are damaged", **error.fields)
                start = last + 1
                share.crew.counts.lost += start - first
            else:
                return fetched
        if ledger.epoch == epoch:
            # Retention was faster than the group.
            share.crew.counts.expired += max(start - first, 0)
            ledger.jump(max(start, first + 1) if start <= first else start)
        return None

    def _pass(  # noqa: PLR0917
        self, share: Share, ledger: Ledger, lane: int, end: int, fetched: Fetched, taking: Taking
    ) -> None:
        """Move the cursor over what was read."""
        part = taking.part(share, ledger)
        is_ordered = share.topic.settings.delivery_order == "key"
        for record in fetched.records:
            if record.offset >= end:
                break
            key = 0
            if is_ordered and record.key is not None:
                key = batches.murmur2(record.key) + 1
            one = ledger.add(record.offset, lane, key)
            part.fresh += 1
            if one.state == HELD:
                part.held.append(one)
            else:
                one.is_busy = True
                taking.fresh_left -= 1
                taking.add(part, one, record)
        ledger.move_cursor(lane, min(fetched.next_offset, end))

    def _take_ready(
        self, share: Share, ledger: Ledger, lane: int, taking: Taking, most: int
    ) -> Generator[Pending[Any], Any, bool]:
        """Whether it is worth while to look again, because some are not there any more."""
        ones = ledger.take_ready(lane, most)
        if not ones:
            return False
        epoch = ledger.epoch
        found = yield from self.records(share, ledger, [one.offset for one in ones])
        if ledger.epoch != epoch:
            return False
        part = taking.part(share, ledger)
        lost: list[Open] = []
        for one in ones:
            record = found.get(one.offset)
            if record is None:
                lost.append(one)
            elif taking.is_full:
                ledger.make_ready(one)
            else:
                taking.add(part, one, record)
        if lost:
            self.forget(share, ledger, lost)
        return bool(lost)

    def records(
        self, share: Share, ledger: Ledger, offsets: Sequence[int]
    ) -> Generator[Pending[Any], Any, dict[int, Record]]:
        """Records by their offsets; those that are not there any more are left out."""
        found: dict[int, Record] = {}
        reader = self._shares.around.reader
        runs = events.runs_of(offsets)
        for at in range(0, len(runs), 2):
            first, end = runs[at], runs[at] + runs[at + 1]
            while first < end:
                try:
                    fetched = yield reader.fetch(
                        share.topic.name, ledger.partition, first, end - first, BYTES_MAX
                    )
                except OffsetOutOfRange:
                    first = max(first + 1, reader.offsets(*share.id(ledger)).start)
                    continue
                except LogDamaged as error:
                    last = error.fields.get("last")
                    first = last + 1 if isinstance(last, int) and last >= first else first + 1
                    continue
                found.update((one.offset, one) for one in fetched.records if one.offset < end)
                if fetched.next_offset <= first:
                    break
                first = fetched.next_offset
        return found

    def forget(self, share: Share, ledger: Ledger, lost: Sequence[Open]) -> None:
        """Records that retention removed while they were open."""
        share.crew.counts.expired += len(lost)
        offsets = sorted(one.offset for one in lost)
        for one in lost:
            self._shares.end_lease(share.crew, one)
            ledger.remove(one)
        journal = self._shares.journal(share, ledger)
        journal.note(ledger, events.Done(ledger.number, events.runs_of(offsets)), len(offsets))
        self._shares.moved(share, ledger)

    # ---- granting

    def grant(self, taking: Taking, wish: Wish) -> Pending[Received]:
        """Lease what was taken. Done when that is durable; undone when it is refused."""
        shares = self._shares
        nonce = self._random_hex(NONCE_BYTES)
        now_ms = shares.around.clock.wall_ms()
        now = shares.around.clock.monotonic()
        grants: list[tuple[Share, _Part, Grant]] = []
        pendings: list[Pending[None]] = []
        deadline_ms = 0
        for share, part in taking.parts.values():
            ledger = part.ledger
            if share.is_gone or part.epoch != ledger.epoch or not (part.taken or part.held):
                continue
            duration_ms = wish.visibility_ms or share.topic.settings.visibility_ms
            grant = Grant(ledger, nonce, wish.member, duration_ms, now_ms + duration_ms)
            deadline_ms = min(deadline_ms or grant.deadline_ms, grant.deadline_ms)
            for one in part.taken:
                ledger.lease(one, grant)
                ledger.counts[one.lane] += 1
                ledger.last_served[one.lane] = now
            journal = shares.journal(share, ledger)
            self._noting(part)
            event = ledger.granted(grant, part.taken, part.held)
            pendings.append(journal.note(ledger, event, len(part.taken)))
            if wish.member is not None:
                inflight = share.crew.inflight
                inflight[wish.member] = inflight.get(wish.member, 0) + len(part.taken)
            grants.append((share, part, grant))
        done: Pending[Received] = Pending()
        left = len(pendings)
        if not left:
            return Pending.of(Received([], 0))

        def one_done(_: Pending[None]) -> None:
            nonlocal left
            left -= 1
            if left:
                return
            error = next((one.error for one in pendings if one.error is not None), None)
            if error is not None:
                self._take_back(grants)
                done.fail(error)
            else:
                done.succeed(self._answer(grants, deadline_ms))

        for noted in pendings:
            noted.then(one_done)
        return done

    def _answer(self, grants: list[tuple[Share, _Part, Grant]], deadline_ms: int) -> Received:
        records: list[Delivered] = []
        for share, part, grant in grants:
            ledger, topic = part.ledger, share.topic.name
            if part.epoch != ledger.epoch:
                continue
            before = f"{topic}:{ledger.partition}:"
            after = f":{grant.nonce}:{ledger.group}"
            counts = share.crew.counts
            for one, record in zip(part.taken, part.records, strict=True):
                one.is_busy = False
                deliveries = one.deliveries
                if deliveries > 1:
                    counts.redelivered += 1
                receipt = f"{before}{one.offset}:{deliveries}{after}"
                records.append(
                    Delivered(topic, ledger.partition, record, LANES[one.lane], deliveries, receipt)
                )
            counts.delivered += len(part.taken)
            self.arm(share, grant, grant.duration_ms / 1000)
        return Received(records, deadline_ms)

    def arm(self, share: Share, grant: Grant, seconds: float) -> None:
        timers = self._shares.around.timers
        grant.timer = timers.after(seconds, lambda: self._expired(share, grant))

    def _take_back(self, grants: list[tuple[Share, _Part, Grant]]) -> None:
        for share, part, _ in grants:
            ledger = part.ledger
            if part.epoch != ledger.epoch:
                continue
            for one in part.taken:
                self._shares.end_lease(share.crew, one)
                one.deliveries -= 1
                ledger.make_ready(one)
            ledger.needs_state = True
            share.news()

    def give_up(self, taking: Taking) -> None:
        """Nobody wants what was taken: as if nobody had asked."""
        for share, part in taking.parts.values():
            if part.epoch == part.ledger.epoch:
                for one in part.taken:
                    part.ledger.make_ready(one)
                self._noting(part)
                part.ledger.needs_state = True
                share.news()

    def _noting(self, part: _Part) -> None:
        ledger = part.ledger
        ledger.unnoted -= part.fresh
        if ledger.unnoted:
            ledger.needs_state = True


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
