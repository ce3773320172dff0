"""Pieces of JSON Schema that the forms of routes are made of."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.group_settings import TABLE as GROUP_TABLE
from millstream.broker.schedule_values import HORIZON_MS
from millstream.broker.topic_settings import TABLE, WEIGHT_MAX, Row, Weights
from millstream.kinds import Choice, Duration, Integer, Size
from millstream.listeners.http.messages import HEADERS_MAX, RECORDS_MAX
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX
from millstream.listeners.http.route import Parameter, Schema
from millstream.log.batch import LANES
from millstream.wire.groups import GROUP_NAME

TOPIC_NAME = r"^(?!\.{1,2}$)(?!__)[a-zA-Z0-9._-]{1,249}$"
# Canonical, as the decoder wants it: whole groups, then at most one with padding.
BASE64 = r"^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
POSITIONS = r"^([0-9a-f]{8}:)?[0-9]{1,9}:[0-9]{1,18}(,[0-9]{1,9}:[0-9]{1,18})*$"


def whole(least: int = 0, most: int = OFFSET_MAX) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def text(**more: object) -> Schema:
    return {"type": "string", **more}


def one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def array(items: Schema, **more: object) -> Schema:
    return {"type": "array", "items": items, **more}


def nullable(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def said(title: str, required: dict[str, Schema], optional: dict[str, Schema]) -> Schema:
    """An object that a client sends: with nothing in it that is not known."""
    return {
        "title": title,
        "type": "object",
        "required": list(required),
        "properties": required | optional,
        "additionalProperties": False,
    }


def shown(title: str, **required: Schema) -> Schema:
    """An object that the broker sends; later versions may add to it."""
    return {
        "title": title,
        "type": "object",
        "required": list(required),
        "properties": required,
    }


BOOLEAN: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
BYTES: Schema = {"type": "string", "format": "binary"}
ANYTHING: Schema = {}
PARTITION = whole(0, PARTITION_MAX)
OFFSET = whole()
TIME = whole()
# Ten years from now are the limit; the patterns say what is taken today and for long.
_DATE = "(19[7-9][0-9]|20[0-2][0-9])-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
_TIME_OF_DAY = "T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]Z"
DELAY: Schema = {"anyOf": [whole(0, HORIZON_MS), text(pattern="^[0-9]{1,3}(ms|s|m|h|d)$")]}
WHEN: Schema = {"anyOf": [whole(0, 10**12), text(pattern=f"^{_DATE}{_TIME_OF_DAY}$")]}
LANE_SENT: Schema = {"anyOf": [one_of(*LANES), whole(0, len(LANES) - 1)]}
LANE = one_of(*LANES)


# ---- parameters


def seconds(most: float, what: str) -> Parameter:
    return Parameter("timeout", {"type": "number", "minimum": 0, "maximum": most}, what)


TOPIC_IN_PATH = Parameter("topic", text(pattern=TOPIC_NAME), "The topic's name.", "path")
GROUP_IN_PATH = Parameter("group", text(pattern=f"^{GROUP_NAME}$"), "The group's name.", "path")
PARTITION_IN_PATH = Parameter("partition", PARTITION, "The partition's number.", "path")
AFTER = Parameter("after", text(), "List names after this one: the `next` of the page before.")


# ---- messages

_HEADER_NAME = text(pattern=r"^(?!ms-)[ -~]{1,255}$")
HEADERS_SENT: Schema = {
    "type": "object",
    "description": "Names, which do not begin with `ms-`, with a text, "
    '`{"base64": …}` or null each.',
    "maxProperties": HEADERS_MAX,
    "propertyNames": _HEADER_NAME,
    "additionalProperties": {
        "anyOf": [text(), said("Bytes", {"base64": text(pattern=BASE64)}, {}), {"type": "null"}]
    },
}
_PLACE_SENT: dict[str, Schema] = {
    "headers": nullable(HEADERS_SENT),
    "timestamp_ms": nullable(TIME | {"description": "By default the broker's time."}),
    "partition": nullable(
        PARTITION | {"description": "By default that of the key; without a key, in turn."}
    ),
    "lane": nullable(LANE_SENT | {"description": "By default `normal`."}),
    "priority": nullable(LANE_SENT | {"description": "Another word for `lane`; not both."}),
    "delay": nullable(DELAY | {"description": "Appear in the topic after so long."}),
    "deliverAt": nullable(WHEN | {"description": "Appear in the topic at this time."}),
}
_TEXT_KEY: dict[str, Schema] = {"key": nullable(text()), "key_encoding": {"type": "null"}}
_BYTES_KEY: dict[str, Schema] = {
    "key": nullable(text(pattern=BASE64)),
    "key_encoding": one_of("base64"),
}
_JSON_VALUE: dict[str, Schema] = {
    "value": {"description": "Any JSON. A text is stored as it is; null is a tombstone."},
}
_BYTES_VALUE: dict[str, Schema] = {"value": text(pattern=BASE64), "encoding": one_of("base64")}


def _message_sent(value: dict[str, Schema], key: dict[str, Schema], *required: str) -> Schema:
    properties = value | key | _PLACE_SENT
    if "encoding" not in value:
        properties["encoding"] = {"type": "null"}
    needed = ["value", *required]
    return {
        "type": "object",
        "required": needed,
        "properties": properties,
        "additionalProperties": False,
    }


MESSAGE_SENT: Schema = {
    "title": "Message",
    "description": "`key`, `value` and `headers` as text or JSON, or as bytes in base64.",
    "anyOf": [
        _message_sent(_JSON_VALUE, _TEXT_KEY),
        _message_sent(_JSON_VALUE, _BYTES_KEY, "key_encoding"),
        _message_sent(_BYTES_VALUE, _TEXT_KEY, "encoding"),
        _message_sent(_BYTES_VALUE, _BYTES_KEY, "encoding", "key_encoding"),
    ],
}
MESSAGES_SENT = said(
    "Messages", {"messages": array(MESSAGE_SENT, minItems=1, maxItems=RECORDS_MAX)}, {}
)
PLACED = shown("Placed", partition=PARTITION, offset=whole(-1), timestamp_ms=TIME)
PLACED["properties"]["scheduled"] = BOOLEAN | {
    "description": "It is to appear later: these are the id of its schedule, and when it is due."
}
MESSAGE_READ: Schema = shown(
    "MessageRead",
    partition=PARTITION,
    offset=OFFSET,
    timestamp_ms=whole(-1),
    key=nullable(text()),
    value=ANYTHING,
    lane=LANE,
)
MESSAGE_READ["properties"] |= {
    "key_encoding": one_of("base64"),
    "encoding": one_of("base64"),
    "headers": {"type": "object"},
}
GROUP_MESSAGE_READ: Schema = {
    **MESSAGE_READ,
    "title": "GroupMessage",
    "required": ["topic", *MESSAGE_READ["required"]],
    "properties": {"topic": text(), **MESSAGE_READ["properties"]},
}


# ---- topics


def _setting(kind: object) -> Schema:
    if isinstance(kind, Duration):
        number = whole(kind.minimum_ms, kind.maximum_ms)
        words = [kind.otherwise] if kind.otherwise else []
    elif isinstance(kind, Size):
        number = whole(kind.minimum, kind.maximum)
        words = ["unlimited"] if kind.unlimited else []
    elif isinstance(kind, Integer):
        number, words = whole(kind.minimum, kind.maximum), []
    elif isinstance(kind, Weights):
        number = array(whole(1, WEIGHT_MAX), minItems=kind.count, maxItems=kind.count)
        words = []
    elif isinstance(kind, Choice):
        return nullable(one_of(*kind.words))
    else:
        return nullable(BOOLEAN)
    return {"anyOf": [number, *([one_of(*words)] if words else []), {"type": "null"}]}


def _sent(title: str, table: Sequence[Row], description: str) -> Schema:
    return {
        "title": title,
        "type": "object",
        "description": description,
        "properties": {
            one.name: {**_setting(one.kind), "description": one.causes} for one in table
        },
        "additionalProperties": False,
    }


def _shown(table: Sequence[Row]) -> Schema:
    return {
        "type": "object",
        "required": [row.name for row in table],
        "properties": {row.name: {"description": row.causes} for row in table},
    }


SETTINGS_SENT = _sent(
    "Settings",
    TABLE,
    "Times and sizes are numbers, or texts such as `7d` and `64M`. Null is the broker's default.",
)
SETTINGS_SHOWN = _shown(TABLE)
GROUP_SETTINGS_SENT = _sent(
    "GroupSettings",
    GROUP_TABLE,
    "Numbers, or texts such as `10m`. Null is what topics and the broker say.",
)
GROUP_SETTINGS_SHOWN = _shown(GROUP_TABLE)
TOPIC_SHOWN = shown(
    "Topic",
    name=text(),
    uuid=text(format="uuid"),
    partitions=whole(1),
    created_ms=TIME,
    settings=SETTINGS_SHOWN,
)
TOPIC_DESCRIBED = shown(
    "TopicDescription",
    **TOPIC_SHOWN["properties"],
    details=array(
        shown(
            "Partition",
            partition=PARTITION,
            start=OFFSET,
            end=OFFSET,
            bytes=whole(),
            segments=whole(),
            leader_epoch=whole(),
        )
    ),
)
