"""The forms of the routes of groups."""

from __future__ import annotations

from collections.abc import Mapping

from millstream import errors
from millstream.broker.group_offsets import METADATA_BYTES_MAX
from millstream.broker.joining import (
    AUTO_COMMIT_MS_MAX,
    AUTO_COMMIT_MS_MIN,
    SESSION_TIMEOUT_MS_MAX,
    SESSION_TIMEOUT_MS_MIN,
)
from millstream.listeners.http.bodies import LISTED_MAX
from millstream.listeners.http.group_answers import (
    COMMITS_MAX,
    GENERATION_MAX,
)
from millstream.listeners.http.route import JSON_MEDIA, Body, Form, Parameter, Reply, Schema
from millstream.listeners.http.schemas import (
    AFTER,
    BOOLEAN,
    GROUP_IN_PATH,
    GROUP_MESSAGE_READ,
    GROUP_SETTINGS_SENT,
    GROUP_SETTINGS_SHOWN,
    NUMBER,
    OFFSET,
    PARTITION,
    TIME,
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

_GENERATION = whole(0, GENERATION_MAX)
_ID = text(minLength=1, maxLength=255)
_TOPIC = text(pattern=TOPIC_NAME)
_GROUP_ERRORS = (errors.GroupUnknown, errors.GroupNameInvalid)
_APPEND_ERRORS = (errors.EngineBusy, errors.DiskFull, errors.TooManyFiles)
# A group that is not there has no such member.
_MEMBER_ERRORS = (
    errors.GroupNameInvalid,
    errors.MemberUnknown,
    errors.MemberFenced,
    errors.StaleGeneration,
    *_APPEND_ERRORS,
)
_TOPIC_ERRORS = (errors.TopicUnknown, errors.TopicNameInvalid, errors.TopicReserved)


def _json(what: str, schema: Schema, links: Mapping[str, Mapping[str, str]] | None = None) -> Reply:
    return Reply(what, {JSON_MEDIA: schema}, {}, links or {})


_OF_MEMBER = {"group": "$request.path.group"}
_MEMBER_QUERY = {
    "member_id": "$response.body#/member_id",
    "generation": "$response.body#/generation",
}
_MEMBER_BODY = {f"/{name}": value for name, value in _MEMBER_QUERY.items()}


_DONE = Reply("Done.")
_ASSIGNMENT = array(shown("TopicPartitions", topic=text(), partitions=array(PARTITION)))
_STANDING = shown(
    "Standing",
    group=text(),
    member_id=text(),
    generation=_GENERATION,
    assignment=_ASSIGNMENT,
    revoking=_ASSIGNMENT,
    topic_ids={
        "type": "object",
        "additionalProperties": text(format="uuid"),
        "description": "The UUIDs of those topics. One that was made again has another: "
        "forget what you have of the old one.",
    },
    rebalancing=BOOLEAN,
)
_MORE = (
    "Use the `generation` of the newest answer. When `revoking` is not empty, stop work on those "
    "partitions, commit them, and then use the new generation: that gives them up. Until then "
    "keep calling with the older one."
)
JOIN = Form(
    "Join a group",
    {
        200: _json(
            "Who the member is, and what it may read.",
            shown(
                "Joined",
                **_STANDING["properties"],
                session_timeout_ms=whole(1),
                heartbeat_interval_ms=whole(1),
            ),
            {
                "get_v1_groups_group_poll": _OF_MEMBER | _MEMBER_QUERY,
                "post_v1_groups_group_heartbeat": _OF_MEMBER | _MEMBER_BODY,
            },
        )
    },
    (GROUP_IN_PATH,),
    (
        Body(
            said(
                "Join",
                {"topics": array(_TOPIC, minItems=1, maxItems=100)},
                {
                    "member_id": nullable(_ID),
                    "client_id": text(pattern="^[A-Za-z0-9._:-]{1,200}$"),
                    "instance_id": nullable(text(pattern="^[A-Za-z0-9._:-]{1,200}$")),
                    "assignor": nullable(one_of("sticky", "range", "round_robin")),
                    "session_timeout_ms": nullable(
                        whole(SESSION_TIMEOUT_MS_MIN, SESSION_TIMEOUT_MS_MAX)
                    ),
                    "auto_offset_reset": nullable(one_of("earliest", "latest", "none")),
                    "auto_commit": BOOLEAN,
                    "auto_commit_interval_ms": nullable(
                        whole(AUTO_COMMIT_MS_MIN, AUTO_COMMIT_MS_MAX)
                    ),
                },
            )
        ),
    ),
    (
        errors.GroupNameInvalid,
        errors.GroupProtocolMismatch,
        *_TOPIC_ERRORS,
        errors.MemberUnknown,
        errors.MemberFenced,
        errors.TooManyGroups,
        errors.TooManyMembers,
        *_APPEND_ERRORS,
    ),
    "Without `member_id` a new member joins; with it, one that was told `stale_generation` goes "
    "on. An `instance_id` makes the member static: whoever joins with it has what it had. " + _MORE,
)
_MEMBER = {"member_id": _ID, "generation": _GENERATION}
HEARTBEAT = Form(
    "Say that a member lives",
    {200: _json("Where it stands.", _STANDING)},
    (GROUP_IN_PATH,),
    (Body(said("Heartbeat", dict(_MEMBER), {})),),
    _MEMBER_ERRORS,
    _MORE,
)


def poll(records_max: int, bytes_max: int, timeout_s_max: float) -> Form:
    return Form(
        "Read the next messages of a member's partitions",
        {
            200: _json(
                "Messages, in order within a partition, and where the member stands.",
                shown(
                    "Polled",
                    **_STANDING["properties"],
                    number=whole(),
                    parts=array(
                        shown(
                            "PolledPart",
                            topic=text(),
                            partition=PARTITION,
                            next_offset=OFFSET,
                            end=OFFSET,
                        )
                    ),
                    messages=array(GROUP_MESSAGE_READ),
                ),
            )
        },
        (
            GROUP_IN_PATH,
            Parameter("member_id", _ID, "Who asks.", is_needed=True),
            Parameter("generation", _GENERATION, "Of the newest answer.", is_needed=True),
            Parameter("limit", whole(1, records_max), "How many messages at most."),
            Parameter("bytes", whole(1, bytes_max), "How many bytes of messages, about."),
            seconds(timeout_s_max, "Seconds to wait while there is nothing; by default 0."),
            Parameter(
                "received",
                whole(),
                "The `number` of the last answer that came through: what was in a later one, which "
                "got lost, comes again.",
            ),
        ),
        errors=(
            *_MEMBER_ERRORS,
            errors.OffsetUnknown,
            errors.OffsetOutOfRange,
            errors.LogDamaged,
            errors.Busy,
        ),
        more="It counts as a heartbeat.",
    )


_OFFSETS_SENT = array(
    said(
        "Offset",
        {"topic": _TOPIC, "partition": PARTITION, "offset": OFFSET},
        {"metadata": text(maxLength=METADATA_BYTES_MAX)},
    ),
    minItems=1,
    maxItems=COMMITS_MAX,
)
COMMIT = Form(
    "Commit offsets",
    {200: _json("They are durable.", shown("CommitDone", group=text(), committed=whole(1)))},
    (GROUP_IN_PATH,),
    (
        Body(
            {
                "title": "Commit",
                "anyOf": [
                    said("CommitOfMember", {"offsets": _OFFSETS_SENT, **_MEMBER}, {}),
                    said(
                        "CommitOfNobody",
                        {"offsets": _OFFSETS_SENT},
                        {"member_id": {"type": "null"}, "generation": {"type": "null"}},
                    ),
                ],
            }
        ),
    ),
    (
        *_MEMBER_ERRORS,
        *_TOPIC_ERRORS,
        errors.GroupNotEmpty,
        errors.TooManyGroups,
        errors.PartitionNotAssigned,
        errors.PartitionUnknown,
        errors.OffsetOutOfRange,
        errors.MetadataTooLarge,
    ),
    "An offset is that of the next message to be read. Without a member it works while the group "
    "has none.",
)
LEAVE = Form(
    "Leave a group",
    {204: _DONE},
    (GROUP_IN_PATH,),
    (
        Body(
            said(
                "Leave",
                {"member_id": _ID},
                {"received": nullable(whole()), "generation": nullable(_GENERATION)},
            )
        ),
    ),
    _MEMBER_ERRORS,
    "With a `generation` that the member has left behind it is refused, and the member stays. "
    "Without one the member goes in any case.",
)

_STATE = one_of("empty", "stable", "rebalancing")
_SUMMARY = shown(
    "Group",
    group=text(),
    state=_STATE,
    members=whole(),
    generation=_GENERATION,
    assignor=text(),
    topics=array(text()),
    protocol=nullable(one_of("http", "classic", "consumer", "share")),
)
LIST = Form(
    "All groups, by name",
    {200: _json("A page.", shown("GroupList", groups=array(_SUMMARY), next=nullable(text())))},
    (AFTER, Parameter("limit", whole(1, LISTED_MAX), "How many at most.")),
)
_COMMITTED = array(
    shown(
        "Committed",
        topic=text(),
        partition=PARTITION,
        offset=OFFSET,
        metadata=text(),
        committed_ms=TIME,
    )
)
DESCRIBE = Form(
    "One group, with its members and offsets",
    {
        200: _json(
            "The group.",
            shown(
                "GroupDescription",
                **(_SUMMARY["properties"] | {
                    "members": array(
                        shown(
                            "Member",
                            member_id=text(),
                            client_id=text(),
                            instance_id=nullable(text()),
                            generation=_GENERATION,
                            topics=array(text()),
                            assignment=_ASSIGNMENT,
                            revoking=_ASSIGNMENT,
                            session_timeout_ms=whole(1),
                            idle_ms=whole(),
                        )
                    ),
                }),
                offsets=_COMMITTED,
                settings=GROUP_SETTINGS_SHOWN,
            ),
        )
    },
    (GROUP_IN_PATH,),
    errors=_GROUP_ERRORS,
)  # fmt: skip
ALTER = Form(
    "Change what is set for a group",
    {
        200: _json(
            "What is set now; null is what topics and the broker say.",
            shown("GroupSettingsSet", group=text(), settings=GROUP_SETTINGS_SHOWN),
        )
    },
    (GROUP_IN_PATH,),
    (Body(said("GroupChanges", {"settings": GROUP_SETTINGS_SENT}, {})),),
    (
        errors.GroupNameInvalid,
        errors.GroupSettingInvalid,
        errors.TooManyGroups,
        *_APPEND_ERRORS,
    ),
    "For groups that receive by lease, used before or not. It goes before what topics say, and "
    "what a request says goes before it. It stays until the group is deleted.",
)
DELETE = Form(
    "Delete a group and its offsets",
    {204: _DONE},
    (GROUP_IN_PATH,),
    errors=(*_GROUP_ERRORS, errors.GroupNotEmpty, *_APPEND_ERRORS),
)
COMMITTED = Form(
    "Committed offsets",
    {200: _json("Those there are.", shown("GroupOffsets", group=text(), offsets=_COMMITTED))},
    (GROUP_IN_PATH, Parameter("topic", _TOPIC, "Only of this one.")),
    errors=(*_GROUP_ERRORS, *_TOPIC_ERRORS),
)
FORGET = Form(
    "Forget the committed offsets of one topic",
    {200: _json("How many there were.", shown("Forgotten", group=text(), forgotten=whole()))},
    (GROUP_IN_PATH, Parameter("topic", _TOPIC, "The topic.", is_needed=True)),
    errors=(*_GROUP_ERRORS, *_TOPIC_ERRORS, errors.GroupNotEmpty, *_APPEND_ERRORS),
)


def _reset(to: Schema, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    return said(
        "Reset",
        {"topic": _TOPIC, "to": to, **required},
        {
            **optional,
            "partitions": nullable(array(PARTITION, minItems=1, maxItems=1000, uniqueItems=True)),
            "dry_run": BOOLEAN,
        },
    )


_ANY_OFFSET, _ANY_TIME = {"offset": OFFSET}, {"time_ms": TIME}
RESET = Form(
    "Move the committed offsets of a topic",
    {
        200: _json(
            "Where they were, and are.",
            shown(
                "ResetDone",
                group=text(),
                topic=text(),
                offsets=array(
                    shown(
                        "ResetPartition",
                        topic=text(),
                        partition=PARTITION,
                        before=nullable(OFFSET),
                        after=OFFSET,
                    )
                ),
            ),
        )
    },
    (GROUP_IN_PATH,),
    (
        Body(
            {
                "title": "Reset",
                "anyOf": [
                    _reset(one_of("earliest", "latest"), {}, _ANY_OFFSET | _ANY_TIME),
                    _reset(one_of("offset"), _ANY_OFFSET, _ANY_TIME),
                    _reset(one_of("time"), _ANY_TIME, _ANY_OFFSET),
                ],
            }
        ),
    ),
    (
        *_GROUP_ERRORS,
        *_TOPIC_ERRORS,
        errors.GroupNotEmpty,
        errors.TooManyGroups,
        errors.PartitionUnknown,
        errors.OffsetOutOfRange,
        errors.TimestampInvalid,
        errors.LogDamaged,
        *_APPEND_ERRORS,
    ),
    "`to` is `earliest`, `latest`, `offset` (with `offset`) or `time` (with `time_ms`). With "
    "`dry_run` nothing changes. The group may have no member.",
)
LAG = Form(
    "How far a group is behind",
    {
        200: _json(
            "In messages, in seconds (the age of the oldest message that is not committed, 0 when "
            "there is none), and as a trend: messages a second over 5 minutes; more than 0 is "
            "falling behind.",
            shown(
                "Lag",
                group=text(),
                messages=whole(),
                seconds=NUMBER,
                trend_per_s=nullable(NUMBER),
                partitions=array(
                    shown(
                        "PartitionLag",
                        topic=text(),
                        partition=PARTITION,
                        committed=OFFSET,
                        start=OFFSET,
                        end=OFFSET,
                        messages=whole(),
                        seconds=NUMBER,
                        trend_per_s=nullable(NUMBER),
                        member_id=nullable(text()),
                    )
                ),
            ),
        )
    },
    (GROUP_IN_PATH,),
    errors=(*_GROUP_ERRORS, errors.LogDamaged),
)
