"""The shortest way through enqueue and dequeue, for heads that are known (`heads.py`).

What a head says is worked out once, here; what is left to do for a request is a function of its
body. Every answer is the one that the long way would give: what is unusual is left to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from starlette.datastructures import Headers as NamedHeaders

from millstream.errors import MillstreamError
from millstream.listeners.http.answer import RAW
from millstream.listeners.http.answers import failure
from millstream.listeners.http.queue_answers import (
    BODIES_BYTES_MAX,
    dequeue_parameters,
    dequeued,
    enqueue_batch,
    message_json,
    read_payload,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.queues import Queues
    from millstream.listeners.http.answer import Dated
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.heads import Headers, Quick

    MakeQuick: TypeAlias = Callable[[str, bytes, Headers, Dated], Quick | None]


class QuickQueues:
    """Makes the functions; each counts the requests that it answers."""

    __slots__ = ("_guard", "_queues")

    def __init__(self, queues: Queues, guard: Guard) -> None:
        self._queues = queues
        self._guard = guard

    def enqueue(self, name: str, query: bytes, headers: Headers, dated: Dated) -> Quick | None:
        if _is_raw(headers, b"content-type"):
            return self.enqueue_raw(name, query, headers, dated)
        queues, guard = self._queues, self._guard
        if not self._is_allowed(headers):
            return None
        begin = b'{"queued":true,"queue_name":"%b","queue_size":' % name.encode()

        def answer(body: bytes) -> bytes:
            guard.requests += 1
            try:
                payload = read_payload(body)
                queue = queues.get_or_create(name)
                at_us = queues.enqueue(queue, payload, True)
            except MillstreamError as error:
                return dated.render(failure(error))
            confirmation = b'%b%d,"enqueued_at":%d}' % (begin, len(queue), at_us)
            return b"%b%d\r\n\r\n%b" % (dated.json_ok, len(confirmation), confirmation)

        return answer

    def enqueue_raw(self, name: str, query: bytes, headers: Headers, dated: Dated) -> Quick | None:
        del query
        queues, guard = self._queues, self._guard
        if not self._is_allowed(headers):
            return None

        def answer(body: bytes) -> bytes:
            guard.requests += 1
            try:
                queues.enqueue(queues.get_or_create(name), body, False)
            except MillstreamError as error:
                return dated.render(failure(error))
            return dated.accepted

        return answer

    def enqueue_batch(
        self, name: str, query: bytes, headers: Headers, dated: Dated
    ) -> Quick | None:
        del query
        queues, guard = self._queues, self._guard
        if not self._is_allowed(headers):
            return None

        def answer(body: bytes) -> bytes:
            guard.requests += 1
            try:
                return dated.render(enqueue_batch(queues, name, body))
            except MillstreamError as error:
                return dated.render(failure(error))

        return answer

    def dequeue(self, name: str, query: bytes, headers: Headers, dated: Dated) -> Quick | None:
        if _is_raw(headers, b"accept"):
            return self.dequeue_raw(name, query, headers, dated)
        try:
            parameters = dequeue_parameters(query)
        except MillstreamError:
            return None
        if not self._is_allowed(headers):
            return None
        if parameters.is_batch:
            return self._dequeue_batch(name, parameters.count, dated)
        queues, guard = self._queues, self._guard
        has_to_wait = bool(parameters.timeout_s)
        label = name.encode()

        def answer(_: bytes) -> bytes | None:
            queue = queues.find(name)
            if queue is None or (has_to_wait and not len(queue)):
                return None
            guard.requests += 1
            message = queues.dequeue_one(queue)
            if message is None:
                return dated.no_content
            found = message_json(*message, label, len(queue))
            return b"%b%d\r\n\r\n%b" % (dated.json_ok, len(found), found)

        return answer

    def dequeue_raw(self, name: str, query: bytes, headers: Headers, dated: Dated) -> Quick | None:
        try:
            has_to_wait = bool(dequeue_parameters(query).timeout_s)
        except MillstreamError:
            return None
        if not self._is_allowed(headers):
            return None
        queues, guard = self._queues, self._guard

        def answer(_: bytes) -> bytes | None:
            queue = queues.find(name)
            if queue is None or (has_to_wait and not len(queue)):
                return None
            guard.requests += 1
            message = queues.dequeue_one(queue)
            if message is None:
                return dated.no_content
            return b"%b%d\r\n\r\n%b" % (dated.raw_ok, len(message[0]), message[0])

        return answer

    def _dequeue_batch(self, name: str, count: int, dated: Dated) -> Quick:
        """Of what is there; who finds nothing takes the long way."""
        queues, guard = self._queues, self._guard

        def answer(_: bytes) -> bytes | None:
            queue = queues.find(name)
            if queue is None or not len(queue):
                return None
            guard.requests += 1
            messages = queues.dequeue(queue, queue.count_within(count, BODIES_BYTES_MAX))
            return dated.render(dequeued(queue, messages, is_batch=True, is_raw=False))

        return answer

    def _is_allowed(self, headers: Headers) -> bool:
        return self._guard.objection(NamedHeaders(raw=headers)) is None


def _is_raw(headers: Headers, name: bytes) -> bool:
    for key, value in headers:
        if key == name:
            return value.startswith(RAW)
    return False
