"""The simulated disk against the system's own, over any sequence of operations; and the disk that
fails.
"""

from __future__ import annotations

import errno
import sys
import tempfile
from random import Random
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.disk_helpers import script, sync
from faults.failing_disk import OPERATIONS, FailingDisk
from faults.simulated_disk import SURVIVALS, SimulatedDisk, Survival
from millstream.log.disk import Disk, SystemDisk, read_file, write_all

# ---- any sequence of operations

Step: TypeAlias = tuple[Any, ...]

# Few enough that sequences meet each other; a name is a file in one and a directory in another.
EVERY_PATH = ["/a", "/b", "/d", "/d/a", "/d/b", "/d/d", "/d/d/a", "/e", "/a/a", "/none/a"]
PATHS = st.sampled_from(EVERY_PATH)
FILES = st.integers(0, 3)
POSITIONS = st.integers(0, 1500)
DATA = st.builds(lambda byte, size: bytes([byte]) * size, st.integers(1, 255), st.integers(0, 1200))

# Where every sequence starts: something of each kind, and a file open in each way.
TREE: list[Step] = [
    ("make_directory", "/d"),
    ("make_directory", "/d/d"),
    ("open", "/a", "create"),
    ("write", 0, [b"content"], 0),
    ("open", "/d/a", "create"),
    ("open", "/a", "read"),
    ("lock", "/b", "one"),
    ("make_directory", "/e"),
    ("make_directory", "/e/d"),
]

ANY_STEP = st.one_of(
    st.tuples(st.just("make_directory"), PATHS),
    st.tuples(st.just("open"), PATHS, st.sampled_from(["read", "write", "create"])),
    st.tuples(st.just("write"), FILES, st.lists(DATA, max_size=3), POSITIONS),
    st.tuples(st.just("rename"), PATHS, PATHS),
    st.tuples(st.just("close"), FILES),
    st.tuples(st.just("read"), FILES, POSITIONS, POSITIONS),
    st.tuples(st.just("read_cached"), FILES, POSITIONS, POSITIONS),
    st.tuples(st.just("size"), FILES),
    st.tuples(st.just("size_of"), PATHS),
    st.tuples(st.just("truncate"), FILES, POSITIONS),
    st.tuples(st.just("sync"), FILES),
    st.tuples(st.just("unlink"), PATHS),
    st.tuples(st.just("remove_directory"), PATHS),
    st.tuples(st.just("list_directory"), PATHS),
    st.tuples(st.just("sync_directory"), PATHS),
    st.tuples(st.just("lock"), PATHS, st.sampled_from(["one", "another"])),
)
STEPS = st.lists(ANY_STEP, max_size=40).map(lambda steps: TREE + steps)

OF_FILES = {"close", "read", "read_cached", "size", "truncate", "sync", "write"}


def is_directory(disk: Disk, path: str) -> bool:
    try:
        disk.list_directory(path)
    except OSError:
        return False
    return True


class Player:
    """Plays steps on a disk; a file is chosen by its place among the open ones."""

    def __init__(self, disk: Disk, root: str = "") -> None:
        self.disk = disk
        self.root = root
        self.open_files: list[int] = []

    def play(self, step: Step) -> object:
        """What the operation answered, or the number of its error."""
        name, *arguments = step
        if name in OF_FILES:
            if not self.open_files:
                return None
            place = arguments[0] % len(self.open_files)
            arguments[0] = self.open_files.pop(place) if name == "close" else self.open_files[place]
        else:
            arguments[0] = self.root + arguments[0]
            if name == "rename":
                arguments[1] = self.root + arguments[1]
            elif (name == "size_of" or arguments[1:] == ["read"]) and is_directory(
                self.disk, arguments[0]
            ):
                # The size is the file system's affair; and only the system opens directories.
                return "directory"
        try:
            answer = getattr(self.disk, name)(*arguments)
        except OSError as error:
            return errno.errorcode[error.errno or 0]
        if name in {"open", "lock"} and answer is not None:
            self.open_files.append(answer)
            return "opened"
        return answer

    def close(self) -> None:
        for file in self.open_files:
            self.disk.close(file)


def directories(disk: Disk, path: str = "/") -> list[str]:
    """The paths of all directories; those that are empty cannot be seen among the files."""
    found = [path]
    for name in disk.list_directory(path):
        child = f"{path.rstrip('/')}/{name}"
        if is_directory(disk, child):
            found += directories(disk, child)
    return found


def play_on_both(steps: list[Step]) -> None:
    simulated = SimulatedDisk()
    mine = Player(simulated)
    with tempfile.TemporaryDirectory() as root:
        system = Player(SystemDisk(), root)
        try:
            for step in steps:
                answer, expected = mine.play(step), system.play(step)
                # The system may say that it has to wait.
                assert answer == expected or (step[0] == "read_cached" and expected is None), step
        finally:
            system.close()

        real = SimulatedDisk()
        real.load(root)
        assert simulated.files() == real.files()
        assert directories(simulated) == directories(real)


as_linux = pytest.mark.skipif(sys.platform != "linux", reason="the errors are those of Linux")


@as_linux
@pytest.mark.parametrize("path", EVERY_PATH)
def test_each_operation_on_each_path_answers_as_the_system_does(path: str) -> None:
    for step in (
        *(("open", path, access) for access in ("read", "write", "create")),
        *(("rename", path, target) for target in EVERY_PATH),
        *((name, path) for name in OPERATIONS if name.endswith("_directory")),
        ("unlink", path),
        ("size_of", path),
        ("lock", path, "another"),
    ):
        play_on_both([*TREE, step])


@as_linux
@pytest.mark.parametrize("file", range(4))
def test_each_operation_on_each_open_file_answers_as_the_system_does(file: int) -> None:
    for step in (
        *(("read", file, size, position) for size in (0, 3, 9) for position in (-1, 0, 5, 9)),
        *(("write", file, data, position) for data in ([], [b""], [b"xy"]) for position in (3, 9)),
        *(("truncate", file, size) for size in (-1, 0, 3, 20)),
        ("sync", file),
        ("size", file),
        ("close", file),
    ):
        play_on_both([*TREE, step, ("size", 0)])


@as_linux
@settings(deadline=None, max_examples=250)
@given(STEPS)
def test_without_a_crash_any_sequence_is_answered_as_the_system_does(steps: list[Step]) -> None:
    play_on_both(steps)


@settings(deadline=None, max_examples=200)
@given(STEPS, st.integers(0, 1000))
def test_what_is_synced_survives_every_crash(steps: list[Step], seed: int) -> None:
    disk = SimulatedDisk()
    player = Player(disk)
    for step in steps:
        player.play(step)
    written = disk.files()
    assert disk.crash("all").files() == written

    for path in directories(disk):
        disk.sync_directory(path)
    for path in written:
        sync(disk, path)

    for survival in SURVIVALS:
        after = disk.crash(survival, Random(seed))
        assert after.files() == written
        assert after.crash("nothing").files() == written


@settings(deadline=None, max_examples=200)
@given(STEPS, st.integers(0, 1000), st.sampled_from(SURVIVALS), st.sampled_from(SURVIVALS))
def test_a_crash_invents_nothing(
    steps: list[Step], seed: int, survival: Survival, names: Survival
) -> None:
    disk = SimulatedDisk()
    player = Player(disk)
    paths: set[str] = set()
    written: set[tuple[int, int]] = set()
    for step in steps:
        player.play(step)
        paths.update(disk.files())
        # Not from the files: one that has lost its name is still written, and may come back.
        if step[0] == "write":
            written.update(enumerate(b"".join(step[2]), step[3]))
        elif step[0] == "lock":
            written.update(enumerate(step[2].encode()))

    for path, content in disk.crash(survival, Random(seed), names=names).files().items():
        # A file in a directory whose move was lost has a path that it never had before.
        assert path in paths or any(step[0] == "rename" for step in steps)
        for place in enumerate(content):
            assert place in written or place[1] == 0


@settings(deadline=None, max_examples=100)
@given(STEPS, st.integers(0, 1000), st.sampled_from(SURVIVALS))
def test_a_copy_crashes_as_its_original(steps: list[Step], seed: int, survival: Survival) -> None:
    disk = SimulatedDisk()
    player = Player(disk)
    for step in steps:
        player.play(step)

    original, copy = disk.crash(survival, Random(seed)), disk.copy()

    assert copy.files() == disk.files()
    assert copy.crash(survival, Random(seed)).files() == original.files()


# ---- the disk that fails


def test_the_nth_call_fails_and_the_others_do_not() -> None:
    inner = SimulatedDisk()
    disk = FailingDisk(inner, "make_directory", 2, errno.EIO)

    disk.make_directory("/a")
    with pytest.raises(OSError, match="Input/output error") as raised:
        disk.make_directory("/b")
    disk.make_directory("/c")

    assert raised.value.errno == errno.EIO
    assert inner.list_directory("/") == ["a", "c"]


def test_a_dry_run_counts_the_calls() -> None:
    disk = FailingDisk(SimulatedDisk(), "write", 0, errno.EIO, short=True, sticky=True)

    script(disk)

    made = {name: count for name, count in disk.calls.items() if count}
    assert made == {
        "open": 1,
        "close": 1,
        "write": 1,
        "truncate": 1,
        "sync": 1,
        "rename": 1,
        "unlink": 1,
        "make_directory": 1,
        "remove_directory": 1,
        "sync_directory": 1,
    }


def test_a_sticky_failure_lasts_until_it_is_healed() -> None:
    disk = FailingDisk(SimulatedDisk(), "open", 2, errno.EMFILE, sticky=True)

    disk.open("/a", "create")
    for _ in range(3):
        with pytest.raises(OSError, match="Too many open files"):
            disk.open("/a", "create")
    disk.heal()
    disk.open("/a", "create")

    assert disk.calls["open"] == 5


def test_a_short_write_takes_half_and_the_next_one_says_why() -> None:
    inner = SimulatedDisk()
    disk = FailingDisk(inner, "write", 2, errno.ENOSPC, short=True)
    file = disk.open("/log", "create")

    assert disk.write(file, [b"whole"], 0) == 5
    assert disk.write(file, [b"ab", b"cdef"], 5) == 3
    with pytest.raises(OSError, match="No space left"):
        disk.write(file, [b"def"], 8)

    assert inner.files() == {"/log": b"wholeabc"}
    assert disk.write(file, [b"def"], 8) == 3


def test_a_short_write_that_is_sticky_fails_from_the_next_one_on() -> None:
    disk = FailingDisk(SimulatedDisk(), "write", 1, errno.ENOSPC, short=True, sticky=True)
    file = disk.open("/log", "create")

    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            write_all(disk, file, [b"abcdef"], 0)
    disk.heal()

    assert write_all(disk, file, [b"abcdef"], 0) == 6
    assert read_file(disk, "/log") == b"abcdef"


def test_a_close_that_fails_closes_all_the_same() -> None:
    inner = SimulatedDisk()
    disk = FailingDisk(inner, "close", 1, errno.EIO)
    file = disk.open("/log", "create")

    with pytest.raises(OSError, match="Input/output error"):
        disk.close(file)

    with pytest.raises(OSError, match="Bad file descriptor"):
        inner.size(file)


def test_a_failure_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no operation 'wriet'"):
        FailingDisk(SimulatedDisk(), "wriet", 1, errno.EIO)
    with pytest.raises(ValueError, match="sync cannot be short"):
        FailingDisk(SimulatedDisk(), "sync", 1, errno.ENOSPC, short=True)


def test_every_operation_of_a_disk_can_fail() -> None:
    assert set(OPERATIONS) == {name for name in vars(Disk) if not name.startswith("_")}

    for operation in OPERATIONS:
        inner = SimulatedDisk()
        file = inner.open("/log", "create")
        before = inner.operations
        arguments: dict[str, tuple[Any, ...]] = {
            "open": ("/new", "create"),
            "read": (file, 1, 0),
            **dict.fromkeys(["read_cached", "can_send"], (file, 1, 0)),
            "write": (file, [b"x"], 0),
            "truncate": (file, 1),
            "rename": ("/log", "/new"),
            "lock": ("/lock", "me"),
            **dict.fromkeys(["close", "size", "sync"], (file,)),
            **dict.fromkeys(["make_directory", "remove_directory"], ("/new",)),
            **dict.fromkeys(["list_directory", "sync_directory"], ("/",)),
            **dict.fromkeys(["size_of", "unlink"], ("/log",)),
        }
        disk = FailingDisk(inner, operation, 1, errno.ENOSPC)

        with pytest.raises(OSError, match="No space left"):
            getattr(disk, operation)(*arguments[operation])

        assert inner.operations == before


@settings(deadline=None, max_examples=50)
@given(STEPS)
def test_without_a_failure_it_is_the_disk_that_it_wraps(steps: list[Step]) -> None:
    plain, inner = SimulatedDisk(), SimulatedDisk()
    mine, wrapped = Player(plain), Player(FailingDisk(inner, "sync", 0, errno.EIO))

    for step in steps:
        assert mine.play(step) == wrapped.play(step)

    assert plain.files() == inner.files()
