"""The forms of the routes of scheduled records."""

from __future__ import annotations

from millstream import errors
from millstream.listeners.http.route import JSON_MEDIA, Form, Parameter, Reply, Schema
from millstream.listeners.http.schedule_answers import LIMIT_DEFAULT, LIMIT_MAX, SKIP_MAX
from millstream.listeners.http.schemas import (
    MESSAGE_READ,
    NUMBER,
    OFFSET,
    PARTITION,
    PARTITION_IN_PATH,
    TIME,
    TOPIC_IN_PATH,
    array,
    nullable,
    one_of,
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
