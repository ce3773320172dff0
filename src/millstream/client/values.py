"""What users give and get: keys, values, headers and records.

A value may be bytes, text, None (a tombstone: 'this key is gone', in a compacted topic), or
anything that JSON can say. Bytes and text are stored as they are; JSON as its text, with a record
header that says so.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeAlias

import msgspec

from millstream.errors import BodyInvalid, HeaderInvalid, ParameterInvalid
from millstream.wire.batches import (
    OWN_PREFIX,
    TYPE_HEADER,
    TYPE_JSON,
    Headers,
    Record,
    is_shown_header,
)

# Bytes, text, None or what JSON can say; also dataclasses and msgspec's structs.
Value: TypeAlias = Any
Key: TypeAlias = bytes | str | None
HeaderMap: TypeAlias = Mapping[str, bytes | str | None]
# Milliseconds, or a text such as `5m`.
Delay: TypeAlias = timedelta | str | int
# Milliseconds since 1970, or a text as ISO 8601 has it; without a zone it is UTC.
When: TypeAlias = datetime | str | int

NORMAL_LANE = "normal"
# How MessagePack writes a number that is infinite or none at all.
_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_JSON_HEADERS: Headers = ((TYPE_HEADER, TYPE_JSON),)


class Place(NamedTuple):
    """Where a record was stored."""

    partition: int
    offset: int
    timestamp_ms: int


class Received(NamedTuple):
    """A record of a topic, as a consumer gets it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    # Whether it was published as JSON, and not as text or bytes.
    is_json: bool = False
    lane: str = NORMAL_LANE

    @property
    def text(self) -> str:
        """The value as text; of a tombstone the empty one."""
        return "" if self.value is None else self.value.decode()

    def json(self) -> Any:
        """The value as JSON; None of a tombstone."""
        return None if self.value is None else msgspec.json.decode(self.value)


def received(topic: str, partition: int, record: Record) -> Received:
    """A record of a batch. Headers that are Millstream's own are not the user's business."""
    headers = record.headers
    is_json = False
    if headers:
        is_json = (TYPE_HEADER, TYPE_JSON) in headers
        headers = tuple(pair for pair in headers if is_shown_header(pair[0]))
    return Received(
        topic,
        partition,
        record.offset,
        record.timestamp,
        record.key,
        record.value,
        headers,
        is_json,
        (record.lane or NORMAL_LANE) if record.headers else NORMAL_LANE,
    )


class Encoded(NamedTuple):
    """A value that `encode_value` was asked about before."""

    data: bytes | None
    headers: Headers


def encode_value(value: Value) -> tuple[bytes | None, Headers]:
    """The bytes that are stored, and the header that says what they are."""
    if value is None or type(value) is bytes:
        return value, ()
    if isinstance(value, str):
        try:
            return value.encode(), ()
        except UnicodeEncodeError as error:
            raise BodyInvalid(f"a text that is no UTF-8 cannot be stored: {error}") from error
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value), ()
    if type(value) is Encoded:
        return value
    data = encode_json(value)
    if data[:1] == b'"':
        # A date, a UUID and the like: what JSON has as a text is stored as a text.
        return msgspec.json.decode(data, type=str).encode(), ()
    if data == b"null":
        raise BodyInvalid(f"{value!r} cannot be said in JSON; a tombstone is None")
    return data, _JSON_HEADERS


def encode_json(value: object) -> bytes:
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise BodyInvalid(f"a value of type {type(value).__name__} is no JSON: {error}") from error
    if b"null" in data:
        _refuse_lost_numbers(value)
    return data


def _refuse_lost_numbers(value: object) -> None:
    """JSON has no NaN and no infinity. They came out as null, which is what None does too; in
    MessagePack they differ, and most values with a None are through here without being walked."""
    try:
        if _NOT_FINITE.search(msgspec.msgpack.encode(value)) is None:
            return
    except (TypeError, ValueError, OverflowError):
        # Such as whole numbers of more than 64 bits: those are looked at one by one.
        pass
    left: list[tuple[str, Any]] = [("", msgspec.to_builtins(value, enc_hook=lambda _: None))]
    while left:
        path, one = left.pop()
        if isinstance(one, float) and not math.isfinite(one):
            at = f"the value at {path}" if path else "the value"
            raise BodyInvalid(
                f"{at} is {one}, which JSON cannot say; send None, or a text", at=path
            )
        if isinstance(one, dict):
            left += [(f"{path}.{key}" if path else str(key), one[key]) for key in reversed(one)]
        elif isinstance(one, list | tuple):
            left += [(f"{path}[{at}]", one[at]) for at in reversed(range(len(one)))]


def encode_key(key: Key) -> bytes | None:
    if key is None or type(key) is bytes:
        return key
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, bytes | bytearray | memoryview):
        return bytes(key)
    raise _no_key(key)


def _no_key(key: object) -> ParameterInvalid:
    return ParameterInvalid(
        f"key is of type {type(key).__name__}; it must be bytes, text or None", parameter="key"
    )


def _check_headers(headers: Any) -> None:
    """Before anything is done with what a caller gave, whatever it is."""
    if type(headers) is not dict and not isinstance(headers, Mapping):
        raise ParameterInvalid(
            f"headers are of type {type(headers).__name__}; they must be a dict of names, each "
            "with bytes, a text or None",
            parameter="headers",
        )
    for name, value in headers.items():
        if not isinstance(name, str) or not (
            value is None or isinstance(value, str | bytes | bytearray | memoryview)
        ):
            raise ParameterInvalid(
                f"the header {name!r} is of type {type(value).__name__}; its name must be a text, "
                "and its value bytes, a text or None",
                parameter="headers",
            )


def encode_headers(headers: HeaderMap | None) -> Headers:
    if not headers:
        return ()
    _check_headers(headers)
    for name in headers:
        if not name or name.startswith(OWN_PREFIX):
            raise HeaderInvalid(
                f"a header may not be called {name!r}: names that begin with {OWN_PREFIX} are "
                "Millstream's own",
                header=name,
            )
    return tuple(
        (name, value.encode() if isinstance(value, str) else value)
        for name, value in headers.items()
    )


# ---- the same, in the JSON of HTTP


class ReadMessage(msgspec.Struct):
    """A message as the broker writes it in JSON."""

    partition: int
    offset: int
    timestamp_ms: int
    value: msgspec.Raw
    topic: str = ""
    key: str | None = None
    key_encoding: str | None = None
    encoding: str | None = None
    headers: dict[str, str | dict[str, str] | None] = {}
    lane: str = NORMAL_LANE

    def received(self, topic: str) -> Received:
        value, is_json = self._value()
        headers: Headers = ()
        if self.headers:
            headers = tuple((name, _header_bytes(text)) for name, text in self.headers.items())
        key = None if self.key is None else _decoded(self.key, self.key_encoding)
        return Received(
            self.topic or topic,
            self.partition,
            self.offset,
            self.timestamp_ms,
            key,
            value,
            headers,
            is_json,
            self.lane,
        )

    def _value(self) -> tuple[bytes | None, bool]:
        raw = bytes(self.value)
        if raw[:1] == b'"':
            return _decoded(msgspec.json.decode(raw, type=str), self.encoding), False
        return (None, False) if raw == b"null" else (raw, True)


def message_body(
    value: Value,
    *,
    key: Key = None,
    headers: HeaderMap | None = None,
    timestamp_ms: int | None = None,
    partition: int | None = None,
    lane: str | int | None = None,
    delay: Delay | None = None,
    deliver_at: When | None = None,
) -> dict[str, object]:
    """A message as the broker reads it in JSON."""
    body: dict[str, object] = {}
    if isinstance(value, bytes | bytearray | memoryview):
        body |= {"value": _base64(bytes(value)), "encoding": "base64"}
    else:
        data, marks = encode_value(value)
        if data is not None:
            body["value"] = msgspec.Raw(data) if marks else data.decode()
        else:
            body["value"] = None
    if isinstance(key, str):
        body["key"] = key
    elif key is not None:
        body |= {"key": _base64(encode_key(key) or b""), "key_encoding": "base64"}
    if headers:
        _check_headers(headers)
        body["headers"] = {name: _header_body(text) for name, text in headers.items()}
    if timestamp_ms is not None:
        body["timestamp_ms"] = timestamp_ms
    if partition is not None:
        body["partition"] = partition
    if lane is not None:
        body["lane"] = lane
    if delay is not None:
        body["delay"] = delay_body(delay)
    if deliver_at is not None:
        body["deliverAt"] = (
            deliver_at.isoformat() if isinstance(deliver_at, datetime) else deliver_at
        )
    return body


# What a message of many may have, by name.
MESSAGE_NAMES = frozenset(
    ("value", "key", "headers", "timestamp_ms", "partition", "lane", "delay", "deliver_at")
)


def message_body_of(message: Mapping[str, object], index: int) -> dict[str, object]:
    """One of many, given by the names of what `message_body` takes."""
    if not isinstance(message, Mapping):
        raise ParameterInvalid(
            f"message {index} is of type {type(message).__name__}; each must be a dict such as "
            "{'value': 1, 'key': 'a'}",
            parameter="messages",
        )
    if not (message.keys() <= MESSAGE_NAMES and "value" in message):
        wrong = ", ".join(sorted(str(name) for name in message.keys() - MESSAGE_NAMES))
        why = f"has {wrong}, which no message has" if wrong else "has no value"
        raise ParameterInvalid(
            f"message {index} {why}; there are {', '.join(sorted(MESSAGE_NAMES))}",
            parameter="messages",
        )
    return message_body(**message)  # type: ignore[arg-type]


def delay_body(delay: Delay) -> object:
    return delay / timedelta(milliseconds=1) if isinstance(delay, timedelta) else delay


def _decoded(text: str, encoding: str | None) -> bytes:
    return base64.b64decode(text) if encoding == "base64" else text.encode()


def _header_bytes(text: str | dict[str, str] | None) -> bytes | None:
    if text is None:
        return None
    return text.encode() if isinstance(text, str) else base64.b64decode(text["base64"])


def _header_body(value: bytes | str | None) -> object:
    return value if value is None or isinstance(value, str) else {"base64": _base64(bytes(value))}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
