"""Commits of staged batches: copied in steps, each of them one atomic append with its progress.

A commit is on disk before its first step, unless one step is all of it. From then on it ends, also
after a crash: the next start goes on where the last step ended. The last step says which batch is
committed, and forgets what was staged for it and for those before it, by whatever attempt. So a
record is in its topic once, or not yet.

One step of a writer is under way at a time, so records keep the order in which they were staged;
the next is made ready meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from millstream.broker.staged_log import log_failure
from millstream.broker.staged_values import (
    FINALS_MAX,
    FORGOTTEN_AT_ONCE,
    Committing,
    Last,
    Progress,
)
from millstream.broker.staged_view import committing_change, last_change, progress_change
from millstream.broker.turnstile import Turnstile
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    EngineStopped,
    MillstreamError,
    OutcomeUnknown,
    StorageFailed,
    TopicUnknown,
)

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from millstream.broker.schedules import Schedules
    from millstream.broker.staged_log import StagedLog
    from millstream.broker.staged_steps import Copying, Step
    from millstream.broker.staged_values import Part, Place
    from millstream.broker.staged_view import Writer, WritersView
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.traffic import Traffic
    from millstream.broker.views import Change

# A step that the log refused is tried again after so long.
AGAIN_SECONDS = 1.0
# Until the next start the log takes nothing more, and what was appended last is not known.
OVER = (OutcomeUnknown, StorageFailed, EngineStopped)


class Committed(NamedTuple):
    """What became of a batch. Of an old one, how many records it had is not known any more."""

    batch: int
    records: int | None
    skipped: dict[str, int]
    # Committed before it was asked for.
    already: bool


class Running:
    """A commit that is under way."""

    __slots__ = (
        "committing",
        "gate",
        "is_stored",
        "outcome",
        "places",
        "progress",
        "trouble",
        "waiting",
        "writer",
    )

    def __init__(
        self, writer: str, committing: Committing, progress: Progress, places: Sequence[Place]
    ) -> None:
        self.writer = writer
        self.committing = committing
        # After the last step that is durable.
        self.progress = progress
        self.places = places
        # Whether it is on disk, and so will end whatever happens.
        self.is_stored = False
        self.outcome: Pending[Committed] = Pending()
        self.waiting: list[Pending[bool]] = []
        # Why it does not go on at the moment.
        self.trouble: str | None = None
        self.gate: Pending[None] | None = None


class CommitCounts:
    __slots__ = ("bytes", "commits", "dropped", "records", "refused", "skipped", "steps")

    def __init__(self) -> None:
        self.commits = self.steps = self.records = self.bytes = 0
        self.skipped = self.refused = 0
        # Parts that lost: of attempts that nobody named.
        self.dropped = 0


class Parties(NamedTuple):
    """What commits work with."""

    view: WritersView
    log: StagedLog
    copying: Copying
    schedules: Schedules
    traffic: Traffic


class Commits:
    __slots__ = (
        "_around",
        "_copying",
        "_has_stopped",
        "_log",
        "_schedules",
        "_traffic",
        "_turnstile",
        "_view",
        "counts",
        "running",
    )

    def __init__(self, around: Surroundings, parties: Parties, at_once: int) -> None:
        self._around = around
        self._view, self._log, self._copying, self._schedules, self._traffic = parties
        # By writer.
        self.running: dict[str, Running] = {}
        # Each that copies holds two steps in memory.
        self._turnstile = Turnstile(at_once)
        self._has_stopped = False
        self.counts = CommitCounts()

    def is_busy(self, part: Part) -> bool:
        one = self.running.get(part.writer)
        return one is not None and one.committing.batch == part.batch

    def idle_finals(self) -> list[str]:
        """Writers that will not write again, the oldest first."""
        return [
            name
            for name in self._view.finals
            if name not in self.running and self._view.writers[name].committing is None
        ]

    # ---- the start and the end

    def start(self) -> None:
        """When everything else is loaded: commits go on where they were."""
        for writer in list(self._view.writers.values()):
            if writer.committing is not None:
                self.resume(writer, writer.committing)

    def resume(self, writer: Writer, committing: Committing) -> Running:
        places = self._places_of(committing.parts)
        one = Running(writer.name, committing, writer.progress or Progress(), places)
        one.is_stored = True
        self._follow(one)
        return one

    def stop(self) -> None:
        self.drain()
        self._has_stopped = True
        for one in self.running.values():
            self._wake(one)

    def drain(self) -> None:
        """Before a stop: nobody waits any more."""
        for one in self.running.values():
            for waiting in list(one.waiting):
                waiting.succeed(False)

    # ---- running

    def begin(self, writer: str, committing: Committing) -> Running:
        one = Running(writer, committing, Progress(), self._places_of(committing.parts))
        self._follow(one)
        return one

    def _places_of(self, parts: Sequence[str]) -> list[Place]:
        known = self._view.parts
        return [place for id in parts if id in known for place in known[id].places]

    def _follow(self, one: Running) -> None:
        self.running[one.writer] = one
        follow(self._run(one)).then(lambda done: self._ended(one, done))

    def _ended(self, one: Running, done: Pending[Committed]) -> None:
        if isinstance(done.error, OVER) or self._has_stopped:
            # It stays as it is: the next start knows what is on disk.
            _logger().info("a commit goes on at the next start", writer=one.writer)
        elif self.running.get(one.writer) is one:
            del self.running[one.writer]
        if done.error is None:
            one.outcome.succeed(done.result())
        else:
            one.outcome.fail(done.error)
        for waiting in list(one.waiting):
            waiting.succeed(True)

    def _run(self, one: Running) -> Generator[Pending[Any], Any, Committed]:
        yield from self._turnstile.enter()
        try:
            step = yield from self._copying.step(one.places, one.progress.at)
            if step.at < len(one.places) and not one.is_stored:
                changes = [committing_change(one.writer, one.committing)]
                yield self._around.views.change(self._view, changes)
                one.is_stored = True
            while True:
                taken = yield from self._take(one, step)
                if isinstance(taken, Committed):
                    return taken
                step = taken
        finally:
            self._turnstile.leave()

    def _take(self, one: Running, step: Step) -> Generator[Pending[Any], Any, Committed | Step]:
        """Do a step; the next one, which is made ready meanwhile, or that it is over."""
        if self._has_stopped:
            raise EngineStopped("the broker is stopping; the commit goes on at the next start")
        if not step.is_current(self._around):
            return (yield from self._copying.step(one.places, one.progress.at))
        progress = _after(one.progress, step)
        is_last = step.at >= len(one.places)
        over = self._parts_over(one) if is_last else {}
        if is_last:
            changes = self._last(one, progress) + self._view.without(over)
        else:
            changes = [progress_change(one.writer, progress)]
        appended = self._around.views.change_with(self._view, changes, step.entries)
        next_ = None if is_last else follow(self._copying.step(one.places, step.at))
        try:
            offsets = yield appended
        except OVER:
            raise
        except MillstreamError as error:
            self.counts.refused += 1
            yield from self._refused(one, error)
            return (yield from self._copying.step(one.places, one.progress.at))
        one.progress, one.trouble = progress, None
        self.counts.steps += 1
        self.counts.records += step.records
        self.counts.bytes += sum(len(entry.data) for entry in step.entries)
        self.counts.skipped += sum(step.skipped.values())
        step.copied(self._traffic, self._schedules, offsets)
        if next_ is None:
            return self._over(one, over)
        ready: Step = yield next_
        return ready

    def _parts_over(self, one: Running) -> dict[str, Part]:
        """What nobody needs when the batch is committed."""
        writer = self._view.writers.get(one.writer)
        ids = [] if writer is None else self._view.until(writer, one.committing.batch)
        # Should there be more, the next sweep forgets them.
        return {id: self._view.parts[id] for id in ids[:FORGOTTEN_AT_ONCE]}

    def _last(self, one: Running, progress: Progress) -> list[Change]:
        """What the last step says of the writer."""
        now_ms = self._around.clock.wall_ms()
        batch, _, _, owner, is_final = msgspec.structs.astuple(one.committing)
        last = Last(batch, progress.records, progress.skipped, now_ms, owner, is_final)
        changes = [last_change(one.writer, last)]
        if is_final:
            too_many = max(0, len(self._view.finals) + 1 - FINALS_MAX)
            changes += [last_change(name, None) for name in self.idle_finals()[:too_many]]
        if one.is_stored:
            changes.append(committing_change(one.writer, None))
            changes.append(progress_change(one.writer, None))
        return changes

    def _over(self, one: Running, parts: Mapping[str, Part]) -> Committed:
        progress = one.progress
        self.counts.commits += 1
        self.counts.dropped += len(parts.keys() - set(one.committing.parts))
        self._log.forgotten_bytes += sum(part.bytes for part in parts.values())
        if progress.skipped:
            _logger().warning(
                "records of a committed batch were skipped",
                writer=one.writer,
                batch=one.committing.batch,
                **progress.skipped,
            )
        if self._log.is_long():
            follow(self._log.cut(self.is_busy)).then(log_failure)
        return Committed(one.committing.batch, progress.records, progress.skipped, already=False)

    def _refused(self, one: Running, error: MillstreamError) -> Generator[Pending[Any], Any, None]:
        """Nothing of the step is there. Nobody was promised anything yet, or it is tried again."""
        if isinstance(error, TopicUnknown):
            # Deleted in this moment: the next try leaves it out.
            yield self._around.breath()
            return
        if not one.is_stored:
            raise error
        one.trouble = error.message
        _logger().warning(
            "a step of a commit was refused; it is tried again",
            writer=one.writer,
            batch=one.committing.batch,
            error=error.message,
        )
        gate = one.gate = Pending[None]()
        timer = self._around.timers.after(AGAIN_SECONDS, lambda: self._wake(one))
        yield gate
        self._around.timers.cancel(timer)

    def _wake(self, one: Running) -> None:
        gate, one.gate = one.gate, None
        if gate is not None:
            gate.succeed(None)


def _after(progress: Progress, step: Step) -> Progress:
    skipped = dict(progress.skipped)
    for why, count in step.skipped.items():
        skipped[why] = skipped.get(why, 0) + count
    return Progress(step.at, progress.records + step.records, skipped)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
