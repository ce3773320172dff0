"""The fast lane: hot routes are answered by the protocol class itself.

uvicorn parses HTTP and runs an ASGI cycle, in a task, for each request. For the few routes that
carry messages this costs more than the work. Here a request to one of them is answered as soon as
its last byte is parsed, without a cycle or a task; every other route goes on to uvicorn as usual.

Answers go out in the order of requests, also when one has to wait:

- `_line` holds, in order, requests whose turn has not come: hot ones that wait, or that come
  after something that waits, and ASGI requests that come after a hot one that waits;
- the line is bounded, by requests and by bytes: while it is full the connection is not read. A
  client that does not read its answers is not read from either.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from millstream.errors import MillstreamError
from millstream.listeners.http.answer import Answer, render

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn._types import ASGI3Application

BAD_REQUEST = Answer(400, b'{"error":"bad_request","message":"this is not valid HTTP"}')
HEAD_TOO_LARGE = Answer(431, b'{"error":"head_too_large","message":"at most 64 KiB of headers"}')

# A head, or a body, that takes longer is not being sent in earnest.
HEAD_S_MAX = 10.0
BODY_S_MAX = 60.0
# How long a refused client has to read its answer.
LINGER_S = 1.0
# What one connection may have waiting for its turn.
LINE_REQUESTS_MAX = 64
LINE_BYTES_MAX = 1024 * 1024
# Request line and headers together; browsers and proxies stay below 16 KiB.
HEAD_BYTES_MAX = 64 * 1024
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HotRoute(Protocol):
    def __call__(self, request: HotRequest) -> Answer | None:
        """The answer, or None when `request.reply` comes later."""
        ...


class Upgraded(Protocol):
    """What goes on with a connection when HTTP ends."""

    def take_over(
        self, transport: asyncio.Transport, connections: set[object], rest: bytes
    ) -> None: ...


class HotRoutes(Protocol):
    """Which requests are hot, and what every request has to pass."""

    def body_bytes_max(self, path: bytes) -> int: ...

    def find(self, method: bytes, path: bytes) -> tuple[HotRoute, str] | None: ...

    def objection(self, headers: list[tuple[bytes, bytes]]) -> Answer | None: ...

    def upgrade(
        self, method: bytes, url: bytes, headers: list[tuple[bytes, bytes]]
    ) -> Upgraded | Answer: ...

    def failure(self, error: MillstreamError) -> Answer: ...

    def too_large(self, path: bytes) -> Answer: ...


class _Cold(NamedTuple):
    """An ASGI request whose turn has not come."""

    cycle: RequestResponseCycle
    app: ASGI3Application


class HotRequest:
    """A request to a hot route, from its head to its answer."""

    __slots__ = (
        "answer",
        "body",
        "headers",
        "is_last",
        "is_served",
        "lane",
        "name",
        "on_lost",
        "query",
        "route",
    )

    def __init__(self, lane: LaneProtocol, route: HotRoute, name: str, query: bytes) -> None:
        self.lane = lane
        self.route = route
        self.name = name
        self.query = query
        self.headers = lane.headers
        self.body: bytes = b""
        # The connection ends with this request's answer.
        self.is_last = False
        self.is_served = False
        self.answer: bytes | None = None
        # Called when the client goes away before its answer.
        self.on_lost: Callable[[], None] | None = None

    def header(self, name: bytes) -> bytes:
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    @property
    def is_lost(self) -> bool:
        return self.lane.transport.is_closing()

    def reply(self, answer: Answer) -> None:
        """Answer a request that had to wait."""
        self.on_lost = None
        self.answer = render(answer, self.is_last)
        self.lane.move_on()


class LaneProtocol(HttpToolsProtocol):
    """One connection. `routes` is set by `lane_class`, because uvicorn makes the instances."""

    routes: HotRoutes
    # Connections with answers that are written at the end of this turn of the loop.
    turn: list[LaneProtocol]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._hot: HotRequest | None = None
        self._room = 0
        self._pieces: list[bytes] = []
        # What cannot be answered yet, in the order of requests.
        self._line: deque[HotRequest | _Cold] = deque()
        self._running: RequestResponseCycle | None = None
        # Answers of one packet, written together.
        self._out: list[bytes] | None = None
        self._state: Literal["idle", "head", "body", "refused"] = "idle"
        self._state_since = 0.0
        self._head_bytes = 0
        self._is_write_paused = False

    # ---- bytes in

    def data_received(self, data: bytes) -> None:
        if self._state == "refused":
            # The client is still sending what was refused; it is closed in a moment.
            return
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        self._state_since = self.loop.time()
        if self._state in ("idle", "head"):
            self._head_bytes += len(data)
        if self._out is None:
            self._out = []
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._flush()
            rest = data[upgrade.args[0] :]
            if self._should_upgrade():
                self._upgrade(rest)
            elif rest:
                # An upgrade to something else (h2c) may be ignored: it was a request like any.
                self.data_received(rest)
            return
        except httptools.HttpParserError:
            self._refuse(BAD_REQUEST)
            return
        self._flush_at_end_of_turn()
        if self._state == "head" and self._head_bytes > HEAD_BYTES_MAX:
            self._refuse(HEAD_TOO_LARGE)

    def _should_upgrade(self) -> bool:
        # uvicorn asks this at every step of a request that wants to be upgraded.
        return self._get_upgrade() == b"websocket"

    def _upgrade(self, rest: bytes) -> None:
        """Hand the connection over to a WebSocket, or say why not."""
        if self._state == "refused":
            return
        if self._line or self._running is not None:
            # A client has to wait for its answers before it changes the protocol.
            self._refuse(BAD_REQUEST)
            return
        found = self.routes.objection(self.headers) or self.routes.upgrade(
            self.parser.get_method(), self.url, self.headers
        )
        if isinstance(found, Answer):
            self._refuse(found)
            return
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        # The parser holds this object, which nobody needs any more.
        self.parser = None  # type: ignore[assignment]
        found.take_over(self.transport, cast("set[object]", self.connections), rest)

    def _flush_at_end_of_turn(self) -> None:
        """Answer all connections of a turn together: a client that was woken by the first answer
        need not be woken for the others, and waking it is the dearest part of an answer."""
        if not self._out or self._line or self._running is not None:
            self._flush()
            return
        if not self.turn:
            self.loop.call_soon(_flush_turn, self.turn)
        self.turn.append(self)

    def _flush(self) -> None:
        out, self._out = self._out, None
        if out and not self.transport.is_closing():
            self.transport.write(out[0] if len(out) == 1 else b"".join(out))

    def _write(self, data: bytes) -> None:
        if self._out is not None:
            self._out.append(data)
        else:
            self.transport.write(data)

    # ---- one request, as the parser tells it

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._hot = None
        self._state = "head"

    def on_headers_complete(self) -> None:
        if self._state == "refused":
            return
        self._state = "body"
        self._head_bytes = 0
        self._pieces = []
        parser = self.parser
        path, _, query = self.url.partition(b"?")
        is_upgrade = parser.should_upgrade() and self._should_upgrade()
        found = None if is_upgrade else self.routes.find(parser.get_method(), path)
        self._room = self.routes.body_bytes_max(path)
        if found is None:
            self._begin_cold()
            return
        hot = self._hot = HotRequest(self, *found, query)
        hot.is_last = not parser.should_keep_alive()
        if self.expect_100_continue and not self._line:
            self._write(CONTINUE)

    def _begin_cold(self) -> None:
        """Hand the head over to uvicorn, which makes a cycle and starts it in our order."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        self.cycle = None  # type: ignore[assignment]  # its own line stays empty
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if self._line or self._running is not None:
            self._line.append(_Cold(cycle, app))
            self._pause_when_long()
        else:
            self._running = cycle
            super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if self._state == "refused":
            return
        self._room -= len(body)
        if self._room < 0:
            self._refuse(self.routes.too_large(self.url.partition(b"?")[0]))
        elif self._hot is not None:
            self._pieces.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._state == "refused":
            return
        self._state = "idle"
        hot, self._hot = self._hot, None
        if hot is None:
            super().on_message_complete()
            return
        pieces = self._pieces
        hot.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        answer = None if self._line or self._running is not None else self._serve(hot)
        if answer is None:
            self._line.append(hot)
            self._pause_when_long()
            return
        self._write(render(answer, hot.is_last))
        if hot.is_last:
            self._end()

    def _serve(self, hot: HotRequest) -> Answer | None:
        hot.is_served = True
        objection = self.routes.objection(hot.headers)
        if objection is not None:
            return objection
        try:
            return hot.route(hot)
        except MillstreamError as error:
            return self.routes.failure(error)

    # ---- what has to wait

    def _pause_when_long(self) -> None:
        """A connection with something in line is still read, because that is how one learns that
        the client went away; but not without bound."""
        size = sum(len(one.body) for one in self._line if isinstance(one, HotRequest))
        if len(self._line) >= LINE_REQUESTS_MAX or size > LINE_BYTES_MAX:
            self.flow.pause_reading()

    def move_on(self) -> None:
        """Send what has come to the head of the line, and start what comes next."""
        while self._line and self._running is None and not self.transport.is_closing():
            first = self._line[0]
            if isinstance(first, _Cold):
                self._line.popleft()
                self._running = first.cycle
                super()._start_asgi_task(first.cycle, first.app)
                return
            if first.answer is None and not first.is_served:
                answer = self._serve(first)
                first.answer = None if answer is None else render(answer, first.is_last)
            if first.answer is None:
                return
            self._line.popleft()
            self._write(first.answer)
            if first.is_last:
                self._end()
                return
        if not self._line and not self._is_write_paused:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._running = None
        self._state_since = self.loop.time()
        super().on_response_complete()
        self._unset_keepalive_if_required()
        self.move_on()

    # ---- ends

    def _refuse(self, answer: Answer) -> None:
        """Answer and end the connection. What the client is still sending is read and dropped
        for a moment, because closing at once would take the answer away from it."""
        self._state = "refused"
        self._hot = None
        if self._line or self._running is not None:
            # Earlier requests come first; the connection ends with the last of them.
            last = HotRequest(self, _nowhere, "", b"")
            last.answer, last.is_last = render(answer, is_last=True), True
            self._line.append(last)
            return
        self._write(render(answer, is_last=True))
        self._flush()
        self.loop.call_later(LINGER_S, self.transport.close)

    def _end(self) -> None:
        self._state = "refused"
        self._flush()
        self.transport.close()

    def shutdown(self) -> None:
        """The server stops: what is in line is answered, then the connection ends."""
        if self._running is not None:
            self._running.keep_alive = False
        waiting = [one for one in self._line if isinstance(one, HotRequest)]
        if waiting:
            waiting[-1].is_last = True
        elif self._running is None and not self._line:
            self.transport.close()

    def sweep(self, now: float, idle_s: float) -> None:
        """Called every second: end connections that are idle, or do not get on."""
        if self._line or self._running is not None or self._state == "refused":
            return
        limit = {"idle": idle_s, "head": HEAD_S_MAX, "body": BODY_S_MAX}[self._state]
        if now - self._state_since > limit:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        running, self._running = self._running, None
        if running is not None and running is not self.cycle:
            running.disconnected = True
            running.message_event.set()
        line, self._line = self._line, deque()
        for one in line:
            if isinstance(one, HotRequest) and one.on_lost is not None:
                one.on_lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self._is_write_paused = True
        self.flow.pause_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._is_write_paused = False
        super().resume_writing()
        if not self._line:
            self.flow.resume_reading()


def lane_class(routes: HotRoutes) -> type[LaneProtocol]:
    """A protocol class with its routes, for uvicorn's configuration."""
    return type("Lane", (LaneProtocol,), {"routes": routes, "turn": []})


def _flush_turn(turn: list[LaneProtocol]) -> None:
    lanes = turn[:]
    turn.clear()
    for lane in lanes:
        try:
            lane._flush()
        except Exception:  # noqa: BLE001  one broken connection must not take the others along
            lane.transport.abort()


def _nowhere(request: HotRequest) -> Answer | None:
    del request
    return None
