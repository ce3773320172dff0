"""Every bit of a small store is flipped, one at a time; last batches and frames are cut.

Whatever opens has the right records, or says which are missing. A record that is wrong, or an
error that is not ours, fails the test.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from random import Random

import pytest

from engine.manual import ManualScheduler
from faults.ledger import ROOT, open_engine
from faults.simulated_disk import SURVIVALS, PlugPulled, SimulatedDisk
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import LogDamaged, MillstreamError
from millstream.log import batch as batches
from millstream.log import journal as journals
from millstream.log.batch import Header, Record
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.segment import Intervals
from millstream.log.store import StoreOptions

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"

NOW_MS = 1_700_000_000_000
EVERY, NONE, COMPACT = (PartitionId(name, 0) for name in ("every", "none", "compact"))


def settings_for(topic: str) -> PartitionSettings:
    return PartitionSettings(
        fsync="none" if topic == "none" else "every",
        segment_bytes=600,
        intervals=Intervals(index_bytes=128, time_ms=1),
        compact=topic == "compact",
    )


def options() -> LocalOptions:
    return LocalOptions(
        store=StoreOptions(settings_for=settings_for, journal_file_bytes=2048),
        upkeep=UpkeepSettings(compaction_interval_s=5.0, file_delete_delay_s=1.0),
        bypass_bytes=300,
    )


@dataclass(frozen=True, slots=True)
class Made:
    """A store, and what is in it."""

    disk: SimulatedDisk
    records: dict[PartitionId, dict[int, Record]]
    # Every record that there ever was, also those that compaction removed.
    history: dict[PartitionId, dict[int, Record]]


class Maker:
    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.engine, self.scheduler = open_engine(self.disk, options(), NOW_MS, 0.0)
        self.count = 0
        for id in (EVERY, NONE, COMPACT):
            self.engine.create(id.topic, 1, settings_for(id.topic), id.topic.encode().ljust(16))
        self.scheduler.run()

        self.history: dict[PartitionId, dict[int, Record]] = {EVERY: {}, NONE: {}, COMPACT: {}}

    def append(self, id: PartitionId, batch: bytes) -> None:
        pending = self.engine.append(id, batch)
        self.scheduler.run()
        self.note(id, batch, pending.result())

    def note(self, id: PartitionId, batch: bytes, offset: int) -> None:
        for record in batches.decode(batch):
            at = offset + record.offset
            self.history[id][at] = Record(
                at, record.timestamp, record.key, record.value, record.headers
            )

    def batch(self, size: int = 12, count: int = 1) -> bytes:
        self.count += 1
        self.scheduler.clock.advance(0.01)
        return batches.encode(
            [
                (
                    self.scheduler.clock.wall_ms() + at,
                    b"k%d" % (self.count % 3),
                    bytes([65 + self.count % 26]) * size,
                    [("h", b"%d" % self.count)],
                )
                for at in range(count)
            ]
        )

    def fill(self) -> None:
        """Sealed segments, a compacted one, indexes, a checkpoint."""
        for _ in range(9):
            for id in (EVERY, NONE, COMPACT):
                self.append(id, self.batch(count=1 + self.count % 2))
        self.scheduler.advance(200)

    def add(self) -> None:
        """What the last checkpoint does not know of: through the journal, past it, and atomic."""
        self.append(EVERY, self.batch())
        self.append(EVERY, self.batch(310))
        self.append(NONE, self.batch())
        parts = [(id, self.batch()) for id in (EVERY, NONE, COMPACT)]
        pending = self.engine.append_atomic(parts)
        self.scheduler.run()
        for (id, batch), offset in zip(parts, pending.result(), strict=True):
            self.note(id, batch, offset)

    def records(self) -> dict[PartitionId, dict[int, Record]]:
        return {id: look(self.engine, self.scheduler, id)[0] for id in (EVERY, NONE, COMPACT)}


def look(
    engine: LocalEngine, scheduler: ManualScheduler, id: PartitionId
) -> tuple[dict[int, Record], bool]:
    """All records that can be read; and whether an error told of others."""
    found: dict[int, Record] = {}
    told = False
    offset, end = engine.offsets(id)
    while offset < end:
        pending = engine.read(id, offset, 200)
        scheduler.run()
        if isinstance(pending.error, LogDamaged):
            told = True
            after = pending.error.fields["last"]
            assert isinstance(after, int)
            assert after >= offset, "the error does not lead on"
            offset = after + 1
            continue
        chunk = pending.result()
        for position, header in batches.walk(chunk.data):
            for record in batches.decode(chunk.data[position : position + header.size]):
                found[record.offset] = record
        assert chunk.next_offset > offset
        offset = chunk.next_offset
    return found, told


@cache
def closed() -> Made:
    maker = Maker()
    maker.fill()
    maker.add()
    records = maker.records()
    maker.engine.close()
    return Made(maker.disk.crash("all"), records, maker.history)


@cache
def crashed(*, has_segments: bool) -> Made:
    """The plug was pulled: the journal has the newest, the segments have it too, or not."""
    maker = Maker()
    maker.fill()
    maker.add()
    records = maker.records()
    if not has_segments:
        kept = engine_records(maker.disk.crash("nothing"))
        return Made(maker.disk.crash("nothing"), kept, maker.history)
    return Made(maker.disk.crash("all"), records, maker.history)


def engine_records(disk: SimulatedDisk) -> dict[PartitionId, dict[int, Record]]:
    engine, scheduler = open_engine(disk, options(), NOW_MS, 0.0)
    return {id: look(engine, scheduler, id)[0] for id in (EVERY, NONE, COMPACT)}


STORES: dict[str, Callable[[], Made]] = {
    "closed": closed,
    "crashed": lambda: crashed(has_segments=True),
    "crashed, with nothing but the journal": lambda: crashed(has_segments=False),
}


def check_damaged(made: Made, path: str, content: bytes) -> None:
    """Open the store with one file changed, read, go on, and open it again."""
    disk = made.disk.crash("all")
    disk.put(path, content)
    try:
        engine, scheduler = open_engine(disk, options(), NOW_MS + 10_000, 0.0)
    except MillstreamError:
        return
    first = check_records(made, engine, scheduler, must_tell=True)
    for id in (EVERY, NONE, COMPACT):
        end = engine.offsets(id).high_watermark
        added = engine.append(id, batches.encode([(NOW_MS + 10_000, b"new", b"on", [])]))
        scheduler.run()
        assert added.result() == end
        assert look(engine, scheduler, id)[0][end].value == b"on"
    engine.close()
    engine, scheduler = open_engine(disk, options(), NOW_MS + 10_000, 0.0)
    again = check_records(made, engine, scheduler, must_tell=False)
    for id in (EVERY, NONE, COMPACT):
        assert again[id] == first[id], "a second start shows other records"
    engine.close()


def check_records(
    made: Made, engine: LocalEngine, scheduler: ManualScheduler, *, must_tell: bool
) -> dict[PartitionId, set[int]]:
    """The start that finds the damage has to tell of it; reads do so for good."""
    seen: dict[PartitionId, set[int]] = {}
    for id, wanted in made.records.items():
        found, told = look(engine, scheduler, id)
        ours = {offset for offset, record in found.items() if record.key != b"new"}
        for offset in ours:
            # Records that compaction removed may be back, from the files it was made from.
            right = made.history[id].get(offset)
            assert found[offset] == right, f"{id} has a wrong record at {offset}"
        missing = wanted.keys() - found.keys()
        told = told or any(one.partition in ("", str(id)) for one in engine.findings)
        assert not missing or told or not must_tell, f"{id} lost {sorted(missing)} quietly"
        check_times(engine, scheduler, id, wanted, found)
        seen[id] = ours
    return seen


def check_times(
    engine: LocalEngine,
    scheduler: ManualScheduler,
    id: PartitionId,
    wanted: dict[int, Record],
    found: dict[int, Record],
) -> None:
    """Searching by time gives the first record that is there, or tells of damage."""
    for record in list(wanted.values())[::4]:
        pending = engine.find(id, record.timestamp)
        scheduler.run()
        if isinstance(pending.error, LogDamaged):
            continue
        later = [one.offset for one in found.values() if one.timestamp >= record.timestamp]
        at = pending.result()
        assert (at[0] if at else None) == min(later, default=None)


def kinds(made: Made) -> list[str]:
    return sorted({kind_of(path) for path in made.disk.files()} - {"lock", "spare"})


def kind_of(path: str) -> str:
    name = path.rpartition("/")[2]
    return name.rpartition(".")[2] if "." in name else name


def flips(content: bytes, *, is_log: bool) -> Iterator[bytes]:
    """The content with one bit flipped, for every bit; in the default set for some of them."""
    bits = range(len(content) * 8)
    if not IS_FULL:
        # A prime, so that every bit of a byte and every byte of a field gets its turn.
        bits = bits[:: 397 if is_log else 151 if len(content) > 300 else 37]
    for bit in bits:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.mark.parametrize("kind", kinds(closed()))
@pytest.mark.parametrize("store", STORES)
def test_a_flipped_bit_never_makes_a_wrong_record(store: str, kind: str) -> None:
    made = STORES[store]()
    for path, content in made.disk.files().items():
        if kind_of(path) != kind:
            continue
        for number, changed in enumerate(flips(content, is_log=kind in ("log", "journal"))):
            try:
                check_damaged(made, path, changed)
            except BaseException as error:
                error.add_note(f"flip {number} of {path} ({len(content)} bytes)")
                raise


@pytest.mark.parametrize("store", STORES)
def test_the_last_batch_may_be_cut_anywhere(store: str) -> None:
    made = STORES[store]()
    logs = [path for path in made.disk.files() if kind_of(path) == "log"]
    for path, after in pairwise([*logs, ""]):
        if path.rpartition("/")[0] == after.rpartition("/")[0]:
            continue
        content = made.disk.files()[path]
        starts = [position for position, _ in batches.walk(content)]
        for size in range(starts[-1] if starts else 0, len(content), 1 if IS_FULL else 9):
            check_damaged(made, path, content[:size])
            check_damaged(made, path, content[:size] + bytes(len(content) - size))


@pytest.mark.parametrize("has_segments", [False, True])
def test_the_last_frame_of_the_journal_may_be_cut_anywhere(*, has_segments: bool) -> None:
    made = crashed(has_segments=has_segments)
    frames = [
        frame
        for frame in journals.read_frames(made.disk, f"{ROOT}/journal", 0)
        if isinstance(frame, journals.Frame)
    ]
    last = frames[-1]
    assert len(last.entries) == 3
    (name,) = [
        name
        for name in journals.journal_files(made.disk, f"{ROOT}/journal")
        if name.first <= last.position
    ][-1:]
    content = made.disk.files()[name.path]
    step = 1 if IS_FULL else 11
    # Less than four bytes of it could be anything: then nobody can tell that it was there.
    for at in range(last.position - name.first + 4, last.end - name.first, step):
        for changed in (content[:at], content[:at] + bytes(len(content) - at)):
            check_damaged(made, name.path, changed)
            if not has_segments:
                check_none_of(made, name.path, changed)


def check_none_of(made: Made, path: str, content: bytes) -> None:
    """Without the last frame nothing of the atomic append is there."""
    disk = made.disk.crash("all")
    disk.put(path, content)
    found = engine_records(disk)
    for id in (EVERY, COMPACT):
        assert max(found[id]) == max(made.records[id]) - 1


@pytest.mark.parametrize("store", STORES)
def test_a_recovery_from_damage_may_be_interrupted_anywhere(store: str) -> None:
    made = STORES[store]()
    for path, content in made.disk.files().items():
        if kind_of(path) != "log" or len(content) < 200 or "every" not in path:
            continue
        (first, header), *_ = batches.walk(content)
        changed = bytearray(content)
        changed[first + header.size - 1] ^= 1
        for number in range(0, 100, 1 if IS_FULL else 6):
            disk = made.disk.crash("all")
            disk.put(path, bytes(changed))
            disk.stop_at = number
            try:
                open_engine(disk, options(), NOW_MS, 0.0)
            except PlugPulled:
                survival = SURVIVALS[number % len(SURVIVALS)]
                inside = {o for _, one in batches.walk(content) for o in offsets_of(one)}
                check_found(made, disk.crash(survival, Random(number)), inside)
            else:
                break


def offsets_of(header: Header) -> range:
    return range(header.base_offset, header.next_offset)


def check_found(made: Made, disk: SimulatedDisk, inside: set[int]) -> None:
    """Nothing is lost that was not in the file that was damaged."""
    engine, scheduler = open_engine(disk, options(), NOW_MS, 0.0)
    check_records(made, engine, scheduler, must_tell=False)
    lost = made.records[EVERY].keys() - look(engine, scheduler, EVERY)[0].keys()
    assert lost <= inside
