"""The two disks that other tests break things with: what they promise, and that they find bugs."""

from __future__ import annotations

import os
from random import Random
from typing import TYPE_CHECKING

import pytest

from faults.disk_helpers import SEEDS, crashes, images, script, sync, write
from faults.simulated_disk import SURVIVALS, PlugPulled, SimulatedDisk, Survival
from millstream.log.disk import BUFFERS_MAX, Disk, write_all, write_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

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
