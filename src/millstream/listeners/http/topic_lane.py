"""The hot routes of `/v1` in the fast lane: found by their path, answered by the same handlers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from starlette.datastructures import Headers as NamedHeaders

from millstream.engine.pending import Pending
from millstream.errors import BodyTooLarge, MillstreamError
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.answers import failure
from millstream.listeners.http.hot import INTERNAL
from millstream.listeners.http.later import Later
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from millstream.listeners.http.answer import Dated
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.heads import Headers
    from millstream.listeners.http.heads import Later as QuickLater
    from millstream.listeners.http.hot import HotRequest, HotRoute
    from millstream.listeners.http.route import Handler, QuickMaker, Route

log = get_logger("http")

PREFIX = b"/v1/"


class TopicLane:
    """Knows a route by the words of its path: `/v1/messages/ack` has no name in it,
    `/v1/topics/{…}/messages` has one, and `/v1/topics/{…}/partitions/{…}/batches` two."""

    __slots__ = ("_none", "_one", "_two", "body_bytes_max")

    def __init__(self, routes: Iterable[Route], body_bytes_max: int, guard: Guard) -> None:
        self.body_bytes_max = body_bytes_max
        self._none: dict[tuple[bytes, bytes, bytes], Served] = {}
        self._one: dict[tuple[bytes, bytes, bytes], Served] = {}
        self._two: dict[tuple[bytes, bytes, bytes, bytes], Handler] = {}
        for route in routes:
            for path in route.paths if route.is_hot else ():
                words = path.encode().split(b"/")
                method = route.method.encode()
                quick = None if route.quick is None else Allowed(route.quick, guard)
                if len(words) == 4:
                    nameless = _nameless(route.handler)
                    self._none[method, words[2], words[3]] = Served(nameless, quick=quick)
                elif len(words) == 5:
                    self._one[method, words[2], words[4]] = Served(route.handler, quick=quick)
                else:
                    self._two[method, words[2], words[4], words[6]] = route.handler

    def find(self, method: bytes, path: bytes) -> tuple[HotRoute, str] | None:
        words = path.split(b"/")
        if len(words) == 5:
            route = self._one.get((method, words[2], words[4]))
            return None if route is None else (route, _name(words[3]))
        if len(words) == 4:
            route = self._none.get((method, words[2], words[3]))
            return None if route is None else (route, "")
        if len(words) == 7:
            handler = self._two.get((method, words[2], words[4], words[6]))
            if handler is not None:
                return Served(handler, _name(words[5])), _name(words[3])
        return None

    def too_large(self) -> Answer:
        limit = self.body_bytes_max
        return failure(
            BodyTooLarge(
                f"the body is larger than {limit} bytes; send less at a time, or raise "
                "body_bytes_max",
                limit_bytes=limit,
            )
        )


def _nameless(handler: Handler) -> Handler:
    """As if its path had a name, as a request has."""
    return lambda call, _: handler(call)


def _name(word: bytes) -> str:
    """Names are ASCII; what else comes is refused by whoever looks at it."""
    if b"%" in word or not word.isascii():
        return unquote_to_bytes(word).decode(errors="replace")
    return word.decode()


class Allowed:
    """A shorter way, for heads that nothing is to be said against."""

    __slots__ = ("_guard", "_make")

    def __init__(self, make: QuickMaker, guard: Guard) -> None:
        self._make = make
        self._guard = guard

    def __call__(self, name: str, query: bytes, headers: Headers) -> QuickLater | None:
        if self._guard.objection(NamedHeaders(raw=headers)) is not None:
            return None
        return self._make(name, query, headers, self._guard)


class Served:
    """A hot route: a handler, and the second name in the path where there is one."""

    __slots__ = ("_handler", "_more", "_quick")

    def __init__(self, handler: Handler, *more: str, quick: Allowed | None = None) -> None:
        self._handler = handler
        self._more = more
        self._quick = quick

    def quick(self, name: str, query: bytes, headers: Headers, dated: Dated) -> QuickLater | None:
        """Such a head need not be parsed again, whether or not there is a shorter way."""
        del dated
        return None if self._quick is None else self._quick(name, query, headers)

    def __call__(self, request: HotRequest) -> Answer | None:
        try:
            answer = self._handler(request, request.name, *self._more)
        except MillstreamError as error:
            return failure(error)
        except Exception as error:  # noqa: BLE001  one request must not end the connection's others
            return _broken(error)
        if isinstance(answer, Answer):
            return answer
        pending, make = answer if isinstance(answer, Later) else (answer, None)
        if pending.is_done:
            return _outcome(pending, make)
        pending.then(lambda done: request.reply(_outcome(done, make)))
        return None


def _outcome(done: Pending[Any], make: Callable[[Any], Answer] | None) -> Answer:
    try:
        result = done.result()
        answer: Answer = result if make is None else make(result)
    except MillstreamError as error:
        return failure(error)
    except Exception as error:  # noqa: BLE001
        return _broken(error)
    return answer


def _broken(error: BaseException) -> Answer:
    log.error("request failed", exc_info=error)
    return INTERNAL
