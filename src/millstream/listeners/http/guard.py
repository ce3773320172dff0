"""Keeps web pages from elsewhere out.

A browser on a developer's machine can reach a broker on the loopback address, and sends it what
any web page asks for. Three headers give such a request away, and it is refused before any route
sees it:

- `Host` with a name that is not ours: a page whose own name was pointed at this machine (DNS
  rebinding). An address cannot be pointed anywhere, so every address is allowed;
- `Origin` that differs from `Host`: a page from elsewhere that posts here;
- `Sec-Fetch-Site: cross-site`: the browser says so itself.

Programs that are no browsers send neither of the last two and are not affected.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from millstream.errors import ForeignRequest
from millstream.listeners.http.answers import error_answer, failure
from millstream.observe.metrics import counters

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from starlette.types import ASGIApp, Receive, Scope, Send

    from millstream.listeners.http.answer import Answer

    Asked: TypeAlias = tuple[tuple[bytes, bytes], ...]

# The headers that tell, and how many combinations of them are remembered.
TELLING = frozenset((b"host", b"origin", b"sec-fetch-site"))
KNOWN_MAX = 1024
# Names are shorter; what is longer was sent to fill the memory.
KNOWN_BYTES_MAX = 512
DEFAULT_PORTS = {"http": 80, "https": 443}


class Guard:
    """Wraps an application; counts what passes and what is refused."""

    def __init__(self, app: ASGIApp, *, listener: str, hosts: Iterable[str]) -> None:
        self.app = app
        self.listener = listener
        self.requests = 0
        self.refused = 0
        self._names = frozenset(host for host in hosts if not host.startswith("."))
        self._suffixes = tuple(host for host in hosts if host.startswith("."))
        self._any_host = "*" in self._names
        self._known: dict[Asked, str | None] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            self.requests += 1
            why = self.objection(Headers(scope=scope))
            if why is not None:
                self.refused += 1
                await error_answer(403, "foreign_request", why)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def hot_objection(self, headers: list[tuple[bytes, bytes]]) -> Answer | None:
        """As `objection`, for the fast lane: what was asked before is known."""
        self.requests += 1
        asked = tuple([pair for pair in headers if pair[0] in TELLING])
        if asked in self._known:
            why = self._known[asked]
        else:
            why = self.objection(Headers(raw=headers))
            self._remember(asked, why)
        if why is None:
            return None
        self.refused += 1
        return failure(ForeignRequest(why))

    def _remember(self, asked: Asked, why: str | None) -> None:
        if sum(len(value) for _, value in asked) > KNOWN_BYTES_MAX:
            return
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._known[asked] = why

    def objection(self, headers: Headers) -> str | None:
        """Why a request is refused, or None."""
        # A request without `Host` (HTTP/1.0, some probes) is no browser's: those always send it.
        host = headers.get("host")
        if host is not None and not self._is_listed(_host_name(host)):
            return (
                f"the host {host!r} is not a name of this broker; "
                "call it by its address, or add the name to the setting allowed_hosts"
            )
        if headers.get("sec-fetch-site") == "cross-site":
            return "web pages from elsewhere may not use this broker"
        origin = headers.get("origin")
        if origin is not None and not _same_place(origin, host):
            return f"web pages of {origin!r} may not use this broker"
        return None

    def _is_listed(self, name: str | None) -> bool:
        if self._any_host:
            return True
        if name is None:
            return False
        if name in self._names or name == "localhost" or name.endswith(self._suffixes):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def guard_metrics(guards: Iterable[Guard]) -> Iterator[Metric]:
    """For the metrics page; one label value a listener."""
    guards = list(guards)
    yield counters(
        "http_requests",
        "Requests that arrived.",
        ("listener",),
        {(guard.listener,): guard.requests for guard in guards},
    )
    yield counters(
        "http_requests_refused",
        "Requests of web pages from elsewhere, refused.",
        ("listener",),
        {(guard.listener,): guard.refused for guard in guards},
    )


def _host_name(host: str) -> str | None:
    """The name in a Host header, without its port; None when it is no host at all."""
    try:
        name = urlsplit("//" + host).hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def _same_place(origin: str, host: str | None) -> bool:
    if host is None:
        return False
    try:
        theirs = urlsplit(origin)
        port = theirs.port or DEFAULT_PORTS.get(theirs.scheme)
        ours = urlsplit("//" + host)
        # A proxy that ends TLS passes `Host` on without a port; then the origin's own is meant.
        our_port = ours.port or DEFAULT_PORTS.get(theirs.scheme)
    except ValueError:
        return False
    return bool(theirs.hostname) and theirs.hostname == ours.hostname and port == our_port
