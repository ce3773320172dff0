"""All hot routes and WebSockets of the HTTP listener: who takes a path, by its beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.listeners.http.answers import failure
from millstream.listeners.http.queue_sockets import STOPPING
from millstream.listeners.http.topic_lane import PREFIX
from millstream.observe.metrics import gauge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.errors import MillstreamError
    from millstream.listeners.http.answer import Answer
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.hot import HotRoute
    from millstream.listeners.http.lane import LaneProtocol
    from millstream.listeners.http.queue_lane import QueueLane
    from millstream.listeners.http.stream_sockets import StreamSockets
    from millstream.listeners.http.topic_lane import TopicLane
    from millstream.listeners.http.v1 import V1
    from millstream.listeners.http.websocket import WebSocket


class Lanes:
    """What `LaneProtocol` asks of its routes."""

    __slots__ = ("_guard", "_queues", "_sockets", "_topics", "_v1")

    def __init__(
        self,
        guard: Guard,
        queues: QueueLane,
        v1: V1,
        topics: TopicLane,
        sockets: StreamSockets,
    ) -> None:
        self._guard = guard
        self._queues = queues
        self._v1 = v1
        self._topics = topics
        self._sockets = sockets

    def body_bytes_max(self, path: bytes) -> int:
        if path.startswith(PREFIX):
            return self._topics.body_bytes_max
        return self._queues.body_bytes_max(path)

    def find(self, method: bytes, path: bytes) -> tuple[HotRoute, str] | None:
        if path.startswith(PREFIX):
            return self._topics.find(method, path)
        return self._queues.find(method, path)

    def objection(self, headers: list[tuple[bytes, bytes]]) -> Answer | None:
        return self._guard.hot_objection(headers)

    def upgrade(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]
    ) -> WebSocket | Answer:
        if not url.startswith(PREFIX):
            return self._queues.upgrade(method, url, headers)
        if self._v1.waits.is_draining:
            return STOPPING
        return self._sockets.upgrade(method, url, headers)

    def failure(self, error: MillstreamError) -> Answer:
        return failure(error)

    def too_large(self, path: bytes) -> Answer:
        if path.startswith(PREFIX):
            return self._topics.too_large()
        return self._queues.too_large(path)

    def refused(self, lane: LaneProtocol, answer: Answer) -> None:
        self._queues.refused(lane, answer)

    def metrics(self) -> Iterator[Metric]:
        yield from self._queues.metrics()
        waits = self._v1.waits
        yield gauge("http_waiting", "Requests and streams that wait for messages.", len(waits))

    def drain(self) -> None:
        """Who waits is answered, and nobody waits any more. WebSockets are told by the listener,
        as all open connections are; no new one is made."""
        self._queues.drain()
        self._v1.drain()
