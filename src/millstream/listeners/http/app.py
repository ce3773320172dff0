"""The ASGI applications: everything that HTTP offers, and the one with the health pages alone."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.exceptions import HTTPException

import millstream
from millstream.errors import MillstreamError
from millstream.listeners.http.answers import answer_to, error_answer
from millstream.listeners.http.health import health_routes
from millstream.listeners.http.queue_routes import queue_routes
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from millstream.broker.queues import Queues
    from millstream.broker.snapshots import Snapshots
    from millstream.broker.timers import Timers
    from millstream.observe.metrics import Metrics
    from millstream.observe.status import Status

log = get_logger("http")


def http_app(
    status: Status, metrics: Metrics, queues: Queues, timers: Timers, snapshots: Snapshots
) -> FastAPI:
    """All routes."""
    app = _empty_app(openapi="/openapi.json")
    app.include_router(health_routes(status, metrics, queues))
    app.include_router(queue_routes(queues, timers, snapshots))
    return app


def metrics_app(status: Status, metrics: Metrics, queues: Queues) -> FastAPI:
    """The health and metrics pages, for a listener of their own."""
    app = _empty_app(openapi=None)
    app.include_router(health_routes(status, metrics, queues))
    return app


def _empty_app(*, openapi: str | None) -> FastAPI:
    app = FastAPI(
        title="Millstream",
        version=millstream.__version__,
        openapi_url=openapi,
        # FastAPI's own pages load scripts from the internet, which a broker may not have.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(MillstreamError, _on_millstream_error)
    app.add_exception_handler(Exception, _on_bug)
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = HTTPStatus(error.status_code).name.lower()
    what = f"{request.method} {request.url.path}"
    messages = {
        HTTPStatus.NOT_FOUND: f"there is no {what}; /openapi.json lists what there is",
        HTTPStatus.METHOD_NOT_ALLOWED: f"there is no {what}; the path takes other methods",
    }
    message = messages.get(HTTPStatus(error.status_code), str(error.detail))
    return error_answer(error.status_code, code, message, error.headers)


async def _on_millstream_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, MillstreamError)
    return answer_to(error)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("request failed", path=request.url.path, exc_info=error)
    return error_answer(
        HTTPStatus.INTERNAL_SERVER_ERROR, "internal", "the broker failed; its messages say why"
    )
