"""Staged writes: what many tasks write for one batch appears as a whole, and once.

A writer has a name, and batches with rising numbers. Tasks stage what they write; each request is
a part, and nobody sees it. A commit names the parts that count. They are copied to their topics,
and the batch is the writer's last one; in the end by one atomic append, so a commit that is asked
for again adds nothing, whatever parts it names. What nobody named is forgotten.

    staged_values.py    what is on disk       staged_view.py      writers and parts, in memory
    staged_entries.py   what is staged, checked
    staged_log.py       the topic `__staged`, and how it is cut
    staged_steps.py, staged_commits.py        a commit, step by step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from millstream.broker.staged_commits import CommitCounts, Commits, Committed, Parties, Running
from millstream.broker.staged_entries import Ready, make_ready
from millstream.broker.staged_log import StagedLog, log_failure
from millstream.broker.staged_steps import Copying
from millstream.broker.staged_values import (
    FINAL_KEPT_MS,
    Committing,
    Last,
    Part,
    StagedOptions,
    check_owner,
    check_writer,
)
from millstream.broker.staged_view import (
    WritersView,
    committing_change,
    last_change,
    part_change,
    progress_change,
)
from millstream.broker.turnstile import Turnstile
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    BatchCommitted,
    BodyInvalid,
    CommitRunning,
    EngineBusy,
    ParameterInvalid,
    StagedFull,
    StagedPartUnknown,
    StagedTopicGone,
    TooManyParts,
    TooManyWriters,
    WriterAhead,
    WriterUnknown,
)
from millstream.wire.staged import NO_PART, split_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.schedules import Schedules
    from millstream.broker.staged_view import Writer
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.traffic import Traffic
    from millstream.broker.views import Change
    from millstream.broker.wheel import Timer
    from millstream.engine.protocol import Engine

# Of requests that are being stored: they are in memory.
INCOMING_BYTES_MAX = 256 * 1024 * 1024
# How often parts that were forgotten about are looked for, at most and at least.
SWEEP_S_MIN, SWEEP_S_MAX = 1.0, 60.0
SWEEPS_IN_RETENTION = 10
# How many parts one append forgets: about a hundred kilobytes.
CHANGES_MAX = 2_000


class Attempt(NamedTuple):
    """Who stages."""

    writer: str
    batch: int
    task: int
    attempt: int
    # What tells one that begins again under a writer's name from one that goes on.
    owner: str | None = None


class Staged(NamedTuple):
    """A part, durable. Without a handle of its own when its batch is committed already."""

    part: str
    records: int
    bytes: int


class WriterFacts(NamedTuple):
    """What is told of a writer."""

    name: str
    last_batch: int | None
    last_records: int | None
    last_skipped: dict[str, int]
    last_owner: str | None
    is_last_final: bool
    committed_ms: int | None
    # The batch that is being committed; how many of its steps' batches are copied, of how many.
    committing: int | None
    done: int
    of: int
    trouble: str | None
    parts: int
    bytes: int


@dataclass(slots=True)
class StagedCounts:
    """Since the start, for the metrics page."""

    parts: int = 0
    records: int = 0
    bytes: int = 0
    repeated: int = 0
    aborted: int = 0
    expired: int = 0


class StagedParts(NamedTuple):
    """What staged writes work with."""

    schedules: Schedules
    traffic: Traffic
    options: StagedOptions
    random_hex: Callable[[int], str]


class StagedStatistics(NamedTuple):
    writers: int
    parts: int
    bytes: int
    # Of the topic `__staged`, with what is not cut yet; and parts that were moved to cut it.
    log_bytes: int
    moved: int
    running: int
    counts: StagedCounts
    commits: CommitCounts


class StagedWrites:
    __slots__ = (
        "_around",
        "_commits",
        "_incoming_bytes",
        "_incoming_parts",
        "_is_stopped",
        "_log",
        "_options",
        "_random_hex",
        "_schedules",
        "_sweeping",
        "_turnstile",
        "_view",
        "counts",
    )

    def __init__(self, engine: Engine, around: Surroundings, parts: StagedParts) -> None:
        schedules, traffic, options, self._random_hex = parts
        self._around = around
        self._schedules = schedules
        self._options = options
        self._view = WritersView()
        around.views.add(self._view)
        self._log = StagedLog(engine, around, self._view, options)
        copying = Copying(engine, around, options.step_bytes)
        parties = Parties(self._view, self._log, copying, schedules, traffic)
        self._commits = Commits(around, parties, options.commits_at_once)
        self._turnstile = Turnstile(options.stages_at_once)
        # Of requests that the view does not know yet.
        self._incoming_bytes = self._incoming_parts = 0
        self._sweeping: Timer | None = None
        self._is_stopped = False
        self.counts = StagedCounts()

    # ---- the start and the end

    def start(self) -> Pending[None]:
        """After schedules: commits go on where they were."""
        return follow(self._start())

    def _start(self) -> Generator[Pending[Any], Any, None]:
        yield from self._log.open()
        self._commits.start()
        self._sweep()

    def drain(self) -> None:
        self._commits.drain()

    def stop(self) -> None:
        self._is_stopped = True
        self._commits.stop()
        if self._sweeping is not None:
            self._around.timers.cancel(self._sweeping)

    # ---- staging

    def stage(self, attempt: Attempt, body: bytes) -> Pending[Staged]:
        """Store what a task writes for a batch; nothing of it when something is wrong."""
        return follow(self._stage(attempt, body))

    def _stage(self, attempt: Attempt, body: bytes) -> Generator[Pending[Any], Any, Staged]:
        check_writer(attempt.writer)
        check_owner(attempt.owner)
        if not body:
            raise BodyInvalid("there is nothing in the body to stage")
        self._require_room(attempt.writer, len(body))
        self._incoming_bytes += len(body)
        self._incoming_parts += 1
        yield from self._turnstile.enter()
        try:
            return (yield from self._take(attempt, body))
        finally:
            self._turnstile.leave()
            self._incoming_bytes -= len(body)
            self._incoming_parts -= 1

    def _take(self, attempt: Attempt, body: bytes) -> Generator[Pending[Any], Any, Staged]:
        entries = split_entries(body)
        ready = yield from make_ready(self._around, entries, self._options.step_bytes)
        if self._is_committed(attempt):
            return (yield from self._not_needed(attempt, ready))
        return (yield from self._store(attempt, ready))

    def _is_committed(self, attempt: Attempt) -> bool:
        writer = self._view.writers.get(attempt.writer)
        return writer is not None and writer.is_committed(attempt.batch)

    def _not_needed(self, attempt: Attempt, ready: Ready) -> Generator[Pending[Any], Any, Staged]:
        """A task that runs again, or is late. What it has would be forgotten at once."""
        yield self._around.views.settled(self._view)
        writer = self._view.writers.get(attempt.writer)
        if writer is not None and writer.last is not None:
            _require_owner(writer.name, writer.last, attempt.batch, attempt.owner)
        return Staged(NO_PART, ready.records, ready.bytes)

    def _store(self, attempt: Attempt, ready: Ready) -> Generator[Pending[Any], Any, Staged]:
        with self._log.adding():
            places = yield from self._log.append(ready.batches, ready.counts)
            if self._is_committed(attempt):
                # Meanwhile, so nobody waits for this.
                self._log.forgotten_bytes += ready.bytes
                return (yield from self._not_needed(attempt, ready))
            part = Part(
                *attempt[:4],
                self._around.clock.wall_ms(),
                ready.records,
                ready.scheduled,
                ready.bytes,
                ready.topic_refs(),
                places,
            )
            id = self._random_hex(12)
            yield self._around.views.change(self._view, [part_change(id, part)])
        self.counts.parts += 1
        self.counts.records += ready.records
        self.counts.bytes += ready.bytes
        return Staged(id, ready.records, ready.bytes)

    def _require_room(self, writer: str, size: int) -> None:
        options, view = self._options, self._view
        self._require_writer(writer)
        if self._incoming_bytes + size > INCOMING_BYTES_MAX:
            raise EngineBusy(
                f"more than {INCOMING_BYTES_MAX} bytes are about to be staged; send it later",
                limit_bytes=INCOMING_BYTES_MAX,
            )
        if len(view.parts) + self._incoming_parts >= options.parts_max:
            raise TooManyParts(
                f"{options.parts_max} parts are staged, and no more are allowed; commit or abort "
                "some, stage more in one request, or raise staged_parts_max",
                limit=options.parts_max,
            )
        if view.bytes + self._incoming_bytes + size > options.bytes_max:
            raise StagedFull(
                f"{view.bytes} bytes are staged, and {options.bytes_max} are allowed; commit or "
                "abort some, or raise staged_bytes_max",
                limit_bytes=options.bytes_max,
            )

    def _require_writer(self, name: str) -> None:
        writers = self._view.writers
        known = len(writers) - len(self._view.finals)
        if name not in writers and known >= self._options.writers_max:
            raise TooManyWriters(
                f"there are {self._options.writers_max} writers, and no more are allowed; forget "
                "those that will not write again, or raise writers_max",
                limit=self._options.writers_max,
            )

    # ---- committing

    def commit(
        self,
        name: str,
        batch: int,
        parts: Sequence[str],
        owner: str | None = None,
        *,
        is_final: bool = False,
    ) -> Pending[Committed | Running]:
        """Let the batch appear. It is over, or runs: then its `outcome` says what became of it,
        and it ends also when nobody waits. After a final one the writer is forgotten, late enough
        that the commit can be repeated."""
        wanted = Committing(batch, list(parts), self._around.clock.wall_ms(), owner, is_final)
        return follow(self._commit(name, wanted))

    def _commit(
        self, name: str, wanted: Committing
    ) -> Generator[Pending[Any], Any, Committed | Running]:
        batch, parts, owner = wanted.batch, wanted.parts, wanted.owner
        check_writer(name)
        check_owner(owner)
        writer = self._view.writers.get(name)
        if writer is not None and writer.last is not None and batch <= writer.last.batch:
            last = writer.last
            yield self._around.views.settled(self._view)
            _require_owner(name, last, batch, owner)
            self.counts.repeated += 1
            if wanted.is_final and not last.is_final and writer.last is last:
                final = msgspec.structs.replace(last, is_final=True)
                yield self._around.views.change(self._view, [last_change(name, final)])
            if batch == last.batch:
                return Committed(batch, last.records, last.skipped, already=True)
            return Committed(batch, None, {}, already=True)
        one = self._running(name)
        if one is not None:
            self._require_same(one, batch, parts, owner)
            return one
        self._require_writer(name)
        self._check_parts(name, batch, parts)
        return self._commits.begin(name, wanted)

    def _running(self, name: str) -> Running | None:
        one = self._commits.running.get(name)
        writer = self._view.writers.get(name)
        if one is None and writer is not None and writer.committing is not None:
            # It ended by a fault of ours. What is on disk says where it goes on.
            return self._commits.resume(writer, writer.committing)
        return one

    def _require_same(
        self, one: Running, batch: int, parts: Sequence[str], owner: str | None
    ) -> None:
        committing = one.committing
        is_other = None not in (owner, committing.owner) and owner != committing.owner
        if committing.batch == batch and set(committing.parts) == set(parts) and not is_other:
            return
        what = "with other parts" if committing.batch == batch else "first"
        raise CommitRunning(
            f"batch {committing.batch} of {one.writer} is being committed {what}; wait for its end",
            writer=one.writer,
            batch=committing.batch,
        )

    def _check_parts(self, name: str, batch: int, parts: Sequence[str]) -> None:
        if len(parts) > self._options.commit_parts_max:
            raise BodyInvalid(
                f"a commit has at most {self._options.commit_parts_max} parts, and this has "
                f"{len(parts)}; stage more in one request, or raise commit_parts_max",
                most=self._options.commit_parts_max,
            )
        if len(set(parts)) != len(parts):
            raise ParameterInvalid("a part is named twice", parameter="parts")
        scheduled = 0
        for id in parts:
            part = self._view.parts.get(id)
            if part is None or part.writer != name or part.batch != batch:
                raise StagedPartUnknown(
                    f"nothing is staged as {id[:40]!r} for batch {batch} of {name}, or not any "
                    "more; stage it again",
                    part=id[:40],
                )
            self._check_topics(part)
            scheduled += part.scheduled
        if scheduled:
            self._schedules.require_room(scheduled)

    def _check_topics(self, part: Part) -> None:
        for topic in part.topics:
            found = self._around.topics.by_name.get(topic.name)
            if found is None or found.uuid.bytes != topic.uuid:
                raise StagedTopicGone(
                    f"topic {topic.name} was deleted since records for it were staged; stage the "
                    "batch again",
                    topic=topic.name,
                )

    def wait(self, one: Running, seconds: float) -> EndWait:
        """For the end of a commit."""
        waiting = EndWait()
        if one.outcome.is_done or self._is_stopped:
            waiting.pending.succeed(one.outcome.is_done)
            return waiting
        timers = self._around.timers
        timer = timers.after(seconds, waiting.cancel)

        def over(_: Pending[bool]) -> None:
            timers.cancel(timer)
            if waiting.pending in one.waiting:
                one.waiting.remove(waiting.pending)

        one.waiting.append(waiting.pending)
        waiting.pending.then(over)
        return waiting

    # ---- forgetting

    def abort(self, name: str, batch: int) -> Pending[int]:
        """Forget what is staged for a batch; how many parts that were."""
        return follow(self._abort(name, batch))

    def _abort(self, name: str, batch: int) -> Generator[Pending[Any], Any, int]:
        check_writer(name)
        writer = self._view.writers.get(name)
        if writer is None:
            return 0
        if writer.is_committed(batch):
            yield self._around.views.settled(self._view)
            raise BatchCommitted(
                f"batch {batch} of {name} is committed already", writer=name, batch=batch
            )
        self._require_idle(name, batch)
        ids = list(writer.parts.get(batch, ()))
        yield from self._forget_parts(ids)
        self.counts.aborted += len(ids)
        return len(ids)

    def _require_idle(self, name: str, batch: int | None = None) -> None:
        one = self._running(name)
        if one is not None and batch in (None, one.committing.batch):
            raise CommitRunning(
                f"batch {one.committing.batch} of {name} is being committed; wait for its end",
                writer=name,
                batch=one.committing.batch,
            )

    def forget(self, name: str) -> Pending[None]:
        """Forget a writer, with what it has staged and which batch was its last."""
        return follow(self._forget(name))

    def _forget(self, name: str) -> Generator[Pending[Any], Any, None]:
        check_writer(name)
        writer = self._known(name)
        self._require_idle(name)
        ids = [id for ids in writer.parts.values() for id in ids]
        # Until the last of it is gone, it is known: a try that is cut off can be repeated.
        while len(ids) > CHANGES_MAX:
            yield from self._forget_parts(ids[:CHANGES_MAX])
            ids = [id for id in ids[CHANGES_MAX:] if id in self._view.parts]
            self._require_idle(name)
        self._count_forgotten(ids)
        changes: list[Change] = [
            last_change(name, None),
            committing_change(name, None),
            progress_change(name, None),
        ]
        yield self._around.views.change(self._view, changes + self._view.without(ids))
        self._cut()

    def _forget_parts(self, ids: Sequence[str]) -> Generator[Pending[Any], Any, None]:
        for first in range(0, len(ids), CHANGES_MAX):
            # Meanwhile some are gone, or are being committed.
            some = [id for id in ids[first : first + CHANGES_MAX] if self._is_idle(id)]
            self._count_forgotten(some)
            if some:
                yield self._around.views.change(self._view, self._view.without(some))
        self._cut()

    def _is_idle(self, id: str) -> bool:
        part = self._view.parts.get(id)
        return part is not None and not self._commits.is_busy(part)

    def _count_forgotten(self, ids: Sequence[str]) -> None:
        self._log.forgotten_bytes += sum(self._view.parts[id].bytes for id in ids)

    def _cut(self) -> None:
        if self._log.is_long():
            follow(self._log.cut(self._commits.is_busy)).then(log_failure)

    def _sweep(self) -> None:
        """Forget what nobody will commit; again after a while."""
        if self._is_stopped:
            return
        follow(self._expire()).then(log_failure)
        pause_s = self._options.retention_ms / 1000 / SWEEPS_IN_RETENTION
        pause_s = min(max(pause_s, SWEEP_S_MIN), SWEEP_S_MAX)
        self._sweeping = self._around.timers.after(pause_s, self._sweep)

    def _expire(self) -> Generator[Pending[Any], Any, None]:
        horizon_ms = self._around.clock.wall_ms() - self._options.retention_ms
        ids = [
            id
            for id, part in self._view.parts.items()
            if (part.staged_ms <= horizon_ms or self._view.is_over(part)) and self._is_idle(id)
        ]
        self.counts.expired += len(ids)
        yield from self._forget_parts(ids)
        yield from self._forget_finals()
        yield from self._log.cut(self._commits.is_busy)

    def _forget_finals(self) -> Generator[Pending[Any], Any, None]:
        horizon_ms = self._around.clock.wall_ms() - FINAL_KEPT_MS
        finals = self._view.finals
        names = [name for name in self._commits.idle_finals() if finals[name] <= horizon_ms]
        for first in range(0, len(names), CHANGES_MAX):
            some = names[first : first + CHANGES_MAX]
            changes = [last_change(name, None) for name in some if name in finals]
            if changes:
                yield self._around.views.change(self._view, changes)

    # ---- looking

    def names(self) -> list[str]:
        return sorted(self._view.writers)

    def facts(self, names: Sequence[str]) -> Pending[list[WriterFacts]]:
        """Of writers that are there; WriterUnknown for one that is not."""
        return follow(self._facts(names))

    def _facts(self, names: Sequence[str]) -> Generator[Pending[Any], Any, list[WriterFacts]]:
        found = [self._facts_of(self._known(name)) for name in names]
        yield self._around.views.settled(self._view)
        return found

    def _known(self, name: str) -> Writer:
        writer = self._view.writers.get(name)
        if writer is None:
            check_writer(name)
            raise WriterUnknown(
                f"there is no writer {name}: nothing is staged by it, and nothing committed",
                writer=name,
            )
        return writer

    def _facts_of(self, writer: Writer) -> WriterFacts:
        last, one = writer.last, self._commits.running.get(writer.name)
        return WriterFacts(
            writer.name,
            None if last is None else last.batch,
            None if last is None else last.records,
            {} if last is None else last.skipped,
            None if last is None else last.owner,
            last is not None and last.is_final,
            None if last is None else last.committed_ms,
            None if one is None else one.committing.batch,
            0 if one is None else one.progress.at,
            0 if one is None else len(one.places),
            None if one is None else one.trouble,
            sum(map(len, writer.parts.values())),
            writer.bytes,
        )

    def statistics(self) -> StagedStatistics:
        view = self._view
        return StagedStatistics(
            len(view.writers),
            len(view.parts),
            view.bytes,
            self._log.bytes,
            self._log.moved,
            len(self._commits.running),
            self.counts,
            self._commits.counts,
        )


def _require_owner(name: str, last: Last, batch: int, owner: str | None) -> None:
    """A batch that another owner has committed is not this one's. Otherwise what is new would pass
    for what is there. Who does not say, is believed; so is who comes after one that did not."""
    if None not in (owner, last.owner) and owner != last.owner:
        raise WriterAhead(
            f"the writer {name} has committed batch {last.batch} for the owner {last.owner}, and "
            f"batch {batch} of {owner} is not after it. Of a query of Spark, the checkpoint is "
            "older than what it wrote: go on with the newest one, or start with another writer, "
            "which may write records again",
            writer=name,
            batch=batch,
            last=last.batch,
        )


class EndWait:
    """A wait for the end of a commit: True when it is over."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Pending[bool] = Pending()

    def cancel(self) -> None:
        self.pending.succeed(False)
