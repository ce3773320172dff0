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
from millstream.log.disk import Disk, close_file, read_file, write_all, write_file
from millstream.log.index import OffsetIndex, TimeIndex
from millstream.log.mending import bad_blocks, places_in, restore_bit, restore_epochs
from millstream.log.partition import Doomed, Partition, PartitionId, remove_segment_files
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
    # False without a checkpoint: then the first file tells where the log starts.
    is_start_known: bool = True


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
    # It is sealed, but its batches have to be read: nothing else tells of its producers.
    is_read: bool = False

    def is_same(self, other: Found) -> bool:
        return (self.base_offset, self.generation) == (other.base_offset, other.generation)

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
        "_quarantined",
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
        # What was in quarantine before, for who wants to hear of new damage only.
        self._quarantined: set[str] = set()

    def run(self, now_ms: int) -> None:
        evidence = self._evidence
        state = evidence.state
        start = max(evidence.start_offset, state.start_offset if state else 0)
        if state is not None:
            self._durable_to = state.next_offset
        if evidence.is_thorough:
            self._quarantined.update(self.disk.list_directory(self._quarantine))
        found = self._resolve_generations(self._list_logs())
        self._redo(found)
        found = self._resolve_generations(self._list_logs())
        self._restore_state(found)
        self._drop_before(found, start)
        self._open_segments(found, start)
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
                if self._evidence.is_thorough:
                    self._note("removed", f"{name}: left over")
        return sorted(found, key=lambda one: (one.base_offset, one.generation))

    def _resolve_generations(self, found: list[Found]) -> list[Found]:
        kept, obsolete = resolve_generations(found)
        if obsolete:
            # A process that was killed may have left names that only the page cache has.
            self.disk.sync_directory(self._partition.directory)
        for one, why in obsolete:
            name = stem(one.base_offset, one.generation)
            remove_segment_files(self.disk, f"{self._partition.directory}/{name}")
            self._note("removed", f"{name}.log: {why}")
        return kept

    def _drop_before(self, found: list[Found], start: int) -> None:
        """Let go of segments that a trim removed: those that end at or before the start. What
        they say of producers still counts, so their files stay until the next checkpoint."""
        while len(found) > 1 and found[1].base_offset <= start:
            one = found.pop(0)
            segment = Segment(self.disk, self._partition.directory, one.base_offset, one.generation)
            if one.seal is None or one.is_read:
                self._scan(segment, one)
            self._doom(segment)

    def _doom(self, segment: Segment) -> None:
        segment.close()
        self._partition.doomed.append(Doomed(segment, 0.0))
        name = stem(segment.base_offset, segment.generation)
        self._note("removed", f"{name}.log: before the start of the log")

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
                close_file(self.disk, file)

    # ---- the segments

    def _restore_state(self, found: list[Found]) -> None:
        """The newest snapshot there is: the checkpoint's, or that of a segment sealed since."""
        known = self._evidence.state
        newest = -1
        without: list[Found] = []
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
            else:
                without.append(one)
        for one in without:
            one.is_read = one.seal is not None and one.seal.next_offset > newest
        if restored is not None:
            self._partition.producers, self._partition.epochs = restored
        self._state_from = newest

    def _open_segments(self, found: list[Found], start: int) -> None:
        """Go through the files in order; `end` is where the log has got to."""
        end = found[0].base_offset if found else 0
        if self._evidence.is_start_known:
            end = min(end, start)
        pending = list(found)
        while pending:
            one = pending.pop(0)
            if one.base_offset < end:
                self._set_aside(one, "overlaps the segment before")
                continue
            is_known = one.seal is not None or self._is_known(one.base_offset)
            if one.base_offset > end and not is_known:
                # Nothing says that this was ever durable, and what comes before it is lost.
                self._set_aside(one, f"follows a tail that was lost at offset {end}")
                continue
            if one.base_offset > end and not self._is_old_gap(end):
                self._note("gap", f"offsets {end} to {one.base_offset - 1} are missing")
            segment = self._open_segment(one, pending)
            self._state_at[segment.base_offset] = self._state_of(one)
            end = segment.next_offset

    def _is_known(self, base_offset: int) -> bool:
        """Whether a segment was there durably: something in it was, or the checkpoint names it."""
        state = self._evidence.state
        is_named = state is not None and state.segment == base_offset
        return is_named or base_offset < self._durable_to

    def _open_segment(self, one: Found, pending: list[Found]) -> Segment:
        partition = self._partition
        segment = Segment(self.disk, partition.directory, one.base_offset, one.generation)
        segment.intervals = partition.settings.intervals
        partition.segments.append(segment)
        if one.seal is not None and not self._evidence.is_thorough and not one.is_read:
            segment.size, segment.next_offset = one.seal.size, one.seal.next_offset
            segment.max_timestamp = one.seal.max_timestamp
            segment.sealed = True
            return segment
        scan = self._scan(segment, one)
        suspect_bytes = 0
        if self._evidence.is_thorough:
            scan, suspect_bytes = self._recheck(segment, one, scan)
        if one.generation:
            # Compaction may have emptied the end, which then has no batch to tell of it.
            covered = one.seal.next_offset if one.seal else 0
            follows = pending[0].base_offset if pending else 0
            segment.next_offset = max(segment.next_offset, covered or follows)
        if scan.end < one.size:
            self._cut_tail(segment, scan, one, pending, suspect_bytes)
        elif one.seal is not None and not self._wrong_parts(segment, one.seal, scan):
            close_file(self.disk, scan.file)
            segment.loaded = None
            segment.size, segment.next_offset = one.seal.size, one.seal.next_offset
            segment.max_timestamp = one.seal.max_timestamp
            segment.sealed = True
        elif one.seal is not None:
            wrong = ", ".join(self._wrong_parts(segment, one.seal, scan))
            name = stem(one.base_offset, one.generation)
            self._note("seal rebuilt", f"{name}.log: {wrong} did not fit it")
        if self._evidence.is_thorough and not segment.sealed:
            # It may go on as the active segment, and must not have a seal then.
            self._drop_seal(segment)
        return segment

    def _recheck(self, segment: Segment, one: Found, scan: Scanner) -> tuple[Scanner, int]:
        """Look for damage that only block checksums tell. Answers the scan that counts, and how
        many bytes behind its end look right and cannot be trusted."""
        expected = self._known_checks(segment, one)
        bad = bad_blocks(self.disk, scan.file, expected) if expected else []
        if expected is None or not bad:
            return scan, 0
        name = f"{stem(one.base_offset, one.generation)}.log"
        exact = one.generation == 0
        for block in list(bad):
            position = restore_bit(scan, block, expected, exact=exact)
            if position is not None:
                bad.remove(block)
                self._note("bit restored", f"{name} at {position}: it was flipped")
                scan = self._scan_again(segment, one, scan)
        for block in bad:
            places, end = places_in(self.disk, scan.file, block)
            if places and exact:
                count = restore_epochs(self.disk, scan.file, places, self._partition.epochs)
                if count:
                    self._note("epoch restored", f"{name} at {places[0].position}: {count} batches")
                    scan = self._scan_again(segment, one, scan)
            elif places and scan.end > places[0].position:
                first = places[0].position
                limited = Found(one.base_offset, one.generation, first, one.seal)
                return self._scan_again(segment, limited, scan), end - first
        return scan, 0

    def _known_checks(self, segment: Segment, one: Found) -> BlockChecks | None:
        """The block checksums of the seal, or of the checkpoint for the segment it knows."""
        state = self._evidence.state
        if one.seal is not None:
            return one.seal.checks
        if state is None or state.segment != one.base_offset or one.generation:
            return None
        if self._flushed(segment, state) is None:
            self._note("index rebuilt", f"{stem(segment.base_offset)}.log")
        return BlockChecks(state.checks_whole, state.checks_partial, state.size)

    def _scan_again(self, segment: Segment, one: Found, scan: Scanner) -> Scanner:
        self.disk.sync(scan.file)
        close_file(self.disk, scan.file)
        return self._scan(segment, one)

    def _state_of(self, one: Found) -> bytes:
        """The state for a segment's seal: what was sealed, or what the batches so far add up to."""
        if one.seal is not None and self._evidence.is_thorough:
            path = f"{self._partition.directory}/{stem(one.base_offset, one.generation)}"
            data = read_file(self.disk, path + ".state")
            if data is not None and crc32c(data) == one.seal.state_crc:
                return data
        return self._partition.encode_state()

    def _wrong_parts(self, segment: Segment, seal: Seal, scan: Scanner) -> list[str]:
        """The files that are not what was sealed."""
        sums = {".index": seal.index_crc, ".timeindex": seal.time_crc, ".state": seal.state_crc}
        wrong = [
            suffix
            for suffix, crc in sums.items()
            if crc32c(read_file(self.disk, segment.path + suffix) or b"") != crc
        ]
        actual, right = scan.checks, seal.checks
        if actual.whole != right.whole or actual.partial != right.partial:
            wrong.append(".log")
        return wrong

    def _drop_seal(self, segment: Segment) -> None:
        if self.disk.size_of(segment.path + ".seal") is not None:
            self.disk.unlink(segment.path + ".seal")

    def _scan(self, segment: Segment, one: Found) -> Scanner:
        """From the checkpoint on when it knows this segment, else from the first byte."""
        file = self.disk.open(segment.path + ".log", "write")
        scan = Scanner(self.disk, file, segment.base_offset, segment.intervals)
        try:
            trusted = self._trusted(segment, scan, one)
            scan.run(one.size, exact=one.generation == 0, visit=self._visit)
        except OSError:
            close_file(self.disk, file)
            raise
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
        flushed = self._flushed(segment, state)
        if flushed is None or not checks.is_right(block, partial):
            self._note("index rebuilt", f"{stem(segment.base_offset)}.log")
            return None
        index, times = flushed
        scan.index = OffsetIndex.decode(index) or OffsetIndex()
        scan.times = TimeIndex.decode(times) or TimeIndex()
        scan.checks = checks
        scan.end, scan.next_offset = state.size, state.next_offset
        scan.max_timestamp = state.max_timestamp
        return state.size

    def _flushed(self, segment: Segment, state: PartitionState) -> tuple[bytes, bytes] | None:
        """The indexes as far as the checkpoint knows them; None when they are not those."""
        index = _read_entries(self.disk, segment.path + ".index", 8 * state.index_count)
        times = _read_entries(self.disk, segment.path + ".timeindex", 12 * state.time_count)
        if crc32c(index) != state.index_crc or crc32c(times) != state.time_crc:
            return None
        return index, times

    def _visit(self, header: Header) -> None:
        """What a batch found by the scan means for producers and epochs."""
        partition = self._partition
        self.max_epoch = max(self.max_epoch, header.leader_epoch)
        if header.base_offset < self._state_from:
            return
        self._state_from = header.next_offset
        if not partition.epochs or partition.epochs[-1][0] < header.leader_epoch:
            partition.epochs.append((header.leader_epoch, header.base_offset))
        if has_sequence(header):
            partition.producers.note(header, header.base_offset, max(header.max_timestamp, 0))

    # ---- tails and damage

    def _cut_tail(
        self,
        segment: Segment,
        scan: Scanner,
        one: Found,
        pending: list[Found],
        suspect_bytes: int,
    ) -> None:
        """Bytes after the last good batch: a torn tail, or damage when more was durable."""
        tail = self._read_tail(scan, one, suspect_bytes)
        name = stem(segment.base_offset, segment.generation)
        is_damage = scan.next_offset < self._durable_to or one.seal is not None
        if is_damage and tail.resumes_at >= 0:
            rest = tail.data[tail.resumes_at :]
            piece = Found(tail.resumes_with, one.generation, len(rest), None)
            path = f"{self._partition.directory}/{stem(piece.base_offset, piece.generation)}"
            # A recovery that was interrupted may have left it there, half done.
            remove_segment_files(self.disk, path)
            write_file(self.disk, path + ".log", rest)
            pending[:] = [piece, *(other for other in pending if not other.is_same(piece))]
            segment.next_offset = scan.next_offset
            self._durable_to = max(self._durable_to, tail.resumes_with + 1)
            self._quarantine_bytes(scan.next_offset, tail.data[: tail.resumes_at])
            self._note("damage", f"{name}.log at {scan.end}: {tail.resumes_at} bytes")
        elif is_damage or tail.resumes_at >= 0:
            if is_damage:
                segment.next_offset = scan.next_offset
            self._quarantine_bytes(scan.next_offset, tail.data)
            self._note("quarantined", f"{name}.log at {scan.end}: {len(tail.data)} bytes")
        else:
            self._note("tail cut", f"{name}.log at {scan.end}: {len(tail.data)} bytes")
        assert segment.loaded is not None
        self.disk.truncate(segment.loaded.file, scan.end)

    def _read_tail(self, scan: Scanner, one: Found, suspect_bytes: int) -> _Tail:
        data = self.disk.read(scan.file, one.size - scan.end, scan.end)
        return _Tail(data, *find_batch(data, scan.next_offset, max(suspect_bytes, 1)))

    def _set_aside(self, one: Found, why: str) -> None:
        path = f"{self._partition.directory}/{stem(one.base_offset, one.generation)}"
        data = read_file(self.disk, path + ".log")
        if data and any(data):
            self._quarantine_bytes(one.base_offset, data)
        remove_segment_files(self.disk, path)
        self._note("set aside", f"{stem(one.base_offset, one.generation)}.log: {why}")

    def _quarantine_bytes(self, offset: int, data: bytes) -> None:
        partition = self._partition
        name = quarantine_name(partition.id, partition.uuid, offset)
        path = f"{self._quarantine}/{name}"
        before, copies = read_file(self.disk, path), 0
        while before is not None and before != data:
            # Other bytes were lost at this offset before; those stay too.
            copies += 1
            before = read_file(self.disk, f"{path}.{copies}")
        write_file(self.disk, f"{path}.{copies}" if copies else path, data)

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
            self._doom(partition.segments.pop(0))
        partition.start_offset = max(start, partition.segments[0].base_offset)
        for segment in partition.segments[:-1]:
            if not segment.sealed:
                self._seal(segment)
        if self._evidence.is_thorough:
            self._mark_gaps()
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
        name = f"{stem(segment.base_offset, segment.generation)}.log"
        is_told = any(finding.detail.startswith(name) for finding in self.findings)
        if self._evidence.is_thorough and not is_told:
            self._note("sealed", f"{name}: there was no seal that could be read")

    def _is_old_gap(self, first: int) -> bool:
        return quarantine_name(self._partition.id, self._partition.uuid, first) in self._quarantined

    def _mark_gaps(self) -> None:
        """Leave a mark in quarantine for a gap of which no byte was left, so that it is known."""
        partition = self._partition
        for first, _ in partition.gaps():
            name = quarantine_name(partition.id, partition.uuid, first)
            if self.disk.size_of(f"{self._quarantine}/{name}") is None:
                self._quarantine_bytes(first, b"")

    def _note(self, what: str, detail: str) -> None:
        self.has_changed = True
        self.findings.append(Finding(str(self._partition.id), what, detail))


def partition_is_new(evidence: Evidence) -> bool:
    """The checkpoint does not know it, or the journal has more than the checkpoint."""
    state = evidence.state
    return state is None or evidence.start_offset > state.start_offset


def quarantine_name(id: PartitionId, uuid: bytes, offset: int) -> str:
    """Of a long topic name only the start, so that it fits; the UUID tells the rest."""
    return f"{id.topic[:150]}@{uuid.hex()}.{id.number}.{offset:020d}"


def _read_entries(disk: Disk, path: str, size: int) -> bytes:
    if disk.size_of(path) is None:
        return b""
    file = disk.open(path, "read")
    try:
        return disk.read(file, size, 0)
    finally:
        close_file(disk, file)


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


def find_batch(data: bytes, next_offset: int, start: int = 1) -> tuple[int, int]:
    """Position and offset of the first good batch behind the bad one at the start; -1 without."""
    view = memoryview(data)
    # A header has its magic, 2, at byte 16: look only where that holds.
    at = data.find(b"\x02", start + 16) - 16
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
