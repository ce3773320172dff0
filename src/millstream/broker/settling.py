"""Settling: how deliveries end, told by a worker or by the clock.

What a worker says is checked at once, noted in the journal of leases, and takes effect when that
is durable; until then the record is busy, and nobody else can settle it. A record whose lease runs
out comes back without a word in the journal: the deadline is there already.

A record that failed for good goes to the dead letters in one append with its settling. While the
group's breaker is open, one that used up its deliveries is retried later instead. A reject is a
verdict on the record and says nothing of the group: it is buried whatever the breaker says, and
the breaker does not count it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import structlog

from millstream.broker import lease_events as events
from millstream.broker.deadletters import DeadFacts, DeadLetter, is_dead_letter_topic
from millstream.broker.delivery_values import (
    Settle,
    Settled,
)
from millstream.broker.ledger import (
    LEAVING,
    LEFT_NONCE,
    RAN_OUT,
    WAITING,
    Failure,
    Grant,
    Ledger,
    Open,
)
from millstream.broker.settle_requests import Failed, Request, Work, gather
from millstream.engine.pending import Pending, follow

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.deadletters import DeadLetters
    from millstream.broker.delivery_values import Outcome, Reason
    from millstream.broker.granting import Granting
    from millstream.broker.shares import Share, Shares
    from millstream.broker.topic_settings import TopicSettings

# A record that could not be brought to the dead letters is tried again after so long.
AGAIN_SECONDS = 1.0
# Leases that ran out while the broker was down are no failures of the group's workers, and neither
# are those that end before workers had a chance to come back: the breaker does not count them.
START_SECONDS = 10.0
# What goes to the dead letters in one append, with room for headers of 8 KiB: an atomic append
# may have 64 MiB.
BURY_RECORDS = 1_000
BURY_BYTES = 16 * 1024 * 1024


class Settling:
    __slots__ = ("_dead_letters", "_granting", "_judged_from_s", "_shares")

    def __init__(self, shares: Shares, dead_letters: DeadLetters) -> None:
        self._shares = shares
        self._dead_letters = dead_letters
        self._granting: Granting | None = None
        # From when on the breaker counts leases that run out.
        self._judged_from_s = 0.0

    def begin(self) -> None:
        """At a start, before leases are armed."""
        self._judged_from_s = self._now() + START_SECONDS

    def grant_by(self, granting: Granting) -> None:
        self._granting = granting

    @property
    def granting(self) -> Granting:
        assert self._granting is not None
        return self._granting

    # ---- a request

    def settle(self, settles: Sequence[Settle], group: str | None) -> Pending[list[Settled]]:
        request = Request(settles)
        for work in gather(self._shares, request, group):
            self._do(request, work)
        request.part_done()
        return request.pending

    def _do(self, request: Request, work: Work) -> None:
        if work.first or work.acked:
            self._ack(request, work)
        if work.released:
            self._release(request, work)
        for duration_ms, extended in work.extended.items():
            self._extend(request, work, duration_ms, extended)
        if work.failed:
            self._fail(request, work)

    # ---- ack, release, extend

    def _ack(self, request: Request, work: Work) -> None:
        share, ledger, acked, first = work.share, work.ledger, work.acked, work.first
        epoch = ledger.epoch
        offsets = [one.offset for _, one in acked]
        for _, some in first.values():
            offsets += some

        def done(error: BaseException | None) -> None:
            if error is not None:
                request.fail_parts([at for at, _ in acked], error)
                for indexes, _ in first.values():
                    request.fail_parts(indexes, error)
                self._put_back_first(share, ledger, epoch, first)
                self._put_back(share, ledger, epoch, [one for _, one in acked])
                return
            for at, _ in acked:
                request.say(at, "acked")
            share.crew.counts.acked += len(offsets)
            self._judge(share, succeeded=len(offsets))
            if ledger.epoch == epoch:
                for grant, (_, some) in first.items():
                    ledger.acked(some)
                    self._shares.end_leases(share.crew, grant, len(some))
                self._gone(share, ledger, [one for _, one in acked])

        request.after(self._note_done(share, ledger, offsets), done)

    def _put_back_first(
        self,
        share: Share,
        ledger: Ledger,
        epoch: int,
        first: dict[Grant, tuple[list[int], list[int]]],
    ) -> None:
        """As `_put_back`, of those that were leased for the first time."""
        if ledger.epoch != epoch:
            return
        over: list[Open] = []
        for grant, (_, offsets) in first.items():
            for offset in offsets:
                ledger.open[offset] = ledger.acking.pop(offset)
            if grant.timer is None:
                over += _found(ledger, offsets)
        self._ran_out(share, ledger, over)

    def _release(self, request: Request, work: Work) -> None:
        share, ledger, released = work.share, work.ledger, work.released
        epoch = ledger.epoch

        def done(error: BaseException | None) -> None:
            if error is not None:
                request.fail_parts([at for at, _ in released], error)
                self._put_back(share, ledger, epoch, [one for _, one in released])
                return
            for at, _ in released:
                request.say(at, "released")
            share.crew.counts.released += len(released)
            self._released(share, ledger, epoch, [one for _, one in released])

        pending = self._note_returned(share, ledger, [one for _, one in released])
        request.after(pending, done)

    def _note_returned(self, share: Share, ledger: Ledger, ones: list[Open]) -> Pending[None]:
        runs: list[int] = []
        for one in sorted(ones, key=_offset):
            runs += (one.offset, 1, one.deliveries - 1)
        journal = self._shares.journal(share, ledger)
        return journal.note(ledger, events.Returned(ledger.number, runs), len(ones))

    def _released(self, share: Share, ledger: Ledger, epoch: int, ones: list[Open]) -> None:
        if ledger.epoch != epoch:
            return
        for one in ones:
            self._shares.end_lease(share.crew, one)
            one.deliveries -= 1
            ledger.make_ready(one)
        share.news()
        share.crew.wake_limited()

    def _extend(
        self,
        request: Request,
        work: Work,
        duration_ms: int,
        extended: list[tuple[int, Open]],
    ) -> None:
        share, ledger = work.share, work.ledger
        epoch = ledger.epoch
        deadline_ms = self._shares.around.clock.wall_ms() + duration_ms
        deadline_s = self._now() + duration_ms / 1000
        offsets = sorted(one.offset for _, one in extended)
        # First of all: a ledger that changes journals gets another number.
        journal = self._shares.journal(share, ledger)
        event = events.Extended(ledger.number, deadline_ms, duration_ms, events.runs_of(offsets))

        def done(error: BaseException | None) -> None:
            ones = [one for _, one in extended]
            if error is not None:
                request.fail_parts([at for at, _ in extended], error)
                self._put_back(share, ledger, epoch, ones)
                return
            for at, _ in extended:
                request.say(at, "extended", deadline_ms)
            share.crew.counts.extended += len(ones)
            if ledger.epoch == epoch:
                self._prolong(share, ones, duration_ms, deadline_ms, deadline_s)

        request.after(journal.note(ledger, event, len(offsets)), done)

    def _prolong(
        self,
        share: Share,
        ones: list[Open],
        duration_ms: int,
        deadline_ms: int,
        deadline_s: float,
    ) -> None:
        """Those of one grant become a grant of their own."""
        grants: dict[Grant, Grant] = {}
        for one in ones:
            old = one.grant
            one.is_busy = False
            if old is None:
                continue
            new = grants.get(old)
            if new is None:
                new = Grant(old.ledger, old.lane)
                new.begin(old.nonce, old.member, duration_ms, deadline_ms)
                grants[old] = new
                self.granting.arm(share, new, max(deadline_s - self._now(), 0.0))
            one.grant = new
            new.opens.append(one)
            new.left += 1
            old.left -= 1
            if old.left == 0 and old.timer is not None:
                self._shares.around.timers.cancel(old.timer)
                old.timer = None

    # ---- failures

    def _fail(self, request: Request, work: Work) -> None:
        """Nacks come back after a while; the last one, and rejects, go to the dead letters."""
        share, ledger = work.share, work.ledger
        settings = share.topic.settings
        now_ms = self._shares.around.clock.wall_ms()
        again: list[Failed] = []
        last: list[Failed] = []
        counts = share.crew.counts
        for failed in work.failed:
            settle, one = failed.settle, failed.one
            _note_failure(one, now_ms, settle.error or settle.kind)
            if settle.kind == "reject":
                counts.rejected += 1
                last.append(failed)
            else:
                counts.nacked += 1
                if one.deliveries >= settings.deliveries_max:
                    last.append(failed)
                else:
                    delay_ms = settle.delay_ms
                    if delay_ms is None:
                        delay_ms = backoff_ms(settings, one.deliveries)
                    one.when_ms, one.wait_ms = now_ms + delay_ms, delay_ms
                    again.append(failed)
        self._judge(share, failed=sum(one.settle.kind == "nack" for one in work.failed))
        if again:
            self._retry(request, share, ledger, again)
        for reason, kind in (("rejected", "reject"), ("deliveries", "nack")):
            ones = [failed for failed in last if failed.settle.kind == kind]
            if ones:
                self._end(request, share, ledger, ones, reason)  # type: ignore[arg-type]

    def _retry(self, request: Request, share: Share, ledger: Ledger, again: list[Failed]) -> None:
        epoch = ledger.epoch
        ones = [failed.one for failed in again]

        def done(error: BaseException | None) -> None:
            if error is not None:
                request.fail_parts([failed.at for failed in again], error)
                self._put_back(share, ledger, epoch, ones)
                return
            for failed in again:
                request.say(failed.at, "retried", failed.one.when_ms)
            if ledger.epoch == epoch:
                self._wait(share, ledger, ones)

        request.after(self._note_retried(share, ledger, ones), done)

    def _note_retried(self, share: Share, ledger: Ledger, ones: list[Open]) -> Pending[None]:
        journal = self._shares.journal(share, ledger)
        pending: Pending[None] = Pending.of(None)
        for one in ones:
            failure = one.failure
            assert failure is not None
            event = events.Retried(
                ledger.number,
                one.offset,
                one.deliveries,
                one.when_ms,
                failure.first_ms,
                failure.last_ms,
                failure.error,
                one.wait_ms,
            )
            pending = journal.note(ledger, event, 1)
        # They may be several appends, but none is durable after the last.
        return pending

    def _wait(self, share: Share, ledger: Ledger, ones: list[Open]) -> None:
        for one in ones:
            self._shares.end_lease(share.crew, one)
            self.wait(share, ledger, one, one.wait_ms / 1000)
        share.news()
        share.crew.wake_limited()

    def wait(self, share: Share, ledger: Ledger, one: Open, seconds: float) -> None:
        """It comes back after a while, on the monotonic clock; now, when there is none left."""
        one.is_busy = False
        one.state = WAITING
        if seconds <= 0:
            ledger.make_ready(one)
            return
        # There may be many that wait: a closure takes three times as much memory.
        call = partial(self._come_back, share, ledger, one)
        one.timer = self._shares.around.timers.after(seconds, call)

    def _come_back(self, share: Share, ledger: Ledger, one: Open) -> None:
        one.timer = None
        if ledger.open.get(one.offset) is one and one.state == WAITING:
            ledger.make_ready(one)
            share.news()

    def expire(self, share: Share, grant: Grant) -> None:
        """The time of a grant is over: what was not settled comes back, or was the last try."""
        grant.timer = None
        ledger = grant.ledger
        if share.is_gone:
            return
        ones = [one for one in grant.opens if one.grant is grant and not one.is_busy]
        ones += _found(ledger, [at for at in grant.offsets if ledger.open.get(at) is grant])
        self._ran_out(share, ledger, ones)

    def _ran_out(self, share: Share, ledger: Ledger, ones: list[Open]) -> None:
        if not ones:
            return
        # Nobody may have asked since the topic's settings changed.
        self._shares.renew((share,))
        most = share.topic.settings.deliveries_max
        share.crew.counts.timeouts += len(ones)
        if self._now() >= self._judged_from_s:
            self._judge(share, failed=len(ones))
        last: list[Open] = []
        for one in ones:
            grant = one.grant
            assert grant is not None
            if grant.nonce != LEFT_NONCE or one.failure is None:
                # Else it ran out, or failed, before a restart, and that is known already.
                _note_failure(one, grant.deadline_ms, RAN_OUT)
            self._shares.end_lease(share.crew, one)
            if one.deliveries >= most:
                one.state = LEAVING
                last.append(one)
            else:
                ledger.make_ready(one)
        if last:
            self._bury_later(share, ledger, last)
        share.news()
        share.crew.wake_limited()

    def _bury_later(self, share: Share, ledger: Ledger, ones: list[Open]) -> None:
        epoch = ledger.epoch

        def done(buried: Pending[Any]) -> None:
            if buried.error is None or ledger.epoch != epoch or share.is_gone:
                return
            _logger().warning(
                "records not brought to the dead letters; tried again",
                topic=share.topic.name,
                group=ledger.group,
                records=len(ones),
                error=str(buried.error),
            )
            left = [one for one in ones if ledger.open.get(one.offset) is one]
            self._shares.around.timers.after(
                AGAIN_SECONDS, lambda: self._bury_again(share, ledger, epoch, left)
            )

        follow(self._bury(share, ledger, ones, "deliveries", set())).then(done)

    def _bury_again(self, share: Share, ledger: Ledger, epoch: int, ones: list[Open]) -> None:
        if ones and ledger.epoch == epoch and not share.is_gone:
            self._bury_later(share, ledger, ones)

    def _end(
        self,
        request: Request,
        share: Share,
        ledger: Ledger,
        failed: list[Failed],
        reason: Reason,
    ) -> None:
        epoch = ledger.epoch
        ones = [one.one for one in failed]
        # More than one append may have: some may be there when the next are refused.
        dead: set[Open] = set()
        buried = follow(self._bury(share, ledger, ones, reason, dead))

        def done(error: BaseException | None) -> None:
            if error is not None:
                left = [one for one in failed if one.one not in dead]
                request.fail_parts([one.at for one in left], error)
                for one in failed:
                    if one.one in dead:
                        request.say(one.at, "dead")
                self._put_back(share, ledger, epoch, [one.one for one in left])
                return
            outcome, when_ms = buried.result()
            for one in failed:
                request.say(one.at, outcome, when_ms)

        request.after(buried, done)

    # ---- dead letters

    def _bury(
        self,
        share: Share,
        ledger: Ledger,
        ones: list[Open],
        reason: Reason,
        dead: set[Open],
    ) -> Generator[Pending[Any], Any, tuple[Outcome, int]]:
        """What becomes of records that failed for good, and when they come back if they do.
        `dead` gets those that are dead letters by now, also when others are refused."""
        epoch, topic, counts = ledger.epoch, share.topic, share.crew.counts
        if is_dead_letter_topic(topic.name) or not topic.settings.dead_letters:
            yield self._note_done(share, ledger, [one.offset for one in ones])
            if is_dead_letter_topic(topic.name):
                counts.parked += len(ones)
                outcome: Outcome = "parked"
            else:
                counts.dropped += len(ones)
                outcome = "dropped"
                _logger().warning(
                    "records dropped: their topic has no dead letters",
                    topic=topic.name,
                    group=ledger.group,
                    records=len(ones),
                )
            if ledger.epoch == epoch:
                self._gone(share, ledger, ones)
            return outcome, 0
        if reason == "deliveries" and share.crew.breaker.is_open(self._now()):
            delay_ms = topic.settings.retry_delay_max_ms
            when_ms = self._shares.around.clock.wall_ms() + delay_ms
            for one in ones:
                one.when_ms, one.wait_ms = when_ms, delay_ms
            yield self._note_retried(share, ledger, ones)
            if ledger.epoch == epoch:
                self._wait(share, ledger, ones)
            return "retried", when_ms
        yield from self._move(share, ledger, ones, reason, dead)
        return "dead", 0

    def _move(
        self,
        share: Share,
        ledger: Ledger,
        ones: list[Open],
        reason: Reason,
        dead: set[Open],
    ) -> Generator[Pending[Any], Any, None]:
        epoch, topic, counts = ledger.epoch, share.topic, share.crew.counts
        dlq = yield self._dead_letters.ensure(topic)
        left = sorted(ones, key=_offset)
        while left:
            offsets = [one.offset for one in left[:BURY_RECORDS]]
            found, stop = yield from self.granting.records(share, ledger, offsets, BURY_BYTES)
            if ledger.epoch != epoch:
                break
            part = [one for one in left[:BURY_RECORDS] if one.offset < stop]
            left = left[len(part) :]
            letters = [
                DeadLetter(
                    ledger.partition, found[one.offset], one.lane, _facts(ledger, one, reason)
                )
                for one in part
                if one.offset in found
            ]
            journal = self._shares.journal(share, ledger)
            event = events.Done(ledger.number, events.runs_of([one.offset for one in part]))
            if letters:
                entries = self._dead_letters.entries(topic, dlq, letters)
                yield journal.note_with(ledger, event, entries)
            else:
                yield journal.note(ledger, event, len(part))
            self._dead_letters.count(topic, reason, len(letters))
            counts.dead += len(letters)
            counts.expired += len(part) - len(letters)
            dead.update(part)
            if ledger.epoch != epoch:
                break
            self._gone(share, ledger, part)

    def _judge(self, share: Share, *, succeeded: int = 0, failed: int = 0) -> None:
        """Tell the group's breaker, and the log when it opens or closes."""
        crew = share.crew
        breaker = crew.breaker
        was_open = breaker.open_s(self._now())
        breaker.settled(self._now(), succeeded=succeeded, failed=failed)
        if was_open is None and breaker.is_open(self._now()):
            _logger().warning(
                "too many records of a group fail: they are retried instead of going to the dead "
                "letters, until half of them succeed",
                group=crew.name,
                topic=share.topic.name,
                openings=breaker.openings,
            )
        elif was_open is not None and not breaker.is_open(self._now()):
            _logger().info(
                "records of a group succeed again: those that fail go to the dead letters",
                group=crew.name,
                seconds=round(was_open, 1),
            )

    # ---- what all of them do

    def _note_done(self, share: Share, ledger: Ledger, offsets: list[int]) -> Pending[None]:
        journal = self._shares.journal(share, ledger)
        event = events.Done(ledger.number, events.runs_of(sorted(offsets)))
        return journal.note(ledger, event, len(offsets))

    def _gone(self, share: Share, ledger: Ledger, ones: list[Open]) -> None:
        """They are settled for good, and that is durable."""
        end_lease, crew = self._shares.end_lease, share.crew
        is_news = False
        for one in ones:
            end_lease(crew, one)
            if ledger.remove(one) is not None:
                is_news = True
        self._shares.moved(share, ledger)
        if is_news:
            share.news()
        crew.wake_limited()

    def _put_back(self, share: Share, ledger: Ledger, epoch: int, ones: list[Open]) -> None:
        """What was said could not be kept: leased as before, unless that ran out meanwhile."""
        if ledger.epoch != epoch:
            return
        over: list[Open] = []
        for one in ones:
            one.is_busy = False
            if one.grant is not None and one.grant.timer is None:
                over.append(one)
        self._ran_out(share, ledger, over)

    def _now(self) -> float:
        return self._shares.around.clock.monotonic()


def backoff_ms(settings: TopicSettings, deliveries: int) -> int:
    """After the first failure once the delay, then twice as long each time, up to the most."""
    doubled = settings.retry_delay_ms << min(deliveries - 1, 40)
    return min(doubled, settings.retry_delay_max_ms)


def _note_failure(one: Open, now_ms: int, error: str) -> None:
    first_ms = one.failure.first_ms if one.failure is not None else now_ms
    one.failure = Failure(first_ms, now_ms, error)


def _facts(ledger: Ledger, one: Open, reason: Reason) -> DeadFacts:
    failure = one.failure
    assert failure is not None
    return DeadFacts(
        ledger.group, one.deliveries, reason, failure.error, failure.first_ms, failure.last_ms
    )


def _found(ledger: Ledger, offsets: Sequence[int]) -> list[Open]:
    return [one for one in map(ledger.find, offsets) if one is not None]


def _offset(one: Open) -> int:
    return one.offset


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
