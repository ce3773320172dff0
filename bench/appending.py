"""Appending: big batches without a sync, small ones with a sync that many share."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from crc32c import crc32c

from bench.harness import Bench, Goal, Line, Peer, Unit, alternate, make_line
from bench.machine import sync
from bench.stores import TOPIC, batch_of, now_ms, partition_in, plain_settings, require_room
from millstream.clock import SystemClock
from millstream.engine.collector import calm_collector
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.pending import Pending
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionId, PartitionSettings

BATCH_BYTES = 64 * 1024
# More than a processor's cache holds, as batches off a network would be.
BATCHES = 256
CRC_START = 21
APPENDERS = 64
RUN_SHARE = 1 / 3
# Before the clock starts: the journal's first files are made, code is warm.
WARM_UP_SECONDS = 0.25

MB_PER_SECOND = Unit("MB/s")
APPENDS_PER_SECOND = Unit("appends/s")


def big_batches(bench: Bench) -> Iterator[Line]:
    """Ready-made batches of 64 KiB, through the log and through a bare loop."""
    require_room(bench.scratch, 2 * bench.scale.append_bytes)
    batches = [batch_of(BATCH_BYTES) for _ in range(BATCHES)]
    count = bench.scale.append_bytes // BATCH_BYTES
    values = alternate(
        {
            "ours": lambda: _append_to_partition(bench.scratch, batches, count),
            "bare": lambda: _append_to_file(bench.scratch, batches, count),
        },
        bench.scale.many_runs,
    )
    yield make_line(
        "append.64k",
        mode="none",
        unit=MB_PER_SECOND,
        values=values["ours"],
        peer=Peer("CRC and pwrite in a bare loop", values["bare"]),
        goal=Goal("ratio at least", 0.7),
    )


def _append_to_partition(scratch: Path, batches: list[bytes], count: int) -> float:
    partition = partition_in(scratch, "appended", plain_settings())
    stamp = now_ms()
    written = 0
    start = time.perf_counter()
    for number in range(count):
        data = batches[number % BATCHES]
        partition.append(data, stamp)
        written += len(data)
    seconds = time.perf_counter() - start
    partition.close()
    shutil.rmtree(partition.directory)
    return written / seconds / 1e6


def _append_to_file(scratch: Path, batches: list[bytes], count: int) -> float:
    path = scratch / "appended.bare"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    position = 0
    start = time.perf_counter()
    for number in range(count):
        data = batches[number % BATCHES]
        crc32c(memoryview(data)[CRC_START:])
        position += os.pwrite(file, data, position)
    seconds = time.perf_counter() - start
    os.close(file)
    path.unlink()
    return position / seconds / 1e6


def shared_syncs(bench: Bench) -> Iterator[Line]:
    """Mode `every`, 64 appenders that each wait for their answer, on 1 and on 64 partitions."""
    data = batch_of(0)
    seconds = bench.scale.seconds * RUN_SHARE
    values = alternate(
        {
            "one": lambda: uvloop.run(_appenders(bench.scratch, data, 1, seconds)),
            "many": lambda: uvloop.run(_appenders(bench.scratch, data, APPENDERS, seconds)),
            "bare": lambda: _one_sync_each(bench.scratch, data, seconds),
        },
        bench.scale.many_runs,
    )
    yield make_line(
        "every.1-partition",
        mode="every",
        unit=APPENDS_PER_SECOND,
        values=values["one"],
        peer=Peer("one fdatasync for each append", values["bare"]),
        goal=Goal("ratio at least", 20),
    )
    yield make_line(
        "every.64-partitions",
        mode="every",
        unit=APPENDS_PER_SECOND,
        values=values["many"],
        peer=Peer("the same on 1 partition", values["one"]),
        goal=Goal("ratio at least", 0.8),
    )


async def _appenders(scratch: Path, data: bytes, partitions: int, seconds: float) -> float:
    root = scratch / "shared"
    engine = LocalEngine(SystemDisk(), str(root), SystemClock(), LocalOptions())
    await engine.start()
    await engine.create(TOPIC, partitions, PartitionSettings(fsync="every"))
    with _calm():
        start = time.perf_counter() + min(WARM_UP_SECONDS, seconds)
        appenders = [
            Appender(engine, PartitionId(TOPIC, number % partitions), data, start, start + seconds)
            for number in range(APPENDERS)
        ]
        await asyncio.gather(*(appender.run() for appender in appenders))
        # An appender that is told late that its append is done has used that time too.
        rate = sum(appender.count for appender in appenders) / (time.perf_counter() - start)
    await engine.stop()
    shutil.rmtree(root)
    return rate


@contextmanager
def _calm() -> Iterator[None]:
    """The collector as a broker has it, once it is ready; what else is measured has Python's."""
    before = gc.get_threshold()
    calm_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


class Appender:
    """Sends its batch again whenever it is answered, by callback, as a listener does."""

    def __init__(
        self, engine: LocalEngine, partition: PartitionId, data: bytes, start: float, end: float
    ) -> None:
        self._engine = engine
        self._partition = partition
        self._data = data
        self._start = start
        self._end = end
        self._done = asyncio.get_running_loop().create_future()
        self.count = 0

    async def run(self) -> None:
        self._engine.append(self._partition, self._data).then(self._answered)
        await self._done

    def _answered(self, answer: Pending[int]) -> None:
        answer.result()
        now = time.perf_counter()
        self.count += now >= self._start
        if now < self._end:
            self._engine.append(self._partition, self._data).then(self._answered)
        else:
            self._done.set_result(None)


def _one_sync_each(scratch: Path, data: bytes, seconds: float) -> float:
    path = scratch / "synced.bare"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    position = count = 0
    start = now = time.perf_counter()
    while now < start + seconds:
        position += os.pwrite(file, data, position)
        sync(file)
        count += 1
        now = time.perf_counter()
    os.close(file)
    path.unlink()
    return count / (now - start)
