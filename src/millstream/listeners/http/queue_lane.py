"""The hot routes of queues: which requests they are, and how each is answered."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes

from millstream.broker.queues import DEFAULT_QUEUE, body_too_large, message_too_large
from millstream.errors import MillstreamError
from millstream.listeners.http.answer import RAW, Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.queue_answers import (
    BODIES_BYTES_MAX,
    NO_CONTENT,
    dequeue_parameters,
    dequeued,
    enqueue_batch,
    enqueue_json,
    enqueue_raw,
)
from millstream.listeners.http.queue_quick import QuickQueues
from millstream.listeners.http.queue_sockets import STOPPING, QueueSockets
from millstream.listeners.http.websocket import SocketCounts, SocketTimes
from millstream.observe.histogram import SAMPLE_EVERY, Histogram
from millstream.observe.metrics import counter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from millstream.broker.queues import Message, Queue, Queues
    from millstream.broker.timers import Timers
    from millstream.broker.wheel import Timer
    from millstream.listeners.http.answer import Dated
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.heads import Headers, Quick
    from millstream.listeners.http.hot import HotRequest, HotRoute
    from millstream.listeners.http.lane import LaneProtocol
    from millstream.listeners.http.queue_quick import MakeQuick
    from millstream.listeners.http.websocket import WebSocket


# What `{"payload": }` and some white space add to a message.
JSON_AROUND_BYTES = 1024


class BodyLimits(NamedTuple):
    """A batch may be larger than one message."""

    message_bytes: int
    batch_bytes: int


class Patience:
    """Somebody who waits for messages over HTTP, for a while."""

    __slots__ = ("_answer", "_count", "_queue", "_queues", "_timer", "_timers")

    def __init__(
        self,
        queues: Queues,
        timers: Timers,
        queue: Queue,
        count: int,
        answer: Callable[[list[Message]], None],
    ) -> None:
        self._queues = queues
        self._timers = timers
        self._queue = queue
        self._answer = answer
        self._timer: Timer | None = None
        self._count = count

    @property
    def count_max(self) -> int:
        return self._queue.count_within(self._count, BODIES_BYTES_MAX)

    def wait(self, seconds: float) -> None:
        if self._queues.is_closing:
            self._answer([])
            return
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


class _Hot:
    """A hot route with a clock: one in SAMPLE_EVERY is measured. A dequeue that waits is measured
    up to where it begins to wait."""

    __slots__ = ("_histogram", "_quick", "_route")

    def __init__(self, route: HotRoute, quick: MakeQuick, histogram: Histogram) -> None:
        self._route = route
        self._quick = quick
        self._histogram = histogram

    def __call__(self, request: HotRequest) -> Answer | None:
        histogram = self._histogram
        histogram.turn += 1
        if histogram.turn < SAMPLE_EVERY:
            return self._route(request)
        histogram.turn = 0
        begin = perf_counter()
        try:
            return self._route(request)
        finally:
            histogram.observe(perf_counter() - begin)

    def quick(self, name: str, query: bytes, headers: Headers, dated: Dated) -> Quick | None:
        answer = self._quick(name, query, headers, dated)
        if answer is None:
            return None
        histogram = self._histogram

        def counted(body: bytes) -> bytes | None:
            is_measured = histogram.turn >= SAMPLE_EVERY - 1
            begin = perf_counter() if is_measured else 0.0
            response = answer(body)
            if response is not None:
                histogram.turn += 1
                if is_measured:
                    histogram.turn = 0
                    histogram.observe(perf_counter() - begin)
            return response

        return counted


class QueueLane:
    """What `LaneProtocol` asks of its routes."""

    def __init__(
        self,
        queues: Queues,
        timers: Timers,
        guard: Guard,
        limits: BodyLimits,
        *,
        socket_times: SocketTimes | None = None,
        counts: SocketCounts | None = None,
    ) -> None:
        """`counts` are of all WebSockets; other lanes may have some too."""
        self._queues = queues
        self._timers = timers
        self._guard = guard
        self._limits = limits
        self._sockets = QueueSockets(
            queues, timers, limits, socket_times or SocketTimes(), counts or SocketCounts()
        )
        self._broken = 0
        self._enqueue_times = Histogram()
        self._dequeue_times = Histogram()
        quick = QuickQueues(queues, guard)
        times_in, times_out = self._enqueue_times, self._dequeue_times
        self._routes = {
            (b"POST", b"enqueue"): _Hot(self._enqueue, quick.enqueue, times_in),
            (b"POST", b"enqueue/batch"): _Hot(self._enqueue_batch, quick.enqueue_batch, times_in),
            (b"GET", b"dequeue"): _Hot(self._dequeue, quick.dequeue, times_out),
        }
        self._default = {
            (b"POST", b"/enqueue"): _Hot(self._enqueue_default, quick.enqueue_raw, times_in),
            (b"GET", b"/dequeue"): _Hot(self._dequeue_default, quick.dequeue_raw, times_out),
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
            if hot is None:
                return None
            if b"%" in name:
                name = unquote_to_bytes(name)
            return hot, name.decode(errors="replace")
        hot = self._default.get((method, path))
        return None if hot is None else (hot, DEFAULT_QUEUE)

    def metrics(self) -> Iterator[Metric]:
        """How long requests take from their last byte to their answer."""
        yield self._enqueue_times.metric("enqueue_duration_seconds", "Work on an enqueue.")
        yield self._dequeue_times.metric(
            "dequeue_duration_seconds", "Work on a dequeue, without waiting for a message."
        )
        yield from self._sockets.counts.metrics()
        yield counter(
            "http_requests_broken", "Requests that were no HTTP, or too large.", self._broken
        )

    def objection(self, headers: list[tuple[bytes, bytes]]) -> Answer | None:
        return self._guard.hot_objection(headers)

    def upgrade(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]
    ) -> WebSocket | Answer:
        return STOPPING if self._queues.is_closing else self._sockets.upgrade(method, url, headers)

    def failure(self, error: MillstreamError) -> Answer:
        return failure(error)

    def too_large(self, path: bytes) -> Answer:
        if path.endswith(b"/enqueue"):
            return failure(message_too_large(self._limits.message_bytes))
        return failure(body_too_large(self._limits.batch_bytes))

    def refused(self, lane: LaneProtocol, answer: Answer) -> None:
        del lane, answer
        self._broken += 1

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
        self._queues.get_or_create(request.name)
        return self._take(request, is_raw=True)

    def _dequeue(self, request: HotRequest) -> Answer | None:
        return self._take(request, is_raw=request.header(b"accept").startswith(RAW))

    def _take(self, request: HotRequest, *, is_raw: bool) -> Answer | None:
        parameters = dequeue_parameters(request.query)
        queues = self._queues
        queue = queues.get(request.name)
        if request.lane.transport.is_closing():
            # Nobody would read it.
            return NO_CONTENT
        count = 1 if is_raw else parameters.count
        messages = queues.dequeue(queue, queue.count_within(count, BODIES_BYTES_MAX))
        is_batch = parameters.is_batch
        if messages or not parameters.timeout_s:
            return dequeued(queue, messages, is_batch=is_batch, is_raw=is_raw)

        def answer(found: list[Message]) -> None:
            if found and request.is_lost:
                queues.put_back(queue, found)
                return
            request.reply(dequeued(queue, found, is_batch=is_batch, is_raw=is_raw))

        patience = Patience(queues, self._timers, queue, count, answer)
        request.on_lost = patience.give_up
        patience.wait(parameters.timeout_s)
        return None

    def drain(self) -> None:
        """Waiting dequeues end with nothing, and no new one waits, here or in ASGI. WebSockets are
        told by the listener, as all open connections are; no new one is made."""
        self._queues.is_closing = True
        for queue in list(self._queues):
            for waiter in list(queue.waiters):
                if isinstance(waiter, Patience):
                    waiter.give_up()
                    waiter.take([])
