"""The fast lane: hot routes are answered by the protocol class itself.

uvicorn parses HTTP and runs an ASGI cycle, in a task, for each request. For the few routes that
carry messages this costs more than the work. Here a request to one of them is answered as soon as
its last byte is parsed, without a cycle or a task, and when its head was seen before even without
the parser (`heads.py`); every other route goes on to uvicorn as usual.

Answers go out in the order of requests, also when one has to wait:

- `_line` holds, in order, requests whose turn has not come: hot ones that wait, or that come
  after something that waits, and ASGI requests that come after a hot one that waits;
- the line is bounded, by requests and by bytes: while it is full the connection is not read, and
  what was read is not parsed (`_rest`). A client that does not read its answers is not read from
  either, and its requests are not served until it does.

Nobody takes for ever: a head and a body have to come within a time, answers have to be read within
one, and an idle connection is closed (`sweep`, which the listener calls once a second).
"""

from __future__ import annotations

import select
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from millstream.errors import MillstreamError
from millstream.listeners.http.answer import Answer, Dated
from millstream.listeners.http.heads import (
    HEAD_END,
    KNOWN_BYTES_MAX,
    Heads,
    Known,
    without_upgrade,
)
from millstream.listeners.http.hot import (
    BAD_REQUEST,
    CONTINUE,
    HEAD_BYTES_MAX,
    HEAD_TOO_LARGE,
    HUNG_UP,
    IS_LOST,
    TOO_MANY,
    TOO_SLOW,
    HotRequest,
    HotRoutes,
    Slot,
    answered,
    bug,
    examine,
    has_event,
)
from millstream.listeners.http.lane_limits import (
    HEAD_S_MAX,
    LINE_BYTES_MAX,
    LINE_REQUESTS_MAX,
    LINGER_S,
    SLICE_BYTES,
    SLICES_PER_TURN,
    UNREAD_S_MAX,
    WRITE_BYTES,
    body_s_max,
)

if TYPE_CHECKING:
    import asyncio

    from uvicorn._types import ASGI3Application

# Where a connection is with what it reads: between requests; in a head; in a body; in a head that
# asks for another protocol, which is a WebSocket, or one that is ignored; past the last request.
IDLE, HEAD, BODY, UPGRADE, AGAIN, ENDED = range(6)


class _Cold(NamedTuple):
    """An ASGI request whose turn has not come."""

    cycle: RequestResponseCycle
    app: ASGI3Application


class LaneProtocol(HttpToolsProtocol):
    """One connection. What all have in common is set by `lane_class`, because uvicorn makes the
    instances."""

    __slots__ = (
        "_body",
        "_body_bytes",
        "_cold",
        "_head_bytes",
        "_hot",
        "_is_stopping",
        "_is_used",
        "_is_write_paused",
        "_known",
        "_known_before",
        "_line",
        "_line_bytes",
        "_owes_continue",
        "_rest",
        "_room",
        "_running",
        "_since",
        "_slots",
        "_state",
        "_unread_since",
    )

    routes: HotRoutes
    heads: Heads
    dated: Dated
    connections_max: int
    # Connections that were one too many.
    turned_away = 0

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.url = b""
        self.headers = []
        self._known: Known | None = None
        self._known_before: Known | None = None
        # The request whose body is being read: one of the two.
        self._hot: HotRequest | None = None
        self._cold: RequestResponseCycle | None = None
        self._room = 0
        self._body: bytes | bytearray = b""
        # What cannot be answered yet, in the order of requests; the bytes of its bodies.
        self._line: deque[HotRequest | Slot | _Cold] = deque()
        self._line_bytes = 0
        # How many of them are slots: what comes after nothing else need not wait for its turn.
        self._slots = 0
        # What was read and is not parsed yet, because the line is full.
        self._rest = b""
        self._running: RequestResponseCycle | None = None
        self._state = IDLE
        # When the state began; 0 when that is now. `_is_used` is for what has no time to look.
        self._since = 0.0
        self._is_used = False
        # Bytes that came since the last sign of progress, and those of the body.
        self._head_bytes = 0
        self._body_bytes = 0
        self._owes_continue = False
        self._is_write_paused = False
        self._unread_since: float | None = None
        self._is_stopping = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > self.connections_max:
            type(self).turned_away += 1
            self._state = ENDED
            self._say_and_end(TOO_MANY)

    # ---- bytes in

    def data_received(self, data: bytes) -> None:
        known, size = self._known, len(data)
        if known is not None and (known.size != size or not data.startswith(known.head)):
            # A worker sends two in turn: its receives, and its acks.
            known = self._known_before
            if known is not None and (known.size != size or not data.startswith(known.head)):
                known = None
        if known is not None and self._state == IDLE and not self._rest and self._may_serve(known):
            # One request like one of the two before, which is what a busy client sends.
            self._is_used = True
            body = data[known.body_at :]
            answer = self._quick(known, body)
            if answer is None:
                self._serve_known(known, body)
            elif answer:
                self.transport.write(answer)
            return
        data, self._rest = self._rest + data, b""
        if self._state == IDLE:
            at = self._answer_known(data)
            if at == len(data) and not self.flow.read_paused:
                return
            data = data[at:]
        self._rest = data
        self._parse_rest()

    def _answer_known(self, data: bytes) -> int:
        """Answer what is known at the front of a packet; how many bytes that were."""
        at = out_bytes = 0
        out: list[bytes] = []
        while at < len(data) and not self._is_stopping:
            body_at = data.find(HEAD_END, at, at + KNOWN_BYTES_MAX) + len(HEAD_END)
            if body_at < len(HEAD_END):
                break
            known = self.heads.find(data[at:body_at])
            if known is None or len(data) - at < known.size or not self._may_serve(known):
                break
            if known is not self._known:
                self._known, self._known_before = known, self._known
            at += known.size
            body = data[body_at:at]
            answer = self._quick(known, body)
            if answer is None:
                if out:
                    self.transport.write(b"".join(out))
                    out, out_bytes = [], 0
                self._serve_known(known, body)
                continue
            out.append(answer)
            out_bytes += len(answer)
            if out_bytes > WRITE_BYTES:
                # The transport may say now that this is enough.
                self.transport.write(b"".join(out))
                out, out_bytes = [], 0
        if at:
            self._is_used = True
        if out_bytes:
            self.transport.write(b"".join(out))
        return at

    def _may_serve(self, known: Known) -> bool:
        """Whether it is this request's turn: nothing is in line, or it may be in line too."""
        if self._running is not None or self._is_write_paused:
            return False
        if not self._line:
            return True
        waiting = len(self._line)
        return (
            known.begin is not None
            and waiting == self._slots < LINE_REQUESTS_MAX
            and waiting * known.size <= LINE_BYTES_MAX
        )

    def _quick(self, known: Known, body: bytes) -> bytes | None:
        """The answer; nothing of it yet where it has a place in line, and None where it takes the
        route itself."""
        try:
            if known.begin is None:
                return known.answer(body)
            slot = known.begin(body)
            if slot is None:
                return None
            if slot.answer is not None and not self._line:
                return self.dated.render(slot.answer)
            slot.line = self
            self._line.append(slot)
            self._slots += 1
        except Exception as error:  # noqa: BLE001  a bug is answered, in its place
            if not self._line:
                return self.dated.render(bug(error))
            self._line.append(answered(self, bug(error)))
        return b""

    def _serve_known(self, known: Known, body: bytes) -> None:
        """As if it had been parsed."""
        self.headers = known.headers
        self._complete(HotRequest(self, known.route, known.name, known.query), body)
        self.headers = []

    @property
    def _is_held_up(self) -> bool:
        """Whether a request would have to wait for its turn."""
        return bool(self._line) or self._running is not None or self._is_write_paused

    def _parse_rest(self) -> None:
        """Parse what was read, unless the line is full; of a lot, some in each turn of the loop."""
        if self.transport.is_closing():
            self._rest = b""
            return
        for _ in range(SLICES_PER_TURN):
            rest = self._rest
            if not rest or self._is_line_full:
                break
            self._rest = b""
            if len(rest) > SLICE_BYTES:
                self._parse(rest[:SLICE_BYTES], rest[SLICE_BYTES:])
            else:
                self._parse(rest, b"")
        if self._is_line_full:
            self.flow.pause_reading()
        elif self._rest:
            self.flow.pause_reading()
            self.loop.call_soon(self._parse_rest)
        elif self.flow.read_paused:
            self._read_on()
        if self._is_stopping:
            self.move_on()

    @property
    def _is_line_full(self) -> bool:
        return len(self._line) >= LINE_REQUESTS_MAX or self._line_bytes > LINE_BYTES_MAX

    def _read_on(self) -> None:
        """Read again, unless there is a reason not to."""
        cold = self._cold
        if cold and len(cold.body) > HIGH_WATER_LIMIT and not cold.response_complete:
            # The application has to take that first.
            return
        if not (self._is_write_paused or self._rest or self._is_line_full):
            self.flow.resume_reading()

    def _parse(self, data: bytes, later: bytes) -> None:
        if self._state == ENDED:
            # The client is still sending what was refused; it is closed in a moment.
            return
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._on_upgrade(data[upgrade.args[0] :] + later)
            return
        except httptools.HttpParserCallbackError as error:
            self._refuse(bug(error.__context__ or error))
            return
        except httptools.HttpParserError:
            if self._state != ENDED:
                self._refuse(BAD_REQUEST)
            return
        self._rest = later
        if not self._since:
            self._since = self.loop.time()
        if self._head_bytes > HEAD_BYTES_MAX and self._state in (HEAD, BODY):
            self._refuse(HEAD_TOO_LARGE)

    def _on_upgrade(self, rest: bytes) -> None:
        state, self._state = self._state, IDLE
        if state == ENDED:
            self._state = ENDED
        elif state == AGAIN:
            # The parser stops at such a head and takes its body for the other protocol. It is
            # read again without what was asked for.
            self._rest = without_upgrade(self.parser, self.url, self.headers) + rest
        elif state != UPGRADE or self._line or self._running is not None:
            # A client has to wait for its answers before it changes the protocol.
            self._refuse(BAD_REQUEST)
        else:
            self._upgrade(rest)

    def _upgrade(self, rest: bytes) -> None:
        """Hand the connection over to a WebSocket, or say why not."""
        found = self.routes.objection(self.headers) or self.routes.upgrade(
            self.parser.get_method(), self.url, self.headers
        )
        if isinstance(found, Answer):
            self._refuse(found)
            return
        self.connections.discard(self)
        self.flow.resume_reading()
        # The parser holds this object, which nobody needs any more.
        self.parser = None  # type: ignore[assignment]
        found.take_over(self.transport, cast("set[object]", self.connections), rest)

    # ---- one request, as the parser tells it

    def on_message_begin(self) -> None:
        if self._state == ENDED:
            return
        self.url, self.headers = b"", []
        self._hot = None
        self._state = HEAD
        self._since = 0.0

    def on_header(self, name: bytes, value: bytes) -> None:
        # Those after a body are not headers of the request: they would get past who checked it.
        if self._state == HEAD:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._state == ENDED:
            return
        self._state = BODY
        self._since = 0.0
        self._head_bytes = self._body_bytes = 0
        parser = self.parser
        method, version = parser.get_method(), parser.get_http_version()
        path, _, query = self.url.partition(b"?")
        self._room = self.routes.body_bytes_max(path)
        said = examine(self.headers, self.url, version)
        self.expect_100_continue, self._owes_continue = said.expects_continue, False
        # A broker is no proxy; and the parser always takes this one for another protocol.
        refusal = BAD_REQUEST if method == b"CONNECT" else said.refusal
        if refusal is None and said.length > self._room:
            refusal = self.routes.too_large(path)
        if refusal is not None:
            self._refuse(refusal)
            return
        if parser.should_upgrade():
            self._state = UPGRADE if self._get_upgrade() == b"websocket" else AGAIN
            return
        found = self.routes.find(method, path)
        if found is None:
            self._begin_cold()
            return
        hot = self._hot = HotRequest(self, *found, query)
        hot.is_last = version == "1.0" or not parser.should_keep_alive()
        if self.expect_100_continue:
            self._begin_expected(hot)

    def _begin_expected(self, hot: HotRequest) -> None:
        """Say that the body may come, when it is this request's turn."""
        objection = self.routes.objection(hot.headers)
        hot.is_checked = True
        if objection is not None:
            self._refuse(objection)
        elif self._is_held_up:
            self._owes_continue = True
        else:
            self.transport.write(CONTINUE)

    def _begin_cold(self) -> None:
        """Hand the head over to uvicorn, which makes a cycle and starts it in our order."""
        try:
            path = httptools.parse_url(self.url).path
        except httptools.HttpParserInvalidURLError:
            path = None
        if path is None:
            self._refuse(BAD_REQUEST)
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        cast("dict[str, object]", self.scope)[IS_LOST] = self.is_lost
        super().on_headers_complete()
        # Its own line stays empty, and nothing holds a request that is done with.
        self._cold = self.cycle
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._is_held_up:
            self._line.append(_Cold(cycle, app))
        else:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if self._state != BODY:
            return
        self._head_bytes = 0
        self._body_bytes += len(body)
        if self._body_bytes > self._room:
            self._refuse(self.routes.too_large(self.url.partition(b"?")[0]))
        elif self._hot is not None:
            self._add(body)
        elif self._cold is not None and not self._cold.response_complete:
            self._cold.body += body
            if len(self._cold.body) > HIGH_WATER_LIMIT:
                # Until the application takes it.
                self.flow.pause_reading()
            self._cold.message_event.set()

    def _add(self, body: bytes) -> None:
        """Most bodies come in one piece; a million pieces must not cost more than their bytes."""
        if not self._body:
            self._body = body
            return
        if isinstance(self._body, bytes):
            self._body = bytearray(self._body)
        self._body += body

    def on_message_complete(self) -> None:
        if self._state != BODY:
            return
        self._state = IDLE
        self._since = 0.0
        self._owes_continue = False
        cold, self._cold = self._cold, None
        if cold is not None:
            cold.more_body = False
            cold.message_event.set()
            if not cold.keep_alive:
                self._state = ENDED
            return
        hot, self._hot = self._hot, None
        assert hot is not None
        body, self._body = bytes(self._body), b""
        self._complete(hot, body)

    def _complete(self, hot: HotRequest, body: bytes) -> None:
        hot.body = body
        answer = None if self._is_held_up or self._is_stopping else self._serve(hot)
        if answer is None:
            self._line.append(hot)
            self._line_bytes += len(hot.body)
            if hot.is_last:
                self._state = ENDED
            return
        self.transport.write(self.dated.render(answer, hot.is_last))
        if hot.is_last:
            self._end()

    def _serve(self, hot: HotRequest) -> Answer | None:
        hot.is_served = True
        try:
            objection = None if hot.is_checked else self.routes.objection(hot.headers)
            return hot.route(hot) if objection is None else objection
        except MillstreamError as error:
            return self.routes.failure(error)
        except Exception as error:  # noqa: BLE001  a bug is answered, in its place
            return bug(error)

    # ---- what has to wait

    def on_reply(self) -> None:
        """Something in line has its answer. Only that is written at once: what comes after it may
        be served in a turn of its own, because serving it may answer somebody else again."""
        if len(self._line) == 1 and not self._rest:
            self.move_on()
        else:
            self.loop.call_soon(self.move_on)

    def on_slot(self, slot: Slot) -> None:
        """As `on_reply`; the answer of one that waits alone goes out at once."""
        line, answer = self._line, slot.answer
        if not line or line[0] is not slot or answer is None:
            return
        if (
            len(line) > 1
            or self._rest
            or self._is_write_paused
            or self._is_stopping
            or self._owes_continue
            or self.flow.read_paused
            or self.transport.is_closing()
        ):
            self.on_reply()
            return
        line.clear()
        self._slots = 0
        self._is_used = True
        self.transport.write(self.dated.render(answer))

    def move_on(self) -> None:
        """Send what has come to the head of the line, and start what comes next."""
        self._is_used = True
        while self._line and self._running is None and not self.transport.is_closing():
            if self._is_write_paused or not self._take_turn(self._line[0]):
                break
        if self.transport.is_closing():
            return
        if self._owes_continue and not self._is_held_up:
            self._owes_continue = False
            self.transport.write(CONTINUE)
        if self._rest and not self._is_line_full:
            # As if it came now.
            self.loop.call_soon(self.data_received, b"")
        elif self.flow.read_paused:
            self._read_on()
        self._end_if_stopped()

    def _take_turn(self, first: HotRequest | Slot | _Cold) -> bool:
        """Whether it is done with, and the next one may come."""
        if isinstance(first, _Cold):
            self._line.popleft()
            self._running = first.cycle
            super()._start_asgi_task(first.cycle, first.app)
            return False
        is_last = False
        if isinstance(first, HotRequest):
            if not first.is_served:
                first.answer = self._serve(first) or first.answer
            is_last = first.is_last
        answer = first.answer
        if answer is None:
            return False
        self._line.popleft()
        if isinstance(first, HotRequest):
            self._line_bytes -= len(first.body)
        else:
            self._slots -= 1
        is_last = is_last or (
            self._is_stopping and self._state == IDLE and not self._line and not self._rest
        )
        self.transport.write(self.dated.render(answer, is_last))
        if is_last:
            self._end()
        return True

    def on_response_complete(self) -> None:
        """uvicorn's cycle has written its answer."""
        running, self._running = self._running, None
        if running is not None:
            # Of a body that it did not ask for.
            running.body = bytearray()
        self.move_on()

    # ---- ends

    def _refuse(self, answer: Answer) -> None:
        """Answer and end the connection. What the client is still sending is read and dropped
        for a moment, because closing at once would take the answer away from it."""
        self._state = ENDED
        self._hot = None
        self._body = b""
        self._rest = b""
        self.routes.refused(self, answer)
        cold, self._cold = self._cold, None
        if cold is not None and not self._withdraw(cold):
            # It has its answer already.
            self.loop.call_later(LINGER_S, self.transport.close)
        elif self._is_held_up:
            # Earlier requests come first; the connection ends with the last of them.
            last = answered(self, answer)
            last.is_last = True
            self._line.append(last)
        else:
            self._say_and_end(answer)

    def _say_and_end(self, answer: Answer) -> None:
        self.transport.write(self.dated.render(answer, is_last=True))
        self.loop.call_later(LINGER_S, self.transport.close)

    def _withdraw(self, cold: RequestResponseCycle) -> bool:
        """Take a request away from the application, because its body does not come as it should;
        False when the answer has begun."""
        if cold.response_started:
            return False
        cold.disconnected = True
        cold.message_event.set()
        if self._running is cold:
            self._running = None
        else:
            # Nothing comes in line after a request that is still being read.
            self._line.pop()
        return True

    def _end(self) -> None:
        self._state = ENDED
        self.transport.close()

    def shutdown(self) -> None:
        """The server stops: what has come, or is on its way, is answered; then this ends."""
        self._is_stopping = True
        self._known = self._known_before = None
        self._end_if_stopped()

    def _end_if_stopped(self) -> None:
        if not self._is_stopping or self._line or self._rest or self._state not in (IDLE, BODY):
            return
        running = self._running
        if running is not None:
            if self._state == IDLE or running is self._cold:
                running.keep_alive = False
        elif self._state == IDLE and not has_event(self.transport, select.POLLIN):
            self._end()

    def sweep(self, now: float, idle_s: float) -> None:
        """Called every second: end connections that are idle, or do not get on."""
        if self._is_write_paused or self.transport.is_closing():
            if self._unread_since is None:
                self._unread_since = now
            elif now - self._unread_since > UNREAD_S_MAX:
                self.transport.abort()
            return
        self._unread_since = None
        if self._is_used or self.flow.read_paused:
            # While it is not read from, it cannot get on.
            self._is_used = False
            if self._state == IDLE or self.flow.read_paused:
                self._since = now
        took_s = now - self._since
        if self._state == IDLE:
            if took_s > idle_s and not self._is_held_up:
                self.transport.close()
        elif (self._state == HEAD and took_s > HEAD_S_MAX) or (
            self._state == BODY and took_s > body_s_max(self._body_bytes)
        ):
            self._refuse(TOO_SLOW)

    def is_lost(self) -> bool:
        """Whether the client went away. The system is asked, because it knows before the loop."""
        return self.transport.is_closing() or has_event(self.transport, HUNG_UP)

    def connection_lost(self, exc: Exception | None) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.disconnected = True
            running.message_event.set()
        line, self._line = self._line, deque()
        self._slots = 0
        self._rest = b""
        for one in line:
            if isinstance(one, HotRequest):
                one.lose()
            elif not isinstance(one, _Cold):
                one.line = None
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.flow.pause_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        super().resume_writing()
        self.move_on()
