"""The forms of the routes of staged writes."""

from __future__ import annotations

from millstream import errors
from millstream.broker.staged_steps import SKIP_REASONS
from millstream.broker.staged_values import BATCH_MAX, FINAL_KEPT_MS
from millstream.listeners.http.bodies import LISTED_MAX
from millstream.listeners.http.route import (
    JSON_MEDIA,
    RAW_MEDIA,
    Body,
    Form,
    Parameter,
    Reply,
    Schema,
)
from millstream.listeners.http.schemas import (
    AFTER,
    BOOLEAN,
    BYTES,
    TIME,
    array,
    nullable,
    one_of,
    said,
    shown,
    text,
    whole,
)
from millstream.listeners.http.writer_answers import (
    ATTEMPT_MAX,
    TASK_MAX,
    WAIT_DEFAULT_MS,
    WAIT_MS_MAX,
)
from millstream.wire.staged import BODY_BYTES_MAX, NO_PART, WRITER_NAME

_WRITER = text(pattern=f"^{WRITER_NAME}$")
_OWNER_WHAT = (
    "Whose batch it is, such as the id of a query: what somebody else has committed under its "
    "number is not taken for it."
)
_FORGET_WHAT = (
    "Whether this is the writer's final batch. The writer is forgotten "
    f"{FINAL_KEPT_MS // 60_000} minutes later, so that this commit can be repeated until then, and "
    "does not count among `writers_max` meanwhile."
)
_BATCH = whole(0, BATCH_MAX)
_WRITER_IN_PATH = Parameter("writer", _WRITER, "The writer's name.", "path")
_BATCH_IN_PATH = Parameter("batch", _BATCH, "The batch's number. Numbers rise.", "path")
_APPEND_ERRORS = (errors.EngineBusy, errors.DiskFull, errors.TooManyFiles)
_BATCH_ERRORS = (
    errors.BatchInvalid,
    errors.BatchLengthInvalid,
    errors.BatchMagicUnsupported,
    errors.BatchChecksumMismatch,
    errors.BatchCountInvalid,
    errors.BatchCompressionInvalid,
    errors.BatchTooLarge,
    errors.BatchRecordInvalid,
)
_SKIPPED: Schema = {
    "type": "object",
    "description": "Records that are in no topic, by why: "
    + ", ".join(f"`{one}`" for one in SKIP_REASONS),
    "additionalProperties": whole(1),
}


def _json(what: str, schema: Schema) -> Reply:
    return Reply(what, {JSON_MEDIA: schema})


STAGE = Form(
    "Stage what a task writes for a batch",
    {
        200: _json(
            "It is on disk. `part` is the handle by which a commit names it; it is "
            f'`"{NO_PART}"` when the batch is committed already.',
            shown("Part", part=text(), records=whole(), bytes=whole()),
        )
    },
    (
        _WRITER_IN_PATH,
        _BATCH_IN_PATH,
        Parameter("task", whole(0, TASK_MAX), "Which task, by default 0; for whoever looks."),
        Parameter("attempt", whole(0, ATTEMPT_MAX), "Which attempt of it, by default 0."),
        Parameter("owner", _WRITER, _OWNER_WHAT),
    ),
    (Body(BYTES, RAW_MEDIA),),
    (
        errors.WriterNameInvalid,
        errors.TopicUnknown,
        errors.TopicNameInvalid,
        errors.TopicReserved,
        errors.TooManyTopics,
        errors.PartitionUnknown,
        *_BATCH_ERRORS,
        errors.KeyRequired,
        errors.HeaderInvalid,
        errors.MessageTooLarge,
        errors.DelayInvalid,
        errors.TooManyWriters,
        errors.TooManyParts,
        errors.StagedFull,
        errors.WriterAhead,
        *_APPEND_ERRORS,
    ),
    "The body is entries, one after the other: the length of the topic's name (2 bytes, "
    "big-endian) and the name, the partition (4), a time in milliseconds or 0 for now (8), and a "
    "record batch. With a time, its records are scheduled, and the partition may be -1: that of "
    f"the key. Several entries have at most {BODY_BYTES_MAX} bytes together, one alone as many as "
    "any body; several requests are several parts. Nobody sees any of it before the commit. An "
    "error has the index of the bad entry in `entry`; then nothing is stored.",
)
_COMMITTED = shown(
    "CommittedBatch",
    writer=text(),
    batch=whole(),
    state=one_of("committed"),
    records=nullable(whole())
    | {"description": "In topics or scheduled; null for a batch before the writer's last."},
    skipped=_SKIPPED,
    already=BOOLEAN | {"description": "Committed before this was asked: nothing was added."},
)
_RUNNING = shown(
    "CommitUnderWay",
    writer=text(),
    batch=whole(),
    state=one_of("committing"),
    done=whole(),
    of=whole(),
    trouble=nullable(text()) | {"description": "Why it does not go on at the moment."},
)
_WAIT: Schema = {
    "anyOf": [whole(0, WAIT_MS_MAX), text(pattern="^([0-9]|[12][0-9]|30)s$")],
    "description": f"How long to wait for the end: by default {WAIT_DEFAULT_MS // 1000}s, at most "
    f"{WAIT_MS_MAX // 1000}s.",
}
COMMIT = Form(
    "Commit a batch: let what is staged appear, once",
    {
        200: _json("It is in its topics, on disk.", _COMMITTED),
        202: _json("It is being copied, and that will end. Ask again to wait for it.", _RUNNING),
    },
    (_WRITER_IN_PATH, _BATCH_IN_PATH),
    (
        Body(
            said(
                "StagedCommit",
                {"parts": array(text())},
                {
                    "wait": nullable(_WAIT),
                    "owner": nullable(_WRITER) | {"description": _OWNER_WHAT},
                    "forget": BOOLEAN | {"description": _FORGET_WHAT},
                },
            )
        ),
    ),
    (
        errors.WriterNameInvalid,
        errors.StagedPartUnknown,
        errors.StagedTopicGone,
        errors.CommitRunning,
        errors.WriterAhead,
        errors.TooManyWriters,
        errors.TooManySchedules,
        errors.Busy,
        *_APPEND_ERRORS,
    ),
    "`parts` are those that count. Parts of this and of earlier batches that nobody named are "
    "forgotten. A batch that is not after the writer's last one adds nothing, whatever parts are "
    "named: so a commit can be repeated. When `owner` is given, and the last one was committed for "
    "another owner, such a batch is refused with `writer_ahead` instead. A commit survives a crash "
    "of the broker.",
)
ABORT = Form(
    "Forget what is staged for a batch",
    {
        200: _json(
            "It is gone.",
            shown("Aborted", writer=text(), batch=whole(), state=one_of("aborted"), parts=whole()),
        )
    },
    (_WRITER_IN_PATH, _BATCH_IN_PATH),
    errors=(
        errors.WriterNameInvalid,
        errors.BatchCommitted,
        errors.CommitRunning,
        *_APPEND_ERRORS,
    ),
)
_WRITER_SHOWN = shown(
    "Writer",
    writer=text(),
    last=nullable(
        shown(
            "LastBatch",
            batch=whole(),
            records=whole(),
            skipped=_SKIPPED,
            owner=nullable(_WRITER),
            final=BOOLEAN | {"description": "The writer will be forgotten."},
            committed_ms=TIME,
        )
    ),
    committing=nullable(
        shown(
            "CommitProgress",
            batch=whole(),
            done=whole(),
            of=whole(),
            trouble=nullable(text()),
        )
    ),
    staged_parts=whole(),
    staged_bytes=whole(),
)
LIST = Form(
    "All writers",
    {
        200: _json(
            "By name. `next` goes into `after` for the next page.",
            shown("Writers", writers=array(_WRITER_SHOWN), next=nullable(text())),
        )
    },
    (
        AFTER,
        Parameter("limit", whole(1, LISTED_MAX), "How many at most."),
    ),
)
GET = Form(
    "One writer",
    {200: _json("Its last batch, and what is staged.", _WRITER_SHOWN)},
    (_WRITER_IN_PATH,),
    errors=(errors.WriterNameInvalid, errors.WriterUnknown),
)
FORGET = Form(
    "Forget a writer",
    {204: Reply("Done. A batch that it commits from here on is its first.")},
    (_WRITER_IN_PATH,),
    errors=(
        errors.WriterNameInvalid,
        errors.WriterUnknown,
        errors.CommitRunning,
        *_APPEND_ERRORS,
    ),
)
