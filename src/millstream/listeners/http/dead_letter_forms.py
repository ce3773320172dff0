"""The forms of the routes of dead letters and redrives."""

from __future__ import annotations

from millstream import errors
from millstream.broker.dead_letter_reading import DELETE_MAX, FILTER_TEXT_MAX, LIST_MAX
from millstream.broker.redrive_jobs import EXAMPLES_MAX, RATE_MAX, SKIP_REASONS
from millstream.listeners.http.dead_letter_answers import REASONS, TIMEOUT_S_MAX
from millstream.listeners.http.route import JSON_MEDIA, Body, Form, Parameter, Reply, Schema
from millstream.listeners.http.schemas import (
    BASE64,
    BOOLEAN,
    MESSAGE_READ,
    NUMBER,
    OFFSET,
    PARTITION,
    PARTITION_IN_PATH,
    TIME,
    TOPIC_IN_PATH,
    TOPIC_NAME,
    array,
    nullable,
    one_of,
    said,
    seconds,
    shown,
    text,
    whole,
)

_TOPIC_ERRORS = (errors.TopicUnknown, errors.TopicNameInvalid, errors.TopicReserved)
_APPEND_ERRORS = (errors.EngineBusy, errors.DiskFull, errors.TooManyFiles)
_READ_ERRORS = (errors.LogDamaged, errors.OffsetOutOfRange)
_LETTER_ERRORS = (*_TOPIC_ERRORS, errors.DeadLetterUnknown)
_OFFSET_IN_PATH = Parameter("offset", OFFSET, "The dead letter's own offset.", "path")
_REDRIVE_IN_PATH = Parameter("redrive", text(), "The id that starting it answered.", "path")
_TEXT = text(minLength=1, maxLength=FILTER_TEXT_MAX)
_CURSOR = r"^[0-9]{1,9}:[0-9]{1,18}$"


def _json(what: str, schema: Schema) -> Reply:
    return Reply(what, {JSON_MEDIA: schema})


_DONE = Reply("Done.")
_LETTER = shown(
    "DeadLetter",
    partition=PARTITION,
    offset=OFFSET,
    origin=shown(
        "Origin", topic=nullable(text()), partition=nullable(whole()), offset=nullable(whole())
    ),
    group=nullable(text()),
    deliveries=nullable(whole()),
    reason=nullable(text()),
    error=nullable(text()),
    first_failure_ms=nullable(whole()),
    last_failure_ms=nullable(whole()),
    redrives=whole(),
    message=MESSAGE_READ,
)
_COUNT = shown("DeadLetterCount", topic=text(), dead_letter_topic=text(), dead_letters=whole(1))
_PAUSED = shown("PausedGroup", group=text(), since_seconds=NUMBER, openings=whole(1))
OVERVIEW = Form(
    "Where dead letters are, and which groups make none for now",
    {
        200: _json(
            "Topics that have some; groups whose circuit breaker is open, with since when.",
            shown("DeadLetterTopics", topics=array(_COUNT), paused=array(_PAUSED)),
        )
    },
)
_FILTERS = {
    "reason": one_of(*REASONS),
    "group": text(),
    "key": text(maxLength=FILTER_TEXT_MAX),
    "text": _TEXT,
    "since_ms": TIME,
    "until_ms": TIME,
}
_SAID_OF_FILTERS = {
    "reason": "Only those that used up their deliveries, or that a worker rejected.",
    "group": "Only those that this group gave up.",
    "key": "Only those with this key.",
    "text": "Only those with this text in their value or in their error.",
    "since_ms": "Only those that failed last at this time or later.",
    "until_ms": "Only those that failed last before this time.",
}
LIST = Form(
    "Dead letters of a topic",
    {
        200: _json(
            "By partition and offset. A page may have fewer than `limit`, or none, and a `next`: "
            "a filter that matches little looks at so many at a time.",
            shown(
                "DeadLetterList",
                topic=text(),
                dead_letter_topic=text(),
                total=whole(),
                letters=array(_LETTER),
                next=nullable(text()),
            ),
        )
    },
    (
        TOPIC_IN_PATH,
        *(
            Parameter(name, schema, _SAID_OF_FILTERS[name])
            for name, schema in _FILTERS.items()
            if name != "key"
        ),
        Parameter("key", _FILTERS["key"], _SAID_OF_FILTERS["key"]),
        Parameter("key_encoding", one_of("base64"), "For a `key` that is no text."),
        Parameter("partition", PARTITION, "Only this one."),
        Parameter("cursor", text(pattern=_CURSOR), "The `next` of the page before."),
        Parameter("limit", whole(1, LIST_MAX), "How many at most; by default 100."),
    ),
    errors=(*_TOPIC_ERRORS, errors.PartitionUnknown, errors.BodyInvalid, *_READ_ERRORS),
    more="`total` counts all of them, whatever the filter. The topic may be gone: its dead "
    "letters stay.",
)
GONE = Form(
    "Dead letters that are gone, and still lie in the log",
    {
        200: _json(
            "Runs of offsets, by partition and offset.",
            shown(
                "DeadLettersGone",
                topic=text(),
                dead_letter_topic=text(),
                gone=array(shown("GoneRun", partition=PARTITION, first=OFFSET, last=OFFSET)),
                next=nullable(text()),
            ),
        )
    },
    (
        TOPIC_IN_PATH,
        Parameter("cursor", text(pattern=_CURSOR), "The `next` of the page before."),
        Parameter("limit", whole(1, LIST_MAX), "How many runs at most; by default 100."),
    ),
    errors=(*_TOPIC_ERRORS, errors.BodyInvalid),
    more="For those who read the topic of dead letters itself: what was deleted or put back leaves "
    "the log only when all before it in its partition is gone too.",
)
GET = Form(
    "One dead letter",
    {200: _json("The message, and how it died.", _LETTER)},
    (TOPIC_IN_PATH, PARTITION_IN_PATH, _OFFSET_IN_PATH),
    errors=(*_LETTER_ERRORS, *_READ_ERRORS),
    more="Partition and offset are those of the dead letter, not those it had in its topic.",
)
DELETE = Form(
    "Delete one dead letter",
    {204: _DONE},
    (TOPIC_IN_PATH, PARTITION_IN_PATH, _OFFSET_IN_PATH),
    errors=(*_LETTER_ERRORS, *_APPEND_ERRORS),
)
DELETE_MANY = Form(
    "Delete some dead letters",
    {200: _json("How many.", shown("DeadLettersDeleted", deleted=whole(1)))},
    (TOPIC_IN_PATH,),
    (
        Body(
            said(
                "DeadLetterPlaces",
                {
                    "letters": array(
                        said("DeadLetterPlace", {"partition": PARTITION, "offset": OFFSET}, {}),
                        minItems=1,
                        maxItems=DELETE_MAX,
                    )
                },
                {},
            )
        ),
    ),
    (*_LETTER_ERRORS, *_APPEND_ERRORS),
    "All of them, or none when one is not there.",
)
PURGE = Form(
    "Delete all dead letters of a topic",
    {204: _DONE},
    (TOPIC_IN_PATH,),
    errors=(*_TOPIC_ERRORS, *_APPEND_ERRORS),
)

_JOB = shown(
    "Redrive",
    id=text(),
    topic=text(),
    dead_letter_topic=text(),
    to=nullable(text()),
    rate=nullable(whole(1)),
    dry_run=BOOLEAN,
    state=one_of("running", "done", "cancelled", "failed"),
    total=whole() | {"description": "Dead letters that there were when it began."},
    seen=whole() | {"description": "Those that it has looked at."},
    matched=whole() | {"description": "Those that the filter means."},
    moved=whole() | {"description": "Those that were put back."},
    skipped={
        "type": "object",
        "description": "Those that stay, by why: " + ", ".join(f"`{one}`" for one in SKIP_REASONS),
    },
    examples=array(
        shown(
            "RedriveExample",
            partition=PARTITION,
            offset=OFFSET,
            to=nullable(text()),
            to_partition=nullable(PARTITION),
            skipped=nullable(text()),
        )
    )
    | {"description": f"The first {EXAMPLES_MAX}: where each goes, or why it stays."},
    started_ms=TIME,
    ended_ms=nullable(TIME),
    per_second=nullable(NUMBER),
    rest_seconds=nullable(NUMBER) | {"description": "How long it will take at this pace."},
    error=nullable(text()),
)
_TIMEOUT = seconds(TIMEOUT_S_MAX, "Seconds to wait for the end of the job; by default 0.")
_SENT: dict[str, Schema] = {
    "to": nullable(text(pattern=TOPIC_NAME)),
    "rate": nullable(whole(1, RATE_MAX)),
    "dry_run": BOOLEAN,
    **{name: nullable(schema) for name, schema in _FILTERS.items()},
}
_BYTES_KEY = {"key": nullable(text(pattern=BASE64, maxLength=FILTER_TEXT_MAX))}
REDRIVE = Form(
    "Put dead letters back",
    {202: _json("The job, as far as it is.", _JOB)},
    (TOPIC_IN_PATH, _TIMEOUT),
    (
        Body(
            {
                "title": "NewRedrive",
                "description": "Without any field: all of them, each to where it came from.",
                "anyOf": [
                    said("NewRedrive", {}, _SENT | {"key_encoding": {"type": "null"}}),
                    said("NewRedrive", {"key_encoding": one_of("base64")}, _SENT | _BYTES_KEY),
                ],
            }
        ),
    ),
    (
        *_TOPIC_ERRORS,
        errors.RedriveRunning,
        errors.TooManyRedrives,
        errors.Busy,
        errors.Stopping,
        errors.RedriveUnknown,
        *_APPEND_ERRORS,
    ),
    "`to` is another topic; `rate` is how many a second at most. With `dry_run` the job counts, "
    "shows examples, and changes nothing. A topic has one job at a time, dry runs not counted.",
)
JOBS = Form(
    "All redrives",
    {
        200: _json(
            "Those that run, then those that are over, the newest first.",
            shown("Redrives", redrives=array(_JOB)),
        )
    },
    (Parameter("topic", text(), "Only those of this topic."),),
)
JOB = Form(
    "One redrive",
    {200: _json("How far it is.", _JOB)},
    (_REDRIVE_IN_PATH, _TIMEOUT),
    errors=(errors.RedriveUnknown, errors.Busy, errors.Stopping),
)
CANCEL = Form(
    "Cancel a redrive",
    {200: _json("It is over. What it has put back stays there.", _JOB)},
    (_REDRIVE_IN_PATH,),
    errors=(errors.RedriveUnknown, *_APPEND_ERRORS),
    more="One that is over already stays as it is.",
)
