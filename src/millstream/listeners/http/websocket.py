"""One WebSocket connection: what is the same for those who send messages and those who take them.

The fast lane hands a connection over when a client asks for it; from then on the bytes that come
are frames. There is no task: a packet is read, answered and written in one go. Pings and time
limits lie on the timing wheel.

Ends, and what is said:

    1001  the broker stops, or the queue was deleted
    1002  frames that are wrong; 1007 a text that is not UTF-8; 1009 a message too large
    1003  a frame that this end has no use for
    1008  a client that does not read what it is sent (`slow_consumer`), or does not answer a
          ping (`no_pong`)

After a close frame the other side has a moment to answer with its own, then the connection is cut.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, cast

from millstream.listeners.http.answer import JSON, Answer
from millstream.wire.frames import (
    CLOSE,
    GOING_AWAY,
    PING,
    POLICY,
    PONG,
    FrameError,
    FrameReader,
    accept_key,
    encode,
    encode_close,
    is_key,
    read_close,
)

if TYPE_CHECKING:
    from millstream.broker.timers import Timers
    from millstream.broker.wheel import Timer

    Headers = list[tuple[bytes, bytes]]

VERSION = b"13"
# Answers that wait for a client to read them; past this, nothing more is read from it.
ANSWERS_BYTES_MAX = 64 * 1024


class SocketTimes(NamedTuple):
    """`ping_s`: how often a client is pinged, and how long it has to answer. `slow_s`: how long
    what was written may lie unread. `close_s`: how long the other side has to close."""

    ping_s: float = 20.0
    slow_s: float = 10.0
    close_s: float = 2.0


def handshake(method: bytes, headers: Headers) -> bytes | Answer:
    """The head that makes a connection a WebSocket, or why it is not made one."""
    given = dict(headers)
    if method != b"GET":
        return _refusal(400, b"bad_handshake", b"a WebSocket is asked for with GET")
    if given.get(b"sec-websocket-version") != VERSION:
        answer = _refusal(426, b"bad_handshake", b"the version of WebSocket spoken here is 13")
        return answer._replace(headers=((b"sec-websocket-version", VERSION),))
    key = given.get(b"sec-websocket-key", b"")
    if not is_key(key):
        return _refusal(400, b"bad_handshake", b"Sec-WebSocket-Key is not 16 bytes in base64")
    return (
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        b"sec-websocket-accept: %b\r\n\r\n" % accept_key(key)
    )


class WebSocket(asyncio.Protocol):
    """The connection. Subclasses say what a message means."""

    __slots__ = (
        "_closing_timer",
        "_connections",
        "_head",
        "_is_alone",
        "_is_cut",
        "_is_heard",
        "_ping_timer",
        "_reader",
        "_slow_timer",
        "_timers",
        "_times",
        "is_ending",
        "is_paused",
        "transport",
    )

    # Bytes that may wait in the transport before `pause_writing`.
    write_bytes_max = ANSWERS_BYTES_MAX

    def __init__(
        self, head: bytes, reader: FrameReader, timers: Timers, times: SocketTimes
    ) -> None:
        self._head = head
        self._reader = reader
        self._timers = timers
        self._times = times
        self._connections: set[object] = set()
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._ping_timer: Timer | None = None
        self._slow_timer: Timer | None = None
        self._closing_timer: Timer | None = None
        # Whether anything came since the last ping.
        self._is_heard = True
        self.is_paused = False
        # A close frame was sent; nothing is sent after it.
        self.is_ending = False
        # The other side's close frame has come, or it broke the protocol: nothing is read.
        self._is_alone = False
        self._is_cut = False

    # ---- begin

    def take_over(
        self, transport: asyncio.Transport, connections: set[object], rest: bytes
    ) -> None:
        """Become the protocol of a connection. `rest` came with the request."""
        self.transport = transport
        self._connections = connections
        connections.add(self)
        transport.set_protocol(self)
        transport.set_write_buffer_limits(high=self.write_bytes_max)
        self.write(self._head)
        if transport.get_write_buffer_size() > self.write_bytes_max and not self.is_paused:
            # Answers to earlier requests are still on the way; who was told is gone.
            self.pause_writing()
        self._head = b""
        self._ping_timer = self._timers.after(self._times.ping_s, self._ping)
        self.on_begin()
        if rest:
            self.data_received(rest)

    # ---- for subclasses

    def on_begin(self) -> None:
        """Frames may be sent from now on."""

    @abstractmethod
    def on_messages(self, messages: list[tuple[int, bytes]]) -> None:
        """Messages of one packet, in order, each with its opcode."""

    def on_ending(self) -> None:
        """Nothing may be sent any more."""

    def on_drained(self) -> None:
        """Everything that was written has left."""

    def on_cut(self) -> None:
        """The connection is about to be cut off, whatever has not left."""

    def on_lost(self, is_cut: bool) -> None:
        """The connection is gone; `is_cut` when something that was written may not have left."""

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    # ---- bytes in

    def data_received(self, data: bytes) -> None:
        self._is_heard = True
        if self._is_alone:
            return
        reader = self._reader
        messages: list[tuple[int, bytes]] = []
        for event in reader.feed(data):
            if event[0] < CLOSE:
                messages.append(event)
            elif event[0] == CLOSE:
                self._deliver(messages)
                self._on_close(event[1])
                return
            elif event[0] == PING:
                self._deliver(messages)
                messages = []
                self._pong(event[1])
        self._deliver(messages)
        if reader.error is not None:
            self._fail(reader.error)

    def _deliver(self, messages: list[tuple[int, bytes]]) -> None:
        # What comes after our own close frame could not be confirmed, so it is not taken.
        if messages and not self.is_ending:
            self.on_messages(messages)

    def _pong(self, payload: bytes) -> None:
        # Who does not read gets no more to read: a pong may be left out when another ping comes.
        if not self.is_ending and not self.is_paused:
            self.write(encode(PONG, payload))

    def _on_close(self, payload: bytes) -> None:
        try:
            code = read_close(payload).code
        except FrameError as error:
            self._fail(error)
            return
        self._is_alone = True
        self.end(code, "")
        self.transport.close()

    def _fail(self, error: FrameError) -> None:
        # Not closed at once: unread bytes would make the system take the close frame back.
        self._is_alone = True
        self.end(error.close_code, error.reason)

    def eof_received(self) -> None:
        self._is_alone = True
        self._stop_sending()

    # ---- liveness and flow

    def _ping(self) -> None:
        if not self._is_heard and not self.is_paused:
            self.end(POLICY, "no_pong")
            return
        self._is_heard = False
        if not self.is_paused:
            self.write(encode(PING, b""))
        self._ping_timer = self._timers.after(self._times.ping_s, self._ping)

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._slow_timer is None:
            self._slow_timer = self._timers.after(self._times.slow_s, self._on_slow)

    def resume_writing(self) -> None:
        self.is_paused = False
        # It could not be heard while it was not read from, or had no ping to answer.
        self._is_heard = True
        self._cancel(self._slow_timer)
        self._slow_timer = None
        self.on_drained()

    def _on_slow(self) -> None:
        self._slow_timer = None
        self.end(POLICY, "slow_consumer")

    # ---- ends

    def shutdown(self) -> None:
        """The broker stops."""
        self.end(GOING_AWAY, "the broker stops")

    def end(self, code: int, reason: str) -> None:
        """Say why, and cut the connection if the other side does not end it in a moment."""
        if self.is_ending or self.transport.is_closing():
            return
        self._stop_sending()
        self.write(encode_close(code, reason))

    def _stop_sending(self) -> None:
        if self.is_ending:
            return
        self.is_ending = True
        self._cancel(self._ping_timer)
        self._cancel(self._slow_timer)
        self._closing_timer = self._timers.after(self._times.close_s, self._cut)
        self.on_ending()

    def _cut(self) -> None:
        self._closing_timer = None
        self._is_cut = True
        self.on_cut()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self.is_ending = True
        for timer in (self._ping_timer, self._slow_timer, self._closing_timer):
            self._cancel(timer)
        self.on_lost(is_cut=self._is_cut or exc is not None)

    def _cancel(self, timer: Timer | None) -> None:
        if timer is not None:
            self._timers.cancel(timer)


def _refusal(status: int, code: bytes, message: bytes) -> Answer:
    return Answer(status, b'{"error":"%b","message":"%b"}' % (code, message), JSON)
