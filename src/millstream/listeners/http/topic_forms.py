"""The forms of the routes of topics: what each takes, what it answers, and what can go wrong."""

from __future__ import annotations

from collections.abc import Mapping

from millstream import errors
from millstream.listeners.http.batch_answers import (
    READ_BYTES_DEFAULT,
    READ_BYTES_MAX,
    TIMEOUT_S_MAX,
)
from millstream.listeners.http.bodies import LISTED_MAX
from millstream.listeners.http.consumer_answers import NEXT_COUNT_MAX
from millstream.listeners.http.read_answers import (
    LIMIT_DEFAULT,
    LIMIT_MAX,
    MESSAGES_BYTES_MAX,
)
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
    DELAY,
    LANE_SENT,
    MESSAGE_READ,
    MESSAGE_SENT,
    MESSAGES_SENT,
    OFFSET,
    PARTITION,
    PARTITION_IN_PATH,
    PLACED,
    POSITIONS,
    SETTINGS_SENT,
    TIME,
    TOPIC_DESCRIBED,
    TOPIC_IN_PATH,
    TOPIC_NAME,
    TOPIC_SHOWN,
    WHEN,
    array,
    nullable,
    one_of,
    said,
    seconds,
    shown,
    text,
    whole,
)
from millstream.listeners.http.topic_answers import HEADERS_IN_QUERY_MAX

_TOPIC_ERRORS = (errors.TopicUnknown, errors.TopicNameInvalid, errors.TopicReserved)
_APPEND_ERRORS = (errors.EngineBusy, errors.DiskFull, errors.TooManyFiles)
_PUBLISH_ERRORS = (
    *_TOPIC_ERRORS,
    errors.TooManyTopics,
    errors.PartitionUnknown,
    errors.MessageTooLarge,
    errors.TimestampInvalid,
    errors.HeaderInvalid,
    errors.KeyRequired,
    errors.LaneUnknown,
    errors.DelayInvalid,
    errors.TooManySchedules,
    errors.IdempotencyKeyInvalid,
    errors.IdempotencyKeyConflict,
    errors.TooManyIdempotencyKeys,
    errors.AppendTooLarge,
    *_APPEND_ERRORS,
)
_BATCH_ERRORS = (
    *_TOPIC_ERRORS,
    errors.TooManyTopics,
    errors.PartitionUnknown,
    errors.BatchInvalid,
    errors.BatchLengthInvalid,
    errors.BatchMagicUnsupported,
    errors.BatchChecksumMismatch,
    errors.BatchCountInvalid,
    errors.BatchCompressionInvalid,
    errors.BatchRecordInvalid,
    errors.BatchTooLarge,
    errors.MessageTooLarge,
    errors.AppendTooLarge,
    errors.ProducerFenced,
    errors.SequenceOutOfOrder,
    errors.SequenceDuplicate,
    *_APPEND_ERRORS,
)
_READ_ERRORS = (
    *_TOPIC_ERRORS,
    errors.PartitionUnknown,
    errors.OffsetOutOfRange,
    errors.LogDamaged,
    errors.Busy,
    errors.Stopping,
)


def _json(what: str, schema: Schema, links: Mapping[str, Mapping[str, str]] | None = None) -> Reply:
    return Reply(what, {JSON_MEDIA: schema}, {}, links or {})


_DESCRIBED = _json("The topic as it is now.", TOPIC_DESCRIBED)
_DONE = Reply("Done.")
_LIMIT = Parameter("limit", whole(1, LISTED_MAX), "How many names at most.")


_NAMED = {"topic": "$response.body#/name"}
_LINKS_OF_TOPIC = {
    "get_v1_topics_topic": _NAMED,
    "get_v1_topics_topic_messages": _NAMED,
    "post_v1_topics_topic_messages": _NAMED,
    "post_v1_topics_topic_consumers": _NAMED,
}


# ---- management


def create(partitions_max: int) -> Form:
    return Form(
        "Make a topic",
        {201: _json("It is there.", TOPIC_DESCRIBED, _LINKS_OF_TOPIC)},
        bodies=(
            Body(
                said(
                    "NewTopic",
                    {"name": text(pattern=TOPIC_NAME)},
                    {
                        "partitions": nullable(whole(1, partitions_max)),
                        "settings": nullable(SETTINGS_SENT),
                    },
                )
            ),
        ),
        errors=(
            errors.TopicExists,
            errors.TopicNameInvalid,
            errors.TopicReserved,
            errors.TopicSettingInvalid,
            errors.PartitionCountInvalid,
            errors.TooManyTopics,
            *_APPEND_ERRORS,
        ),
    )


LIST = Form(
    "All topics, by name",
    {200: _json("A page of them.", shown("TopicList", topics=array(TOPIC_SHOWN),
                                         next=nullable(text())))},
    parameters=(AFTER, _LIMIT),
)  # fmt: skip
DESCRIBE = Form("One topic", {200: _DESCRIBED}, (TOPIC_IN_PATH,), errors=_TOPIC_ERRORS)
ALTER = Form(
    "Change a topic's settings",
    {200: _DESCRIBED},
    (TOPIC_IN_PATH,),
    (Body(said("Changes", {"settings": SETTINGS_SENT}, {})),),
    (*_TOPIC_ERRORS, errors.TopicSettingInvalid, *_APPEND_ERRORS),
)


def grow(partitions_max: int) -> Form:
    return Form(
        "Give a topic more partitions",
        {200: _DESCRIBED},
        (TOPIC_IN_PATH,),
        (Body(said("Growth", {"partitions": whole(1, partitions_max)}, {})),),
        (*_TOPIC_ERRORS, errors.PartitionCountInvalid, errors.TooManyTopics, *_APPEND_ERRORS),
        "`partitions` is the new total; fewer than there are is refused. Records stay where they "
        "are, so a key that is hashed may go to another partition than before.",
    )


PURGE = Form(
    "Remove all records of a topic",
    {204: _DONE},
    (TOPIC_IN_PATH,),
    errors=(*_TOPIC_ERRORS, *_APPEND_ERRORS),
    more="The topic stays, and its offsets go on where they were.",
)
DELETE = Form(
    "Delete a topic and its records",
    {204: _DONE},
    (TOPIC_IN_PATH,),
    errors=(*_TOPIC_ERRORS, *_APPEND_ERRORS),
)


# ---- publishing

_ACKS = Parameter(
    "acks",
    one_of("none", "leader", "all"),
    "When to answer: `none` at once, the others when the topic's `fsync` says so.",
)
_IDEMPOTENCY_KEY = Parameter(
    "Idempotency-Key",
    text(pattern="^[!-~]{1,255}$"),
    "A publish with a key that was used before in this topic, within the setting "
    "`idempotency_window`, is not stored again.",
    "header",
)
_DUPLICATE = {"duplicate": BOOLEAN | {"description": "It was stored before, with this key."}}


def _with(schema: Schema, more: dict[str, Schema]) -> Schema:
    return {**schema, "properties": schema["properties"] | more}


_ONE = _with(
    shown(
        "Published",
        topic=text(),
        **{name: PLACED["properties"][name] for name in PLACED["required"]},
    ),
    _DUPLICATE | {"scheduled": PLACED["properties"]["scheduled"]},
)
_MANY = _with(
    shown("PublishedMany", topic=text(), count=whole(1), placed=array(PLACED)), _DUPLICATE
)
PUBLISH = Form(
    "Publish one message",
    {
        200: _json("Stored.", _ONE),
        202: _json("Taken, with `acks=none`; the offset is -1.", _ONE),
    },
    (
        TOPIC_IN_PATH,
        _ACKS,
        Parameter("key", text(), "The key; percent-encoded it may be any bytes."),
        Parameter("partition", PARTITION, "The partition; by default that of the key."),
        Parameter("timestamp_ms", TIME, "The time; by default the broker's."),
        Parameter(
            "header",
            array(text(pattern="^(?!ms-)[ -9;-~]{1,255}:"), maxItems=HEADERS_IN_QUERY_MAX),
            "A header, as `name:value`; as often as needed.",
        ),
        Parameter("lane", LANE_SENT, "The lane: a name or its number; by default `normal`."),
        Parameter("priority", LANE_SENT, "Another word for `lane`."),
        Parameter("delay", DELAY, "Appear in the topic after so long: ms, or a text such as `5m`."),
        Parameter("deliverAt", WHEN, "Appear in the topic at a time: ISO 8601, or ms since 1970."),
        _IDEMPOTENCY_KEY,
    ),
    (Body(MESSAGE_SENT), Body(BYTES, RAW_MEDIA)),
    _PUBLISH_ERRORS,
    "As JSON, or as raw bytes: then the body is the value, and the rest may stand in the query. "
    "What both say, the body decides. With a delay, or a time that is not past, the message is "
    "scheduled: `partition` and `offset` are then the id of the schedule. A topic that is not "
    "there is made, unless the setting `topic_auto_create` is off.",
)
PUBLISH_MANY = Form(
    "Publish many messages, or none",
    {
        200: _json("All are stored.", _MANY),
        202: _json("Taken, with `acks=none`; offsets are -1.", _MANY),
    },
    (TOPIC_IN_PATH, _ACKS, _IDEMPOTENCY_KEY),
    (Body(MESSAGES_SENT),),
    _PUBLISH_ERRORS,
    "The error of a bad message has its index as `record`, and none is stored.",
)
_BATCHES = shown(
    "PlacedBatches",
    topic=text(),
    placed=array(shown("PlacedBatch", partition=PARTITION, offset=OFFSET, count=whole(1))),
)
_BATCHES_PLACED = {
    200: _json("All are stored.", _BATCHES),
    202: _json("Taken, with `acks=none`; offsets are -1.", _BATCHES),
}
PUBLISH_BATCHES = Form(
    "Publish ready-made batches to several partitions, or none",
    _BATCHES_PLACED,
    (TOPIC_IN_PATH, _ACKS),
    (Body(BYTES, RAW_MEDIA),),
    _BATCH_ERRORS,
    "The body is, for each batch, the number of its partition (4 bytes, big-endian) and the "
    "batch: Kafka's record batch, magic 2.",
)
PUBLISH_BATCHES_TO = Form(
    "Publish ready-made batches to one partition, or none",
    _BATCHES_PLACED,
    (TOPIC_IN_PATH, PARTITION_IN_PATH, _ACKS),
    (Body(BYTES, RAW_MEDIA),),
    _BATCH_ERRORS,
    "The body is Kafka's record batches, magic 2, one after the other.",
)


# ---- reading


def _bytes(most: int) -> Parameter:
    return Parameter(
        "bytes",
        whole(1, most),
        f"How many bytes of messages, about; by default {READ_BYTES_DEFAULT}. At least one message "
        "comes, if there is one.",
    )


_TIMEOUT = seconds(TIMEOUT_S_MAX, "Seconds to wait while there is nothing; by default 0.")
READ = Form(
    "Read messages",
    {
        200: Reply(
            "Messages, in order within a partition. `next` is where to go on.",
            {
                JSON_MEDIA: shown(
                    "MessagesRead", topic=text(), messages=array(MESSAGE_READ), next=text()
                ),
                "application/x-ndjson": text(),
                "text/event-stream": text(),
            },
        )
    },
    (
        TOPIC_IN_PATH,
        Parameter("partition", PARTITION, "Only this one; by default all."),
        Parameter(
            "offset",
            {"anyOf": [OFFSET, one_of("earliest", "latest")]},
            "Where to begin; by default `earliest`. A number counts in every partition that is "
            "read.",
        ),
        Parameter(
            "time",
            TIME,
            "Begin at the first message of this time or later, in ms. It counts before `offset`.",
        ),
        Parameter(
            "positions",
            text(pattern=POSITIONS),
            "Begin where an earlier answer ended: its `next`, such as `5e35c0de:0:13,1:41`, or "
            "without the part before the first partition. It counts before `time`.",
        ),
        Parameter(
            "limit", whole(1, LIMIT_MAX), f"How many messages at most; by default {LIMIT_DEFAULT}, "
            "in streams as many as there are."
        ),
        _bytes(MESSAGES_BYTES_MAX),
        _TIMEOUT,
        Parameter(
            "follow",
            BOOLEAN,
            "Of streams: go on with new messages. By default server-sent events do, lines do not. "
            "Where JSON is answered, `true` is refused.",
        ),
        Parameter(
            "Last-Event-ID",
            text(pattern=f"^$|{POSITIONS}"),
            "Of server-sent events: go on after this one. A browser sends it by itself.",
            "header",
        ),
    ),
    errors=_READ_ERRORS,
    more="`Accept: application/x-ndjson` gives a stream of lines, one message each; blank lines "
    "are signs of life. `Accept: text/event-stream` gives server-sent events. An error on the way "
    "is the last line, or an event `error`. A stream of events that goes on after an id whose "
    "messages are gone begins with an event `skipped` for each such partition, which says `from` "
    "which offset `to` which.",
)  # fmt: skip
READ_BATCHES = Form(
    "Read ready-made batches of one partition",
    {
        200: Reply(
            "Whole batches, from the one that holds the offset; nothing at the end.",
            {RAW_MEDIA: BYTES},
            {"ms-start": "The first offset there is.", "ms-end": "The offset that comes next."},
        )
    },
    (
        TOPIC_IN_PATH,
        PARTITION_IN_PATH,
        Parameter(
            "offset",
            {"anyOf": [OFFSET, one_of("earliest", "latest")]},
            "Where to begin; by default `earliest`.",
        ),
        _bytes(READ_BYTES_MAX),
        _TIMEOUT,
    ),
    errors=_READ_ERRORS,
)
OFFSETS = Form(
    "Where partitions begin and end, and where a time is",
    {
        200: _json(
            "`end` is the offset that comes next; `offset`, with `time`, that of the first "
            "message at or after the time, or `end`.",
            shown(
                "Offsets",
                topic=text(),
                offsets=array(
                    _with(
                        shown("PartitionOffsets", partition=PARTITION, start=OFFSET, end=OFFSET),
                        {"offset": OFFSET},
                    )
                ),
            ),
        )
    },
    (
        TOPIC_IN_PATH,
        Parameter("partition", PARTITION, "Only this one; by default all."),
        Parameter("time", TIME, "A time in ms since 1970."),
    ),
    errors=(*_TOPIC_ERRORS, errors.PartitionUnknown, errors.LogDamaged),
)
STREAM = Form(
    "Publish and consume over a WebSocket",
    {101: Reply("It is a WebSocket from here on.")},
    (
        TOPIC_IN_PATH,
        Parameter("format", one_of("json", "binary"), "How the broker writes; by default JSON."),
    ),
    errors=(*_TOPIC_ERRORS, errors.UpgradeRequired),
    more="A request that asks for no WebSocket is refused with 426. docs/topics.md has the "
    "messages of both sides.",
)


# ---- sequential consumers

_CONSUMER_IN_PATH = Parameter(
    "consumer", text(pattern="^[0-9a-f]{24}$"), "The id that the broker gave.", "path"
)
_CONSUMER_ERRORS = (
    *_TOPIC_ERRORS,
    errors.ConsumerUnknown,
    errors.ConsumerFenced,
    errors.PartitionUnknown,
)
_OPENED = shown(
    "Consumer",
    topic=text(),
    consumer_id=text(),
    positions=array(shown("Position", partition=PARTITION, offset=OFFSET)),
)
_OPENED_IDS = {
    "topic": "$response.body#/topic",
    "consumer": "$response.body#/consumer_id",
}
_LINKS_OF_CONSUMER = {
    "get_v1_topics_topic_consumers_consumer_next": _OPENED_IDS,
    "delete_v1_topics_topic_consumers_consumer": _OPENED_IDS,
}
OPEN_CONSUMER = Form(
    "Open a sequential consumer",
    {
        200: _json("It goes on at the first message that it has not acked.", _OPENED),
        201: _json("A new one, with an id to come back with.", _OPENED, _LINKS_OF_CONSUMER),
    },
    (TOPIC_IN_PATH,),
    (
        Body(
            said(
                "NewConsumer",
                {},
                {
                    "consumer_id": nullable(text(pattern="^[0-9a-f]{24}$")),
                    "partition": nullable(PARTITION),
                    "start": {"anyOf": [one_of("earliest", "latest"), OFFSET]},
                },
            )
        ),
    ),
    (*_CONSUMER_ERRORS, errors.OffsetOutOfRange, *_APPEND_ERRORS),
    "Without `consumer_id` the broker makes one. `start` counts where it has no position yet.",
)
NEXT = Form(
    "The next messages of a sequential consumer",
    {
        200: _json(
            "Messages, in order within a partition.",
            shown("NextMessages", topic=text(), consumer_id=text(), messages=array(MESSAGE_READ)),
        ),
        204: Reply("Nothing there."),
    },
    (
        TOPIC_IN_PATH,
        _CONSUMER_IN_PATH,
        Parameter("limit", whole(1, NEXT_COUNT_MAX), "How many at most; by default 1."),
        _TIMEOUT,
    ),
    errors=(*_CONSUMER_ERRORS, errors.LogDamaged, errors.Busy, *_APPEND_ERRORS),
    more="Each message comes once. After an answer that got lost, open the consumer again with its "
    "id: it goes on at the first message that is not acked.",
)
ACK = Form(
    "Ack a message, and all before it in its partition",
    {
        200: _json(
            "`position` is the first offset that is not acked.",
            shown("Acked", topic=text(), consumer_id=text(), partition=PARTITION, position=OFFSET),
        )
    },
    (TOPIC_IN_PATH, _CONSUMER_IN_PATH),
    (Body(said("AckUpTo", {"partition": PARTITION, "offset": OFFSET}, {})),),
    (*_CONSUMER_ERRORS, errors.OffsetOutOfRange, *_APPEND_ERRORS),
)
DELETE_CONSUMER = Form(
    "Forget a sequential consumer",
    {204: _DONE},
    (TOPIC_IN_PATH, _CONSUMER_IN_PATH),
    errors=(*_CONSUMER_ERRORS, *_APPEND_ERRORS),
)
