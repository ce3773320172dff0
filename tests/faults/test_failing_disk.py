"""The n-th call of each operation of the disk fails, for every n."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from contextlib import suppress
from pathlib import Path
from random import Random
from types import ModuleType

import pytest

from engine.manual import ManualScheduler
from faults.failing_disk import FailingDisk
from faults.ledger import (
    check_all_closed,
    check_partitions,
    check_promises,
    go_on,
    open_engine,
    read_all,
)
from faults.script import Script, options, settings_for
from faults.simulated_disk import SimulatedDisk
from millstream.clock import ManualClock
from millstream.engine.local import LocalEngine
from millstream.engine.pending import Pending
from millstream.errors import (
    DiskFull,
    OutcomeUnknown,
    StorageFailed,
    StoreLocked,
    StoreUnreadable,
    TooManyFiles,
)
from millstream.log import batch as batches
from millstream.log.disk import SystemDisk
from millstream.log.offline import reading
from millstream.log.partition import PartitionId

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"

STEPS = 70
SEED = 7

# What an operation can fail with. Reads need no room; names that go may, where files are copied
# on write. `share_lock` has no row: it is no operation of the log, for which a disk is broken here,
# but one of the tools that read a directory without a broker. It has tests of its own below.
FAULTS = [
    ("open", errno.EIO),
    ("open", errno.EMFILE),
    ("open", errno.ENOSPC),
    ("close", errno.EIO),
    ("close", errno.ENOSPC),
    ("size", errno.EIO),
    ("size_of", errno.EIO),
    ("read", errno.EIO),
    ("read_cached", errno.EIO),
    ("write", errno.EIO),
    ("write", errno.ENOSPC),
    ("truncate", errno.EIO),
    ("truncate", errno.ENOSPC),
    ("sync", errno.EIO),
    ("sync", errno.ENOSPC),
    ("rename", errno.EIO),
    ("rename", errno.ENOSPC),
    ("unlink", errno.EIO),
    ("unlink", errno.EROFS),
    ("unlink", errno.ENOSPC),
    ("make_directory", errno.EIO),
    ("make_directory", errno.ENOSPC),
    ("remove_directory", errno.EIO),
    ("remove_directory", errno.ENOSPC),
    ("remove_directory", errno.ENOTEMPTY),
    ("list_directory", errno.EIO),
    ("list_directory", errno.EMFILE),
    ("sync_directory", errno.EIO),
    ("sync_directory", errno.ENOSPC),
    ("lock", errno.EIO),
    ("lock", errno.EMFILE),
]
# What passes: with it, the engine must go on by itself.
PASSING = {errno.ENOSPC, errno.EMFILE}


class Broken:
    """A script on a disk on which one call fails, or more from that one on until it is mended."""

    def __init__(self, operation: str, nth: int, error: int, *, short: bool = False) -> None:
        self.disks: list[FailingDisk] = []

        def around(inner: SimulatedDisk) -> FailingDisk:
            self.disks.append(FailingDisk(inner, operation, nth, error, short=short))
            return self.disks[0]

        # Slices of one step, so that what fails has done some of its steps and not others.
        self.script = Script(SEED, around, slice_s=0.0)
        (self.disk,) = self.disks

    def run(self) -> None:
        self.script.open()
        self.script.run(STEPS)

    def check(self, *, must_go_on: bool) -> None:
        """What it keeps in each way of dying; and what it does when it lives."""
        script, engine = self.script, self.script.engine
        self.disk.heal()
        for way in ("nothing", "all"):
            promises = script.promises()
            check_promises(script.disk.crash(way, Random(0)), promises, options())
        check_promises(script.disk.copy(), script.promises(), options())
        health = engine.health()
        if health.ok:
            assert health.reason is None
            check_partitions(engine, script.scheduler, script.promises())
            go_on(engine, script.scheduler)
        else:
            assert health.reason
            assert not must_go_on, health
            check_stopped(engine, script.scheduler)
        engine.close()
        script.scheduler.run()
        check_all_closed(script.disk)


def check_stopped(engine: LocalEngine, scheduler: ManualScheduler) -> None:
    """Nothing is written any more, and what can be read is read."""
    for topic in engine.topics():
        for number in range(topic.partitions):
            id = PartitionId(topic.name, number)
            refused = engine.append(id, batches.encode([(0, b"k", b"v", [])]))
            scheduler.run()
            assert isinstance(refused.error, StorageFailed)
            read_all(engine, scheduler, id)


def calls_of(operation: str) -> int:
    dry = Broken(operation, 0, errno.EIO)
    dry.run()
    dry.check(must_go_on=True)
    return dry.disk.calls[operation]


def chosen(count: int, offset: int) -> range:
    """All calls, or in the default set a few of them."""
    return range(1, count + 1) if IS_FULL else range(1 + offset % 5, count + 1, max(1, count // 7))


@pytest.mark.parametrize(("operation", "error"), FAULTS)
def test_any_call_may_fail(operation: str, error: int) -> None:
    is_sync = operation in ("sync", "sync_directory")
    for nth in chosen(calls_of(operation), error):
        broken = Broken(operation, nth, error)
        try:
            broken.run()
            broken.check(must_go_on=error in PASSING and not is_sync)
        except BaseException as trouble:
            trouble.add_note(f"call {nth} of {operation} failed with {errno.errorcode[error]}")
            raise


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_any_write_may_be_short(error: int) -> None:
    for nth in chosen(calls_of("write"), 0):
        broken = Broken("write", nth, error, short=True)
        try:
            broken.run()
            broken.check(must_go_on=error in PASSING)
        except BaseException as trouble:
            trouble.add_note(f"write {nth} was short, then {errno.errorcode[error]}")
            raise


# ---- the promises by name


class Bench:
    """A small engine on a disk that breaks when it is told to, and stays broken until healed."""

    EVERY = PartitionId("every", 0)
    NONE = PartitionId("none", 0)

    def __init__(self, operation: str, error: int) -> None:
        self.inner = SimulatedDisk()
        self.disk = FailingDisk(self.inner, operation, 0, error, sticky=True)
        self.engine, self.scheduler = open_engine(self.disk, options(), 1_700_000_000_000, 0.0)
        for id in (self.EVERY, self.NONE):
            self.engine.create(id.topic, 1, settings_for(id.topic))
        self.scheduler.run()

    def append(self, id: PartitionId, value: bytes) -> Pending[int]:
        pending = self.engine.append(id, encoded(value))
        self.scheduler.run()
        return pending

    def all_kinds(self, value: bytes) -> list[Pending[int] | Pending[list[int]]]:
        """Through the journal, past it, in a weaker mode, and atomic."""
        pendings: list[Pending[int] | Pending[list[int]]] = [
            self.engine.append(self.EVERY, encoded(value)),
            self.engine.append(self.NONE, encoded(value)),
            self.engine.append_atomic([(self.EVERY, encoded(value)), (self.NONE, encoded(value))]),
        ]
        self.scheduler.run()
        return [*pendings, self.append(self.EVERY, value * 1000)]

    def values(self, id: PartitionId) -> list[bytes | None]:
        found = read_all(self.engine, self.scheduler, id)
        return [record.value for _, records in found for record in records]

    def reopen(self, disk: SimulatedDisk) -> None:
        self.engine, self.scheduler = open_engine(disk, options(), 1_700_000_000_000, 0.0)


def encoded(value: bytes) -> bytes:
    return batches.encode([(0, b"key", value, [])])


def test_a_failed_sync_answers_unknown_and_nothing_is_written_after_it() -> None:
    bench = Bench("sync", errno.EIO)
    assert bench.append(bench.EVERY, b"kept").result() == 0
    bench.disk.break_now()
    waiting = [bench.engine.append(bench.EVERY, encoded(b"lost")) for _ in range(3)]
    bench.scheduler.run()
    assert [type(one.error) for one in waiting] == [OutcomeUnknown] * 3
    syncs, writes = bench.disk.calls["sync"], bench.disk.calls["write"]
    for pending in bench.all_kinds(b"later"):
        assert isinstance(pending.error, StorageFailed)
    bench.scheduler.advance(1000)
    assert (bench.disk.calls["sync"], bench.disk.calls["write"]) == (syncs, writes)
    health = bench.engine.health()
    assert not health.ok
    assert "sync" in str(health.reason)
    assert bench.values(bench.EVERY) == [b"kept"]
    bench.reopen(bench.inner.crash("nothing"))
    assert bench.values(bench.EVERY) == [b"kept"]
    assert bench.engine.health().ok


def test_a_full_disk_refuses_appends_until_there_is_room() -> None:
    bench = Bench("write", errno.ENOSPC)
    assert all(pending.error is None for pending in bench.all_kinds(b"before"))
    bench.disk.break_now()
    for _ in range(3):
        for pending in bench.all_kinds(b"during"):
            assert isinstance(pending.error, DiskFull)
        bench.scheduler.advance(20)
    assert bench.engine.health().ok
    bench.disk.heal()
    assert all(pending.error is None for pending in bench.all_kinds(b"after"))
    every = [b"before"] * 2 + [b"before" * 1000] + [b"after"] * 2 + [b"after" * 1000]
    none = [b"before"] * 2 + [b"after"] * 2
    assert (bench.values(bench.EVERY), bench.values(bench.NONE)) == (every, none)
    bench.reopen(bench.inner.crash("all"))
    assert (bench.values(bench.EVERY), bench.values(bench.NONE)) == (every, none)


def test_records_that_only_the_journal_had_room_for_are_read_when_there_is_more() -> None:
    bench = Bench("write", errno.ENOSPC)
    pending = bench.engine.append(bench.EVERY, encoded(b"first"))
    while not pending.is_done:
        bench.scheduler.turn()
    bench.disk.break_now()
    assert bench.values(bench.EVERY) == []
    assert isinstance(bench.append(bench.EVERY, b"refused").error, DiskFull)
    assert bench.engine.offsets(bench.EVERY).high_watermark == 1
    after = bench.inner.crash("nothing")
    bench.disk.heal()
    assert bench.values(bench.EVERY) == [b"first"]
    assert bench.append(bench.EVERY, b"second").result() == 1
    assert bench.values(bench.EVERY) == [b"first", b"second"]
    bench.reopen(after)
    assert bench.values(bench.EVERY) == [b"first"]


def test_too_many_open_files_refuse_appends_until_one_is_closed() -> None:
    bench = Bench("open", errno.EMFILE)
    assert bench.append(bench.EVERY, b"a" * 1200).result() == 0
    assert bench.append(bench.NONE, b"a" * 1200).result() == 0
    bench.disk.break_now()
    for id in (bench.EVERY, bench.NONE):
        # There is no room left in the segment, and a new one needs a file.
        assert isinstance(bench.append(id, b"b" * 1200).error, TooManyFiles)
    bench.scheduler.advance(20)
    assert bench.engine.health().ok
    bench.disk.heal()
    for id in (bench.EVERY, bench.NONE):
        assert bench.append(id, b"c" * 1200).result() == 1
        assert bench.values(id) == [b"a" * 1200, b"c" * 1200]
    bench.reopen(bench.inner.crash("all"))
    assert bench.values(bench.EVERY) == [b"a" * 1200, b"c" * 1200]


def test_an_atomic_append_that_finds_no_room_leaves_no_part_behind() -> None:
    bench = Bench("write", errno.ENOSPC)
    bench.disk.break_now()
    parts = [(bench.EVERY, encoded(b"part")), (bench.NONE, encoded(b"part"))]
    refused = bench.engine.append_atomic(parts)
    bench.scheduler.run()
    assert isinstance(refused.error, DiskFull)
    bench.disk.heal()
    assert bench.values(bench.EVERY) == bench.values(bench.NONE) == []
    bench.reopen(bench.inner.copy())
    assert bench.values(bench.EVERY) == bench.values(bench.NONE) == []


def test_a_directory_is_synced_although_no_file_can_be_opened(tmp_path: Path) -> None:
    disk = SystemDisk()
    disk.sync_directory(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    # The limit is on numbers, so it must lie above every one that this process has.
    limit = min(hard, max(map(int, os.listdir("/dev/fd"))) + 100)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with suppress(OSError):
            while len(taken) < 2 * limit:
                taken.append(os.open(tmp_path, os.O_RDONLY))
        assert len(taken) < limit
        for _ in range(3):
            disk.sync_directory(str(tmp_path))
    finally:
        for file in taken:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---- locks


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOLCK, errno.EMFILE])
@pytest.mark.parametrize("operation", ["open", "flock"])
def test_a_tool_that_cannot_have_the_lock_says_so_and_leaves_everything_as_it_was(
    operation: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path)
    made(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    files = descriptors()
    with monkeypatch.context() as broken:
        module = {"open": os, "flock": fcntl}[operation]
        fail_for(broken, module, operation, f"{root}/lock", error)
        with pytest.raises(StoreUnreadable, match=os.strerror(error)), reading(SystemDisk(), root):
            raise AssertionError
    assert descriptors() == files
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with reading(SystemDisk(), root):
        # Now it is the broker that has to wait.
        assert SystemDisk().lock(f"{root}/lock", "1") is None
    lock = SystemDisk().lock(f"{root}/lock", "1")
    assert lock is not None
    with pytest.raises(StoreLocked), reading(SystemDisk(), root):
        raise AssertionError
    os.close(lock)


@pytest.mark.parametrize("operation", ["flock", "ftruncate", "pwrite"])
def test_a_lock_that_was_not_taken_whole_is_let_go(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "lock")
    files = descriptors()
    with monkeypatch.context() as broken:
        fail_for(broken, fcntl if operation == "flock" else os, operation, path, errno.ENOSPC)
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            SystemDisk().lock(path, "1")
    assert descriptors() == files
    lock = SystemDisk().lock(path, "1")
    assert lock is not None
    os.close(lock)


def made(root: Path) -> None:
    """A data directory that a broker has left."""
    disk = SystemDisk()
    scheduler = ManualScheduler(disk, ManualClock(1_700_000_000_000, 0.0))
    engine = LocalEngine(disk, str(root), scheduler.clock, options(), scheduler)
    engine.open()
    engine.close()
    scheduler.run()


def descriptors() -> set[str]:
    return set(os.listdir("/dev/fd"))


def fail_for(
    broken: pytest.MonkeyPatch, module: ModuleType, name: str, path: str, error: int
) -> None:
    """A call about a path, or about its file, fails; all others are as they were."""
    call = getattr(module, name)

    def failing(target: str | int, *arguments: object) -> object:
        if target == path or (
            isinstance(target, int) and os.path.samestat(os.fstat(target), os.stat(path))
        ):
            raise OSError(error, os.strerror(error))
        return call(target, *arguments)

    broken.setattr(module, name, failing)
