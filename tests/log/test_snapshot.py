"""Snapshot files: what goes in comes out, and what is not whole comes out not at all."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from faults.simulated_disk import SURVIVALS, PlugPulled, SimulatedDisk
from millstream.errors import (
    MillstreamError,
    QueueFull,
    SnapshotFailed,
    SnapshotInvalid,
    SnapshotUnknown,
)
from millstream.log import snapshot as snapshots
from millstream.log.disk import SystemDisk
from millstream.log.snapshot import Facts, Snapshot, SnapshotFolder

FOLDER = "/data/snapshots"
PATIENCE_S = 60
RAW, JSON = 1_700_000_000_000_000 << 1, 1_700_000_000_000_000 << 1 | 1


def snapshot(*messages: tuple[bytes, int], name: str = "emails") -> Snapshot:
    bodies = [body for body, _ in messages]
    facts = Facts(name, len(bodies), sum(map(len, bodies)), 10, 1000)
    return Snapshot(facts, bodies, [stamp for _, stamp in messages])


OLD = snapshot((b"old", RAW))
NEW = snapshot((b"\x00\xff raw", RAW), (b'{"a": "\xc3\xa4\\n"}', JSON), (b"", RAW), (b"7", JSON))


def folder(disk: SimulatedDisk | None = None) -> SnapshotFolder:
    if disk is None:
        disk = SimulatedDisk()
        disk.make_directory("/data")
    return SnapshotFolder(disk, FOLDER)


def any_size(_facts: Facts) -> None:
    """Room for everything."""


@pytest.mark.parametrize("name", ["q.snapshot", "q.json", "q"])
@pytest.mark.parametrize("content", [NEW, snapshot()])
def test_what_is_written_is_read(name: str, content: Snapshot) -> None:
    files = folder()
    size = files.write(name, content)
    assert size > 0
    assert files.read(name, any_size) == content
    assert files.names() == [name]


@given(some.lists(some.tuples(some.binary(max_size=40), some.integers(0, 2**63 - 1))))
def test_any_messages_come_back_as_they_were(messages: list[tuple[bytes, int]]) -> None:
    files = folder()
    raw = [(body, stamp & ~1) for body, stamp in messages]
    for name, content in (("q", snapshot(*messages)), ("q.json", snapshot(*raw))):
        files.write(name, content)
        assert files.read(name, any_size) == content


@pytest.mark.parametrize("name", ["q", "q.json"])
def test_many_messages_make_many_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_MESSAGES", 5)
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 50)
    random = Random(1)
    files = folder()
    content = snapshot(*((random.randbytes(random.randrange(40)), RAW) for _ in range(200)))
    files.write(name, content)
    assert files.read(name, any_size) == content


def test_json_is_for_people() -> None:
    disk = SimulatedDisk()
    disk.make_directory("/data")
    folder(disk).write("q.json", NEW)
    text = disk.files()[f"{FOLDER}/q.json"]
    assert json.loads(text) == {
        "queue_name": "emails",
        "capacity": 10,
        "max_bytes": 1000,
        "messages": [
            {"payload": "AP8gcmF3", "encoding": "base64", "enqueued_at": RAW >> 1},
            {"payload": {"a": "ä\n"}, "enqueued_at": RAW >> 1},
            {"payload": "", "encoding": "base64", "enqueued_at": RAW >> 1},
            {"payload": 7, "enqueued_at": RAW >> 1},
        ],
    }
    assert text.count(b"\n") == len(NEW.bodies) + 2


def test_json_by_hand_needs_no_limits() -> None:
    disk = SimulatedDisk()
    page = {"queue_name": "q", "messages": [{"payload": [1], "enqueued_at": 5}]}
    disk.put(f"{FOLDER}/hand.json", json.dumps(page).encode())
    read = folder(disk).read("hand.json", any_size)
    assert (read.bodies, read.stamps) == ([b"[1]"], [11])
    assert (read.facts.capacity, read.facts.bytes_max) == (0, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"queue_name":"q","messages":[{}]}',
        '{"queue_name":"q","messages":[{"payload":1}]}',
        '{"queue_name":"q","messages":[{"payload":1,"enqueued_at":-1}]}',
        '{"queue_name":"q","messages":[{"payload":1,"enqueued_at":4611686018427387904}]}',
        '{"queue_name":"q","messages":[{"payload":1,"enqueued_at":1,"encoding":"base64"}]}',
        '{"queue_name":"q","messages":[{"payload":"?","enqueued_at":1,"encoding":"base64"}]}',
        '{"queue_name":"q","messages":[{"payload":"ä","enqueued_at":1,"encoding":"base64"}]}',
        '{"queue_name":"q","messages":[{"payload":"","enqueued_at":1,"encoding":"hex"}]}',
        '{"queue_name":"q","messages":[],"other":1}',
        '{"queue_name":"q","messages":[],"capacity":-1}',
        '{"queue_name":"q","messages":[]} more',
        '{"queue_name":"q","messages":[',
    ],
)
def test_json_of_another_form_is_refused(text: str) -> None:
    disk = SimulatedDisk()
    disk.put(f"{FOLDER}/q.json", text.encode())
    with pytest.raises(SnapshotInvalid):
        folder(disk).read("q.json", any_size)


def test_every_flipped_bit_is_noticed() -> None:
    files, disk = written()
    content = disk.files()[f"{FOLDER}/q"]
    for position in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[position] ^= 1 << bit
            disk.put(f"{FOLDER}/q", bytes(damaged))
            with pytest.raises(SnapshotInvalid):
                files.read("q", any_size)


def test_a_file_cut_or_grown_anywhere_is_refused() -> None:
    files, disk = written()
    content = disk.files()[f"{FOLDER}/q"]
    for damaged in [content[:end] for end in range(len(content))] + [content + b"\0"]:
        disk.put(f"{FOLDER}/q", damaged)
        with pytest.raises(SnapshotInvalid):
            files.read("q", any_size)


def test_pieces_out_of_place_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PIECE_MESSAGES", 1)
    disk = SimulatedDisk()
    disk.make_directory("/data")
    files = folder(disk)
    files.write("q", snapshot((b"first", RAW), (b"other", RAW)))
    content = disk.files()[f"{FOLDER}/q"]
    piece = (8 + 4) + 12 + 5
    head, one, two = content[: -2 * piece], content[-2 * piece : -piece], content[-piece:]
    disk.put(f"{FOLDER}/q", head + two + one)
    with pytest.raises(SnapshotInvalid, match="damaged"):
        files.read("q", any_size)


def written() -> tuple[SnapshotFolder, SimulatedDisk]:
    disk = SimulatedDisk()
    disk.make_directory("/data")
    files = folder(disk)
    files.write("q", NEW)
    return files, disk


def test_foreign_files_and_newer_versions_say_so() -> None:
    files, disk = written()
    content = disk.files()[f"{FOLDER}/q"]
    disk.put(f"{FOLDER}/photo", b"\x89PNG" + bytes(100))
    with pytest.raises(SnapshotInvalid, match="not a snapshot"):
        files.read("photo", any_size)
    disk.put(f"{FOLDER}/q", content[:8] + (2).to_bytes(4, "big") + content[12:])
    with pytest.raises(SnapshotInvalid, match="version 2"):
        files.read("q", any_size)


def test_a_missing_file_is_unknown() -> None:
    with pytest.raises(SnapshotUnknown):
        folder().read("q", any_size)
    assert folder().names() == []


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "a/b", "/etc/passwd", "../q", "a\\b", "q\0", "a b", "q\n"),
        *("ä", "q.new", "q.refused", "x" * 252),
    ],
)
def test_only_plain_names_are_taken(name: str) -> None:
    disk = SimulatedDisk()
    disk.make_directory("/data")
    for call in (
        lambda: folder(disk).write(name, NEW),
        lambda: folder(disk).read(name, any_size),
        lambda: folder(disk).remove(name),
    ):
        with pytest.raises(SnapshotInvalid):
            call()
    assert disk.files() == {}


@pytest.mark.parametrize("name", ["pipe", "pipe.json"])
def test_a_pipe_in_the_folder_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refusals: list[MillstreamError] = []

    def read() -> None:
        try:
            SnapshotFolder(SystemDisk(), str(tmp_path)).read(name, any_size)
        except MillstreamError as error:
            refusals.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(PATIENCE_S)
    assert len(refusals) == 1


@pytest.mark.parametrize("name", ["q", "q.json"])
def test_a_link_in_the_folder_is_refused_as_a_path_is(name: str, tmp_path: Path) -> None:
    kept = SnapshotFolder(SystemDisk(), str(tmp_path / "elsewhere"))
    kept.write(name, OLD)
    before = (tmp_path / "elsewhere" / name).read_bytes()
    folder_path = tmp_path / "folder"
    folder_path.mkdir()
    files = SnapshotFolder(SystemDisk(follows_links=False), str(folder_path))
    (folder_path / name).symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(SnapshotInvalid, match="symbolic link"):
        files.read(name, any_size)
    # Nor is anything written through one; and a link that was in the way of a write is gone.
    (folder_path / f"{name}.new").symlink_to(tmp_path / "elsewhere" / name)
    with pytest.raises(SnapshotInvalid, match="symbolic link"):
        files.write(name, NEW)
    files.write(name, NEW)
    assert files.read(name, any_size) == NEW
    assert (tmp_path / "elsewhere" / name).read_bytes() == before


def test_the_longest_name_still_has_room_for_its_temporary_file() -> None:
    files = folder()
    files.write("x" * 251, NEW)
    assert files.read("x" * 251, any_size) == NEW


def test_no_room_is_found_out_before_the_messages_are_read() -> None:
    files, disk = written()
    # The header alone is enough to refuse.
    content = disk.files()[f"{FOLDER}/q"]
    disk.put(f"{FOLDER}/q", content[:-10])

    def refuse(facts: Facts) -> None:
        raise QueueFull(f"{facts.messages} messages")

    with pytest.raises(QueueFull, match="4 messages"):
        files.read("q", refuse)


def test_json_beyond_its_limit_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, disk = written()
    files.write("q.json", OLD)
    before = disk.files()
    monkeypatch.setattr(snapshots, "JSON_BYTES_MAX", 100)
    with pytest.raises(SnapshotInvalid, match="does not end with"):
        files.write("q.json", NEW)
    assert disk.files() == before
    disk.put(f"{FOLDER}/large.json", b" " * 2000)
    with pytest.raises(SnapshotInvalid, match="may have 100 bytes"):
        files.read("large.json", any_size)


# ---- JSON that is large


LARGE = snapshot(
    *((b"\x00\xff" * 500, RAW) for _ in range(300)), (b'{"a":\n{"b": "\xc3\xa4"}}', JSON)
)


def test_large_json_is_read_by_a_child() -> None:
    files = folder()
    assert files.write("q.json", LARGE) > snapshots.JSON_INLINE_BYTES
    assert files.read("q.json", any_size) == LARGE


@pytest.mark.parametrize("inline_bytes", [0, 1 << 30])
@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b'"\xff"', "utf-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b"1 2", "malformed"),
        (b'"%%%", "encoding": "base64"', "not base64"),
    ],
)
def test_what_is_wrong_with_json_is_said_whoever_reads_it(
    monkeypatch: pytest.MonkeyPatch, inline_bytes: int, payload: bytes, why: str
) -> None:
    monkeypatch.setattr(snapshots, "JSON_INLINE_BYTES", inline_bytes)
    files, disk = written()
    head = b'{"queue_name":"q","messages":[{"enqueued_at":1,"payload":'
    disk.put(f"{FOLDER}/q.json", head + payload + b"}]}")
    with pytest.raises(SnapshotInvalid, match=why):
        files.read("q.json", any_size)


def test_large_json_that_has_no_room_is_refused() -> None:
    files = folder()
    files.write("q.json", LARGE)

    def refuse(facts: Facts) -> None:
        raise QueueFull(f"{facts.messages} messages")

    with pytest.raises(QueueFull, match="301 messages"):
        files.read("q.json", refuse)


def test_a_child_that_dies_is_a_failure_and_not_the_fault_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = folder()
    files.write("q.json", LARGE)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(SnapshotFailed):
        files.read("q.json", any_size)


# ---- the plug, and the disk


@pytest.mark.parametrize("name", ["q", "q.json"])
@pytest.mark.parametrize("is_torn", [False, True])
def test_after_a_power_failure_the_file_is_the_old_or_the_new_one(name: str, is_torn: bool) -> None:
    before = SimulatedDisk()
    before.make_directory("/data")
    before.sync_directory("/")
    folder(before).write(name, OLD)
    whole = before.copy()
    folder(whole).write(name, NEW)
    outcomes = set()
    for stop_at in range(before.operations, whole.operations + 1):
        disk = before.copy()
        disk.stop_at, disk.torn = stop_at, is_torn
        try:
            folder(disk).write(name, NEW)
            is_done = True
        except PlugPulled:
            is_done = False
        for survival in SURVIVALS:
            for seed in range(3):
                after = disk.crash(survival, Random(seed))
                found = folder(after).read(name, any_size)
                assert found in ((NEW,) if is_done else (OLD, NEW))
                outcomes.add(found == NEW)
                # What is left over is in nobody's way.
                assert folder(after).names() == [name]
                folder(after).write(name, OLD)
    assert outcomes == {True, False}


def test_the_first_snapshot_is_there_after_a_power_failure_or_not_at_all() -> None:
    whole = SimulatedDisk()
    whole.make_directory("/data")
    whole.sync_directory("/")
    begin = whole.operations
    folder(whole).write("q", NEW)
    for stop_at in range(begin, whole.operations + 1):
        disk = SimulatedDisk()
        disk.make_directory("/data")
        disk.sync_directory("/")
        disk.stop_at = stop_at
        is_done = False
        try:
            folder(disk).write("q", NEW)
            is_done = True
        except PlugPulled:
            pass
        for survival in SURVIVALS:
            after = folder(disk.crash(survival, Random(stop_at)))
            if is_done or after.names():
                assert after.read("q", any_size) == NEW


@pytest.mark.parametrize("operation", ["open", "write", "truncate", "sync", "rename"])
def test_a_disk_that_fails_leaves_the_old_file(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimulatedDisk()
    disk.make_directory("/data")
    files = folder(disk)
    files.write("q", OLD)
    before = disk.files()

    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(disk, operation, fail)
        with pytest.raises(SnapshotFailed, match="No space left") as caught:
            files.write("q", NEW)
    assert caught.value.retriable
    assert disk.files() == before
    assert files.read("q", any_size) == OLD


def test_other_failures_of_the_disk_are_errors_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    files, disk = written()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    for operation, call in (
        ("open", lambda: files.read("q", any_size)),
        ("read", lambda: files.read("q", any_size)),
        ("unlink", lambda: files.remove("q")),
        ("rename", lambda: files.set_aside("q")),
        ("list_directory", files.names),
    ):
        with monkeypatch.context() as broken:
            broken.setattr(disk, operation, fail)
            with pytest.raises(MillstreamError, match="Input/output error"):
                call()
    assert files.read("q", any_size) == NEW


def test_a_file_can_be_set_aside_or_removed() -> None:
    files, disk = written()
    files.write("other", OLD)
    assert files.set_aside("q") == "q.refused"
    files.remove("other")
    assert files.names() == []
    assert list(disk.files()) == [f"{FOLDER}/q.refused"]
