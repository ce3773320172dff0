"""Brokers for tests: on a loop that the test turns, or on the running one."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from engine.engines import ROOT
from engine.manual import ManualScheduler
from faults.simulated_disk import SimulatedDisk
from millstream.broker.broker import Broker, BrokerOptions, make_broker
from millstream.broker.queues import QueueLimits, Queues
from millstream.broker.snapshots import Snapshots
from millstream.broker.timers import Timers
from millstream.broker.topic_settings import TopicDefaults
from millstream.broker.topics import TopicLimits
from millstream.clock import Clock, ManualClock, SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.memory import MemoryEngine
from millstream.engine.turns import LoopTurns
from millstream.engine.upkeep import UpkeepSettings
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionSettings
from millstream.log.snapshot import SnapshotFolder
from millstream.log.store import StoreOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.engine.pending import Pending
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns
    from millstream.log.disk import Disk

T = TypeVar("T")
_NUMBERS = count(1)

# Large enough for the broker's own batches, small enough that segments and journal files end.
SMALL = PartitionSettings(segment_bytes=64 * 1024)


def options(**limits: int | bool) -> BrokerOptions:
    return BrokerOptions(
        topic_defaults=TopicDefaults(PartitionSettings()),
        topic_limits=TopicLimits(**limits),  # type: ignore[arg-type]
    )


def broker_on(
    engine: Engine,
    clock: Clock,
    timers: Timers,
    turns: Turns,
    options_: BrokerOptions | None = None,
    *,
    queues: Queues | None = None,
) -> Broker:
    queues = queues or Queues(QueueLimits(), lambda: 0)
    folder = SnapshotFolder(SystemDisk(), "/nowhere")
    snapshots = Snapshots(queues, folder, folder)
    return make_broker(
        engine,
        queues,
        snapshots,
        options_ or options(),
        clock=clock,
        timers=timers,
        turns=turns,
        random_hex=rising_hex,
    )


def rising_hex(size: int) -> str:
    """Not random at all: ids in the order in which they were made, the same in every run."""
    return f"{next(_NUMBERS):0{2 * size}x}"


def loop_broker(queues: Queues | None = None, engine: Engine | None = None) -> Broker:
    """In memory, on the running event loop; its engine is not started, unless it was given."""
    loop = asyncio.get_running_loop()
    clock = SystemClock()
    timers = Timers(clock, loop.call_later)
    engine = engine or MemoryEngine()
    return broker_on(engine, clock, timers, LoopTurns(loop), queues=queues)


class RefusingDisk:
    """A simulated disk that has no room while it is told so, or after so many writes."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self.is_full = False
        self.writes_left: int | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._disk, name)

    def write(self, file: int, buffers: list[bytes], position: int) -> int:
        if self.is_full or self.writes_left == 0:
            raise OSError(errno.ENOSPC, "no room")
        if self.writes_left is not None:
            self.writes_left -= 1
        return self._disk.write(file, buffers, position)


@dataclass
class House:
    """A broker, its engine, and a loop that does one call at a time."""

    scheduler: ManualScheduler
    engine: LocalEngine | MemoryEngine
    options: BrokerOptions = field(default_factory=options)

    def __post_init__(self) -> None:
        scheduler = self.scheduler
        # A little late, as a real clock is: one that stands still would ask for ever.
        self.timers = Timers(
            scheduler.clock, lambda seconds, call: scheduler.later(seconds + 0.001, call)
        )
        self.broker = broker_on(self.engine, scheduler.clock, self.timers, scheduler, self.options)

    def start(self) -> House:
        self.engine.open()
        starting = self.broker.begin()
        self.scheduler.run()
        starting.result()
        return self

    def done(self, pending: Pending[T]) -> T:
        self.scheduler.run()
        return pending.result()

    def failed(self, pending: Pending[T]) -> BaseException:
        self.scheduler.run()
        assert pending.error is not None
        return pending.error


def memory_house(options_: BrokerOptions | None = None) -> House:
    scheduler = ManualScheduler(SimulatedDisk())
    engine = MemoryEngine(scheduler.soon)
    return House(scheduler, engine, options_ or options()).start()


def local_house(
    disk: SimulatedDisk | None = None,
    options_: BrokerOptions | None = None,
    *,
    now_ms: int | None = None,
    through: Callable[[SimulatedDisk], Disk] | None = None,
    upkeep: UpkeepSettings | None = None,
) -> House:
    """On the local log, on a simulated disk; not started. `through` stands between the two."""
    disk = disk or SimulatedDisk()
    seen: Disk = disk if through is None else through(disk)
    scheduler = ManualScheduler(seen, ManualClock())
    if now_ms is not None:
        scheduler.clock.now_ms = now_ms
    engine = LocalEngine(
        seen,
        ROOT,
        scheduler.clock,
        LocalOptions(
            store=StoreOptions(journal_file_bytes=64 * 1024),
            upkeep=upkeep or UpkeepSettings(),
        ),
        scheduler,
    )
    return House(scheduler, engine, options_ or options())
