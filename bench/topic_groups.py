"""Groups: how quickly partitions are shared out anew, and a start with many offsets."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from bench.harness import Bench, Goal, Line, NotMeasured, Unit
from bench.harness import make_line as line_of
from bench.servers import START_SECONDS, broker, free_port, running_broker
from millstream.client import AsyncClient, Client, Consumer

SECONDS = Unit("s", is_higher_better=False)
SETTLE_SECONDS = 60.0
SESSION_MS = 6000


def rebalances(bench: Bench) -> Iterator[Line]:
    """Members over partitions: one more joins, one leaves, one dies."""
    is_smoke = bench.scale.name == "smoke"
    members, partitions = (5, 20) if is_smoke else (50, 200)
    runs = 1 if is_smoke else 3
    with broker(bench.scratch) as ours:
        with Client(ours.url) as client:
            client.topics.create("t", partitions=partitions)
        times = asyncio.run(_rebalances(ours.url, members, partitions, runs))
    for name, values in times.items():
        yield line_of(
            f"rebalance.{name}",
            mode="fsync every",
            unit=SECONDS,
            values=values,
            taken="median",
            goal=Goal("value at most", 1.0),
            note=f"{members} members, {partitions} partitions"
            + (", from the end of its session" if name == "kill" else ""),
        )


async def _rebalances(url: str, members: int, partitions: int, runs: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"join": [], "leave": [], "kill": []}
    async with AsyncClient(url) as client, AsyncExitStack() as stack:
        group = [await stack.enter_async_context(_member(client)) for _ in range(members - 1)]
        await _settled(group, partitions)
        for _ in range(runs):
            start = time.perf_counter()
            group.append(await stack.enter_async_context(_member(client)))
            times["join"].append(await _settled(group, partitions) - start)
            start = time.perf_counter()
            await group.pop(0).close()
            times["leave"].append(await _settled(group, partitions) - start)
            group.append(await stack.enter_async_context(_member(client)))
            await _settled(group, partitions)
            times["kill"].append(await _kill(url, group, partitions))
    return times


def _member(client: AsyncClient) -> Consumer:
    return client.consumer("t", group="g", session_timeout_ms=SESSION_MS)


async def _settled(group: list[Consumer], partitions: int) -> float:
    """When every partition has one owner, and every member its share."""
    deadline = time.perf_counter() + SETTLE_SECONDS
    least = partitions // len(group)
    while True:
        owned = [one for member in group for one in member.assignment]
        is_even = all(least <= len(member.assignment) <= least + 1 for member in group)
        if is_even and len(owned) == len(set(owned)) == partitions:
            return time.perf_counter()
        if time.perf_counter() > deadline:
            raise NotMeasured(f"the group was not at rest after {SETTLE_SECONDS:g} s")
        await asyncio.sleep(0.002)


async def _kill(url: str, group: list[Consumer], partitions: int) -> float:
    """One more joins from a process that then dies; from the end of its session on."""
    program = (
        "import asyncio, sys\n"
        "from millstream.client import AsyncClient\n"
        "async def main():\n"
        "    async with AsyncClient(sys.argv[1]) as client:\n"
        "        async with client.consumer('t', group='g', session_timeout_ms=int(sys.argv[2])):\n"
        "            await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, url, str(SESSION_MS)
    )
    try:
        deadline = time.perf_counter() + SETTLE_SECONDS
        while sum(len(member.assignment) for member in group) == partitions:
            if time.perf_counter() > deadline:
                raise NotMeasured("the member that is to die never came")
            await asyncio.sleep(0.01)
        # Now it has its share, or gets it; its last call was at most a heartbeat ago.
        await asyncio.sleep(1.0)
    finally:
        process.kill()
        await process.wait()
    idle_ms, asked = await _idle_ms(url, {member.statistics().member_id for member in group})
    end = asked + (SESSION_MS - idle_ms) / 1000
    return max(0.0, await _settled(group, partitions) - end)


async def _idle_ms(url: str, others: set[str]) -> tuple[int, float]:
    """How long the dead one has been silent, and when that was asked."""
    async with AsyncClient(url) as client:
        facts = await client.groups.describe("g")
        asked = time.perf_counter()
    (dead,) = [member for member in facts.members if member.member_id not in others]
    return dead.idle_ms, asked


def many_offsets(bench: Bench) -> Iterator[Line]:
    """A broker that starts with many committed offsets."""
    groups, partitions = {"full": (1000, 1000), "quick": (200, 500), "smoke": (5, 20)}[
        bench.scale.name
    ]
    data = bench.scratch / "offsets"
    with running_broker(data, "--groups-max", str(2 * groups)) as ours:
        with Client(ours.url) as client:
            client.topics.create("t", partitions=partitions, settings={"fsync": "none"})
        offsets = [{"topic": "t", "partition": n, "offset": 0} for n in range(partitions)]
        body = msgspec.json.encode({"offsets": offsets})
        for number in range(groups):
            _post(f"{ours.url}/v1/groups/g{number}/commit", body)
    starts = [
        ready_seconds(data, "--groups-max", str(2 * groups))
        for _ in range(min(3, bench.scale.runs))
    ]
    yield line_of(
        "offsets.start",
        mode="fsync every",
        unit=SECONDS,
        values=starts,
        taken="median",
        goal=Goal("value at most", 3.0),
        note=f"{groups * partitions:,} committed offsets, until the broker is ready",
    )


def ready_seconds(data: Path, *flags: str) -> float:
    """From the start of the program until it serves."""
    port = free_port()
    program = [sys.executable, "-m", "millstream", "serve", "--log-level", "error", *flags]
    places = ["--data", str(data), "--http", f"127.0.0.1:{port}", "--metrics", "off"]
    start = time.perf_counter()
    process = subprocess.Popen([*program, *places])
    try:
        while not _is_ready(f"http://127.0.0.1:{port}/readyz"):
            if time.perf_counter() - start > START_SECONDS or process.poll() is not None:
                raise NotMeasured("the broker did not start")
            time.sleep(0.005)
        return time.perf_counter() - start
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _post(url: str, body: bytes) -> None:
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="POST")
    urllib.request.urlopen(request).read()
