"""Compaction: of each key, only its newest record stays.

Works on sealed segments, in a child process, and writes segments of a new generation beside them:

1. read the keys that are new since the last run, and remember the newest offset of each;
2. write each group of segments that fits in one again, without the records that are superseded;
3. seal it. The seal is the moment from which the new segment counts: before it, a crash leaves
   the old ones, and the next start removes the unfinished file; after it, the old ones go.

A record keeps its offset, so a reader that comes to an offset that is gone goes on at the next.
A tombstone (a key without value) stays for a while, so that readers learn of the removal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from crc32c import crc32c

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.child import work_for_parent
from millstream.log.disk import Disk, read_file
from millstream.log.partition import remove_segment_files
from millstream.log.placing import Placed
from millstream.log.segment import Intervals, Segment, read_seal, seal_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from millstream.log.batch import Header

READ_BYTES = 1024 * 1024
# What is written goes to the device in steps of this size: the syncs of others wait for a step.
WRITE_BYTES = 128 * 1024
# What a key costs in the table beside its own bytes, about.
KEY_OVERHEAD_BYTES = 110


class Source(msgspec.Struct, frozen=True):
    base_offset: int
    generation: int
    next_offset: int
    size: int

    @classmethod
    def of(cls, segment: Segment) -> Source:
        return cls(segment.base_offset, segment.generation, segment.next_offset, segment.size)


class CompactionJob(msgspec.Struct, frozen=True):
    directory: str
    sources: list[Source]
    segment_bytes: int
    index_bytes: int
    time_ms: int
    # Tombstones in batches older than this go.
    tombstones_before_ms: int
    # Before this offset an earlier run has left no key twice: only keys from here on supersede.
    new_from: int = 0
    # The table of keys; what does not fit is compacted in a later run.
    keys_bytes_max: int = 256 * 1024 * 1024


class Output(msgspec.Struct, frozen=True):
    """One new segment, and how many sources it stands for."""

    sources: int
    base_offset: int
    generation: int
    next_offset: int
    size: int
    max_timestamp: int


class CompactionResult(msgspec.Struct, frozen=True):
    """Outputs in order; a group that lost nothing has none. `end` is how far the run came."""

    outputs: list[Output]
    end: int
    records_before: int
    records_after: int


def compact(disk: Disk, job: CompactionJob) -> CompactionResult:
    run = _Run(disk, job)
    try:
        return run.result()
    finally:
        run.close()


class _Run:
    __slots__ = ("_disk", "_job", "_newest", "_records", "_segments")

    def __init__(self, disk: Disk, job: CompactionJob) -> None:
        self._disk = disk
        self._job = job
        self._newest: dict[bytes, int] = {}
        self._records = [0, 0]
        self._segments = [self._open(source) for source in job.sources]

    def result(self) -> CompactionResult:
        covered = self._read_keys()
        outputs: list[Output] = []
        first = 0
        while first < covered:
            last = self._group_end(first, covered)
            output = self._rewrite(first, last)
            if output is not None:
                outputs.append(output)
            first = last
        end = self._job.sources[covered - 1].next_offset
        return CompactionResult(outputs, end, *self._records)

    def close(self) -> None:
        for segment in self._segments:
            segment.close()

    def _open(self, source: Source) -> Segment:
        job = self._job
        segment = open_source(self._disk, job.directory, source)
        segment.intervals = Intervals(job.index_bytes, job.time_ms)
        return segment

    def _read_keys(self) -> int:
        """Fill the table with what is new; answers how many segments it covers. At least one
        new segment, so that every run comes further than the one before."""
        room = self._job.keys_bytes_max
        newest = self._newest
        for count, segment in enumerate(self._segments):
            if segment.next_offset <= self._job.new_from:
                continue
            if room <= 0 and newest:
                return count
            for _, header, data in batches_of(segment):
                for offset, key, _ in _keys(header, data) or ():
                    if key is None:
                        continue
                    if key not in newest:
                        room -= len(key) + KEY_OVERHEAD_BYTES
                    newest[key] = offset
        return len(self._segments)

    def _group_end(self, first: int, covered: int) -> int:
        size = self._segments[first].size
        last = first + 1
        while last < covered and size + self._segments[last].size <= self._job.segment_bytes:
            size += self._segments[last].size
            last += 1
        return last

    def _rewrite(self, first: int, last: int) -> Output | None:
        job, sources = self._job, self._job.sources[first:last]
        generation = max(source.generation for source in sources) + 1
        target = Segment(self._disk, job.directory, sources[0].base_offset, generation)
        # A run that failed may have left a seal of this name, which must not come back one day
        # beside another log.
        remove_segment_files(self._disk, target.path)
        self._disk.sync_directory(job.directory)
        target.create(0, Intervals(job.index_bytes, job.time_ms))
        is_same = len(sources) == 1
        run: list[Placed] = []
        position = 0
        for segment in self._segments[first:last]:
            for _, header, data in batches_of(segment):
                kept = self._kept(header, data)
                is_same = is_same and kept is data
                if kept is None:
                    continue
                run.append(_placed(target, position, header, kept))
                position += len(kept)
                if position - target.size >= WRITE_BYTES:
                    target.write(run)
                    run.clear()
                    self._disk.sync(target.open().file)
        if run:
            target.write(run)
        if is_same:
            target.close()
            remove_segment_files(self._disk, target.path)
            return None
        return self._seal(target, sources)

    def _seal(self, target: Segment, sources: list[Source]) -> Output:
        """The new segment answers for all offsets of its sources, also those that are gone."""
        target.next_offset = sources[-1].next_offset
        last = self._open(sources[-1])
        state = read_file(self._disk, last.path + ".state") or b""
        seal = read_seal(self._disk, last.path)
        if seal is None or crc32c(state) != seal.state_crc:
            # Damaged: the new seal must not vouch for it.
            state = b""
        seal_job(target, state).run()
        target.close()
        return Output(
            sources=len(sources),
            base_offset=target.base_offset,
            generation=target.generation,
            next_offset=target.next_offset,
            size=target.size,
            max_timestamp=target.max_timestamp,
        )

    def _kept(self, header: Header, data: memoryview) -> bytes | memoryview | None:
        """The batch as it is when nothing goes, without what goes, or None."""
        self._records[0] += header.count
        keys = _keys(header, data)
        if keys is None:
            self._records[1] += header.count
            return data
        drops_tombstones = header.max_timestamp < self._job.tombstones_before_ms
        newest = self._newest
        keep: set[int] = set()
        for offset, key, is_tombstone in keys:
            if key is not None:
                if newest.get(key, offset) > offset:
                    continue
                if is_tombstone and drops_tombstones:
                    continue
            keep.add(offset)
        self._records[1] += len(keep)
        if len(keep) == header.count:
            return data
        return batches.retain(data, keep) if keep else None


def _keys(header: Header, data: memoryview) -> list[tuple[int, bytes | None, bool]] | None:
    """None for a batch that is kept as it is: a control batch, or one that does not open. Such
    a one can be there from before its topic was compacted, and must not stop compaction."""
    if header.is_control:
        return None
    try:
        return batches.keys(data)
    except BatchInvalid:
        return None


def open_source(disk: Disk, directory: str, source: Source) -> Segment:
    segment = Segment(disk, directory, source.base_offset, source.generation)
    segment.size, segment.next_offset = source.size, source.next_offset
    return segment


def batches_of(segment: Segment) -> Iterator[tuple[int, Header, memoryview]]:
    """Every batch of a sealed segment, checked against its seal on the way."""
    offset = segment.base_offset
    loaded = segment.open()
    while offset < segment.next_offset:
        end = (segment.size, segment.next_offset)
        chunk = segment.read(loaded, offset, READ_BYTES, end, cached=False)
        for position, header in batches.walk(chunk.data):
            yield position, header, chunk.data[position : position + header.size]
        offset = chunk.next_offset


def _placed(target: Segment, position: int, source: Header, data: bytes | memoryview) -> Placed:
    header = source if isinstance(data, memoryview) else batches.read_header(data)
    epoch = header.leader_epoch
    return Placed(
        target, position, header.base_offset, leader_epoch=epoch, data=data, header=header
    )


def main() -> None:
    work_for_parent(CompactionJob, compact)


if __name__ == "__main__":
    main()
