"""Messages of topics as JSON, in and out. What is stored is bytes.

In: a JSON string is stored as its text. Any other JSON is stored as it was written, marked by the
record header `ms-type: json`; null is a tombstone. Bytes come in base64, with `"encoding"`.
Out: what is marked is embedded as JSON, a text is a string, and anything else is base64.

Headers that begin with `ms-` are Millstream's own. They are not accepted, and not shown: the lane
is a field. Those of a dead letter are shown as they are.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from millstream.broker.idempotency import KEY, KEY_LENGTH_MAX
from millstream.broker.publishing import Outgoing
from millstream.broker.reading import Stored
from millstream.errors import (
    BodyInvalid,
    HeaderInvalid,
    IdempotencyKeyInvalid,
    MillstreamError,
    PartitionUnknown,
    TimestampInvalid,
)
from millstream.listeners.http.bodies import UNREADABLE, read_body, reason
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, SHOWN_MAX
from millstream.log.batch import Headers
from millstream.wire.batches import is_shown_header
from millstream.wire.lanes import NORMAL, lane_of_word
from millstream.wire.times import delay_ms_of, time_ms_of

if TYPE_CHECKING:
    from millstream.broker.delivery_values import Delivered

RECORDS_MAX = 10_000
HEADERS_MAX = 100
HEADER_NAME_LENGTH_MAX = 255
OWN_PREFIX = "ms-"
NORMAL_LANE = "normal"
_HEADER_NAME = re.compile(rf"[ -~]{{1,{HEADER_NAME_LENGTH_MAX}}}")
TYPE = ("ms-type", b"json")
_TYPED = (TYPE,)
_QUOTE = ord('"')


class Base64(msgspec.Struct, forbid_unknown_fields=True):
    base64: str


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """A message as a client sends it."""

    value: msgspec.Raw
    key: str | None = None
    key_encoding: Literal["base64"] | None = None
    encoding: Literal["base64"] | None = None
    headers: dict[str, str | Base64 | None] | None = None
    # Some languages write a whole number with a point.
    timestamp_ms: int | float | None = None
    partition: int | float | None = None
    # One or the other: two words for one thing.
    lane: str | int | float | None = None
    priority: str | int | float | None = None
    # When it is to appear in its topic: after so long, or at a time.
    delay: str | int | float | None = None
    deliver_at: str | int | float | None = msgspec.field(default=None, name="deliverAt")


class Messages(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a publish of many."""

    messages: list[Message]


class Shown(msgspec.Struct, omit_defaults=True, gc=False):
    """A message as a client reads it."""

    partition: int
    offset: int
    timestamp_ms: int
    key: str | None
    value: object
    lane: str
    topic: str | msgspec.UnsetType = msgspec.UNSET
    key_encoding: str | None = None
    encoding: str | None = None
    headers: dict[str, str | Base64 | None] | None = None
    # Of a record that was received by lease.
    deliveries: int | msgspec.UnsetType = msgspec.UNSET
    receipt: str | msgspec.UnsetType = msgspec.UNSET


_message = msgspec.json.Decoder(Message)
_messages = msgspec.json.Decoder(Messages)

_raw = msgspec.json.Decoder(msgspec.Raw)
_text = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode


# ---- in


def read_message(body: bytes) -> Outgoing:
    """One message, from a body in JSON."""
    try:
        message = read_body(_message, body, '{"value": …, "key": …}')
    except BodyInvalid as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise
        # It is no JSON at all, as the body of a client that meant its bytes.
        raise BodyInvalid(
            f"{error.message}; bytes are published as they are with Content-Type: "
            "application/octet-stream"
        ) from error
    return outgoing(message)


def read_messages(body: bytes) -> list[Outgoing]:
    """Many messages; the error of a bad one names it."""
    messages = read_body(_messages, body, '{"messages": [{"value": …}, …]}').messages
    return all_outgoing(messages)


def all_outgoing(messages: Sequence[Message]) -> list[Outgoing]:
    if not 1 <= len(messages) <= RECORDS_MAX:
        raise BodyInvalid(
            f"there are {len(messages)} messages; one request takes 1 to {RECORDS_MAX}",
            least=1,
            most=RECORDS_MAX,
        )
    records: list[Outgoing] = []
    try:
        for message in messages:
            records.append(outgoing(message))  # noqa: PERF401  the error needs the count
    except MillstreamError as error:
        error.fields["record"] = len(records)
        raise
    return records


def outgoing(message: Message) -> Outgoing:
    """What is stored of a message."""
    text = bytes(message.value)
    value: bytes | None
    headers: Headers = ()
    if message.encoding is not None:
        value = from_base64("value", _string(text))
    elif text[0] == _QUOTE:
        # A string without an escape is what stands between its quotes.
        value = text[1:-1] if b"\\" not in text else _string(text).encode()
    elif text == b"null":
        value = None
    else:
        value, headers = text, _TYPED
    key = message.key
    if message.key_encoding is not None:
        stored_key = None if key is None else from_base64("key", key)
    else:
        stored_key = None if key is None else key.encode()
    if message.headers:
        headers += headers_of(message.headers)
    timestamp_ms, partition = message.timestamp_ms, message.partition
    if timestamp_ms is not None:
        timestamp_ms = _time(timestamp_ms)
    if partition is not None:
        partition = _partition(partition)
    if message.lane is message.priority is message.delay is message.deliver_at is None:
        return Outgoing(stored_key, value, headers, timestamp_ms, partition)
    lane = lane_said(message.lane, message.priority)
    later = delay_said(message.delay, message.deliver_at)
    return Outgoing(stored_key, value, headers, timestamp_ms, partition, lane, *later)


def delay_said(
    delay: str | float | None, deliver_at: str | float | None
) -> tuple[int | None, int | None]:
    """In milliseconds. Both at once, the publisher refuses."""
    return (
        None if delay is None else delay_ms_of(delay),
        None if deliver_at is None else time_ms_of(deliver_at),
    )


def lane_said(lane: str | float | None, priority: str | float | None) -> int:
    """The lane of a message that names it, by one name or the other."""
    if lane is not None and priority is not None:
        raise BodyInvalid("lane and priority say the same thing; name one of them")
    word = lane if lane is not None else priority
    if isinstance(word, float):
        word = _whole("lane", word)
    return NORMAL if word is None else lane_of_word(word)


def _time(number: float) -> int:
    whole = _whole("timestamp_ms", number)
    if not 0 <= whole <= OFFSET_MAX:
        raise TimestampInvalid(
            f"{number} is not a time in milliseconds since 1970", timestamp_ms=number
        )
    return whole


def _partition(number: float) -> int:
    """Whether the topic has it, the publisher says."""
    whole = _whole("partition", number)
    if not 0 <= whole <= PARTITION_MAX:
        raise PartitionUnknown(f"no topic has a partition {number}", partition=number)
    return whole


def _whole(name: str, number: float) -> int:
    whole = int(number)
    if whole != number:
        raise BodyInvalid(f"{name} is {number}; it must be a whole number")
    return whole


def headers_of(given: dict[str, str | Base64 | None]) -> Headers:
    if len(given) > HEADERS_MAX:
        raise HeaderInvalid(f"there are {len(given)} headers; at most {HEADERS_MAX} are taken")
    headers: list[tuple[str, bytes | None]] = []
    for name, value in given.items():
        if isinstance(value, Base64):
            data: bytes | None = from_base64(f"the header {name[:SHOWN_MAX]}", value.base64)
        else:
            data = None if value is None else value.encode()
        headers.append((header_name(name), data))
    return tuple(headers)


def header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise HeaderInvalid(
            f"{name[:SHOWN_MAX]!r} is not a name of a header: it has 1 to "
            f"{HEADER_NAME_LENGTH_MAX} printable ASCII characters",
            header=name[:SHOWN_MAX],
        )
    if name.startswith(OWN_PREFIX):
        raise HeaderInvalid(
            f"the header {name[:SHOWN_MAX]!r} begins with {OWN_PREFIX}, which Millstream keeps "
            "for its own; choose another name",
            header=name[:SHOWN_MAX],
        )
    return name


def idempotency_key(text: str) -> str:
    """Checked here too, because a publish that nobody waits for does not look at it."""
    if not KEY.fullmatch(text):
        raise IdempotencyKeyInvalid(
            f"an idempotency key has 1 to {KEY_LENGTH_MAX} visible ASCII characters"
        )
    return text


def _string(text: bytes) -> str:
    try:
        return _text.decode(text)
    except UNREADABLE as error:
        why = reason(error, text)
        raise BodyInvalid(f"value is not a string as JSON has them: {why}") from error


def from_base64(what: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BodyInvalid(f"{what} is not base64: {error}") from error


# ---- out


def shown(partition: int, records: Iterable[Stored], topic: str | None = None) -> list[Shown]:
    name = msgspec.UNSET if topic is None else topic
    return [_shown(partition, record, name) for record in records]


def shown_lease(one: Delivered) -> Shown:
    """A record that goes to a worker."""
    record = one.record
    if record.key is None and record.value is not None and not record.headers:
        # As most are; all of it is said at once, because that is quicker.
        value, encoding = _text_or_base64(record.value)
        return Shown(
            one.partition,
            record.offset,
            record.timestamp,
            None,
            value,
            one.lane,
            one.topic,
            None,
            encoding,
            None,
            one.deliveries,
            one.receipt,
        )
    message = _shown(one.partition, record, one.topic)
    message.lane, message.deliveries, message.receipt = one.lane, one.deliveries, one.receipt
    return message


def encoded(message: Shown) -> bytes:
    return _encode(message)


def listed(messages: list[Shown]) -> bytes:
    """As a list in JSON."""
    return _encode(messages)


def _shown(partition: int, record: Stored, topic: str | msgspec.UnsetType) -> Shown:
    key, value, headers = record.key, record.value, record.headers
    lane = (record.lane or NORMAL_LANE) if headers else NORMAL_LANE
    message = Shown(partition, record.offset, record.timestamp, None, None, lane, topic)
    if key is not None:
        message.key, message.key_encoding = _text_or_base64(key)
    if value is None:
        pass
    elif headers and TYPE in headers and (embedded := _embedded(value)) is not None:
        message.value = embedded
    else:
        message.value, message.encoding = _text_or_base64(value)
    if headers:
        message.headers = _shown_headers(headers) or None
    return message


def _embedded(value: bytes) -> msgspec.Raw | None:
    """The mark may be on a record of a ready-made batch, so it is believed only as far as it is
    true. A line break can only stand between tokens, and would end a line of a stream."""
    try:
        if not value.isascii():
            value.decode()
        _raw.decode(value)
    except UNREADABLE:
        return None
    if b"\n" in value or b"\r" in value:
        value = value.replace(b"\n", b" ").replace(b"\r", b" ")
    return msgspec.Raw(value)


def _text_or_base64(data: bytes) -> tuple[str, str | None]:
    try:
        return data.decode(), None
    except UnicodeDecodeError:
        return base64.b64encode(data).decode(), "base64"


def _shown_headers(
    headers: Iterable[tuple[str, bytes | None]],
) -> dict[str, str | Base64 | None]:
    """Of a name that stands twice, which other clients may write, the last."""
    found: dict[str, str | Base64 | None] = {}
    for name, value in headers:
        if not is_shown_header(name):
            continue
        if value is None:
            found[name] = None
            continue
        text, encoding = _text_or_base64(value)
        found[name] = text if encoding is None else Base64(text)
    return found
