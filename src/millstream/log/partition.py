"""Segments in order: the log of one partition.

An append has three steps, because what comes between them differs:

1. `reserve` gives the batch its offset and its place. Undone by `rollback`.
2. `write` puts the bytes at that place. In the modes `interval` and `none`, and for big batches,
   that is the first write of them; small batches in mode `every` are in the synced journal by
   then, so a segment never holds journalled bytes that a crash could take back.
3. `advance` moves the high watermark, up to which readers see.

One writer, no clock, no thread: the engine decides when each step happens.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from millstream.errors import LogDamaged, OffsetOutOfRange
from millstream.log import batch as batches
from millstream.log.disk import sync_written
from millstream.log.index import NO_TIMESTAMP
from millstream.log.placing import End, Mark, Placed, key_of
from millstream.log.producers import Producers, has_sequence
from millstream.log.segment import (
    Chunk,
    Intervals,
    Loaded,
    SealJob,
    Segment,
    seal_job,
)
from millstream.log.state import encode_state
from millstream.log.stored import StoredChunk, locate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.log.batch import Data, Header
    from millstream.log.disk import Disk

FsyncMode: TypeAlias = Literal["every", "interval", "none"]

DAY_MS = 24 * 60 * 60 * 1000


class PartitionId(NamedTuple):
    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"


@dataclass(frozen=True, slots=True)
class PartitionSettings:
    """What a topic's settings mean for one partition. `None` is no limit."""

    fsync: FsyncMode = "every"
    segment_bytes: int = 64 * 1024 * 1024
    segment_age_ms: int = 7 * DAY_MS
    intervals: Intervals = field(default_factory=Intervals)
    retention_age_ms: int | None = 7 * DAY_MS
    retention_bytes: int | None = None
    compact: bool = False
    tombstone_age_ms: int = DAY_MS
    batch_bytes_max: int = 1024 * 1024 + 12


class Closing(NamedTuple):
    """A segment that gets no more batches, and is sealed once its last one is written."""

    segment: Segment
    next_offset: int
    state: bytes


class Doomed(NamedTuple):
    """A segment that left the log, and is unlinked when nobody can be reading it any more."""

    segment: Segment
    since: float


@dataclass(slots=True)
class ReadPlan:
    """A read that has found its segment. `run` may happen in a thread."""

    segment: Segment
    offset: int
    bytes_max: int
    end: tuple[int, int]

    def run(self, loaded: Loaded, *, cached: bool) -> Chunk:
        return self.segment.read(loaded, self.offset, self.bytes_max, self.end, cached=cached)

    def locate(self) -> StoredChunk | None:
        """Where the bytes lie, when they are to be had at once."""
        segment = self.segment
        if segment.loaded is None:
            return None
        return locate(segment, segment.loaded, self.offset, self.bytes_max, self.end)


@dataclass(frozen=True, slots=True)
class SyncJob:
    """Segments, each with the size that it had, and names: made durable by `run`, in a thread.

    Nothing counts as synced before `finish`, because others go by it while the thread works.
    """

    partition: Partition
    segments: list[tuple[Segment, int]]
    names: int
    weak_to: int

    def run(self) -> None:
        disk = self.partition.disk
        for segment, _ in self.segments:
            assert segment.loaded is not None
            sync_written(disk, segment.loaded.file)
        if self.names > self.partition.names_synced:
            disk.sync_directory(self.partition.directory)

    def finish(self) -> None:
        partition = self.partition
        for segment, size in self.segments:
            segment.dirty = segment.dirty and segment.size != size
            segment.release()
        partition.names_synced = max(partition.names_synced, self.names)
        partition.synced_to = max(partition.synced_to, self.weak_to)

    def abandon(self) -> None:
        """It failed: nothing is known to be durable."""
        for segment, _ in self.segments:
            segment.release()


@dataclass(frozen=True, slots=True)
class SweepJob:
    """Files to unlink. What fails is found again at the next start, or by the next sweep."""

    partition: Partition
    swept: list[Doomed]

    def run(self) -> int:
        for doomed in self.swept:
            remove_segment_files(self.partition.disk, doomed.segment.path)
        return len(self.swept)

    def abandon(self) -> None:
        self.partition.doomed.extend(self.swept)


class Partition(End):
    __slots__ = (
        "closing",
        "compacted_to",
        "directory",
        "disk",
        "doomed",
        "id",
        "names_made",
        "names_synced",
        "producers",
        "start_offset",
        "synced_to",
        "uuid",
        "weak_to",
    )

    def __init__(
        self,
        disk: Disk,
        directory: str,
        *,
        id: PartitionId,
        uuid: bytes,
        settings: PartitionSettings,
        leader_epoch: int,
    ) -> None:
        super().__init__(key_of(uuid, id.number), settings, leader_epoch)
        self.disk = disk
        self.directory = directory
        self.id = id
        self.uuid = uuid
        self.start_offset = 0
        self.producers = Producers()
        self.closing: list[Closing] = []
        self.doomed: list[Doomed] = []
        self.compacted_to = 0
        # How many segments this process has made here; and how many of their names are synced.
        self.names_made = 0
        self.names_synced = 0
        # Written without journal or sync up to here; and synced after that up to here.
        self.weak_to = 0
        self.synced_to = 0

    @property
    def has_weak_tail(self) -> bool:
        return self.weak_to > self.synced_to

    def begin_sync(self) -> SyncJob:
        """What it takes to make durable all that was written so far."""
        segments = [
            (segment, segment.size)
            for segment in self.segments
            if segment.dirty and segment.loaded is not None
        ]
        for segment, _ in segments:
            segment.hold()
        return SyncJob(self, segments, self.names_made, self.weak_to)

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    def encode_state(self) -> bytes:
        return encode_state(self.producers, self.epochs)

    def start_empty(self, now_ms: int, base_offset: int = 0) -> None:
        """Give a new partition its first segment."""
        self.start_offset = self.next_offset = self.high_watermark = base_offset
        self._new_segment(base_offset, now_ms)
        self.visible = (self.active, 0)

    def resume(self) -> None:
        """After recovery has filled in `segments`: everything that is there may be seen."""
        self.next_offset = self.high_watermark = self.active.next_offset
        self.tail = self.active.size
        self.visible = (self.active, self.tail)

    # ---- appending

    def reserve(self, data: Data, header: Header, now_ms: int) -> Placed:
        """Give a verified batch its offset and place."""
        base_offset = self.next_offset
        if self.begins_segment(len(data), header.last_offset_delta, now_ms):
            self.roll(now_ms)
        placed = self.reserve_place(data, header)
        if header.producer_id >= 0 and has_sequence(header):
            before = self.producers.note(header, base_offset, now_ms)
            self.undo.append((header.producer_id, before))
        if not self.epochs or self.epochs[-1][0] != self.leader_epoch:
            self.epochs.append((self.leader_epoch, base_offset))
        return placed

    def duplicate_of(self, header: Header) -> int | None:
        """The offset of the batch that this one repeats. Raises when the sequence is wrong."""
        return self.producers.check(header) if has_sequence(header) else None

    def rollback(self, mark: Mark) -> None:
        """Take back every `reserve` since the mark. None of them may have been written."""
        for producer_id, before in reversed(self.undo[mark.undo :]):
            self.producers.undo(producer_id, before)
        del self.undo[mark.undo :]
        del self.epochs[mark.epochs :]
        while len(self.segments) > mark.segments:
            segment = self.segments.pop()
            self.closing.pop()
            segment.close()
            self._unlink(segment.path + ".log")
        self.next_offset, self.tail = mark.next_offset, mark.tail

    def write(self, run: Sequence[Placed]) -> None:
        """Write reserved batches, in order. What an earlier call wrote is skipped."""
        first = 0
        while first < len(run):
            segment = run[first].segment
            last = len(run) if run[-1].segment is segment else first + 1
            while last < len(run) and run[last].segment is segment:
                last += 1
            while first < last and run[first].position < segment.size:
                first += 1
            if first < last:
                segment.write(run[first:last])
            first = last

    def write_new(self, run: Sequence[Placed]) -> None:
        """As `write`, but all or nothing: for batches that `rollback` may take back."""
        first = run[0].segment
        if run[-1].segment is first:
            first.write(run)
            return
        before = first.save()
        try:
            self.write(run)
        except OSError:
            first.restore(before)
            raise

    def erase_tail(self) -> None:
        """After a failed write: drop what lies behind the end, so that it is not found there
        after a crash. It is written over otherwise, so failing here does no harm."""
        loaded = self.active.loaded
        if loaded is not None:
            try:
                self.disk.truncate(loaded.file, self.active.size)
            except OSError:
                return

    def apply(self) -> None:
        """Write what the journal holds for this partition. Raises OSError and keeps it all."""
        if self.unapplied:
            self.is_stuck = True
            self.write(self.unapplied)
            self.unapplied.clear()
            self.is_stuck = False

    def append(self, data: bytes, now_ms: int) -> int:
        """All three steps at once, for a partition without a journal. Answers the offset."""
        header = batches.verify(data, bytes_max=self.settings.batch_bytes_max)
        original = self.duplicate_of(header)
        if original is not None:
            return original
        mark = self.mark()
        try:
            placed = self.reserve(data, header, now_ms)
            placed.segment.write((placed,))
        except OSError:
            self.rollback(mark)
            self.erase_tail()
            raise
        self.settle()
        self.advance(placed)
        return placed.base_offset

    # ---- rolling and sealing

    def roll(self, now_ms: int) -> None:
        """End the active segment and start the next one."""
        closing = Closing(self.active, self.next_offset, self.encode_state())
        self._new_segment(self.next_offset, now_ms)
        self.closing.append(closing)
        self.tail = 0
        self.changed = True

    def _new_segment(self, base_offset: int, now_ms: int) -> None:
        segment = Segment(self.disk, self.directory, base_offset)
        segment.create(now_ms, self.settings.intervals)
        self.segments.append(segment)
        self.names_made += 1

    def next_seal(self) -> SealJob | None:
        """The next segment to seal, once its last batch is written."""
        if self.closing and self.closing[0].segment.next_offset == self.closing[0].next_offset:
            return seal_job(self.closing[0].segment, self.closing[0].state)
        return None

    def sealed(self) -> None:
        """The job that `next_seal` gave is done."""
        segment = self.closing.pop(0).segment
        segment.sealed = True
        segment.dirty = False

    # ---- reading

    def plan_read(self, offset: int, bytes_max: int) -> ReadPlan | None:
        """Which segment answers; None at the high watermark, where there is nothing yet."""
        visible, position, limit = self._readable()
        if not self.start_offset <= offset <= self.high_watermark:
            raise OffsetOutOfRange(
                f"{self.id} has offsets {self.start_offset} to {self.high_watermark}; "
                f"{offset} is outside",
                topic=self.id.topic,
                partition=self.id.number,
                offset=offset,
                start=self.start_offset,
                end=self.high_watermark,
            )
        if offset >= limit:
            return None
        at = bisect_right(self.segments, offset, key=_base_offset) - 1
        segment = self.segments[at]
        if segment is visible:
            return ReadPlan(segment, offset, bytes_max, (position, limit))
        if offset >= segment.next_offset:
            raise self._gap(segment.next_offset, self.segments[at + 1].base_offset - 1)
        return ReadPlan(segment, offset, bytes_max, (segment.size, segment.next_offset))

    def read(self, offset: int, bytes_max: int) -> Chunk:
        """Whole batches from the one that holds `offset`; waits for the disk where it must."""
        while True:
            plan = self.plan_read(offset, bytes_max)
            if plan is None:
                return Chunk(memoryview(b""), offset)
            chunk = plan.run(plan.segment.open(), cached=False)
            if len(chunk.data):
                return chunk
            offset = chunk.next_offset

    def _readable(self) -> tuple[Segment | None, int, int]:
        """The end that readers get to: segment, position and offset."""
        if self.unapplied:
            try:
                self.apply()
            except OSError:
                # No room in the segment for what the journal holds: readers wait for it.
                first = self.unapplied[0]
                return first.segment, first.position, first.base_offset
        return *self.visible, self.high_watermark

    def readable_segments(self) -> tuple[list[tuple[Segment, int, bool]], int]:
        """Segments with the bytes that may be read, and whether they are sealed; and the offset
        up to which all of that goes."""
        visible, position, limit = self._readable()
        found: list[tuple[Segment, int, bool]] = []
        for segment in self.segments:
            if segment is visible:
                found.append((segment, position, False))
                break
            if segment.base_offset >= limit:
                break
            found.append((segment, segment.size, segment.sealed))
        return found, limit

    def time_segments(self, timestamp: int) -> list[tuple[Segment, int]]:
        """The segments that may hold the first record at or after a time, each with its end."""
        visible, position, limit = self._readable()
        found: list[tuple[Segment, int]] = []
        for segment in self.segments:
            if segment.base_offset >= limit:
                break
            if segment.max_timestamp >= timestamp:
                found.append((segment, position if segment is visible else segment.size))
        return found

    def find_time(self, timestamp: int) -> tuple[int, int] | None:
        """Offset and time of the first record at or after a time."""
        for segment, end in self.time_segments(timestamp):
            found = segment.find_time(segment.open(), timestamp, self.start_offset, end)
            if found is not None:
                return found
        return None

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """The newest epoch up to this one, and where it ended: for a client's truncation check.
        (-1, -1) when nothing that old was written here."""
        at = bisect_right(self.epochs, epoch, key=_epoch) - 1
        if at < 0:
            return -1, -1
        end = self.epochs[at + 1][1] if at + 1 < len(self.epochs) else self.high_watermark
        return self.epochs[at][0], end

    def gaps(self) -> list[tuple[int, int]]:
        """First and last offset of each stretch that recovery could not read."""
        pairs = zip(self.segments, self.segments[1:], strict=False)
        closing = {id(entry.segment) for entry in self.closing}
        return [
            (before.next_offset, after.base_offset - 1)
            for before, after in pairs
            if before.next_offset < after.base_offset and id(before) not in closing
        ]

    def _gap(self, first: int, last: int) -> LogDamaged:
        return LogDamaged(
            f"{self.id} lost offsets {first} to {last} to damage (see quarantine); "
            f"go on at {last + 1}",
            topic=self.id.topic,
            partition=self.id.number,
            first=first,
            last=last,
        )

    # ---- trimming, retention, compaction

    def trim(self, start_offset: int, now: float, now_ms: int) -> None:
        """Forget everything before an offset. The new start must be durable already."""
        if start_offset <= self.start_offset:
            return
        assert start_offset <= self.high_watermark
        if start_offset == self.next_offset and self.tail:
            # Without room for a new segment, the old one just stays for longer.
            with suppress(OSError):
                self.roll(now_ms)
            if self.high_watermark == self.active.base_offset:
                self.visible = (self.active, 0)
        self.start_offset = start_offset
        self.epochs = _epochs_from(self.epochs, start_offset)
        self.changed = True
        self.drop_trimmed(now)

    def drop_trimmed(self, now: float) -> None:
        """Let go of segments that lie before the start. One that waits for its seal stays
        until it has it, because a thread may be at work on its file."""
        while len(self.segments) > 1 and self.segments[1].base_offset <= self.start_offset:
            if self.closing and self.closing[0].segment is self.segments[0]:
                return
            self.doomed.append(Doomed(self.segments.pop(0), now))

    def retained_from(self, now_ms: int, held_from: int | None = None) -> int:
        """The first offset that retention keeps: whole sealed segments go, oldest first, and none
        with records that are held. One with a record from the future is as old as its end, or it
        would hold all others for good."""
        keep = self.start_offset
        size = self.size_bytes
        age, limit = self.settings.retention_age_ms, self.settings.retention_bytes
        ended: list[int] | None = None
        for at, (segment, after) in enumerate(zip(self.segments, self.segments[1:], strict=False)):
            newest = segment.max_timestamp
            if newest > now_ms:
                ended = ended or self._ended(now_ms)
                newest = ended[at]
            is_old = age is not None and newest != NO_TIMESTAMP and newest < now_ms - age
            is_over = limit is not None and size - segment.size >= limit
            is_held = held_from is not None and after.base_offset > held_from
            if not segment.sealed or is_held or not (is_old or is_over):
                break
            size -= segment.size
            keep = max(keep, after.base_offset)
        return min(keep, self.high_watermark)

    def _ended(self, now_ms: int) -> list[int]:
        """When each segment had ended at the latest: the next one was made then. Of segments from
        before a restart that is known of the last one alone, so it counts for those before it."""
        known = now_ms
        ended: list[int] = []
        for after in reversed(self.segments[1:]):
            known = min(known, after.created_ms or known)
            ended.append(known)
        return ended[::-1]

    def rolls_by_age(self, now_ms: int) -> bool:
        """Whether the active segment should end, though nobody writes to it."""
        active, age = self.active, self.settings.retention_age_ms
        if not self.tail or self.unapplied or active.size != self.tail:
            return False
        is_expired = (
            age is not None
            and active.max_timestamp != NO_TIMESTAMP
            and active.max_timestamp < now_ms - age
        )
        return is_expired or now_ms - active.created_ms >= self.settings.segment_age_ms

    def compactable(self) -> list[Segment]:
        """Sealed segments, when there are some that compaction has not seen. Damage stops it."""
        sealed: list[Segment] = []
        for segment in self.segments[:-1]:
            if not segment.sealed or (sealed and sealed[-1].next_offset != segment.base_offset):
                break
            sealed.append(segment)
        return sealed if sealed and sealed[-1].next_offset > self.compacted_to else []

    def swap(self, old: Sequence[Segment], new: Segment, now: float) -> bool:
        """Put a compacted segment in the place of those that it was made from; False when a
        trim took all of them in the meantime, and the new one is void.

        When it took some of them, the new one stands for the rest: were it void, a record would
        be back of which another new segment no longer has the tombstone.
        """
        left = [segment for segment in old if segment.base_offset >= self.segments[0].base_offset]
        if not left:
            return False
        at = bisect_left(self.segments, left[0].base_offset, key=_base_offset)
        assert self.segments[at : at + len(left)] == left
        self.segments[at : at + len(left)] = [new]
        self.compacted_to = old[-1].next_offset
        self.doomed.extend(Doomed(segment, now) for segment in left)
        self.changed = True
        return True

    def sweep(self, before: float) -> SweepJob:
        """Close segments that left the log before a moment. The job unlinks them, in a thread:
        taking away a large file takes a while."""
        swept: list[Doomed] = []
        left: list[Doomed] = []
        for one in self.doomed:
            is_free = one.since < before and not one.segment.readers
            (swept if is_free else left).append(one)
        self.doomed = left
        for doomed in swept:
            doomed.segment.close()
        return SweepJob(self, swept)

    def _unlink(self, path: str) -> None:
        try:
            self.disk.unlink(path)
        except OSError:
            # An empty file that nobody needs; recovery takes it away.
            return

    def close(self) -> None:
        self.is_closed = True
        for segment in self.segments:
            segment.close()
        for doomed in self.doomed:
            doomed.segment.close()


def remove_segment_files(disk: Disk, path: str) -> None:
    """The log goes last: what has no log is taken away at the next start."""
    for suffix in (".seal", ".state", ".timeindex", ".index", ".log"):
        if disk.size_of(path + suffix) is not None:
            disk.unlink(path + suffix)


def _base_offset(segment: Segment) -> int:
    return segment.base_offset


def _epoch(entry: tuple[int, int]) -> int:
    return entry[0]


def _epochs_from(epochs: list[tuple[int, int]], start_offset: int) -> list[tuple[int, int]]:
    """Epochs that still have records; the first of them starts where the log does."""
    at = bisect_right(epochs, start_offset, key=_second) - 1
    if at <= 0:
        return epochs
    return [(epochs[at][0], start_offset), *epochs[at + 1 :]]


def _second(entry: tuple[int, int]) -> int:
    return entry[1]
