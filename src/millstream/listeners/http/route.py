"""A route: what answers it, and the one description that OpenAPI and docs/http.md come from.

A handler is a plain function of a call and of the names in its path. It answers at once, or later
by a `Pending` or a `Later`; so the fast lane and ASGI can both serve it, and no route needs a task.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from millstream import errors
from millstream.engine.pending import Pending
from millstream.errors import MillstreamError
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.answers import status_of_kind
from millstream.listeners.http.later import Later

if TYPE_CHECKING:
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.heads import Headers
    from millstream.listeners.http.heads import Later as QuickLater
    from millstream.listeners.http.read_streams import Stream

Schema: TypeAlias = dict[str, Any]
JSON_MEDIA = "application/json"
RAW_MEDIA = "application/octet-stream"


class Call(Protocol):
    """A request, whoever read it: `lane.HotRequest` or `v1_asgi.ColdCall`."""

    @property
    def query(self) -> bytes: ...

    @property
    def body(self) -> bytes: ...

    @property
    def headers(self) -> Sequence[tuple[bytes, bytes]]: ...

    # Called when the client goes away before its answer.
    on_lost: Callable[[], None] | None

    def header(self, name: bytes) -> bytes: ...

    @property
    def is_lost(self) -> bool:
        """Whether the client went away, as far as the system knows."""
        ...


Handler: TypeAlias = Callable[..., Answer | Pending[Answer] | Later]


class Parameter(NamedTuple):
    name: str
    schema: Schema
    what: str
    place: str = "query"
    is_needed: bool = False


class Body(NamedTuple):
    schema: Schema
    media: str = JSON_MEDIA


class Reply(NamedTuple):
    what: str
    # By media type; without one there is no body.
    content: Mapping[str, Schema] = {}
    headers: Mapping[str, str] = {}
    # What may be done next, by the id of the operation: parameters, as OpenAPI's expressions.
    links: Mapping[str, Mapping[str, str]] = {}


class Form(NamedTuple):
    summary: str
    replies: Mapping[int, Reply]
    parameters: tuple[Parameter, ...] = ()
    bodies: tuple[Body, ...] = ()
    # Beside those that every route has.
    errors: tuple[type[MillstreamError], ...] = ()
    more: str = ""


class Streamer(Protocol):
    def __call__(self, call: Call, *names: str) -> Awaitable[Stream | None]:
        """The stream that a client wants, or None when it wants a plain answer."""
        ...


class QuickMaker(Protocol):
    def __call__(
        self, name: str, query: bytes, headers: Headers, guard: Guard
    ) -> QuickLater | None: ...


class Route(NamedTuple):
    method: str
    # The spellings of it; the first is the one that examples use.
    paths: tuple[str, ...]
    handler: Handler
    form: Form
    tag: str
    # Whether the fast lane serves it.
    is_hot: bool = False
    # A shorter way for heads that are known.
    quick: QuickMaker | None = None
    stream: Streamer | None = None


# What the connection itself may answer, whatever the route, and what a bug is.
OF_THE_CONNECTION = (
    (400, "bad_request"),
    (408, "too_slow"),
    (413, "body_too_large"),
    (431, "head_too_large"),
    (500, "internal"),
)
# What every route may answer.
COMMON_ERRORS: tuple[type[MillstreamError], ...] = (
    errors.ParameterInvalid,
    errors.ForeignRequest,
    errors.StorageFailed,
    errors.EngineStopped,
    errors.OutcomeUnknown,
)
# Those with a body, beside them.
BODY_ERRORS: tuple[type[MillstreamError], ...] = (errors.BodyInvalid, errors.BodyTooLarge)

ERROR_SCHEMA: Schema = {
    "title": "Error",
    "type": "object",
    "required": ["error", "message"],
    "properties": {
        "error": {"type": "string", "description": "A stable code, for programs."},
        "message": {"type": "string", "description": "What happened and what to do."},
    },
}


def codes_of(form: Form) -> dict[int, list[str]]:
    """The codes of errors, by status."""
    kinds = (*form.errors, *(BODY_ERRORS if form.bodies else ()), *COMMON_ERRORS)
    pairs = [(status_of_kind(kind), kind.code) for kind in kinds] + list(OF_THE_CONNECTION)
    found: dict[int, list[str]] = {}
    for status, code in sorted(pairs, key=lambda pair: pair[0]):
        codes = found.setdefault(status, [])
        if code not in codes:
            codes.append(code)
    return found


def operation(form: Form) -> dict[str, Any]:
    """The form as OpenAPI writes it."""
    page: dict[str, Any] = {}
    if form.more:
        page["description"] = form.more
    if form.parameters:
        page["parameters"] = [
            {
                "name": one.name,
                "in": one.place,
                "required": one.is_needed or one.place == "path",
                "description": one.what,
                "schema": one.schema,
            }
            for one in form.parameters
        ]
    if form.bodies:
        page["requestBody"] = {
            "required": True,
            "content": {body.media: {"schema": body.schema} for body in form.bodies},
        }
    page["responses"] = _responses(form)
    return page


def _responses(form: Form) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, reply in form.replies.items():
        page: dict[str, Any] = {"description": reply.what}
        if reply.content:
            page["content"] = {media: {"schema": schema} for media, schema in reply.content.items()}
        if reply.headers:
            page["headers"] = {
                name: {"description": what, "schema": {"type": "string"}}
                for name, what in reply.headers.items()
            }
        if reply.links:
            page["links"] = {name: _link(name, given) for name, given in reply.links.items()}
        responses[str(status)] = page
    for status, codes in codes_of(form).items():
        if str(status) in responses:
            continue
        responses[str(status)] = {
            "description": ", ".join(f"`{code}`" for code in codes),
            "content": {JSON_MEDIA: {"schema": _error_schema(codes)}},
        }
    return responses


def _link(name: str, given: Mapping[str, str]) -> dict[str, Any]:
    """Parameters of the path or the query stand by themselves, those of the body begin with a
    slash."""
    body = {key[1:]: value for key, value in given.items() if key.startswith("/")}
    parameters = {key: value for key, value in given.items() if not key.startswith("/")}
    page: dict[str, Any] = {"operationId": name, "parameters": parameters}
    return page | ({"requestBody": body} if body else {})


def _error_schema(codes: list[str]) -> Schema:
    properties = ERROR_SCHEMA["properties"]
    return {
        **ERROR_SCHEMA,
        "properties": {**properties, "error": {**properties["error"], "enum": codes}},
    }
