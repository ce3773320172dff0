"""A message for each request, when the setting `request_log` asks for it.

Two sorts of requests, two wrappers that are put in place at start, so that without them nothing is
paid: `LoggedRoutes` around the hot routes, and `LoggedApp` around the ASGI application. A request
is logged when its answer is handed over, or when its client goes away before (`status` is null).
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from millstream.errors import MillstreamError
from millstream.listeners.http.answer import Answer
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from millstream.listeners.http.hot import HotRequest, HotRoute, HotRoutes, Upgraded
    from millstream.listeners.http.lane import LaneProtocol

    Headers = list[tuple[bytes, bytes]]

# A longer path is cut: what a client sends must not fill the disk with one request.
TARGET_CHARACTERS_MAX = 1024
SWITCHING_PROTOCOLS = 101

log = get_logger("http")


class Entry:
    """One request, from its head to its message."""

    __slots__ = ("_begin_s", "_method", "_peer", "_target")

    def __init__(self, method: bytes | str, target: bytes, peer: str | None) -> None:
        self._begin_s = perf_counter()
        self._method = method if isinstance(method, str) else method.decode("latin-1")
        self._target = target.decode("latin-1")[:TARGET_CHARACTERS_MAX]
        self._peer = peer

    def write(self, status: int | None, bytes_in: int, bytes_out: int) -> None:
        log.info(
            "request",
            method=self._method,
            path=self._target,
            # An `HTTPStatus` would be written as such.
            status=None if status is None else int(status),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            duration_ms=round((perf_counter() - self._begin_s) * 1000, 3),
            peer=self._peer,
        )


class _Watched:
    """A hot request that has to wait, as its route sees it: the answer passes by here."""

    __slots__ = ("_entry", "_request")

    def __init__(self, request: HotRequest, entry: Entry) -> None:
        self._request = request
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)

    @property
    def on_lost(self) -> Callable[[], None] | None:
        return self._request.on_lost

    @on_lost.setter
    def on_lost(self, call: Callable[[], None]) -> None:
        def lost() -> None:
            self._entry.write(None, len(self._request.body), 0)
            call()

        self._request.on_lost = lost

    def reply(self, answer: Answer) -> None:
        self._entry.write(answer.status, len(self._request.body), len(answer.body))
        self._request.reply(answer)


class _Switching:
    """A connection that is about to become a WebSocket."""

    __slots__ = ("_method", "_upgraded", "_url")

    def __init__(self, upgraded: Upgraded, method: bytes, url: bytes) -> None:
        self._upgraded = upgraded
        self._method = method
        self._url = url

    def take_over(
        self, transport: asyncio.Transport, connections: set[object], rest: bytes
    ) -> None:
        Entry(self._method, self._url, peer_of(transport)).write(SWITCHING_PROTOCOLS, 0, 0)
        self._upgraded.take_over(transport, connections, rest)


class LoggedRoutes:
    """Hot routes as they are, with a message for each request."""

    def __init__(self, routes: HotRoutes) -> None:
        self._routes = routes
        self.body_bytes_max = routes.body_bytes_max
        self.failure = routes.failure
        self.too_large = routes.too_large

    def find(self, method: bytes, path: bytes) -> tuple[HotRoute, str] | None:
        found = self._routes.find(method, path)
        if found is None:
            return None
        route, name = found

        def logged(request: HotRequest) -> Answer | None:
            target = path + b"?" + request.query if request.query else path
            entry = Entry(method, target, peer_of(request.lane.transport))
            answer = self._routes.objection(request.headers)
            if answer is None:
                try:
                    answer = route(_Watched(request, entry))  # type: ignore[arg-type]
                except MillstreamError as error:
                    answer = self._routes.failure(error)
            if answer is not None:
                entry.write(answer.status, len(request.body), len(answer.body))
            return answer

        return logged, name

    def objection(self, headers: Headers) -> None:
        """Nothing: whoever passes by here is asked where the answer can be logged."""
        del headers

    def upgrade(self, method: bytes, url: bytes, headers: Headers) -> Upgraded | Answer:
        found = self._routes.objection(headers) or self._routes.upgrade(method, url, headers)
        return found if isinstance(found, Answer) else _Switching(found, method, url)

    def refused(self, lane: LaneProtocol, answer: Answer) -> None:
        entry = Entry(lane.parser.get_method(), lane.url, peer_of(lane.transport))
        entry.write(answer.status, 0, len(answer.body))
        self._routes.refused(lane, answer)


class LoggedApp:
    """An ASGI application as it is, with a message for each request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"]
        target = scope["raw_path"] + b"?" + query if query else scope["raw_path"]
        client = scope["client"]
        entry = Entry(scope["method"], target, _place(*client) if client else None)
        status: int | None = None
        bytes_in = bytes_out = 0

        async def counted_receive() -> Message:
            nonlocal bytes_in
            message = await receive()
            bytes_in += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            nonlocal status, bytes_out
            status = message.get("status", status)
            bytes_out += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            entry.write(status, bytes_in, bytes_out)


def peer_of(transport: asyncio.BaseTransport) -> str | None:
    name = transport.get_extra_info("peername")
    return _place(*name[:2]) if name else None


def _place(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
