"""Workers and producers at random on one topic, and what must hold whatever happens.

The model is a fate for each record: published, leased by whom and until when, settled how. Every
answer is held against it at once. At some disk operations the plug is pulled: a broker that starts
on what is left must keep all that was answered, and everything that is not settled must come out
of it, once, when all leases are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from broker.leasing import delivery_options
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import WAYS, survivor
from millstream.broker.delivery_values import Delivered, Receive, Received, Settle, Settled
from millstream.broker.group_offsets import ResetTo
from millstream.broker.reading import Reader
from millstream.engine.pending import Pending
from millstream.errors import MillstreamError, TopicUnknown
from millstream.log import batch as batches
from millstream.log.batch import LANE_HEADER, LANES, Record

TOPIC, GROUP = "jobs", "g"
PARTITIONS = 2
DELIVERIES_MAX = 3
VISIBILITY_MS = 5_000
# Longer than any lease and any wait for a retry.
LONG_SECONDS = 200.0
MEMBER_INFLIGHT_MAX, GROUP_INFLIGHT_MAX = 5, 12
OPTIONS = delivery_options(
    breaker_settlings_min=1_000_000,
    member_inflight_max=MEMBER_INFLIGHT_MAX,
    group_inflight_max=GROUP_INFLIGHT_MAX,
)
# A clock that is moved by hand loses parts of milliseconds, and a tick of the wheel is 10 ms.
NEAR = 0.1
KINDS = ("ack", "ack", "ack", "nack", "release", "reject", "extend")
KINDS_IN_ORDER = ("ack", "reject", "nack", "reject", "extend", "ack", "release")
# What may end a lease before anybody is told.
ENDING = frozenset({"ack", "nack", "release", "reject"})


@dataclass(eq=False)
class Fate:
    """What is known of a record. `maybe` has what is on its way and was not answered."""

    value: bytes
    lane: str = "normal"
    # In which order it stands, if in any: of its partition, and of its key.
    line: tuple[int, bytes] | None = None
    is_published: bool = False
    # The newest delivery that was answered: for how long, and until when, by both clocks.
    lease: Delivered | None = None
    member: str | None = None
    duration: float = 0.0
    deadline: float = 0.0
    deadline_ms: int = 0
    # How often it was given out, less what was given back uncounted.
    given: int = 0
    # When it may come back, and how long that was when it was said.
    wait: tuple[float, int, float] | None = None
    settled: str | None = None
    # How many dead letters there are of it.
    deaths: int = 0
    maybe: set[str] = field(default_factory=set)
    old: list[str] = field(default_factory=list)

    def end_lease(self) -> None:
        if self.lease is not None:
            self.old.append(self.lease.receipt)
        self.lease = None

    def is_leased(self, now: float) -> bool:
        return self.lease is not None and self.deadline > now + NEAR and not self.maybe & ENDING


class Script:
    """One run. `every` says how rarely the plug is pulled; 0 is never."""

    def __init__(
        self,
        seed: int,
        every: int,
        mode: str = "every",
        order: str = "none",
        *,
        with_lanes: bool = False,
    ) -> None:
        self.random = Random(seed)
        self.every = every
        self.mode = mode
        self.with_lanes = with_lanes
        self.order = order
        self.disk = SimulatedDisk()
        self.house = local_house(self.disk, OPTIONS).start()
        self.settings = {
            "fsync": mode,
            "deliveries_max": DELIVERIES_MAX,
            "visibility_ms": VISIBILITY_MS,
            "delivery_order": order,
        }
        self.house.done(self.house.broker.topics.create(TOPIC, PARTITIONS, self.settings))
        self.kinds: tuple[str, ...] = KINDS
        self.fates: dict[bytes, Fate] = {}
        self.rounds = 0
        self.pulled = self.deliveries = self.refused = self.restarts = self.turned = 0
        # While the topic or the group is changed as a whole, nobody knows what a crash leaves.
        self.is_turning = False
        self.trouble: BaseException | None = None

    @property
    def now(self) -> float:
        return self.house.scheduler.clock.monotonic()

    @property
    def wall_ms(self) -> int:
        return self.house.scheduler.clock.wall_ms()

    def run(self, steps: int, *, in_order: bool = False) -> None:
        """Steps at random; or rounds of publish, receive and settle, nothing left out."""
        self.disk.on_operation = self._before if self.every else None
        try:
            for _ in range(steps):
                if in_order:
                    self._round()
                else:
                    self._step()
                if self.trouble is not None:
                    break
        finally:
            self.disk.on_operation = None
            if self.trouble is not None:
                raise self.trouble
        self.house.scheduler.run()
        if self.trouble is not None:
            raise self.trouble
        for fate in self.fates.values():
            assert not fate.maybe, fate
        self._check(self.disk.crash("nothing"), "at the end", is_weak_loss=self.mode != "every")

    # ---- doing

    def _step(self) -> None:
        kind = self.random.random()
        if kind < 0.25:
            for _ in range(self.random.randint(1, 8)):
                self.house.scheduler.turn()
        elif kind < 0.35:
            self.house.scheduler.advance(self.random.choice((0.1, 1.0, 3.0, 6.0, 70.0)))
        elif kind < 0.55:
            self._publish()
        elif kind < 0.75:
            self._receive()
        elif kind < 0.955:
            self._settle()
        elif kind < 0.985:
            self._restart()
        elif kind < 0.99:
            self._move_wall_clock()
        else:
            self._turn_over()

    def _round(self) -> None:
        self.kinds = (KINDS_IN_ORDER[self.rounds % len(KINDS_IN_ORDER)],)
        self.rounds += 1
        for act in (self._publish, self._receive, self._settle):
            act()
            self.house.scheduler.run()

    def _publish(self) -> None:
        topics = self.house.broker.topics
        if self.with_lanes and self.random.random() < 0.05:
            # Not from the start: records that came before have no lane.
            topics.use_lanes(TOPIC)
        count = self.random.randint(1, 5)
        fates = [Fate(b"%d" % (len(self.fates) + n)) for n in range(count)]
        self.fates |= {fate.value: fate for fate in fates}
        now_ms = self.wall_ms
        keys = [self.random.choice((None, b"a", b"b", b"c")) for _ in fates]
        lane = self.random.choice(LANES) if topics.get(TOPIC).uses_lanes else None
        headers = ((LANE_HEADER, lane.encode()),) if lane is not None else ()
        for fate in fates:
            fate.lane = lane or fate.lane
        data = batches.encode(
            [(now_ms, key, fate.value, headers) for key, fate in zip(keys, fates, strict=True)],
            lane=lane,
        )

        def done(one: Pending[int]) -> None:
            self.trouble = self.trouble or one.error
            for fate in fates:
                fate.is_published = True

        partition = self.random.randrange(PARTITIONS)
        for fate, key in zip(fates, keys, strict=True):
            fate.line = None if key is None else (partition, key)
        self.house.broker.publisher.publish_batch(TOPIC, partition, data).then(done)

    def _receive(self) -> None:
        house = self.house
        wish = Receive(
            (TOPIC,),
            count_max=self.random.randint(1, 8),
            wait_ms=self.random.choice((0, 0, 2000)),
            visibility_ms=self.random.choice((None, None, 1000)),
            member=self.random.choice((None, "w1", "w2")),
        )
        receiving = house.broker.delivery.receive(GROUP, wish)
        duration = (wish.visibility_ms or VISIBILITY_MS) / 1000
        goes_away = self.random.random() < 0.05

        def done(one: Pending[Received]) -> None:
            if house is not self.house:
                return
            if isinstance(one.error, TopicUnknown) and self.turned:
                return
            self.trouble = self.trouble or one.error
            if self.trouble is None:
                self._guard(lambda: self._delivered(one.result(), duration, wish.member))
                if goes_away:
                    # Before it saw any of them: they may be somebody else's at once.
                    receiving.cancel()
                    for record in one.result().records:
                        fate = self.fates[record.record.value or b""]
                        fate.given -= 1
                        fate.end_lease()

        receiving.pending.then(done)
        if self.random.random() < 0.05:
            receiving.cancel()

    def _delivered(self, received: Received, duration: float, member: str | None) -> None:
        for record in received.records:
            fate = self.fates[record.record.value or b""]
            self.deliveries += 1
            assert record.lane == fate.lane, (record, fate)
            assert fate.settled is None, ("given out after it was settled", fate)
            assert not fate.is_leased(self.now), ("two leases", fate)
            if fate.wait is not None and not fate.maybe:
                assert fate.wait[0] <= self.now + NEAR, ("too early", fate)
            fate.end_lease()
            fate.given += 1
            # Given back perhaps, and that was not told yet.
            counted = fate.given - ("release" in fate.maybe)
            assert max(record.deliveries, counted) <= DELIVERIES_MAX, (record, fate)
            fate.wait = None
            fate.lease, fate.duration, fate.member = record, duration, member
            self._lease_until(fate, received.deadline_ms)
            if self.order == "key" and fate.line is not None:
                self._check_order(fate)
        leased = [fate for fate in self.fates.values() if fate.is_leased(self.now)]
        assert len(leased) <= GROUP_INFLIGHT_MAX
        for name in ("w1", "w2"):
            assert sum(fate.member == name for fate in leased) <= MEMBER_INFLIGHT_MAX, name

    def _check_order(self, fate: Fate) -> None:
        """Nobody has another record of its key; and without lanes, those before it are done."""
        line = [one for one in self.fates.values() if one.line == fate.line]
        others = [one for one in line if one is not fate]
        assert not any(one.is_leased(self.now) for one in others), ("two of a key", fate)
        if self.with_lanes:
            return
        for one in line[: line.index(fate)]:
            is_over = one.settled is not None or one.given >= DELIVERIES_MAX
            assert is_over or one.maybe & ENDING, ("out of order", one, fate)

    def _lease_until(self, fate: Fate, deadline_ms: int) -> None:
        fate.deadline_ms = deadline_ms
        fate.deadline = self.now + (deadline_ms - self.wall_ms) / 1000

    def _settle(self) -> None:
        house = self.house
        leased = [one for one in self.fates.values() if one.lease is not None and not one.maybe]
        self.random.shuffle(leased)
        settles: list[Settle] = []
        chosen: list[tuple[Fate, Settle, bool]] = []
        for fate in leased[: self.random.randint(1, 5)]:
            assert fate.lease is not None
            kind: Any = self.random.choice(self.kinds)
            delay = self.random.choice((None, 0, 2000)) if kind == "nack" else None
            more = self.random.choice((None, 1000, 8000)) if kind == "extend" else None
            settle = Settle(
                kind, fate.lease.receipt, delay_ms=delay, visibility_ms=more, error="why"
            )
            settles.append(settle)
            chosen.append((fate, settle, fate.is_leased(self.now)))
        for fate, settle, _ in chosen:
            fate.maybe.add(settle.kind)
        self._add_refused(settles)
        if not settles:
            return

        def done(one: Pending[list[Settled]]) -> None:
            if house is not self.house:
                return
            self.trouble = self.trouble or one.error
            if self.trouble is None:
                self._guard(lambda: self._settled(chosen, one.result()))

        house.broker.delivery.settle(settles).then(done)

    def _add_refused(self, settles: list[Settle]) -> None:
        """Late and repeated ones, in this request and in one of their own."""
        settles += [one for one in settles if self.random.random() < 0.1]
        settles += [
            Settle("ack", self.random.choice(fate.old))
            for fate in self.fates.values()
            if fate.old and self.random.random() < 0.05
        ]
        if settles and self.random.random() < 0.1:
            again = list(settles)
            self.house.scheduler.soon(lambda: self._settle_again(again))

    def _settle_again(self, settles: list[Settle]) -> None:
        """A request that came twice: each of its parts counts once. An extend may be repeated."""
        house = self.house

        def done(one: Pending[list[Settled]]) -> None:
            if house is not self.house:
                return
            for result in one.result():
                is_extend = result.outcome == "extended"
                assert is_extend or _code(result) in {"receipt_stale", "receipt_unknown"}, result

        again = [one for one in settles if one.kind != "extend"]
        if again:
            house.broker.delivery.settle(again).then(lambda one: self._guard(lambda: done(one)))

    def _settled(
        self, chosen: Sequence[tuple[Fate, Settle, bool]], results: Sequence[Settled]
    ) -> None:
        for (fate, settle, was_good), result in zip(chosen, results, strict=False):
            fate.maybe.discard(settle.kind)
            if result.error is not None:
                assert _code(result) in {"receipt_stale", "receipt_unknown"}, (result, fate)
                assert not was_good, ("a good lease was refused", fate)
                self.refused += 1
                continue
            is_current = fate.lease is not None and fate.lease.receipt == settle.receipt
            if result.outcome == "extended":
                if is_current:
                    if settle.visibility_ms is not None:
                        fate.duration = settle.visibility_ms / 1000
                    self._lease_until(fate, result.when_ms)
                continue
            self._ended(fate, settle, result, is_current=is_current)
        for result in results[len(chosen) :]:
            assert _code(result) in {"receipt_stale", "receipt_unknown"}, result
            self.refused += 1

    def _ended(self, fate: Fate, settle: Settle, result: Settled, *, is_current: bool) -> None:
        if is_current:
            fate.end_lease()
        if result.outcome in {"acked", "dead"}:
            assert is_current, ("given out after it was settled", fate)
            assert (settle.kind == "ack") == (result.outcome == "acked"), (settle, result)
            fate.settled = result.outcome
            fate.deaths += result.outcome == "dead"
        elif result.outcome == "released":
            fate.given -= 1
        else:
            assert (settle.kind, result.outcome) == ("nack", "retried"), (settle, result)
            if is_current:
                rest = (result.when_ms - self.wall_ms) / 1000
                fate.wait = (self.now + rest, result.when_ms, rest)

    def _restart(self) -> None:
        """The process is killed and started again; what was not answered never will be."""
        self.house.scheduler.run()
        self.restarts += 1
        now, now_ms = self.now, self.wall_ms
        on_operation, self.disk.on_operation = self.disk.on_operation, None
        self.disk = self.disk.crash("nothing") if self.mode == "every" else self.disk.copy()
        self.house = local_house(self.disk, OPTIONS, now_ms=now_ms).start()
        self.disk.on_operation = on_operation
        for fate in self.fates.values():
            if fate.deadline <= now:
                # A wall clock that was put back may have it leased again, as nobody else had it.
                fate.member = None
            # The shorter of the full time, and what is left of it by the wall clock.
            rest = min(fate.duration, max(fate.deadline_ms - now_ms, 0) / 1000)
            fate.deadline = self.now + (rest if fate.deadline > now else 0.0)
            if fate.wait is not None:
                until, when_ms, whole = fate.wait
                rest = min(whole, (when_ms - now_ms) / 1000) if until > now else 0.0
                fate.wait = (self.now + rest, when_ms, whole)
            fate.maybe.clear()

    def _move_wall_clock(self) -> None:
        """An hour back or ahead: no lease gets shorter or longer."""
        self.house.scheduler.run()
        jump_ms = self.random.choice((-1, 1)) * 3_600_000
        self.house.scheduler.clock.now_ms += jump_ms

    def _turn_over(self) -> None:
        """The topic is emptied, made again, or the group put back to the start or the end."""
        # Nobody waits any more: it would have new records before we know.
        self.house.scheduler.advance(2.1)
        if any(fate.maybe for fate in self.fates.values()):
            return
        self.turned += 1
        self.is_turning = True
        broker = self.house.broker
        kind = self.random.choice(("purge", "delete", "earliest", "latest"))
        kept: Callable[[Fate], bool] = lambda _: False  # noqa: E731
        if kind == "purge":
            self.house.done(broker.topics.purge(TOPIC))
        elif kind == "delete":
            self.house.done(broker.topics.delete(TOPIC))
            self.house.done(broker.topics.create(TOPIC, PARTITIONS, self.settings))
        else:
            self._reset(kind)
            kept = lambda one: kind == "earliest" and one.settled != "gone"  # noqa: E731
        dead = dead_letters(self.house)
        for fate in self.fates.values():
            fate.end_lease()
            fate.wait = None
            if kept(fate):
                fate.settled, fate.given = None, 0
            elif fate.settled is None or kind in {"purge", "delete"}:
                fate.settled = "gone" if kind != "latest" else "passed"
            # Also of those whose last lease ran out.
            fate.deaths = dead.count(fate.value)
        self.is_turning = False

    def _reset(self, kind: Any) -> None:
        broker = self.house.broker
        if GROUP in broker.delivery.counts:
            self.house.done(broker.group_offsets.reset(GROUP, TOPIC, ResetTo(kind)))
        else:
            # Nobody has received yet; a reset is for a group that there is.
            self.house.done(broker.delivery.receive(GROUP, Receive((TOPIC,))).pending)
            self.house.done(broker.group_offsets.reset(GROUP, TOPIC, ResetTo(kind)))

    def _guard(self, check: Any) -> None:
        try:
            check()
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    # ---- checking

    def _before(self, index: int, name: str) -> None:
        if self.random.randrange(self.every):
            return
        way = self.random.choice(WAYS)
        seed = self.random.getrandbits(32)
        disk = survivor(self.disk, way, Random(seed))
        is_weak_loss = self.mode != "every" and way != "killed"
        try:
            when = f"before operation {index}, {name}: {way}, {seed=}"
            self._check(disk, when, is_weak_loss=is_weak_loss)
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    def _check(self, disk: SimulatedDisk, when: str, *, is_weak_loss: bool) -> None:
        self.pulled += 1
        try:
            house = local_house(disk, OPTIONS, now_ms=self.wall_ms).start()
            if not (is_weak_loss or self.is_turning):
                self._check_good_leases(house)
                self._check_drained(house)
            check_new_records(house)
        except BaseException as error:
            error.add_note(f"pulled {when}")
            raise

    def _check_good_leases(self, house: House) -> None:
        """A lease that was answered, and is not over, can still be settled: one of them."""
        for fate in self.fates.values():
            is_over_by_wall = fate.deadline_ms <= self.wall_ms + NEAR * 1000
            if fate.lease is not None and not (is_over_by_wall or fate.maybe):
                if not fate.is_leased(self.now):
                    continue
                settle = [Settle("extend", fate.lease.receipt)]
                (result,) = house.done(house.broker.delivery.settle(settle))
                assert result.outcome == "extended", (fate, result)
                return

    def _check_drained(self, house: House) -> None:
        seen = [one.value for one in drain(house)]
        dead = dead_letters(house)
        for fate in self.fates.values():
            came, died = seen.count(fate.value), dead.count(fate.value) - fate.deaths
            assert died in {0, 1}, ("dead letters doubled or lost", fate, died)
            if fate.settled is not None:
                assert (came, died) == (0, 0), ("came back after it was settled", fate)
            elif fate.is_published and "ack" not in fate.maybe:
                # It had its last delivery, or has one more to come.
                assert came + died == 1, ("lost or doubled", fate, came, died)
            else:
                assert came + died <= 1, fate


@contextmanager
def slow_reads(script: Script) -> Iterator[None]:
    """Many reads of its broker end some turns later, as from a cold disk."""
    real = Reader.fetch

    def fetch(self: Reader, *asked: Any) -> Pending[Any]:
        house = script.house
        if house.broker.reader is not self or script.random.random() < 0.6:
            return real(self, *asked)
        pending: Pending[Any] = Pending()

        def later(turns: int) -> None:
            if turns:
                house.scheduler.soon(lambda: later(turns - 1))
                return
            try:
                found = real(self, *asked)
            except MillstreamError as error:
                pending.fail(error)
            else:
                found.then(lambda one: pass_on(one, pending))

        later(script.random.randint(1, 6))
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reader, "fetch", fetch)
        yield


def pass_on(one: Pending[Any], pending: Pending[Any]) -> None:
    if one.error is not None:
        pending.fail(one.error)
    else:
        pending.succeed(one.result())


def check_new_records(house: House) -> None:
    """Whatever was lost or kept, what comes from now on comes out, once, whole and in time."""
    broker = house.broker
    if TOPIC not in broker.topics.by_name:
        return
    drain(house)
    records: list[Record] = []
    for n in range(20):
        now_ms = house.scheduler.clock.wall_ms()
        fields: list[batches.Fields] = [(now_ms, None, b"new %d" % n, ())]
        data = batches.encode(fields)
        house.done(broker.publisher.publish_batch(TOPIC, n % PARTITIONS, data))
        records += batches.decode(data)
    assert sorted(one.value or b"" for one in drain(house)) == sorted(
        one.value or b"" for one in records
    )


def drain(house: House) -> list[Record]:
    """Everything that is to be had once all leases are over, acked."""
    seen: list[Record] = []
    if TOPIC not in house.broker.topics.by_name:
        return seen
    quiet = 0
    while quiet < 3:
        receiving = house.broker.delivery.receive(GROUP, Receive((TOPIC,), count_max=1000))
        records = house.done(receiving.pending).records
        seen += [one.record for one in records]
        if records:
            settles = [Settle("ack", one.receipt) for one in records]
            results = house.done(house.broker.delivery.settle(settles))
            assert all(one.outcome == "acked" for one in results), results
            quiet = 0
            continue
        house.scheduler.advance(LONG_SECONDS)
        quiet += 1
    leases = house.broker.delivery.leases(GROUP)
    assert not leases, leases
    return seen


def dead_letters(house: House) -> list[bytes]:
    name = f"{TOPIC}.dlq"
    topic = house.broker.topics.by_name.get(name)
    found: list[bytes] = []
    for number in range(topic.partitions if topic is not None else 0):
        reading = house.broker.reader.fetch(name, number, 0, 10**6, 1 << 30)
        found += [one.value or b"" for one in house.done(reading).records]
    return found


def _code(result: Settled) -> str | None:
    return getattr(result.error, "code", None)
