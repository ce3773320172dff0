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
from millstream.errors import LogDamaged, MillstreamError, OffsetOutOfRange
from millstream.log import batch as batches
from millstream.log.batch import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.crew import Crew
    from millstream.broker.reading import Fetched
    from millstream.broker.shares import Share, Shares
    from millstream.log.batch import Record

Steps: TypeAlias = "Generator[Pending[Any], Any, None]"

# Nobody guesses it: half of what a random UUID has.
NONCE_BYTES = 8
# A record takes about so much beside its key and value.
RECORD_BYTES = 20
# In a topic that keeps the order of keys, so many are read at once at least: most may be held.
ORDERED_READ = 256
# After so many records were looked at, others have a turn: they take a few milliseconds.
BREATH_RECORDS = 2_048


class Wish(NamedTuple):
    """What a receive asks for, checked and filled in."""

    count_max: int
    bytes_max: int
    visibility_ms: int | None
    member: str | None


@dataclass(slots=True)
class Room:
    """How many records a receive may have, how many of them nobody had yet, and what keeps there
    from being more."""

    count: int
    fresh: int
    limited_by: Literal["member", "group"] | None


class _Part:
    """What a receive takes of one lane of one ledger."""

    __slots__ = ("again", "epoch", "fresh", "grant", "share")

    def __init__(self, share: Share, ledger: Ledger, lane: int) -> None:
        self.share = share
        self.grant = Grant(ledger, lane)
        self.epoch = ledger.epoch
        # Of the grant's offsets, and of its other records.
        self.fresh: list[Record] = []
        self.again: list[Record] = []


class Taking:
    """A receive that gathers records of several partitions and topics."""

    __slots__ = ("bytes_left", "count_left", "fresh_left", "has_slept", "parts", "taken")

    def __init__(self, room: Room, bytes_max: int) -> None:
        self.count_left = room.count
        self.fresh_left = room.fresh
        self.bytes_left = bytes_max
        self.taken = 0
        # It waited for something on its way, so what it has seen may be out of date.
        self.has_slept = False
        self.parts: dict[tuple[Ledger, int], _Part] = {}

    def part(self, share: Share, ledger: Ledger, lane: int) -> _Part:
        found = self.parts.get((ledger, lane))
        if found is None or found.epoch != ledger.epoch:
            found = self.parts[ledger, lane] = _Part(share, ledger, lane)
        return found

    def add_fresh(self, part: _Part, records: list[Record]) -> None:
        """Records that nobody had, and that need no object of their own."""
        grant = part.grant
        grant.ledger.take([record.offset for record in records], grant)
        part.fresh += records
        self.fresh_left -= len(records)
        self._count(records)

    def add(self, part: _Part, one: Open, record: Record) -> None:
        one.is_busy = True
        part.grant.opens.append(one)
        part.again.append(record)
        self._count((record,))

    def _count(self, records: Sequence[Record]) -> None:
        self.taken += len(records)
        self.count_left -= len(records)
        if self.count_left > 0:
            # Else it is full anyway.
            self.bytes_left -= sum(map(_size, records))

    @property
    def has_room(self) -> bool:
        """For more than there is."""
        return self.count_left > 0 and self.fresh_left > 0

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

    def room(self, crew: Crew, wish: Wish) -> Room:
        """What is in flight already, and came back, may always go out again: it would block the
        group for good if it had to wait for room that it takes itself."""
        count = wish.count_max
        fresh = self._shares.open_max(crew.name) - crew.open_count
        limited_by: Literal["member", "group"] | None = "group" if fresh < count else None
        if wish.member is not None:
            most = self._shares.member_max(crew.name)
            of_member = most - crew.inflight.get(wish.member, 0)
            if of_member < count:
                count = max(of_member, 0)
                limited_by = "member" if count <= fresh else "group"
        return Room(count, max(min(fresh, count), 0), limited_by)

    # ---- taking

    def take(self, share: Share, taking: Taking) -> Steps:
        """As much as there is room for."""
        if share.topic.uses_lanes:
            yield from self._take_by_lanes(share, taking)
            return
        is_ordered = share.topic.settings.delivery_order == "key"
        for ledger in share.in_turn():
            if taking.is_full or share.is_gone:
                return
            fetching: Pending[Fetched] | None = None
            if not (is_ordered or ledger.is_reading or ledger.ready[NORMAL]):
                first, (start, end) = ledger.first_cursor, share.offsets(ledger)
                if first >= end or not taking.fresh_left:
                    continue
                if first >= start:
                    left = min(taking.fresh_left, taking.count_left)
                    fetching = self._fetch(share, ledger, first, end, left, taking)
                    if fetching.is_done and fetching.error is None:
                        # Nearly every receive ends here: what it wants is in the page cache.
                        fetched = self._within_limit(share, fetching.result())
                        self._pass(share, ledger, NORMAL, end, fetched, taking)
                        if taking.count_left <= 0:
                            return
                        fetching = None
            most = taking.count_left
            yield from self._take_lane(share, ledger, NORMAL, taking, most, fetching)

    def _take_by_lanes(self, share: Share, taking: Taking) -> Steps:
        yield from self._catch_up(share, taking)
        if share.turns is not None:
            settings = share.topic.settings
            share.turns.adjust(settings.lane_weights, settings.lane_boost_ms / 1000)
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

    def _catch_up(self, share: Share, taking: Taking) -> Steps:
        for ledger in list(share.ledgers):
            self._shares.index(share, ledger)
            waiting = self._shares.lanes.catch_up(share.topic, ledger.partition, share.crew.name)
            if waiting is not None:
                taking.has_slept = True
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
        _, end = share.offsets(ledger)
        return (offset, end) if offset < end else None

    def _take_lane(  # noqa: PLR0917
        self,
        share: Share,
        ledger: Ledger,
        lane: int,
        taking: Taking,
        most: int,
        fetching: Pending[Fetched] | None = None,
    ) -> Steps:
        """From one lane of one partition; `fetching` is a read at its cursor that is under way."""
        before, looked = taking.taken, 0
        while ledger.ready[lane] and taking.taken - before < most and not taking.is_full:
            left = min(most - (taking.taken - before), taking.count_left)
            if not (yield from self._take_ready(share, ledger, lane, taking, left)):
                break
        is_ordered = share.topic.settings.delivery_order == "key"
        while not (taking.is_full or share.is_gone or ledger.is_reading):
            left = min(most - (taking.taken - before), taking.fresh_left, taking.count_left)
            if is_ordered and left > 0:
                # What is held for its key counts too, or one busy key would hold everything.
                room = self._shares.open_max(share.crew.name) - share.crew.open_count
                left = min(max(left, ORDERED_READ), room)
            place = self._fresh(share, ledger, lane) if left > 0 else None
            if place is None:
                return
            ledger.is_reading = True
            epoch = ledger.epoch
            try:
                fetched = yield from self._read_fresh(share, ledger, place, left, taking, fetching)
            finally:
                ledger.is_reading = False
                fetching = None
            if ledger.epoch != epoch or fetched is None:
                continue
            fetched = self._within_limit(share, fetched)
            if not fetched.records and fetched.next_offset <= place[0]:
                return
            if is_ordered:
                left = min(most - (taking.taken - before), taking.count_left)
                self._pass_ordered(share, ledger, lane, place[1], fetched, taking, left)
            else:
                self._pass(share, ledger, lane, place[1], fetched, taking)
            looked += len(fetched.records)
            if looked >= BREATH_RECORDS:
                looked = 0
                taking.has_slept = True
                yield self._breath()

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._shares.around.turns.soon(lambda: pending.succeed(None))
        return pending

    def _fetch(  # noqa: PLR0917
        self, share: Share, ledger: Ledger, first: int, end: int, most: int, taking: Taking
    ) -> Pending[Fetched]:
        return self._shares.around.reader.fetch(
            share.topic.name,
            ledger.partition,
            first,
            min(most, end - first),
            max(taking.bytes_left, 1),
        )

    def _within_limit(self, share: Share, fetched: Fetched) -> Fetched:
        """While this receive read, others may have taken what the group had room for."""
        crew, records = share.crew, fetched.records
        room = max(self._shares.open_max(crew.name) - crew.open_count, 0)
        if len(records) <= room:
            return fetched
        return fetched._replace(records=records[:room], next_offset=records[room].offset)

    def _pass(  # noqa: PLR0917
        self, share: Share, ledger: Ledger, lane: int, end: int, fetched: Fetched, taking: Taking
    ) -> None:
        """Take what was read, and move the cursor over it."""
        records = _below(fetched.records, end)
        if records:
            taking.add_fresh(taking.part(share, ledger, lane), records)
        ledger.move_cursor(lane, min(fetched.next_offset, end))

    def _read_fresh(  # noqa: PLR0917
        self,
        share: Share,
        ledger: Ledger,
        place: tuple[int, int],
        left: int,
        taking: Taking,
        fetching: Pending[Fetched] | None,
    ) -> Generator[Pending[Any], Any, Fetched | None]:
        """None when the cursor had to jump over what is not there any more."""
        first, end = place
        topic, number = share.topic.name, ledger.partition
        reader = self._shares.around.reader
        start, _ = share.offsets(ledger)
        epoch = ledger.epoch
        if first >= start:
            try:
                fetching = fetching or self._fetch(share, ledger, first, end, left, taking)
                taking.has_slept |= not fetching.is_done
                fetched: Fetched = yield fetching
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

    def _pass_ordered(  # noqa: PLR0917
        self,
        share: Share,
        ledger: Ledger,
        lane: int,
        end: int,
        fetched: Fetched,
        taking: Taking,
        most: int,
    ) -> None:
        """The same; who waits for another of its key is held, and what is too much is ready."""
        part = taking.part(share, ledger, lane)
        taken = 0
        for record in _below(fetched.records, end):
            key = 0 if record.key is None else batches.murmur2(record.key) + 1
            one = ledger.add(record.offset, lane, key)
            if one.state == HELD:
                continue
            if taken < most and not taking.is_full:
                taken += 1
                taking.fresh_left -= 1
                taking.add(part, one, record)
            else:
                ledger.make_ready(one)
        ledger.move_cursor(lane, min(fetched.next_offset, end))

    def _take_ready(
        self, share: Share, ledger: Ledger, lane: int, taking: Taking, most: int
    ) -> Generator[Pending[Any], Any, bool]:
        """Whether it is worth while to look again, because some are not there any more."""
        ones = ledger.take_ready(lane, most)
        if not ones:
            return False
        epoch = ledger.epoch
        # Also when the records are in memory: some may be gone, and that is noted.
        taking.has_slept = True
        try:
            found, stop = yield from self.records(
                share, ledger, [one.offset for one in ones], taking.bytes_left
            )
        except MillstreamError:
            if ledger.epoch == epoch:
                for one in ones:
                    ledger.make_ready(one)
            raise
        if ledger.epoch != epoch:
            return False
        part = taking.part(share, ledger, lane)
        lost: list[Open] = []
        for one in ones:
            record = found.get(one.offset)
            if taking.is_full or one.offset >= stop:
                ledger.make_ready(one)
            elif record is None:
                lost.append(one)
            else:
                taking.add(part, one, record)
        if lost:
            self.forget(share, ledger, lost)
        return bool(lost)

    def records(
        self, share: Share, ledger: Ledger, offsets: Sequence[int], bytes_max: int
    ) -> Generator[Pending[Any], Any, tuple[dict[int, Record], int]]:
        """Records by their offsets, at least the first, and where it stopped for its size: below
        that, those are missing that are not there any more."""
        found: dict[int, Record] = {}
        reader = self._shares.around.reader
        runs = events.runs_of(offsets)
        for at in range(0, len(runs), 2):
            first, end = runs[at], runs[at] + runs[at + 1]
            while first < end:
                if found and bytes_max <= 0:
                    return found, first
                try:
                    fetched = yield reader.fetch(
                        share.topic.name, ledger.partition, first, end - first, max(bytes_max, 1)
                    )
                except OffsetOutOfRange:
                    first = max(first + 1, reader.offsets(*share.id(ledger)).start)
                    continue
                except LogDamaged as error:
                    last = error.fields.get("last")
                    first = last + 1 if isinstance(last, int) and last >= first else first + 1
                    continue
                records = _below(fetched.records, end)
                found.update((one.offset, one) for one in records)
                bytes_max -= sum(map(_size, records))
                if fetched.next_offset <= first:
                    break
                first = fetched.next_offset
        return found, offsets[-1] + 1

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
        parts: list[_Part] = []
        noted: dict[Pending[None], None] = {}
        deadline_ms = 0
        for part in taking.parts.values():
            share, grant = part.share, part.grant
            ledger = grant.ledger
            if share.is_gone or part.epoch != ledger.epoch:
                continue
            if not (grant.offsets or grant.opens or ledger.passed):
                continue
            duration_ms = wish.visibility_ms or shares.visibility_ms(share)
            grant.begin(nonce, wish.member, duration_ms, now_ms + duration_ms)
            deadline_ms = min(deadline_ms or grant.deadline_ms, grant.deadline_ms)
            for one in grant.opens:
                ledger.lease(one, grant)
            grant.left = count = len(grant.offsets) + len(grant.opens)
            if count:
                ledger.counts[grant.lane] += count
                ledger.last_served[grant.lane] = now
            journal = shares.journal(share, ledger)
            noted[journal.note(ledger, ledger.granted(grant), count)] = None
            if wish.member is not None:
                share.crew.begin(wish.member, count)
            parts.append(part)
        if not parts:
            return Pending.of(Received([], 0))
        done: Pending[Received] = Pending()
        left = len(noted)

        def one_done(_: Pending[None]) -> None:
            nonlocal left
            left -= 1
            if left:
                return
            error = next((one.error for one in noted if one.error is not None), None)
            if error is not None:
                self._take_back(parts)
                done.fail(error)
            else:
                done.succeed(self._answer(parts, deadline_ms))

        for pending in noted:
            pending.then(one_done)
        return done

    def _answer(self, parts: list[_Part], deadline_ms: int) -> Received:
        records: list[Delivered] = []
        for part in parts:
            share, grant = part.share, part.grant
            ledger, topic = grant.ledger, share.topic.name
            if part.epoch != ledger.epoch:
                continue
            partition, lane = ledger.partition, LANES[grant.lane]
            before = f"{topic}:{partition}:"
            after = f":{grant.nonce}:{ledger.group}"
            for one, record in zip(grant.opens, part.again, strict=True):
                one.is_busy = False
                deliveries = one.deliveries
                if deliveries > 1:
                    share.crew.counts.redelivered += 1
                receipt = f"{before}{one.offset}:{deliveries}{after}"
                records.append(Delivered(topic, partition, record, lane, deliveries, receipt))
            after = ":1" + after
            records += [
                Delivered(topic, partition, record, lane, 1, f"{before}{record.offset}{after}")
                for record in part.fresh
            ]
            share.crew.counts.delivered += grant.left
            if grant.left:
                self.arm(share, grant, grant.duration_ms / 1000)
        shortest_ms = min(part.grant.duration_ms for part in parts)
        return Received(records, deadline_ms, visibility_ms=shortest_ms)

    def arm(self, share: Share, grant: Grant, seconds: float) -> None:
        timers = self._shares.around.timers
        grant.timer = timers.after(seconds, lambda: self._expired(share, grant))

    def _take_back(self, parts: list[_Part]) -> None:
        for part in parts:
            grant = part.grant
            ledger = grant.ledger
            if part.epoch != ledger.epoch:
                continue
            for one in _opens(grant):
                self._shares.end_lease(part.share.crew, one)
                one.deliveries -= 1
                ledger.make_ready(one)
            ledger.forget_state()
            part.share.news()

    def give_up(self, taking: Taking) -> None:
        """Nobody wants what was taken: as if nobody had asked."""
        for part in taking.parts.values():
            grant = part.grant
            ledger = grant.ledger
            if part.epoch == ledger.epoch:
                ledger.taking.pop(grant, None)
                for one in _opens(grant):
                    ledger.passed[one.offset] = one
                    ledger.make_ready(one)
                part.share.news()


def _opens(grant: Grant) -> list[Open]:
    """All its records, as objects."""
    opens, offsets = list(grant.opens), grant.offsets
    grant.offsets = []
    opens += [one for one in map(grant.ledger.find, offsets) if one is not None]
    return opens


def _below(records: list[Record], end: int) -> list[Record]:
    if not records or records[-1].offset < end:
        return records
    return [record for record in records if record.offset < end]


def _size(record: Record) -> int:
    size = RECORD_BYTES + (0 if record.value is None else len(record.value))
    return size if record.key is None else size + len(record.key)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
