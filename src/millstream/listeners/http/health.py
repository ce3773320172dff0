"""The pages for whoever watches the broker: health, probes and metrics."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import millstream
from millstream.listeners.http.answers import JSON_TYPE, error_answer, json_answer, preferred
from millstream.listeners.http.openapi import JSON, TEXT, Reply, json_reply, operation, ref
from millstream.observe.metrics import TEXT_TYPE
from millstream.observe.queues import detailed_page, health_fields, process_values

if TYPE_CHECKING:
    from millstream.broker.queues import Queues
    from millstream.observe.metrics import Metrics
    from millstream.observe.status import Status


def health_routes(status: Status, metrics: Metrics, queues: Queues) -> APIRouter:
    routes = APIRouter()

    @routes.get("/health", **HEALTH)
    @routes.head("/health", **_head(HEALTH))
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
            **status.notes(),
        }
        if not state.ok:
            page |= {"error": "unhealthy", "message": reason}
        return json_answer(page, code)

    @routes.get("/livez", **LIVE)
    @routes.head("/livez", **_head(LIVE))
    async def livez() -> Response:
        # To answer at all is the proof: one loop runs everything.
        return json_answer({"status": "ok"})

    @routes.get("/readyz", **READY)
    @routes.head("/readyz", **_head(READY))
    async def readyz() -> Response:
        if status.phase == "ready":
            return json_answer({"status": "ok"})
        return error_answer(
            HTTPStatus.SERVICE_UNAVAILABLE, status.phase, f"the broker is {status.phase}"
        )

    @routes.get("/metrics", **METRICS)
    async def metrics_page(request: Request) -> Response:
        if preferred(request.headers.get("accept"), "text/plain", JSON_TYPE) == JSON_TYPE:
            return json_answer(process_values(queues, status.uptime_seconds) | metrics.values())
        return Response(metrics.text(), headers={"content-type": TEXT_TYPE})

    @routes.get("/metrics/detailed", **DETAILED)
    async def metrics_of_each_queue() -> Response:
        return Response(detailed_page(queues), headers={"content-type": TEXT_TYPE})

    return routes


def _head(described: dict[str, Any]) -> dict[str, Any]:
    """The same without bodies."""
    responses = {
        status: {"description": response["description"]}
        for status, response in described["responses"].items()
    }
    return described | {"responses": responses}


_TEXT = {TEXT: {"schema": {"type": "string"}}}

HEALTH = operation(
    "Whether the broker can do its work",
    {
        200: Reply("It can. The word `ok` as text.", {JSON: {"schema": ref("Health")}} | _TEXT),
        503: Reply("It cannot; `message` says why.", {JSON: {"schema": ref("Error")}} | _TEXT),
    },
    tag="health",
)
LIVE = operation(
    "Whether the process answers", {200: json_reply("It does.", "Probe")}, tag="health"
)
READY = operation(
    "Whether clients are served",
    {200: json_reply("They are.", "Probe")},
    tag="health",
    errors=(503,),
)
METRICS = operation(
    "All numbers",
    {200: Reply("Prometheus text, or JSON.", _TEXT | {JSON: {"schema": ref("Metrics")}})},
    tag="health",
)
DETAILED = operation(
    "The numbers of each queue", {200: Reply("Prometheus text.", _TEXT)}, tag="health"
)
