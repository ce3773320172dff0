"""The pages for whoever watches the broker, under the names that they have in `/v1`."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.responses import Response

from millstream.listeners.http.openapi import ref
from millstream.listeners.http.route import JSON_MEDIA, Form, Reply, operation
from millstream.listeners.http.schemas import text

FORMS = {
    "/health": Form(
        "Whether the broker can do its work; the same as `/health`",
        {
            200: Reply("It can.", {JSON_MEDIA: ref("Health"), "text/plain": text()}),
            503: Reply(
                "It cannot; `message` says why.", {JSON_MEDIA: ref("Error"), "text/plain": text()}
            ),
        },
    ),
    "/metrics": Form(
        "All numbers, as Prometheus text or JSON; the same as `/metrics`",
        {200: Reply("The numbers.", {"text/plain": text(), JSON_MEDIA: ref("Metrics")})},
    ),
}


def admin_routes(health: APIRouter) -> APIRouter:
    """From the routes of the pages themselves."""
    router = APIRouter()
    for route in health.routes:
        if not isinstance(route, APIRoute) or "GET" not in (route.methods or ()):
            continue
        form = FORMS.get(route.path)
        if form is not None:
            router.add_api_route(
                f"/v1/admin{route.path}",
                route.endpoint,
                methods=["GET"],
                summary=form.summary,
                tags=["admin"],
                operation_id=f"get_v1_admin_{route.path[1:]}",
                status_code=200,
                response_class=Response,
                openapi_extra=operation(form),
            )
    return router
