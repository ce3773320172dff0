"""One .log file with its sparse indexes; and, once it is sealed, its seal.

    <base>.log         batches, one after the other
    <base>.index       see index.py
    <base>.timeindex   see index.py
    <base>.state       producers and leader epochs as of the segment's end, see state.py
    <base>.seal        written last; a segment that has one is never written again

`<base>` is the first offset, 20 digits. A segment that compaction wrote has its generation in the
name too (`<base>.<generation>`), so that it never takes the name of a file that is being read.

The seal is one struct, then the block checksums, then a CRC-32C of all that:

    magic           8s   MSSEAL01
    base_offset     i64
    next_offset     i64  one past the last offset that the segment covers
    size            i64  of the .log file
    max_timestamp   i64
    index_crc       u32  of the .index file
    time_crc        u32  of the .timeindex file
    state_crc       u32  of the .state file
    partial_crc     u32  of the bytes in the last, partial block
    blocks          u32  how many whole blocks follow, a u32 each
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from crc32c import crc32c

from millstream.errors import BatchInvalid, LogDamaged
from millstream.log import batch as batches
from millstream.log.checks import BLOCK_BYTES, BlockChecks, catch_up
from millstream.log.disk import (
    Disk,
    close_file,
    never,
    read_file,
    require_synced,
    sync_written,
    write_all,
    write_file,
    write_synced,
)
from millstream.log.index import NO_TIMESTAMP, SPAN_MAX, OffsetIndex, TimeIndex
from millstream.log.placing import joined_batches, next_noted, segment_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from millstream.log.batch import Data, Header
    from millstream.log.placing import Placed

    Visit: TypeAlias = Callable[[Header], None]

SEAL = struct.Struct(">8sqqqqIIIII")
SEAL_MAGIC = b"MSSEAL01"

# Batches up to this size, on the average, cost less joined than as a list of buffers.
JOIN_BYTES = 8 * 1024
# How much a scan, or a search by time, reads at once.
SCAN_BYTES = 1024 * 1024


class NotCached(Exception):
    """The bytes would have to come from the device: try again where waiting is allowed."""


class Chunk(NamedTuple):
    """Whole batches, and the offset at which to go on."""

    data: memoryview
    next_offset: int


@dataclass(slots=True)
class Intervals:
    """How sparse the indexes are."""

    index_bytes: int = 4096
    time_ms: int = 1000


@dataclass(slots=True)
class Loaded:
    """What reading a segment takes. `verified` has a byte for each block that has to be checked;
    blocks after those were written, or scanned, by this process. `checks` of an active segment
    are as old as its last checkpoint."""

    file: int
    index: OffsetIndex
    times: TimeIndex
    checks: BlockChecks
    verified: bytearray
    unverified: int = 0


class Saved(NamedTuple):
    """The end of an active segment at one moment."""

    size: int
    next_offset: int
    max_timestamp: int
    last_indexed: int
    index_count: int
    time_count: int


class Flushed(NamedTuple):
    """How many entries of the active segment's indexes are in their files, and their CRCs."""

    index_count: int
    index_crc: int
    time_count: int
    time_crc: int


class Seal(NamedTuple):
    base_offset: int
    next_offset: int
    size: int
    max_timestamp: int
    index_crc: int
    time_crc: int
    state_crc: int
    checks: BlockChecks


def stem(base_offset: int, generation: int = 0) -> str:
    return f"{base_offset:020d}.{generation}" if generation else f"{base_offset:020d}"


def parse_log_name(name: str) -> tuple[int, int] | None:
    """Base offset and generation of a .log file; None when the name is not one of ours."""
    parts = name.split(".")
    if parts[-1] != "log" or len(parts) not in (2, 3):
        return None
    if not all(part.isdecimal() for part in parts[:-1]) or len(parts[0]) != 20:
        return None
    return int(parts[0]), int(parts[1]) if len(parts) == 3 else 0


class Segment:
    """Either active (grows, `loaded` is always there) or sealed (loaded when it is read)."""

    __slots__ = (
        "base_offset",
        "created_ms",
        "dirty",
        "disk",
        "flushed",
        "generation",
        "intervals",
        "is_retired",
        "last_indexed",
        "loaded",
        "max_timestamp",
        "next_offset",
        "path",
        "readers",
        "sealed",
        "size",
    )

    def __init__(self, disk: Disk, directory: str, base_offset: int, generation: int = 0) -> None:
        self.disk = disk
        self.path = f"{directory}/{stem(base_offset, generation)}"
        self.base_offset = base_offset
        self.generation = generation
        self.size = 0
        self.next_offset = base_offset
        self.max_timestamp = NO_TIMESTAMP
        self.created_ms = 0
        self.intervals = Intervals()
        self.last_indexed = -1
        self.loaded: Loaded | None = None
        self.sealed = False
        self.dirty = False
        self.flushed = Flushed(0, 0, 0, 0)
        # Who needs the file open: threads at work on it, and answers on their way out of it.
        self.readers = 0
        self.is_retired = False

    @property
    def place(self) -> str:
        """Topic, partition and file: what a user may know of where it lies."""
        return "/".join([*self.path.split("/")[-3:-1], os.path.basename(self.path) + ".log"])

    # ---- opening and closing

    def create(self, now_ms: int, intervals: Intervals) -> None:
        """Make the file of a new active segment."""
        file = self.disk.open(self.path + ".log", "create")
        try:
            self.disk.truncate(file, 0)
        except OSError:
            close_file(self.disk, file)
            raise
        self.loaded = Loaded(file, OffsetIndex(), TimeIndex(), BlockChecks(), bytearray())
        self.created_ms = now_ms
        self.intervals = intervals

    def load(self) -> Loaded:
        """Open a sealed segment for reading. Changes nothing here, so a thread may do it."""
        seal = read_seal(self.disk, self.path)
        if seal is None or seal.size != self.disk.size_of(self.path + ".log"):
            raise LogDamaged(
                f"the seal of {self.place} is missing or does not fit; run `mill log repair`",
                segment=self.place,
                first=self.base_offset,
                last=max(self.base_offset, self.next_offset - 1),
            )
        file = self.disk.open(self.path + ".log", "read")
        try:
            index, times = self._load_indexes(file, seal)
        except BaseException:
            close_file(self.disk, file)
            raise
        blocks = -(-seal.size // BLOCK_BYTES)
        return Loaded(file, index, times, seal.checks, bytearray(blocks), blocks)

    def _load_indexes(self, file: int, seal: Seal) -> tuple[OffsetIndex, TimeIndex]:
        index_bytes = read_file(self.disk, self.path + ".index") or b""
        time_bytes = read_file(self.disk, self.path + ".timeindex") or b""
        if crc32c(index_bytes) == seal.index_crc and crc32c(time_bytes) == seal.time_crc:
            index, times = OffsetIndex.decode(index_bytes), TimeIndex.decode(time_bytes)
            if index is not None and times is not None:
                return index, times
        scan = Scanner(self.disk, file, self.base_offset, self.intervals)
        scan.run(seal.size, exact=self.generation == 0)
        return scan.index, scan.times

    def install(self, loaded: Loaded) -> None:
        if self.loaded is None:
            self.loaded = loaded
        else:
            close_file(self.disk, loaded.file)

    def close(self) -> None:
        """Close the file; while somebody needs it open, as soon as that is over."""
        if self.readers:
            self.is_retired = True
        elif self.loaded is not None:
            close_file(self.disk, self.loaded.file)
            self.loaded = None

    def hold(self) -> None:
        self.readers += 1

    def release(self) -> None:
        self.readers -= 1
        if self.is_retired and not self.readers:
            self.close()

    def open(self) -> Loaded:
        if self.loaded is None:
            self.install(self.load())
        assert self.loaded is not None
        return self.loaded

    # ---- writing

    def write(self, run: Sequence[Placed]) -> None:
        """Write batches that were given consecutive places, from this segment's end on.

        Nothing here changes before the last byte is written, so a failed call can be repeated
        (the same bytes at the same places) or given up.
        """
        assert self.loaded is not None
        assert run[0].position == self.size
        loaded = self.loaded
        last = run[-1]
        end = last.position + last.size
        is_small = end - self.size <= JOIN_BYTES * len(run)
        buffers: list[Data] = [joined_batches(run)] if is_small else list(segment_buffers(run))
        write_all(self.disk, loaded.file, buffers, self.size)
        self.dirty = True
        at = 0
        while True:
            at = next_noted(
                run, at, self.last_indexed, self.intervals.index_bytes, self.max_timestamp
            )
            if at == len(run):
                break
            self._note(loaded, run[at].header, run[at].base_offset, run[at].position)
            at += 1
        self.size = end
        self.next_offset = last.next_offset

    def _note(self, loaded: Loaded, header: Header, base_offset: int, position: int) -> None:
        if self.last_indexed < 0 or position - self.last_indexed >= self.intervals.index_bytes:
            loaded.index.add(base_offset - self.base_offset, position)
            self.last_indexed = position
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
            if _is_time_entry(loaded.times, header.max_timestamp, self.intervals):
                loaded.times.add(header.max_timestamp, base_offset - self.base_offset)

    def save(self) -> Saved:
        """Where this active segment ends, for `restore`."""
        loaded = self.loaded
        assert loaded is not None
        return Saved(
            self.size,
            self.next_offset,
            self.max_timestamp,
            self.last_indexed,
            len(loaded.index),
            len(loaded.times),
        )

    def restore(self, saved: Saved) -> None:
        """Forget what was written since."""
        loaded = self.loaded
        assert loaded is not None
        self.size, self.next_offset = saved.size, saved.next_offset
        self.max_timestamp, self.last_indexed = saved.max_timestamp, saved.last_indexed
        loaded.index.truncate(saved.index_count)
        loaded.times.truncate(saved.time_count)

    def adopt(self, loaded: Loaded, scan: Scanner) -> None:
        """Take on what a scan found, for a segment that goes on as the active one."""
        self.loaded = loaded
        self.size = scan.end
        self.next_offset = scan.next_offset
        self.max_timestamp = scan.max_timestamp
        self.last_indexed = loaded.index.positions[-1] if len(loaded.index) else -1

    # ---- reading

    def read(
        self, loaded: Loaded, offset: int, bytes_max: int, end: tuple[int, int], *, cached: bool
    ) -> Chunk:
        """Whole batches from the one that holds `offset`, at most `bytes_max` but at least one.

        `end` is the position, and the offset, up to which readers may see. Indexes tell where a
        chunk may begin and end, so the cost does not depend on the number of batches.
        """
        end_position, end_offset = end
        _, at = loaded.index.floor(offset - self.base_offset)
        want = max(bytes_max, self.intervals.index_bytes, batches.HEADER_BYTES)
        want = min(want, end_position - at)
        data = self._fetch(loaded, at, want, cached=cached)
        start = 0
        while True:
            if at + start >= end_position:
                return Chunk(memoryview(b""), end_offset)
            if start + batches.HEADER_BYTES > len(data):
                at, start = at + start, 0
                data = self._fetch(loaded, at, min(want, end_position - at), cached=cached)
            header = self._header(data, start)
            if header.next_offset > offset:
                break
            start += header.size
        if header.size > len(data) - start:
            data = self._fetch(loaded, at + start, header.size, cached=cached)
            return Chunk(data, header.next_offset)
        if at + len(data) == end_position and len(data) - start <= bytes_max:
            return Chunk(data[start:], end_offset)
        relative, position = loaded.index.boundary(at + min(len(data), start + bytes_max))
        if position > at + start:
            return Chunk(data[start : position - at], self.base_offset + relative)
        return self._walk(data, start, bytes_max)

    def _walk(self, data: memoryview, start: int, bytes_max: int) -> Chunk:
        """End a short chunk, one that has no index entry inside, at its last whole batch."""
        header = self._header(data, start)
        end = start + header.size
        next_offset = header.next_offset
        while end + batches.HEADER_BYTES <= len(data):
            header = self._header(data, end)
            if end + header.size > min(len(data), start + bytes_max):
                break
            end += header.size
            next_offset = header.next_offset
        return Chunk(data[start:end], next_offset)

    def find_time(
        self, loaded: Loaded, timestamp: int, from_offset: int, end_position: int
    ) -> tuple[int, int] | None:
        """Offset and time of the first record at or after a time; None when all are older."""
        _, relative = loaded.times.before(timestamp)
        _, at = loaded.index.floor(max(relative, from_offset - self.base_offset))
        while at < end_position:
            data = self._fetch(loaded, at, min(SCAN_BYTES, end_position - at), cached=False)
            first = self._header(data, 0)
            if first.size > len(data):
                data = self._fetch(loaded, at, first.size, cached=False)
            for position, header in batches.walk(data):
                at += header.size
                if header.max_timestamp < timestamp:
                    continue
                for record in batches.decode(data[position : position + header.size]):
                    if record.timestamp >= timestamp and record.offset >= from_offset:
                        return record.offset, record.timestamp
        return None

    def _fetch(self, loaded: Loaded, position: int, size: int, *, cached: bool) -> memoryview:
        """Bytes of the log, checked against the block checksums once after opening."""
        low, high = position, position + size
        unchecked: list[int] = []
        if loaded.unverified and size:
            verified = loaded.verified
            last = min((high - 1) // BLOCK_BYTES, len(verified) - 1)
            unchecked = [b for b in range(low // BLOCK_BYTES, last + 1) if not verified[b]]
            if unchecked:
                low = min(low, unchecked[0] * BLOCK_BYTES)
                high = max(high, loaded.checks.block_end(unchecked[-1]))
        if cached:
            found = self.disk.read_cached(loaded.file, high - low, low)
            if found is None:
                raise NotCached
            data = memoryview(found)
        else:
            data = memoryview(self.disk.read(loaded.file, high - low, low))
        if len(data) < high - low:
            raise self._damaged(loaded, low, high)
        for block in unchecked:
            start, end = block * BLOCK_BYTES - low, loaded.checks.block_end(block) - low
            if not loaded.checks.is_right(block, data[start:end]):
                raise self._damaged(loaded, start + low, end + low)
            loaded.verified[block] = 1
            # Counted anew, because several threads may be at this.
            loaded.unverified = loaded.verified.count(0)
        return data[position - low : position - low + size]

    def _header(self, data: memoryview, position: int) -> Header:
        try:
            return batches.read_header(data, position)
        except BatchInvalid as error:
            raise LogDamaged(
                f"{self.place} has a batch that cannot be read ({error.message}); "
                "run `mill log verify`",
                segment=self.place,
                first=self.base_offset,
                last=max(self.base_offset, self.next_offset - 1),
            ) from error

    def _damaged(self, loaded: Loaded, low: int, high: int) -> LogDamaged:
        first = self.base_offset + loaded.index.boundary(low)[0]
        after = [
            o
            for o, p in zip(loaded.index.offsets, loaded.index.positions, strict=True)
            if p >= high
        ]
        last = self.base_offset + after[0] - 1 if after else max(first, self.next_offset - 1)
        return LogDamaged(
            f"{self.place} is damaged between offsets {first} and {last}; "
            f"go on at {last + 1}, or run `mill log verify`",
            segment=self.place,
            first=first,
            last=last,
        )


class Scanner:
    """Goes through a log file batch by batch, and builds what a reader of it needs."""

    __slots__ = (
        "base_offset",
        "checks",
        "disk",
        "end",
        "file",
        "index",
        "intervals",
        "max_timestamp",
        "next_offset",
        "times",
    )

    def __init__(self, disk: Disk, file: int, base_offset: int, intervals: Intervals) -> None:
        self.disk = disk
        self.file = file
        self.base_offset = base_offset
        self.intervals = intervals
        self.index = OffsetIndex()
        self.times = TimeIndex()
        self.checks = BlockChecks()
        self.end = 0
        self.next_offset = base_offset
        self.max_timestamp = NO_TIMESTAMP

    def run(self, size: int, *, exact: bool, visit: Visit | None = None) -> None:
        """From `end` on, take every batch that is whole and right, up to the first that is not.

        `end` is then where the good bytes end. `exact` asks for offsets without gaps, which a
        log has unless it was compacted.
        """
        want = SCAN_BYTES
        while self.end < size:
            data = self.disk.read(self.file, min(want, size - self.end), self.end)
            found = batches.scan(data, 0, self.next_offset, exact=exact)
            for at, header in found.batches:
                if header.next_offset - self.base_offset > SPAN_MAX:
                    # Only damage goes so far, and an index entry could not hold it.
                    self.checks.extend(memoryview(data)[:at])
                    self.end += at
                    return
                self.next_offset = header.next_offset
                self._note(header, self.end + at)
                if visit is not None:
                    visit(header)
            self.checks.extend(memoryview(data)[: found.end])
            self.end += found.end
            if found.reason == "invalid":
                return
            if not found.batches:
                # A partial batch. Once more with all its bytes, if the file has them.
                if len(data) >= size - self.end:
                    return
                want = _claimed_size(data)
                if want <= len(data):
                    return
            else:
                want = SCAN_BYTES

    def _note(self, header: Header, position: int) -> None:
        relative = header.base_offset - self.base_offset
        positions = self.index.positions
        if not positions or position - positions[-1] >= self.intervals.index_bytes:
            self.index.add(relative, position)
        if header.max_timestamp > self.max_timestamp:
            self.max_timestamp = header.max_timestamp
            if _is_time_entry(self.times, header.max_timestamp, self.intervals):
                self.times.add(header.max_timestamp, relative)


@dataclass(frozen=True, slots=True)
class SealJob:
    """All that sealing takes, as of the moment the segment got its last batch, so that a thread
    can do it while the partition goes on.

    1. sync the log and make its checksums, 2. write and sync the indexes, the state and their
    names, 3. write the seal in one step. A crash before 3 leaves an unsealed segment, which
    recovery scans and seals.
    """

    disk: Disk
    path: str
    file: int
    base_offset: int
    next_offset: int
    size: int
    max_timestamp: int
    index: bytes
    times: bytes
    checks: BlockChecks
    state: bytes

    def run(self, has_failed: Callable[[], bool] = never) -> None:
        """`has_failed`: see `SyncFailed`."""
        sync_written(self.disk, self.file)
        catch_up(self.disk, self.file, self.checks, self.size)
        for suffix, content in (
            (".index", self.index),
            (".timeindex", self.times),
            (".state", self.state),
        ):
            write_synced(self.disk, self.path + suffix, content)
        # A seal that survives a crash must not survive alone.
        self.disk.sync_directory(os.path.dirname(self.path))
        require_synced(has_failed)
        write_file(self.disk, self.path + ".seal", self._seal())

    def _seal(self) -> bytes:
        whole = array("I", self.checks.whole)
        body = SEAL.pack(
            SEAL_MAGIC,
            self.base_offset,
            self.next_offset,
            self.size,
            self.max_timestamp,
            crc32c(self.index),
            crc32c(self.times),
            crc32c(self.state),
            self.checks.partial,
            len(whole),
        ) + struct.pack(f">{len(whole)}I", *whole)
        return body + struct.pack(">I", crc32c(body))


def seal_job(segment: Segment, state: bytes) -> SealJob:
    loaded = segment.loaded
    assert loaded is not None
    return SealJob(
        disk=segment.disk,
        path=segment.path,
        file=loaded.file,
        base_offset=segment.base_offset,
        next_offset=segment.next_offset,
        size=segment.size,
        max_timestamp=segment.max_timestamp,
        index=loaded.index.encode(),
        times=loaded.times.encode(),
        checks=loaded.checks.copy(),
        state=state,
    )


def read_seal(disk: Disk, path: str) -> Seal | None:
    """The seal of a segment; None when there is none or it is damaged."""
    data = read_file(disk, path + ".seal")
    if data is None or len(data) < SEAL.size + 4:
        return None
    body, stored = data[:-4], data[-4:]
    if struct.pack(">I", crc32c(body)) != stored:
        return None
    magic, base, end, size, newest, index_crc, time_crc, state_crc, partial, count = (
        SEAL.unpack_from(body)
    )
    blocks_fit = len(body) == SEAL.size + 4 * count and count == size // BLOCK_BYTES
    if magic != SEAL_MAGIC or not blocks_fit:
        return None
    whole = array("I", struct.unpack_from(f">{count}I", body, SEAL.size))
    checks = BlockChecks(whole.tobytes(), partial, size)
    return Seal(base, end, size, newest, index_crc, time_crc, state_crc, checks)


def _is_time_entry(times: TimeIndex, timestamp: int, intervals: Intervals) -> bool:
    return not len(times) or timestamp >= times.newest + intervals.time_ms


def _claimed_size(data: bytes) -> int:
    """What the length field at the start says, at most the largest batch there can be."""
    if len(data) < 12:
        return 0
    return 12 + int.from_bytes(data[8:12], "big", signed=False)
