"""Every kind of damage is found, and the place of it is named."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random

import pytest
from crc32c import crc32c

from engine.manual import ManualScheduler
from faults.simulated_disk import SURVIVALS, SimulatedDisk
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
    fill,
    flip,
    open_at,
)
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.upkeep import UpkeepSettings
from millstream.log import batch as batches
from millstream.log.disk import SystemDisk
from millstream.log.overlay import OverlayDisk
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.repair import repair
from millstream.log.store import StoreOptions
from millstream.log.verify import Remark, Tally, verify

FIRST, SECOND, ACTIVE = (f"{DIRECTORY}/{offset:020d}" for offset in (0, 12, 24))
BATCH_BYTES = 124

# Small segments and short intervals, so that a few appends see all that can happen to a log.
TOPICS = {
    "every": PartitionSettings(segment_bytes=900, retention_bytes=3000),
    "compacted": PartitionSettings(segment_bytes=900, compact=True),
    "interval": PartitionSettings(segment_bytes=900, fsync="interval"),
    "none": PartitionSettings(segment_bytes=900, fsync="none"),
}
BUSY = LocalOptions(
    store=StoreOptions(settings_for=lambda topic: TOPICS[topic], journal_file_bytes=4096),
    upkeep=UpkeepSettings(
        checkpoint_interval_s=3,
        retention_interval_s=4,
        compaction_interval_s=5,
        file_delete_delay_s=2,
    ),
    bypass_bytes=600,
)


def remarks(root: Path) -> list[Remark]:
    before = digest(root)
    found = list(verify(SystemDisk(), str(root), Tally()))
    assert digest(root) == before
    return found


def errors(root: Path) -> list[Remark]:
    return [remark for remark in remarks(root) if remark.severity == "error"]


def the_error(root: Path) -> Remark:
    (error,) = errors(root)
    return error


@pytest.fixture
def root(tmp_path: Path) -> Path:
    build(tmp_path)
    return tmp_path


# ---- nothing wrong


def test_a_store_that_was_closed_has_nothing_to_remark_on(root: Path) -> None:
    tally = Tally()
    seen: list[int] = []
    assert list(verify(SystemDisk(), str(root), tally, seen.append)) == []
    size = BATCHES * BATCH_BYTES
    assert tally == Tally(partitions=2, segments=4, batches=BATCHES, records=30, bytes=size)
    assert sum(seen) == size


def test_batches_that_only_the_journal_has_are_checked_and_no_fault(tmp_path: Path) -> None:
    build_crashed(tmp_path)
    tally = Tally()
    assert list(verify(SystemDisk(), str(tmp_path), tally)) == []
    assert tally.batches == BATCHES + 2


def test_gaps_that_compaction_left_are_no_fault(tmp_path: Path) -> None:
    build_compacted(tmp_path)
    assert remarks(tmp_path) == []


def test_a_compaction_whose_sources_are_still_there_is_mentioned(tmp_path: Path) -> None:
    build_compacted(tmp_path)
    (tmp_path / f"{FIRST}.log").write_bytes(b"")
    assert [(r.severity, r.place) for r in remarks(tmp_path)] == [
        ("info", "orders/0/00000000000000000000.log")
    ]


# ---- logs


def test_a_flipped_bit_in_a_sealed_log(root: Path) -> None:
    flip(root / f"{SECOND}.log", BATCH_BYTES + 100)
    error = the_error(root)
    assert error.place == "orders/0/00000000000000000012.log"
    assert (error.position, error.offset) == (BATCH_BYTES, 15)
    assert error.message.startswith("124 bytes are no batch, so offsets 15 to 17 cannot be read: ")


def test_garbage_in_the_middle_of_a_sealed_log(root: Path) -> None:
    path = root / f"{FIRST}.log"
    data = path.read_bytes()
    path.write_bytes(data[:100] + b"garbage " * 20 + data[260:])
    error = the_error(root)
    assert (error.place, error.position) == ("orders/0/00000000000000000000.log", 0)
    assert "offsets 0 to 8 cannot be read" in error.message


def test_two_damages_in_one_log_are_two_errors(root: Path) -> None:
    flip(root / f"{FIRST}.log", 100)
    flip(root / f"{FIRST}.log", 2 * BATCH_BYTES + 100)
    assert [error.offset for error in errors(root)] == [0, 6]


def test_a_flipped_bit_of_an_epoch_which_no_batch_crc_covers(root: Path) -> None:
    flip(root / f"{FIRST}.log", BATCH_BYTES + 15)
    messages = [error.message for error in errors(root)]
    assert messages[0] == "the leader epoch is 1, and the checkpoint knows none after 0"
    assert messages[1] == "the leader epoch falls from 1 to 0"
    assert messages[2].startswith("bytes 0 to 495 do not have the checksum that the seal has")


def test_a_wrong_offset_in_a_compacted_log_which_only_the_seal_tells(tmp_path: Path) -> None:
    build_compacted(tmp_path)
    path = tmp_path / f"{FIRST}.1.log"
    at = path.read_bytes().find((21).to_bytes(8, "big"))
    flip(path, at + 7, 2)
    assert any("checksum that the seal has" in error.message for error in errors(tmp_path))


def test_a_log_whose_end_was_cut_off_although_it_is_sealed(root: Path) -> None:
    path = root / f"{SECOND}.log"
    path.write_bytes(path.read_bytes()[:-10])
    seal, log = errors(root)
    assert seal.message == "the seal says that the log has 496 bytes, and it has 486"
    assert (log.position, log.offset) == (3 * BATCH_BYTES, 21)
    assert "offsets 21 to 23 cannot be read" in log.message


def test_the_active_log_is_compared_with_the_checkpoint(root: Path) -> None:
    flip(root / f"{ACTIVE}.log", 15)
    assert any("checksum that the checkpoint has" in error.message for error in errors(root))


def test_an_active_log_that_is_shorter_than_the_checkpoint_knows(root: Path) -> None:
    path = root / f"{ACTIVE}.log"
    path.write_bytes(path.read_bytes()[:BATCH_BYTES])
    assert [error.message for error in errors(root)] == [
        "the log has 124 bytes, and the checkpoint knows 248",
        "offsets 27 to 29 are missing",
    ]


def test_a_torn_tail_behind_the_checkpoint_is_only_a_warning(root: Path) -> None:
    with (root / f"{ACTIVE}.log").open("ab") as log:
        log.write(batch(BATCHES)[:50])
    (remark,) = remarks(root)
    assert (remark.severity, remark.position, remark.offset) == ("warning", 2 * BATCH_BYTES, 30)
    assert remark.message.startswith("a torn tail of 50 bytes")


def test_whole_batches_in_a_torn_tail_are_mentioned(root: Path) -> None:
    store = open_at(root)
    fill(store, 2, BATCHES)
    store.close()
    flip(root / f"{ACTIVE}.log", 2 * BATCH_BYTES + 100)
    (remark,) = remarks(root)
    assert remark.severity == "warning"
    assert remark.message.endswith("puts it into quarantine because it has whole batches")


def test_a_batch_that_is_as_it_was_sent_but_cannot_be_decoded(root: Path) -> None:
    data = bytearray(batch(BATCHES))
    data[61] = 0x03
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    store = open_at(root)
    store.partition(PartitionId("orders", 0)).append(bytes(data), NOW_MS)
    store.checkpoint(NOW_MS)
    store.close()
    error = the_error(root)
    assert error.message.startswith("offsets 30 to 32 are as they were written, but cannot be")


def test_a_segment_that_is_gone_is_a_gap(root: Path) -> None:
    for suffix in ("log", "index", "timeindex", "state", "seal"):
        (root / f"{SECOND}.{suffix}").unlink()
    error = the_error(root)
    assert (error.place, error.offset) == ("orders/0", 12)
    assert error.message == "offsets 12 to 23 are missing"


def test_the_first_segment_is_missed_too(root: Path) -> None:
    (root / f"{FIRST}.log").unlink()
    assert the_error(root).message == "offsets 0 to 11 are missing"


def test_a_log_that_overlaps_the_one_before(root: Path) -> None:
    (root / f"{FIRST}.seal").unlink()
    (root / f"{DIRECTORY}/{5:020d}.log").write_bytes(b"")
    assert the_error(root).message == "begins at offset 5, but the segment before ends at 12"


# ---- seals, indexes, states


@pytest.mark.parametrize("suffix", ["index", "timeindex", "state"])
def test_a_file_that_is_not_what_was_sealed(root: Path, suffix: str) -> None:
    flip(root / f"{FIRST}.{suffix}", 0)
    error = the_error(root)
    assert error.place == f"orders/0/00000000000000000000.{suffix}"
    assert error.message == "the file is not what was sealed"


@pytest.mark.parametrize("suffix", ["index", "timeindex", "state"])
def test_a_sealed_file_that_is_missing(root: Path, suffix: str) -> None:
    (root / f"{FIRST}.{suffix}").unlink()
    error = the_error(root)
    assert error.place == f"orders/0/00000000000000000000.{suffix}"
    assert error.message == "the file is missing"


def test_a_damaged_seal(root: Path) -> None:
    flip(root / f"{FIRST}.seal", 10)
    error = the_error(root)
    assert (error.place, error.message) == (
        "orders/0/00000000000000000000.seal",
        "the seal is damaged",
    )


def test_a_segment_that_was_not_sealed_before_a_crash_is_only_a_warning(root: Path) -> None:
    (root / f"{SECOND}.seal").unlink()
    (remark,) = remarks(root)
    assert remark.severity == "warning"
    assert remark.message == "not sealed: the next start seals it"


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_an_index_of_the_active_log_is_rebuilt_at_the_next_start_anyway(
    root: Path, suffix: str
) -> None:
    flip(root / f"{ACTIVE}.{suffix}", -1)
    (remark,) = remarks(root)
    assert remark.severity == "warning"
    assert remark.place == f"orders/0/00000000000000000024.{suffix}"


# ---- journal, checkpoint, format


def test_a_damaged_frame_that_a_later_one_knows_of(tmp_path: Path) -> None:
    build_crashed(tmp_path)
    flip(tmp_path / "journal/00000000000000000000.journal", 100)
    journal, gap = errors(tmp_path)
    assert (journal.place, journal.position) == ("journal/00000000000000000000.journal", 0)
    assert journal.message.startswith("frames between positions 0 and ")
    assert "offsets 30 to 32 cannot be read" in gap.message


def test_a_torn_last_frame_is_only_a_warning(tmp_path: Path) -> None:
    build_crashed(tmp_path, frames=1)
    flip(tmp_path / "journal/00000000000000000000.journal", 100)
    (remark,) = remarks(tmp_path)
    assert (remark.severity, remark.position) == ("warning", 0)
    assert remark.message.startswith("a torn last frame")


@pytest.mark.parametrize(("position", "copy"), [(30, 1), (-30, 2)])
def test_one_damaged_copy_of_the_checkpoint(root: Path, position: int, copy: int) -> None:
    flip(root / "checkpoint", position)
    assert the_error(root).message == f"copy {copy} of 2 is damaged; the other one counts"


def test_both_copies_of_the_checkpoint(root: Path) -> None:
    flip(root / "checkpoint", 30)
    flip(root / "checkpoint", -30)
    assert the_error(root).message.startswith("both copies are damaged")


def test_a_missing_checkpoint(root: Path) -> None:
    (root / "checkpoint").unlink()
    assert the_error(root).message.startswith("the file is missing")


def test_a_format_that_cannot_be_read(root: Path) -> None:
    flip(root / "format", 0)
    assert the_error(root).message.startswith("the file says 'lillstream 1\\n'")


# ---- names


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "severity", "place"),
    [
        (lambda root: (root / "notes.txt").touch(), "info", "notes.txt"),
        (lambda root: (root / "checkpoint.new").touch(), "info", "checkpoint.new"),
        (lambda root: (root / "journal/notes").touch(), "info", "journal/notes"),
        (lambda root: (root / "journal/spare.new").touch(), "info", "journal/spare.new"),
        (lambda root: (root / "quarantine").rmdir(), "warning", "quarantine"),
        (lambda root: (root / "topics/gone-1").mkdir(), "warning", "topics/gone-1"),
        (lambda root: (root / f"topics/a@{'z' * 32}").mkdir(), "info", f"topics/a@{'z' * 32}"),
        (lambda root: (root / DIRECTORY / "README").touch(), "info", "orders/0/README"),
        (
            lambda root: (root / f"{DIRECTORY}/{99:020d}.index").touch(),
            "warning",
            f"orders/0/{99:020d}.index",
        ),
        (
            lambda root: (root / f"{FIRST}.seal.new").touch(),
            "warning",
            "orders/0/00000000000000000000.seal.new",
        ),
        (lambda root: (root / DIRECTORY).parent.joinpath("7").mkdir(), "error", "orders/7"),
        (
            lambda root: (root / f"topics/orders@{'0' * 32}").mkdir(),
            "error",
            f"topics/orders@{UUID.hex()}",
        ),
    ],
)
def test_files_that_should_not_be_there(
    root: Path, change: Change, severity: str, place: str
) -> None:
    change(root)
    (remark,) = remarks(root)
    assert (remark.severity, remark.place) == (severity, place)


def test_a_partition_that_is_gone(root: Path) -> None:
    (root / f"topics/orders@{UUID.hex()}/1/00000000000000000000.log").unlink()
    (root / f"topics/orders@{UUID.hex()}/1").rmdir()
    error = the_error(root)
    assert error.place == "orders/1"
    assert "directory is missing" in error.message


# ---- crashes


def test_what_a_crash_leaves_is_never_an_error() -> None:
    """The plug is pulled now and then under appends, rolls, checkpoints, retention, compaction."""
    random = Random(11)
    disk, images = SimulatedDisk(), list[SimulatedDisk]()
    scheduler = ManualScheduler(disk)
    engine = LocalEngine(disk, "/data", scheduler.clock, BUSY, scheduler)
    engine.open()
    for topic, settings in TOPICS.items():
        engine.create(topic, 1, settings)
        scheduler.run()
    disk.on_operation = lambda *_: images.append(disk.copy()) if random.random() < 0.04 else None
    for _ in range(60):
        value = bytes(random.randrange(200))
        record: batches.Fields = (
            scheduler.clock.wall_ms(),
            b"key %d" % random.randrange(5),
            value,
            [],
        )
        data = batches.encode([record] * random.randrange(1, 5))
        engine.append(PartitionId(random.choice(list(TOPICS)), 0), data)
        for _ in range(random.randrange(8)):
            scheduler.turn()
        if random.random() < 0.2:
            scheduler.advance(random.random() * 3)
    assert len(images) > 10
    for image, survival in product(images, SURVIVALS):
        after = image.crash(survival, random)
        found = [r for r in verify(after, "/data", Tally()) if r.severity == "error"]
        assert found == []
        repair(after, "/data", NOW_MS)
        assert repair(OverlayDisk(after), "/data", NOW_MS) == []
