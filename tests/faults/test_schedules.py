"""The plug is pulled while records are scheduled, fire, are cancelled, moved on and purged.

After any crash, and when all that is due has fired: what was acknowledged is in its topic once,
unless its cancelling or a purge was acknowledged; then it is not there. Nothing is there twice,
and nothing is there before its time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Literal

import pytest

from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import WAYS, survivor
from millstream.broker.outgoing import Outgoing, Placed
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.broker.publishing import Published
    from millstream.broker.schedule_values import Plan
    from millstream.engine.pending import Pending

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"
HOUR_MS = 3_600_000


@dataclass
class Fate:
    """What is known of a record. None: nobody asked for that."""

    due_ms: int
    placed: Placed | None = None
    cancelling: Literal["asked", "acknowledged"] | None = None
    purging: Literal["asked", "acknowledged"] | None = None


class Script:
    def __init__(self, seed: int, every: int, mode: str = "every") -> None:
        self.random = Random(seed)
        self.every = every
        self.disk = SimulatedDisk()
        self.house = local_house(self.disk).start()
        self.house.done(self.house.broker.topics.create("t", 2, {"fsync": mode}))
        self.fates: dict[bytes, Fate] = {}
        self.serial = 0
        self.pulled = 0
        self.fired = 0
        # Purges that are under way: what is published meanwhile may be purged or not.
        self.purges = 0
        # Kept, because it is raised inside the engine, which may take it for an error of a job.
        self.trouble: BaseException | None = None

    def run(self, steps: Sequence[Callable[[], None]]) -> None:
        self.disk.on_operation = self._before
        try:
            for step in steps:
                step()
        finally:
            self.disk.on_operation = None
            if self.trouble is not None:
                raise self.trouble
        self.house.scheduler.run()
        self._check(self.disk.crash("nothing"), "at the end")

    @property
    def now_ms(self) -> int:
        return self.house.scheduler.clock.now_ms

    def step(self) -> None:
        kind, scheduler = self.random.random(), self.house.scheduler
        if kind < 0.4:
            self.publish()
        elif kind < 0.55:
            self.cancel()
        elif kind < 0.57:
            self.purge()
        elif kind < 0.8:
            scheduler.advance(self.random.choice((0.1, 0.4, 1.0, 12.0)))
        elif kind < 0.82:
            # The wall clock jumps, also back.
            scheduler.clock.now_ms += self.random.choice((-3000, 3000))
        elif kind < 0.9:
            scheduler.turn()
        else:
            scheduler.run()

    def publish(self) -> None:
        records: list[Outgoing] = []
        for _ in range(self.random.choice((1, 1, 3, 70))):
            self.serial += 1
            delay_ms = self.random.choice((20, 500, 2500, 4000, 20_000, HOUR_MS))
            value = b"%d" % self.serial
            key = b"k" if self.random.random() < 0.3 else None
            lane = self.random.choice((2, 2, 0))
            records.append(Outgoing(key, value, delay_ms=delay_ms, lane=lane))
            fate = self.fates[value] = Fate(self.now_ms + delay_ms)
            fate.purging = "asked" if self.purges else None
        idempotency_key = f"k{self.serial}" if self.random.random() < 0.3 else None
        sent = self.house.broker.publisher.publish("t", records, idempotency_key=idempotency_key)

        def done(published: Pending[Published]) -> None:
            for record, placed in zip(records, published.result().placed, strict=True):
                assert record.value is not None
                self.fates[record.value].placed = placed

        sent.then(done)

    def cancel(self) -> None:
        there = [one for one in self.fates.values() if one.placed and one.cancelling is None]
        if not there:
            return
        fate = self.random.choice(there)
        assert fate.placed is not None
        fate.cancelling = "asked"
        cancelled = self.house.broker.schedules.cancel("t", *fate.placed[:2])

        def done(one: Pending[Plan]) -> None:
            # Refused: it has fired, or its id is no longer known.
            fate.cancelling = "acknowledged" if one.error is None else None
            assert one.error is None or isinstance(one.error, MillstreamError)

        cancelled.then(done)

    def purge(self) -> None:
        asked = [one for one in self.fates.values() if one.purging != "acknowledged"]
        for one in asked:
            one.purging = "asked"
        sure = [one for one in asked if one.placed is not None]
        self.purges += 1

        def done(_: Pending[None]) -> None:
            self.purges -= 1
            for one in sure:
                one.purging = "acknowledged"

        self.house.broker.topics.purge("t").then(done)

    # ---- pulling

    def _before(self, index: int, name: str) -> None:
        if self.random.randrange(self.every):
            return
        way = self.random.choice(WAYS)
        seed = self.random.getrandbits(32)
        disk = survivor(self.disk, way, Random(seed))
        try:
            self._check(disk, f"before operation {index}, {name}: {way}, {seed=}")
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    def _check(self, disk: SimulatedDisk, when: str) -> None:
        self.pulled += 1
        try:
            house = local_house(disk, now_ms=self.now_ms).start()
            self._check_times(house)
            house.scheduler.clock.now_ms += 2 * HOUR_MS
            house.scheduler.advance(3.0)
            house.scheduler.run()
            found = values(house)
            self._check_ends(found)
            again = local_house(house_disk(house).crash("nothing"), now_ms=self.now_ms).start()
            assert values(again) == found
            assert again.broker.schedules.pending == house.broker.schedules.pending == 0
        except BaseException as error:
            error.add_note(f"pulled {when}")
            raise

    def _check_times(self, house: House) -> None:
        for value in values(house):
            # The clock was put back by at most so much since.
            assert self.fates[value].due_ms <= self.now_ms + 3000 * 20, value

    def _check_ends(self, found: Counter[bytes]) -> None:
        self.fired = max(self.fired, len(found))
        assert all(count == 1 for count in found.values()), found.most_common(3)
        for value, fate in self.fates.items():
            if "acknowledged" in (fate.cancelling, fate.purging):
                assert value not in found, (value, fate)
            elif fate.placed is not None and fate.cancelling is fate.purging is None:
                assert value in found, (value, fate)


def house_disk(house: House) -> SimulatedDisk:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    return disk


def values(house: House) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    for number in range(2):
        start, end = house.broker.reader.offsets("t", number)
        if start < end:
            fetched = house.done(house.broker.reader.fetch("t", number, start, 100_000, 1 << 30))
            found.update(one.value or b"" for one in fetched.records)
    return found


@pytest.mark.parametrize("seed", range(40 if IS_FULL else 4))
def test_schedules_survive_a_pulled_plug(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # So small that much is moved on.
    monkeypatch.setattr("millstream.broker.schedule_log.SPAN_MIN", 60)
    script = Script(seed, every=8 if IS_FULL else 25)
    script.run([script.step] * 200)
    assert script.pulled > 5
    assert script.fired > 5


@pytest.mark.parametrize("mode", ["every", "none"])
def test_the_plug_is_pulled_before_every_disk_operation_of_firings(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.schedule_log.SPAN_MIN", 60)
    script = Script(3, every=1, mode=mode)
    scheduler = script.house.scheduler

    def wait(seconds: float) -> Callable[[], None]:
        return lambda: scheduler.advance(seconds)

    # Firings, with cancellings beside them; what is left is moved on, and purged.
    begin = [*[script.publish] * 6, scheduler.run]
    script.run([*begin, *[script.cancel] * 3, wait(0.6), script.cancel, wait(3), wait(25)])
    script.run([*begin, script.purge, wait(12)])
    statistics = script.house.broker.schedules.statistics()
    assert script.pulled > 30
    assert min(statistics.fired, statistics.cancelled, statistics.expired, statistics.moved) > 0
