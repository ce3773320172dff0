"""Heads that were seen before.

A client sends the same request line and headers again and again, byte for byte; only the body
differs. What such a head comes to (its route, its parameters, that it is allowed) is found out
once, and from then on a request that begins with it is answered without a parser.

Only heads that leave no question open are kept: HTTP/1.1, one `Host`, a plain body of a stated
length, a connection that goes on. The parser itself says where a head ends and what is in it, so
a head that is known means exactly what it would mean if it were parsed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, runtime_checkable

import httptools

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.listeners.http.answer import Answer, Dated
    from millstream.listeners.http.hot import HotRequest, HotRoutes, Slot

    Headers: TypeAlias = list[tuple[bytes, bytes]]
    # From a body to the whole response; None when it takes the route itself to answer, and
    # nothing has happened yet.
    Quick: TypeAlias = Callable[[bytes], bytes | None]

HEAD_END = b"\r\n\r\n"
# A longer head is no program's that is in a hurry.
KNOWN_BYTES_MAX = 1024
# How many are kept; then all are forgotten, which costs a busy client two requests.
KNOWN_MAX = 1024
# Headers that change how a request is read.
UNUSUAL = frozenset((b"connection", b"expect", b"transfer-encoding", b"upgrade"))


class Later(NamedTuple):
    """For a route whose answer is not there at once: from a body to a place in line. It may be
    called for a request while earlier ones of such routes wait."""

    begin: Callable[[bytes], Slot | None]


@runtime_checkable
class QuickRoute(Protocol):
    """A hot route that is the same for all requests with one head, and knows a shorter way."""

    def __call__(self, request: HotRequest) -> Answer | None: ...

    def quick(
        self, name: str, query: bytes, headers: Headers, dated: Dated
    ) -> Quick | Later | None:
        """None when there is none: also when such a request is refused, whatever its body."""
        ...


class Known:
    """A head, and what answers a request that begins with it. `size` is that of the request."""

    __slots__ = ("answer", "begin", "body_at", "head", "headers", "name", "query", "route", "size")

    def __init__(
        self,
        probe: _Probe,
        route: QuickRoute,
        name: str,
        query: bytes,
        answer: Quick | Later | None,
    ) -> None:
        self.head = probe.head
        self.body_at = len(probe.head)
        self.size = len(probe.head) + probe.length
        self.headers = probe.headers
        self.route = route
        self.name = name
        self.query = query
        self.begin = answer.begin if isinstance(answer, Later) else None
        self.answer: Quick = _by_the_route
        if answer is not None and not isinstance(answer, Later):
            self.answer = answer


def _by_the_route(_: bytes) -> None:
    return None


def without_upgrade(parser: httptools.HttpRequestParser, url: bytes, headers: Headers) -> bytes:
    """A head without the wish for another protocol."""
    version = parser.get_http_version().encode()
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), url, version)]
    lines += [name + b": " + value for name, value in headers if name != b"upgrade"]
    return b"\r\n".join(lines) + HEAD_END


class Heads:
    """Those of one listener: its connections share them."""

    __slots__ = ("_dated", "_known", "_routes", "_seen")

    def __init__(self, routes: HotRoutes, dated: Dated) -> None:
        self._routes = routes
        self._dated = dated
        self._known: dict[bytes, Known | None] = {}
        # Once; a head that never comes again is not worth looking into.
        self._seen: set[bytes] = set()

    def find(self, head: bytes) -> Known | None:
        known = self._known.get(head)
        if known is not None or head in self._known:
            return known
        if head not in self._seen:
            if len(self._seen) >= KNOWN_MAX:
                self._seen.clear()
            self._seen.add(head)
            return None
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        self._seen.discard(head)
        known = self._known[head] = self._learn(head)
        return known

    def _learn(self, head: bytes) -> Known | None:
        probe = _Probe(head)
        if not probe.is_whole() or not probe.is_usual:
            return None
        path, _, query = probe.url.partition(b"?")
        routes = self._routes
        found = routes.find(probe.method, path)
        if found is None or probe.length > routes.body_bytes_max(path):
            return None
        route, name = found
        if not isinstance(route, QuickRoute):
            return None
        answer = route.quick(name, query, probe.headers, self._dated)
        return Known(probe, route, name, query, answer)


class _Probe:
    """Reads one head, with the parser that reads all others."""

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.url = b""
        self.method = b""
        self.headers: Headers = []
        self.is_usual = False
        self.length = 0
        self._is_done = False
        self._parser = httptools.HttpRequestParser(self)

    def is_whole(self) -> bool:
        """Whether it is a head and nothing but a head: it ends with its last byte."""
        head = self.head
        if not head[:1].isalpha():
            return False
        try:
            self._parser.feed_data(head[:-1])
            is_early = self._is_done
            self._parser.feed_data(head[-1:])
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            return False
        return self._is_done and not is_early

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_done = True
        parser = self._parser
        self.method = parser.get_method()
        names = [name for name, _ in self.headers]
        lengths = [value for name, value in self.headers if name == b"content-length"]
        self.length = int(lengths[0]) if lengths else 0
        self.is_usual = (
            parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and names.count(b"host") == 1
            # Many clients say that the connection goes on, which it does anyway.
            and all(
                name not in UNUSUAL or (name, value.lower()) == (b"connection", b"keep-alive")
                for name, value in self.headers
            )
        )
