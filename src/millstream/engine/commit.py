"""Group commit: appends of one loop turn are gathered, and one sync covers all of them.

A round, for appends in mode `every`, atomic appends, trims and blocks of producer ids:

1. give each batch its place;
2. write them: small ones as one frame of the journal, big ones straight to their segments (a
   partition goes one way or the other in one round, so its bytes stay in order);
3. sync, in a thread;
4. move the high watermarks, answer.

What the journal holds is written to its segments later, several rounds at once and in slices:
before a read, before a checkpoint, when enough has come together, or after a while.

There is one round at a time. What arrives meanwhile waits for the next, which is how one sync
comes to cover many appends. Appends in the modes `interval` and `none` need no round: they are
written at the end of the turn and answered, unless their partition is in a round.
"""

from __future__ import annotations

import errno
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.engine import appends
from millstream.engine.operations import Append, Atomic, Note, Operation
from millstream.errors import (
    DiskFull,
    EngineBusy,
    MillstreamError,
    OutcomeUnknown,
    StorageFailed,
    TooManyFiles,
)
from millstream.log.disk import SyncFailed
from millstream.log.store import topic_unknown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from millstream.clock import Clock
    from millstream.engine.scheduler import Scheduler
    from millstream.engine.slices import Slices
    from millstream.log.partition import Partition, SyncJob
    from millstream.log.placing import Mark, Placed
    from millstream.log.store import Store

# A frame stays below this unless one atomic append is larger: it bounds a round's memory and
# the time that its sync takes.
FRAME_BYTES = 4 * 1024 * 1024
# And so many operations, of which so many notes: they are placed, and answered, in one call.
ROUND_OPERATIONS = 512
ROUND_NOTES = 64
# Journalled batches that wait to be written to their segments: by then, and after so long. No
# round starts while they are being written and this many more have come together.
UNAPPLIED_BYTES = 1024 * 1024
UNAPPLIED_S = 0.05
UNAPPLIED_BYTES_MAX = 8 * 1024 * 1024
# Appends that wait, all together; beyond it the caller must slow down. More than requests of
# Kafka's clients may hold by default, which is 256 MiB and the last that had room: those without
# acks are lost when they are refused.
QUEUE_BYTES_MAX = 320 * 1024 * 1024

OUT_OF_ROOM = {errno.ENOSPC, errno.EDQUOT}
OUT_OF_FILES = {errno.EMFILE, errno.ENFILE}


@dataclass(slots=True)
class _Round:
    """What is between being given a place and being answered."""

    operations: list[Operation] = field(default_factory=list)
    journalled: dict[Partition, list[Placed]] = field(default_factory=dict)
    direct: dict[Partition, list[Placed]] = field(default_factory=dict)
    marks: dict[Partition, Mark] = field(default_factory=dict)
    entries: list[Placed | bytes | memoryview] = field(default_factory=list)
    # Of the frame, once it is written.
    frame_bytes: int = 0
    syncs: list[SyncJob] = field(default_factory=list)


@dataclass(slots=True)
class CommitCounts:
    """Plain numbers for the metrics page."""

    appends: int = 0
    bytes: int = 0
    rounds: int = 0
    duplicates: int = 0
    refused: int = 0


class Committer:
    """Owns every append. `advanced` is told of partitions whose high watermark moved."""

    __slots__ = (
        "_advanced",
        "_between",
        "_bypass_bytes",
        "_clock",
        "_is_apply_due",
        "_is_applying",
        "_is_busy",
        "_is_plain",
        "_queue",
        "_queue_bytes",
        "_scheduler",
        "_slices",
        "_store",
        "_turn",
        "_unapplied",
        "_unapplied_bytes",
        "_weak",
        "counts",
        "failure",
    )

    def __init__(
        self,
        store: Store,
        clock: Clock,
        scheduler: Scheduler,
        slices: Slices,
        *,
        bypass_bytes: int,
        advanced: Callable[[Iterable[Partition]], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._scheduler = scheduler
        self._slices = slices
        self._bypass_bytes = bypass_bytes
        self._advanced = advanced
        self._turn: list[Operation] = []
        self._queue: deque[Operation] = deque()
        self._queue_bytes = 0
        # Whether nothing but small batches is in the queue.
        self._is_plain = True
        self._is_busy = False
        self._between: deque[Callable[[], None]] = deque()
        # Partitions whose journalled batches are not all in their segments yet.
        self._unapplied: dict[Partition, None] = {}
        self._unapplied_bytes = 0
        self._is_apply_due = False
        self._is_applying = False
        # Partitions with writes that neither a journal nor a sync covers, and maybe others.
        self._weak: set[Partition] = set()
        # Why nothing is written any more.
        self.failure: str | None = None
        self.counts = CommitCounts()

    def submit(self, operation: Operation) -> None:
        if self.failure is not None:
            operation.fail(self._failed())
            return
        if self._queue_bytes + operation.size > QUEUE_BYTES_MAX:
            self.counts.refused += 1
            operation.fail(
                EngineBusy(
                    f"more than {QUEUE_BYTES_MAX} bytes are waiting for the disk; send it later",
                    limit_bytes=QUEUE_BYTES_MAX,
                )
            )
            return
        self._queue_bytes += operation.size
        if not self._turn:
            self._scheduler.at_end(self._end_turn)
        self._turn.append(operation)

    def between_rounds(self, call: Callable[[], None]) -> None:
        """Call when no batch is between having a place and being in the log or the journal.

        Such calls and rounds take turns, so that neither keeps the other waiting for long.
        """
        self._between.append(call)
        if not self._is_busy and not self._turn:
            self._next()

    def is_idle(self) -> bool:
        return not self._is_busy and not self._turn and not self._queue

    def unapplied(self) -> list[Partition]:
        return list(self._unapplied)

    def apply(self, partition: Partition) -> bool:
        """Write a partition's journalled batches to its segments; False when that failed. What
        has no room stays for later."""
        if not partition.is_closed:
            try:
                partition.apply()
            except OSError as error:
                if as_known(error) is None:
                    self.fail(f"writing {partition.id} failed: {error}")
                return False
        self._unapplied.pop(partition, None)
        if partition.closing:
            self._advanced((partition,))
        return True

    # ---- a turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, []
        direct: dict[Partition, list[Append]] = {}
        for operation in turn[self._queue_first(turn) :]:
            if type(operation) is Append:
                partition = operation.partition
                if partition.settings.fsync == "every" or partition.queued:
                    partition.queued += 1
                    self._queue.append(operation)
                    if operation.size >= self._bypass_bytes:
                        self._is_plain = False
                else:
                    direct.setdefault(partition, []).append(operation)
                continue
            for partition in operation.partitions():
                # What was gathered for it so far came first.
                if partition in direct:
                    self._write_direct(partition, direct.pop(partition))
                partition.queued += 1
            self._queue.append(operation)
            self._is_plain = False
        for partition, operations in direct.items():
            self._write_direct(partition, operations)
        if not self._is_busy:
            self._next()

    def _queue_first(self, turn: list[Operation]) -> int:
        """How many operations at the start of a turn are in the queue by now: often all."""
        count = appends.queue(turn, self._queue)
        if count and appends.largest_of(turn[:count]) >= self._bypass_bytes:
            self._is_plain = False
        return count

    def _write_direct(self, partition: Partition, operations: list[Append]) -> None:
        """Modes `interval` and `none`: written is all that the answer promises."""
        self._queue_bytes -= sum(operation.size for operation in operations)
        mark = partition.mark()
        now_ms = self._clock.wall_ms()
        placed: list[Placed] = []
        taken: list[Append] = []
        try:
            partition.apply()
            taken += [one for one in operations if self._reserve(one, now_ms, placed)]
            if placed:
                partition.write_new(placed)
        except OSError as error:
            partition.rollback(mark)
            partition.erase_tail()
            self._refuse(operations, error, f"writing {partition.id} failed")
            return
        partition.settle()
        if placed:
            partition.weak_to = partition.next_offset
            self._weak.add(partition)
            partition.advance(placed[-1])
            self._advanced((partition,))
        for operation in taken:
            self._count(operation)
            operation.succeed()

    def _reserve(self, operation: Append, now_ms: int, placed: list[Placed]) -> bool:
        """False when the operation was refused. A repeated batch is answered, not placed."""
        partition = operation.partition
        try:
            if partition.is_closed:
                raise topic_unknown(partition.id.topic)
            original = partition.duplicate_of(operation.header)
        except MillstreamError as error:
            operation.fail(error)
            return False
        if original is not None:
            self.counts.duplicates += 1
            operation.offset = original
            return True
        one = partition.reserve(operation.data, operation.header, now_ms)
        operation.offset = one.base_offset
        placed.append(one)
        return True

    # ---- a round

    def _next(self) -> None:
        """Start the next round, or do one thing that waited for the time between two."""
        if not self._between:
            self._begin_round()
            return
        # Busy, so that nothing else starts from inside the call.
        self._is_busy = True
        try:
            self._between.popleft()()
        finally:
            self._is_busy = bool(self._between or self._queue)
            if self._is_busy:
                self._scheduler.soon(self._after_between)

    def _after_between(self) -> None:
        self._is_busy = False
        if self._queue:
            self._begin_round()
        else:
            self._next()

    def _begin_round(self) -> None:
        if self.failure is not None:
            _fail_all(self._queue, self._failed())
            self._queue.clear()
        is_crowded = self._is_applying and self._unapplied_bytes >= UNAPPLIED_BYTES_MAX
        if not self._queue or is_crowded:
            return
        self._is_busy = True
        operations = self._select()
        weak = self._weak_among(operations) if self._weak else []
        if weak:
            # What they have must not be lost when the frame that follows it is not.
            syncs = [partition.begin_sync() for partition in weak]
            self._scheduler.sync(
                lambda: run_syncs(syncs), lambda _, error: self._start(operations, error, syncs)
            )
        else:
            self._start(operations, None)

    def _weak_among(self, operations: list[Operation]) -> list[Partition]:
        self._weak = {one for one in self._weak if one.has_weak_tail and not one.is_closed}
        touched = {partition for operation in operations for partition in operation.partitions()}
        return list(self._weak & touched)

    def _select(self) -> list[Operation]:
        """As many as fit in a round. Journal and bypass do not mix within a partition."""
        is_room = self._queue_bytes < FRAME_BYTES and len(self._queue) <= ROUND_OPERATIONS
        if self._is_plain and is_room:
            everything = list(self._queue)
            self._queue.clear()
            return everything
        selected: list[Operation] = []
        bypassed: set[Partition] = set()
        atomic: set[Partition] = set()
        size = notes = 0
        while self._queue and size < FRAME_BYTES and len(selected) < ROUND_OPERATIONS:
            operation = self._queue[0]
            if isinstance(operation, Append):
                if operation.size >= self._bypass_bytes:
                    if operation.partition in atomic:
                        break
                    bypassed.add(operation.partition)
            else:
                if not bypassed.isdisjoint(operation.partitions()):
                    break
                if selected and size + operation.size > FRAME_BYTES:
                    break
                notes += isinstance(operation, Note)
                if notes > ROUND_NOTES:
                    break
                atomic.update(operation.partitions())
            size += operation.size
            selected.append(self._queue.popleft())
        self._is_plain = not self._queue
        return selected

    def _start(
        self,
        operations: list[Operation],
        error: BaseException | None,
        syncs: Sequence[SyncJob] = (),
    ) -> None:
        self._queue_bytes -= appends.size_of(operations)
        end_syncs(syncs, error)
        if error is not None:
            self.fail(f"a sync failed: {error}")
        if self.failure is not None:
            self._release(operations)
            _fail_all(operations, self._failed())
            self._ended()
            return
        round_ = _Round()
        now_ms = self._clock.wall_ms()
        direct: set[Partition] = set()
        if appends.largest_of(operations) >= self._bypass_bytes:
            direct = {
                operation.partition
                for operation in operations
                if isinstance(operation, Append) and operation.size >= self._bypass_bytes
            }
        at = 0
        while at < len(operations):
            if not direct:
                first = at
                at = appends.place(
                    operations,
                    first,
                    now_ms,
                    round_.marks,
                    journalled=round_.journalled,
                    entries=round_.entries,
                )
                round_.operations += operations[first:at]
                if at == len(operations):
                    break
            operation = operations[at]
            at += 1
            try:
                if isinstance(operation, Append):
                    self._place(round_, operation, now_ms, direct)
                elif isinstance(operation, Atomic):
                    self._place_all(round_, operation, now_ms)
                else:
                    round_.entries += _entry_of(operation)
            except MillstreamError as refusal:
                self._release((operation,))
                operation.fail(refusal)
            except OSError as refusal:
                self._release((operation,))
                self._refuse((operation,), refusal, "making a segment failed")
            else:
                round_.operations.append(operation)
        self._write(round_)

    def _place(
        self, round_: _Round, operation: Append, now_ms: int, direct: set[Partition]
    ) -> None:
        """Give a batch its place in its partition, or the place that it was given before."""
        partition = operation.partition
        if partition not in round_.marks:
            self._enter(round_, partition)
        if operation.header.producer_id >= 0:
            original = partition.duplicate_of(operation.header)
            if original is not None:
                self.counts.duplicates += 1
                operation.offset = original
                return
        placed = partition.reserve(operation.data, operation.header, now_ms)
        operation.offset = placed.base_offset
        if partition in direct:
            round_.direct.setdefault(partition, []).append(placed)
            return
        round_.entries.append(placed)
        ones = round_.journalled.get(partition)
        if ones is None:
            round_.journalled[partition] = [placed]
        else:
            ones.append(placed)

    def _place_all(self, round_: _Round, operation: Atomic, now_ms: int) -> None:
        """All parts of an atomic append, or none of them."""
        marks: dict[Partition, tuple[Mark, int]] = {}
        entries = len(round_.entries)
        try:
            for part in operation.parts:
                if part.partition not in marks:
                    count = len(round_.journalled.get(part.partition, ()))
                    marks[part.partition] = (part.partition.mark(), count)
                self._place(round_, part, now_ms, set())
        except (MillstreamError, OSError):
            del round_.entries[entries:]
            for partition, (mark, count) in marks.items():
                partition.rollback(mark)
                if count:
                    del round_.journalled[partition][count:]
                else:
                    round_.journalled.pop(partition, None)
            raise

    def _enter(self, round_: _Round, partition: Partition) -> None:
        """A partition's first batch in a round."""
        if partition.is_closed:
            raise topic_unknown(partition.id.topic)
        if partition.unapplied and partition.is_stuck:
            partition.apply()
        round_.marks[partition] = partition.mark()

    def _write(self, round_: _Round) -> None:
        for partition, placed in list(round_.direct.items()):
            try:
                partition.apply()
                partition.write_new(placed)
            except OSError as error:
                self._take_back(round_, [partition], error)
        if round_.entries and self.failure is None:
            try:
                round_.frame_bytes = self._store.journal.write(round_.entries)
            except OSError as error:
                self._take_back(round_, list(round_.journalled), error, notes=True)
        if self.failure is not None or not round_.operations:
            self._release(round_.operations)
            _fail_all(round_.operations, _unknown(f"{self.failure}"))
            self._ended()
            return
        round_.syncs = [partition.begin_sync() for partition in round_.direct]
        has_frame = bool(round_.entries)

        def sync() -> None:
            if has_frame:
                self._store.journal.sync()
            run_syncs(round_.syncs)

        self._scheduler.sync(sync, lambda _, error: self._synced(round_, error))

    def _take_back(
        self, round_: _Round, partitions: list[Partition], error: OSError, *, notes: bool = False
    ) -> None:
        """A write failed: undo what was placed in these partitions, and refuse it."""
        for partition in partitions:
            partition.rollback(round_.marks[partition])
            if partition in round_.direct:
                partition.erase_tail()
            round_.journalled.pop(partition, None)
            round_.direct.pop(partition, None)
        gone = set(partitions)
        if notes:
            round_.entries.clear()
        refused = [
            operation
            for operation in round_.operations
            if (notes if isinstance(operation, Note) else _touches(operation, gone))
        ]
        round_.operations = [one for one in round_.operations if one not in refused]
        self._release(refused)
        self._refuse(refused, error, "writing failed")

    def _synced(self, round_: _Round, error: BaseException | None) -> None:
        """A sync that failed is never repeated: the kernel may have dropped the pages, and tells
        only the first who asks. So a failure elsewhere in the meantime counts for this one too."""
        if error is not None:
            self.fail(f"a sync failed: {error}")
        end_syncs(round_.syncs, error)
        if self.failure is not None:
            self._release(round_.operations)
            _fail_all(round_.operations, _unknown(self.failure))
            self._ended()
            return
        self.counts.rounds += 1
        appends.advance(round_.journalled, self._unapplied)
        for partition, placed in round_.direct.items():
            partition.settle()
            partition.advance(placed[-1])
        self._unapplied_bytes += round_.frame_bytes
        self._advanced([*round_.journalled, *round_.direct])
        self._answer(round_.operations)
        self._ended()

    def _answer(self, operations: list[Operation]) -> None:
        at = 0
        while at < len(operations):
            first, at = at, appends.answer(operations, at)
            self.counts.appends += at - first
            self.counts.bytes += appends.size_of(operations[first:at])
            if at < len(operations):
                operation = operations[at]
                self._release((operation,))
                if isinstance(operation, Atomic):
                    self._count(operation)
                operation.succeed()
                at += 1

    def _ended(self) -> None:
        self._is_busy = False
        self._next()
        if self._unapplied_bytes >= UNAPPLIED_BYTES:
            self._begin_apply()
        elif self._unapplied and not self._is_apply_due:
            self._apply_later()

    # ---- from the journal to the segments

    def _apply_later(self) -> None:
        self._is_apply_due = True
        self._scheduler.later(UNAPPLIED_S, self._apply_when_due)

    def _apply_when_due(self) -> None:
        self._is_apply_due = False
        if self._is_applying:
            # What came after its partition had its step would be left out.
            self._apply_later()
        else:
            self._begin_apply()

    def _begin_apply(self) -> None:
        if not self._is_applying and self.failure is None:
            self._is_applying = True
            self._unapplied_bytes = 0
            self._slices.run(self._apply_steps(), self._applied)

    def _apply_steps(self) -> Iterator[None]:
        for partition in self.unapplied():
            if self.failure is not None:
                return
            self.apply(partition)
            yield

    def _applied(self) -> None:
        self._is_applying = False
        if self._unapplied_bytes >= UNAPPLIED_BYTES:
            self._begin_apply()
        if not self._is_busy:
            self._next()

    # ---- failure

    def fail(self, reason: str) -> None:
        """Stop writing for good. What waits is refused; what is in flight ends as unknown."""
        if self.failure is None:
            self.failure = reason
        waiting = [*self._queue, *self._turn]
        self._queue.clear()
        self._turn.clear()
        self._queue_bytes = 0
        _fail_all(waiting, self._failed())

    def _failed(self) -> StorageFailed:
        return StorageFailed(
            f"the broker stopped writing ({self.failure}); mend the disk and restart it"
        )

    def _refuse(self, operations: Iterable[Operation], error: OSError, what: str) -> None:
        known = as_known(error)
        if known is None:
            self.fail(f"{what}: {error}")
            known = _unknown(f"{what} ({error})")
        for operation in operations:
            self.counts.refused += 1
            operation.fail(known)

    def _release(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            for partition in operation.partitions():
                partition.queued -= 1

    def _count(self, operation: Append | Atomic) -> None:
        self.counts.appends += 1
        self.counts.bytes += operation.size


def run_syncs(syncs: Iterable[SyncJob]) -> None:
    """In a thread."""
    for sync in syncs:
        sync.run()


def end_syncs(syncs: Iterable[SyncJob], error: BaseException | None) -> None:
    for sync in syncs:
        if error is None:
            sync.finish()
        else:
            sync.abandon()


def _entry_of(note: Note) -> tuple[bytes]:
    if note.partition is not None and note.partition.is_closed:
        raise topic_unknown(note.partition.id.topic)
    return note.entry


def as_known(error: OSError) -> MillstreamError | None:
    """What passes when there is room again, or a file is closed; None for what does not."""
    if isinstance(error, SyncFailed):
        return None
    if error.errno in OUT_OF_ROOM:
        return DiskFull(f"no room on the disk ({error}); free some space and send it again")
    if error.errno in OUT_OF_FILES:
        return TooManyFiles(f"too many open files ({error}); raise the limit, or send it again")
    return None


def _touches(operation: Append | Atomic, partitions: set[Partition]) -> bool:
    return not partitions.isdisjoint(operation.partitions())


def _unknown(why: str) -> OutcomeUnknown:
    return OutcomeUnknown(
        f"{why}, so these records may or may not be there after a restart; "
        "read them back, or send them again with a producer id"
    )


def _fail_all(operations: Iterable[Operation], error: MillstreamError) -> None:
    for operation in operations:
        operation.fail(error)
