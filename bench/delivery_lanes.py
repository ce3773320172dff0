"""Lanes: who gets how much while all have records, and how long an urgent record waits."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from bench.harness import Bench, Goal, Line, Peer, Unit
from bench.harness import make_line as line_of
from bench.servers import broker
from millstream.client import AsyncClient

LANES = ("critical", "high", "normal", "low", "background")
WEIGHTS = (50, 25, 15, 7, 3)
VALUE = b"x" * 100
BOOST_MS = 1_000
# A topic in which the urgent would take nearly everything.
GREEDY = {"lane_weights": "1000/1/1/1/1", "lane_boost_ms": BOOST_MS}
# What a worker does with a record.
WORK_S = 0.002
WORKERS = 4

POINTS = Unit("points", is_higher_better=False)
MILLISECONDS = Unit("ms", is_higher_better=False)


def shares(bench: Bench) -> Iterator[Line]:
    """All lanes have more records than are received."""
    rounds = {"full": 200, "quick": 50, "smoke": 10}[bench.scale.name]
    seconds = {"full": 10.0, "quick": 5.0, "smoke": 2.0}[bench.scale.name]
    with broker(bench.scratch) as ours:
        found = asyncio.run(_shares(ours.url, rounds))
        gap_ms = asyncio.run(_longest_gap_ms(ours.url, seconds))
    worst = max(abs(share - weight) for share, weight in zip(found, WEIGHTS, strict=True))
    yield line_of(
        "lanes.shares",
        mode="fsync none",
        unit=POINTS,
        values=[worst],
        goal=Goal("value at most", 2.0),
        note="the furthest of five: " + "/".join(f"{share:.1f}" for share in found),
    )
    yield line_of(
        "lanes.longest-gap",
        mode="fsync none",
        unit=MILLISECONDS,
        values=[gap_ms],
        # A receive that is under way is not interrupted.
        goal=Goal("value at most", BOOST_MS + 100.0),
        note=f"without a record of some lane, weights {GREEDY['lane_weights']}, boost after 1 s",
    )


async def _shares(url: str, rounds: int) -> list[float]:
    count = rounds * sum(WEIGHTS)
    async with AsyncClient(url) as client:
        await client.topics.create("shares", partitions=1, settings={"fsync": "none"})
        await _fill(client, "shares", dict.fromkeys(LANES, count))
        got: Counter[str] = Counter()
        while got.total() < count:
            messages = await client.receive("shares", group="g", count=20, wait_s=5.0)
            got.update(message.lane for message in messages)
            await client.ack(messages)
    return [100 * got[lane] / got.total() for lane in LANES]


async def _longest_gap_ms(url: str, seconds: float) -> float:
    """The longest that a lane with records was not served while others were, one at a time."""
    async with AsyncClient(url) as client:
        await client.topics.create("gap", partitions=1, settings={"fsync": "none", **GREEDY})
        await _fill(client, "gap", {"critical": round(5_000 * seconds), "background": 1_000})
        start = time.perf_counter()
        longest, last = 0.0, start
        while (now := time.perf_counter()) < start + seconds:
            messages = await client.receive("gap", group="g", count=1, wait_s=5.0)
            await client.ack(messages)
            if any(message.lane == "background" for message in messages):
                longest, last = max(longest, now - last), now
    return max(longest, time.perf_counter() - last) * 1000


def critical_wait(bench: Bench) -> Iterator[Line]:
    """How long critical records wait, at half of what the workers can do: alone, and beside a
    flood of background records."""
    seconds = {"full": 10.0, "quick": 4.0, "smoke": 0.5}[bench.scale.name]
    calm, flooded = [], []
    with broker(bench.scratch) as ours:
        rate = asyncio.run(_capacity(ours.url, round(seconds * 200)))
        load = _Load(rate / 2, round(seconds * rate / 2))
        for run in range(bench.scale.runs):
            calm.append(asyncio.run(_wait_p99_ms(ours.url, f"calm{run}", load, flood=0)))
            # More than is worked off meanwhile.
            flood = 2 * load.total + 1000
            flooded.append(asyncio.run(_wait_p99_ms(ours.url, f"flood{run}", load, flood=flood)))
    yield line_of(
        "lanes.critical-p99",
        mode="fsync every",
        unit=MILLISECONDS,
        values=flooded,
        peer=Peer("the same without background records", calm),
        taken="median",
        goal=Goal("ratio at most", 3.0),
        note=f"{WORKERS} workers that take {WORK_S * 1000:g} ms a record, {rate:,.0f}/s in all; "
        "half of that is critical",
    )


class _Load(NamedTuple):
    """So many critical records, so many a second."""

    rate: float
    total: int


async def _capacity(url: str, count: int) -> float:
    """Records a second that the workers can do."""
    async with AsyncClient(url) as client, asyncio.TaskGroup() as tasks:
        await client.topics.create("capacity", partitions=1)
        await _publish(client, "capacity", _Load(1e9, count), time.perf_counter())
        waits = _Waits()
        start = time.perf_counter()
        workers = [tasks.create_task(_work(client, "capacity", waits)) for _ in range(WORKERS)]
        await waits.until(count)
        seconds = time.perf_counter() - start
        for worker in workers:
            worker.cancel()
    return count / seconds


async def _wait_p99_ms(url: str, topic: str, load: _Load, *, flood: int) -> float:
    async with AsyncClient(url) as client, asyncio.TaskGroup() as tasks:
        await client.topics.create(topic, partitions=1)
        await _fill(client, topic, {"background": flood})
        waits = _Waits()
        workers = [tasks.create_task(_work(client, topic, waits)) for _ in range(WORKERS)]
        async with asyncio.timeout(60 + 10 * load.total / load.rate):
            # What has not been used yet is made by the first of them.
            await _publish(client, topic, _Load(1e9, WORKERS), time.perf_counter())
            await waits.until(WORKERS)
            await _publish(client, topic, load, time.perf_counter())
            await waits.until(WORKERS + load.total)
        for worker in workers:
            worker.cancel()
    return statistics.quantiles(waits.seconds[WORKERS:], n=100)[98] * 1000


class _Waits:
    """How long each record waited, and who waits until there are so many."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._wanted = 0
        self._there = asyncio.Event()

    def add(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) >= self._wanted:
            self._there.set()

    async def until(self, count: int) -> None:
        self._wanted = count
        if len(self.seconds) < count:
            self._there.clear()
            await self._there.wait()


async def _work(client: AsyncClient, topic: str, waits: _Waits) -> None:
    while True:
        for message in await client.receive(topic, group="g", wait_s=5.0):
            if message.lane == "critical":
                waits.add(time.perf_counter() - float(message.text))
            await asyncio.sleep(WORK_S)
            await message.ack()


async def _publish(client: AsyncClient, topic: str, load: _Load, start: float) -> None:
    """Each at its time, whatever became of those before; its value is when it was due."""
    async with client.producer(linger_ms=0) as producer:
        for number in range(load.total):
            due = start + number / load.rate
            if (rest := due - time.perf_counter()) > 0:
                await asyncio.sleep(rest)
            await producer.send(topic, str(due), lane="critical")


async def _fill(client: AsyncClient, topic: str, counts: dict[str, int]) -> None:
    async with client.producer() as producer:
        for lane, count in counts.items():
            for _ in range(count):
                await producer.send(topic, VALUE, lane=lane)
