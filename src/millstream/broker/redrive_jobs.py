"""Redrive jobs as values: what one is to do, how far it is, and what is told of it.

What a job is to do is stored once; how far it is, in the same append as the records that it moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import msgspec

from millstream.broker.dead_letter_reading import LetterFilter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from millstream.engine.pending import Pending

JobState: TypeAlias = Literal["running", "done", "cancelled", "failed"]

# Why a dead letter that was meant stays where it is.
# topic_unknown: its topic is not there. topic_compacted: there it would replace what is newer.
# message_too_large: for its topic as it is set now. log_damaged: it cannot be read.
SKIP_REASONS = ("topic_unknown", "topic_compacted", "message_too_large", "log_damaged")

EXAMPLES_MAX = 10
RATE_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class RedriveOptions:
    """As the settings have it."""

    # Jobs that run at the same time, and how long one that is over is listed.
    redrives_max: int = 10
    history_ms: int = 24 * 60 * 60 * 1000


class RedriveWish(NamedTuple):
    """What somebody wants to be put back."""

    wanted: LetterFilter
    # None: each to the topic that it came from.
    to: str | None = None
    # Records a second; None is as quick as it goes.
    rate: int | None = None
    is_dry_run: bool = False


class Job(msgspec.Struct, frozen=True):
    """What one is to do. Fixed when it begins: what arrives later is not part of it."""

    topic: str
    dlq: str
    # Of the topic of dead letters: one made again under its name has nothing to do with the job.
    dlq_uuid: bytes
    wanted: LetterFilter
    to: str | None
    rate: int | None
    is_dry_run: bool
    started_ms: int
    # Of each partition, where it ended; and how many dead letters there were.
    ends: list[int]
    total: int


class Example(msgspec.Struct, frozen=True, array_like=True):
    """A dead letter that a job met, and what it does with it."""

    partition: int
    offset: int
    # Where it goes, or why it stays.
    to: str | None
    to_partition: int | None
    skipped: str | None


class Progress(msgspec.Struct, frozen=True):
    """How far a job is: everything before this place is dealt with."""

    state: JobState = "running"
    partition: int = 0
    offset: int = 0
    seen: int = 0
    matched: int = 0
    moved: int = 0
    skipped: dict[str, int] = {}
    examples: list[Example] = []
    # The code of the error that ended it.
    error: str | None = None
    ended_ms: int | None = None


class JobFacts(NamedTuple):
    """What is told of a job."""

    id: str
    job: Job
    progress: Progress
    # Records moved (of a dry run: looked at) a second, since this broker runs it.
    per_second: float | None
    # How long it has to go at the pace so far.
    rest_s: float | None


class Running:
    """A job as the broker that runs it has it."""

    __slots__ = (
        "began_s",
        "due_s",
        "ended",
        "gate",
        "id",
        "is_cancelled",
        "job",
        "moved_before",
        "progress",
        "seen_before",
        "unsaved",
    )

    def __init__(self, id: str, job: Job, progress: Progress, now_s: float) -> None:
        self.id = id
        self.job = job
        # On disk, but for steps that moved nothing.
        self.progress = progress
        self.began_s = now_s
        self.seen_before, self.moved_before = progress.seen, progress.moved
        # When the next step may begin, by its rate.
        self.due_s = now_s
        self.unsaved = 0
        self.is_cancelled = False
        # What a pause waits for, and who waits for the end.
        self.gate: Pending[None] | None = None
        self.ended: list[Pending[bool]] = []

    def facts(self, now_s: float, left: int) -> JobFacts:
        """`left` is how many records it has still to look at."""
        seconds = now_s - self.began_s
        seen = self.progress.seen - self.seen_before
        moved = self.progress.moved - self.moved_before
        per_second = rest_s = None
        if self.job.rate is not None:
            # A first step is quicker than the rate, and those after it wait for that.
            seconds = max(seconds, moved / self.job.rate)
        if seconds > 0 and seen > 0:
            per_second = (seen if self.job.is_dry_run else moved) / seconds
            rest_s = left * seconds / seen
        return JobFacts(self.id, self.job, self.progress, per_second, rest_s)


def skipped_more(skipped: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {
        name: skipped.get(name, 0) + more.get(name, 0)
        for name in SKIP_REASONS
        if name in skipped or name in more
    }
