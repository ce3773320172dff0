"""What the log needs done beside appends: seals, checkpoints, interval syncs, retention,
compaction. The loop decides and swaps results in; threads and child processes do the work. What
the loop does for each of many partitions it does in slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from millstream.engine.commit import as_known, end_syncs, run_syncs
from millstream.engine.operations import Note
from millstream.engine.slices import SLICE_S
from millstream.errors import MillstreamError
from millstream.log.compaction import CompactionJob, CompactionResult, Source
from millstream.log.journal import trim_entry
from millstream.log.partition import remove_segment_files
from millstream.log.segment import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from millstream.clock import Clock
    from millstream.engine.commit import Committer
    from millstream.engine.scheduler import Cancel, Scheduler
    from millstream.engine.slices import Slices
    from millstream.log.partition import Partition, PartitionId, SweepJob, SyncJob
    from millstream.log.store import CheckpointJob, Store

# Sealed segments that stay open for reading: each holds a file and its indexes in memory.
OPEN_SEGMENTS_MAX = 128


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    fsync_interval_s: float = 1.0
    checkpoint_interval_s: float = 60.0
    journal_bytes: int = 64 * 1024 * 1024
    retention_interval_s: float = 300.0
    compaction_interval_s: float = 900.0
    file_delete_delay_s: float = 60.0
    # How long all this may keep the loop at a time, but for the step that comes last.
    slice_s: float = SLICE_S


@dataclass(slots=True)
class UpkeepCounts:
    checkpoints: int = 0
    seals: int = 0
    segments_retired: int = 0
    compactions: int = 0
    compactions_failed: int = 0
    records_compacted: int = 0


class Upkeep:
    __slots__ = (
        "_after",
        "_checkpoint_began",
        "_clock",
        "_committer",
        "_is_checkpointing",
        "_is_compacting",
        "_is_preparing",
        "_is_retaining",
        "_is_stopped",
        "_is_syncing",
        "_open",
        "_scheduler",
        "_sealing",
        "_settings",
        "_slices",
        "_store",
        "_timers",
        "counts",
        "first_kept",
    )

    def __init__(
        self,
        store: Store,
        committer: Committer,
        clock: Clock,
        scheduler: Scheduler,
        *,
        slices: Slices,
        settings: UpkeepSettings,
    ) -> None:
        self._store = store
        self._committer = committer
        self._clock = clock
        self._scheduler = scheduler
        self._slices = slices
        self._settings = settings
        self._timers: dict[str, Cancel] = {}
        self._after: list[Callable[[], None]] = []
        self._sealing: set[Partition] = set()
        self._open: dict[Segment, None] = {}
        self._is_checkpointing = False
        self._is_compacting = False
        # When the newest checkpoint that is in place was captured; opening the store made one.
        self._checkpoint_began = clock.monotonic()
        self._is_preparing = False
        self._is_retaining = False
        self._is_syncing = False
        self._is_stopped = False
        self.counts = UpkeepCounts()
        # From where on retention removes nothing, for a partition; None is no limit.
        self.first_kept: Callable[[PartitionId], int | None] = lambda _: None

    def start(self) -> None:
        settings = self._settings
        self._every("sync", settings.fsync_interval_s, self.sync_interval)
        self._every("checkpoint", settings.checkpoint_interval_s, self.checkpoint)
        self._every("retention", settings.retention_interval_s, self.retain)
        self._every("compaction", settings.compaction_interval_s, self.compact)
        self._every("sweep", max(1.0, settings.file_delete_delay_s / 4), self.sweep)
        self.prepare_journal()

    def stop(self) -> None:
        self._is_stopped = True
        for timer in self._timers.values():
            timer.cancel()

    def is_idle(self) -> bool:
        return not (
            self._sealing or self._is_checkpointing or self._is_preparing or self._is_syncing
        )

    def _every(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        def run() -> None:
            if self._is_stopped:
                return
            if self._committer.failure is None:
                call()
            self._timers[name] = self._scheduler.later(seconds, run)

        self._timers[name] = self._scheduler.later(seconds, run)

    # ---- after appends

    def appended(self, partitions: Iterable[Partition]) -> None:
        """Partitions have grown: seal what rolled, and keep the journal short."""
        for partition in partitions:
            if partition.closing and partition not in self._sealing:
                self._scheduler.soon(partial(self.seal, partition))
        journal = self._store.journal
        if journal.length_bytes > self._settings.journal_bytes:
            self.checkpoint()
        self.prepare_journal()

    def prepare_journal(self) -> None:
        """Have the next journal file ready before it is needed."""
        journal = self._store.journal
        if self._is_preparing or self._is_stopped:
            return
        try:
            if not journal.wants_spare:
                return
        except OSError:
            # The next frame meets it too, and has somebody to tell.
            return
        self._is_preparing = True

        def done(_: None, error: BaseException | None) -> None:
            self._is_preparing = False
            if error is not None:
                # The next frame makes its own file, or says why it cannot.
                _logger().warning("journal spare not made", error=str(error))

        self._scheduler.background(journal.prepare_spare, done)

    def seal(self, partition: Partition) -> None:
        if partition in self._sealing or partition.is_closed or self._is_stopped:
            return
        job = partition.next_seal()
        if job is None:
            return
        segment = partition.closing[0].segment
        segment.hold()
        self._sealing.add(partition)

        def done(_: None, error: BaseException | None) -> None:
            self._sealing.discard(partition)
            segment.release()
            if partition.is_closed:
                return
            if error is not None:
                self._failed(f"sealing {segment.path} failed", error)
                return
            self.counts.seals += 1
            partition.sealed()
            partition.drop_trimmed(self._clock.monotonic())
            self.opened(segment)
            self.seal(partition)

        self._scheduler.background(lambda: job.run(self._has_failed), done)

    def opened(self, segment: Segment) -> None:
        """A sealed segment holds a file: keep the number of them bounded."""
        self._open.pop(segment, None)
        self._open[segment] = None
        while len(self._open) > OPEN_SEGMENTS_MAX:
            oldest = next(iter(self._open))
            del self._open[oldest]
            if oldest.readers:
                self._open[oldest] = None
                return
            oldest.close()

    # ---- checkpoints and interval syncs

    def checkpoint(self) -> None:
        if self._is_checkpointing or self._is_stopped or not self._store.has_changed:
            return
        self._is_checkpointing = True
        self._committer.between_rounds(self._begin_checkpoint)

    def _begin_checkpoint(self) -> None:
        """Between two rounds, as every slice of capturing is: a partition with a batch under way
        has no state that could be kept."""
        began = self._clock.monotonic()
        job = self._store.begin_checkpoint()
        partitions = list(self._store.partitions.values())
        self._slices.run(
            self._capture_steps(job, partitions),
            lambda: self._captured(job, began, len(partitions)),
            self._committer.between_rounds,
        )

    def _capture_steps(self, job: CheckpointJob, partitions: list[Partition]) -> Iterator[None]:
        now_ms = self._clock.wall_ms()
        for partition in partitions:
            if self._is_stopped or self._committer.failure is not None:
                return
            if partition.unapplied and not self._committer.apply(partition):
                # The journal has the only copy of something: it must not be cut now.
                return
            self._store.capture(partition, job, now_ms)
            yield

    def _captured(self, job: CheckpointJob, began: float, count: int) -> None:
        if job.captured < count:
            job.abandon()
            self._end_checkpoint()
            return
        self._scheduler.background(
            lambda: job.run(self._has_failed),
            lambda _, error: self._checkpointed(job, began, error),
        )

    def _checkpointed(self, job: CheckpointJob, began: float, error: BaseException | None) -> None:
        if error is not None:
            job.abandon()
            self._failed("a checkpoint failed", error)
            self._end_checkpoint()
            return
        self.counts.checkpoints += 1
        self._checkpoint_began = began
        self._slices.run(self._finish_steps(job), self._end_checkpoint)

    def _finish_steps(self, job: CheckpointJob) -> Iterator[None]:
        yield from self._store.finish_checkpoint(job)
        try:
            # Once the engine has stopped, the journal may be somebody else's.
            while self._committer.failure is None and self._store.cut_journal():
                yield
        except OSError as problem:
            # The files stay, and count again when the next checkpoint cuts.
            _logger().warning("journal files not cut", error=str(problem))

    def _end_checkpoint(self) -> None:
        self._is_checkpointing = False
        self._run_after()

    def after_syncs(self, call: Callable[[], None]) -> bool:
        """False when a thread is at work on the directories of partitions; `call` runs when
        it is done."""
        if self._is_checkpointing or self._is_syncing:
            self._after.append(call)
            return False
        return True

    def _run_after(self) -> None:
        after, self._after = self._after, []
        for call in after:
            call()

    def sync_interval(self) -> None:
        """Mode `interval`: make durable what was written since the last time."""
        if self._is_syncing:
            return
        self._is_syncing = True
        syncs: list[SyncJob] = []
        self._slices.run(self._sync_steps(syncs), lambda: self._run_interval(syncs))

    def _sync_steps(self, syncs: list[SyncJob]) -> Iterator[None]:
        for partition in list(self._store.partitions.values()):
            if partition.settings.fsync == "interval" and partition.has_weak_tail:
                syncs.append(partition.begin_sync())
            yield

    def _run_interval(self, syncs: list[SyncJob]) -> None:
        if not syncs or self._is_stopped:
            for sync in syncs:
                sync.abandon()
            self._end_interval()
            return

        def done(_: None, error: BaseException | None) -> None:
            if error is not None:
                self._failed("a sync failed", error)
            self._slices.run(_end_steps(syncs, error), self._end_interval)

        self._scheduler.background(lambda: run_syncs(syncs), done)

    def _end_interval(self) -> None:
        self._is_syncing = False
        self._run_after()

    # ---- retention and compaction

    def retain(self) -> None:
        if not self._is_retaining:
            self._is_retaining = True
            self._slices.run(self._retain_steps(), self._end_retaining)

    def _retain_steps(self) -> Iterator[None]:
        for partition in list(self._store.partitions.values()):
            if self._is_stopped or self._committer.failure is not None:
                return
            self.retain_partition(partition)
            yield

    def _end_retaining(self) -> None:
        self._is_retaining = False

    def retain_partition(self, partition: Partition) -> None:
        now_ms = self._clock.wall_ms()
        if partition.is_closed:
            return
        self.seal(partition)
        if not partition.queued and partition.rolls_by_age(now_ms):
            try:
                partition.roll(now_ms)
            except OSError as error:
                _logger().warning("roll failed", partition=str(partition.id), error=str(error))
                return
            self.seal(partition)
        if partition.settings.compact:
            return
        keep = partition.retained_from(now_ms, self.first_kept(partition.id))
        if keep > partition.start_offset:
            before = len(partition.segments)
            self.trim(partition, keep).pending.then(
                lambda _: self._count_retired(before - len(partition.segments))
            )

    def _count_retired(self, count: int) -> None:
        self.counts.segments_retired += max(0, count)

    def trim(self, partition: Partition, offset: int) -> Note:
        """Journal the new start; when that is durable, let go of what lies before it."""

        def apply() -> None:
            partition.trim(offset, self._clock.monotonic(), self._clock.wall_ms())
            self.appended((partition,))

        entry = trim_entry(partition.uuid, partition.id.number, offset)
        note = Note(entry, apply, partition)
        self._committer.submit(note)
        return note

    def compact(self) -> None:
        """One partition after the other: a second child would only take the disk from it."""
        if not self._is_compacting:
            self._is_compacting = True
            waiting = [one for one in self._store.partitions.values() if one.settings.compact]
            self._compact_next(waiting)

    def _compact_next(self, waiting: list[Partition]) -> None:
        found: list[tuple[Partition, list[Segment]]] = []

        def done() -> None:
            self._is_compacting = bool(found)
            for partition, segments in found:
                self._compact(partition, segments, lambda: self._compact_next(waiting))

        self._slices.run(self._compactable_steps(waiting, found), done)

    def _compactable_steps(
        self, waiting: list[Partition], found: list[tuple[Partition, list[Segment]]]
    ) -> Iterator[None]:
        """Up to the first of the partitions that has something to compact."""
        while waiting and not self._is_stopped:
            partition = waiting.pop()
            segments = [] if partition.is_closed else partition.compactable()
            if segments:
                found.append((partition, segments))
                # In the same slice as what is done with them: they may be gone by the next.
                return
            yield

    def _compact(
        self, partition: Partition, segments: list[Segment], then: Callable[[], None]
    ) -> None:
        settings = partition.settings
        job = CompactionJob(
            directory=partition.directory,
            sources=[Source.of(segment) for segment in segments],
            segment_bytes=settings.segment_bytes,
            index_bytes=settings.intervals.index_bytes,
            time_ms=settings.intervals.time_ms,
            tombstones_before_ms=self._clock.wall_ms() - settings.tombstone_age_ms,
            new_from=partition.compacted_to,
        )

        def done(result: CompactionResult | None, error: BaseException | None) -> None:
            try:
                if partition.is_closed:
                    return
                if result is not None:
                    self._swap(partition, segments, result)
                    return
                # The sources are untouched; what the child left is removed at the next start.
                self.counts.compactions_failed += 1
                _logger().error("compaction failed", partition=str(partition.id), error=str(error))
            finally:
                then()

        self._scheduler.compact(job, done)

    def _swap(
        self, partition: Partition, segments: list[Segment], result: CompactionResult
    ) -> None:
        now = self._clock.monotonic()
        by_base = {segment.base_offset: at for at, segment in enumerate(segments)}
        for output in result.outputs:
            new = Segment(
                self._store.disk, partition.directory, output.base_offset, output.generation
            )
            new.size, new.next_offset = output.size, output.next_offset
            new.max_timestamp = output.max_timestamp
            new.intervals = partition.settings.intervals
            new.sealed = True
            at = by_base[output.base_offset]
            if not partition.swap(segments[at : at + output.sources], new, now):
                remove_segment_files(self._store.disk, new.path)
        partition.compacted_to = max(partition.compacted_to, result.end)
        self.counts.compactions += 1
        self.counts.records_compacted += result.records_before - result.records_after

    def sweep(self) -> None:
        """Unlink what left the log long enough ago, and before the last checkpoint: until then
        recovery may need what a trimmed segment says of producers."""
        before = self._clock.monotonic() - self._settings.file_delete_delay_s
        before = min(before, self._checkpoint_began)
        self._slices.run(self._sweep_steps(before), lambda: None)

    def _sweep_steps(self, before: float) -> Iterator[None]:
        for partition in list(self._store.partitions.values()):
            if self._is_stopped:
                return
            if partition.doomed and not partition.is_closed:
                self._sweep(partition.sweep(before))
            yield

    def _sweep(self, job: SweepJob) -> None:
        def done(_: int | None, error: BaseException | None) -> None:
            if error is not None and not job.partition.is_closed:
                job.abandon()
                name = str(job.partition.id)
                _logger().warning("unlink failed", partition=name, error=str(error))

        if job.swept:
            self._scheduler.background(job.run, done)

    def _has_failed(self) -> bool:
        return self._committer.failure is not None

    def _failed(self, what: str, error: BaseException) -> None:
        """A background step on the disk failed. Without room, or files, it is done again later;
        else what it was to make durable may not be."""
        if not isinstance(error, (OSError, MillstreamError)):
            raise error
        if isinstance(error, OSError) and as_known(error) is not None:
            _logger().warning("put off", what=what, error=str(error))
        else:
            self._committer.fail(f"{what}: {error}")


def _end_steps(syncs: list[SyncJob], error: BaseException | None) -> Iterator[None]:
    for sync in syncs:
        end_syncs((sync,), error)
        yield


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.engine")
    return logger
