"""Topics over WebSocket: `/v1/topics/{topic}/stream`, to publish and to consume in one connection.

Requests are answered in their order. Messages come between the answers, as many as the client has
given credit for; a consumer that does not read is not sent more. A connection has one sequential
consumer. What it was sent and has not acked comes again when it comes back with its id.

What waits for the disk is bounded: past that, the connection is not read from.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from millstream.errors import (
    MillstreamError,
    ParameterInvalid,
    TopicUnknown,
    UpgradeRequired,
)
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.parameters import Parameters
from millstream.listeners.http.stream_sides import (
    BINARY_SIDE,
    CREDIT_MAX,
    TEXT_SIDE,
    Ack,
    Next,
    Open,
    Publish,
    id_of_binary,
    id_of_text,
    read_binary,
    read_text,
)
from millstream.listeners.http.websocket import SocketCounts, SocketTimes, WebSocket, handshake
from millstream.observe.logs import get_logger
from millstream.wire.frames import BINARY, GOING_AWAY, TEXT, FrameReader, encode_many

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.broker import Broker
    from millstream.broker.reading import Waiting
    from millstream.broker.sequential import Delivered, SequentialConsumer
    from millstream.broker.topics import Topic
    from millstream.engine.pending import Pending
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.stream_sides import Side

# Requests of one connection that wait for their answers, and their bytes.
REQUESTS_MAX = 1000
REQUESTS_BYTES_MAX = 4 * 1024 * 1024
# Messages that are sent at once.
HELPING_COUNT_MAX = 500
HELPING_BYTES_MAX = 256 * 1024
# A wait for messages is renewed after this; it only bounds what a bug could cost.
WAIT_S = 60.0

log = get_logger("http")

NOT_FOUND = Answer(
    404,
    b'{"error":"not_found","message":"a WebSocket is at /v1/topics/{topic}/stream"}',
)


def no_websocket(_: Call, topic: str) -> Answer:
    """To a request for a stream that does not ask for a WebSocket."""
    error = UpgradeRequired(
        f"/v1/topics/{topic[:300]}/stream is a WebSocket: ask for an upgrade, or read with GET "
        f"/v1/topics/{topic[:300]}/messages"
    )
    wanted = ((b"upgrade", b"websocket"), (b"connection", b"Upgrade"))
    return failure(error)._replace(headers=wanted)


class _Request:
    """One that waits for its answer, or whose answer waits for its turn."""

    __slots__ = ("frame", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        # Empty: there is nothing to say. None: not yet.
        self.frame: bytes | None = None


class TopicSocket(WebSocket):
    kind = "stream"
    __slots__ = (
        "_broker",
        "_consumer",
        "_credit",
        "_fenced",
        "_is_busy",
        "_is_stopping",
        "_opcode",
        "_out",
        "_requests",
        "_side",
        "_size",
        "_sockets",
        "_topic",
        "_waiting",
    )

    def __init__(self, head: bytes, sockets: StreamSockets, topic: str, side: Side) -> None:
        limit = sockets.message_bytes_max
        reader = FrameReader(limit, limit)
        super().__init__(head, reader, sockets.broker.timers, sockets.times, sockets.counts)
        self._broker = sockets.broker
        self._sockets = sockets
        self._topic = topic
        self._side = side
        self._opcode = BINARY if side.is_binary else TEXT
        self._requests: deque[_Request] = deque()
        self._size = 0
        # Frames of this turn of the loop.
        self._out: list[bytes] = []
        self._consumer: SequentialConsumer | None = None
        self._credit = 0
        # Why there is no consumer any more.
        self._fenced: MillstreamError | None = None
        # Messages are being fetched, or waited for.
        self._is_busy = False
        self._waiting: Waiting | None = None
        self._is_stopping = False

    # ---- requests

    def on_messages(self, messages: list[tuple[int, bytes]]) -> None:
        for opcode, data in messages:
            if self._is_stopping:
                return
            request = _Request(len(data))
            self._requests.append(request)
            self._size += request.size
            try:
                asked = read_text(data) if opcode == TEXT else read_binary(data)
            except MillstreamError as error:
                id = id_of_text(data) if opcode == TEXT else id_of_binary(data)
                request.frame = self._side.failed(id, error)
                continue
            self._ask(request, asked)
        self._send_answers()
        if len(self._requests) >= REQUESTS_MAX or self._size >= REQUESTS_BYTES_MAX:
            self.transport.pause_reading()

    def _ask(self, request: _Request, asked: Publish | Open | Next | Ack) -> None:
        side = self._side
        match asked:
            case Publish(id, records, acks, key):
                published = self._broker.publisher.publish(
                    self._topic, records, acks=acks, idempotency_key=key
                )
                self._answer_later(request, id, published, lambda one: side.published(id, one))
            case Open():
                self._open(request, asked)
            case Next(credit):
                self._credit = min(self._credit + credit, CREDIT_MAX)
                request.frame = b""
                self._pump()
            case Ack(id, partition, offset):
                if self._consumer is None:
                    request.frame = side.failed(id, self._fenced or _not_open())
                    return
                acked = self._consumer.ack(partition, offset)
                self._answer_later(
                    request,
                    id,
                    acked,
                    lambda position: b"" if id is None else side.acked(id, partition, position),
                )

    def _open(self, request: _Request, asked: Open) -> None:
        if self._consumer is not None:
            error = ParameterInvalid(
                "this connection has a consumer already; open another connection for another",
                parameter="consumer_id",
            )
            request.frame = self._side.failed(asked.id, error)
            return

        def opened(consumer: SequentialConsumer) -> bytes:
            if self.is_ending or self._consumer is not None:
                consumer.close()
                return b""
            self._consumer, self._fenced = consumer, None
            consumer.is_held = True
            # After the answer, so that nothing comes before the client knows its id.
            asyncio.get_running_loop().call_soon(self._pump)
            return self._side.opened(asked.id, consumer.id, consumer.positions())

        pending = self._broker.sequential.open(
            self._topic, asked.consumer_id, asked.partition, asked.start
        )
        self._answer_later(request, asked.id, pending, opened)

    def _answer_later(
        self,
        request: _Request,
        id: int | None,
        pending: Pending[Any],
        write: Callable[[Any], bytes],
    ) -> None:
        def done(one: Pending[Any]) -> None:
            if one.error is None:
                request.frame = write(one.result())
            else:
                request.frame = self._side.failed(id, _own(one.error))
            self._send_answers()

        pending.then(done)

    def _send_answers(self) -> None:
        """Those whose turn has come."""
        requests = self._requests
        while requests and requests[0].frame is not None:
            request = requests.popleft()
            self._size -= request.size
            if request.frame:
                self._send(request.frame)
        if self._is_stopping and not requests:
            super().shutdown()
        elif len(requests) < REQUESTS_MAX // 2 and self._size < REQUESTS_BYTES_MAX // 2:
            self._read_on()

    def _read_on(self) -> None:
        if not self.is_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _send(self, frame: bytes) -> None:
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out.append(frame)

    def _flush(self) -> None:
        """Frames of one turn are one write."""
        out, self._out = self._out, []
        if out and not self.is_ending and not self.transport.is_closing():
            self.write(encode_many(self._opcode, out))

    # ---- messages

    def _pump(self) -> None:
        """Fetch the next messages, if the client wants some and has read the last ones."""
        consumer = self._consumer
        if consumer is None or self._is_busy or not self._credit:
            return
        if self.is_ending or self.is_paused or self._is_stopping:
            return
        self._is_busy = True
        count = min(self._credit, HELPING_COUNT_MAX)
        consumer.next(count, HELPING_BYTES_MAX).then(self._on_fetched)

    def _on_fetched(self, fetched: Pending[list[Delivered]]) -> None:
        self._is_busy = False
        if self.is_ending or self._consumer is None:
            return
        if fetched.error is not None:
            self._give_up(_own(fetched.error))
            return
        found = fetched.result()
        if not found:
            self._wait(self._consumer)
            return
        self._credit -= len(found)
        for frame in self._side.messages(found):
            self._send(frame)
        # In the next turn, when it is known whether the client reads them.
        asyncio.get_running_loop().call_soon(self._pump)

    def _wait(self, consumer: SequentialConsumer) -> None:
        self._is_busy = True
        self._waiting = consumer.wait(WAIT_S)
        self._waiting.pending.then(self._on_more)

    def _on_more(self, _: Pending[bool]) -> None:
        self._is_busy = False
        self._waiting = None
        if not self.is_ending:
            asyncio.get_running_loop().call_soon(self._pump)

    def _give_up(self, error: MillstreamError) -> None:
        """The consumer cannot go on: another connection has it, or its topic is gone."""
        self._leave()
        self._fenced = error
        if isinstance(error, TopicUnknown):
            self._flush()
            self.end(GOING_AWAY, "the topic was deleted")
        else:
            self._send(self._side.failed(None, error))

    def _leave(self) -> None:
        consumer, self._consumer = self._consumer, None
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.cancel()
        if consumer is not None:
            consumer.close()

    # ---- flow and ends

    def on_begin(self) -> None:
        self._sockets.enter(self._topic, self)

    def on_deleted(self) -> None:
        """Its topic is gone. In the next turn, so that what failed by that is answered."""
        asyncio.get_running_loop().call_soon(self.end, GOING_AWAY, "the topic was deleted")

    def pause_writing(self) -> None:
        # Answers pile up: no more requests until they are read.
        super().pause_writing()
        self.transport.pause_reading()

    def on_drained(self) -> None:
        self._send_answers()
        self._read_on()
        self._pump()

    def shutdown(self) -> None:
        """The broker stops: what was asked is answered, then the connection ends."""
        self._is_stopping = True
        self._leave()
        self._send_answers()

    def end(self, code: int, reason: str) -> None:
        self._flush()
        super().end(code, reason)

    def on_ending(self) -> None:
        self._leave()
        # The other side's close frame is to be seen.
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def on_lost(self, is_cut: bool) -> None:
        del is_cut
        self._sockets.leave(self._topic, self)
        self._leave()
        self._requests.clear()


class StreamSockets:
    """Makes the connections."""

    __slots__ = ("_open", "broker", "counts", "message_bytes_max", "times")

    def __init__(
        self,
        broker: Broker,
        message_bytes_max: int,
        counts: SocketCounts,
        times: SocketTimes | None = None,
    ) -> None:
        self.broker = broker
        self.message_bytes_max = message_bytes_max
        self.counts = counts
        self.times = times or SocketTimes()
        # By the name of their topic.
        self._open: dict[str, set[TopicSocket]] = {}
        broker.topics.watch_deleted(self._topic_deleted)

    def enter(self, topic: str, socket: TopicSocket) -> None:
        self._open.setdefault(topic, set()).add(socket)

    def leave(self, topic: str, socket: TopicSocket) -> None:
        sockets = self._open.get(topic, set())
        sockets.discard(socket)
        if not sockets:
            self._open.pop(topic, None)

    def _topic_deleted(self, topic: Topic) -> None:
        for socket in self._open.get(topic.name, ()):
            socket.on_deleted()

    def upgrade(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]
    ) -> WebSocket | Answer:
        """The connection that a request asks for, or why it is refused."""
        path, _, query = url.partition(b"?")
        words = path.split(b"/")
        if len(words) != 5 or words[2] != b"topics" or words[4] != b"stream":
            return NOT_FOUND
        head = handshake(method, headers)
        if isinstance(head, Answer):
            return head
        try:
            form = Parameters(query, ("format",)).choice("format", "json", ("json", "binary"))
            topic = unquote_to_bytes(words[3]).decode(errors="replace")
            self.broker.topics.get(topic)
        except MillstreamError as error:
            return failure(error)
        return TopicSocket(head, self, topic, BINARY_SIDE if form == "binary" else TEXT_SIDE)


def _own(error: BaseException) -> MillstreamError:
    if isinstance(error, MillstreamError):
        return error
    log.error("a request of a stream failed", exc_info=error)
    return MillstreamError("the broker failed; its messages say why")


def _not_open() -> ParameterInvalid:
    return ParameterInvalid(
        "this connection has no consumer; send an open first", parameter="consumer_id"
    )
