"""Work queues on topics: records are received by lease, and settled one by one.

What a group has leased is kept by its shares (`shares`, `ledger`) and their journal
(`lease_journal`); which records go out is decided in `granting`, how deliveries end in `settling`.
Here is the face that listeners call: receives that wait, settlings, the start after a crash, and
what is known of all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from millstream.broker.delivery_values import (
    LEASE_STARTS,
    BreakerFacts,
    DeliveryCounts,
    DeliveryOptions,
    LaneFacts,
    LaneTotals,
    LeaseFacts,
    Receive,
    Received,
    Settle,
    ShareFacts,
)
from millstream.broker.granting import Granting, Room, Taking, Wish
from millstream.broker.group_values import check_group_name
from millstream.broker.joining import CLIENT_ID, TOPICS_MAX
from millstream.broker.lane_stats import LaneRates, LaneWish
from millstream.broker.ledger import STATE_NAMES, WAITING, Open
from millstream.broker.polling import Polling
from millstream.broker.settle_requests import check_delay, check_visibility
from millstream.broker.settling import Settling
from millstream.broker.shares import Shares, refuse_gone, waiting_or_leased
from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError, ParameterInvalid
from millstream.log.batch import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Iterator, Sequence

    from millstream.broker.deadletters import DeadLetters
    from millstream.broker.delivery_values import Settled
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.groups import Groups
    from millstream.broker.lanes import Lanes
    from millstream.broker.shares import Share
    from millstream.broker.surroundings import Surroundings
    from millstream.engine.protocol import Engine

# What one request may settle: a receive gives at most as many.
SETTLES_MAX = 100_000
# How long a receive pauses that was woken and found nothing, so that it never turns the loop alone.
PAUSE_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class DeliveryParts:
    """What delivery is built on, beside its surroundings."""

    engine: Engine
    groups: Groups
    offsets: GroupOffsets
    lanes: Lanes
    dead_letters: DeadLetters


class Delivery:
    __slots__ = (
        "_granting",
        "_has_drained",
        "_options",
        "_rates",
        "_settling",
        "_shares",
        "_timers",
    )

    def __init__(
        self,
        around: Surroundings,
        parts: DeliveryParts,
        options: DeliveryOptions,
        random_hex: Callable[[int], str],
    ) -> None:
        self._options = options
        self._timers = around.timers
        self._shares = Shares(
            parts.engine,
            around,
            parts.offsets,
            parts.lanes,
            options,
            check_new=parts.groups.check_new,
        )
        self._settling = Settling(self._shares, parts.dead_letters)
        self._granting = Granting(self._shares, self._settling.expire, random_hex)
        self._settling.grant_by(self._granting)
        self._rates = LaneRates(self._shares)
        self._has_drained = False

    @property
    def all_shares(self) -> Shares:
        return self._shares

    # ---- receiving

    def receive(self, group: str, receive: Receive) -> Polling[Received]:
        """Records, leased. It waits while there are none. Cancel it when the client went away."""
        try:
            wish, wait_ms = self._check(group, receive)
            if len(receive.topics) > 1:
                # Before the group gets a part in any of them.
                for topic in receive.topics:
                    if self._shares.find(group, topic) is None:
                        self._shares.check(group, topic)
            shares = [
                self._shares.get(group, topic, receive.start or "earliest")
                for topic in dict.fromkeys(receive.topics)
            ]
        except MillstreamError as error:
            return Polling.failed(error)
        polling: Polling[Received] = Polling(self._take_back)
        if self._has_drained:
            polling.end()
        deadline = self._now() + wait_ms / 1000
        follow(self._receive(polling, shares, wish, deadline)).then(
            lambda one: _pass(one, polling.pending)
        )
        return polling

    def _take_back(self, polling: Polling[Received]) -> None:
        self.give_back(polling.pending.result())

    def bounded(self, receive: Receive) -> Receive:
        """With no more than the settings allow, for callers that may ask for anything."""
        options = self._options
        return receive._replace(
            count_max=min(receive.count_max or 1, options.receive_records_max),
            bytes_max=min(receive.bytes_max or 1, options.receive_bytes_max),
            wait_ms=min(receive.wait_ms or 0, options.receive_wait_max_ms),
        )

    def _check(self, group: str, receive: Receive) -> tuple[Wish, int]:
        options = self._options
        check_group_name(group)
        if not 1 <= len(receive.topics) <= TOPICS_MAX:
            raise _invalid("topics", f"a receive names 1 to {TOPICS_MAX} topics")
        if receive.start is not None and receive.start not in LEASE_STARTS:
            raise _invalid("start", f"start is one of {', '.join(LEASE_STARTS)}")
        if receive.member is not None and not CLIENT_ID.fullmatch(receive.member):
            raise _invalid("member", "member is 1 to 200 of letters, digits, `.`, `_`, `:`, `-`")
        count = _between("limit", receive.count_max, 1, options.receive_records_max, 1)
        most = options.receive_bytes_max
        bytes_max = _between("bytes", receive.bytes_max, 1, most, most)
        wait_ms = _between("wait_ms", receive.wait_ms, 0, options.receive_wait_max_ms, 0)
        if receive.visibility_ms is not None:
            check_visibility(receive.visibility_ms, options.visibility_max_ms)
        return Wish(count, bytes_max, receive.visibility_ms, receive.member), wait_ms

    def _receive(
        self,
        polling: Polling[Received],
        shares: list[Share],
        wish: Wish,
        deadline: float,
    ) -> Generator[Pending[Any], Any, Received]:
        granting, crew = self._granting, shares[0].crew
        has_waited = has_looked = False
        while True:
            room = granting.room(crew, wish)
            taking = Taking(room, wish.bytes_max)
            try:
                yield from self._take(polling, shares, taking)
            except MillstreamError:
                # What cannot be read in one place does not keep back what was found in others.
                if not taking.taken:
                    raise
            limited_by = None if taking.has_room else room.limited_by
            if polling.is_over and taking.taken:
                granting.give_up(taking)
                return Received([], 0)
            if wish.member is not None and taking.taken > granting.room(crew, wish).count:
                # While this one read, others of the member were granted what there was room for.
                granting.give_up(taking)
                continue
            if taking.parts:
                granted = granting.grant(taking, wish)
                self._pass_on(shares, taking)
                received: Received = yield granted
                if received.records:
                    if polling.is_over:
                        self.give_back(received)
                        return Received([], 0)
                    if limited_by is None:
                        return received
                    return received._replace(limited_by=limited_by)
                taking.has_slept = True
            elif has_waited and not room.count:
                # What it was woken for is for another.
                self._pass_on(shares, taking)
            rest = deadline - self._now()
            if rest <= 0 or polling.is_over:
                return Received([], 0, limited_by)
            refuse_gone(shares)
            # What came while it slept was told to nobody: then it looks again, first at once.
            has_looked = taking.has_slept and not has_looked
            if not has_looked:
                seconds = PAUSE_SECONDS if has_waited or taking.has_slept else rest
                yield from self._wait(polling, shares, room, wish.member, seconds)
                # Woken for nothing, such as a record that somebody else took: once it may look
                # again at once.
                has_waited = not has_waited
            self._shares.renew(shares)

    def _take(
        self, polling: Polling[Received], shares: list[Share], taking: Taking
    ) -> Generator[Pending[Any], Any, None]:
        for share in shares:
            if share.beginning is not None:
                yield from self._shares.begin(share)
        for share in shares:
            if taking.is_full or polling.is_over:
                break
            yield from self._granting.take(share, taking)

    def _pass_on(self, shares: list[Share], taking: Taking) -> None:
        """There may be more for others that wait, of records or of room."""
        if taking.is_full:
            for share in shares:
                share.news()
        shares[0].crew.wake_limited()

    def _wait(
        self,
        polling: Polling[Received],
        shares: list[Share],
        room: Room,
        member: str | None,
        seconds: float,
    ) -> Generator[Pending[Any], Any, None]:
        """For records, or for room, or for what comes first."""
        crew = shares[0].crew
        gate = polling.wait()
        timer = self._timers.after(seconds, polling.wake)
        limit = None
        if not room.count:
            limit = member or ""
            crew.wait_for_room(limit, polling)
        else:
            if not room.fresh:
                limit = ""
                crew.wait_for_room(limit, polling)
            for share in shares:
                share.wait(polling)
        yield gate
        self._timers.cancel(timer)
        for share in shares:
            share.leave(polling)
        if limit is not None:
            crew.leave(limit, polling)

    def give_back(self, received: Received) -> None:
        """The client never saw them: released, if they are still leased."""
        if received.records:
            unseen = [Settle("release", one.receipt) for one in received.records]
            self._settling.settle(unseen, None)

    # ---- settling

    def settle(self, settles: Sequence[Settle], group: str | None = None) -> Pending[list[Settled]]:
        """Each with its own result. With a group, receipts of others are refused."""
        if not 1 <= len(settles) <= SETTLES_MAX:
            return Pending.failed(
                _invalid("receipts", f"a request settles 1 to {SETTLES_MAX} deliveries")
            )
        return self._settling.settle(settles, group)

    def check_times(self, delay_ms: int | None, visibility_ms: int | None) -> None:
        """Raises for what no settling takes; a request of many is refused whole then."""
        check_delay(delay_ms, self._options.retry_delay_max_ms)
        if visibility_ms is not None:
            check_visibility(visibility_ms, self._options.visibility_max_ms)

    # ---- looking

    @property
    def counts(self) -> dict[str, DeliveryCounts]:
        return {name: crew.counts for name, crew in self._shares.crews.items()}

    @property
    def refused(self) -> int:
        """Settlings that were refused, those of no known group too."""
        return self._shares.refused + sum(one.refused for one in self.counts.values())

    def leases(
        self,
        group: str,
        topic: str | None = None,
        after: tuple[str, int, int] | None = None,
        count_max: int | None = None,
    ) -> list[LeaseFacts]:
        """Records of a group that are leased or wait to come back, by place: those after one."""
        crew = self._shares.crews.get(group)
        if crew is None:
            return []
        shares = [one for name, one in sorted(crew.shares.items()) if topic in (None, name)]
        found = (facts for share in shares for facts in _leases(share, after))
        return list(islice(found, count_max))

    def shares(self, groups: Collection[str] | None = None) -> list[ShareFacts]:
        """The topics that groups receive from: of all groups, or of these."""
        now = self._now()
        found = []
        for share in self._shares:
            if groups is not None and share.crew.name not in groups:
                continue
            leased, waiting, ready = waiting_or_leased(share)
            found.append(
                ShareFacts(
                    share.crew.name,
                    share.topic.name,
                    leased,
                    waiting,
                    ready + self._rates.fresh_count(share),
                    not share.crew.breaker.is_open(now),
                )
            )
        return found

    def lanes(
        self,
        topic: str | None = None,
        group: str | None = None,
        after: tuple[str, str, int] | None = None,
        count_max: int | None = None,
    ) -> Pending[list[LaneFacts]]:
        """Of every lane in use, or the one that all records are in: by group, topic and partition,
        those after one, and at most about so many."""
        return self._rates.facts(LaneWish(topic, group, after, count_max))

    def lane_totals(self, shares_max: int) -> list[LaneTotals]:
        """Of every lane of the busiest shares of topics that use lanes."""
        return self._rates.totals(shares_max)

    def breakers(self) -> list[BreakerFacts]:
        """Of every group that receives by lease."""
        now = self._now()
        return [
            BreakerFacts(crew.name, crew.breaker.open_s(now), crew.breaker.openings)
            for crew in self._shares.crews.values()
        ]

    def paused(self) -> list[BreakerFacts]:
        """Groups whose records are retried instead of being dead letters."""
        return [one for one in self.breakers() if one.open_s is not None]

    # ---- the start and the end

    def start(self) -> Pending[None]:
        """After views, topics and committed offsets, before listeners open: leases are as they
        were, each for the shorter of its full time and what is left of it by the wall clock."""
        return follow(self._start())

    def _start(self) -> Generator[Pending[Any], Any, None]:
        shares = yield self._shares.load()
        now_ms = self._shares.around.clock.wall_ms()
        self._settling.begin()
        for share in shares:
            for ledger in share.ledgers:
                self._arm(share, ledger.partition, now_ms)
        self._rates.start()

    def _arm(self, share: Share, partition: int, now_ms: int) -> None:
        ledger, crew = share.ledgers[partition], share.crew
        for grant in ledger.grants():
            if grant.member is not None:
                crew.begin(grant.member, grant.left)
            rest_ms = min(max(grant.deadline_ms - now_ms, 0), grant.duration_ms)
            self._granting.arm(share, grant, rest_ms / 1000)
        for one in list(ledger.open.values()):
            if isinstance(one, Open) and one.state == WAITING:
                rest_ms = min(max(one.when_ms - now_ms, 0), one.wait_ms)
                self._settling.wait(share, ledger, one, rest_ms / 1000)

    def drain(self) -> None:
        """Before a stop: receives that wait are answered now, without records."""
        self._has_drained = True
        for share in self._shares:
            for polling in (*share.waiting, *share.crew.limited()):
                polling.end()

    def stop(self) -> None:
        self.drain()
        self._rates.stop()
        self._shares.stop()

    def _now(self) -> float:
        return self._shares.around.clock.monotonic()


def _leases(share: Share, after: tuple[str, int, int] | None) -> Iterator[LeaseFacts]:
    topic = share.topic.name
    for ledger in share.ledgers:
        number = ledger.partition
        if after is not None and (topic, number) < after[:2]:
            continue
        first = after[2] + 1 if after is not None and after[:2] == (topic, number) else 0
        for one in sorted(ledger.find_all(first), key=_offset):
            grant = one.grant
            yield LeaseFacts(
                topic,
                number,
                one.offset,
                LANES[one.lane],
                one.deliveries,
                STATE_NAMES[one.state],
                grant.member if grant is not None else None,
                _when_ms(one),
            )


def _when_ms(one: Open) -> int:
    if one.grant is not None:
        return one.grant.deadline_ms
    return one.when_ms if one.state == WAITING else 0


def _offset(one: Open) -> int:
    return one.offset


def _between(name: str, value: int | None, least: int, most: int, default: int) -> int:
    if value is None:
        return default
    if not least <= value <= most:
        raise _invalid(name, f"{name} is {least} to {most}, not {value}")
    return value


def _invalid(parameter: str, message: str) -> ParameterInvalid:
    return ParameterInvalid(message, parameter=parameter)


def _pass(source: Pending[Received], target: Pending[Received]) -> None:
    if source.error is not None:
        target.fail(source.error)
    else:
        target.succeed(source.result())
