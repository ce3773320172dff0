"""The two ways in which `/v1/topics/{topic}/stream` speaks: JSON texts and binary frames.

Both say the same (`wire/stream.py` has the list); what comes in is turned into the messages of
that module, and what goes out is written for the form that a connection asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from millstream.broker.publishing import Outgoing
from millstream.errors import BodyInvalid, MillstreamError
from millstream.listeners.http.answers import failure
from millstream.listeners.http.bodies import UNREADABLE, reason, record_of
from millstream.listeners.http.consumer_answers import delivered
from millstream.listeners.http.messages import (
    RECORDS_MAX,
    TYPE,
    Message,
    all_outgoing,
    encoded,
    header_name,
    idempotency_key,
)
from millstream.log.batch import LANE_HEADER
from millstream.wire import stream
from millstream.wire.batches import is_shown_header

if TYPE_CHECKING:
    from millstream.broker.publishing import Acks, Published
    from millstream.broker.sequential import Delivered

ID_MAX = 2**31 - 1
CREDIT_MAX = 1_000_000
# Of one binary frame with messages, about; a reader holds a whole frame.
FRAME_BYTES = 64 * 1024


# ---- what is asked


class Publish(NamedTuple):
    id: int | None
    records: list[Outgoing]
    acks: Acks
    idempotency_key: str | None


class Open(NamedTuple):
    id: int | None
    consumer_id: str | None
    partition: int | None
    start: Literal["earliest", "latest"] | int


class Next(NamedTuple):
    credit: int


class Ack(NamedTuple):
    id: int | None
    partition: int
    offset: int


Asked = Publish | Open | Next | Ack


class _Text(msgspec.Struct, forbid_unknown_fields=True, tag_field="type"):
    pass


class _PublishText(_Text, tag="publish"):
    messages: list[Message]
    id: int | None = None
    acks: Literal["none", "leader", "all"] = "all"
    idempotency_key: str | None = None


class _OpenText(_Text, tag="open"):
    id: int | None = None
    consumer_id: str | None = None
    partition: int | None = None
    start: Literal["earliest", "latest"] | int = "earliest"


class _NextText(_Text, tag="next"):
    credit: int


class _AckText(_Text, tag="ack"):
    partition: int
    offset: int
    id: int | None = None


class _IdText(msgspec.Struct):
    id: int | None = None


_text = msgspec.json.Decoder(_PublishText | _OpenText | _NextText | _AckText)
_id = msgspec.json.Decoder(_IdText)
_STARTS: dict[int, Literal["earliest", "latest"]] = {
    stream.EARLIEST: "earliest",
    stream.LATEST: "latest",
}


def read_text(data: bytes) -> Asked:
    try:
        said = _text.decode(data)
    except UNREADABLE as error:
        why = reason(error, data)
        raise BodyInvalid(f"this is no message of a stream: {why}", **record_of(error)) from error
    if isinstance(said, _NextText):
        return Next(_credit(said.credit))
    if said.id is not None and not 0 <= said.id <= ID_MAX:
        raise BodyInvalid(f"id is {said.id}; it must be from 0 to {ID_MAX}")
    match said:
        case _PublishText():
            records = all_outgoing(said.messages)
            return Publish(said.id, records, said.acks, _key(said.idempotency_key))
        case _OpenText():
            return Open(said.id, said.consumer_id, said.partition, said.start)
    return Ack(said.id, said.partition, said.offset)


def id_of_text(data: bytes) -> int | None:
    """For the error of a text that could not be read."""
    try:
        found = _id.decode(data).id
    except UNREADABLE:
        return None
    return found if found is not None and 0 <= found <= ID_MAX else None


def read_binary(data: bytes) -> Asked:
    try:
        said = stream.decode(data)
    except stream.StreamFrameError as error:
        raise BodyInvalid(str(error)) from error
    match said:
        case stream.Publish():
            key = _key(said.idempotency_key or None)
            return Publish(_known(said.id), _records(said.records), _acks(said.acks), key)
        case stream.Open():
            start = _STARTS.get(said.start, said.start)
            return Open(_known(said.id), said.consumer_id or None, _known(said.partition), start)
        case stream.Next():
            return Next(_credit(said.credit))
        case stream.Ack():
            return Ack(_known(said.id), said.partition, said.offset)
        case _:
            raise BodyInvalid("this is a message that only the broker sends")


def id_of_binary(data: bytes) -> int | None:
    if len(data) < 5 or data[0] not in (stream.PUBLISH, stream.OPEN, stream.ACK):
        return None
    return _known(int.from_bytes(data[1:5], "big", signed=True))


def _known(number: int) -> int | None:
    return None if number < 0 else number


def _acks(acks: str) -> Acks:
    return "none" if acks == "none" else "leader" if acks == "leader" else "all"


def _key(key: str | None) -> str | None:
    return None if key is None else idempotency_key(key)


def _credit(credit: int) -> int:
    if not 1 <= credit <= CREDIT_MAX:
        raise BodyInvalid(f"credit is {credit}; it must be from 1 to {CREDIT_MAX}")
    return credit


def _records(records: Sequence[stream.Record]) -> list[Outgoing]:
    if not 1 <= len(records) <= RECORDS_MAX:
        raise BodyInvalid(f"there are {len(records)} messages; it must be 1 to {RECORDS_MAX}")
    found: list[Outgoing] = []
    try:
        for record in records:
            for header in record.headers:
                if header != TYPE:
                    header_name(header[0])
            found.append(
                Outgoing(
                    record.key,
                    record.value,
                    tuple(record.headers),
                    None if record.timestamp_ms == -1 else record.timestamp_ms,
                    None if record.partition == -1 else record.partition,
                )
            )
    except MillstreamError as error:
        error.fields["record"] = len(found)
        raise
    return found


# ---- what is answered


class Side(NamedTuple):
    """How answers are written, one frame's payload each; and messages, several."""

    is_binary: bool
    published: Callable[[int | None, Published], bytes]
    opened: Callable[[int | None, str, dict[int, int]], bytes]
    acked: Callable[[int | None, int, int], bytes]
    failed: Callable[[int | None, MillstreamError], bytes]
    messages: Callable[[list[Delivered]], list[bytes]]


def _text_head(kind: bytes, id: int | None) -> bytes:
    return b'{"type":"%b"' % kind + (b"" if id is None else b',"id":%d' % id)


def _published_text(id: int | None, published: Published) -> bytes:
    placed = b",".join(
        [b'{"partition":%d,"offset":%d,"timestamp_ms":%d}' % one for one in published.placed]
    )
    duplicate = b',"duplicate":true' if published.is_duplicate else b""
    return b'%b,"placed":[%b]%b}' % (_text_head(b"published", id), placed, duplicate)


def _opened_text(id: int | None, consumer_id: str, positions: dict[int, int]) -> bytes:
    listed = b",".join([b'{"partition":%d,"offset":%d}' % one for one in positions.items()])
    head = _text_head(b"opened", id)
    return b'%b,"consumer_id":"%b","positions":[%b]}' % (head, consumer_id.encode(), listed)


def _acked_text(id: int | None, partition: int, position: int) -> bytes:
    head = _text_head(b"acked", id)
    return b'%b,"partition":%d,"position":%d}' % (head, partition, position)


def _failed_text(id: int | None, error: MillstreamError) -> bytes:
    return _text_head(b"error", id) + b"," + failure(error).body[1:]


def _messages_text(found: list[Delivered]) -> list[bytes]:
    return [b'{"type":"message",' + encoded(one)[1:] for one in delivered(found)]


TEXT_SIDE = Side(False, _published_text, _opened_text, _acked_text, _failed_text, _messages_text)


def _wire_id(id: int | None) -> int:
    return stream.NO_ID if id is None else id


def _published_binary(id: int | None, published: Published) -> bytes:
    placed = [stream.Place(*one) for one in published.placed]
    return stream.encode(stream.Published(_wire_id(id), placed, published.is_duplicate))


def _opened_binary(id: int | None, consumer_id: str, positions: dict[int, int]) -> bytes:
    return stream.encode(stream.Opened(_wire_id(id), consumer_id, positions))


def _acked_binary(id: int | None, partition: int, position: int) -> bytes:
    return stream.encode(stream.Acked(_wire_id(id), partition, position))


def _failed_binary(id: int | None, error: MillstreamError) -> bytes:
    return stream.encode(stream.Failed(_wire_id(id), failure(error).body))


def _messages_binary(found: list[Delivered]) -> list[bytes]:
    frames: list[bytes] = []
    part: list[stream.Record] = []
    size = 0
    for partition, record in found:
        part.append(
            stream.Record(
                record.key,
                record.value,
                [one for one in record.headers if _is_sent(one)],
                record.timestamp,
                partition,
                record.offset,
            )
        )
        size += len(record.key or b"") + len(record.value or b"")
        if size >= FRAME_BYTES:
            frames.append(stream.encode_messages(part))
            part, size = [], 0
    if part:
        frames.append(stream.encode_messages(part))
    return frames


def _is_sent(header: tuple[str, bytes | None]) -> bool:
    """What JSON says in fields of their own stands in headers here."""
    return header == TYPE or header[0] == LANE_HEADER or is_shown_header(header[0])


BINARY_SIDE = Side(
    True, _published_binary, _opened_binary, _acked_binary, _failed_binary, _messages_binary
)
