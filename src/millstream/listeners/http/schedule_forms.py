"""The forms of the routes of scheduled records."""

from __future__ import annotations

from millstream import errors
from millstream.broker.named_schedules import EVERY_MS_MAX, EVERY_MS_MIN
from millstream.listeners.http.bodies import LISTED_MAX
from millstream.listeners.http.route import JSON_MEDIA, Body, Form, Parameter, Reply, Schema
from millstream.listeners.http.schedule_answers import LIMIT_DEFAULT, LIMIT_MAX, SKIP_MAX
from millstream.listeners.http.schemas import (
    AFTER,
    BOOLEAN,
    HEADERS_SENT,
    LANE_SENT,
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
    shown,
    text,
    whole,
)

_OFFSET_IN_PATH = Parameter("offset", OFFSET, "The schedule's number.", "path")
_TOPIC_ERRORS = (errors.TopicUnknown, errors.TopicNameInvalid, errors.TopicReserved)
_ONE_ERRORS = (*_TOPIC_ERRORS, errors.ScheduleUnknown, errors.LogDamaged)
_APPEND_ERRORS = (errors.EngineBusy, errors.DiskFull, errors.TooManyFiles)
STATE = one_of("pending", "fired", "cancelled", "expired")
_DELAYED: Schema = {
    **MESSAGE_READ,
    "title": "Delayed",
    "required": ["state", "deliver_at_ms", *MESSAGE_READ["required"]],
    "properties": {
        "state": STATE,
        "deliver_at_ms": TIME,
        "why": text(description="Why it expired."),
        **MESSAGE_READ["properties"],
        "partition": PARTITION | {"description": "With `offset` the id of the schedule."},
    },
}


def _json(what: str, schema: Schema) -> Reply:
    return Reply(what, {JSON_MEDIA: schema})


LIST = Form(
    "Messages of a topic that are scheduled",
    {
        200: _json(
            "A page of them, in the order in which they were scheduled. It may have fewer than "
            "`limit` and not be the last; `next` is null on the last.",
            shown("DelayedList", topic=text(), count=whole(), delayed=array(_DELAYED),
                  next=nullable(text())),
        )
    },
    (
        TOPIC_IN_PATH,
        Parameter("limit", whole(1, LIMIT_MAX), f"How many at most; by default {LIMIT_DEFAULT}."),
        Parameter("skip", whole(0, SKIP_MAX), "Leave out so many first."),
        Parameter("after", OFFSET, "Go on there: the `next` of the page before."),
    ),
    errors=(*_TOPIC_ERRORS, errors.LogDamaged),
    more="`count` is how many the topic has in all.",
)  # fmt: skip
SHOW = Form(
    "One scheduled message, and what became of it",
    {200: _json("What is over is known for a while only.", _DELAYED)},
    (TOPIC_IN_PATH, PARTITION_IN_PATH, _OFFSET_IN_PATH),
    errors=_ONE_ERRORS,
)
CANCEL = Form(
    "Cancel a scheduled message",
    {200: _json("It will not appear in its topic.", _DELAYED)},
    (TOPIC_IN_PATH, PARTITION_IN_PATH, _OFFSET_IN_PATH),
    errors=(*_ONE_ERRORS, errors.ScheduleOver, *_APPEND_ERRORS),
    more="The id is what the publish answered: `partition` and `offset`.",
)
STATISTICS = Form(
    "How many messages are scheduled, and what became of others",
    {
        200: _json(
            "All but `pending`, `levels` and `next_due_ms` count from the start of the broker.",
            shown(
                "DelayStatistics",
                pending=whole(),
                scheduled=whole(),
                fired=whole(),
                cancelled=whole(),
                expired=whole(),
                levels=array(whole()),
                next_due_ms=nullable(TIME),
                lateness=array(shown("Late", seconds_max=text(), count=whole())),
                lateness_sum_s=NUMBER,
                moved=whole(),
                retries=whole(),
            ),
        )
    },
    more="`levels` are those of the timing wheel: due within 2.56 s, 2.7 min, 2.9 h, 7.76 days, "
    "and beyond. `next_due_ms` is when the wheel is looked at next, which is not after the next "
    "message is due.",
)


# ---- named schedules

_NAME_IN_PATH = Parameter(
    "name", text(pattern="^(?!\\.{1,2}$)[a-zA-Z0-9._-]{1,100}$"), "The schedule's name.", "path"
)
_NAMED: Schema = shown(
    "Schedule",
    name=text(),
    topic=text(),
    every_ms=nullable(whole(1)),
    cron=nullable(text()),
    time_zone=text(),
    paused=BOOLEAN,
    message={"type": "object"},
    created_ms=TIME,
    next_ms=nullable(TIME),
    last_ms=nullable(TIME),
    runs=whole(),
    error=nullable(text(description="Why the last run was left out.")),
)
_EVERY: Schema = {
    "anyOf": [whole(EVERY_MS_MIN, EVERY_MS_MAX), text(pattern="^[1-9][0-9]{0,2}(s|m|h|d)$")]
}
# The commonest ones; other crons and zones are taken as well.
_CRON = text(
    pattern=r"^(@(hourly|daily|weekly|monthly|yearly)|[0-9*] [0-9*] [1-9*] [1-9*] [0-6*])$",
    description="Minute, hour, day, month and weekday, or `@hourly` and the like.",
)
_ZONE = text(
    pattern="^(UTC|Europe/(Berlin|London|Paris)|America/(New_York|Chicago)|Asia/(Tokyo|Kolkata))$",
    description="A name of the IANA time zones, for `cron` alone; by default UTC.",
)
_MESSAGE = said(
    "ScheduledMessage",
    {"value": {"description": "As in a publish."}},
    {"key": nullable(text()), "headers": nullable(HEADERS_SENT), "lane": nullable(LANE_SENT)},
)


def _asked(when: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "required": ["topic", "message", *when],
        "properties": {
            "topic": text(pattern=TOPIC_NAME),
            "message": _MESSAGE,
            "time_zone": _ZONE,
            "paused": BOOLEAN,
            **when,
        },
        "additionalProperties": False,
    }


_ASKED: Schema = {
    "title": "ScheduleAsked",
    "description": "`every` or `cron` says when, `message` what.",
    "anyOf": [_asked({"every": _EVERY}), _asked({"cron": _CRON})],
}
NAMED_LIST = Form(
    "All named schedules",
    {200: _json("A page of them, by name.", shown("ScheduleList", schedules=array(_NAMED),
                                                  next=nullable(text())))},
    parameters=(AFTER, Parameter("limit", whole(1, LISTED_MAX), "How many at most.")),
)  # fmt: skip
NAMED_PUT = Form(
    "Make a named schedule, or put it in the place of the one of that name",
    {200: _json("The schedule. It begins anew.", _NAMED)},
    (_NAME_IN_PATH,),
    (Body(_ASKED),),
    (
        errors.ScheduleInvalid,
        errors.DelayInvalid,
        errors.TooManySchedules,
        *_TOPIC_ERRORS,
        errors.TooManyTopics,
        errors.PartitionUnknown,
        errors.MessageTooLarge,
        errors.TimestampInvalid,
        errors.HeaderInvalid,
        errors.KeyRequired,
        errors.LaneUnknown,
        *_APPEND_ERRORS,
    ),
    "`every` is an interval, in ms or as a text such as `15m`; `cron` has five fields, or is "
    "`@hourly` and the like, in `time_zone`, such as `Europe/Berlin`. One of the two is needed. "
    "`message` is what is published, as in a publish. Runs that were missed are one.",
)
NAMED_GET = Form(
    "One named schedule",
    {200: _json("The schedule, and when it runs next.", _NAMED)},
    (_NAME_IN_PATH,),
    errors=(errors.ScheduleUnknown,),
)
NAMED_DELETE = Form(
    "Delete a named schedule",
    {204: Reply("Done.")},
    (_NAME_IN_PATH,),
    errors=(errors.ScheduleUnknown, *_APPEND_ERRORS),
)
