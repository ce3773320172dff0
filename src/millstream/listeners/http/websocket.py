"""One WebSocket connection: frames, pings, flow and ends; what is spoken on it is elsewhere.

The fast lane hands a connection over when a client asks for it; from then on the bytes that come
are frames. There is no task: a packet is read, answered and written in one go, except that of a
packet of many tiny frames only so many are read in one turn of the loop. Pings and time limits lie
on the timing wheel.

A subclass says what a message means (`on_messages`), sends with `write`, and is told when it may
(`on_begin`, `on_drained`), when no more (`on_ending`) and when all is over (`on_lost`).

Ends, and what is said:

    1001  the broker stops (`stopping`), or what the connection was for is gone
    1002  frames that are wrong; 1007 a text that is not UTF-8; 1009 a message too large
    1003  a frame that this end has no use for
    1008  a client that does not read what it is sent (`slow_consumer`), does not get on with a
          message (`slow_sender`), or does not answer a ping (`no_pong`)
    1011  a fault of ours (`internal`)

After a close frame the other side has a moment to answer with its own, then the connection is cut.
Who broke the protocol is not understood any more: our side ends at once, and what still comes is
dropped for a moment, because closing over unread bytes would take the close frame back.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, NamedTuple, cast

from millstream.listeners.http.answer import JSON, Answer
from millstream.observe.logs import get_logger
from millstream.observe.metrics import counter, counters, gauges
from millstream.wire.frames import (
    CLOSE,
    GOING_AWAY,
    INTERNAL,
    NOT_UTF8,
    PING,
    POLICY,
    PONG,
    PROTOCOL_ERROR,
    TOO_LARGE,
    UNSUPPORTED,
    FrameError,
    FrameReader,
    accept_key,
    encode,
    encode_close,
    is_key,
    read_close,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.timers import Timers
    from millstream.broker.wheel import Timer

    Headers = list[tuple[bytes, bytes]]

VERSION = b"13"
# Answers that wait for a client to read them; past this, nothing more is read from it.
ANSWERS_BYTES_MAX = 64 * 1024
# Frames that are read in one turn of the loop: a millisecond or so of work. One packet can hold
# forty thousand, and everybody else would wait for them.
FRAMES_PER_TURN = 512
# When a time is over, there is another look after this: if it was us who were held up, what the
# client did meanwhile is seen before it is blamed.
LOOK_S = 0.05
# Where our side cannot end alone (TLS): who was quiet for so long has nothing more to say.
QUIET_S = 0.1
# What the metrics page calls the ends of the RFC; with other codes the reason is a word itself.
REASONS = {
    PROTOCOL_ERROR: "protocol_error",
    UNSUPPORTED: "unsupported",
    NOT_UTF8: "not_utf8",
    TOO_LARGE: "too_large",
    INTERNAL: "internal",
}

log = get_logger("websocket")


class SocketTimes(NamedTuple):
    """`ping_s`: how often a client is pinged, and how long it has to answer. `slow_s`: how long
    what was written may lie unread. `close_s`: how long the other side has to close. `message_s`:
    how long a message may take to come; half of it is kept in memory meanwhile."""

    ping_s: float = 20.0
    slow_s: float = 10.0
    close_s: float = 2.0
    message_s: float = 60.0


class SocketCounts:
    """All WebSockets of a broker, as the metrics page shows them."""

    __slots__ = ("closed", "messages_received", "messages_sent", "open")

    def __init__(self) -> None:
        # How many there are of each kind, and how many ended for which reason. Those that are to
        # be seen before the first of them are listed here.
        self.open: dict[str, int] = {"enqueue": 0, "dequeue": 0}
        words = ("client", "lost", "stopping", "queue_deleted")
        slow = ("slow_consumer", "slow_sender", "no_pong")
        self.closed: dict[str, int] = dict.fromkeys((*words, *slow, *REASONS.values()), 0)
        self.messages_received = 0
        self.messages_sent = 0

    def metrics(self) -> Iterator[Metric]:
        yield gauges(
            "websocket_connections",
            "Open WebSockets, by what they are for.",
            ("kind",),
            {(kind,): count for kind, count in self.open.items()},
        )
        yield counter(
            "websocket_messages_received",
            "Messages that came over WebSockets, those that were refused too.",
            self.messages_received,
        )
        yield counter(
            "websocket_messages_sent",
            "Messages written to WebSockets, those that did not leave before the end too.",
            self.messages_sent,
        )
        yield counters(
            "websocket_closed",
            "WebSockets that ended, by why.",
            ("reason",),
            {(reason,): count for reason, count in self.closed.items()},
        )


def handshake(method: bytes, headers: Headers) -> bytes | Answer:
    """The head that makes a connection a WebSocket, or why it is not made one. Extensions, such
    as compression, and subprotocols are not taken up, which a client sees in the answer."""
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
        "_counts",
        "_has_message",
        "_head",
        "_is_alone",
        "_is_cut",
        "_is_going_on",
        "_is_heard",
        "_is_lost",
        "_is_reading",
        "_message_timer",
        "_ping_timer",
        "_reader",
        "_slow_timer",
        "_timers",
        "_times",
        "_why",
        "is_ending",
        "is_paused",
        "transport",
    )

    # What the connection is for, on the metrics page.
    kind = ""
    # Bytes that may wait in the transport before `pause_writing`.
    write_bytes_max = ANSWERS_BYTES_MAX
    # Whether a client that does not read is still read from. Not where each message is answered:
    # the answers would pile up.
    is_read_while_paused = False

    def __init__(
        self,
        head: bytes,
        reader: FrameReader,
        timers: Timers,
        times: SocketTimes,
        counts: SocketCounts,
    ) -> None:
        self._head = head
        self._reader = reader
        self._timers = timers
        self._times = times
        self._counts = counts
        self._connections: set[object] = set()
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self._ping_timer: Timer | None = None
        self._slow_timer: Timer | None = None
        self._closing_timer: Timer | None = None
        self._message_timer: Timer | None = None
        # Whether a message came since that timer was set.
        self._has_message = False
        # Whether anything came since the last ping.
        self._is_heard = True
        self._is_reading = True
        # The rest of a packet is read in the next turn.
        self._is_going_on = False
        self.is_paused = False
        # A close frame was sent; nothing is sent after it.
        self.is_ending = False
        # The other side's close frame has come, or it broke the protocol: nothing is read.
        self._is_alone = False
        self._is_cut = False
        self._is_lost = False
        # Why it ends, once it does.
        self._why = ""

    # ---- begin

    def take_over(
        self, transport: asyncio.Transport, connections: set[object], rest: bytes
    ) -> None:
        """Become the protocol of a connection. `rest` came with the request."""
        self.transport = transport
        self._connections = connections
        connections.add(self)
        self._counts.open[self.kind] = self._counts.open.get(self.kind, 0) + 1
        transport.set_protocol(self)
        # A TLS transport pauses at its limit, not past it: with 0 it would never go on.
        has_tls = transport.get_extra_info("sslcontext") is not None
        transport.set_write_buffer_limits(high=self.write_bytes_max + has_tls)
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
        if not self._is_alone:
            self._read(data)

    def _read(self, data: bytes) -> None:
        reader = self._reader
        events = reader.feed(data, FRAMES_PER_TURN)
        try:
            if reader.has_control:
                self._sort(events)
            elif events and not self.is_ending:
                self.on_messages(events)
        except Exception as error:
            # A fault of ours ends one connection only.
            log.error("websocket failed", kind=self.kind, exc_info=error)
            self._fail(INTERNAL, "internal")
        if self._is_alone:
            return
        if reader.error is not None:
            self._fail(reader.error.close_code, reader.error.reason)
            return
        if events and (not reader.has_control or any(opcode < CLOSE for opcode, _ in events)):
            self._has_message = True
        if reader.is_partial and self._message_timer is None:
            self._expect_message()
        self._steer()

    def _sort(self, events: list[tuple[int, bytes]]) -> None:
        """Control frames are acted upon in their place among the messages."""
        messages: list[tuple[int, bytes]] = []
        for event in events:
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

    def _deliver(self, messages: list[tuple[int, bytes]]) -> None:
        # What comes after our own close frame could not be confirmed, so it is not taken.
        if messages and not self.is_ending:
            self.on_messages(messages)

    def _pong(self, payload: bytes) -> None:
        # Who does not read gets no more to read: a pong may be left out when another ping comes.
        if not self.is_ending and not self.is_paused:
            self.write(encode(PONG, payload))

    def _steer(self) -> None:
        """Read from the client while there is room for what that causes. The rest of a packet
        comes before the next one."""
        if self.transport.is_closing():
            return
        has_more = self._reader.has_more and not self._is_alone
        if has_more and self._has_room and not self._is_going_on:
            self._is_going_on = True
            asyncio.get_running_loop().call_soon(self._go_on)
        should_read = self._has_room and not has_more
        if should_read != self._is_reading:
            self._is_reading = should_read
            if should_read:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    @property
    def _has_room(self) -> bool:
        """After our own close frame nothing is answered any more, and so nothing piles up."""
        return not self.is_paused or self.is_read_while_paused or self.is_ending

    def _go_on(self) -> None:
        self._is_going_on = False
        if self._has_room and not self._is_alone and not self.transport.is_closing():
            self._read(b"")

    # ---- liveness and flow

    def _expect_message(self) -> None:
        self._has_message = False
        self._message_timer = self._timers.after(self._times.message_s, self._on_message_due)

    def _on_message_due(self) -> None:
        # Not cancelled when its message is complete: most packets end in the middle of one.
        self._message_timer = None
        if self._reader.is_partial and not self.is_ending:
            if self._has_message:
                self._expect_message()
            else:
                self.end(POLICY, "slow_sender")

    @property
    def _is_silent(self) -> bool:
        """Whether a ping was sent, and nothing came since although it would have been read."""
        return not self._is_heard and self._is_reading and not self.is_paused

    def _ping(self) -> None:
        if self._is_silent:
            self._ping_timer = self._timers.after(LOOK_S, self._on_silence)
            return
        self._is_heard = False
        if not self.is_paused:
            self.write(encode(PING, b""))
        self._ping_timer = self._timers.after(self._times.ping_s, self._ping)

    def _on_silence(self) -> None:
        if self._is_silent:
            self.end(POLICY, "no_pong")
        else:
            self._ping()

    def pause_writing(self) -> None:
        self.is_paused = True
        if self._slow_timer is None and not self.is_ending:
            self._slow_timer = self._timers.after(self._times.slow_s, self._on_slow)
        self._steer()

    def resume_writing(self) -> None:
        self.is_paused = False
        # It could not be heard while it was not read from, or had no ping to answer.
        self._is_heard = True
        self._cancel(self._slow_timer)
        self._slow_timer = None
        self._steer()
        self.on_drained()

    def _on_slow(self) -> None:
        self._slow_timer = self._timers.after(LOOK_S, self._on_too_slow)

    def _on_too_slow(self) -> None:
        self._slow_timer = None
        self.end(POLICY, "slow_consumer")

    # ---- ends

    def shutdown(self) -> None:
        """The broker stops."""
        self.end(GOING_AWAY, "stopping")

    def end(self, code: int, reason: str) -> None:
        """Say why, and cut the connection if the other side does not end it in a moment."""
        if self.is_ending or self.transport.is_closing():
            return
        self._why = self._why or REASONS.get(code, reason)
        self._stop_sending()
        self.write(encode_close(code, reason))
        # The other side's close frame is to be seen.
        self._steer()

    def _on_close(self, payload: bytes) -> None:
        try:
            code = read_close(payload).code
        except FrameError as error:
            self._fail(error.close_code, error.reason)
            return
        self._why = self._why or "client"
        self._is_alone = True
        self.end(code, "")
        self.transport.close()

    def _fail(self, code: int, reason: str) -> None:
        self._is_alone = True
        self.end(code, reason)
        if self.transport.is_closing():
            return
        self._steer()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self._wait_for_quiet()

    def _wait_for_quiet(self) -> None:
        self._is_heard = False
        self._ping_timer = self._timers.after(QUIET_S, self._on_quiet)

    def _on_quiet(self) -> None:
        self._ping_timer = None
        if self._is_heard:
            self._wait_for_quiet()
        else:
            self.transport.close()

    def eof_received(self) -> None:
        self._is_alone = True
        self._stop_sending()

    def _stop_sending(self) -> None:
        if self.is_ending:
            return
        self.is_ending = True
        self._cancel(self._ping_timer)
        self._cancel(self._slow_timer)
        self._closing_timer = self._timers.after(self._times.close_s, self.cut)
        self.on_ending()

    def cut(self) -> None:
        """End it now; what has not left is known to have not."""
        self._is_cut = True
        self.on_cut()
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._is_lost = True
        self._is_alone = True
        self.is_ending = True
        timers = (self._ping_timer, self._slow_timer, self._closing_timer, self._message_timer)
        for timer in timers:
            self._cancel(timer)
        counts, why = self._counts, self._why or "lost"
        counts.open[self.kind] -= 1
        counts.closed[why] = counts.closed.get(why, 0) + 1
        self.on_lost(is_cut=self._is_cut or exc is not None)

    def _cancel(self, timer: Timer | None) -> None:
        if timer is not None:
            self._timers.cancel(timer)


def _refusal(status: int, code: bytes, message: bytes) -> Answer:
    return Answer(status, b'{"error":"%b","message":"%b"}' % (code, message), JSON)
