"""Errors of what the broker does by itself later: redrives, schedules, commits of staged writes.

`errors.py` has all errors; look there.
"""

from __future__ import annotations

from millstream.errors_root import MillstreamError

# ---- dead letters


class DeadLetterUnknown(MillstreamError):
    """There is no dead letter at that place, or not any more; fields: topic, partition, offset."""

    code = "dead_letter_unknown"


class RedriveUnknown(MillstreamError):
    """There is no redrive with that id, or it was over long ago; fields: redrive."""

    code = "redrive_unknown"


class RedriveRunning(MillstreamError):
    """A redrive of the topic's dead letters runs already; fields: topic, redrive."""

    code = "redrive_running"


class TooManyRedrives(MillstreamError):
    """As many redrives run as may; fields: limit."""

    code = "too_many_redrives"


class DelayInvalid(MillstreamError):
    """A delay that is negative or too long, a time too far off, or both; fields: record."""

    code = "delay_invalid"


class ScheduleUnknown(MillstreamError):
    """There is no such schedule, or it has been over for long; fields: topic, partition, offset, or
    name."""

    code = "schedule_unknown"


class ScheduleOver(MillstreamError):
    """The schedule has fired, was cancelled or has expired before; fields: state."""

    code = "schedule_over"


class ScheduleInvalid(MillstreamError):
    """A named schedule that cannot be kept as it was given: its name, its times or its zone."""

    code = "schedule_invalid"


class TooManySchedules(MillstreamError):
    """As many as are allowed are pending; fields: limit."""

    code = "too_many_schedules"
    retriable = True


# ---- staged writes


class WriterNameInvalid(MillstreamError):
    """A name that is empty, too long or has a character that is not allowed; fields: writer."""

    code = "writer_name_invalid"


class WriterUnknown(MillstreamError):
    """Nothing is staged or committed by a writer of that name; fields: writer."""

    code = "writer_unknown"


class TooManyWriters(MillstreamError):
    """As many writers are remembered as are allowed; fields: limit."""

    code = "too_many_writers"
    retriable = True


class TooManyParts(MillstreamError):
    """As many parts as are allowed are staged, and not committed; fields: limit."""

    code = "too_many_parts"
    retriable = True


class StagedFull(MillstreamError):
    """As many bytes as are allowed are staged, and not committed; fields: limit_bytes."""

    code = "staged_full"
    retriable = True


class StagedPartUnknown(MillstreamError):
    """Nothing is staged under that handle for this batch, or not any more; fields: part."""

    code = "staged_part_unknown"


class StagedTopicGone(MillstreamError):
    """A topic was deleted since records for it were staged; fields: topic. Stage them again."""

    code = "staged_topic_gone"


class CommitRunning(MillstreamError):
    """Another batch, or the same with other parts, is being committed; fields: writer, batch."""

    code = "commit_running"
    retriable = True


class BatchCommitted(MillstreamError):
    """The batch is committed, so it cannot be taken back; fields: writer, batch."""

    code = "batch_committed"


class WriterAhead(MillstreamError):
    """The batch's number is that of one that the writer has committed with other rows, as when a
    stream's checkpoint is older than what it wrote; fields: writer, batch, last."""

    code = "writer_ahead"
