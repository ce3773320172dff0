"""Reading a log from its start to its end, against `pread` of the same files."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from bench.harness import MIB, Bench, Goal, Line, Peer, Unit, alternate, make_line
from bench.stores import TOPIC, batch_of, build, now_ms, plain_settings, repeated, require_room
from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.log.disk import SystemDisk
from millstream.log.partition import Partition, PartitionId
from millstream.log.store import StoreOptions, open_store

BLOCK_BYTES = MIB
# What Kafka clients send by default.
BATCH_BYTES = 16 * 1024
MB_PER_SECOND = Unit("MB/s")
PARTITION = PartitionId(TOPIC, 0)
PEER = "pread of the same files, 1 MiB at a time"


def sequential(bench: Bench) -> Iterator[Line]:
    """Three lines: through the engine and through the partition once blocks are verified, and the
    first pass after opening, which verifies them."""
    require_room(bench.scratch, bench.scale.read_bytes)
    root = bench.scratch / "read"
    some = [batch_of(BATCH_BYTES) for _ in range(256)]
    build(root, repeated(some, bench.scale.read_bytes), settings=plain_settings())
    files = sorted(root.rglob("*.log"))
    firsts, partition = _through_the_partition(bench, root, files)
    engine = uvloop.run(_through_the_engine(bench, root, files))
    for name, values in (("read.engine", engine), ("read.partition", partition)):
        yield make_line(
            name,
            mode="none, cached",
            unit=MB_PER_SECOND,
            values=values["ours"],
            peer=Peer(PEER, values["bare"]),
            goal=Goal("ratio at least", 0.8),
        )
    yield make_line(
        "read.first-pass",
        mode="none, cached",
        unit=MB_PER_SECOND,
        values=firsts,
        peer=Peer(PEER, partition["bare"]),
        note="the first pass after opening checks every block against its checksum",
    )


def _through_the_partition(
    bench: Bench, root: Path, files: list[Path]
) -> tuple[list[float], dict[str, list[float]]]:
    firsts = []
    for _ in range(bench.scale.runs):
        store = open_store(SystemDisk(), str(root), now_ms(), StoreOptions())
        firsts.append(_read_partition(store.partition(PARTITION)))
        store.close()
    store = open_store(SystemDisk(), str(root), now_ms(), StoreOptions())
    partition = store.partition(PARTITION)
    _read_partition(partition)
    sides = {"ours": lambda: _read_partition(partition), "bare": lambda: _read_files(files)}
    values = alternate(sides, bench.scale.runs)
    store.close()
    return firsts, values


async def _through_the_engine(
    bench: Bench, root: Path, files: list[Path]
) -> dict[str, list[float]]:
    engine = LocalEngine(SystemDisk(), str(root), SystemClock(), LocalOptions())
    await engine.start()
    values: dict[str, list[float]] = {"ours": [], "bare": []}
    await _read_engine(engine)
    for _ in range(bench.scale.runs):
        values["ours"].append(await _read_engine(engine))
        values["bare"].append(_read_files(files))
    await engine.stop()
    return values


def _read_partition(partition: Partition) -> float:
    offset = partition.start_offset
    size = 0
    start = time.perf_counter()
    while offset < partition.high_watermark:
        chunk = partition.read(offset, BLOCK_BYTES)
        size += len(chunk.data)
        offset = chunk.next_offset
    return size / (time.perf_counter() - start) / 1e6


async def _read_engine(engine: LocalEngine) -> float:
    offset, end = engine.offsets(PARTITION)
    size = 0
    start = time.perf_counter()
    while offset < end:
        chunk = await engine.read(PARTITION, offset, BLOCK_BYTES)
        size += len(chunk.data)
        offset = chunk.next_offset
    return size / (time.perf_counter() - start) / 1e6


def _read_files(paths: list[Path]) -> float:
    size = 0
    start = time.perf_counter()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        position = 0
        while data := os.pread(file, BLOCK_BYTES, position):
            position += len(data)
        os.close(file)
        size += position
    return size / (time.perf_counter() - start) / 1e6
