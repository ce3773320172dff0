"""What HTTP says to queues and back, as plain functions: one piece of code for a route, whether it
is answered in the fast lane or by ASGI.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import msgspec

from millstream.errors import BodyInvalid, MillstreamError, ParameterInvalid
from millstream.listeners.http.answer import JSON, RAW, Answer
from millstream.listeners.http.answers import failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.queues import Message, Queue, Queues

# Longest wait of a dequeue, and most messages that one takes.
TIMEOUT_S_MAX = 30.0
COUNT_MAX = 1000
# Most bytes of messages in one answer, unless the first alone has more. Where they did not come as
# JSON they grow by a third, so an answer has at most 8 MiB.
BODIES_BYTES_MAX = 6 * 1024 * 1024 - 128 * 1024
NO_CONTENT = Answer(204)
ACCEPTED = Answer(202, b"", RAW)


class _One(msgspec.Struct):
    payload: msgspec.Raw


class _Many(msgspec.Struct):
    payloads: list[msgspec.Raw]


_NOTHING = msgspec.Raw(b"")


class _OneOrMany(msgspec.Struct):
    payload: msgspec.Raw = _NOTHING
    payloads: list[msgspec.Raw] | None = None


_one = msgspec.json.Decoder(_One)
_many = msgspec.json.Decoder(_Many)
_one_or_many = msgspec.json.Decoder(_OneOrMany)
# Numbers in an address: fewer forms than Python would take.
_WHOLE = re.compile(r"[0-9]{1,10}")
_DECIMAL = re.compile(r"[0-9]{1,10}(\.[0-9]{1,20})?")
# What a payload's own text may be wrong in: JSON, nesting that is too deep, and UTF-8, which the
# decoder does not look at in what it leaves as it is.
_UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)


class DequeueParameters(msgspec.Struct, frozen=True):
    timeout_s: float = 0.0
    count: int = 1
    # Whether `max` was given: then the answer is a list, also of one.
    is_batch: bool = False


_PLAIN = DequeueParameters()


def enqueue_raw(queues: Queues, name: str, body: bytes) -> Answer:
    queues.enqueue(queues.get_or_create(name), body, is_json=False)
    return ACCEPTED


def enqueue_json(queues: Queues, name: str, body: bytes) -> Answer:
    """A body of the form `{"payload": anything}`; what is kept is the payload's own text."""
    return Answer(200, _enqueue_one(queues, name, read_payload(body), is_json=True))


def read_payload(body: bytes) -> bytes:
    try:
        if not body.isascii():
            body.decode()
        return bytes(_one.decode(body).payload)
    except _UNREADABLE as error:
        raise _body_invalid('{"payload": …}', error) from error


def enqueue_batch(queues: Queues, name: str, body: bytes) -> Answer:
    """All of `payloads`, or none."""
    try:
        if not body.isascii():
            body.decode()
        payloads = [bytes(raw) for raw in _many.decode(body).payloads]
    except _UNREADABLE as error:
        raise _body_invalid('{"payloads": […]}', error) from error
    return Answer(200, _enqueue_many(queues, name, payloads))


def read_text(text: bytes) -> bytes | list[bytes]:
    """A text of a stream: one message, or a batch of them."""
    try:
        found = _one_or_many.decode(text)
    except _UNREADABLE as error:
        raise _body_invalid('{"payload": …} or {"payloads": […]}', error) from error
    payload = bytes(found.payload)
    if payload and found.payloads is None:
        return payload
    if payload or found.payloads is None:
        raise _body_invalid('{"payload": …} or {"payloads": […]}', "one of the two is needed")
    return [bytes(raw) for raw in found.payloads]


def confirm_one(queues: Queues, name: str, body: bytes, *, is_json: bool) -> bytes:
    """One message of a stream, with its confirmation or refusal."""
    try:
        return _enqueue_one(queues, name, body, is_json=is_json)
    except MillstreamError as error:
        return failure(error).body


def confirm_batch(queues: Queues, name: str, bodies: Sequence[bytes]) -> bytes:
    """All of a batch or none, with one confirmation."""
    try:
        return _enqueue_many(queues, name, bodies)
    except MillstreamError as error:
        return failure(error).body


def _enqueue_one(queues: Queues, name: str, body: bytes, *, is_json: bool) -> bytes:
    queue = queues.get_or_create(name)
    at_us = queues.enqueue(queue, body, is_json)
    return b'{"queued":true,"queue_name":"%b","queue_size":%d,"enqueued_at":%d}' % (
        name.encode(),
        len(queue),
        at_us,
    )


def _enqueue_many(queues: Queues, name: str, bodies: Sequence[bytes]) -> bytes:
    queue = queues.get_or_create(name)
    at_us = queues.enqueue_many(queue, bodies, is_json=True)
    return b'{"queued":%d,"queue_name":"%b","queue_size":%d,"enqueued_at":%d}' % (
        len(bodies),
        name.encode(),
        len(queue),
        at_us,
    )


def dequeue_parameters(query: bytes) -> DequeueParameters:
    if not query:
        return _PLAIN
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    given = dict(pairs)
    for name in ("timeout", "max"):
        if [key for key, _ in pairs].count(name) > 1:
            raise ParameterInvalid(f"{name} is given more than once", parameter=name)
    timeout_s, count = 0.0, 1
    if "timeout" in given:
        timeout_s = _number("timeout", given["timeout"], TIMEOUT_S_MAX)
    if "max" in given:
        count = int(_number("max", given["max"], COUNT_MAX, least=1, whole=True))
    return DequeueParameters(timeout_s, count, "max" in given)


def dequeued(queue: Queue, messages: Sequence[Message], *, is_batch: bool, is_raw: bool) -> Answer:
    """One message, several, or 204 when there is none."""
    if not messages:
        return NO_CONTENT
    if is_raw:
        return Answer(200, messages[0].body, RAW)
    name = queue.name.encode()
    if not is_batch:
        return Answer(200, message_json(*messages[0], name, len(queue)), JSON)
    listed = b",".join(_wrapped(messages, b"}"))
    page = b'{"messages":[%b],"queue_name":"%b","queue_size":%d}' % (listed, name, len(queue))
    return Answer(200, page, JSON)


def message_json(body: bytes, stamp: int, name: bytes, size: int) -> bytes:
    """One message, with its queue's name and what is left in it. What did not come as JSON cannot
    be embedded as it is."""
    if stamp & 1:
        form = b'{"payload":%b,"enqueued_at":%d,"queue_name":"%b","queue_size":%d}'
        return form % (body, stamp >> 1, name, size)
    form = (
        b'{"payload":"%b","encoding":"base64","enqueued_at":%d,"queue_name":"%b","queue_size":%d}'
    )
    return form % (base64.b64encode(body), stamp >> 1, name, size)


def stream_json(queue: Queue, messages: Sequence[Message]) -> list[bytes]:
    """Messages as a stream sends them, each by itself."""
    return _wrapped(messages, b',"queue_name":"%b"}' % queue.name.encode())


def batch_json(queue: Queue, messages: Sequence[Message]) -> bytes:
    """Messages as a stream sends them, several in one."""
    listed = b",".join(_wrapped(messages, b"}"))
    return b'{"messages":[%b],"queue_name":"%b"}' % (listed, queue.name.encode())


def _wrapped(messages: Sequence[Message], end: bytes) -> list[bytes]:
    """Each message as an object. Those that came together have the same time."""
    found: list[bytes] = []
    last, rest = -1, b""
    for body, stamp in messages:
        if stamp != last:
            last, rest = stamp, b',"enqueued_at":%d%b' % (stamp >> 1, end)
        if stamp & 1:
            found.append(b'{"payload":%b%b' % (body, rest))
        else:
            encoded = base64.b64encode(body)
            found.append(b'{"payload":"%b","encoding":"base64"%b' % (encoded, rest))
    return found


def _number(name: str, text: str, most: float, *, least: float = 0, whole: bool = False) -> float:
    form = _WHOLE if whole else _DECIMAL
    number = float(text) if form.fullmatch(text) else -1.0
    if not least <= number <= most:
        kind = "a whole number" if whole else "a number"
        raise ParameterInvalid(
            f"{name} is {text[:40]!r}; it must be {kind} from {least:g} to {most:g}",
            parameter=name,
            least=least,
            most=most,
        )
    return number


def _body_invalid(form: str, error: object) -> BodyInvalid:
    return BodyInvalid(f"the body must be JSON of the form {form}: {error}")
