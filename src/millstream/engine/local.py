"""The local log on the event loop: the engine that needs nothing but a directory."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import structlog

from millstream.engine.admission import admit, require_one_frame
from millstream.engine.changes import Changes
from millstream.engine.commit import Committer, as_known
from millstream.engine.operations import Append, Atomic, Note
from millstream.engine.pending import Pending
from millstream.engine.protocol import (
    Capabilities,
    Extent,
    Files,
    Health,
    Metric,
    Offsets,
    SegmentFile,
)
from millstream.engine.scheduler import LoopScheduler, Scheduler
from millstream.engine.slices import Slices
from millstream.engine.upkeep import Upkeep, UpkeepSettings
from millstream.engine.view_files import ViewFiles
from millstream.errors import (
    EngineStopped,
    LogDamaged,
    MillstreamError,
    OffsetOutOfRange,
    StorageFailed,
)
from millstream.log.disk import close_file
from millstream.log.journal import producer_ids_entry
from millstream.log.segment import Chunk, NotCached
from millstream.log.store import (
    PRODUCER_ID_BLOCK,
    StoreOptions,
    open_store,
    topic_unknown,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from millstream.clock import Clock
    from millstream.engine.protocol import Part
    from millstream.engine.turns import LoopTurns
    from millstream.log.batch import Data, Header
    from millstream.log.disk import Disk
    from millstream.log.partition import Partition, PartitionId, PartitionSettings, ReadPlan
    from millstream.log.producers import Producer
    from millstream.log.recovery import Finding
    from millstream.log.segment import Loaded
    from millstream.log.store import Store, Topic
    from millstream.log.stored import StoredChunk
    from millstream.log.view_snapshot import ViewSnapshot

T = TypeVar("T")

# What any restart may find and do, and no reason to worry.
ROUTINE = frozenset(("removed", "sealed", "tail cut", "journal tail cut"))
# How long `stop` waits for threads that are at work, before it leaves the rest to recovery.
STOP_WAIT_S = 8.0
STOP_POLL_S = 0.005


@dataclass(slots=True)
class LocalOptions:
    """How the engine is set up; the settings table fills it."""

    store: StoreOptions = field(default_factory=StoreOptions)
    upkeep: UpkeepSettings = field(default_factory=UpkeepSettings)
    # Batches from this size skip the journal, so that they are not written twice.
    bypass_bytes: int = 64 * 1024


@dataclass(slots=True)
class ReadCounts:
    cached: int = 0
    cold: int = 0
    bytes: int = 0
    damaged: int = 0


class LocalEngine:
    __slots__ = (
        "_changes",
        "_clock",
        "_committer",
        "_disk",
        "_first_kept",
        "_ids_left",
        "_ids_waiting",
        "_is_asking_ids",
        "_loop_scheduler",
        "_options",
        "_root",
        "_scheduler",
        "_store",
        "_turns",
        "_upkeep",
        "_view_files",
        "_waiting",
        "reads",
    )

    def __init__(
        self,
        disk: Disk,
        root: str,
        clock: Clock,
        options: LocalOptions,
        scheduler: Scheduler | None = None,
        *,
        turns: LoopTurns | None = None,
    ) -> None:
        """Who gathers appends at the end of a turn passes its `turns`, so that they are done at the
        end of the same one."""
        self._disk = disk
        self._root = os.path.abspath(root)
        self._clock = clock
        self._options = options
        self._scheduler = scheduler
        self._turns = turns
        self._view_files: ViewFiles | None = None
        self._loop_scheduler: LoopScheduler | None = None
        self._store: Store | None = None
        self._committer: Committer | None = None
        self._upkeep: Upkeep | None = None
        self._first_kept: Callable[[PartitionId], int | None] = lambda _: None
        self._changes: Changes | None = None
        self._waiting: dict[PartitionId, list[tuple[int, Pending[None]]]] = {}
        self._ids_left = 0
        self._ids_waiting: deque[Pending[int]] = deque()
        self._is_asking_ids = False
        self.reads = ReadCounts()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(atomic=True, durable=True, exclusive=True)

    # ---- start and stop

    async def start(self) -> None:
        """Recover in a thread, so that the health pages answer meanwhile."""
        if self._scheduler is None:
            loop = asyncio.get_running_loop()
            self._loop_scheduler = LoopScheduler(loop, self._turns)
            self._scheduler = self._loop_scheduler
        self._begin(await asyncio.to_thread(self._recover))

    def open(self) -> None:
        """Recover here and now, for a caller that has a scheduler of its own."""
        self._begin(self._recover())

    def _recover(self) -> Store:
        try:
            store = open_store(self._disk, self._root, self._clock.wall_ms(), self._options.store)
        except OSError as error:
            problem = f"opening {self._root} failed: {error}"
            raise as_known(error) or StorageFailed(problem) from error
        try:
            if store.journal.wants_spare:
                store.journal.prepare_spare()
        except OSError as error:
            # The first frame makes its own file, or says why it cannot.
            _logger().warning("journal spare not made", error=str(error))
        return store

    def _begin(self, store: Store) -> None:
        assert self._scheduler is not None
        self._view_files = ViewFiles(self._disk, self._root, self._scheduler)
        for finding in store.findings:
            level = "info" if finding.what in ROUTINE else "warning"
            getattr(_logger(), level)("recovery", **finding._asdict())
        settings = self._options.upkeep
        slices = Slices(self._clock, self._scheduler, settings.slice_s)
        committer = Committer(
            store,
            self._clock,
            self._scheduler,
            slices,
            bypass_bytes=self._options.bypass_bytes,
            advanced=self._advanced,
        )
        upkeep = Upkeep(
            store, committer, self._clock, self._scheduler, slices=slices, settings=settings
        )
        upkeep.first_kept = self._first_kept
        self._store, self._committer, self._upkeep = store, committer, upkeep
        self._changes = Changes(store, committer, upkeep, self._clock, self._scheduler)
        upkeep.start()

    async def stop(self) -> None:
        store, committer, upkeep = self._store, self._committer, self._upkeep
        changes = self._changes
        if store is None or committer is None or upkeep is None or changes is None:
            return

        def is_answered() -> bool:
            return committer.is_idle() or committer.failure is not None

        deadline = self._clock.monotonic() + STOP_WAIT_S
        await self._until(is_answered, deadline)
        await self._until(changes.is_idle, deadline)
        upkeep.stop()
        await self._until(upkeep.is_idle, deadline)
        # The threads are about to end, so from here on whoever comes is refused.
        self._store = None
        changes.close()
        await self._until(is_answered, deadline)
        if not is_answered():
            # What waits is refused, and what is in flight is answered when its sync ends.
            committer.fail("the engine has stopped")
        if self._loop_scheduler is not None:
            await self._loop_scheduler.close()
        self._close(store)

    async def _until(self, is_done: Callable[[], bool], deadline: float) -> None:
        # Threads tell the loop when they are done, not this one waiter, so it looks.
        while not is_done() and self._clock.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(STOP_POLL_S)

    def close(self) -> None:
        """Here and now, for a caller that has a scheduler of its own."""
        store, self._store = self._store, None
        if store is not None:
            self._close(store)

    def _close(self, store: Store) -> None:
        """A last checkpoint, so that the next start has nothing to replay; then let go."""
        committer, upkeep, changes = self._committer, self._upkeep, self._changes
        assert committer is not None
        assert upkeep is not None
        assert changes is not None
        is_applied = all(committer.apply(partition) for partition in committer.unapplied())
        # One that is still under way has taken some partitions over, and not given them back.
        is_idle = committer.is_idle() and upkeep.is_idle()
        upkeep.stop()
        if committer.failure is None and is_applied and is_idle:
            try:
                store.checkpoint(self._clock.wall_ms())
            except OSError as error:
                _logger().warning("no checkpoint at the end", error=str(error))
        committer.fail("the engine has stopped")
        changes.close()
        waiting, self._waiting = self._waiting, {}
        for waiters in waiting.values():
            for _, pending in waiters:
                pending.fail(_stopped())
        store.close()

    @property
    def findings(self) -> list[Finding]:
        """What recovery found and did at the start."""
        return self._running().findings

    # ---- appending

    def append(self, id: PartitionId, batch: Data, header: Header | None = None) -> Pending[int]:
        try:
            operation = self._append(id, batch, header)
        except MillstreamError as error:
            return Pending.failed(error)
        self._commit().submit(operation)
        return operation.pending

    def append_atomic(self, entries: Sequence[Part]) -> Pending[list[int]]:
        try:
            parts = [self._append(*entry) for entry in entries]
            require_one_frame(part.size for part in parts)
        except MillstreamError as error:
            return Pending.failed(error)
        if not parts:
            return Pending.of([])
        operation = Atomic(parts)
        self._commit().submit(operation)
        return operation.pending

    def _append(self, id: PartitionId, batch: Data, header: Header | None = None) -> Append:
        store = self._store
        partition = None if store is None else store.partitions.get(id)
        if partition is None:
            partition = self._running().partition(id)
        return Append(partition, batch, admit(batch, header, partition.settings))

    def producer_id(self) -> Pending[int]:
        """Ids come from blocks; a block is journalled before the first of it is used."""
        if self._store is None:
            return Pending.failed(_stopped())
        if self._ids_left and not self._ids_waiting:
            return Pending.of(self._take_id(self._store))
        pending: Pending[int] = Pending()
        self._ids_waiting.append(pending)
        if not self._is_asking_ids:
            self._ask_ids(self._store)
        return pending

    def _take_id(self, store: Store) -> int:
        self._ids_left -= 1
        return store.next_producer_id - self._ids_left - 1

    def _give_ids(self, store: Store) -> None:
        while self._ids_left and self._ids_waiting:
            self._ids_waiting.popleft().succeed(self._take_id(store))
        if self._ids_waiting and not self._is_asking_ids:
            self._ask_ids(store)

    def _ask_ids(self, store: Store) -> None:
        end = store.next_producer_id + PRODUCER_ID_BLOCK

        def apply() -> None:
            store.next_producer_id = end
            self._ids_left = PRODUCER_ID_BLOCK

        def done(noted: Pending[None]) -> None:
            self._is_asking_ids = False
            if noted.error is None:
                self._give_ids(store)
                return
            waiting, self._ids_waiting = self._ids_waiting, deque()
            for pending in waiting:
                pending.fail(noted.error)

        self._is_asking_ids = True
        note = Note(producer_ids_entry(end), apply, None)
        note.pending.then(done)
        self._commit().submit(note)

    # ---- reading

    def read(self, id: PartitionId, offset: int, bytes_max: int) -> Pending[Chunk]:
        try:
            partition = self._running().partition(id)
            while True:
                plan = partition.plan_read(offset, bytes_max)
                if plan is None:
                    return Pending.of(Chunk(memoryview(b""), offset))
                loaded = plan.segment.loaded
                if loaded is None:
                    break
                try:
                    chunk = plan.run(loaded, cached=True)
                except NotCached:
                    break
                if len(chunk.data):
                    self.reads.cached += 1
                    self.reads.bytes += len(chunk.data)
                    return Pending.of(chunk)
                offset = chunk.next_offset
        except (MillstreamError, OSError) as error:
            return Pending.failed(self._refused(error))
        return self._read_cold(partition, plan)

    def locate(self, id: PartitionId, offset: int, bytes_max: int) -> StoredChunk | None:
        try:
            plan = self._running().partition(id).plan_read(offset, bytes_max)
            found = None if plan is None else plan.locate()
        except (MillstreamError, OSError):
            return None
        if found is not None:
            self.reads.cached += 1
            self.reads.bytes += len(found.data)
        return found

    def _read_cold(self, partition: Partition, plan: ReadPlan) -> Pending[Chunk]:
        """In a thread, because the bytes have to come from the device."""
        pending: Pending[Chunk] = Pending()
        segment = plan.segment
        segment.hold()

        def work() -> tuple[Loaded, Chunk]:
            known = segment.loaded
            loaded = known or segment.load()
            try:
                return loaded, plan.run(loaded, cached=False)
            except BaseException:
                if known is None:
                    close_file(segment.disk, loaded.file)
                raise

        def done(result: tuple[Loaded, Chunk] | None, error: BaseException | None) -> None:
            if result is not None:
                self._install(plan, result[0])
            segment.release()
            if result is None:
                pending.fail(self._refused(_of_partition(partition, error)))
            elif not len(result[1].data):
                rest = self.read(partition.id, result[1].next_offset, plan.bytes_max)
                rest.then(_pass_to(pending))
            else:
                self.reads.cold += 1
                self.reads.bytes += len(result[1].data)
                pending.succeed(result[1])

        self._schedule().background(work, done)
        return pending

    def _refused(self, error: BaseException) -> BaseException:
        """Damage that a read meets is told to whoever runs the broker, not to the reader only."""
        if isinstance(error, LogDamaged):
            self.reads.damaged += 1
            _logger().warning("damage met", **error.fields)
        return _read_failed(error)

    def _install(self, plan: ReadPlan, loaded: Loaded) -> None:
        segment = plan.segment
        if segment.loaded is not loaded:
            segment.install(loaded)
        if segment.sealed and self._upkeep is not None:
            self._upkeep.opened(segment)

    def wait(self, id: PartitionId, offset: int) -> Pending[None]:
        try:
            partition = self._running().partition(id)
        except MillstreamError as error:
            return Pending.failed(error)
        if partition.high_watermark > offset:
            return Pending.of(None)
        pending: Pending[None] = Pending()
        self._waiting.setdefault(id, []).append((offset, pending))
        return pending

    def forget(self, id: PartitionId, waiting: Pending[None]) -> None:
        waiters = [one for one in self._waiting.get(id, ()) if one[1] is not waiting]
        if waiters:
            self._waiting[id] = waiters
        else:
            self._waiting.pop(id, None)

    def offsets(self, id: PartitionId) -> Offsets:
        partition = self._running().partition(id)
        return Offsets(partition.start_offset, partition.high_watermark)

    def extent(self, id: PartitionId) -> Extent:
        partition = self._running().partition(id)
        # With what is still in the journal alone.
        size = partition.size_bytes - partition.active.size + partition.tail
        return Extent(size, len(partition.segments), partition.leader_epoch)

    def files(self, id: PartitionId) -> Files | None:
        partition = self._running().partition(id)
        segments, end = partition.readable_segments()
        found = [
            SegmentFile(os.path.basename(segment.path) + ".log", segment.base_offset, size, sealed)
            for segment, size, sealed in segments
        ]
        directory = os.path.dirname(partition.directory)
        return Files(directory, partition.start_offset, end, partition.leader_epoch, found)

    def leader_epoch(self, id: PartitionId) -> int:
        return self._running().partition(id).leader_epoch

    def producer(self, id: PartitionId, producer_id: int) -> Producer | None:
        return self._running().partition(id).producers.by_id.get(producer_id)

    def set_producer(self, id: PartitionId, producer_id: int, known: Producer | None) -> None:
        self._running().partition(id).producers.put(producer_id, known)

    def forget_producers(self, id: PartitionId, before: int) -> None:
        self._running().partition(id).producers.forget_before(before)

    def epoch_end(self, id: PartitionId, epoch: int) -> tuple[int, int]:
        return self._running().partition(id).epoch_end(epoch)

    def find(self, id: PartitionId, timestamp: int) -> Pending[tuple[int, int] | None]:
        pending: Pending[tuple[int, int] | None] = Pending()
        try:
            partition = self._running().partition(id)
            found = partition.time_segments(timestamp)
        except MillstreamError as error:
            return Pending.failed(error)
        start = partition.start_offset
        for segment, _ in found:
            segment.hold()

        def work() -> tuple[int, int] | None:
            for segment, end in found:
                loaded = segment.loaded
                opened = loaded or segment.load()
                try:
                    at = segment.find_time(opened, timestamp, start, end)
                finally:
                    if loaded is None:
                        close_file(segment.disk, opened.file)
                if at is not None:
                    return at
            return None

        def done(result: tuple[int, int] | None, error: BaseException | None) -> None:
            for segment, _ in found:
                segment.release()
            if error is not None:
                pending.fail(_of_partition(partition, error))
            else:
                pending.succeed(result)

        self._schedule().background(work, done)
        return pending

    # ---- topics

    def topics(self) -> list[Topic]:
        return list(self._running().topics.values())

    def create(
        self,
        name: str,
        partitions: int,
        settings: PartitionSettings,
        uuid: bytes | None = None,
    ) -> Pending[Topic]:
        changes = self._changes
        if changes is None or self._store is None:
            return Pending.failed(_stopped())
        return changes.create(name, partitions, settings, uuid)

    def alter(
        self,
        name: str,
        *,
        settings: PartitionSettings | None = None,
        partitions: int | None = None,
    ) -> Pending[Topic]:
        changes = self._changes
        if changes is None or self._store is None:
            return Pending.failed(_stopped())
        return changes.alter(name, settings, partitions)

    def delete(self, name: str) -> Pending[None]:
        def forgotten() -> None:
            for id in [id for id in self._waiting if id.topic == name]:
                # A reader that is told stops waiting for the other partitions too.
                for _, pending in self._waiting.pop(id, ()):
                    pending.fail(topic_unknown(name))

        changes = self._changes
        if changes is None or self._store is None:
            return Pending.failed(_stopped())
        return changes.delete(name, forgotten)

    def hold(self, first_kept: Callable[[PartitionId], int | None]) -> None:
        self._first_kept = first_kept
        if self._upkeep is not None:
            self._upkeep.first_kept = first_kept

    def trim(self, id: PartitionId, offset: int) -> Pending[None]:
        try:
            partition = self._running().partition(id)
            if not 0 <= offset <= partition.high_watermark:
                raise OffsetOutOfRange(
                    f"{id} can be trimmed up to {partition.high_watermark}, not to {offset}",
                    offset=offset,
                    start=partition.start_offset,
                    end=partition.high_watermark,
                )
        except MillstreamError as error:
            return Pending.failed(error)
        assert self._upkeep is not None
        return self._upkeep.trim(partition, offset).pending

    def load_view(self, id: PartitionId, view: str) -> Pending[ViewSnapshot | None]:
        return self._files().load(self._running().partition(id), view)

    def save_view(self, id: PartitionId, view: str) -> Pending[int | None]:
        return self._files().save(self._running().partition(id), view)

    def claim(self, shard: str) -> Pending[None]:
        """There is one broker on a local log, so it owns every shard."""
        del shard
        return Pending.failed(_stopped()) if self._store is None else Pending.of(None)

    # ---- seen from outside

    def health(self) -> Health:
        if self._committer is None or self._store is None:
            return Health(ok=False, reason="the log is not open")
        return Health(self._committer.failure is None, self._committer.failure)

    def metrics(self) -> list[Metric]:
        """Totals, read from plain counters."""
        store, commit, upkeep = self._store, self._committer, self._upkeep
        if store is None or commit is None or upkeep is None:
            return []
        counts, work, reads = commit.counts, upkeep.counts, self.reads
        rows: list[tuple[str, str, str, float]] = [
            ("appends", "counter", "Appends answered.", counts.appends),
            ("append_bytes", "counter", "Bytes appended.", counts.bytes),
            (
                "appends_refused",
                "counter",
                "Appends refused: no room, no files, too many waiting.",
                counts.refused,
            ),
            ("appends_repeated", "counter", "Repeats that were answered.", counts.duplicates),
            ("sync_rounds", "counter", "Syncs, each for many appends.", counts.rounds),
            ("reads_cached", "counter", "Reads from the page cache.", reads.cached),
            ("reads_cold", "counter", "Reads that waited for the disk.", reads.cold),
            ("read_bytes", "counter", "Bytes read.", reads.bytes),
            ("reads_damaged", "counter", "Reads that met damage.", reads.damaged),
            ("checkpoints", "counter", "Checkpoints written.", work.checkpoints),
            ("segments_sealed", "counter", "Segments sealed.", work.seals),
            ("segments_retired", "counter", "Removed by retention.", work.segments_retired),
            ("compactions", "counter", "Compactions finished.", work.compactions),
            ("compactions_failed", "counter", "Compactions failed.", work.compactions_failed),
            ("records_compacted", "counter", "Superseded records.", work.records_compacted),
            ("journal_bytes", "gauge", "Bytes a replay would read.", store.journal.length_bytes),
            ("topics", "gauge", "Topics.", len(store.topics)),
            ("partitions", "gauge", "Partitions.", len(store.partitions)),
            ("leader_epoch", "gauge", "Starts of this log, counted.", store.leader_epoch),
            ("writable", "gauge", "1 unless the disk has failed.", int(commit.failure is None)),
        ]
        return [
            Metric(f"millstream_log_{name}", kind, help_, value)
            for name, kind, help_, value in rows
        ]

    # ---- inside

    def _advanced(self, partitions: Iterable[Partition]) -> None:
        """High watermarks moved: wake who waits, and see to rolled segments."""
        if self._waiting:
            for partition in partitions:
                self._wake(partition)
        if self._upkeep is not None:
            self._upkeep.appended(partitions)

    def _wake(self, partition: Partition) -> None:
        waiters = self._waiting.pop(partition.id, None)
        if waiters is None:
            return
        still = [one for one in waiters if one[0] >= partition.high_watermark]
        if still:
            self._waiting[partition.id] = still
        for offset, pending in waiters:
            if offset < partition.high_watermark:
                pending.succeed(None)

    def _running(self) -> Store:
        if self._store is None:
            raise _stopped()
        return self._store

    def _commit(self) -> Committer:
        assert self._committer is not None
        return self._committer

    def _files(self) -> ViewFiles:
        assert self._view_files is not None
        return self._view_files

    def _schedule(self) -> Scheduler:
        assert self._scheduler is not None
        return self._scheduler


def _pass_to(pending: Pending[T]) -> Callable[[Pending[T]], None]:
    def done(result: Pending[T]) -> None:
        if result.error is not None:
            pending.fail(result.error)
        else:
            pending.succeed(result.result())

    return done


def _stopped() -> EngineStopped:
    return EngineStopped("the log is not open; the broker is starting or stopping")


def _read_failed(error: BaseException | None) -> BaseException:
    if isinstance(error, OSError):
        return as_known(error) or StorageFailed(f"reading failed: {error}")
    return error or StorageFailed("reading failed")


def _of_partition(partition: Partition, error: BaseException | None) -> BaseException:
    """Whatever went wrong with the files of a topic that was deleted meanwhile, this is why."""
    return topic_unknown(partition.id.topic) if partition.is_closed else _read_failed(error)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.engine")
    return logger
