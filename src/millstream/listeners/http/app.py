"""The ASGI applications: everything that HTTP offers, and the one with the health pages alone."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match, Route

import millstream
from millstream.broker.queues import check_queue_name
from millstream.errors import MillstreamError, QueueNameInvalid
from millstream.listeners.http.admin_routes import admin_routes
from millstream.listeners.http.answers import answer_to, error_answer
from millstream.listeners.http.docs_page import docs_routes
from millstream.listeners.http.health import health_routes
from millstream.listeners.http.openapi import DESCRIPTION, TAGS, describe
from millstream.listeners.http.queue_routes import queue_routes
from millstream.listeners.http.v1_asgi import v1_router
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    from fastapi import APIRouter
    from fastapi.routing import APIRoute
    from starlette.requests import Request
    from starlette.responses import Response

    from millstream.broker.broker import Broker
    from millstream.broker.queues import Queues
    from millstream.listeners.http.v1 import V1
    from millstream.observe.metrics import Metrics
    from millstream.observe.status import Status

log = get_logger("http")


def http_app(status: Status, metrics: Metrics, broker: Broker, v1: V1) -> FastAPI:
    """All routes."""
    health = health_routes(status, metrics, broker.queues)
    return _app(
        queue_routes(broker.queues, broker.timers, broker.snapshots),
        v1_router(v1.routes),
        health,
        admin_routes(health),
        docs_routes(),
        openapi="/openapi.json",
    )


def metrics_app(status: Status, metrics: Metrics, queues: Queues) -> FastAPI:
    """The health and metrics pages, for a listener of their own."""
    return _app(health_routes(status, metrics, queues), openapi=None)


def _app(*routers: APIRouter, openapi: str | None) -> FastAPI:
    app = FastAPI(
        title="Millstream",
        version=millstream.__version__,
        description=DESCRIPTION,
        openapi_tags=TAGS,
        openapi_url=openapi,
        generate_unique_id_function=_operation_id,
        # FastAPI's own pages load scripts from the internet, which a broker may not have.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    for router in routers:
        app.include_router(router)
    app.state.routers = routers
    app.openapi = partial(describe, app)  # type: ignore[method-assign]
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(MillstreamError, _on_millstream_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _operation_id(route: APIRoute) -> str:
    """The name of its function, which generated clients make their own names of."""
    return f"{route.name}_head" if route.methods == {"HEAD"} else route.name


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    try:
        _check_escaped_name(request)
    except QueueNameInvalid as wrong:
        return answer_to(wrong)
    code = HTTPStatus(error.status_code).name.lower()
    what = f"{request.method} {request.url.path}"
    messages = {
        HTTPStatus.NOT_FOUND: f"there is no {what}; /openapi.json lists what there is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"there is no {what}; the path takes other methods",
    }
    message = messages.get(HTTPStatus(error.status_code), str(error.detail))
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["allow"] = _allowed(request)
    return error_answer(error.status_code, code, message, headers)


def _check_escaped_name(request: Request) -> None:
    """A `/` in a queue's name, escaped, looks like another path once it is read; what is wrong is
    the name, and that is what the client should hear."""
    parts = request.scope.get("raw_path", b"").split(b"/")
    if len(parts) > 2 and parts[1] == b"queues" and b"%2f" in parts[2].lower():
        check_queue_name(unquote_to_bytes(parts[2]).decode(errors="replace"))


def _allowed(request: Request) -> str:
    """The methods of all routes of a path: the router itself knows only those of the first."""
    routers: tuple[APIRouter, ...] = request.app.state.routers
    routes = [*request.app.routes, *(route for router in routers for route in router.routes)]
    methods: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


async def _on_millstream_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, MillstreamError)
    return answer_to(error)


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    # It reads no answer, and there is nothing wrong with us.
    return error_answer(HTTPStatus.BAD_REQUEST, "bad_request", "the client went away")


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request failed", path=request.url.path, exc_info=error)
    return error_answer(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "the broker failed; its messages say why"
    )
