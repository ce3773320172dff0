"""The pages for whoever watches the broker: health, probes and metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import millstream
from millstream.listeners.http.answers import JSON_TYPE, error_answer, json_answer, preferred
from millstream.observe.metrics import TEXT_TYPE
from millstream.observe.queues import detailed_page, health_fields, process_values

if TYPE_CHECKING:
    from millstream.broker.queues import Queues
    from millstream.observe.metrics import Metrics
    from millstream.observe.status import Status


def health_routes(status: Status, metrics: Metrics, queues: Queues) -> APIRouter:
    routes = APIRouter(tags=["health"])

    @routes.api_route(
        "/health",
        methods=["GET", "HEAD"],
        summary="Whether the broker can do its work",
        response_model=None,
    )
    async def health(request: Request) -> Response:
        state = status.health()
        code = HTTPStatus.OK if state.ok else HTTPStatus.SERVICE_UNAVAILABLE
        reason = state.reason or "the broker gives no reason"
        if preferred(request.headers.get("accept"), JSON_TYPE, "text/plain") == "text/plain":
            return PlainTextResponse("ok" if state.ok else reason, code)
        page: dict[str, object] = {
            "status": "healthy" if state.ok else "unhealthy",
            "phase": status.phase,
            "version": millstream.__version__,
            "node_id": status.node_id,
            "uptime_seconds": round(status.uptime_seconds, 3),
            **health_fields(queues),
        }
        if not state.ok:
            page |= {"error": "unhealthy", "message": reason}
        return json_answer(page, code)

    @routes.api_route(
        "/livez",
        methods=["GET", "HEAD"],
        summary="Whether the process answers",
        response_model=None,
    )
    async def livez() -> Response:
        # To answer at all is the proof: one loop runs everything.
        return json_answer({"status": "ok"})

    @routes.api_route(
        "/readyz",
        methods=["GET", "HEAD"],
        summary="Whether clients are served",
        response_model=None,
    )
    async def readyz() -> Response:
        if status.phase == "ready":
            return json_answer({"status": "ok"})
        return error_answer(
            HTTPStatus.SERVICE_UNAVAILABLE, status.phase, f"the broker is {status.phase}"
        )

    @routes.get("/metrics", summary="Prometheus text, or JSON if asked", response_model=None)
    async def metrics_page(request: Request) -> Response:
        if preferred(request.headers.get("accept"), "text/plain", JSON_TYPE) == JSON_TYPE:
            return json_answer(process_values(queues, status.uptime_seconds) | metrics.values())
        return Response(metrics.text(), headers={"content-type": TEXT_TYPE})

    @routes.get("/metrics/detailed", summary="Prometheus text, for each queue", response_model=None)
    async def detailed() -> Response:
        return Response(detailed_page(queues), headers={"content-type": TEXT_TYPE})

    return routes
