"""The shortest way through a publish of one message, for heads that are known (`heads.py`).

What a head says is worked out once. What is left for a request: read its body, hand the record to
the publisher, and hold a place in line. The publisher fills that place when the batch, of which
the record is a part, is durable. What is unusual is left to the long way, which answers the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.errors import MillstreamError
from millstream.listeners.http.answer import RAW
from millstream.listeners.http.answers import failure
from millstream.listeners.http.heads import Later
from millstream.listeners.http.hot import bug
from millstream.listeners.http.messages import read_message
from millstream.wire.lanes import NORMAL

if TYPE_CHECKING:
    from millstream.broker.publishing import Publisher
    from millstream.listeners.http.answer import Answer
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.heads import Headers
    from millstream.listeners.http.hot import Line

_PLACED = b'%b,"partition":%d,"offset":%d,"timestamp_ms":%d}'


class PublishSlot:
    """The place of one publish in the line of its connection, until its record has one."""

    __slots__ = ("answer", "begin", "line")

    def __init__(self, begin: bytes) -> None:
        self.begin = begin
        self.answer: bytes | Answer | None = None
        self.line: Line | None = None

    def placed(self, partition: int, offset: int, timestamp_ms: int) -> None:
        self.answer = _PLACED % (self.begin, partition, offset, timestamp_ms)
        if self.line is not None:
            self.line.on_slot(self)

    def fail(self, error: BaseException) -> None:
        self.answer = failure(error) if isinstance(error, MillstreamError) else bug(error)
        if self.line is not None:
            self.line.on_slot(self)


class QuickPublish:
    """Makes the functions; each counts the requests that it takes."""

    __slots__ = ("_publisher",)

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    def __call__(self, name: str, query: bytes, headers: Headers, guard: Guard) -> Later | None:
        is_raw = False
        for header, text in headers:
            if header == b"content-type":
                is_raw = text.lower().startswith(RAW)
            elif header == b"idempotency-key":
                return None
        if query:
            return None
        take, begin = self._publisher.publish_for, b'{"topic":"%b"' % name.encode()

        def take_raw(body: bytes) -> PublishSlot | None:
            slot = PublishSlot(begin)
            try:
                if not take(slot, name, None, body):
                    return None
            except MillstreamError as error:
                slot.fail(error)
            guard.requests += 1
            return slot

        def take_json(body: bytes) -> PublishSlot | None:
            slot = PublishSlot(begin)
            try:
                key, value, own, time_ms, partition, lane, delay_ms, at_ms = read_message(body)
                if lane != NORMAL or delay_ms is not None or at_ms is not None:
                    return None
                if not take(slot, name, key, value, own, time_ms, partition):
                    return None
            except MillstreamError as error:
                slot.fail(error)
            guard.requests += 1
            return slot

        return Later(take_raw if is_raw else take_json)
