"""The plug is pulled while tasks stage, and while what they staged is committed and cleaned up.

After any crash, a commit that was begun ends by itself, and one that was not is asked for again,
with what is staged anew: each record of a batch is in its topic once, in its order, and those of
attempts that lost are not. A batch that was answered as committed is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from broker.making import House
from broker.staging import (
    commit,
    commit_soon,
    entry,
    facts,
    local_house_of,
    stage,
    stage_soon,
    staged_offsets,
    values,
)
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import WAYS, survivor
from millstream.broker.staged_commits import Running
from millstream.engine.pending import Pending
from millstream.errors import CommitRunning, StagedPartUnknown, WriterUnknown

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"
OPTIONS: dict[str, Any] = {"cut_bytes": 2_000, "move_bytes": 6_000}
TASKS = 3
WRITERS = ("w", "v")


def records_of(writer: str, batch: int, task: int) -> list[bytes]:
    """What a task writes for a batch: the same in every attempt, and in its order."""
    random = Random(f"{writer} {batch} {task}")
    return [b"%s.%d.%d.%d" % (writer.encode(), batch, task, n) for n in range(random.randint(1, 9))]


class Driver:
    """One writer, as a query is: batch after batch, each staged and then committed."""

    def __init__(self, script: Script, name: str) -> None:
        self.script = script
        self.name = name
        self.batch = 0
        self.parts: dict[int, str] = {}
        self.committed = -1

    def stage(self, task: int, *, attempt_of: int | None = None) -> None:
        """An attempt; a later one of the same task may win or lose."""
        batch = self.batch if attempt_of is None else attempt_of
        ones = [entry(one, partition=task % 2) for one in records_of(self.name, batch, task)]
        asked = stage_soon(self.script.house, *ones, writer=self.name, batch=batch, task=task)

        def done(one: Pending[Any]) -> None:
            if one.error is not None:
                self.script.trouble = self.script.trouble or one.error
            elif batch == self.batch and self.script.random.random() < 0.7:
                self.parts[task] = one.result().part

        asked.then(done)

    def commit(self) -> None:
        if len(self.parts) < TASKS:
            return
        batch = self.batch
        asked = commit_soon(self.script.house, self.parts.values(), writer=self.name, batch=batch)

        def over(one: Pending[Any]) -> None:
            if one.error is not None:
                self.script.trouble = self.script.trouble or one.error
                return
            self.committed = max(self.committed, batch)
            if self.batch == batch:
                self.batch, self.parts = batch + 1, {}

        def done(one: Pending[Any]) -> None:
            if isinstance(one.error, CommitRunning | StagedPartUnknown):
                return
            result = one.result()
            if isinstance(result, Running):
                result.outcome.then(over)
            else:
                over(one)

        asked.then(done)


class Script:
    def __init__(self, seed: int, every: int) -> None:
        self.random = Random(seed)
        self.every = every
        self.disk = SimulatedDisk()
        self.house = local_house_of(self.disk, **OPTIONS)
        self.drivers = [Driver(self, name) for name in WRITERS]
        self.pulled = 0
        self.resumed = 0
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

    def step(self) -> None:
        driver = self.random.choice(self.drivers)
        kind = self.random.random()
        if kind < 0.35:
            for _ in range(self.random.randint(1, 6)):
                self.house.scheduler.turn()
        elif kind < 0.45:
            self.house.scheduler.advance(self.random.choice((0.1, 0.3, 70.0)))
        elif kind < 0.75:
            driver.stage(self.random.randrange(TASKS))
        elif kind < 0.8:
            # Of a batch that is committed, or soon will be.
            driver.stage(self.random.randrange(TASKS), attempt_of=max(0, driver.batch - 1))
        else:
            driver.commit()

    # ---- checking

    def _before(self, index: int, name: str) -> None:
        if self.random.randrange(self.every):
            return
        way = self.random.choice(WAYS)
        seed = self.random.getrandbits(32)
        try:
            disk = survivor(self.disk, way, Random(seed))
            self._check(disk, f"before operation {index}, {name}: {way}, {seed=}")
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    def _check(self, disk: SimulatedDisk, when: str) -> None:
        self.pulled += 1
        committed = [driver.committed for driver in self.drivers]
        batches = [driver.batch for driver in self.drivers]
        now_ms = self.house.scheduler.clock.now_ms
        try:
            house = local_house_of(disk, now_ms=now_ms, **OPTIONS)
            house.scheduler.run()
            for driver, least, batch in zip(self.drivers, committed, batches, strict=True):
                last = last_batch(house, driver.name)
                self.resumed += last > least
                assert least <= last <= batch, (driver.name, least, last)
                go_on(house, driver.name, last + 1)
            self._check_records(house)
            # And once more: what has been recovered stays.
            again = local_house_of(disk_of(house).crash("nothing"), now_ms=now_ms, **OPTIONS)
            self._check_records(again)
            for driver in self.drivers:
                again.done(again.broker.staged_writes.forget(driver.name))
            again.scheduler.advance(61)
            start, end = staged_offsets(again)
            assert start == end
        except BaseException as error:
            error.add_note(f"pulled {when}")
            raise

    def _check_records(self, house: House) -> None:
        found = values(house)
        expected = [
            records_of(driver.name, batch, task)
            for driver in self.drivers
            for batch in range(last_batch(house, driver.name) + 1)
            for task in range(TASKS)
        ]
        assert sorted(one or b"" for one in found) == sorted(
            record for records in expected for record in records
        )
        places = {one: at for at, one in enumerate(found)}
        for records in expected:
            where = [places[one] for one in records]
            assert where == sorted(where), "not in the order of their task"


def disk_of(house: House) -> SimulatedDisk:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    return disk


def last_batch(house: House, writer: str) -> int:
    try:
        found = facts(house, writer)
    except WriterUnknown:
        return -1
    assert found.committing is None, "a commit that was begun has not ended"
    return -1 if found.last_batch is None else found.last_batch


def go_on(house: House, writer: str, batch: int) -> None:
    """As a query does that starts again: the next batch is staged anew, and committed twice."""
    parts = []
    for task in range(TASKS):
        ones = [entry(one, partition=task % 2) for one in records_of(writer, batch, task)]
        parts.append(stage(house, *ones, writer=writer, batch=batch, task=task))
    assert not commit(house, parts, writer=writer, batch=batch).already
    assert commit(house, parts, writer=writer, batch=batch).already


@pytest.mark.parametrize("seed", range(40 if IS_FULL else 3))
def test_the_plug_is_pulled_during_staged_writes(seed: int) -> None:
    script = Script(seed, every=12)
    script.run([script.step] * 250)
    assert script.pulled > 20
    assert sum(driver.committed + 1 for driver in script.drivers) > 3
    assert script.house.broker.staged_writes.statistics().commits.steps > 8


def test_the_plug_is_pulled_before_every_disk_operation_of_a_batch() -> None:
    script = Script(7, every=1)
    [driver, _] = script.drivers
    scheduler = script.house.scheduler

    def whole_batch() -> None:
        while len(driver.parts) < TASKS:
            for task in range(TASKS):
                driver.stage(task)
            scheduler.run()
        driver.commit()
        scheduler.run()

    script.run([whole_batch] * 3 + [lambda: scheduler.advance(70)])
    assert driver.committed == 2
    assert script.pulled > 40
    assert script.resumed > 0
