"""The overlay behaves as the disk beneath would, and that one stays as it was."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faults.simulated_disk import SimulatedDisk
from millstream.log.disk import Access, Disk, SystemDisk, read_file, write_file
from millstream.log.overlay import BLOCK_BYTES, OverlayDisk

NAMES = ("/a", "/b", "/d", "/d/a", "/d/b", "/e", "/e/a", "/gone/a")
SIZES = (0, 1, 7, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 5)

ACCESS: dict[str, Access] = {"write": "create", "truncate": "write", "read": "read"}

names = st.sampled_from(NAMES)
sizes = st.sampled_from(SIZES)
operations = st.one_of(
    st.tuples(st.just("write"), names, st.binary(max_size=9), sizes),
    st.tuples(st.just("truncate"), names, sizes),
    st.tuples(st.just("read"), names, sizes, sizes),
    st.tuples(st.just("size_of"), names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("unlink"), names),
    st.tuples(st.just("make_directory"), names),
    st.tuples(st.just("remove_directory"), names),
    st.tuples(st.just("list_directory"), names),
)


def perform(disk: Disk, root: str, operation: tuple[Any, ...]) -> object:
    """What the operation answers, or the error that it ends with."""
    name, path, *rest = operation
    path = root + path
    try:
        if name in ("write", "truncate", "read"):
            file = disk.open(path, ACCESS[name])
            try:
                if name == "write":
                    return disk.write(file, [rest[0]], rest[1])
                if name == "truncate":
                    disk.truncate(file, rest[0])
                    return None
                return disk.read(file, rest[0], rest[1]), disk.size(file)
            finally:
                disk.close(file)
        if name == "rename":
            rest = [root + rest[0]]
        if name == "size_of" and path[len(root) :] in ("/d", "/e"):
            # The size of a directory is the file system's own business.
            return disk.size_of(path) is None
        return getattr(disk, name)(path, *rest)
    except OSError as error:
        return error.errno


def tree(disk: Disk, path: str) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name in disk.list_directory(path):
        inside = f"{path}/{name}"
        try:
            found[inside] = None
            found |= tree(disk, inside)
        except NotADirectoryError:
            found[inside] = read_file(disk, inside)
    return found


def furnish(disk: Disk, root: str) -> None:
    disk.make_directory(f"{root}/d")
    write_file(disk, f"{root}/a", b"from before" * 12000)
    write_file(disk, f"{root}/d/a", b"short")


@settings(deadline=None, max_examples=150)
@given(st.lists(operations, max_size=25))
def test_any_script_does_the_same_as_on_a_plain_disk(script: list[tuple[Any, ...]]) -> None:
    plain, inner = SimulatedDisk(), SimulatedDisk()
    for disk in (plain, inner):
        disk.make_directory("/data")
        furnish(disk, "/data")
    before, done_before = inner.files(), inner.operations
    overlay = OverlayDisk(inner)
    for operation in script:
        assert perform(overlay, "/data", operation) == perform(plain, "/data", operation), operation
    assert tree(overlay, "/data") == tree(plain, "/data")
    assert inner.files() == before
    assert inner.operations == done_before


@settings(deadline=None, max_examples=40)
@given(st.lists(operations, max_size=12))
def test_it_lies_as_well_over_the_systems_own_disk(script: list[tuple[Any, ...]]) -> None:
    with TemporaryDirectory() as root:
        inner = SystemDisk()
        furnish(inner, root)
        plain = SimulatedDisk()
        plain.load(root, root)
        before = tree(inner, root)
        overlay = OverlayDisk(inner)
        for operation in script:
            assert perform(overlay, root, operation) == perform(plain, root, operation), operation
        assert tree(overlay, root) == tree(plain, root)
        assert tree(inner, root) == before


def test_a_small_change_of_a_large_file_takes_little_memory() -> None:
    inner = SimulatedDisk()
    inner.put("/large", bytes(100 * BLOCK_BYTES))
    overlay = OverlayDisk(inner)
    file = overlay.open("/large", "write")
    overlay.write(file, [b"change"], 50 * BLOCK_BYTES - 3)
    overlay.truncate(file, 99 * BLOCK_BYTES)
    node = overlay._handles[file].node
    assert sorted(node.blocks) == [49, 50]
    assert overlay.read(file, 10, 50 * BLOCK_BYTES - 5) == b"\0\0change\0\0"


def test_what_was_cut_off_does_not_come_back_when_the_file_grows() -> None:
    inner = SimulatedDisk()
    inner.put("/file", b"secret" * 4)
    overlay = OverlayDisk(inner)
    file = overlay.open("/file", "write")
    overlay.truncate(file, 3)
    overlay.truncate(file, 9)
    assert overlay.read(file, 100, 0) == b"sec" + bytes(6)


def test_an_open_file_outlives_its_name() -> None:
    inner = SimulatedDisk()
    inner.put("/file", b"content")
    overlay = OverlayDisk(inner)
    file = overlay.open("/file", "read")
    overlay.unlink("/file")
    assert overlay.size_of("/file") is None
    assert overlay.read(file, 100, 0) == b"content"


def test_the_lock_is_held_until_it_is_closed_and_the_real_one_is_not_touched() -> None:
    inner = SimulatedDisk()
    inner.put("/lock", b"123\n")
    overlay = OverlayDisk(inner)
    held = overlay.lock("/lock", "456\n")
    assert held is not None
    assert overlay.lock("/lock", "789\n") is None
    overlay.close(held)
    assert overlay.lock("/lock", "789\n") is not None
    assert read_file(inner, "/lock") == b"123\n"


def test_a_file_that_was_opened_to_read_cannot_be_written() -> None:
    inner = SimulatedDisk()
    inner.put("/file", b"content")
    overlay = OverlayDisk(inner)
    file = overlay.open("/file", "read")
    with pytest.raises(OSError):
        overlay.write(file, [b"x"], 0)
    with pytest.raises(OSError):
        overlay.truncate(file, 0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list everything")
def test_a_directory_that_may_not_be_listed_can_be_walked_through(tmp_path: Path) -> None:
    inside = tmp_path / "closed" / "data"
    inside.mkdir(parents=True)
    (inside / "file").write_bytes(b"content")
    (tmp_path / "closed").chmod(0o311)
    try:
        assert read_file(OverlayDisk(SystemDisk()), str(inside / "file")) == b"content"
    finally:
        (tmp_path / "closed").chmod(0o755)
