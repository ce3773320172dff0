"""Queues over WebSocket: `/queues/{name}/enqueue` and `/queues/{name}/dequeue`.

A consumer stands in its queue's line like anyone who waits. What it is given is one helping, which
is written when the turn of the loop ends, as one buffer; then it stands in line again, together
with all others that were served. So a burst is shared out evenly, what comes in one turn is written
together, and a consumer whose end is seen in the same turn is not written to: what it was given
goes back.

The transport's high-water mark is zero: a consumer whose last helping has not left is not given
another. What has not left, at most one helping, is known to the byte, and goes back to the front
of the queue when the connection ends. (Under TLS, what lies encrypted below counts as sent.)
"""

from __future__ import annotations

import asyncio
import socket
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from millstream.broker.queues import check_queue_name
from millstream.errors import MillstreamError, ParameterInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.queue_answers import (
    batch_json,
    confirm_batch,
    confirm_one,
    dequeue_parameters,
    read_text,
    stream_json,
)
from millstream.listeners.http.websocket import SocketCounts, SocketTimes, WebSocket, handshake
from millstream.observe.logs import get_logger
from millstream.wire.frames import (
    BINARY,
    GOING_AWAY,
    TEXT,
    UNSUPPORTED,
    FrameReader,
    encode,
    encode_counted,
    encode_many,
    frame_bytes,
)

if TYPE_CHECKING:
    from millstream.broker.queues import Message, Queue, Queues
    from millstream.broker.timers import Timers
    from millstream.broker.wheel import Timer
    from millstream.listeners.http.queue_lane import BodyLimits

# One helping: enough to make a write worth while, little enough to be fair and to give back.
HELPING_COUNT_MAX = 1000
HELPING_BYTES_MAX = 64 * 1024
# What all consumers get in one turn of the loop, so that others have theirs; each at least one.
TURN_COUNT_MAX = 4096
# How often one looks how much of a helping has left.
LOOK_S = 0.1
# What the system holds for a consumer. Left alone it grows to megabytes, which a consumer that
# does not read would keep from the others.
SEND_BUFFER_BYTES = 256 * 1024
# Control frames only; a consumer has nothing else to say.
CONSUMER_FRAME_BYTES_MAX = 1024

NOT_FOUND = Answer(
    404,
    b'{"error":"not_found","message":"a WebSocket is at /queues/{name}/enqueue and '
    b'/queues/{name}/dequeue"}',
)
STOPPING = Answer(503, b'{"error":"stopping","message":"the broker stops; try another, or later"}')

log = get_logger("websocket")


class Form(NamedTuple):
    """How a consumer wants its messages. `batch` is how many may be in a frame; with 0 each is
    a frame by itself."""

    is_binary: bool
    batch: int


class Returned(NamedTuple):
    """What a consumer was given and not sent."""

    place: int
    consumer: Consumer
    messages: list[Message]


class Producer(WebSocket):
    __slots__ = ("_name", "_queues")

    kind = "enqueue"

    def __init__(self, head: bytes, sockets: QueueSockets, name: str) -> None:
        limits = sockets.limits
        reader = FrameReader(limits.batch_bytes, limits.message_bytes)
        super().__init__(head, reader, sockets.timers, sockets.times, sockets.counts)
        self._queues = sockets.queues
        self._name = name

    def on_messages(self, messages: list[tuple[int, bytes]]) -> None:
        """Neighbours of one kind go in together, which is many times quicker than one by one."""
        answers: list[bytes] = []
        run: list[bytes] = []
        kind = TEXT
        for opcode, data in messages:
            body: bytes | list[bytes] | MillstreamError = data
            if opcode == TEXT:
                try:
                    body = read_text(data)
                except MillstreamError as error:
                    body = error
            if run and (opcode != kind or not isinstance(body, bytes)):
                answers.append(self._enqueue(run, is_json=kind == TEXT))
                run = []
            if isinstance(body, bytes):
                run.append(body)
                kind = opcode
            elif isinstance(body, list):
                self._counts.messages_received += len(body)
                answers.append(encode(TEXT, confirm_batch(self._queues, self._name, body)))
            else:
                answers.append(encode(TEXT, failure(body).body))
        if run:
            answers.append(self._enqueue(run, is_json=kind == TEXT))
        self.write(answers[0] if len(answers) == 1 else b"".join(answers))

    def _enqueue(self, bodies: list[bytes], *, is_json: bool) -> bytes:
        """Single messages that came together; a confirmation, or a refusal, for each."""
        queues, name = self._queues, self._name
        self._counts.messages_received += len(bodies)
        try:
            queue = queues.get_or_create(name)
        except MillstreamError as error:
            return encode_many(TEXT, [failure(error).body] * len(bodies))
        if not queues.fits(queue, bodies):
            return encode_many(
                TEXT, [confirm_one(queues, name, body, is_json=is_json) for body in bodies]
            )
        size = len(queue)
        at_us = queues.enqueue_many(queue, bodies, is_json)
        return encode_counted(
            b'{"queued":true,"queue_name":"%b","queue_size":' % name.encode(),
            size + 1,
            len(bodies),
            b',"enqueued_at":%d}' % at_us,
        )


class Consumer(WebSocket):
    __slots__ = (
        "_form",
        "_helping",
        "_helping_end",
        "_is_written",
        "_left_at",
        "_look_timer",
        "_place",
        "_sockets",
        "_written",
        "queue",
    )

    kind = "dequeue"
    write_bytes_max = 0
    is_read_while_paused = True

    def __init__(self, head: bytes, sockets: QueueSockets, queue: Queue, form: Form) -> None:
        reader = FrameReader(CONSUMER_FRAME_BYTES_MAX, CONSUMER_FRAME_BYTES_MAX)
        super().__init__(head, reader, sockets.timers, sockets.times, sockets.counts)
        self._sockets = sockets
        self._form = form
        self.queue = queue
        # Positions in the stream of bytes: what was written, and how much of it is known to
        # have left.
        self._written = 0
        self._left_at = 0
        # What was given and may not have left; its place among all that was ever given; whether
        # it was written, and then where it ends.
        self._helping: list[Message] = []
        self._place = 0
        self._is_written = False
        self._helping_end = 0
        self._look_timer: Timer | None = None

    @property
    def count_max(self) -> int:
        return self._sockets.share(self.queue)

    @property
    def is_ready(self) -> bool:
        return not (self.is_ending or self.is_paused or self.transport.is_closing())

    def on_begin(self) -> None:
        system = self.transport.get_extra_info("socket")
        if system is not None:
            system.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._sockets.line_up(self)

    def take(self, messages: list[Message]) -> None:
        if not messages:
            self.end(GOING_AWAY, "queue_deleted")
            return
        self._helping = messages
        self._is_written = False
        self._place = self._sockets.serve(self, len(messages))

    def send_helping(self) -> None:
        """At the end of the turn. A connection that ended meanwhile gave its helping back."""
        if not self._helping or self.is_ending or self.transport.is_closing():
            return
        opcode = BINARY if self._form.is_binary else TEXT
        self.write(encode_many(opcode, self._frames(self._helping)))
        if self.transport.is_closing():
            # Nothing of it was taken; it goes back when the end has come.
            return
        self._is_written = True
        self._counts.messages_sent += len(self._helping)
        if self.transport.get_write_buffer_size():
            self._helping_end = self._written
            if self._look_timer is None:
                self._look_again()
        else:
            self.on_drained()

    def write(self, data: bytes) -> None:
        self._written += len(data)
        super().write(data)

    def on_messages(self, messages: list[tuple[int, bytes]]) -> None:
        del messages
        self.end(UNSUPPORTED, "this WebSocket only sends messages")

    def on_drained(self) -> None:
        if self._is_written:
            self._helping = []
        if not self._helping:
            self._sockets.line_up(self)

    def on_ending(self) -> None:
        self._look()
        self._sockets.queues.leave(self.queue, self)
        if not self._is_written:
            self._give_back(self._helping)

    def on_cut(self) -> None:
        self._look()

    def on_lost(self, is_cut: bool) -> None:
        self._sockets.queues.leave(self.queue, self)
        if not self._is_written:
            self._give_back(self._helping)
        elif is_cut:
            self._give_back(self._unsent())
        self._helping = []
        self._cancel(self._look_timer)

    def _give_back(self, messages: list[Message]) -> None:
        self._helping = []
        if messages:
            # A broker that stops waits for those that are listed, and then keeps its queues.
            self._connections.add(self)
            self._sockets.take_back(Returned(self._place, self, messages))

    def on_given_back(self) -> None:
        if self._is_lost:
            self._connections.discard(self)

    def _look(self) -> None:
        """How much has left is only known while the connection is up."""
        if not self.transport.is_closing():
            self._left_at = self._written - self.transport.get_write_buffer_size()

    def _look_again(self) -> None:
        """Nobody tells when a part of a helping has left; so one has to look, for as long as the
        rest of it lies there."""
        self._look()
        self._look_timer = None
        if self._helping and self._is_written and not self.is_ending:
            self._look_timer = self._timers.after(LOOK_S, self._look_again)

    def _unsent(self) -> list[Message]:
        """The part of the helping that did not leave in whole frames."""
        frames = self._frames(self._helping)
        position = self._helping_end - sum(frame_bytes(len(frame)) for frame in frames)
        for index, frame in enumerate(frames):
            position += frame_bytes(len(frame))
            if position > self._left_at:
                return self._helping[index * max(self._form.batch, 1) :]
        return []

    def _frames(self, messages: list[Message]) -> list[bytes]:
        is_binary, batch = self._form
        if is_binary:
            return [message.body for message in messages]
        if not batch:
            return stream_json(self.queue, messages)
        return [
            batch_json(self.queue, messages[at : at + batch])
            for at in range(0, len(messages), batch)
        ]


class QueueSockets:
    """Makes the connections, and keeps the turns of consumers."""

    __slots__ = (
        "_is_turning",
        "_place",
        "_returned",
        "_room",
        "_served",
        "_standing",
        "counts",
        "limits",
        "queues",
        "timers",
        "times",
    )

    def __init__(
        self,
        queues: Queues,
        timers: Timers,
        limits: BodyLimits,
        times: SocketTimes,
        counts: SocketCounts,
    ) -> None:
        self.queues = queues
        self.timers = timers
        self.limits = limits
        self.times = times
        self.counts = counts
        # For the end of this turn: who stands in line from then on, whose helping is to be
        # written, and what goes back.
        self._standing: list[Consumer] = []
        self._served: list[Consumer] = []
        self._returned: list[Returned] = []
        self._is_turning = False
        # How many messages are left for this turn, and how many helpings were ever given.
        self._room = TURN_COUNT_MAX
        self._place = 0

    def upgrade(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]
    ) -> WebSocket | Answer:
        """The connection that a request asks for, or why it is refused."""
        path, _, query = url.partition(b"?")
        parts = path.split(b"/")
        if len(parts) != 4 or parts[1] != b"queues" or parts[3] not in (b"enqueue", b"dequeue"):
            return NOT_FOUND
        head = handshake(method, headers)
        if isinstance(head, Answer):
            return head
        name = unquote_to_bytes(parts[2]).decode("latin-1")
        try:
            if parts[3] == b"enqueue":
                check_queue_name(name)
                return Producer(head, self, name)
            return Consumer(head, self, self.queues.get(name), _form(query))
        except MillstreamError as error:
            return failure(error)

    # ---- turns of consumers

    def share(self, queue: Queue) -> int:
        """An even part for the first in line, who has just left it, of what there is for all."""
        given = min(len(queue), self._room)
        share = -(-given // (len(queue.waiters) + 1))
        return queue.count_within(max(1, min(share, HELPING_COUNT_MAX)), HELPING_BYTES_MAX)

    def serve(self, consumer: Consumer, count: int) -> int:
        """A consumer was given messages; answers the place of its helping among all."""
        self._served.append(consumer)
        self._room -= count
        self._place += 1
        self._end_turn_soon()
        return self._place

    def line_up(self, consumer: Consumer) -> None:
        """When the turn ends, and all together, so that nobody takes the others' share."""
        self._standing.append(consumer)
        self._end_turn_soon()

    def take_back(self, returned: Returned) -> None:
        """When the turn ends: not in the middle of the queue's own round, and in the order in
        which they were given, if many consumers end together."""
        self._returned.append(returned)
        self._end_turn_soon()

    def _end_turn_soon(self) -> None:
        if not self._is_turning:
            self._is_turning = True
            asyncio.get_running_loop().call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._is_turning = False
        self._room = TURN_COUNT_MAX
        self._put_back()
        standing, self._standing = self._standing, []
        lines: dict[Queue, list[Consumer]] = {}
        for consumer in standing:
            if consumer.is_ready:
                lines.setdefault(consumer.queue, []).append(consumer)
        for queue, consumers in lines.items():
            self.queues.wait_all(queue, consumers)
        served, self._served = self._served, []
        for consumer in served:
            try:
                consumer.send_helping()
            except Exception as error:
                # One broken connection must not take the others along.
                log.error("websocket failed", kind=consumer.kind, exc_info=error)
                consumer.cut()

    def _put_back(self) -> None:
        returned, self._returned = self._returned, []
        of_queues: dict[Queue, list[Message]] = {}
        for _, consumer, messages in sorted(returned, key=itemgetter(0)):
            of_queues.setdefault(consumer.queue, []).extend(messages)
        for queue, messages in of_queues.items():
            self.queues.put_back(queue, messages)
        for _, consumer, _ in returned:
            consumer.on_given_back()


def _form(query: bytes) -> Form:
    parameters = dequeue_parameters(query)
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    form = given.get("format", "json")
    if form not in ("json", "binary"):
        raise ParameterInvalid(
            f"format is {form[:40]!r}; it must be json or binary", parameter="format"
        )
    if form == "binary" and parameters.is_batch:
        raise ParameterInvalid(
            "max is for JSON: a binary frame is one message, so that no byte needs to part them",
            parameter="max",
        )
    return Form(form == "binary", parameters.count if parameters.is_batch else 0)
