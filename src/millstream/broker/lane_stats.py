"""What is known of the lanes of each share: how much waits, how quickly it goes, how old it is."""

from __future__ import annotations

from heapq import nlargest
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.delivery_values import LaneFacts, LaneTotals
from millstream.broker.ledger import NORMAL
from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.log.batch import LANES

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from millstream.broker.lanes import LaneIndex
    from millstream.broker.ledger import Ledger
    from millstream.broker.reading import Fetched
    from millstream.broker.shares import Share, Shares

# Rates are taken so often, and over at most so long.
SAMPLE_SECONDS = 10.0


class LaneWish(NamedTuple):
    """Which lanes are asked for: all that None does not limit."""

    topic: str | None = None
    group: str | None = None
    # By group, topic and partition: those after this one.
    after: tuple[str, str, int] | None = None
    # About: the lanes of a partition are not divided.
    count_max: int | None = None


class _Sample(NamedTuple):
    """How many records each lane of a ledger had at one time."""

    given: list[int]
    # None while the index does not know them all; those of another index do not compare.
    arrived: list[int] | None
    known_by: LaneIndex | None


class _Rates(NamedTuple):
    given: list[float]
    arrived: list[float] | None


class LaneRates:
    __slots__ = ("_before", "_has_stopped", "_rates", "_shares", "_when")

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._before: dict[Ledger, _Sample] = {}
        self._rates: dict[Ledger, _Rates] = {}
        self._when = 0.0
        self._has_stopped = False

    def start(self) -> None:
        self._when = self._now()
        self._arm()

    def stop(self) -> None:
        self._has_stopped = True

    def _arm(self) -> None:
        self._shares.around.timers.after(SAMPLE_SECONDS, self._sample)

    def _sample(self) -> None:
        if self._has_stopped:
            return
        now = self._now()
        passed = max(now - self._when, 1e-3)
        self._when = now
        before, self._before, self._rates = self._before, {}, {}
        for share in self._shares:
            for ledger in share.ledgers:
                new = self._before[ledger] = self._look(share, ledger)
                self._rates[ledger] = _rates(before.get(ledger), new, passed)
        self._arm()

    def _look(self, share: Share, ledger: Ledger) -> _Sample:
        given = list(ledger.counts)
        _, end = self._shares.around.reader.offsets(*share.id(ledger))
        index = self._shares.index(share, ledger)
        if index is None:
            arrived = [0] * len(LANES)
            arrived[NORMAL] = end
            return _Sample(given, arrived, None)
        # Mostly done at once: headers of the last few seconds.
        self._shares.lanes.catch_up(share.topic, ledger.partition, share.crew.name)
        return _Sample(given, index.totals if index.end >= end else None, index)

    def fresh_count(self, share: Share) -> int:
        """Records that were never given out."""
        return sum(
            self._fresh(share, ledger, lane)
            for ledger in share.ledgers
            for lane in self._lanes_of(share)
        )

    def totals(self, shares_max: int) -> list[LaneTotals]:
        """Of topics that use lanes: those shares that were given most."""
        shares = [share for share in self._shares if share.topic.uses_lanes]
        return [
            one for share in nlargest(shares_max, shares, key=_given) for one in self._totals(share)
        ]

    def _totals(self, share: Share) -> Iterator[LaneTotals]:
        counts = [ledger.lane_counts() for ledger in share.ledgers]
        for lane, name in enumerate(LANES):
            fresh = sum(self._fresh(share, ledger, lane) for ledger in share.ledgers)
            yield LaneTotals(
                share.crew.name,
                share.topic.name,
                name,
                ready=fresh + sum(one[lane][1] for one in counts),
                inflight=sum(one[lane][0] for one in counts),
                delivered=sum(ledger.counts[lane] for ledger in share.ledgers),
            )

    def facts(self, wish: LaneWish) -> Pending[list[LaneFacts]]:
        """Of every lane that a share's topic uses, by group, topic, partition and lane."""
        return follow(self._all_facts(wish))

    def _all_facts(self, wish: LaneWish) -> Generator[Pending[Any], Any, list[LaneFacts]]:
        found: list[LaneFacts] = []
        for share in sorted(self._shares, key=_place):
            if wish.topic not in (None, share.topic.name):
                continue
            if wish.group not in (None, share.crew.name):
                continue
            for ledger in list(share.ledgers):
                if wish.count_max is not None and len(found) >= wish.count_max:
                    return found
                if wish.after is not None and (*_place(share), ledger.partition) <= wish.after:
                    continue
                waiting = self._shares.lanes.catch_up(
                    share.topic, ledger.partition, share.crew.name
                )
                if waiting is not None:
                    yield waiting
                counts = ledger.lane_counts()
                for lane in self._lanes_of(share):
                    age_ms = yield from self._oldest_age_ms(share, ledger, lane)
                    found.append(self._facts(share, ledger, lane, counts[lane], age_ms))
        return found

    def _oldest_age_ms(
        self, share: Share, ledger: Ledger, lane: int
    ) -> Generator[Pending[Any], Any, int | None]:
        first = ledger.find_ready(lane)
        offset = first.offset if first is not None else self._first_fresh(share, ledger, lane)
        if offset is None or share.is_gone:
            return None
        reader = self._shares.around.reader
        try:
            fetched: Fetched = yield reader.fetch(*share.id(ledger), offset, 1, 1)
        except MillstreamError:
            return None
        if not fetched.records:
            return None
        return max(self._shares.around.clock.wall_ms() - fetched.records[0].timestamp, 0)

    def _first_fresh(self, share: Share, ledger: Ledger, lane: int) -> int | None:
        if not self._fresh(share, ledger, lane):
            return None
        index = self._shares.index(share, ledger)
        if index is None:
            return ledger.cursor(lane)
        run = index.next_run(lane, ledger.cursor(lane))
        return run[0] if run is not None else None

    def _lanes_of(self, share: Share) -> Iterator[int]:
        yield from range(len(LANES)) if share.topic.uses_lanes else (NORMAL,)

    def _fresh(self, share: Share, ledger: Ledger, lane: int) -> int:
        if share.topic.uses_lanes:
            index = self._shares.index(share, ledger)
            return index.count(lane, ledger.cursor(lane)) if index is not None else 0
        _, end = self._shares.around.reader.offsets(*share.id(ledger))
        return max(end - ledger.cursor(lane), 0)

    def _facts(
        self,
        share: Share,
        ledger: Ledger,
        lane: int,
        counts: tuple[int, int],
        age_ms: int | None,
    ) -> LaneFacts:
        inflight, ready = counts
        last = ledger.last_served[lane]
        clock = self._shares.around.clock
        served_ms = None
        if last is not None:
            served_ms = clock.wall_ms() - int((clock.monotonic() - last) * 1000)
        rates = self._rates.get(ledger)
        return LaneFacts(
            share.crew.name,
            share.topic.name,
            ledger.partition,
            LANES[lane],
            ready + self._fresh(share, ledger, lane),
            inflight,
            ledger.counts[lane],
            round(rates.given[lane], 3) if rates is not None else 0.0,
            round(rates.arrived[lane], 3) if rates is not None and rates.arrived else None,
            served_ms,
            age_ms,
        )

    def _now(self) -> float:
        return self._shares.around.clock.monotonic()


def _rates(old: _Sample | None, new: _Sample, passed: float) -> _Rates:
    before = old.given if old is not None else [0] * len(LANES)
    given = [(count - earlier) / passed for count, earlier in zip(new.given, before, strict=True)]
    if old is None or not (old.arrived and new.arrived) or old.known_by is not new.known_by:
        return _Rates(given, None)
    return _Rates(
        given,
        [(count - was) / passed for count, was in zip(new.arrived, old.arrived, strict=True)],
    )


def _given(share: Share) -> int:
    return sum(sum(ledger.counts) for ledger in share.ledgers)


def _place(share: Share) -> tuple[str, str]:
    return share.crew.name, share.topic.name
