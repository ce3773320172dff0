"""The hot routes of queues: which requests they are, and how each is answered."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.queues import DEFAULT_QUEUE, body_too_large, message_too_large
from millstream.errors import MillstreamError
from millstream.listeners.http.answer import RAW, Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.queue_answers import (
    NO_CONTENT,
    dequeue_parameters,
    dequeued,
    enqueue_batch,
    enqueue_json,
    enqueue_raw,
)
from millstream.listeners.http.queue_sockets import STOPPING, QueueSockets
from millstream.listeners.http.websocket import SocketTimes
from millstream.observe.histogram import SAMPLE_EVERY, Histogram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from millstream.broker.queues import Message, Queue, Queues
    from millstream.broker.timers import Timers
    from millstream.broker.wheel import Timer
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.lane import HotRequest, HotRoute
    from millstream.listeners.http.websocket import WebSocket


# What `{"payload": }` and some white space add to a message.
JSON_AROUND_BYTES = 1024


class BodyLimits(NamedTuple):
    """A batch may be larger than one message."""

    message_bytes: int
    batch_bytes: int


class Patience:
    """Somebody who waits for messages over HTTP, for a while."""

    __slots__ = ("_answer", "_queue", "_queues", "_timer", "_timers", "count_max")

    def __init__(
        self,
        queues: Queues,
        timers: Timers,
        queue: Queue,
        count_max: int,
        answer: Callable[[list[Message]], None],
    ) -> None:
        self._queues = queues
        self._timers = timers
        self._queue = queue
        self._answer = answer
        self._timer: Timer | None = None
        self.count_max = count_max

    def wait(self, seconds: float) -> None:
        self._timer = self._timers.after(seconds, self._on_timeout)
        self._queues.wait(self._queue, self)

    def take(self, messages: list[Message]) -> None:
        if self._timer is not None:
            self._timers.cancel(self._timer)
        self._answer(messages)

    def give_up(self) -> None:
        """The client went away: nothing is taken for it any more."""
        if self._timer is not None:
            self._timers.cancel(self._timer)
        self._queues.leave(self._queue, self)

    def _on_timeout(self) -> None:
        self._timer = None
        self._queues.leave(self._queue, self)
        self._queue.timeout_total += 1
        self._answer([])


class _Hot(NamedTuple):
    """A route as it is, and with a clock, for the requests that are measured."""

    route: HotRoute
    timed: HotRoute
    histogram: Histogram

    def next(self) -> HotRoute:
        histogram = self.histogram
        histogram.turn += 1
        if histogram.turn < SAMPLE_EVERY:
            return self.route
        histogram.turn = 0
        return self.timed


def _measured(route: HotRoute, histogram: Histogram) -> _Hot:
    """A dequeue that waits is measured up to where it begins to wait."""

    def timed(request: HotRequest) -> Answer | None:
        begin = perf_counter()
        try:
            return route(request)
        finally:
            histogram.observe(perf_counter() - begin)

    return _Hot(route, timed, histogram)


class QueueLane:
    """What `LaneProtocol` asks of its routes."""

    def __init__(
        self,
        queues: Queues,
        timers: Timers,
        guard: Guard,
        limits: BodyLimits,
        socket_times: SocketTimes | None = None,
    ) -> None:
        self._queues = queues
        self._timers = timers
        self._guard = guard
        self._limits = limits
        self._sockets = QueueSockets(queues, timers, limits, socket_times or SocketTimes())
        self._is_draining = False
        self._waiting: dict[Patience, None] = {}
        self._enqueue_times = Histogram()
        self._dequeue_times = Histogram()
        self._routes = {
            (b"POST", b"enqueue"): _measured(self._enqueue, self._enqueue_times),
            (b"POST", b"enqueue/batch"): _measured(self._enqueue_batch, self._enqueue_times),
            (b"GET", b"dequeue"): _measured(self._dequeue, self._dequeue_times),
        }
        self._default = {
            (b"POST", b"/enqueue"): _measured(self._enqueue_default, self._enqueue_times),
            (b"GET", b"/dequeue"): _measured(self._dequeue_default, self._dequeue_times),
        }

    def body_bytes_max(self, path: bytes) -> int:
        """Of one message, with room for the JSON around it (the queue itself is exact); of a
        batch, and of whatever else there is, more."""
        if path.endswith(b"/enqueue"):
            return self._limits.message_bytes + JSON_AROUND_BYTES
        return self._limits.batch_bytes

    def find(self, method: bytes, path: bytes) -> tuple[HotRoute, str] | None:
        if path.startswith(b"/queues/"):
            name, _, verb = path[8:].partition(b"/")
            hot = self._routes.get((method, verb))
            # A name with an escape is rare; ASGI takes care of it.
            if hot is None or b"%" in name or not name.isascii():
                return None
            return hot.next(), name.decode()
        hot = self._default.get((method, path))
        return None if hot is None else (hot.next(), DEFAULT_QUEUE)

    def metrics(self) -> Iterator[Metric]:
        """How long requests take from their last byte to their answer."""
        yield self._enqueue_times.metric("enqueue_duration_seconds", "Work on an enqueue.")
        yield self._dequeue_times.metric(
            "dequeue_duration_seconds", "Work on a dequeue, without waiting for a message."
        )

    def objection(self, headers: list[tuple[bytes, bytes]]) -> Answer | None:
        return self._guard.hot_objection(headers)

    def upgrade(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]
    ) -> WebSocket | Answer:
        return STOPPING if self._is_draining else self._sockets.upgrade(method, url, headers)

    def failure(self, error: MillstreamError) -> Answer:
        return failure(error)

    def too_large(self, path: bytes) -> Answer:
        if path.endswith(b"/enqueue"):
            return failure(message_too_large(self._limits.message_bytes))
        return failure(body_too_large(self._limits.batch_bytes))

    # ---- routes

    def _enqueue_default(self, request: HotRequest) -> Answer:
        return enqueue_raw(self._queues, request.name, request.body)

    def _enqueue(self, request: HotRequest) -> Answer:
        if request.header(b"content-type").startswith(RAW):
            return enqueue_raw(self._queues, request.name, request.body)
        return enqueue_json(self._queues, request.name, request.body)

    def _enqueue_batch(self, request: HotRequest) -> Answer:
        return enqueue_batch(self._queues, request.name, request.body)

    def _dequeue_default(self, request: HotRequest) -> Answer | None:
        return self._take(request, is_raw=True)

    def _dequeue(self, request: HotRequest) -> Answer | None:
        return self._take(request, is_raw=request.header(b"accept").startswith(RAW))

    def _take(self, request: HotRequest, *, is_raw: bool) -> Answer | None:
        parameters = dequeue_parameters(request.query)
        queue = self._queues.get(request.name)
        if request.is_lost:
            # Nobody would read it.
            return NO_CONTENT
        count = 1 if is_raw else parameters.count
        messages = self._queues.dequeue(queue, count)
        is_batch = parameters.is_batch
        if messages or not parameters.timeout_s or self._is_draining:
            return dequeued(queue, messages, is_batch=is_batch, is_raw=is_raw)

        def answer(found: list[Message]) -> None:
            self._waiting.pop(patience, None)
            if request.is_lost and found:
                self._queues.put_back(queue, found)
                return
            request.reply(dequeued(queue, found, is_batch=is_batch, is_raw=is_raw))

        def lost() -> None:
            self._waiting.pop(patience, None)
            patience.give_up()

        patience = Patience(self._queues, self._timers, queue, count, answer)
        request.on_lost = lost
        self._waiting[patience] = None
        patience.wait(parameters.timeout_s)
        return None

    def drain(self) -> None:
        """Waiting dequeues end with nothing, and no new one waits. WebSockets are told by the
        listener, as all open connections are; no new one is made."""
        self._is_draining = True
        for patience in list(self._waiting):
            patience.give_up()
            patience.take([])
