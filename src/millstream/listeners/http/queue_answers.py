"""What HTTP says to queues and back, as plain functions: one piece of code for a route, whether it
is answered in the fast lane or by ASGI.
"""

from __future__ import annotations

import base64
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
# The forms of bodies, for the OpenAPI page.
MESSAGE_FORM = {"type": "object", "required": ["payload"], "properties": {"payload": {}}}
BATCH_FORM = {
    "type": "object",
    "required": ["payloads"],
    "properties": {"payloads": {"type": "array", "items": {}}},
}
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
    try:
        if not body.isascii():
            body.decode()
        payload = bytes(_one.decode(body).payload)
    except _UNREADABLE as error:
        raise _body_invalid('{"payload": …}', error) from error
    return Answer(200, _enqueue_one(queues, name, payload, is_json=True))


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


def confirm_all(
    queues: Queues, name: str, bodies: Sequence[bytes], *, is_json: bool
) -> list[bytes]:
    """Single messages that came together; a confirmation, or a refusal, for each."""
    try:
        queue = queues.get_or_create(name)
    except MillstreamError as error:
        return [failure(error).body] * len(bodies)
    if not queues.fits(queue, bodies):
        return [_confirm(queues, name, body, is_json) for body in bodies]
    size = len(queue)
    at_us = queues.enqueue_many(queue, bodies, is_json)
    head = b'{"queued":true,"queue_name":"%b","queue_size":' % name.encode()
    tail = b',"enqueued_at":%d}' % at_us
    return [b"%b%d%b" % (head, place, tail) for place in range(size + 1, size + 1 + len(bodies))]


def confirm_batch(queues: Queues, name: str, bodies: Sequence[bytes]) -> bytes:
    """All of a batch or none, with one confirmation."""
    try:
        return _enqueue_many(queues, name, bodies)
    except MillstreamError as error:
        return failure(error).body


def _confirm(queues: Queues, name: str, body: bytes, is_json: bool) -> bytes:
    try:
        return _enqueue_one(queues, name, body, is_json=is_json)
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
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
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
        return Answer(
            200, b"{%b,%b" % (_message(messages[0]), _queue_fields(name, len(queue))), JSON
        )
    listed = b",".join([b"{%b}" % _message(message) for message in messages])
    return Answer(200, b'{"messages":[%b],%b' % (listed, _queue_fields(name, len(queue))), JSON)


def stream_json(queue: Queue, messages: Sequence[Message]) -> list[bytes]:
    """Messages as a stream sends them, each by itself."""
    rest = b'"queue_name":"%b"}' % queue.name.encode()
    return [
        b'{"payload":%b,"enqueued_at":%d,%b' % (message[0], message[1] >> 1, rest)
        if message[1] & 1
        else b"{%b,%b" % (_message(message), rest)
        for message in messages
    ]


def batch_json(queue: Queue, messages: Sequence[Message]) -> bytes:
    """Messages as a stream sends them, several in one."""
    listed = b",".join([b"{%b}" % _message(message) for message in messages])
    return b'{"messages":[%b],"queue_name":"%b"}' % (listed, queue.name.encode())


def _message(message: Message) -> bytes:
    """The fields of a message. What did not come as JSON cannot be embedded as it is."""
    at_us = message.stamp >> 1
    if message.stamp & 1:
        return b'"payload":%b,"enqueued_at":%d' % (message.body, at_us)
    encoded = base64.b64encode(message.body)
    return b'"payload":"%b","encoding":"base64","enqueued_at":%d' % (encoded, at_us)


def _queue_fields(name: bytes, size: int) -> bytes:
    return b'"queue_name":"%b","queue_size":%d}' % (name, size)


def _number(name: str, text: str, most: float, *, least: float = 0, whole: bool = False) -> float:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = -1.0
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
