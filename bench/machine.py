"""The machine that a run was made on, as far as it matters for the figures; and its scratch."""

from __future__ import annotations

import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from millstream.log import batch

SYNC_BYTES = 16 * 1024
# Enough for a median that another run repeats.
SYNCS = 200
# File systems in memory: a sync there costs nothing and means nothing.
IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class Machine(msgspec.Struct, frozen=True):
    cores: int
    memory_bytes: int
    fdatasync_p50_ms: float
    file_system: str
    system: str
    python: str
    codec: str


def look(scratch: Path) -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        fdatasync_p50_ms=round(_sync_p50_ms(scratch), 3),
        file_system=file_system_of(scratch),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        codec=batch.IMPLEMENTATION,
    )


@contextmanager
def scratch_in(directory: Path) -> Iterator[Path]:
    """A folder on the same disk as `directory`, gone at the end also when the run is stopped."""
    directory.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".mill-bench-", dir=directory.resolve()))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def sync(file: int) -> None:
    """fdatasync, where there is one."""
    getattr(os, "fdatasync", os.fsync)(file)


def drop_cached(path: Path) -> None:
    """Take the files below a folder out of the page cache, as far as the system lets us."""
    if not hasattr(os, "posix_fadvise"):
        return
    for one in path.rglob("*"):
        if one.is_file():
            file = os.open(one, os.O_RDONLY)
            try:
                # Only clean pages go.
                os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def file_system_of(path: Path) -> str:
    """Its type, such as ext4, where the system says so."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "unknown"
    for mount in mounts:
        fields, _, rest = mount.partition(" - ")
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return "unknown"


def _sync_p50_ms(scratch: Path) -> float:
    """One after the other into a file that has its size already, as a journal does."""
    path = scratch / "sync"
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    try:
        os.pwrite(file, bytes(SYNC_BYTES * SYNCS), 0)
        sync(file)
        block = os.urandom(SYNC_BYTES)
        times = []
        for number in range(SYNCS):
            start = time.perf_counter()
            os.pwrite(file, block, number * SYNC_BYTES)
            sync(file)
            times.append(time.perf_counter() - start)
    finally:
        os.close(file)
        path.unlink()
    return statistics.median(times) * 1000


def _cores() -> int:
    return os.cpu_count() or 1
