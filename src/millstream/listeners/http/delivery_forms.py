"""The forms of the routes of work queues."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

from millstream import errors
from millstream.broker.delivery_values import (
    LEASE_STARTS,
    SETTLE_KINDS,
    DeliveryCounts,
    DeliveryOptions,
    LeaseState,
    Outcome,
)
from millstream.broker.joining import TOPICS_MAX
from millstream.broker.topic_settings import VISIBILITY_MS_MIN
from millstream.listeners.http.delivery_answers import LISTED_MAX, SETTLES_MAX
from millstream.listeners.http.route import JSON_MEDIA, Body, Form, Parameter, Reply, Schema
from millstream.listeners.http.schemas import (
    BOOLEAN,
    GROUP_IN_PATH,
    GROUP_MESSAGE_READ,
    LANE,
    NUMBER,
    OFFSET,
    PARTITION,
    TIME,
    TOPIC_NAME,
    array,
    nullable,
    one_of,
    said,
    shown,
    text,
    whole,
)

_TOPIC = text(pattern=TOPIC_NAME)
_MEMBER = text(pattern="^[A-Za-z0-9._:-]{1,200}$")
_RECEIPT = text(
    pattern="^[^:]{1,249}:(0|[1-9][0-9]{0,8}):(0|[1-9][0-9]{0,17}):(0|[1-9][0-9]{0,8})"
    ":[^:]{1,40}:.{1,255}$",
    description="As it came with the message.",
)
# One that is wrong is a result among others.
_ANY_RECEIPT = text(description="As it came with the message.")
_RECEIPTS = array(_ANY_RECEIPT, minItems=1, maxItems=SETTLES_MAX)
_TOPIC_ERRORS = (errors.TopicUnknown, errors.TopicNameInvalid, errors.TopicReserved)
_APPEND_ERRORS = (errors.EngineBusy, errors.DiskFull, errors.TooManyFiles)
_SETTLE_ERRORS = (
    errors.ReceiptInvalid,
    errors.ReceiptUnknown,
    errors.ReceiptStale,
    *_APPEND_ERRORS,
)


def _json(what: str, schema: Schema) -> Reply:
    return Reply(what, {JSON_MEDIA: schema})


# ---- receiving

_LEASED: Schema = {
    **GROUP_MESSAGE_READ,
    "title": "LeasedMessage",
    "required": [*GROUP_MESSAGE_READ["required"], "deliveries", "receipt"],
    "properties": {**GROUP_MESSAGE_READ["properties"], "deliveries": whole(1), "receipt": text()},
}


def receive(options: DeliveryOptions) -> Form:
    return Form(
        "Receive messages by lease",
        {
            200: _json(
                "Messages, each with its receipt; none when none came in time. `deadline_ms` is "
                "when the first of the leases runs out, `limited_by` says why there are not more: "
                "as many as the `member`, or the `group`, may have are in flight. With `Accept: "
                "application/msgpack` the same comes as MessagePack: keys, values and headers are "
                "bytes, and a message is an array of topic, partition, offset, timestamp_ms, key, "
                "value, headers (pairs), whether it is JSON, lane, deliveries and receipt.",
                shown(
                    "Received",
                    group=text(),
                    deadline_ms=TIME,
                    visibility_ms=whole(),
                    limited_by=nullable(one_of("member", "group")),
                    messages=array(_LEASED),
                ),
            )
        },
        (GROUP_IN_PATH,),
        (Body(_wish(options)),),
        (
            errors.GroupNameInvalid,
            errors.GroupUsesOffsets,
            errors.LeasesRefused,
            errors.TooManyGroups,
            *_TOPIC_ERRORS,
            errors.LogDamaged,
            errors.Busy,
            *_APPEND_ERRORS,
        ),
        "A message that is not settled before its lease runs out comes back, to whoever asks next. "
        "A client that goes away while it waits gets nothing, and nothing is lost.",
    )


def _wish(options: DeliveryOptions) -> Schema:
    rows: tuple[tuple[str, Schema, str], ...] = (
        (
            "limit",
            whole(1, options.receive_records_max),
            "How many messages at most; by default 1.",
        ),
        ("bytes", whole(1, options.receive_bytes_max), "How many bytes of messages, about."),
        (
            "wait_ms",
            whole(0, options.receive_wait_max_ms),
            "How long to wait while there is none; by default not at all.",
        ),
        (
            "visibility_ms",
            whole(VISIBILITY_MS_MIN, options.visibility_max_ms),
            "How long they are the worker's own; by default what the group's setting says, or else "
            "the topic's.",
        ),
        ("member", _MEMBER, "Who asks, for the limit of messages in flight."),
        (
            "start",
            one_of(*LEASE_STARTS),
            "Where a group begins in a topic that it has never used; by default `earliest`.",
        ),
    )
    topics = array(_TOPIC, minItems=1, maxItems=TOPICS_MAX)
    optional = {name: nullable(kind) | {"description": what} for name, kind, what in rows}
    return said("Receive", {"topics": topics}, optional)


# ---- settling

_OUTCOME: Schema = shown("Settled", outcome=one_of(*get_args(Outcome)))
_OUTCOME["properties"]["outcome"] |= {
    "description": "`dead`: it is in the dead letters. `dropped`: its topic has none, so it is "
    "gone. `parked`: it was a dead letter itself; it stays there, and this group is not given it "
    "again."
}
_OUTCOME["properties"] |= {
    "when_ms": TIME | {"description": "When it comes back, or its lease runs out."}
}
_REFUSED = shown("Refused", error=text(), message=text())
_RESULTS = shown(
    "SettledMany",
    settled=whole(),
    refused=whole(),
    results=array({"anyOf": [_OUTCOME, _REFUSED]}),
)
_REPLIES = {
    200: _json(
        "What became of it. Of several: how many were settled and refused, and a result for each, "
        "in the order of the request.",
        {"anyOf": [_OUTCOME, _RESULTS]},
    )
}
_MORE = (
    "One `receipt` is answered with what became of it, or with the status of its error. Several "
    "`receipts` are answered 200, each with its own result. "
)
_OF_GROUP = "Receipts of other groups are refused. "
_ERROR_TEXT = text(description="What went wrong, for the dead letters; 1,000 bytes of it are kept.")


def _settle(title: str, optional: dict[str, Schema]) -> Body:
    none: Schema = {"type": "null"}
    one = {**optional, "receipts": none}
    many = {**optional, "receipt": none}
    return Body(
        {
            "title": title,
            "anyOf": [
                said(f"{title}One", {"receipt": _RECEIPT}, one),
                said(f"{title}Many", {"receipts": _RECEIPTS}, many),
            ],
        }
    )


def _times(options: DeliveryOptions) -> dict[str, Schema]:
    return {
        "delay_ms": nullable(whole(0, options.retry_delay_max_ms)),
        "visibility_ms": nullable(whole(VISIBILITY_MS_MIN, options.visibility_max_ms)),
    }


def settle_forms(options: DeliveryOptions) -> dict[str, Form]:
    """By the last word of the path."""
    times = _times(options)
    delay, visibility = {"delay_ms": times["delay_ms"]}, {"visibility_ms": times["visibility_ms"]}
    error: dict[str, Schema] = {"error": _ERROR_TEXT}
    rows = (
        ("ack", "Done: acknowledge messages", _settle("Ack", {}), "They do not come again."),
        (
            "nack",
            "Failed: have messages come again",
            _settle("Nack", delay | error),
            "They come again after `delay_ms`; without it after the topic's backoff. Those that "
            "used up their deliveries go to the dead letters.",
        ),
        (
            "reject",
            "Failed for good: move messages to the dead letters",
            _settle("Reject", error),
            "They are in the dead letters when this is answered, also while the group's circuit "
            "breaker is open. Where the topic has no dead letters they are dropped.",
        ),
        (
            "release",
            "Not begun: give messages back",
            _settle("Release", {}),
            "They come again at once, and the delivery does not count.",
        ),
        (
            "visibility",
            "Not done yet: extend leases",
            _settle("Extend", visibility),
            "The lease is `visibility_ms` from now on; without it as long as it was at first.",
        ),
    )
    return {
        word: Form(summary, _REPLIES, (), (body,), _SETTLE_ERRORS, _MORE + more)
        for word, summary, body, more in rows
    } | {"settle": _settle_many(times)}


def _settle_many(times: dict[str, Schema]) -> Form:
    none: Schema = {"type": "null"}
    empty: Schema = {"type": "string", "maxLength": 0}
    no_delay: dict[str, Schema] = {"delay_ms": none}
    no_visibility: dict[str, Schema] = {"visibility_ms": none}
    no_error: dict[str, Schema] = {"error": empty}
    kinds: dict[str, dict[str, Schema]] = {
        "ack": no_delay | no_visibility | no_error,
        "nack": {"delay_ms": times["delay_ms"], "error": _ERROR_TEXT} | no_visibility,
        "reject": {"error": _ERROR_TEXT} | no_delay | no_visibility,
        "release": no_delay | no_visibility | no_error,
        "extend": {"visibility_ms": times["visibility_ms"]} | no_delay | no_error,
    }
    assert kinds.keys() == set(SETTLE_KINDS)
    one: Schema = {
        "title": "Settle",
        "anyOf": [
            said(kind.title(), {"kind": one_of(kind), "receipt": _ANY_RECEIPT}, optional)
            for kind, optional in kinds.items()
        ],
    }
    return Form(
        "Settle messages, each in its own way",
        {200: _json("How it went, in the order of the request.", _RESULTS)},
        (),
        (Body(said("Settles", {"settles": array(one, minItems=1, maxItems=SETTLES_MAX)}, {})),),
        _APPEND_ERRORS,
        "A receipt that is refused says so in its result, and the others are settled all the same.",
    )


def of_group(form: Form) -> Form:
    """The same for the receipts of one group."""
    return form._replace(
        parameters=(GROUP_IN_PATH,),
        errors=(*form.errors, errors.GroupNameInvalid),
        more=_OF_GROUP + form.more,
    )


# ---- looking

_LIMIT = Parameter("limit", whole(1, LISTED_MAX), "How many at most.")
_ANY_TOPIC = Parameter("topic", _TOPIC, "Only of this one.")
_ANY_GROUP = Parameter("group", GROUP_IN_PATH.schema, "Only of this one.")


def _after(pattern: str) -> Parameter:
    return Parameter("after", text(pattern=pattern), "The `next` of the page before.")


LEASES = Form(
    "Messages of a group that are leased, or wait to come back",
    {
        200: _json(
            "A page, by place. `when_ms` is when a lease runs out, or when a wait is over, and 0 "
            "for what has no such time. `ready` is a record that comes with the next receive; "
            "`waiting` one that comes back later, that waits for another of its key (`when_ms` is "
            "0 then), or that is about to be a dead letter.",
            shown(
                "Leases",
                group=text(),
                leases=array(
                    shown(
                        "Lease",
                        topic=text(),
                        partition=PARTITION,
                        offset=OFFSET,
                        lane=LANE,
                        deliveries=whole(),
                        state=one_of(*get_args(LeaseState)),
                        member=nullable(text()),
                        when_ms=TIME,
                    )
                ),
                next=nullable(text()),
            ),
        )
    },
    (
        GROUP_IN_PATH,
        _ANY_TOPIC,
        _after("^[a-zA-Z0-9._-]{1,249}:[0-9]{1,9}:[0-9]{1,18}$"),
        _LIMIT,
    ),
    errors=(errors.GroupUnknown, errors.GroupNameInvalid, *_TOPIC_ERRORS),
)
_COUNTS = {one.name: whole() for one in fields(DeliveryCounts)}
RELIABILITY = Form(
    "How deliveries end, by group",
    {
        200: _json(
            "All groups together, and a page of groups that receive by lease. `redelivered` are "
            "deliveries that were not the record's first; one that was released does not count, "
            "so the one after it may be the first. `refused` are settlings, `timeouts` leases "
            "that ran out; `is_dead_lettering` is false while too much fails, and records are "
            "retried instead.",
            shown(
                "Reliability",
                totals=shown("DeliveryCounts", **_COUNTS),
                groups=array(
                    shown(
                        "DeliveryGroup",
                        group=text(),
                        **_COUNTS,
                        topics=array(
                            shown(
                                "DeliveryTopic",
                                topic=text(),
                                leased=whole(),
                                waiting=whole(),
                                ready=whole(),
                                is_dead_lettering=BOOLEAN,
                            )
                        ),
                    )
                ),
                next=nullable(text()),
            ),
        )
    },
    (_ANY_GROUP, Parameter("after", text(), "The `next` of the page before."), _LIMIT),
    errors=(errors.GroupNameInvalid,),
    more="Counts begin with the broker's start.",
)
PRIORITY = Form(
    "Lanes: what waits and how quickly it goes",
    {
        200: _json(
            "A page, by group, topic and partition; the lanes of a partition are not divided.",
            shown(
                "Lanes",
                lanes=array(
                    shown(
                        "LaneOfPartition",
                        group=text(),
                        topic=text(),
                        partition=PARTITION,
                        lane=LANE,
                        ready=whole(),
                        inflight=whole(),
                        delivered=whole(),
                        delivered_per_s=NUMBER,
                        arrived_per_s=nullable(NUMBER),
                        last_served_ms=nullable(TIME),
                        oldest_age_ms=nullable(whole()),
                    )
                ),
                next=nullable(text()),
            ),
        )
    },
    (
        _ANY_TOPIC,
        _ANY_GROUP,
        _after("^[a-zA-Z0-9._-]{1,249}:[0-9]{1,9}:[A-Za-z0-9._:-]{1,255}$"),
        _LIMIT,
    ),
    errors=(errors.GroupNameInvalid, *_TOPIC_ERRORS),
    more="For each group that receives by lease; a topic that never used lanes has one, `normal`. "
    "Rates are taken every ten seconds, over those ten.",
)
