"""Checking one segment: its batches, its seal, its indexes, and what the checkpoint says of it."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from crc32c import crc32c

from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.checkpoint import PartitionState
from millstream.log.checks import BLOCK_BYTES, BlockChecks
from millstream.log.disk import Disk, read_file
from millstream.log.index import NO_TIMESTAMP, OffsetIndex, TimeIndex
from millstream.log.offline import Batch, Broken, PartitionFiles, walk_log, was_durable
from millstream.log.recovery import Found
from millstream.log.segment import Seal, read_seal, stem
from millstream.log.state import decode_state

Severity: TypeAlias = Literal["error", "warning", "info"]


class Remark(NamedTuple):
    """One thing that was noticed.

    - error: bytes that were durable once are lost or not what they were;
    - warning: what a crash leaves and the next start puts right, or damage that was dealt with;
    - info: worth knowing, nothing to do.
    """

    severity: Severity
    # A file, below the data directory; files of a partition as topic/partition/file.
    place: str
    # A byte in that file, and the first offset that is concerned, where there are such.
    position: int | None
    offset: int | None
    message: str


@dataclass(slots=True)
class Tally:
    """How much was checked."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0


class SegmentCheck:
    """`run` gives the remarks; afterwards `next_offset` and `epoch` are where the segment ends."""

    __slots__ = (
        "_broken",
        "_checks",
        "_disk",
        "_epoch_max",
        "_files",
        "_found",
        "_max_timestamp",
        "_newest",
        "_offsets",
        "_path",
        "_place",
        "_positions",
        "_progress",
        "_seal",
        "_tally",
        "epoch",
        "next_offset",
    )

    def __init__(
        self,
        disk: Disk,
        files: PartitionFiles,
        found: Found,
        *,
        epoch: int,
        epoch_max: int | None,
        tally: Tally,
        progress: Callable[[int], None],
    ) -> None:
        self._disk = disk
        self._files = files
        self._found = found
        self._tally = tally
        self._progress = progress
        self._path = f"{files.directory}/{stem(found.base_offset, found.generation)}"
        self._place = f"{files.id}/{stem(found.base_offset, found.generation)}"
        self._seal: Seal | None = None
        self._epoch_max = epoch_max
        self.epoch = epoch
        self.next_offset = found.base_offset
        # Of each good batch: position, first offset, newest timestamp.
        self._positions = array("q")
        self._offsets = array("q")
        self._newest = array("q")
        self._max_timestamp = NO_TIMESTAMP
        self._checks = BlockChecks()
        self._broken: list[tuple[int, int]] = []

    def run(self, *, is_last: bool, follows: int) -> Iterator[Remark]:
        """`follows` is where the log goes on: the next segment's first offset."""
        tally = self._tally
        tally.segments += 1
        yield from self._read_seal(is_last=is_last)
        exact = self._found.generation == 0
        for piece in walk_log(
            self._disk, self._path + ".log", self._found.base_offset, exact=exact
        ):
            tally.bytes += len(piece.data)
            self._progress(len(piece.data))
            if isinstance(piece, Broken):
                yield self._judge(piece, follows)
                if not was_durable(self._disk, self._files, self._found, piece):
                    break
            else:
                yield from self._take(piece)
        if not exact and self._seal is None:
            # Compaction may have emptied the end, which then has no batch to tell of it.
            self.next_offset = max(self.next_offset, follows)
        if self._seal is not None:
            yield from self._compare_seal(self._seal)
        state = self._files.evidence.state
        if state is not None and state.segment == self._found.base_offset and exact:
            yield from self._compare_checkpoint(state, is_last=is_last)

    # ---- batches

    def _take(self, batch: Batch) -> Iterator[Remark]:
        header = batch.header
        self._tally.batches += 1
        self._checks.extend(batch.data)
        self._positions.append(batch.position)
        self._offsets.append(header.base_offset)
        self._newest.append(header.max_timestamp)
        self._max_timestamp = max(self._max_timestamp, header.max_timestamp)
        self.next_offset = header.next_offset
        epoch, before, limit = header.leader_epoch, self.epoch, self._epoch_max
        if epoch < before:
            text = f"the leader epoch falls from {before} to {epoch}"
            yield self._remark("error", ".log", text, batch.position, header.base_offset)
        elif limit is not None and epoch > limit:
            text = f"the leader epoch is {epoch}, and the checkpoint knows none after {limit}"
            yield self._remark("error", ".log", text, batch.position, header.base_offset)
        self.epoch = epoch
        try:
            self._tally.records += len(batches.decode(batch.data))
        except BatchInvalid as error:
            text = (
                f"offsets {header.base_offset} to {header.last_offset} are as they were written, "
                f"but cannot be decoded: {error.message}"
            )
            yield self._remark("error", ".log", text, batch.position, header.base_offset)

    def _judge(self, piece: Broken, follows: int) -> Remark:
        size = len(piece.data)
        if not was_durable(self._disk, self._files, self._found, piece):
            rest = self._found.size - piece.position
            text = f"a torn tail of {rest} bytes ({piece.reason}): the next start cuts it off"
            if piece.resumes_with >= 0:
                text += ", and puts it into quarantine because it has whole batches"
            return self._remark("warning", ".log", text, piece.position, piece.offset)
        self._checks.extend(piece.data)
        self._broken.append((piece.position, piece.position + size))
        after = piece.resumes_with if piece.resumes_with >= 0 else follows
        lost = ""
        if after > piece.offset:
            lost = f", so offsets {piece.offset} to {after - 1} cannot be read"
        self.next_offset = max(self.next_offset, after)
        text = f"{size} bytes are no batch{lost}: {piece.reason}"
        return self._remark("error", ".log", text, piece.position, piece.offset)

    # ---- the seal

    def _read_seal(self, *, is_last: bool) -> Iterator[Remark]:
        if self._disk.size_of(self._path + ".seal") is None:
            if not is_last:
                yield self._remark("warning", ".log", "not sealed: the next start seals it")
            return
        seal = read_seal(self._disk, self._path)
        size = self._found.size
        if seal is None:
            yield self._remark("error", ".seal", "the seal is damaged")
        elif seal.size != size:
            text = f"the seal says that the log has {seal.size} bytes, and it has {size}"
            yield self._remark("error", ".seal", text)
        else:
            self._seal = seal

    def _compare_seal(self, seal: Seal) -> Iterator[Remark]:
        yield from self._compare_blocks(seal.checks, "the seal")
        is_whole = not self._broken
        end = self.next_offset
        is_end_right = seal.next_offset == end or (
            self._found.generation > 0 and seal.next_offset > end
        )
        if is_whole and (seal.base_offset != self._found.base_offset or not is_end_right):
            text = (
                f"the seal covers offsets {seal.base_offset} to {seal.next_offset - 1}, "
                f"the log {self._found.base_offset} to {end - 1}"
            )
            yield self._remark("error", ".seal", text)
        if is_whole and seal.max_timestamp != self._max_timestamp:
            text = (
                f"the seal says that the newest timestamp is {seal.max_timestamp}, "
                f"and it is {self._max_timestamp}"
            )
            yield self._remark("error", ".seal", text)
        self.next_offset = max(self.next_offset, seal.next_offset) if is_whole else self.next_offset
        contents = [
            (".index", seal.index_crc, self._compare_index),
            (".timeindex", seal.time_crc, self._compare_times),
            (".state", seal.state_crc, self._compare_state),
        ]
        for suffix, crc, compare in contents:
            data = read_file(self._disk, self._path + suffix)
            if data is None and crc:
                yield self._remark("error", suffix, "the file is missing")
            elif crc32c(data or b"") != crc:
                yield self._remark("error", suffix, "the file is not what was sealed")
            elif is_whole and data:
                yield from compare(data)

    def _compare_blocks(self, expected: BlockChecks, whose: str) -> Iterator[Remark]:
        """Checksums of the bytes that no batch's own CRC covers: offsets, lengths, epochs."""
        actual = self._checks
        for block in range(-(-expected.size // BLOCK_BYTES)):
            start, end = block * BLOCK_BYTES, expected.block_end(block)
            if end - start == BLOCK_BYTES and block < len(actual.whole):
                is_right = actual.whole[block] == expected.whole[block]
            else:
                is_right = expected.is_right(block, self._bytes(start, end))
            if is_right or any(low < end and start < high for low, high in self._broken):
                continue
            first = bisect_right(self._positions, start) - 1
            offset = self._offsets[first] if first >= 0 else self._found.base_offset
            text = (
                f"bytes {start} to {end - 1} do not have the checksum that {whose} has for them, "
                "though every batch looks right: an offset or an epoch has changed"
            )
            yield self._remark("error", ".log", text, start, offset)

    def _bytes(self, start: int, end: int) -> bytes:
        file = self._disk.open(self._path + ".log", "read")
        try:
            return self._disk.read(file, end - start, start)
        finally:
            self._disk.close(file)

    # ---- indexes and state

    def _compare_index(self, data: bytes) -> Iterator[Remark]:
        index = OffsetIndex.decode(data)
        base = self._found.base_offset
        wrong = index is None or (not len(index) and len(self._positions) > 0)
        for relative, position in zip(
            *((index.offsets, index.positions) if index else ((), ())), strict=True
        ):
            at = bisect_left(self._positions, position)
            wrong = wrong or not (
                at < len(self._positions)
                and self._positions[at] == position
                and self._offsets[at] == base + relative
            )
        if wrong:
            yield self._remark("error", ".index", "the index does not fit the log")

    def _compare_times(self, data: bytes) -> Iterator[Remark]:
        times = TimeIndex.decode(data)
        base = self._found.base_offset
        wrong = times is None
        for relative, timestamp in zip(
            *((times.offsets, times.timestamps) if times else ((), ())), strict=True
        ):
            at = bisect_left(self._offsets, base + relative)
            wrong = wrong or not (
                at < len(self._offsets)
                and self._offsets[at] == base + relative
                and self._newest[at] == timestamp
            )
        if wrong:
            yield self._remark("error", ".timeindex", "the index does not fit the log")

    def _compare_state(self, data: bytes) -> Iterator[Remark]:
        if decode_state(data) is None:
            yield self._remark("error", ".state", "the snapshot of producers cannot be read")

    # ---- the checkpoint

    def _compare_checkpoint(self, state: PartitionState, *, is_last: bool) -> Iterator[Remark]:
        if self._found.size < state.size:
            text = f"the log has {self._found.size} bytes, and the checkpoint knows {state.size}"
            yield self._remark("error", ".log", text, self._found.size, self.next_offset)
            return
        checks = BlockChecks(state.checks_whole, state.checks_partial, state.size)
        yield from self._compare_blocks(checks, "the checkpoint")
        if self._seal is not None or not is_last:
            # The indexes are written again for the seal; a crash may have come in between.
            return
        for suffix, size, crc, compare in (
            (".index", 8 * state.index_count, state.index_crc, self._compare_index),
            (".timeindex", 12 * state.time_count, state.time_crc, self._compare_times),
        ):
            data = (read_file(self._disk, self._path + suffix) or b"")[:size]
            if len(data) < size or crc32c(data) != crc:
                # Also what a crash leaves when it comes while the segment is being sealed, and
                # takes the name of the segment after it.
                text = "the index is not what the checkpoint knows: the next start rebuilds it"
                yield self._remark("warning", suffix, text)
            elif not self._broken and size:
                yield from compare(data)

    def _remark(
        self,
        severity: Severity,
        suffix: str,
        message: str,
        position: int | None = None,
        offset: int | None = None,
    ) -> Remark:
        return Remark(severity, self._place + suffix, position, offset, message)
