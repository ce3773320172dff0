"""Routes of `/v1` as an ASGI application sees them: with their page in OpenAPI.

The fast lane serves the hot ones before they get here. The handlers are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from millstream.engine.pending import Pending
from millstream.listeners.http.answer import NO_CONTENT, Answer
from millstream.listeners.http.hot import IS_LOST
from millstream.listeners.http.later import Later
from millstream.listeners.http.route import Route, operation

if TYPE_CHECKING:
    from millstream.listeners.http.read_streams import Stream

T = TypeVar("T")

NO_STORE = {"cache-control": "no-store"}


class ColdCall:
    """A request that came through ASGI."""

    __slots__ = ("_ask_whether_lost", "body", "headers", "on_lost", "query")

    def __init__(self, request: Request, body: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = request.scope["headers"]
        self.body = body
        self.query: bytes = request.scope["query_string"]
        self.on_lost: Callable[[], None] | None = None
        self._ask_whether_lost: Callable[[], bool] | None = request.scope.get(IS_LOST)

    @property
    def is_lost(self) -> bool:
        return self._ask_whether_lost is not None and self._ask_whether_lost()

    def header(self, name: bytes) -> bytes:
        for key, value in self.headers:
            if key == name:
                return value
        return b""


def v1_router(routes: Iterable[Route]) -> APIRouter:
    router = APIRouter()
    for route in routes:
        page = operation(route.form)
        for at, path in enumerate(route.paths):
            router.add_api_route(
                path,
                _endpoint(route),
                methods=[route.method],
                summary=route.form.summary,
                tags=[route.tag],
                operation_id=_operation_id(route.method, path),
                deprecated=None,
                # Only to keep FastAPI from adding a 200 of its own.
                status_code=int(next(iter(page["responses"]))),
                response_class=Response,
                openapi_extra=page | ({"description": _spelling(route)} if at else {}),
            )
    return router


def _spelling(route: Route) -> str:
    return f"Another spelling of `{route.method} {route.paths[0]}`."


def _operation_id(method: str, path: str) -> str:
    words = path.replace("{", "").replace("}", "").strip("/").split("/")
    return "_".join([method.lower(), *words])


def _endpoint(route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        call = ColdCall(request, await request.body())
        names = tuple(request.path_params.values())
        if route.stream is not None:
            stream = await route.stream(call, *names)
            if stream is not None:
                return _streaming(stream)
        answer = route.handler(call, *names)
        if isinstance(answer, Later):
            return respond(answer.make(await _until(request, call, answer.pending)))
        if isinstance(answer, Pending):
            answer = await _until(request, call, answer)
        return respond(answer)

    return endpoint


async def _until(request: Request, call: ColdCall, pending: Pending[T]) -> T:
    """The result; ClientDisconnect when the client goes away while it waits. Work that does not
    wait for messages is finished all the same."""
    if pending.is_done:
        return await pending
    done = asyncio.ensure_future(_awaited(pending))
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
        if done.done() or call.on_lost is None:
            return await done
        raise ClientDisconnect
    finally:
        gone.cancel()
        done.cancel()
        if call.on_lost is not None:
            call.on_lost()


async def _awaited(pending: Pending[T]) -> T:
    return await pending


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _streaming(stream: Stream) -> Response:
    return StreamingResponse(stream.pieces, media_type=stream.media, headers=NO_STORE)


def respond(answer: Answer) -> Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    if answer.status == NO_CONTENT:
        return Response(status_code=NO_CONTENT, headers=headers)
    return Response(answer.body, answer.status, headers=headers, media_type=answer.media.decode())
