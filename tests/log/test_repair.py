"""Repair leaves nothing to find, loses no more than what was damaged, and its dry run nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from faults.simulated_disk import SimulatedDisk
from log.stores import (
    BATCHES,
    DIRECTORY,
    NOW_MS,
    UUID,
    batch,
    build,
    build_compacted,
    build_crashed,
    digest,
    flip,
    open_at,
)
from millstream.errors import FormatUnsupported, LogDamaged, StoreLocked, StoreUnreadable
from millstream.log import batch as batches
from millstream.log.checks import BLOCK_BYTES
from millstream.log.disk import Disk, SystemDisk
from millstream.log.overlay import OverlayDisk
from millstream.log.partition import PartitionId
from millstream.log.recovery import Finding
from millstream.log.repair import repair
from millstream.log.verify import Tally, verify

FIRST, SECOND, ACTIVE = (f"{DIRECTORY}/{offset:020d}" for offset in (0, 12, 24))
BATCH_BYTES = 124
EVERYTHING = set(range(3 * BATCHES))

# Every byte instead of a sample, as the other tests of faults do.
FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"


def read_all(root: str, disk: Disk) -> dict[int, tuple[object, ...]]:
    """Every record by its offset, as a broker would read them, past what is damaged."""
    store = open_at(root, disk)
    partition = store.partition(PartitionId("orders", 0))
    records: dict[int, tuple[object, ...]] = {}
    offset = partition.start_offset
    while offset < partition.high_watermark:
        try:
            chunk = partition.read(offset, 1 << 20)
        except LogDamaged as damage:
            offset = int(str(damage.fields["last"])) + 1
            continue
        for at, header in batches.walk(chunk.data):
            for record in batches.decode(chunk.data[at : at + header.size]):
                records[record.offset] = (
                    record.timestamp,
                    record.key,
                    record.value,
                    record.headers,
                )
        offset = chunk.next_offset
    store.close()
    return records


def repaired(root: Path) -> list[Finding]:
    """Dry run, then the real one: the first changes nothing and tells what the second does. After
    it there is nothing left to find or to do."""
    before = digest(root)
    planned = repair(OverlayDisk(SystemDisk()), str(root), NOW_MS)
    assert digest(root) == before
    done = repair(SystemDisk(), str(root), NOW_MS)
    assert planned == done
    assert [r for r in verify(SystemDisk(), str(root), Tally()) if r.severity == "error"] == []
    assert repair(OverlayDisk(SystemDisk()), str(root), NOW_MS) == []
    return done


def whats(findings: list[Finding]) -> list[str]:
    return [finding.what for finding in findings]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build(tmp_path)
    return tmp_path


def test_a_store_in_order_needs_no_repair(root: Path) -> None:
    assert repaired(root) == []
    assert set(read_all(str(root), SystemDisk())) == EVERYTHING


def cut_tail(root: Path) -> None:
    with (root / f"{ACTIVE}.log").open("ab") as log:
        log.write(batch(BATCHES)[:50])


def garbage_in_the_middle(root: Path) -> None:
    path = root / f"{SECOND}.log"
    data = path.read_bytes()
    path.write_bytes(data[:200] + b"garbage!" + data[208:])


def garbage_at_the_end(root: Path) -> None:
    path = root / f"{SECOND}.log"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))


def garbage_in_the_active_log(root: Path) -> None:
    path = root / f"{ACTIVE}.log"
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"garbage!" + data[108:])


def a_sealed_log_cut_off(root: Path) -> None:
    path = root / f"{FIRST}.log"
    path.write_bytes(path.read_bytes()[: 3 * BATCH_BYTES])


def a_segment_deleted(root: Path) -> None:
    for suffix in ("log", "index", "timeindex", "state", "seal"):
        (root / f"{SECOND}.{suffix}").unlink()


def the_first_log_deleted(root: Path) -> None:
    (root / f"{FIRST}.log").unlink()


def the_active_log_cut_off(root: Path) -> None:
    path = root / f"{ACTIVE}.log"
    path.write_bytes(path.read_bytes()[:BATCH_BYTES])


def an_epoch_overwritten(root: Path) -> None:
    path = root / f"{FIRST}.log"
    data = bytearray(path.read_bytes())
    data[BATCH_BYTES + 12 : BATCH_BYTES + 16] = b"\x12\x34\x56\x78"
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "what", "lost"),
    [
        (cut_tail, ["tail cut"], set()),
        (garbage_in_the_middle, ["damage", "gap", "sealed"], {15, 16, 17}),
        (garbage_at_the_end, ["quarantined", "gap"], {21, 22, 23}),
        (garbage_in_the_active_log, ["damage", "gap"], {24, 25, 26}),
        (a_sealed_log_cut_off, ["seal ignored", "seal ignored", "gap"], {9, 10, 11}),
        (a_segment_deleted, ["gap"], set(range(12, 24))),
        (the_active_log_cut_off, ["gap", "sealed"], {27, 28, 29}),
        (an_epoch_overwritten, ["epoch restored"], set()),
        (lambda root: flip(root / f"{SECOND}.log", 200), ["bit restored"], set()),
        (lambda root: flip(root / f"{ACTIVE}.log", 15), ["bit restored"], set()),
        (lambda root: (root / f"{FIRST}.index").unlink(), ["seal rebuilt"], set()),
        (lambda root: flip(root / f"{FIRST}.timeindex", 3), ["seal rebuilt"], set()),
        (lambda root: flip(root / f"{FIRST}.state", 3), ["seal rebuilt"], set()),
        (lambda root: flip(root / f"{FIRST}.seal", 30), ["sealed"], set()),
        (lambda root: flip(root / f"{ACTIVE}.index", -1), ["index rebuilt"], set()),
        (lambda root: flip(root / "checkpoint", 40), ["checkpoint written"], set()),
        (lambda root: (root / "checkpoint").unlink(), ["checkpoint written"], set()),
        (
            lambda root: (root / f"{DIRECTORY}/{99:020d}.index").touch(),
            ["removed"],
            set(),
        ),
    ],
)
def test_what_was_damaged_is_put_right_and_nothing_else_is_lost(
    root: Path, damage: Callable[[Path], object], what: list[str], lost: set[int]
) -> None:
    before = read_all(str(root), SystemDisk())
    damage(root)
    assert whats(repaired(root)) == what
    after = read_all(str(root), SystemDisk())
    assert set(before) - set(after) == lost
    assert after.items() <= before.items()


def test_a_first_segment_that_is_gone_moves_the_start_of_the_log(root: Path) -> None:
    the_first_log_deleted(root)
    repaired(root)
    assert set(read_all(str(root), SystemDisk())) == EVERYTHING - set(range(12))


def test_appends_go_on_after_a_repair(root: Path) -> None:
    garbage_in_the_active_log(root)
    repaired(root)
    store = open_at(root)
    partition = store.partition(PartitionId("orders", 0))
    assert partition.append(batch(BATCHES), NOW_MS) == 30
    store.close()


def test_what_is_not_readable_is_kept_in_quarantine_as_it_was(root: Path) -> None:
    garbage_in_the_middle(root)
    bad = (root / f"{SECOND}.log").read_bytes()[BATCH_BYTES : 2 * BATCH_BYTES]
    repaired(root)
    (kept,) = (root / "quarantine").iterdir()
    assert kept.name.endswith(".0.00000000000000000015")
    assert kept.read_bytes() == bad


def test_bytes_in_quarantine_are_not_written_over(root: Path) -> None:
    garbage_in_the_middle(root)
    name = f"orders@{UUID.hex()}.0.{15:020d}"
    (root / "quarantine" / name).write_bytes(b"from another time")
    repair(SystemDisk(), str(root), NOW_MS)
    assert sorted(path.name for path in (root / "quarantine").iterdir()) == [name, f"{name}.1"]
    assert (root / "quarantine" / name).read_bytes() == b"from another time"


def test_frames_of_the_journal_are_brought_to_their_segments(tmp_path: Path) -> None:
    build_crashed(tmp_path)
    assert whats(repaired(tmp_path)) == ["journal replayed"]
    assert set(read_all(str(tmp_path), SystemDisk())) == set(range(3 * BATCHES + 6))


def test_a_damaged_journal_loses_only_the_frame_that_is_damaged(tmp_path: Path) -> None:
    build_crashed(tmp_path)
    flip(tmp_path / "journal/00000000000000000000.journal", 100)
    findings = whats(repaired(tmp_path))
    assert "journal damaged" in findings
    expected = set(range(3 * BATCHES + 6)) - {30, 31, 32}
    assert set(read_all(str(tmp_path), SystemDisk())) == expected


def test_a_torn_frame_is_dropped(tmp_path: Path) -> None:
    build_crashed(tmp_path, frames=1)
    flip(tmp_path / "journal/00000000000000000000.journal", 100)
    assert whats(repaired(tmp_path)) == ["journal tail cut"]


def test_a_wrong_offset_in_a_compacted_log_is_never_believed(tmp_path: Path) -> None:
    build_compacted(tmp_path)
    before = read_all(str(tmp_path), SystemDisk())
    path = tmp_path / f"{FIRST}.1.log"
    data = bytearray(path.read_bytes())
    # Two bits, so that the block's checksum can tell that something is wrong, but not what.
    data[6] ^= 1
    data[7] ^= 1
    path.write_bytes(data)
    repaired(tmp_path)
    assert read_all(str(tmp_path), SystemDisk()).items() <= before.items()


def test_a_bit_is_found_in_any_block_of_a_large_segment(tmp_path: Path) -> None:
    store = open_at(tmp_path)
    store.create_topic("orders", bytes(16), 1, store.options.settings_for(""), NOW_MS)
    partition = store.partition(PartitionId("orders", 0))
    partition.settings = type(partition.settings)(segment_bytes=4 * BLOCK_BYTES)
    value = random.Random(7).randbytes(3000)
    for number in range(100):
        partition.append(batches.encode([(NOW_MS + number, None, value, [])]), NOW_MS)
    while (job := partition.next_seal()) is not None:
        job.run()
        partition.sealed()
    store.checkpoint(NOW_MS)
    store.close()
    before = read_all(str(tmp_path), SystemDisk())
    path = tmp_path / f"topics/orders@{'0' * 32}/0/{0:020d}.log"
    for position in (0, BLOCK_BYTES, 3 * BLOCK_BYTES - 1, -1):
        flip(path, position, 0x20)
    assert whats(repaired(tmp_path)) == ["bit restored"] * 4
    assert read_all(str(tmp_path), SystemDisk()) == before


# ---- every byte


@pytest.mark.parametrize("builder", [build, build_crashed, build_compacted])
@pytest.mark.parametrize("mask", [0x01, 0x3C])
def test_no_changed_byte_brings_up_a_wrong_record(
    tmp_path: Path, builder: Callable[[Path], None], mask: int
) -> None:
    """A sample of all bytes; all of them in the full set."""
    builder(tmp_path)
    base = SimulatedDisk()
    base.load(str(tmp_path), "/data")
    good = read_all("/data", base.copy())
    places = [
        (path, position)
        for path, content in base.files().items()
        if not path.endswith(("/lock", "/format"))
        for position in range(min(len(content), 700))
    ]
    if not FULL:
        places = random.Random(mask).sample(places, 60)
    for path, position in places:
        disk = base.copy()
        data = bytearray(base.files()[path])
        data[position] ^= mask
        disk.put(path, bytes(data))
        if path.endswith((".log", ".seal", ".state", "index", "checkpoint")):
            assert list(verify(disk, "/data", Tally())) != [], (path, position)
        repair(disk, "/data", NOW_MS)
        left = [r for r in verify(disk, "/data", Tally()) if r.severity == "error"]
        assert left == [], (path, position)
        after = read_all("/data", disk)
        assert after.items() <= good.items(), (path, position)
        if mask == 0x01 and "/journal/" not in path:
            assert after == good, (path, position)


# ---- what is refused


def test_a_running_broker_is_not_disturbed(root: Path) -> None:
    store = open_at(root)
    with pytest.raises(StoreLocked):
        repair(SystemDisk(), str(root), NOW_MS)
    store.close()


def test_a_directory_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(StoreUnreadable):
        repair(SystemDisk(), str(tmp_path / "data"), NOW_MS)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(FormatUnsupported):
        repair(SystemDisk(), str(tmp_path), NOW_MS)
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_damaged_format_is_for_the_user_to_decide(root: Path) -> None:
    flip(root / "format", 0)
    with pytest.raises(FormatUnsupported, match="make the file anew"):
        repair(SystemDisk(), str(root), NOW_MS)
