"""Opening a clean store, in a process of its own: how long, and how much memory.

As a program (`python -m bench.opening DIR`) it opens the store and prints what that took.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

import bench as package
from bench.harness import GIB, MIB, Bench, Goal, Line, Peer, Unit, make_line
from bench.machine import drop_cached, free_bytes
from bench.stores import (
    FREE_SHARE,
    HOLE_START,
    TOPIC,
    SparseDisk,
    build,
    now_ms,
    plain_settings,
    repeated,
    zero_batch,
)
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionId
from millstream.log.store import StoreOptions, open_store

# Holes take no room, so a batch costs two pages: the one it starts in, and that after it.
BATCH_BYTES = 256 * 1024
COST_BYTES = 2 * HOLE_START
PARTITIONS = 3
OPEN_SECONDS_MAX = 1.0
# Ten times the log may cost this much: an object a segment, and noise; none of its contents.
GROWTH_BYTES_MAX = MIB

SECONDS = Unit("s", is_higher_better=False)
MEBIBYTES = Unit("MiB", is_higher_better=False)


class Opened(msgspec.Struct, frozen=True):
    seconds: float
    memory_bytes: int
    segments: int


def clean_stores(bench: Bench) -> Iterator[Line]:
    """A store, and one a tenth of its size, opened with none of their files in the page cache."""
    wanted, note = _affordable(bench)
    large, small = bench.scratch / "large", bench.scratch / "small"
    for root, size in ((large, wanted), (small, wanted // 10)):
        one = zero_batch(BATCH_BYTES)
        settings = plain_settings()
        batches = repeated([one], size)
        build(root, batches, partitions=PARTITIONS, settings=settings, disk=SparseDisk())
    opened: dict[Path, list[Opened]] = {large: [], small: []}
    for _ in range(bench.scale.runs):
        for root, results in opened.items():
            drop_cached(root)
            results.append(_open_in_child(root))
    peer = f"a store of {_size(wanted // 10)}"
    yield make_line(
        "open.time",
        mode=f"clean, {_size(wanted)}, cold",
        unit=SECONDS,
        values=[one.seconds for one in opened[large]],
        peer=Peer(peer, [one.seconds for one in opened[small]]),
        goal=Goal("value at most", OPEN_SECONDS_MAX),
        taken="median",
        note=note,
    )
    growth = [
        (big.memory_bytes - little.memory_bytes) / MIB
        for big, little in zip(opened[large], opened[small], strict=True)
    ]
    segments = opened[large][0].segments - opened[small][0].segments
    yield make_line(
        "open.memory",
        mode=f"clean, {_size(wanted)}",
        unit=MEBIBYTES,
        values=growth,
        goal=Goal("value at most", GROWTH_BYTES_MAX / MIB),
        taken="median",
        note=f"resident memory after opening, more than for {peer}; {segments} more segments",
    )


def _affordable(bench: Bench) -> tuple[int, str | None]:
    wanted = bench.scale.open_bytes
    room = int(free_bytes(bench.scratch) * FREE_SHARE) * BATCH_BYTES // COST_BYTES
    if room >= wanted:
        return wanted, None
    return room, f"there is no room for {_size(wanted)} on this disk"


def _open_in_child(root: Path) -> Opened:
    clone = Path(package.__file__).parent.parent
    paths = [str(clone), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench.opening", str(root)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Opened)


def _open(root: str) -> Opened:
    gc.collect()
    before = _resident_bytes()
    start = time.perf_counter()
    store = open_store(SystemDisk(), root, now_ms(), StoreOptions())
    seconds = time.perf_counter() - start
    grown = _resident_bytes() - before
    assert not store.findings, store.findings
    segments = 0
    for partition in store.partitions.values():
        segments += len(partition.segments)
        assert len(partition.read(partition.start_offset, MIB).data), "the log is not empty"
    assert PartitionId(TOPIC, 0) in store.partitions
    store.close()
    return Opened(seconds, grown, segments)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)
    return pages * os.sysconf("SC_PAGE_SIZE")


def _size(size: int) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB else f"{size / MIB:.3g} MiB"


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_open(sys.argv[1])))
