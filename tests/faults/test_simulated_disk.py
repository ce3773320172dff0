"""The two disks that other tests break things with: what they promise, and that they find bugs."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.failing_disk import OPERATIONS, FailingDisk
from faults.simulated_disk import SURVIVALS, PlugPulled, SimulatedDisk, Survival
from millstream.log.disk import BUFFERS_MAX, Disk, SystemDisk, read_file, write_all, write_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SEEDS = 60


def write(disk: Disk, path: str, content: bytes, position: int = 0) -> None:
    file = disk.open(path, "create")
    write_all(disk, file, [content], position)
    disk.close(file)


def sync(disk: Disk, path: str) -> None:
    file = disk.open(path, "write")
    disk.sync(file)
    disk.close(file)


def crashes(disk: SimulatedDisk) -> Iterator[SimulatedDisk]:
    """Many disks after a power failure now: bytes and names in all ways, together and apart."""
    for survival in SURVIVALS:
        for seed in range(SEEDS):
            yield disk.crash(survival, Random(seed))
            yield disk.crash(survival, Random(seed), names=SURVIVALS[seed % len(SURVIVALS)])


def images(script: Callable[[SimulatedDisk], None], disk: SimulatedDisk) -> list[SimulatedDisk]:
    """The disk before each operation of a script, and after the last."""
    copies: list[SimulatedDisk] = []
    disk.on_operation = lambda index, name: copies.append(disk.copy())
    script(disk)
    disk.on_operation = None
    return [*copies, disk]


# ---- bytes


@pytest.fixture
def disk() -> SimulatedDisk:
    """A file of 2,000 durable bytes `o`."""
    disk = SimulatedDisk()
    disk.put("/data/log", b"o" * 2000)
    return disk


def survivors(disk: SimulatedDisk, survival: Survival) -> set[bytes]:
    return {disk.crash(survival, Random(seed)).files()["/data/log"] for seed in range(SEEDS)}


def test_what_was_not_synced_is_lost_or_kept_as_asked(disk: SimulatedDisk) -> None:
    write(disk, "/data/log", b"n" * 3000, 1000)

    assert survivors(disk, "nothing") == {b"o" * 2000}
    assert survivors(disk, "all") == {b"o" * 1000 + b"n" * 3000}


def test_what_was_synced_survives_whatever_is_written_after_it(disk: SimulatedDisk) -> None:
    write(disk, "/data/log", b"s" * 1000, 2000)
    sync(disk, "/data/log")
    write(disk, "/data/log", b"n" * 1000, 3000)

    for after in crashes(disk):
        assert after.files()["/data/log"].startswith(b"o" * 2000 + b"s" * 1000)


def test_a_prefix_is_whole_writes_and_then_a_part_of_one(disk: SimulatedDisk) -> None:
    for number in range(5):
        write(disk, "/data/log", bytes([number]) * 1000, 2000 + 1000 * number)
    whole = disk.files()["/data/log"]

    lengths = {len(content) for content in survivors(disk, "prefix")}

    assert all(whole.startswith(content) for content in survivors(disk, "prefix"))
    assert len({length // 1000 for length in lengths}) >= 4
    assert any(length % 1000 for length in lengths)


def test_a_middle_leaves_out_the_first_sector(disk: SimulatedDisk) -> None:
    write(disk, "/data/log", b"n" * 4096, 2048)

    for content in survivors(disk, "middle"):
        assert content[:2560] == b"o" * 2000 + bytes(560)
        assert b"n" in content
        assert len(content[2560:].strip(b"\0").replace(b"n", b"")) == 0
    assert len({len(content) for content in survivors(disk, "middle")}) > 3


def test_a_subset_is_made_of_whole_sectors_with_zeroes_between(disk: SimulatedDisk) -> None:
    write(disk, "/data/log", b"n" * 4096, 2048)

    shapes = set()
    for content in survivors(disk, "subset"):
        sectors = [content[start : start + 512] for start in range(2048, len(content), 512)]
        assert all(sector in {b"n" * 512, bytes(512)} for sector in sectors)
        shapes.add(tuple(sector[0] for sector in sectors))
    assert len(shapes) > 20
    # The file ends with its last surviving sector, or where it ended before the crash.
    assert {shape[-1] for shape in shapes if shape} == {0, ord("n")}


def test_the_size_of_a_sector_can_be_chosen() -> None:
    disk = SimulatedDisk(sector_bytes=1)
    disk.put("/log", b"")
    write(disk, "/log", b"abc")

    contents = {disk.crash("subset", Random(seed)).files()["/log"] for seed in range(1000)}

    assert {b"", b"a", b"\0b", b"a\0c", b"abc"} <= contents


def test_zeroes_are_where_the_file_grew_and_nowhere_else(disk: SimulatedDisk) -> None:
    write(disk, "/data/log", b"n" * 3000, 1000)

    assert survivors(disk, "zeroes") == {b"o" * 2000 + bytes(2000)}


@pytest.mark.parametrize("survival", ["prefix", "subset"])
def test_a_truncation_may_be_lost_and_may_survive(disk: SimulatedDisk, survival: Survival) -> None:
    file = disk.open("/data/log", "write")
    disk.truncate(file, 10)

    assert survivors(disk, survival) >= {b"o" * 10, b"o" * 2000}


def test_a_crash_gives_the_same_disk_for_the_same_seed_and_leaves_this_one_as_it_was(
    disk: SimulatedDisk,
) -> None:
    write(disk, "/data/log", b"n" * 9000, 100)
    write(disk, "/data/new", b"n" * 9000)
    before = disk.files()

    for survival in SURVIVALS:
        first = disk.crash(survival, Random(7))
        write(first, "/more", b"written after the crash")
        second = disk.copy().crash(survival, Random(7))
        assert {**second.files(), "/more": b"written after the crash"} == first.files()

    assert disk.files() == before
    assert disk.crash("all").files() == before
    assert disk.crash("nothing").files() == {"/data/log": b"o" * 2000}


# ---- names


def test_a_synced_file_is_gone_when_its_name_was_not_synced(disk: SimulatedDisk) -> None:
    write(disk, "/data/new", b"content")
    sync(disk, "/data/new")
    assert "/data/new" not in disk.crash("nothing").files()

    disk.sync_directory("/data")
    assert disk.crash("nothing").files()["/data/new"] == b"content"


def test_a_synced_name_says_nothing_about_the_bytes(disk: SimulatedDisk) -> None:
    write(disk, "/data/new", b"content")
    disk.sync_directory("/data")

    assert disk.crash("nothing").files()["/data/new"] == b""
    assert disk.crash("zeroes").files()["/data/new"] == bytes(7)


def test_names_and_bytes_may_survive_apart(disk: SimulatedDisk) -> None:
    write(disk, "/data/new", b"content")

    assert disk.crash("nothing", names="all").files()["/data/new"] == b""
    assert "/data/new" not in disk.crash("all", names="nothing").files()


def test_a_directory_takes_all_that_is_in_it_along(disk: SimulatedDisk) -> None:
    disk.make_directory("/data/topic")
    write(disk, "/data/topic/log", b"content")
    sync(disk, "/data/topic/log")
    disk.sync_directory("/data/topic")
    assert disk.crash("nothing").list_directory("/data") == ["log"]

    disk.sync_directory("/data")
    assert disk.crash("nothing").files()["/data/topic/log"] == b"content"


def test_a_removed_file_comes_back_until_the_directory_is_synced(disk: SimulatedDisk) -> None:
    disk.unlink("/data/log")
    assert {len(after.files()) for after in crashes(disk)} == {0, 1}

    disk.sync_directory("/data")
    assert {len(after.files()) for after in crashes(disk)} == {0}


def test_a_removed_directory_comes_back_until_the_one_above_is_synced(
    disk: SimulatedDisk,
) -> None:
    disk.unlink("/data/log")
    disk.remove_directory("/data")
    assert disk.crash("nothing").files() == {"/data/log": b"o" * 2000}

    disk.sync_directory("/")
    assert {tuple(after.list_directory("/")) for after in crashes(disk)} == {()}


def test_after_a_rename_the_target_is_the_old_file_or_the_new_one(disk: SimulatedDisk) -> None:
    write(disk, "/data/log.new", b"new")
    sync(disk, "/data/log.new")
    disk.rename("/data/log.new", "/data/log")

    found = {tuple(sorted(after.files().items())) for after in crashes(disk)}

    old = ("/data/log", b"o" * 2000)
    assert found == {
        (old,),
        (old, ("/data/log.new", b"new")),
        (("/data/log", b"new"),),
    }


def test_the_same_name_changes_in_its_order(disk: SimulatedDisk) -> None:
    for content in (b"first", b"second"):
        write(disk, "/data/log.new", content)
        sync(disk, "/data/log.new")
        disk.rename("/data/log.new", "/data/log")

    for after in crashes(disk):
        files = after.files()
        # The second temporary file could only be made when the first rename had been.
        if files.get("/data/log.new") == b"second":
            assert files["/data/log"] == b"first"


def test_different_names_survive_in_any_order(disk: SimulatedDisk) -> None:
    disk.unlink("/data/log")
    for name in "abc":
        write(disk, f"/data/{name}", b"")

    found = {"".join(after.list_directory("/data")) for after in crashes(disk)}

    assert found >= {"log", "abc", "c", "clog", "blog", "aclog", ""}


def test_a_rename_between_directories_is_durable_when_both_are_synced() -> None:
    for first, second in (("/from", "/to"), ("/to", "/from")):
        disk = SimulatedDisk()
        disk.put("/from/file", b"content")
        disk.put("/to/file", b"replaced")
        disk.rename("/from/file", "/to/file")
        old = {"/from/file": b"content", "/to/file": b"replaced"}
        new = {"/to/file": b"content"}

        disk.sync_directory(first)
        assert disk.crash("nothing").files() == old
        assert disk.crash("all").files() == new
        assert all(after.files() in (old, new) for after in crashes(disk))

        disk.sync_directory(second)
        assert all(after.files() == new for after in crashes(disk))


def test_a_synced_name_makes_durable_what_it_builds_upon() -> None:
    disk = SimulatedDisk()
    disk.put("/from/file", b"moved")
    disk.put("/to/other", b"")
    disk.rename("/from/file", "/to/file")
    write(disk, "/from/file", b"made after the move")

    disk.sync_directory("/from")

    assert disk.crash("nothing").files() == {
        "/from/file": b"",
        "/to/file": b"moved",
        "/to/other": b"",
    }


def test_directories_never_end_up_inside_each_other() -> None:
    disk = SimulatedDisk()
    disk.put("/a/file", b"a")
    disk.put("/b/file", b"b")
    disk.rename("/a", "/b/a")
    disk.rename("/b/a", "/c")
    disk.rename("/b", "/c/b")

    for after in crashes(disk):
        assert sorted(after.files().values()) == [b"a", b"b"]


# ---- that it finds bugs


def replace_without_sync(disk: Disk, path: str, content: bytes) -> None:
    write(disk, path + ".new", content)
    disk.rename(path + ".new", path)
    disk.sync_directory(os.path.dirname(path))


def replace_in_place(disk: Disk, path: str, content: bytes) -> None:
    file = disk.open(path, "create")
    disk.truncate(file, 0)
    write_all(disk, file, [content], 0)
    disk.sync(file)
    disk.close(file)


def replace_without_sync_of_directory(disk: Disk, path: str, content: bytes) -> None:
    write(disk, path + ".new", content)
    sync(disk, path + ".new")
    disk.rename(path + ".new", path)


def replacements(replace: Callable[[Disk, str, bytes], None]) -> tuple[set[bytes], set[bytes]]:
    """What a crash at any moment of a replacement may leave, and what one after it may leave."""
    old, new = b"o" * 600, b"n" * 700
    disk = SimulatedDisk()
    disk.put("/data/file", old)
    *during, after = images(lambda disk: replace(disk, "/data/file", new), disk)
    return (
        {crashed.files()["/data/file"] for image in during for crashed in crashes(image)}
        - {old, new},
        {crashed.files()["/data/file"] for crashed in crashes(after)} - {new},
    )


def test_a_file_that_is_replaced_rightly_is_always_the_old_one_or_the_new_one() -> None:
    assert replacements(write_file) == (set(), set())


@pytest.mark.parametrize("replace", [replace_without_sync, replace_in_place])
def test_a_file_that_is_replaced_wrongly_is_found_torn(
    replace: Callable[[Disk, str, bytes], None],
) -> None:
    assert replacements(replace)[0]


def test_a_replacement_that_does_not_sync_its_name_is_found_undone() -> None:
    during, after = replacements(replace_without_sync_of_directory)

    assert not during
    assert after == {b"o" * 600}


# ---- the plug


def script(disk: Disk) -> None:
    disk.make_directory("/data")
    file = disk.open("/data/log", "create")
    disk.write(file, [b"abcd", b"efgh"], 0)
    disk.sync(file)
    disk.truncate(file, 6)
    disk.close(file)
    disk.rename("/data/log", "/data/sealed")
    disk.sync_directory("/data")
    disk.unlink("/data/sealed")
    disk.remove_directory("/data")


NAMES = [
    "make_directory",
    "create",
    "write",
    "sync",
    "truncate",
    "rename",
    "sync_directory",
    "unlink",
    "remove_directory",
]


def test_every_operation_that_changes_the_disk_is_announced_before_it_is_done() -> None:
    disk = SimulatedDisk()
    seen: list[tuple[int, str]] = []
    disk.on_operation = lambda index, name: seen.append((index, name))

    script(disk)

    assert seen == list(enumerate(NAMES))
    assert disk.operations == len(NAMES)


def test_what_changes_nothing_is_not_counted(disk: SimulatedDisk) -> None:
    file = disk.open("/data/log", "create")
    disk.read(file, 10, 0)
    disk.read_cached(file, 10, 0)
    disk.size(file)
    disk.size_of("/data/log")
    disk.list_directory("/data")
    disk.close(file)
    with pytest.raises(FileNotFoundError):
        disk.unlink("/data/none")

    assert disk.operations == 0


@pytest.mark.parametrize("stop_at", range(len(NAMES)))
def test_the_plug_is_pulled_before_the_operation_and_stays_out(stop_at: int) -> None:
    image = images(script, SimulatedDisk())[stop_at]
    disk = SimulatedDisk(stop_at=stop_at)

    with pytest.raises(PlugPulled):
        script(disk)

    assert disk.pulled
    assert disk.operations == stop_at
    for survival in SURVIVALS:
        assert disk.crash(survival, Random(1)).files() == image.crash(survival, Random(1)).files()
    for again in (lambda: disk.make_directory("/x"), lambda: disk.list_directory("/")):
        with pytest.raises(PlugPulled):
            again()


def test_a_plug_pulled_after_the_last_operation_stops_nothing() -> None:
    disk = SimulatedDisk(stop_at=len(NAMES))

    script(disk)

    assert not disk.pulled


def test_no_handler_of_exceptions_catches_the_plug() -> None:
    assert not issubclass(PlugPulled, Exception)


def test_files_can_be_closed_without_power(disk: SimulatedDisk) -> None:
    file = disk.open("/data/log", "write")
    disk.stop_at = 0
    with pytest.raises(PlugPulled):
        disk.sync(file)

    disk.close(file)


def test_a_torn_write_leaves_half_of_its_bytes() -> None:
    disk = SimulatedDisk(stop_at=NAMES.index("write"), torn=True)

    with pytest.raises(PlugPulled):
        script(disk)

    assert disk.crash("all").files() == {"/data/log": b"abcd"}
    assert disk.crash("nothing").files() == {}


# ---- as the system


def test_a_closed_file_is_an_error(disk: SimulatedDisk) -> None:
    file = disk.open("/data/log", "write")
    disk.close(file)

    for use in (
        lambda: disk.close(file),
        lambda: disk.size(file),
        lambda: disk.read(file, 1, 0),
        lambda: disk.write(file, [b"x"], 0),
        lambda: disk.truncate(file, 0),
        lambda: disk.sync(file),
    ):
        with pytest.raises(OSError, match="Bad file descriptor"):
            use()
    assert disk.open("/data/log", "write") != file


def test_an_unlinked_file_lives_until_it_is_closed(disk: SimulatedDisk) -> None:
    file = disk.open("/data/log", "write")
    disk.unlink("/data/log")
    write(disk, "/data/log", b"another")

    disk.write(file, [b"more"], 2000)
    disk.sync(file)

    assert disk.read(file, 3000, 1999) == b"omore"
    assert disk.files() == {"/data/log": b"another"}


def test_a_call_takes_as_many_buffers_as_the_kernel_does(disk: SimulatedDisk) -> None:
    file = disk.open("/data/log", "write")
    assert disk.write(file, [b"x"] * BUFFERS_MAX, 0) == BUFFERS_MAX

    with pytest.raises(OSError, match="Invalid argument"):
        disk.write(file, [b"x"] * (BUFFERS_MAX + 1), 0)


def test_a_cold_read_has_to_be_waited_for(disk: SimulatedDisk) -> None:
    file = disk.open("/data/log", "read")
    assert disk.read_cached(file, 2, 1999) == b"o"

    disk.cold = True
    assert disk.read_cached(file, 2, 0) is None
    assert disk.read(file, 2, 0) == b"oo"

    disk.cold = lambda file, size, position: position < 1000
    assert disk.read_cached(file, 2, 999) is None
    assert disk.read_cached(file, 2, 1000) == b"oo"


def test_a_lock_is_held_until_it_is_closed_or_the_power_fails() -> None:
    disk = SimulatedDisk()
    file = disk.lock("/lock", "first")
    assert file is not None
    assert disk.lock("/lock", "second") is None
    assert disk.files() == {"/lock": b"first"}

    assert disk.crash("all").lock("/lock", "after the crash") is not None
    disk.close(file)
    assert disk.lock("/lock", "second") is not None
    assert disk.files() == {"/lock": b"second"}


def test_the_root_cannot_be_made_or_removed() -> None:
    disk = SimulatedDisk()
    with pytest.raises(FileExistsError):
        disk.make_directory("/")
    with pytest.raises(OSError, match="busy"):
        disk.remove_directory("/")


# ---- for tests


def test_what_a_test_puts_is_durable_even_over_what_is_not(disk: SimulatedDisk) -> None:
    disk.unlink("/data/log")
    disk.make_directory("/data/topic")
    before = disk.operations

    disk.put("/data/log", b"put")
    disk.put("/data/topic/log", b"put")

    assert disk.operations == before
    for after in crashes(disk):
        assert after.files() == {"/data/log": b"put", "/data/topic/log": b"put"}
    with pytest.raises(IsADirectoryError):
        disk.put("/data/topic", b"")
    with pytest.raises(NotADirectoryError):
        disk.put("/data/log/file", b"")


def test_a_disk_goes_to_a_real_directory_and_back(disk: SimulatedDisk, tmp_path: Path) -> None:
    disk.put("/data/topics/a/0.log", b"\0\1")
    disk.make_directory("/data/empty")
    real = str(tmp_path / "real")

    disk.dump(real, "/data")

    assert (tmp_path / "real" / "topics" / "a" / "0.log").read_bytes() == b"\0\1"
    back = SimulatedDisk()
    back.load(real, "/data")
    assert back.files() == disk.files()
    assert back.list_directory("/data/empty") == []
    assert back.crash("nothing").files() == disk.files()


def test_a_copy_goes_its_own_way(disk: SimulatedDisk) -> None:
    write(disk, "/data/log", b"n" * 10)
    copy = disk.copy()
    assert copy.operations == disk.operations

    write(copy, "/data/log", b"c" * 10, 5000)
    assert disk.crash("zeroes").files() == {"/data/log": b"o" * 2000}
    copy.unlink("/data/log")
    sync(disk, "/data/log")

    assert disk.crash("nothing").files() == {"/data/log": b"n" * 10 + b"o" * 1990}
    assert copy.crash("nothing").files() == {"/data/log": b"o" * 2000}
    assert copy.files() == {}


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
            "read_cached": (file, 1, 0),
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
