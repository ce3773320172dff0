"""Hot requests: what the fast lane asks of its routes, and what a route sees of a request."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, NamedTuple, Protocol

from millstream.listeners.http.answer import Answer
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from millstream.errors import MillstreamError
    from millstream.listeners.http.heads import Headers
    from millstream.listeners.http.lane import LaneProtocol

# Request line and headers together; browsers and proxies stay below 16 KiB.
HEAD_BYTES_MAX = 64 * 1024
# A body where none is expected.
COLD_BODY_BYTES_MAX = 64 * 1024
# macOS cannot be asked whether the other side has closed; there one finds out a moment later.
HUNG_UP = select.POLLERR | select.POLLHUP | getattr(select, "POLLRDHUP", 0)
# In an ASGI scope: what says whether the client went away.
IS_LOST = "millstream.is_lost"

log = get_logger("http")


def refusal(status: int, code: bytes, message: bytes) -> Answer:
    return Answer(status, b'{"error":"%b","message":"%b"}' % (code, message))


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
BAD_REQUEST = refusal(400, b"bad_request", b"this is not valid HTTP")
BAD_VERSION = refusal(400, b"bad_request", b"HTTP/1.0 and HTTP/1.1 are spoken here")
BAD_HOST = refusal(400, b"bad_request", b"a request has one Host header")
BAD_CODING = refusal(400, b"bad_request", b"the only transfer coding spoken here is chunked")
HEAD_TOO_LARGE = refusal(431, b"head_too_large", b"at most 64 KiB of headers")
TOO_SLOW = refusal(408, b"too_slow", b"the request did not arrive in time")
TOO_MANY = refusal(
    503, b"too_many_connections", b"the broker has all the connections it may have; try later"
)
BODY_TOO_LARGE = refusal(413, b"body_too_large", b"at most 64 KiB of body")
NO_WEBSOCKET = refusal(404, b"not_found", b"there is no WebSocket here")
INTERNAL = refusal(500, b"internal", b"the broker failed; its messages say why")


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

    def objection(self, headers: Headers) -> Answer | None: ...

    def upgrade(self, method: bytes, url: bytes, headers: Headers) -> Upgraded | Answer: ...

    def failure(self, error: MillstreamError) -> Answer: ...

    def too_large(self, path: bytes) -> Answer: ...

    def refused(self, lane: LaneProtocol, answer: Answer) -> None:
        """Told of an answer that the lane gives by itself: what was sent is wrong, or too much."""
        ...


class Line(Protocol):
    """A connection, as those see it who hold a place in its line."""

    def on_slot(self, slot: Slot) -> None:
        """Its answer is there."""
        ...


class Slot(Protocol):
    """A place in line for an answer that comes later, to a request of which nothing else has to
    be known. Whoever fills it tells the line."""

    # The JSON of an answer with status 200; or any other answer.
    answer: bytes | Answer | None
    line: Line | None


class HotRequest:
    """A request to a hot route, from its head to its answer."""

    __slots__ = (
        "answer",
        "body",
        "headers",
        "is_checked",
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
        # Whether it was asked for an objection when its head came.
        self.is_checked = False
        self.is_served = False
        self.answer: Answer | None = None
        # Called when the client goes away before its answer.
        self.on_lost: Callable[[], None] | None = None

    def header(self, name: bytes) -> bytes:
        for key, value in self.headers:
            if key == name:
                return value
        return b""

    @property
    def is_lost(self) -> bool:
        return self.lane.is_lost()

    def lose(self) -> None:
        """Its client went away."""
        if self.on_lost is not None:
            try:
                self.on_lost()
            except Exception as error:
                log.error("a lost request was not cleared away", exc_info=error)

    def reply(self, answer: Answer) -> None:
        """Answer a request that had to wait."""
        self.on_lost = None
        self.answer = answer
        self.lane.on_reply()


class NoLane:
    """For a listener without hot routes: limits and times are the same."""

    def body_bytes_max(self, path: bytes) -> int:
        del path
        return COLD_BODY_BYTES_MAX

    def find(self, method: bytes, path: bytes) -> None:
        del method, path

    def objection(self, headers: Headers) -> None:
        del headers

    def upgrade(self, method: bytes, url: bytes, headers: Headers) -> Answer:
        del method, url, headers
        return NO_WEBSOCKET

    def failure(self, error: MillstreamError) -> Answer:
        return bug(error)

    def too_large(self, path: bytes) -> Answer:
        del path
        return BODY_TOO_LARGE

    def refused(self, lane: LaneProtocol, answer: Answer) -> None:
        del lane, answer


class Said(NamedTuple):
    """What a head says of its request, or what is wrong with it."""

    refusal: Answer | None = None
    expects_continue: bool = False
    length: int = 0


def examine(headers: Headers, url: bytes, version: str) -> Said:
    """A head that parses, and need not be right for that."""
    hosts = length = size = 0
    expects = False
    for name, value in headers:
        size += len(name) + len(value)
        if name == b"host":
            hosts += 1
        elif name == b"content-length":
            length = int(value)
        elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
            return Said(BAD_CODING)
        elif name == b"expect" and version == "1.1":
            expects = value.lower() == b"100-continue"
    if size + len(url) > HEAD_BYTES_MAX:
        return Said(HEAD_TOO_LARGE)
    if version not in ("1.1", "1.0"):
        return Said(BAD_VERSION)
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        return Said(BAD_HOST)
    return Said(None, expects, length)


def has_event(transport: asyncio.BaseTransport, events: int) -> bool:
    """Ask the system about a connection."""
    socket = transport.get_extra_info("socket")
    if socket is None or socket.fileno() < 0:
        return False
    poll = select.poll()
    poll.register(socket.fileno(), events)
    return bool(poll.poll(0))


def bug(error: BaseException) -> Answer:
    log.error("request failed", exc_info=error)
    return INTERNAL


def answered(lane: LaneProtocol, answer: Answer) -> HotRequest:
    """One that stands in line with its answer."""
    request = HotRequest(lane, nowhere, "", b"")
    request.answer, request.is_served = answer, True
    return request


def nowhere(request: HotRequest) -> Answer | None:
    del request
    return None
