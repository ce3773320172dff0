"""A partition and a journal, each against a simple model."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from faults.simulated_disk import SURVIVALS, SimulatedDisk, Survival
from log.effort import effort
from log.making import NOW_MS, Sender, records
from millstream.log import batch as batches
from millstream.log.compaction import CompactionJob, Source, compact
from millstream.log.journal import Damage, Journal, read_frames, trim_entry
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.segment import Segment
from millstream.log.store import Store, StoreOptions, new_uuid, open_store

ROOT = "/data"
SETTINGS = PartitionSettings(
    segment_bytes=1500, retention_bytes=6000, retention_age_ms=None, compact=True
)
T0 = PartitionId("t", 0)


class Kept(NamedTuple):
    timestamp: int
    key: bytes | None
    value: bytes | None


record_lists = st.lists(
    st.tuples(
        st.integers(-3000, 3000),
        st.sampled_from([None, b"a", b"b", b"c", b"d"]),
        st.sampled_from([None, b"", b"v" * 20, b"w" * 200]),
    ),
    min_size=1,
    max_size=5,
)


class PartitionMachine(RuleBasedStateMachine):
    """Append, read, find, trim, retain, compact, reopen: the log is what the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk()
        self.store = self._open()
        self.store.create_topic("t", new_uuid(), 1, SETTINGS, NOW_MS)
        self.kept: dict[int, Kept] = {}
        self.start = self.end = 0
        self.now_ms = NOW_MS
        self.sequence = 0
        self.epochs: dict[int, int] = {}

    def _open(self) -> Store:
        options = StoreOptions(settings_for=lambda _: SETTINGS, journal_file_bytes=4096)
        return open_store(self.disk, ROOT, NOW_MS, options)

    @property
    def partition(self) -> Partition:
        return self.store.partition(T0)

    # ---- what changes it

    @rule(some=record_lists, compression=st.sampled_from(["none", "none", "zstd"]))
    def append(self, some: list[tuple[int, bytes | None, bytes | None]], compression: str) -> None:
        self.now_ms += 700
        rows: list[batches.Fields] = [
            (self.now_ms + drift, key, value, []) for drift, key, value in some
        ]
        sender = Sender(7, 0, self.sequence)
        data = batches.encode(
            rows,
            compression=compression,
            producer_id=sender.id,
            producer_epoch=sender.epoch,
            base_sequence=sender.sequence,
        )
        assert self.partition.append(data, self.now_ms) == self.end
        # A repeat is known, however the log was opened and compacted since.
        assert self.partition.append(data, self.now_ms) == self.end
        self.epochs.setdefault(self.partition.leader_epoch, self.end)
        self.sequence += len(rows)
        for drift, key, value in some:
            self.kept[self.end] = Kept(self.now_ms + drift, key, value)
            self.end += 1

    @rule()
    def roll(self) -> None:
        if self.partition.tail:
            self.partition.roll(self.now_ms)

    @rule()
    def seal(self) -> None:
        while (job := self.partition.next_seal()) is not None:
            job.run()
            self.partition.sealed()
            self.partition.drop_trimmed(0.0)

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        self._trim_to(self.start + round((self.end - self.start) * share))

    @rule()
    def retain(self) -> None:
        self.seal()
        keep = self.partition.retained_from(self.now_ms)
        assert self.start <= keep <= self.end
        self._trim_to(keep)

    def _trim_to(self, offset: int) -> None:
        self.partition.trim(offset, 0.0, self.now_ms)
        self.start = max(self.start, offset)
        self.kept = {at: kept for at, kept in self.kept.items() if at >= self.start}
        # In the engine the journal has the new start; here the checkpoint does.
        self.store.checkpoint(self.now_ms)

    @rule(
        tombstone_age_ms=st.sampled_from([0, 5000, 10**9]),
        keys_bytes_max=st.sampled_from([1, 300, 10**9]),
    )
    def compact(self, tombstone_age_ms: int, keys_bytes_max: int) -> None:
        self.seal()
        segments = self.partition.compactable()
        if not segments:
            return
        before_ms = self.now_ms - tombstone_age_ms
        job = CompactionJob(
            directory=self.partition.directory,
            sources=[Source(s.base_offset, s.generation, s.next_offset, s.size) for s in segments],
            segment_bytes=SETTINGS.segment_bytes,
            index_bytes=300,
            time_ms=1000,
            tombstones_before_ms=before_ms,
            new_from=self.partition.compacted_to,
            keys_bytes_max=keys_bytes_max,
        )
        newest_of_batch = self._newest_times(segments)
        result = compact(self.disk, job)
        assert self.partition.compacted_to < result.end <= segments[-1].next_offset
        at = {segment.base_offset: n for n, segment in enumerate(segments)}
        for output in result.outputs:
            new = Segment(self.disk, job.directory, output.base_offset, output.generation)
            new.size, new.next_offset = output.size, output.next_offset
            new.max_timestamp, new.sealed = output.max_timestamp, True
            first = at[output.base_offset]
            assert self.partition.swap(segments[first : first + output.sources], new, 0.0)
        self.partition.compacted_to = result.end
        self._compact_model(result.end, before_ms, newest_of_batch)

    def _newest_times(self, segments: list[Segment]) -> dict[int, int]:
        """For each offset the newest time in its batch: that is what a tombstone's age is."""
        newest: dict[int, int] = {}
        for segment in segments:
            data = self.disk.read(segment.open().file, segment.size, 0)
            for _, header in batches.walk(data):
                for offset in range(header.base_offset, header.next_offset):
                    newest[offset] = header.max_timestamp
        return newest

    def _compact_model(self, end: int, before_ms: int, newest_of_batch: dict[int, int]) -> None:
        newest: dict[bytes, int] = {}
        for offset, kept in self.kept.items():
            if kept.key is not None and offset < end:
                newest[kept.key] = offset
        for offset, kept in list(self.kept.items()):
            if kept.key is None or offset >= end:
                continue
            is_old_tombstone = kept.value is None and newest_of_batch[offset] < before_ms
            if newest[kept.key] > offset or is_old_tombstone:
                del self.kept[offset]

    @rule()
    def sweep(self) -> None:
        self.partition.sweep(1.0).run()

    @rule(cut_power=st.booleans())
    def reopen(self, cut_power: bool) -> None:
        if cut_power:
            self.disk = self.disk.crash("all")
        else:
            self.store.checkpoint(self.now_ms)
            self.store.close()
        self.store = self._open()
        assert {finding.what for finding in self.store.findings} <= {"removed"}

    # ---- what must hold

    @precondition(lambda self: self.end > self.start)
    @rule(share=st.floats(0, 1), bytes_max=st.integers(1, 3000))
    def read(self, share: float, bytes_max: int) -> None:
        offset = min(self.start + int((self.end - self.start) * share), self.end - 1)
        chunk = self.partition.read(offset, bytes_max)
        found = {record.offset: record for record in records(chunk.data)}
        wanted = {at for at in self.kept if offset <= at < chunk.next_offset}
        assert wanted == {at for at in found if at >= offset}
        assert chunk.next_offset > offset or not found
        first = next(iter(batches.walk(chunk.data)), None)
        assert first is None or len(chunk.data) <= max(bytes_max, first[1].size)

    @rule(drift=st.integers(-60_000, 3000))
    def find(self, drift: int) -> None:
        wanted = self.now_ms + drift
        expected = next(
            (
                (offset, kept.timestamp)
                for offset, kept in sorted(self.kept.items())
                if kept.timestamp >= wanted
            ),
            None,
        )
        assert self.partition.find_time(wanted) == expected

    @invariant()
    def offsets_are_right(self) -> None:
        partition = self.partition
        assert (partition.start_offset, partition.high_watermark) == (self.start, self.end)
        bases = [segment.base_offset for segment in partition.segments]
        assert bases == sorted(set(bases))
        assert partition.gaps() == []

    def teardown(self) -> None:
        offset, found = self.start, dict[int, Kept]()
        while offset < self.end:
            chunk = self.partition.read(offset, 1000)
            for record in records(chunk.data):
                found[record.offset] = Kept(record.timestamp, record.key, record.value)
            if chunk.next_offset == offset:
                break
            offset = chunk.next_offset
        assert {at: kept for at, kept in found.items() if at >= self.start} == self.kept
        for epoch, first in self.epochs.items():
            known, end = self.partition.epoch_end(epoch)
            assert known == epoch if end > self.start else known <= epoch
            assert end > first or end == -1
        self.store.close()


class JournalMachine(RuleBasedStateMachine):
    """Write, sync, cut, crash: every frame that was synced is read, and none that was cut."""

    FILE_BYTES = 600

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk()
        self.disk.make_directory("/journal")
        self.disk.sync_directory("/")
        self.journal = self._journal(0)
        self.frames: list[tuple[int, int]] = []
        self.number = 0
        self.start = 0

    def _journal(self, position: int) -> Journal:
        return Journal(self.disk, "/journal", position=position, file_bytes=self.FILE_BYTES)

    @rule(size=st.sampled_from([1, 1, 2, 5, 30]))
    def write(self, size: int) -> None:
        self.number += 1
        self.journal.write(self._entries(size))
        end = self.journal.position
        self.journal.sync()
        self.frames.append((self.number, end))

    @rule(survival=st.sampled_from(SURVIVALS), size=st.integers(1, 20))
    def crash_while_writing(self, survival: Survival, size: int) -> None:
        """The last frame is not synced: it is there whole, or not at all."""
        self.number += 1
        self.journal.write(self._entries(size))
        end = self.journal.position
        self.disk = self.disk.crash(survival, names="all")
        found = self._numbers()
        if found and found[-1] == self.number:
            self.frames.append((self.number, end))
        # As a start does: behind every byte there is.
        self.journal = self._journal((end // self.FILE_BYTES + 100) * self.FILE_BYTES)
        self._check()
        self.start = self.journal.position
        self.frames.clear()
        for name in self.disk.list_directory("/journal"):
            if name.endswith(".journal"):
                self.disk.unlink(f"/journal/{name}")

    @precondition(lambda self: self.frames)
    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        count = round(len(self.frames) * share)
        if count:
            self.start = self.frames[count - 1][1]
            del self.frames[:count]
            while self.journal.cut(self.start):
                pass

    @rule()
    def prepare(self) -> None:
        if self.journal.wants_spare:
            self.journal.prepare_spare()

    @invariant()
    def frames_are_those_that_were_synced(self) -> None:
        self._check()

    @rule()
    def read_twice(self) -> None:
        """A replay that was interrupted begins again, and reads the same."""
        interrupted = read_frames(self.disk, "/journal", self.start)
        next(interrupted, None)
        del interrupted
        self._check()

    def _entries(self, size: int) -> list[bytes | memoryview]:
        """A frame of this many entries, each with the frame's number."""
        return [part for n in range(size) for part in trim_entry(b"u" * 16, n, self.number)]

    def _check(self) -> None:
        assert self._numbers() == [number for number, _ in self.frames]

    def _numbers(self) -> list[int]:
        found: list[int] = []
        for frame in read_frames(self.disk, "/journal", self.start):
            assert not isinstance(frame, Damage)
            assert len({entry.offset for entry in frame.entries}) == 1
            assert [entry.partition for entry in frame.entries] == list(range(len(frame.entries)))
            found.append(frame.entries[0].offset)
        return found


def test_a_partition_does_as_its_model() -> None:
    run_state_machine_as_test(PartitionMachine, settings=effort(80))


def test_a_journal_does_as_its_model() -> None:
    run_state_machine_as_test(JournalMachine, settings=effort(60))
