"""Two misfortunes in a row: a kill, then a power failure while the next start repairs.

A kill leaves in the page cache what no sync has made durable. The next start sees it and goes by
it; a power failure may then take it away under its feet. So a start has to make durable whatever
it goes by, before it changes anything else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random

from engine.manual import ManualScheduler
from faults.ledger import ROOT, open_engine, read_all
from faults.script import options, settings_for
from faults.simulated_disk import SURVIVALS, PlugPulled, SimulatedDisk
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.upkeep import UpkeepSettings
from millstream.log import batch as batches
from millstream.log.partition import PartitionId

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"

NOW_MS = 1_700_000_000_000
EVERY, SECOND, COMPACT = PartitionId("every", 0), PartitionId("every", 1), PartitionId("compact", 0)


class House:
    """An engine that works, and a note of every disk that a kill would leave."""

    def __init__(self, chosen: LocalOptions | None = None) -> None:
        self.disk = SimulatedDisk()
        self.options = chosen or options()
        self.engine, self.scheduler = open_engine(self.disk, self.options, NOW_MS, 0.0)
        self.killed: list[SimulatedDisk] = []

    def create(self, name: str, partitions: int) -> None:
        self.engine.create(name, partitions, settings_for(name))
        self.scheduler.run()

    def append(self, id: PartitionId, batch: bytes) -> int:
        pending = self.engine.append(id, batch)
        self.scheduler.run()
        return pending.result()

    def watch(self, work: Callable[[], object]) -> None:
        """Do some work, and keep the disk as it is before each of its operations."""
        self.disk.on_operation = lambda _index, _name: self.killed.append(self.disk.copy())
        work()
        self.scheduler.run()
        self.disk.on_operation = None

    def twice(self) -> Iterator[SimulatedDisk]:
        """Each of those after a recovery that lost its power, at every moment, in every way."""
        step = 1 if IS_FULL else 1 + len(self.killed) // 12
        for number, killed in enumerate(self.killed[::step]):
            for stop in range(number % step, 200, step):
                disk = killed.copy()
                disk.stop_at = disk.operations + stop
                with suppress(PlugPulled):
                    open_engine(disk, self.options, NOW_MS, 0.0)
                for survival in SURVIVALS if IS_FULL else SURVIVALS[number % 2 :: 2]:
                    yield disk.crash(survival, Random(stop))
                if not disk.pulled:
                    break


def values(engine: LocalEngine, scheduler: ManualScheduler, id: PartitionId) -> list[bytes | None]:
    found = read_all(engine, scheduler, id)
    return [record.value for _, records in found for record in records]


def encoded(value: bytes | None, key: bytes = b"key") -> bytes:
    return batches.encode([(NOW_MS, key, value, [])])


def test_an_atomic_append_is_whole_after_a_kill_and_a_power_failure() -> None:
    house = House()
    house.create("every", 2)
    parts = [(EVERY, encoded(b"part")), (SECOND, encoded(b"part" * 100))]
    house.watch(lambda: house.engine.append_atomic(parts))
    for disk in house.twice():
        engine, scheduler = open_engine(disk, options(), NOW_MS, 0.0)
        there = [len(values(engine, scheduler, id)) for id in (EVERY, SECOND)]
        assert there in ([0, 0], [1, 1])


def test_a_compaction_loses_nothing_in_a_kill_and_a_power_failure() -> None:
    house = House()
    house.create("compact", 1)
    for number in range(20):
        house.append(COMPACT, encoded(b"%d" % number * 80, b"k%d" % (number % 3)))
    house.watch(lambda: house.scheduler.advance(4.5))
    assert house.engine._upkeep is not None
    assert house.engine._upkeep.counts.compactions
    wanted = {b"%d" % number * 80 for number in (17, 18, 19)}
    for disk in house.twice():
        engine, scheduler = open_engine(disk, options(), NOW_MS, 0.0)
        assert wanted <= set(values(engine, scheduler, COMPACT))


def test_a_topic_that_a_killed_process_made_keeps_what_the_next_one_puts_in() -> None:
    house = House()
    house.watch(lambda: house.create("every", 2))
    house.watch(lambda: house.engine.alter("every", partitions=3))
    kept = 0
    for killed in house.killed:
        engine, scheduler = open_engine(killed, options(), NOW_MS, 0.0)
        ids = [PartitionId(t.name, n) for t in engine.topics() for n in range(t.partitions)]
        for id in ids:
            engine.append(id, encoded(b"kept" * 300))
        scheduler.run()
        engine, scheduler = open_engine(killed.crash("nothing"), options(), NOW_MS, 0.0)
        for id in ids:
            assert values(engine, scheduler, id) == [b"kept" * 300]
        kept += len(ids)
    assert kept


def test_a_topic_whose_deletion_was_lost_has_all_its_records() -> None:
    house = House()
    house.create("every", 1)
    house.append(EVERY, encoded(b"kept" * 300))
    house.watch(lambda: house.engine.delete("every"))
    for disk in house.twice():
        engine, scheduler = open_engine(disk, options(), NOW_MS, 0.0)
        if engine.topics():
            assert values(engine, scheduler, EVERY) == [b"kept" * 300]
            assert not engine.findings


def test_a_data_directory_that_a_killed_process_made_stays() -> None:
    disk = SimulatedDisk()
    killed: list[SimulatedDisk] = []
    disk.on_operation = lambda _index, _name: killed.append(disk.copy())
    open_engine(disk, options(), NOW_MS, 0.0)
    for each in killed:
        engine, scheduler = open_engine(each, options(), NOW_MS, 0.0)
        engine.create("every", 1, settings_for("every"))
        scheduler.run()
        pending = engine.append(EVERY, encoded(b"kept"))
        scheduler.run()
        assert pending.result() == 0
        after = each.crash("nothing")
        assert f"{ROOT}/format" in after.files()
        engine, scheduler = open_engine(after, options(), NOW_MS, 0.0)
        assert values(engine, scheduler, EVERY) == [b"kept"]


def test_a_producer_is_remembered_though_its_records_were_trimmed_and_removed() -> None:
    """No checkpoint has come since: the files that tell of the producer have to stay for one."""
    house = House(
        LocalOptions(
            store=options().store,
            upkeep=UpkeepSettings(checkpoint_interval_s=1e6, file_delete_delay_s=1.0),
            bypass_bytes=options().bypass_bytes,
        )
    )
    house.create("every", 1)
    record: batches.Fields = (NOW_MS, b"key", b"big" * 300, [])
    batch = batches.encode([record], producer_id=7, producer_epoch=0, base_sequence=0)
    assert house.append(EVERY, batch) == 0
    house.engine.trim(EVERY, 1)
    house.scheduler.run()
    house.scheduler.advance(100)
    engine, scheduler = open_engine(house.disk.crash("all"), options(), NOW_MS, 0.0)
    repeated = engine.append(EVERY, batch)
    scheduler.run()
    assert repeated.result() == 0
