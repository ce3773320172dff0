"""What the OpenAPI page says: the shapes of bodies and answers, and how a route names its own.

Routes read their requests themselves, so nothing here is derived from code; a test sends requests
made from this page and fails when the broker does anything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi.openapi.utils import get_openapi
from starlette.responses import Response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fastapi import FastAPI

JSON = "application/json"
RAW = "application/octet-stream"
TEXT = "text/plain"

# What any route may answer: the connection itself refuses what is no HTTP or too large, the guard
# refuses web pages from elsewhere, and a bug is a 500.
ALWAYS = (400, 403, 408, 413, 431, 500, 503)

_MEANINGS = {
    400: "The request is wrong; `error` says how.",
    403: "A web page from elsewhere asked, or the `Host` is not a name of this broker.",
    404: "There is no such queue, or no such file.",
    408: "The request took too long to arrive.",
    413: "The message, or the body, is too large.",
    429: "There is no room. `Retry-After` says how many seconds to wait.",
    431: "The headers are too large.",
    500: "The broker failed; `message` says how.",
    503: "Not now; `error` says why.",
}

DESCRIPTION = """\
Queues in memory: named, first in first out, bounded. A queue is made by its first message.
Topics on disk, under `/v1`: published to, read by offset or time, shared by the members of a group.

`/queues/{name}/enqueue` and `/queues/{name}/dequeue` are WebSockets too: many messages in, with a
confirmation each; and messages out, as they come. `/v1/topics/{topic}/stream` is one for topics.

Every error is JSON with `error`, a code that stays the same, `message`, and what else helps.
"""

TAGS = [
    {"name": "messages", "description": "Put messages in queues, take them out."},
    {"name": "queues", "description": "Look at queues, make them, change and remove them."},
    {"name": "snapshots", "description": "Write a queue to a file of the broker, and read it."},
    {"name": "topics", "description": "Look at topics, make them, change and remove them."},
    {"name": "topic messages", "description": "Publish to topics, and read them."},
    {"name": "schedules", "description": "Messages that are to appear in their topic later."},
    {"name": "sequential consumers", "description": "Read a topic in order, and go on there."},
    {"name": "groups", "description": "Share a topic among members, and remember how far it is."},
    {"name": "work queues", "description": "Receive from topics by lease, and settle."},
    {"name": "dead letters", "description": "Look at what failed for good, and put it back."},
    {"name": "staged writes", "description": "What many tasks write appears as a whole, once."},
    {"name": "admin", "description": "The broker as a whole."},
    {"name": "health", "description": "For whoever watches the broker."},
]


class Reply(NamedTuple):
    """An answer that is no error: what it means, and its forms by media type."""

    meaning: str
    content: dict[str, Any] | None = None


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def json_reply(meaning: str, schema: str) -> Reply:
    return Reply(meaning, {JSON: {"schema": ref(schema)}})


def operation(
    summary: str,
    replies: dict[int, Reply],
    *,
    tag: str,
    errors: Sequence[int] = (),
    parameters: Sequence[dict[str, Any]] = (),
    body: dict[str, Any] | None = None,
    description: str = "",
) -> dict[str, Any]:
    """The arguments of a route, in the form that FastAPI takes."""
    responses: dict[int, dict[str, Any]] = {}
    for status, reply in replies.items():
        responses[status] = {"description": reply.meaning}
        if reply.content is not None:
            responses[status]["content"] = reply.content
    for status in sorted({*errors, *ALWAYS} - set(replies)):
        responses[status] = _error(status)
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        extra["requestBody"] = body
    first = min(replies)
    return {
        "summary": summary,
        "description": description,
        "tags": [tag],
        "status_code": first,
        "response_class": Response,
        "response_model": None,
        "response_description": replies[first].meaning,
        "responses": responses,
        "openapi_extra": extra,
    }


def _error(status: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "description": _MEANINGS[status],
        "content": {JSON: {"schema": ref("Error")}},
    }
    if status == 429:
        found["headers"] = {
            "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "string"}}
        }
    return found


def describe(app: FastAPI) -> dict[str, Any]:
    """The whole page."""
    if app.openapi_schema is None:
        page = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=app.openapi_tags,
        )
        page.setdefault("components", {})["schemas"] = SCHEMAS
        app.openapi_schema = page
    return app.openapi_schema


def _object(required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_COUNT = {"type": "integer", "minimum": 0}
_LIMIT = {"type": "integer", "minimum": 1}
_TEXT = {"type": "string"}
_NAME = {"type": "string", "description": "The queue."}
_AT_US = {"type": "integer", "description": "When it was enqueued, in microseconds since 1970."}
_SIZE = {"type": "integer", "minimum": 0, "description": "How many messages are in the queue now."}
_ANYTHING = {"description": "Any JSON."}
_CAPACITY = {"type": "integer", "minimum": 1, "description": "How many messages it may hold."}
_BYTES_MAX = {"type": "integer", "minimum": 1, "description": "How many bytes it may hold."}
_MESSAGE: dict[str, dict[str, Any]] = {
    "payload": {"description": "What was enqueued. A text in base64 when `encoding` says so."},
    "encoding": {
        "type": "string",
        "enum": ["base64"],
        "description": "Given when the message was enqueued as bytes and not as JSON.",
    },
    "enqueued_at": _AT_US,
}
_QUEUE: dict[str, dict[str, Any]] = {
    "name": _NAME,
    "size": _SIZE,
    "bytes": {"type": "integer", "minimum": 0, "description": "Bytes of its messages."},
    "capacity": _CAPACITY,
    "max_bytes": _BYTES_MAX,
    "utilization": {"type": "number", "minimum": 0, "description": "`size` by `capacity`."},
    "enqueued_total": _COUNT,
    "dequeued_total": _COUNT,
    "full_total": {"type": "integer", "minimum": 0, "description": "Enqueues refused."},
    "timeout_total": {"type": "integer", "minimum": 0, "description": "Waits in vain."},
    "waiting": {"type": "integer", "minimum": 0, "description": "Consumers that wait."},
}
_HEALTH_QUEUE: dict[str, dict[str, Any]] = {
    "size": _COUNT,
    "capacity": _LIMIT,
    "utilization": {"type": "number"},
    "enqueued_total": _COUNT,
    "dequeued_total": _COUNT,
    "queue_full_count": _COUNT,
}
_HEALTH: dict[str, dict[str, Any]] = {
    "status": {"type": "string", "enum": ["healthy", "unhealthy"]},
    "phase": {"type": "string", "enum": ["starting", "ready", "draining"]},
    "version": _TEXT,
    "node_id": {"type": "integer"},
    "uptime_seconds": {"type": "number"},
    "total_queues": _COUNT,
    "queues_listed": _COUNT,
    "queues": {
        "type": "object",
        "additionalProperties": _object(list(_HEALTH_QUEUE), **_HEALTH_QUEUE),
    },
}
# Once there is an engine; nothing of it makes the broker unhealthy.
_HEALTH_NOTES: dict[str, dict[str, Any]] = {
    "dead_letters_paused": {
        "type": "array",
        "items": _TEXT,
        "description": "Groups whose circuit breaker is open.",
    },
}
_METRICS: dict[str, dict[str, Any]] = {
    "uptime_sec": {"type": "number"},
    "queue_length": _COUNT,
    "queue_bytes": _COUNT,
    "enqueue_count": _COUNT,
    "dequeue_count": _COUNT,
    "dequeue_misses": _COUNT,
    "threads": _COUNT,
    "open_files": {"type": ["integer", "null"]},
}

SCHEMAS: dict[str, Any] = {
    "Error": _object(
        ["error", "message"],
        error={"type": "string", "description": "A code that stays the same."},
        message={"type": "string", "description": "What happened, and what to do."},
    ),
    "Message": _object(["payload"], payload=_ANYTHING),
    "Batch": _object(["payloads"], payloads={"type": "array", "items": _ANYTHING}),
    "Queued": _object(
        ["queued", "queue_name", "queue_size", "enqueued_at"],
        queued={"type": "boolean", "enum": [True]},
        queue_name=_NAME,
        queue_size=_SIZE,
        enqueued_at=_AT_US,
    ),
    "QueuedBatch": _object(
        ["queued", "queue_name", "queue_size", "enqueued_at"],
        queued={"type": "integer", "minimum": 0, "description": "How many."},
        queue_name=_NAME,
        queue_size=_SIZE,
        enqueued_at=_AT_US,
    ),
    "Dequeued": _object(
        ["payload", "enqueued_at", "queue_name", "queue_size"],
        **_MESSAGE,
        queue_name=_NAME,
        queue_size=_SIZE,
    ),
    "DequeuedBatch": _object(
        ["messages", "queue_name", "queue_size"],
        messages={"type": "array", "items": _object(["payload", "enqueued_at"], **_MESSAGE)},
        queue_name=_NAME,
        queue_size=_SIZE,
    ),
    "Queue": _object(list(_QUEUE), **_QUEUE),
    "QueueList": _object(["queues"], queues={"type": "array", "items": ref("Queue")}),
    "Limits": {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "capacity": {**_CAPACITY, "type": ["integer", "null"], "maximum": 2**53},
            "max_bytes": {**_BYTES_MAX, "type": ["integer", "null"], "maximum": 2**53},
        },
    },
    "Cleared": _object(
        ["queue_name", "messages", "bytes"], queue_name=_NAME, messages=_COUNT, bytes=_COUNT
    ),
    "Snapshot": _object(
        ["file", "queue_name", "messages", "bytes", "file_bytes"],
        file={"type": "string", "description": "Its name in the snapshot folder."},
        queue_name=_NAME,
        messages=_COUNT,
        bytes={"type": "integer", "minimum": 0, "description": "Of the messages."},
        file_bytes={"type": "integer", "minimum": 0, "description": "Of the file."},
    ),
    "Health": _object(list(_HEALTH), **_HEALTH, **_HEALTH_NOTES),
    "Probe": _object(["status"], status={"type": "string", "enum": ["ok"]}),
    "Metrics": _object(list(_METRICS), **_METRICS),
}
