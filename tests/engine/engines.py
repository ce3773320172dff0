"""The engines that one suite of tests runs on, each with a loop that the test turns."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, TypeVar

import uvloop

from engine.manual import ManualScheduler
from faults.simulated_disk import SimulatedDisk
from log.making import records
from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.memory import MemoryEngine
from millstream.engine.upkeep import UpkeepSettings
from millstream.log.disk import SystemDisk
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.store import Store, StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from millstream.engine.commit import Committer
    from millstream.engine.pending import Pending
    from millstream.engine.protocol import Engine
    from millstream.engine.upkeep import Upkeep
    from millstream.log.batch import Record
    from millstream.log.disk import Disk

T = TypeVar("T")

ROOT = "/data"
T0 = PartitionId("t", 0)
T1 = PartitionId("t", 1)


class House(Protocol):
    """An engine and its loop."""

    @property
    def engine(self) -> Engine: ...

    def done(self, pending: Pending[T]) -> T:
        """Turn the loop until the result is there."""
        ...

    def stop(self) -> None: ...


def finish(house: House, pendings: Iterable[Pending[T]]) -> list[T]:
    return [house.done(pending) for pending in pendings]


def read_all(house: House, id: PartitionId, bytes_max: int = 1 << 20) -> list[Record]:
    """Every record from the start to the high watermark, chunk by chunk."""
    start, end = house.engine.offsets(id)
    found: list[Record] = []
    offset = start
    while offset < end:
        chunk = house.done(house.engine.read(id, offset, bytes_max))
        if not len(chunk.data):
            break
        assert chunk.next_offset > offset
        found += [record for record in records(chunk.data) if record.offset >= offset]
        offset = chunk.next_offset
    return found


def all_values(house: House, id: PartitionId = T0, bytes_max: int = 1 << 20) -> list[bytes | None]:
    return [record.value for record in read_all(house, id, bytes_max)]


class ManualHouse:
    """The local engine on a simulated disk, on a loop that does one call at a time."""

    def __init__(
        self,
        disk: SimulatedDisk | None = None,
        *,
        upkeep: UpkeepSettings | None = None,
        settings_for: Callable[[str], PartitionSettings] | None = None,
        journal_file_bytes: int = 8192,
        through: Callable[[SimulatedDisk], Disk] | None = None,
        make_scheduler: Callable[[Disk], ManualScheduler] = ManualScheduler,
    ) -> None:
        """`through` stands between the engine and the disk."""
        self.disk = disk or SimulatedDisk()
        seen: Disk = self.disk if through is None else through(self.disk)
        self.scheduler = make_scheduler(seen)
        self._settings_for = settings_for or (lambda _: PartitionSettings())
        self._upkeep = upkeep or UpkeepSettings()
        self._journal_file_bytes = journal_file_bytes
        self.engine = LocalEngine(
            seen,
            ROOT,
            self.scheduler.clock,
            LocalOptions(
                store=StoreOptions(
                    settings_for=self._settings_for, journal_file_bytes=journal_file_bytes
                ),
                upkeep=self._upkeep,
            ),
            self.scheduler,
        )
        self.engine.open()
        self.scheduler.run()

    def done(self, pending: Pending[T]) -> T:
        self.scheduler.run()
        return pending.result()

    def run(self) -> None:
        self.scheduler.run()

    def stop(self) -> None:
        self.scheduler.run()
        self.engine.close()

    def again(self, disk: SimulatedDisk | None = None) -> ManualHouse:
        """A new engine on this disk, or on what a crash left of it; the clock goes on."""
        house = ManualHouse(
            disk or self.disk,
            upkeep=self._upkeep,
            settings_for=self._settings_for,
            journal_file_bytes=self._journal_file_bytes,
        )
        house.scheduler.clock.now_ms = self.scheduler.clock.now_ms
        return house

    # ---- what only tests of the local engine look at

    @property
    def now_ms(self) -> int:
        return self.scheduler.clock.wall_ms()

    @property
    def store(self) -> Store:
        store = self.engine._store
        assert store is not None
        return store

    @property
    def committer(self) -> Committer:
        assert self.engine._committer is not None
        return self.engine._committer

    @property
    def upkeep(self) -> Upkeep:
        assert self.engine._upkeep is not None
        return self.engine._upkeep

    def partition(self, id: PartitionId = T0) -> Partition:
        return self.store.partition(id)

    def create(self, settings: PartitionSettings | None = None, partitions: int = 1) -> None:
        self.done(self.engine.create("t", partitions, settings or PartitionSettings()))

    def append(self, batch: bytes, id: PartitionId = T0) -> int:
        return self.done(self.engine.append(id, batch))

    def names(self, suffix: str, id: PartitionId = T0) -> list[str]:
        """Files of a partition with a suffix."""
        names = self.disk.list_directory(self.partition(id).directory)
        return [name for name in names if name.endswith(suffix)]


class MemoryHouse:
    """The engine in memory."""

    def __init__(self) -> None:
        self.scheduler = ManualScheduler(SimulatedDisk())
        self.engine = MemoryEngine(self.scheduler.soon)
        self.engine.open()

    def done(self, pending: Pending[T]) -> T:
        self.scheduler.run()
        return pending.result()

    def stop(self) -> None:
        self.engine.close()


class LoopHouse:
    """The local engine as a broker has it: uvloop, threads, child processes, a real disk."""

    def __init__(self, root: str, upkeep: UpkeepSettings | None = None) -> None:
        self.loop = uvloop.new_event_loop()
        options = LocalOptions(upkeep=upkeep or UpkeepSettings())
        options.store.journal_file_bytes = 1 << 20
        self.engine = LocalEngine(SystemDisk(), root, SystemClock(), options)
        self.loop.run_until_complete(self.engine.start())

    def done(self, pending: Pending[T]) -> T:
        async def result() -> T:
            return await pending

        return self.loop.run_until_complete(result())

    def until(self, condition: Callable[[], bool]) -> None:
        async def wait() -> None:
            while not condition():  # noqa: ASYNC110  threads and children have no event for it
                await asyncio.sleep(0.005)

        self.loop.run_until_complete(asyncio.wait_for(wait(), 60))

    def stop(self) -> None:
        if not self.loop.is_closed():
            self.loop.run_until_complete(self.engine.stop())
            self.loop.close()
