"""Opening a partition after whatever happened to it.

What a crash may leave, and what is done about it:

1. Frames of the journal that were not written to their segments: written again, each at the
   place that its entry names. The bytes are the same, so doing it twice does no harm.
2. A torn tail, of batches that were never answered: cut at the last whole batch. Whole batches
   that lie behind the tear go to quarantine first.
3. Files of a step that did not finish (a compaction without seal, a seal without log, segments
   before the start): taken away, or finished.

What a crash cannot leave is damage: something was durable, by the word of the checkpoint, the
journal or a seal, and is not there. Those bytes go to quarantine, what follows is kept as a
segment of its own, and the gap between the two is what a reader is told about.

Nothing here is final until the caller writes the next checkpoint; until then it can be repeated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.checks import BLOCK_BYTES, BlockChecks
from millstream.log.disk import Disk, read_file, write_all, write_file
from millstream.log.index import OffsetIndex, TimeIndex
from millstream.log.partition import Partition, remove_segment_files
from millstream.log.producers import has_sequence
from millstream.log.segment import (
    Flushed,
    Loaded,
    Scanner,
    Seal,
    Segment,
    parse_log_name,
    read_seal,
    seal_job,
    stem,
)
from millstream.log.state import decode_state

if TYPE_CHECKING:
    from millstream.log.batch import Header
    from millstream.log.checkpoint import PartitionState
    from millstream.log.journal import Entry

SIDECARS = (".index", ".timeindex", ".state", ".seal")


class Finding(NamedTuple):
    """One thing that recovery did, for the log and the offline tools."""

    partition: str
    what: str
    detail: str


@dataclass(slots=True)
class Evidence:
    """What is known of a partition from elsewhere: the checkpoint and the journal."""

    state: PartitionState | None = None
    entries: list[Entry] = field(default_factory=list)
    start_offset: int = 0
    # Read and check every byte, sealed segments too.
    is_thorough: bool = False


class _Tail(NamedTuple):
    """Bytes behind the last good batch, and the next good batch in them if there is one."""

    data: bytes
    resumes_at: int
    resumes_with: int


@dataclass(slots=True)
class Found:
    """A log file on disk, and its seal if it has one."""

    base_offset: int
    generation: int
    size: int
    seal: Seal | None

    def covers(self, offset: int) -> bool:
        seal = self.seal
        return seal is not None and seal.base_offset <= offset < seal.next_offset


class Recovery:
    """One partition's recovery, from directory listing to a partition that can go on."""

    __slots__ = (
        "_durable_to",
        "_evidence",
        "_partition",
        "_quarantine",
        "_state_at",
        "_state_from",
        "disk",
        "findings",
        "has_changed",
        "max_epoch",
    )

    def __init__(self, partition: Partition, evidence: Evidence, quarantine: str) -> None:
        self.disk = partition.disk
        self._partition = partition
        self._evidence = evidence
        self._quarantine = quarantine
        self.findings: list[Finding] = []
        self.max_epoch = -1
        # Whether the files are other than the checkpoint knows them: written, cut, removed.
        self.has_changed = partition_is_new(evidence)
        # Everything before this offset was durable once, so it must be there now.
        self._durable_to = 0
        # Batches from this offset on are news to the partition's state; and that state as of
        # the end of each segment that has to be sealed.
        self._state_from = -1
        self._state_at: dict[int, bytes] = {}

    def run(self, now_ms: int) -> None:
        partition, evidence = self._partition, self._evidence
        state = evidence.state
        start = max(evidence.start_offset, state.start_offset if state else 0)
        if state is not None:
            self._durable_to = state.next_offset
        found = self._resolve_generations(self._list_logs())
        self._redo(found)
        found = self._drop_before(self._resolve_generations(self._list_logs()), start)
        self._restore_state(found)
        self._open_segments(found)
        self._finish(start, now_ms)

    # ---- what is there

    def _list_logs(self) -> list[Found]:
        directory = self._partition.directory
        names = self.disk.list_directory(directory)
        stems = {name[: -len(".log")] for name in names if parse_log_name(name)}
        found: list[Found] = []
        for name in names:
            parsed = parse_log_name(name)
            path = f"{directory}/{name}"
            if parsed is not None:
                size = self.disk.size_of(path) or 0
                seal = read_seal(self.disk, path[: -len(".log")])
                if seal is not None and seal.size != size:
                    self._note("seal ignored", f"{name} has {size} bytes, its seal {seal.size}")
                    self._durable_to = max(self._durable_to, seal.next_offset)
                    seal = None
                found.append(Found(*parsed, size, seal))
            elif name.endswith(".new") or (
                name.endswith(SIDECARS) and name.rpartition(".")[0] not in stems
            ):
                self.disk.unlink(path)
        return sorted(found, key=lambda one: (one.base_offset, one.generation))

    def _resolve_generations(self, found: list[Found]) -> list[Found]:
        kept, obsolete = resolve_generations(found)
        for one, why in obsolete:
            self._remove(one, why)
        return kept

    def _drop_before(self, found: list[Found], start: int) -> list[Found]:
        """Take away segments that a trim removed: those that end at or before the start."""
        while len(found) > 1 and found[1].base_offset <= start:
            self._remove(found.pop(0), "before the start of the log")
        return found

    def _remove(self, one: Found, why: str) -> None:
        name = stem(one.base_offset, one.generation)
        remove_segment_files(self.disk, f"{self._partition.directory}/{name}")
        self._note("removed", f"{name}.log: {why}")

    # ---- the journal

    def _redo(self, found: list[Found]) -> None:
        """Write what the journal holds, in order, into segments that are not sealed."""
        directory = self._partition.directory
        files: dict[int, int] = {}
        try:
            for entry in self._evidence.entries:
                header = batches.read_header(entry.data)
                self._durable_to = max(self._durable_to, header.next_offset)
                if any(one.covers(entry.offset) for one in found):
                    continue
                file = files.get(entry.segment)
                if file is None:
                    path = f"{directory}/{stem(entry.segment)}.log"
                    file = files[entry.segment] = self.disk.open(path, "create")
                write_all(self.disk, file, [entry.data], entry.place)
                self.has_changed = True
            for file in files.values():
                self.disk.sync(file)
        finally:
            for file in files.values():
                self.disk.close(file)

    # ---- the segments

    def _restore_state(self, found: list[Found]) -> None:
        """The newest snapshot there is: the checkpoint's, or that of a segment sealed since."""
        known = self._evidence.state
        newest = -1
        restored = decode_state(known.state) if known else None
        if known is not None and restored is not None:
            newest = known.next_offset
        for one in found:
            if one.seal is None or one.seal.next_offset <= newest:
                continue
            path = f"{self._partition.directory}/{stem(one.base_offset, one.generation)}"
            data = read_file(self.disk, path + ".state") or b""
            snapshot = decode_state(data) if crc32c(data) == one.seal.state_crc else None
            if snapshot is not None:
                restored, newest = snapshot, one.seal.next_offset
        if restored is not None:
            self._partition.producers, self._partition.epochs = restored
        self._state_from = newest

    def _open_segments(self, found: list[Found]) -> None:
        """Go through the files in order; `end` is where the log has got to."""
        end = found[0].base_offset if found else 0
        pending = list(found)
        while pending:
            one = pending.pop(0)
            if one.base_offset < end:
                self._set_aside(one, "overlaps the segment before")
                continue
            is_known = one.seal is not None or one.base_offset < self._durable_to
            if one.base_offset > end and not is_known:
                # Nothing says that this was ever durable, and what comes before it is lost.
                self._set_aside(one, f"follows a tail that was lost at offset {end}")
                continue
            if one.base_offset > end:
                self._note("gap", f"offsets {end} to {one.base_offset - 1} are missing")
            segment = self._open_segment(one, pending)
            self._partition.segments.append(segment)
            self._state_at[segment.base_offset] = self._partition.encode_state()
            end = segment.next_offset

    def _open_segment(self, one: Found, pending: list[Found]) -> Segment:
        partition = self._partition
        segment = Segment(self.disk, partition.directory, one.base_offset, one.generation)
        segment.intervals = partition.settings.intervals
        if one.seal is not None and not self._evidence.is_thorough:
            segment.size, segment.next_offset = one.seal.size, one.seal.next_offset
            segment.max_timestamp = one.seal.max_timestamp
            segment.sealed = True
            return segment
        scan = self._scan(segment, one)
        if one.generation:
            # Compaction may have emptied the end, which then has no batch to tell of it.
            covered = one.seal.next_offset if one.seal else 0
            follows = pending[0].base_offset if pending else 0
            segment.next_offset = max(segment.next_offset, covered or follows)
        if scan.end < one.size:
            self._cut_tail(segment, scan, one, pending)
        elif one.seal is not None and self._is_seal_right(segment, one.seal, scan):
            self.disk.close(scan.file)
            segment.loaded = None
            segment.size, segment.next_offset = one.seal.size, one.seal.next_offset
            segment.max_timestamp = one.seal.max_timestamp
            segment.sealed = True
        elif one.seal is not None:
            self._note("seal rebuilt", f"{stem(one.base_offset, one.generation)}.log")
        return segment

    def _is_seal_right(self, segment: Segment, seal: Seal, scan: Scanner) -> bool:
        indexes = [
            crc32c(read_file(self.disk, segment.path + suffix) or b"")
            for suffix in (".index", ".timeindex", ".state")
        ]
        return (
            indexes == [seal.index_crc, seal.time_crc, seal.state_crc]
            and scan.checks.whole == seal.checks.whole
            and scan.checks.partial == seal.checks.partial
        )

    def _scan(self, segment: Segment, one: Found) -> Scanner:
        """From the checkpoint on when it knows this segment, else from the first byte."""
        file = self.disk.open(segment.path + ".log", "write")
        scan = Scanner(self.disk, file, segment.base_offset, segment.intervals)
        trusted = self._trusted(segment, scan, one)
        scan.run(one.size, exact=one.generation == 0, visit=self._visit)
        verified = bytearray((trusted or 0) // BLOCK_BYTES)
        loaded = Loaded(file, scan.index, scan.times, scan.checks, verified, len(verified))
        segment.adopt(loaded, scan)
        if trusted is None or scan.end != trusted or scan.end != one.size:
            self.has_changed = True
            segment.dirty = True
        state = self._evidence.state
        if state is not None and state.segment == segment.base_offset:
            segment.created_ms = state.created_ms
            if trusted is not None:
                segment.flushed = Flushed(
                    state.index_count, state.index_crc, state.time_count, state.time_crc
                )
        return scan

    def _trusted(self, segment: Segment, scan: Scanner, one: Found) -> int | None:
        """Start the scan where the checkpoint ends, if its word still fits the files."""
        state = self._evidence.state
        if (
            state is None
            or self._evidence.is_thorough
            or state.segment != segment.base_offset
            or segment.generation
            or state.size > one.size
        ):
            return None
        checks = BlockChecks(state.checks_whole, state.checks_partial, state.size)
        block = state.size // BLOCK_BYTES
        partial = self.disk.read(scan.file, state.size - block * BLOCK_BYTES, block * BLOCK_BYTES)
        index = _read_entries(self.disk, segment.path + ".index", 8 * state.index_count)
        times = _read_entries(self.disk, segment.path + ".timeindex", 12 * state.time_count)
        if (
            not checks.is_right(block, partial)
            or crc32c(index) != state.index_crc
            or crc32c(times) != state.time_crc
        ):
            self._note("index rebuilt", f"{stem(segment.base_offset)}.log")
            return None
        scan.index = OffsetIndex.decode(index) or OffsetIndex()
        scan.times = TimeIndex.decode(times) or TimeIndex()
        scan.checks = checks
        scan.end, scan.next_offset = state.size, state.next_offset
        scan.max_timestamp = state.max_timestamp
        return state.size

    def _visit(self, header: Header) -> None:
        """What a batch found by the scan means for producers and epochs."""
        partition = self._partition
        self.max_epoch = max(self.max_epoch, header.leader_epoch)
        if header.base_offset < self._state_from:
            return
        if not partition.epochs or partition.epochs[-1][0] < header.leader_epoch:
            partition.epochs.append((header.leader_epoch, header.base_offset))
        if has_sequence(header):
            partition.producers.note(header, header.base_offset, max(header.max_timestamp, 0))

    # ---- tails and damage

    def _cut_tail(self, segment: Segment, scan: Scanner, one: Found, pending: list[Found]) -> None:
        """Bytes after the last good batch: a torn tail, or damage when more was durable."""
        tail = self._read_tail(scan, one)
        name = stem(segment.base_offset, segment.generation)
        is_damage = scan.next_offset < self._durable_to or one.seal is not None
        if is_damage and tail.resumes_at >= 0:
            rest = tail.data[tail.resumes_at :]
            piece = Found(tail.resumes_with, one.generation, len(rest), None)
            path = f"{self._partition.directory}/{stem(piece.base_offset, piece.generation)}.log"
            write_file(self.disk, path, rest)
            pending.insert(0, piece)
            segment.next_offset = scan.next_offset
            self._durable_to = max(self._durable_to, tail.resumes_with + 1)
            self._quarantine_bytes(scan.next_offset, tail.data[: tail.resumes_at])
            self._note("damage", f"{name}.log at {scan.end}: {tail.resumes_at} bytes")
        elif is_damage or tail.resumes_at >= 0:
            self._quarantine_bytes(scan.next_offset, tail.data)
            self._note("quarantined", f"{name}.log at {scan.end}: {len(tail.data)} bytes")
        else:
            self._note("tail cut", f"{name}.log at {scan.end}: {len(tail.data)} bytes")
        assert segment.loaded is not None
        self.disk.truncate(segment.loaded.file, scan.end)

    def _read_tail(self, scan: Scanner, one: Found) -> _Tail:
        data = self.disk.read(scan.file, one.size - scan.end, scan.end)
        return _Tail(data, *find_batch(data, scan.next_offset))

    def _set_aside(self, one: Found, why: str) -> None:
        path = f"{self._partition.directory}/{stem(one.base_offset, one.generation)}"
        data = read_file(self.disk, path + ".log")
        if data and any(data):
            self._quarantine_bytes(one.base_offset, data)
        remove_segment_files(self.disk, path)
        self._note("set aside", f"{stem(one.base_offset, one.generation)}.log: {why}")

    def _quarantine_bytes(self, offset: int, data: bytes) -> None:
        partition = self._partition
        name = f"{partition.id.topic}@{partition.uuid.hex()}.{partition.id.number}.{offset:020d}"
        write_file(self.disk, f"{self._quarantine}/{name}", data)

    # ---- the end

    def _finish(self, start: int, now_ms: int) -> None:
        """Make what was kept durable, seal what is complete, and have an active segment."""
        partition = self._partition
        end = partition.segments[-1].next_offset if partition.segments else 0
        floor = max(start, self._durable_to)
        if end < floor:
            if end < self._durable_to and start < self._durable_to:
                self._note("gap", f"offsets {end} to {floor - 1} are missing")
            self._begin_at(floor, now_ms)
        elif not partition.segments or partition.segments[-1].sealed:
            self._begin_at(end, now_ms)
        while len(partition.segments) > 1 and partition.segments[1].base_offset <= start:
            trimmed = partition.segments.pop(0)
            trimmed.close()
            remove_segment_files(self.disk, trimmed.path)
        partition.start_offset = max(start, partition.segments[0].base_offset)
        for segment in partition.segments[:-1]:
            if not segment.sealed:
                self._seal(segment)
        partition.compacted_to = max(
            (one.next_offset for one in partition.segments if one.generation), default=0
        )
        if self.has_changed:
            loaded = partition.active.loaded
            assert loaded is not None
            self.disk.sync(loaded.file)
            self.disk.sync_directory(partition.directory)
        if not partition.active.created_ms:
            partition.active.created_ms = now_ms
        partition.resume()

    def _begin_at(self, offset: int, now_ms: int) -> None:
        partition = self._partition
        self.has_changed = True
        while partition.segments and partition.segments[-1].size == 0:
            empty = partition.segments.pop()
            empty.close()
            remove_segment_files(self.disk, empty.path)
        segment = Segment(self.disk, partition.directory, offset)
        segment.create(now_ms, partition.settings.intervals)
        segment.dirty = True
        partition.segments.append(segment)

    def _seal(self, segment: Segment) -> None:
        """Finish what the roll began."""
        seal_job(segment, self._state_at[segment.base_offset]).run()
        segment.sealed = True
        segment.close()

    def _note(self, what: str, detail: str) -> None:
        self.has_changed = True
        self.findings.append(Finding(str(self._partition.id), what, detail))


def partition_is_new(evidence: Evidence) -> bool:
    """The checkpoint does not know it, or the journal has more than the checkpoint."""
    state = evidence.state
    return state is None or evidence.start_offset > state.start_offset


def _read_entries(disk: Disk, path: str, size: int) -> bytes:
    if disk.size_of(path) is None:
        return b""
    file = disk.open(path, "read")
    try:
        return disk.read(file, size, 0)
    finally:
        disk.close(file)


def resolve_generations(found: list[Found]) -> tuple[list[Found], list[tuple[Found, str]]]:
    """The newest finished compaction of each stretch and what none covers; and the others, each
    with why it no longer counts."""
    kept: list[Found] = []
    obsolete: list[tuple[Found, str]] = []
    for one in sorted(found, key=lambda one: -one.generation):
        if any(newer.covers(one.base_offset) for newer in kept):
            obsolete.append((one, "replaced by compaction"))
        elif one.generation and one.seal is None and _has_source(found, one):
            obsolete.append((one, "compaction that did not finish"))
        else:
            kept.append(one)
    return sorted(kept, key=lambda one: one.base_offset), obsolete


def _has_source(found: list[Found], one: Found) -> bool:
    return any(
        other.generation < one.generation
        and (other.base_offset == one.base_offset or other.covers(one.base_offset))
        for other in found
    )


def find_batch(data: bytes, next_offset: int) -> tuple[int, int]:
    """Position and offset of the first good batch behind the bad one at the start; -1 without."""
    view = memoryview(data)
    # A header has its magic, 2, at byte 16: look only where that holds.
    at = data.find(b"\x02", 17) - 16
    while at > 0:
        try:
            header = batches.read_header(view, at)
            is_next = next_offset <= header.base_offset < next_offset + 2**31
            if is_next and header.size <= len(view) - at:
                one_batch = view[at : at + header.size]
                batches.verify(one_batch, bytes_max=header.size, exact_count=False)
                return at, header.base_offset
        except BatchInvalid:
            pass
        at = data.find(b"\x02", at + 17) - 16
    return -1, -1
