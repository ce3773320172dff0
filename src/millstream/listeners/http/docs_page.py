"""The API page: shows what /openapi.json says, and lets a visitor try it.

Its files come with the package, because a broker may have no internet to load scripts from; and
the browser is told to load nothing from anywhere else.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import RedirectResponse, Response

FOLDER = "page"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # It belongs to the version of the broker that answers now.
    "cache-control": "no-cache",
}
# What is served under which path.
FILES = {
    "/docs": ("docs.html", "text/html"),
    "/docs/docs.css": ("docs.css", "text/css"),
    "/docs/docs.js": ("docs.js", "text/javascript"),
}


def docs_routes() -> APIRouter:
    routes = APIRouter(include_in_schema=False)
    folder = files("millstream.listeners.http") / FOLDER
    for path, (name, media) in FILES.items():
        _add(routes, path, (folder / name).read_bytes(), media)

    @routes.get("/")
    async def front() -> Response:
        # Relative, so that it also leads to the page behind a proxy's prefix.
        return RedirectResponse("docs", 307)

    return routes


def _add(routes: APIRouter, path: str, content: bytes, media: str) -> None:
    @routes.get(path)
    async def serve() -> Response:
        return Response(content, headers=HEADERS, media_type=media)
