"""Redrive: dead letters are put back, by jobs that survive a restart and double nothing.

A job goes through the partitions of the dead letters one after the other, each from its front, up
to where it ended when the job began. Each step is one atomic append: the records in the topics
that they go to, the marks that they are gone from the dead letters, and how far the job is. So
after any crash a record is in one place, and the job goes on behind it.

What cannot be put back is counted with its reason, and stays. Jobs do one step at a time and let
others have their turn after each; a rate limit is a pause between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import structlog

from millstream.broker.dead_letter_reading import letter_of
from millstream.broker.dead_letter_values import NORMAL_LANE, SUFFIX, is_dead_letter_topic
from millstream.broker.dead_letter_view import Place, job_changes, progress_change
from millstream.broker.outgoing import size_of
from millstream.broker.redrive_jobs import (
    EXAMPLES_MAX,
    RATE_MAX,
    Example,
    Job,
    JobFacts,
    JobState,
    Progress,
    RedriveOptions,
    Running,
    skipped_more,
)
from millstream.broker.redrive_routes import Outgoings, fields_of, target_of
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    AppendTooLarge,
    EngineStopped,
    LogDamaged,
    MillstreamError,
    OutcomeUnknown,
    ParameterInvalid,
    RedriveRunning,
    RedriveUnknown,
    StorageFailed,
    TooManyRedrives,
)
from millstream.log.batch import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.dead_letter_marks import DeadLetterMarks
    from millstream.broker.dead_letter_reading import DeadLetterReading
    from millstream.broker.redrive_jobs import RedriveWish
    from millstream.broker.topics import Topic
    from millstream.broker.views import Change, Entry
    from millstream.log.batch import Record

# What one step reads, and so moves, at most: a few milliseconds. One record is taken whole.
STEP_RECORDS = 250
STEP_BYTES = 512 * 1024
# With a rate, so many steps a second at most.
STEPS_PER_SECOND = 4
# And so many records are looked at: more would be read again by the next one.
UNMATCHED_RECORDS = 20
# A step that was late lets the next ones begin so much earlier, and not more.
CATCH_UP_SECONDS = 0.25
# Steps that moved nothing are stored so often; after a crash they are done again.
UNSAVED_STEPS = 50
# The front of a partition is trimmed after so many steps, and when it is done.
TIDY_STEPS = 20
# A step that the log refused, or that met a topic that changed, is tried again after so long.
AGAIN_SECONDS = 1.0
# Jobs that are over and still listed, whatever their age: about a megabyte.
HISTORY_MAX = 1_000
# Until the next start the log takes nothing more, and what was appended last is not known.
_OVER = (OutcomeUnknown, StorageFailed, EngineStopped)


class _Plan(NamedTuple):
    """What one step would do."""

    progress: Progress
    moved: list[int]
    entries: list[Entry]
    # How many go to each topic, and those of them that have to be made ready for lanes first.
    topics: dict[str, int]
    without_lanes: set[str]


class Redrive:
    __slots__ = (
        "_has_stopped",
        "_marks",
        "_options",
        "_over",
        "_random_hex",
        "_reading",
        "_running",
        "_steps",
        "redriven",
    )

    def __init__(
        self,
        marks: DeadLetterMarks,
        reading: DeadLetterReading,
        options: RedriveOptions,
        random_hex: Callable[[int], str],
    ) -> None:
        self._marks = marks
        self._reading = reading
        self._options = options
        self._random_hex = random_hex
        self._running: dict[str, Running] = {}
        # Jobs that are over, the oldest end first.
        self._over: dict[str, tuple[Job, Progress]] = {}
        self._has_stopped = False
        self._steps = 0
        # Records put back, by the topic that they died in, for the metrics page.
        self.redriven: dict[str, int] = {}
        marks.around.topics.watch_deleted(self._topic_deleted)

    def _topic_deleted(self, topic: Topic) -> None:
        if is_dead_letter_topic(topic.name):
            self.redriven.pop(topic.name.removesuffix(SUFFIX), None)

    # ---- asking for one

    def begin(self, name: str, wish: RedriveWish) -> Pending[JobFacts]:
        """Done when the job is on disk; then it runs."""
        return follow(self._begin(name, wish))

    def _begin(self, name: str, wish: RedriveWish) -> Generator[Pending[Any], Any, JobFacts]:
        around = self._marks.around
        where = self._reading.where(name)
        self._check(where.dlq_name, wish)
        dlq = where.dlq
        ends: list[int] = []
        if dlq is not None:
            ends = [around.reader.offsets(dlq.name, n)[1] for n in range(dlq.partitions)]
        job = Job(
            topic=where.origin,
            dlq=where.dlq_name,
            dlq_uuid=b"" if dlq is None else dlq.uuid.bytes,
            wanted=wish.wanted,
            to=wish.to,
            rate=wish.rate,
            is_dry_run=wish.is_dry_run,
            started_ms=around.clock.wall_ms(),
            ends=ends,
            total=0 if dlq is None else self._marks.left(dlq),
        )
        one = Running(self._random_hex(8), job, Progress(), around.clock.monotonic())
        self._running[one.id] = one
        changes = job_changes(one.id, msgspec.json.encode(job), msgspec.json.encode(one.progress))
        try:
            yield around.views.change(self._marks.view, changes)
        except MillstreamError:
            del self._running[one.id]
            raise
        self._follow(one)
        return self._facts(one)

    def _check(self, dlq_name: str, wish: RedriveWish) -> None:
        wish.wanted.check()
        if wish.rate is not None and not 1 <= wish.rate <= RATE_MAX:
            raise ParameterInvalid(
                f"rate is 1 to {RATE_MAX} records a second, not {wish.rate}", parameter="rate"
            )
        if wish.to == dlq_name:
            raise ParameterInvalid(
                f"{dlq_name} is where the dead letters are; name another topic", parameter="to"
            )
        if wish.to is not None:
            self._marks.around.topics.get(wish.to)
        if len(self._running) >= self._options.redrives_max:
            raise TooManyRedrives(
                f"{len(self._running)} redrives run, and {self._options.redrives_max} may; wait "
                "for one to end, cancel one, or raise redrives_max",
                limit=self._options.redrives_max,
            )
        for one in self._running.values():
            # One that changes nothing is in nobody's way.
            if one.job.dlq == dlq_name and not one.job.is_dry_run and not wish.is_dry_run:
                raise RedriveRunning(
                    f"redrive {one.id} of {one.job.topic} runs; wait for its end, or cancel it",
                    topic=one.job.topic,
                    redrive=one.id,
                )

    # ---- looking, cancelling

    @property
    def running(self) -> int:
        return len(self._running)

    def jobs(self) -> Pending[list[JobFacts]]:
        """Those that run, then those that are over, the newest first."""
        return follow(self._jobs())

    def _jobs(self) -> Generator[Pending[Any], Any, list[JobFacts]]:
        self._expire()
        running = [self._facts(one) for one in reversed(self._running.values())]
        over = [JobFacts(id, *one, None, None) for id, one in reversed(self._over.items())]
        yield self._marks.around.views.settled(self._marks.view)
        return running + over

    def get(self, id: str) -> Pending[JobFacts]:
        return follow(self._get(id))

    def _get(self, id: str) -> Generator[Pending[Any], Any, JobFacts]:
        yield self._marks.around.views.settled(self._marks.view)
        one = self._running.get(id)
        if one is not None:
            return self._facts(one)
        if id not in self._over:
            raise RedriveUnknown(
                f"there is no redrive {id[:40]!r}, or it was over long ago", redrive=id[:40]
            )
        return JobFacts(id, *self._over[id], None, None)

    def cancel(self, id: str) -> Pending[JobFacts]:
        """Done when it is over: what a step has begun, it ends. One that is over stays as it is."""
        return follow(self._cancel(id))

    def _cancel(self, id: str) -> Generator[Pending[Any], Any, JobFacts]:
        one = self._running.get(id)
        if one is not None:
            one.is_cancelled = True
            ended: Pending[bool] = Pending()
            one.ended.append(ended)
            self._wake(one)
            yield ended
        return (yield from self._get(id))

    def wait(self, id: str, seconds: float) -> EndWait:
        """For the end of a job; one that is not there does not let anybody wait."""
        waiting = EndWait()
        one = self._running.get(id)
        if one is None or self._has_stopped:
            waiting.cancel()
            return waiting
        timers = self._marks.around.timers
        timer = timers.after(seconds, waiting.cancel)

        def over(_: Pending[bool]) -> None:
            timers.cancel(timer)
            if waiting.pending in one.ended:
                one.ended.remove(waiting.pending)

        one.ended.append(waiting.pending)
        waiting.pending.then(over)
        return waiting

    def _facts(self, one: Running) -> JobFacts:
        return one.facts(self._marks.around.clock.monotonic(), self._left_of(one))

    def _left_of(self, one: Running) -> int:
        """How many offsets it has not looked at."""
        job, progress = one.job, one.progress
        return sum(
            max(0, end - (progress.offset if number == progress.partition else 0))
            for number, end in enumerate(job.ends)
            if number >= progress.partition
        )

    # ---- running

    def _follow(self, one: Running) -> None:
        def ended(done: Pending[None]) -> None:
            if done.error is not None:
                _logger().error(
                    "a redrive stopped; it goes on after the next start",
                    redrive=one.id,
                    topic=one.job.topic,
                    error=repr(done.error),
                )

        follow(self._run(one)).then(ended)

    def _run(self, one: Running) -> Generator[Pending[Any], Any, None]:
        clock = self._marks.around.clock
        while not self._has_stopped:
            if one.is_cancelled:
                state: JobState | None = "cancelled"
            else:
                rest = one.due_s - clock.monotonic()
                if rest > 0:
                    yield from self._pause(one, rest)
                    continue
                state = None
            try:
                is_over = (
                    (yield from self._end(one, state)) if state else (yield from self._step(one))
                )
            except _OVER:
                # The next start knows what is on disk, and goes on from there.
                raise
            except MillstreamError as error:
                _logger().warning(
                    "a step of a redrive was refused; it is tried again",
                    redrive=one.id,
                    topic=one.job.topic,
                    error=error.message,
                )
                one.due_s = clock.monotonic() + AGAIN_SECONDS
                is_over = False
                if one.is_cancelled:
                    yield from self._pause(one, AGAIN_SECONDS)
            if is_over:
                return
            yield self._breath()

    def _pause(self, one: Running, seconds: float) -> Generator[Pending[Any], Any, None]:
        gate = one.gate = Pending[None]()
        timers = self._marks.around.timers
        timer = timers.after(seconds, lambda: self._wake(one))
        yield gate
        timers.cancel(timer)

    def _wake(self, one: Running) -> None:
        gate, one.gate = one.gate, None
        if gate is not None:
            gate.succeed(None)

    def _step(self, one: Running) -> Generator[Pending[Any], Any, bool]:
        """Whether it was the last."""
        job, around = one.job, self._marks.around
        dlq = around.topics.by_name.get(job.dlq)
        if job.ends and (dlq is None or dlq.uuid.bytes != job.dlq_uuid):
            return (yield from self._end(one, "failed", "topic_unknown"))
        at = None if dlq is None else self._next(one, dlq)
        if dlq is None or at is None:
            return (yield from self._end(one, "done"))
        number, offset = at
        try:
            count = max(_room(job), UNMATCHED_RECORDS)
            fetched = yield around.reader.fetch(dlq.name, number, offset, count, STEP_BYTES)
        except LogDamaged as error:
            last = error.fields.get("last")
            if not isinstance(last, int) or last < offset:
                raise
            self._pass_damage(one, number, offset, min(last + 1, job.ends[number]))
            return False
        next_offset = min(fetched.next_offset, job.ends[number])
        while True:
            yield from self._marks.free(dlq)
            if not self._marks.is_there(dlq):
                return False
            plan = self._plan(one, dlq, number, fetched.records, next_offset)
            if not plan.without_lanes:
                break
            for name in sorted(plan.without_lanes):
                yield around.topics.use_lanes(name)
        yield from self._take(one, dlq, number, plan)
        return False

    def _next(self, one: Running, dlq: Topic) -> tuple[int, int] | None:
        """Where the next step begins; None at the end."""
        number, offset = one.progress.partition, one.progress.offset
        while number < len(one.job.ends):
            start, _ = self._marks.around.reader.offsets(dlq.name, number)
            if max(offset, start) < one.job.ends[number]:
                return number, max(offset, start)
            if not one.job.is_dry_run:
                self._marks.tidy(dlq, number)
            number, offset = number + 1, 0
        return None

    def _pass_damage(self, one: Running, number: int, offset: int, next_offset: int) -> None:
        before = one.progress
        one.progress = msgspec.structs.replace(
            before,
            partition=number,
            offset=next_offset,
            skipped=skipped_more(before.skipped, {"log_damaged": next_offset - offset}),
        )

    def _plan(
        self, one: Running, dlq: Topic, number: int, records: Sequence[Record], next_offset: int
    ) -> _Plan:
        """What becomes of records, as topics and marks are now."""
        job, before, around = one.job, one.progress, self._marks.around
        place, view = Place(dlq.uuid.bytes, number), self._marks.view
        room = _room(job)
        start, _ = around.reader.offsets(dlq.name, number)
        now_ms = around.clock.wall_ms()
        outgoings = Outgoings()
        moved: list[int] = []
        seen = matched = size = 0
        skipped: dict[str, int] = {}
        topics: dict[str, int] = {}
        examples = list(before.examples)
        without_lanes: set[str] = set()
        for record in records:
            if record.offset >= next_offset:
                break
            if record.offset < start or view.is_gone(place, record.offset):
                continue
            more = size_of(record)
            if len(moved) == room or (moved and size + more > STEP_BYTES):
                next_offset = record.offset
                break
            seen += 1
            if not job.wanted.matches(record):
                continue
            matched += 1
            letter = letter_of(number, record)
            target, why = target_of(around.topics, letter, job.topic, job.to)
            if len(examples) < EXAMPLES_MAX:
                examples.append(_example(number, record.offset, target, why))
            if target is None:
                assert why is not None
                skipped[why] = skipped.get(why, 0) + 1
                continue
            if job.is_dry_run:
                continue
            lane = LANES.index(letter.lane)
            if lane != NORMAL_LANE and not target.topic.uses_lanes:
                without_lanes.add(target.topic.name)
            size += more
            moved.append(record.offset)
            topics[target.topic.name] = topics.get(target.topic.name, 0) + 1
            outgoings.add(target, lane, fields_of(letter, now_ms), more)
        progress = msgspec.structs.replace(
            before,
            partition=number,
            offset=next_offset,
            seen=before.seen + seen,
            matched=before.matched + matched,
            moved=before.moved + len(moved),
            skipped=skipped_more(before.skipped, skipped),
            examples=examples,
        )
        entries = [] if without_lanes else outgoings.entries()
        return _Plan(progress, moved, entries, topics, without_lanes)

    def _take(
        self, one: Running, dlq: Topic, number: int, plan: _Plan
    ) -> Generator[Pending[Any], Any, None]:
        """Do what is planned: nothing may have happened since."""
        view, views = self._marks.view, self._marks.around.views
        if not plan.moved:
            one.progress = plan.progress
            one.unsaved += 1
            if one.unsaved >= UNSAVED_STEPS:
                one.unsaved = 0
                yield views.change(view, [self._stored(one.id, plan.progress)])
            return
        now_s = self._marks.around.clock.monotonic()
        with self._marks.changing(dlq):
            changes = view.marked(Place(dlq.uuid.bytes, number), plan.moved)
            changes.append(self._stored(one.id, plan.progress))
            try:
                yield views.change_with(view, changes, plan.entries)
            except AppendTooLarge:
                # One record that cannot be compressed, as large as an append may be.
                if len(plan.moved) > 1:
                    raise
                one.progress = _skipping(one.progress, plan.progress)
                return
        one.progress, one.unsaved = plan.progress, 0
        topic = one.job.topic
        self.redriven[topic] = self.redriven.get(topic, 0) + len(plan.moved)
        if one.job.rate is not None:
            one.due_s = max(one.due_s, now_s - CATCH_UP_SECONDS) + len(plan.moved) / one.job.rate
        self._steps += 1
        if self._steps % TIDY_STEPS == 0:
            self._marks.tidy(dlq, number)

    def _end(
        self, one: Running, state: JobState, error: str | None = None
    ) -> Generator[Pending[Any], Any, bool]:
        now_ms = self._marks.around.clock.wall_ms()
        progress = msgspec.structs.replace(one.progress, state=state, error=error, ended_ms=now_ms)
        yield self._marks.around.views.change(self._marks.view, [self._stored(one.id, progress)])
        one.progress = progress
        del self._running[one.id]
        self._over[one.id] = (one.job, progress)
        if not one.job.is_dry_run:
            _logger().info(
                "a redrive is over",
                redrive=one.id,
                topic=one.job.topic,
                state=state,
                moved=progress.moved,
                skipped=sum(progress.skipped.values()),
            )
            dlq = self._marks.around.topics.by_name.get(one.job.dlq)
            if dlq is not None and progress.partition < dlq.partitions:
                self._marks.tidy(dlq, progress.partition)
        for ended in list(one.ended):
            ended.succeed(True)
        self._expire()
        return True

    def _stored(self, id: str, progress: Progress) -> Change:
        return progress_change(id, msgspec.json.encode(progress))

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._marks.around.turns.soon(lambda: pending.succeed(None))
        return pending

    # ---- what is over

    def _expire(self) -> None:
        """Forget jobs that were over long ago, or more than anybody looks at."""
        horizon_ms = self._marks.around.clock.wall_ms() - self._options.history_ms
        changes: list[Change] = []
        for id, (_, progress) in list(self._over.items()):
            if len(self._over) <= HISTORY_MAX and (progress.ended_ms or 0) >= horizon_ms:
                break
            del self._over[id]
            changes += job_changes(id, None, None)
        if changes:
            self._marks.around.views.change(self._marks.view, changes)

    # ---- the start and the end

    def load(self) -> Pending[None]:
        """After topics, before anything is appended to them."""
        return follow(self._load())

    def _load(self) -> Generator[Pending[Any], Any, None]:
        yield from self._marks.start()
        now_s = self._marks.around.clock.monotonic()
        over: list[tuple[str, Job, Progress]] = []
        changes: list[Change] = []
        for id, stored, how_far in list(self._marks.view.jobs()):
            try:
                job = msgspec.json.decode(stored, type=Job)
                progress = msgspec.json.decode(how_far or b"{}", type=Progress)
            except msgspec.MsgspecError as error:
                # Of another version. What it has not put back stays, and can be redriven again.
                _logger().error("a redrive is not readable", redrive=id, error=str(error))
                continue
            if progress.state != "running":
                over.append((id, job, progress))
                continue
            clamped = self._clamped(job)
            if clamped is not job:
                changes += job_changes(id, msgspec.json.encode(clamped), how_far)
            self._running[id] = Running(id, clamped, progress, now_s)
        over.sort(key=lambda one: one[2].ended_ms or 0)
        self._over = {id: (job, progress) for id, job, progress in over}
        if changes:
            yield self._marks.around.views.change(self._marks.view, changes)

    def start(self) -> None:
        """When everything else is loaded: jobs go on where they were."""
        for one in list(self._running.values()):
            self._follow(one)

    def _clamped(self, job: Job) -> Job:
        """What came after the job is not part of it, also where its tail was lost in a crash and
        those offsets are given again."""
        around = self._marks.around
        dlq = around.topics.by_name.get(job.dlq)
        if dlq is None or dlq.uuid.bytes != job.dlq_uuid:
            return job
        now = [around.reader.offsets(dlq.name, n)[1] for n in range(len(job.ends))]
        ends = [min(pair) for pair in zip(job.ends, now, strict=True)]
        return job if ends == job.ends else msgspec.structs.replace(job, ends=ends)

    def drain(self) -> None:
        """Before a stop: nobody waits any more."""
        self._has_stopped = True
        for one in self._running.values():
            for ended in list(one.ended):
                ended.succeed(False)

    def stop(self) -> None:
        self.drain()
        for one in self._running.values():
            self._wake(one)


class EndWait:
    """A wait for the end of a job: True when it is over."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: Pending[bool] = Pending()

    def cancel(self) -> None:
        self.pending.succeed(False)


def _room(job: Job) -> int:
    """How many records a step may move."""
    if job.rate is None or job.is_dry_run:
        return STEP_RECORDS
    return min(STEP_RECORDS, max(1, job.rate // STEPS_PER_SECOND))


def _skipping(before: Progress, planned: Progress) -> Progress:
    """As planned, but the one record that was to be moved stays."""
    skipped = skipped_more(planned.skipped, {"message_too_large": 1})
    return msgspec.structs.replace(planned, moved=before.moved, skipped=skipped)


def _example(number: int, offset: int, target: Any, why: str | None) -> Example:
    if target is None:
        return Example(number, offset, None, None, why)
    return Example(number, offset, target.topic.name, target.partition, None)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
