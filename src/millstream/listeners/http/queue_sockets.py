"""Queues over WebSocket: `/queues/{name}/enqueue` and `/queues/{name}/dequeue`.

A consumer stands in its queue's line like anyone who waits. What it is given is one helping: it is
written at once, as one buffer, and the consumer stands in line again in the next turn of the loop,
together with all others that were served in this one. So a burst is shared out evenly.

The transport's high-water mark is zero: a consumer whose last helping has not left is not given
another. What has not left, at most one helping, is known to the byte, and goes back to the front
of the queue when the connection ends. (Under TLS, what lies encrypted below counts as sent.)
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from millstream.broker.queues import check_queue_name
from millstream.errors import MillstreamError, ParameterInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.queue_answers import (
    batch_json,
    confirm_all,
    confirm_batch,
    dequeue_parameters,
    read_text,
    stream_json,
)
from millstream.listeners.http.websocket import SocketTimes, WebSocket, handshake
from millstream.wire.frames import (
    BINARY,
    GOING_AWAY,
    TEXT,
    UNSUPPORTED,
    FrameReader,
    encode_many,
    frame_bytes,
)

if TYPE_CHECKING:
    from millstream.broker.queues import Message, Queue, Queues
    from millstream.broker.timers import Timers
    from millstream.listeners.http.queue_lane import BodyLimits

# One helping: enough to make a write worth while, little enough to be fair and to give back.
HELPING_COUNT_MAX = 1000
HELPING_BYTES_MAX = 64 * 1024
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


class Form(NamedTuple):
    """How a consumer wants its messages. `batch` is how many may be in a frame; with 0 each is
    a frame by itself."""

    is_binary: bool
    batch: int


class Producer(WebSocket):
    __slots__ = ("_name", "_queues")

    def __init__(self, head: bytes, sockets: QueueSockets, name: str) -> None:
        limits = sockets.limits
        reader = FrameReader(limits.batch_bytes, limits.message_bytes)
        super().__init__(head, reader, sockets.timers, sockets.times)
        self._queues = sockets.queues
        self._name = name

    def on_messages(self, messages: list[tuple[int, bytes]]) -> None:
        """Neighbours of one kind go in together, which is many times quicker than one by one."""
        queues, name = self._queues, self._name
        answers: list[bytes] = []
        run: list[bytes] = []
        kind = TEXT
        for opcode, data in messages:
            body: bytes | list[bytes] | MillstreamError
            try:
                body = read_text(data) if opcode == TEXT else data
            except MillstreamError as error:
                body = error
            if run and (opcode != kind or not isinstance(body, bytes)):
                answers += confirm_all(queues, name, run, is_json=kind == TEXT)
                run = []
            if isinstance(body, bytes):
                run.append(body)
                kind = opcode
            elif isinstance(body, list):
                answers.append(confirm_batch(queues, name, body))
            else:
                answers.append(failure(body).body)
        if run:
            answers += confirm_all(queues, name, run, is_json=kind == TEXT)
        self.write(encode_many(TEXT, answers))

    def pause_writing(self) -> None:
        # Confirmations pile up: no more messages until they are read.
        super().pause_writing()
        self.transport.pause_reading()

    def on_drained(self) -> None:
        self.transport.resume_reading()

    def on_ending(self) -> None:
        # The other side's close frame is to be seen.
        self.transport.resume_reading()


class Consumer(WebSocket):
    __slots__ = (
        "_form",
        "_helping",
        "_helping_end",
        "_left_at",
        "_refused",
        "_sockets",
        "_written",
        "queue",
    )

    write_bytes_max = 0

    def __init__(self, head: bytes, sockets: QueueSockets, queue: Queue, form: Form) -> None:
        reader = FrameReader(CONSUMER_FRAME_BYTES_MAX, CONSUMER_FRAME_BYTES_MAX)
        super().__init__(head, reader, sockets.timers, sockets.times)
        self._sockets = sockets
        self._form = form
        self.queue = queue
        # Positions in the stream of bytes: what was written, and how much of it is known to
        # have left.
        self._written = 0
        self._left_at = 0
        # What was given and may not have left, with where it ends.
        self._helping: list[Message] = []
        self._helping_end = 0
        # What was given and could not be written.
        self._refused: list[Message] = []

    @property
    def count_max(self) -> int:
        """An even share of what there is among those in line, of whom this one was the first."""
        queue = self.queue
        share = -(-len(queue) // (len(queue.waiters) + 1))
        return queue.count_within(min(share, HELPING_COUNT_MAX), HELPING_BYTES_MAX)

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
        transport = self.transport
        if not transport.is_closing():
            opcode = BINARY if self._form.is_binary else TEXT
            self.write(encode_many(opcode, self._frames(messages)))
        if transport.is_closing():
            # Its end is on the way and gives them back; to do so here would be in the middle of
            # the queue's own round.
            self._refused = messages
        elif transport.get_write_buffer_size():
            self._helping = messages
            self._helping_end = self._written
            self._look()
        else:
            self._sockets.line_up(self)

    def write(self, data: bytes) -> None:
        self._written += len(data)
        super().write(data)

    def on_messages(self, messages: list[tuple[int, bytes]]) -> None:
        del messages
        self.end(UNSUPPORTED, "this WebSocket only sends messages")

    def on_drained(self) -> None:
        self._helping = []
        self._sockets.line_up(self)

    def on_ending(self) -> None:
        self._look()
        self._sockets.queues.leave(self.queue, self)

    def on_cut(self) -> None:
        self._look()

    def on_lost(self, is_cut: bool) -> None:
        queues = self._sockets.queues
        queues.leave(self.queue, self)
        back = self._refused or (self._unsent() if is_cut else [])
        self._helping = self._refused = []
        if back:
            queues.put_back(self.queue, back)

    def _look(self) -> None:
        """How much has left is only known while the connection is up."""
        if not self.transport.is_closing():
            self._left_at = self._written - self.transport.get_write_buffer_size()

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

    __slots__ = ("_standing", "limits", "queues", "timers", "times")

    def __init__(
        self,
        queues: Queues,
        timers: Timers,
        limits: BodyLimits,
        times: SocketTimes,
    ) -> None:
        self.queues = queues
        self.timers = timers
        self.limits = limits
        self.times = times
        # Who stands in line from the next turn on.
        self._standing: list[Consumer] = []

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

    def line_up(self, consumer: Consumer) -> None:
        """In the next turn, and all together, so that nobody takes the others' share."""
        if not self._standing:
            asyncio.get_running_loop().call_soon(self._turn)
        self._standing.append(consumer)

    def _turn(self) -> None:
        standing, self._standing = self._standing, []
        lines: dict[Queue, list[Consumer]] = {}
        for consumer in standing:
            if consumer.is_ready:
                lines.setdefault(consumer.queue, []).append(consumer)
        for queue, consumers in lines.items():
            self.queues.wait_all(queue, consumers)


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
