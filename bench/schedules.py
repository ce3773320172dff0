"""Schedules: what one costs, how quickly they are taken, how late they are, how soon ready again.

The broker runs in this process, on the local log with fsync `every`: what is measured is its work,
not that of a client.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import uvloop

from bench.harness import Bench, Goal, Line, Measurement, Unit
from bench.harness import make_line as line_of
from millstream.broker.broker import Broker, BrokerOptions, make_broker
from millstream.broker.outgoing import Outgoing
from millstream.broker.queues import QueueLimits, Queues
from millstream.broker.schedule_state import LATENESS_BOUNDS_S, ScheduleState
from millstream.broker.snapshots import Snapshots
from millstream.broker.timers import Timers
from millstream.broker.topic_settings import TopicDefaults
from millstream.broker.topics import TopicLimits
from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.turns import LoopTurns
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionSettings
from millstream.log.snapshot import SnapshotFolder

MODE = "fsync every"
VALUE = b"x" * 100
CALL_RECORDS = 500
CALLS_AT_ONCE = 8
DAY_MS = 86_400_000
# How many are pending when the broker starts again; of all else a tenth.
COUNTS = {"full": 10_000_000, "quick": 1_000_000, "smoke": 20_000}


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Broker]:
    loop = asyncio.get_running_loop()
    clock, disk = SystemClock(), SystemDisk()
    engine = LocalEngine(disk, str(folder), clock, LocalOptions())
    await engine.start()
    queues = Queues(QueueLimits(), lambda: 0)
    snapshots = SnapshotFolder(disk, str(folder / "snapshots"))
    broker = make_broker(
        engine,
        queues,
        Snapshots(queues, snapshots, snapshots),
        BrokerOptions(TopicDefaults(PartitionSettings()), TopicLimits()),
        clock=clock,
        timers=Timers(clock, loop.call_later),
        turns=LoopTurns(loop),
    )
    try:
        await broker.start()
        yield broker
    finally:
        broker.stop()
        await engine.stop()


async def insert(broker: Broker, count: int, due_ms: Callable[[int], int]) -> float:
    """Schedule so many records in calls of some hundreds; how many a second."""
    first = iter(range(0, count, CALL_RECORDS))

    async def send() -> None:
        for start in first:
            records = [
                Outgoing(None, VALUE, deliver_at_ms=due_ms(start + n))
                for n in range(min(CALL_RECORDS, count - start))
            ]
            await broker.publisher.publish("t", records)

    start_s = time.perf_counter()
    await asyncio.gather(*[send() for _ in range(CALLS_AT_ONCE)])
    return count / (time.perf_counter() - start_s)


async def fired(broker: Broker, count: int) -> None:
    while broker.schedules.statistics().fired < count:  # noqa: ASYNC110  nobody tells of it
        await asyncio.sleep(0.01)


def memory(bench: Bench) -> Iterator[Line]:
    """Of a schedule that is pending, all that is kept of it."""
    count = COUNTS[bench.scale.name] // 10
    state, random = ScheduleState(0), Random(1)
    owner = state.owner(b"0" * 16)
    for first in range(0, count, 32):
        state.add(owner, first, [random.randrange(1, 30 * DAY_MS) for _ in range(32)])
    columns = [
        column for slot in state.table.slots() for column in (slot.dues, slot.places, slot.topics)
    ]
    size = sum(map(sys.getsizeof, columns)) + sys.getsizeof(state.states)
    yield line_of(
        "schedules.memory",
        mode=MODE,
        unit=Unit("B/schedule", is_higher_better=False),
        values=[size / count],
        goal=Goal("value at most", 64),
        note=f"{count:,} schedules within 30 days",
    )


def inserting(bench: Bench) -> Iterator[Line]:
    count = COUNTS[bench.scale.name] // 10

    async def measure() -> float:
        async with running(bench.scratch / "inserting") as broker:
            await broker.topics.ensure("t")
            now_ms, random = int(time.time() * 1000), Random(1)
            return await insert(
                broker, count, lambda _: now_ms + random.randrange(DAY_MS, 9 * DAY_MS)
            )

    yield line_of(
        "schedules.insert",
        mode=MODE,
        unit=Unit("schedules/s"),
        values=[_run(measure)],
        goal=Goal("value at least", 50_000),
        note=f"{count:,} in calls of {CALL_RECORDS}",
    )


def at_once(bench: Bench) -> Iterator[Line]:
    """Due in the same second: until the last is in its topic, on disk."""
    count = min(100_000, COUNTS[bench.scale.name] // 10)

    async def measure() -> float:
        async with running(bench.scratch / "at-once") as broker:
            await broker.topics.ensure("t")
            lead_ms = 2000 + count // 10
            due_ms = int(time.time() * 1000) + lead_ms
            await insert(broker, count, lambda n: due_ms + n * 1000 // count)
            await fired(broker, count)
            return time.time() - due_ms / 1000

    yield line_of(
        "schedules.at-once",
        mode=MODE,
        unit=Unit("s", is_higher_better=False),
        values=[_run(measure)],
        goal=Goal("value at most", 2.0),
        note=f"{count:,} due within one second",
    )


def lateness(bench: Bench) -> Iterator[Line]:
    """A thousand a second: the bound below which 99% of them were late."""
    seconds = max(2, round(bench.scale.seconds * 3))
    count = seconds * 1000

    async def measure() -> float:
        async with running(bench.scratch / "lateness") as broker:
            await broker.topics.ensure("t")
            random = Random(1)
            due_ms = int(time.time() * 1000) + 1000 + count // 20
            await insert(broker, count, lambda _: due_ms + random.randrange(seconds * 1000))
            await fired(broker, count)
            found, seen = broker.schedules.statistics().lateness, 0
            for bound, late in zip((*LATENESS_BOUNDS_S, float("inf")), found, strict=True):
                seen += late
                if seen >= 0.99 * count:
                    return bound * 1000
            raise AssertionError

    yield line_of(
        "schedules.lateness-p99",
        mode=MODE,
        unit=Unit("ms", is_higher_better=False),
        values=[_run(measure)],
        goal=Goal("value at most", 50),
        note=f"{count:,}, 1,000/s; the histogram's bound",
    )


def restarting(bench: Bench) -> Iterator[Line]:
    """From the start of recovery until every schedule is known and armed."""
    count = COUNTS[bench.scale.name]

    async def fill(folder: Path) -> None:
        async with running(folder) as broker:
            await broker.topics.ensure("t")
            now_ms, random = int(time.time() * 1000), Random(1)
            await insert(broker, count, lambda _: now_ms + random.randrange(DAY_MS, 30 * DAY_MS))

    async def measure() -> float:
        start_s = time.perf_counter()
        async with running(bench.scratch / "restarting") as broker:
            seconds = time.perf_counter() - start_s
            assert broker.schedules.pending == count
            return seconds

    uvloop.run(fill(bench.scratch / "restarting"))
    yield line_of(
        "schedules.restart",
        mode=MODE,
        unit=Unit("s", is_higher_better=False),
        values=[_run(measure)],
        goal=Goal("value at most", 20.0),
        note=f"{count:,} pending",
    )


def _run(measure: Callable[[], Awaitable[float]]) -> float:
    async def run() -> float:
        return await measure()

    return uvloop.run(run())


MEASUREMENTS = (
    Measurement(("schedules.memory",), memory),
    Measurement(("schedules.insert",), inserting),
    Measurement(("schedules.at-once",), at_once),
    Measurement(("schedules.lateness-p99",), lateness),
    Measurement(("schedules.restart",), restarting),
)
