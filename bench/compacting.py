"""Appends in mode `every` at a steady rate, without and with a compaction beside them.

The rate is kept by a process of its own, which writes its clock to a pipe for every append that is
due: a loop's own timers are a millisecond coarse, and are late themselves when the loop is. An
append's time counts from that clock to its answer, so a stall counts for all who waited in it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvloop

from bench.harness import GIB, MIB, Bench, Goal, Line, Peer, Unit, make_line
from bench.stores import TOPIC, batch_of, build, keyed_batches, plain_settings, require_room
from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.pending import Pending
from millstream.engine.upkeep import UpkeepSettings
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.store import StoreOptions

LIVE = PartitionId("live", 0)
VALUE_BYTES = 1000
BATCH_BYTES = 64 * 1024
APPENDS_PER_SECOND = 500
# A compaction that takes longer than this has gone wrong.
COMPACTION_SECONDS_MAX = 300.0
NEVER_SECONDS = 1e6
# The load runs for so long before anything counts, and before the compaction begins.
WARM_UP_SECONDS = 0.5
POLL_SECONDS = 0.02

CLOCK = struct.Struct("=d")
PACER = """
import os, struct, sys, time
pause, due = 1 / float(sys.argv[1]), time.monotonic()
while True:
    due = max(due + pause, time.monotonic())
    time.sleep(max(0.0, due - time.monotonic()))
    try:
        os.write(1, struct.pack("=d", time.monotonic()))
    except BrokenPipeError:
        break
"""


def beside_compaction(bench: Bench) -> Iterator[Line]:
    size = bench.scale.compact_bytes
    # The old segments stay for a while beside the new ones.
    require_room(bench.scratch, 2 * size)
    calm: list[float] = []
    busy: list[float] = []
    lasted: list[float] = []
    half = bench.scale.calm_seconds / 2
    for _ in range(bench.scale.compactions):
        root = bench.scratch / "compacted"
        settings = plain_settings(compact=True, segment_bytes=min(64 * MIB, size // 4))
        build(root, keyed_batches(size, BATCH_BYTES, VALUE_BYTES), settings=settings)
        before = uvloop.run(_before(root, half))
        during, after, seconds = uvloop.run(_during(root, half))
        calm.append(_p99(before + after))
        busy.append(_p99(during))
        lasted.append(seconds)
        shutil.rmtree(root)
    amount = f"{size / GIB:.3g} GiB" if size >= GIB else f"{size // MIB} MiB"
    yield make_line(
        "append.beside-compaction",
        mode="every",
        unit=Unit("ms p99", is_higher_better=False),
        values=busy,
        peer=Peer("the same before and after", calm),
        goal=Goal("ratio at most", 3),
        taken="median",
        note=f"{APPENDS_PER_SECOND} appends/s; compacting {amount} "
        f"took {', '.join(f'{seconds:.1f}' for seconds in lasted)} s",
    )


async def _before(root: Path, seconds: float) -> list[float]:
    engine = await _open(root, NEVER_SECONDS)
    await engine.create(LIVE.topic, 1, PartitionSettings(fsync="every"))
    times = await _steady_load(engine, _after(seconds))
    await engine.stop()
    return times


async def _during(root: Path, calm_seconds: float) -> tuple[list[float], list[float], float]:
    """Times during the compaction, times after it, and how long it took."""
    engine = await _open(root, WARM_UP_SECONDS)
    start = time.monotonic()

    def is_over() -> bool:
        counts = {metric.name: metric.value for metric in engine.metrics()}
        assert not counts["millstream_log_compactions_failed"], "the compaction failed"
        assert time.monotonic() - start < COMPACTION_SECONDS_MAX, "the compaction never ends"
        return counts["millstream_log_compactions"] > 0

    during = await _steady_load(engine, is_over)
    seconds = time.monotonic() - start - WARM_UP_SECONDS
    after = await _steady_load(engine, _after(calm_seconds))
    await engine.stop()
    return during, after, seconds


def _after(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + WARM_UP_SECONDS + seconds
    return lambda: time.monotonic() > end


async def _open(root: Path, compaction_seconds: float) -> LocalEngine:
    kinds = {
        TOPIC: plain_settings(compact=True),
        LIVE.topic: PartitionSettings(fsync="every"),
    }
    options = LocalOptions(
        store=StoreOptions(settings_for=lambda topic: kinds[topic]),
        upkeep=UpkeepSettings(compaction_interval_s=compaction_seconds),
    )
    engine = LocalEngine(SystemDisk(), str(root), SystemClock(), options)
    await engine.start()
    return engine


async def _steady_load(engine: LocalEngine, is_over: Callable[[], bool]) -> list[float]:
    """Append whenever the pacer says so; the milliseconds that each took."""
    data = batch_of(0)
    times: list[float] = []
    pipe, far_end = os.pipe()
    os.set_blocking(pipe, False)
    pacer = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", PACER, str(APPENDS_PER_SECOND), stdout=far_end
    )
    os.close(far_end)
    counts_from = time.monotonic() + WARM_UP_SECONDS
    loop = asyncio.get_running_loop()

    def append(due: float) -> None:
        def done(_: Pending[int]) -> None:
            if due >= counts_from:
                times.append((time.monotonic() - due) * 1000)

        engine.append(LIVE, data).then(done)

    def read() -> None:
        for (due,) in CLOCK.iter_unpack(os.read(pipe, CLOCK.size * 1024)):
            append(due)

    loop.add_reader(pipe, read)
    try:
        while not is_over():  # noqa: ASYNC110 — the engine tells nobody when a compaction ends
            await asyncio.sleep(POLL_SECONDS)
    finally:
        loop.remove_reader(pipe)
        pacer.kill()
        await pacer.wait()
        os.close(pipe)
    return times


def _p99(times: list[float]) -> float:
    return sorted(times)[len(times) * 99 // 100]
