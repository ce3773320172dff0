"""What the OpenAPI page says of the routes of queues, a table in the order of `queue_routes.py`."""

from __future__ import annotations

from typing import Any

from millstream.listeners.http.openapi import JSON, RAW, Reply, json_reply, operation, ref
from millstream.listeners.http.queue_answers import COUNT_MAX, TIMEOUT_S_MAX

BYTES = {"type": "string", "format": "binary"}

NAME = {
    "name": "name",
    "in": "path",
    "required": True,
    "description": "The queue: 1 to 255 of letters, digits, `.`, `_` and `-`, other than `.` and "
    "`..`.",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": 255,
        # Clients and proxies read `.` and `..` as places in a path, so neither is a name.
        "pattern": r"^([A-Za-z0-9._-]*[A-Za-z0-9_-][A-Za-z0-9._-]*|\.{3,})$",
    },
    "example": "emails",
}
TIMEOUT = {
    "name": "timeout",
    "in": "query",
    "description": "Seconds to wait for a message when there is none. By default 0.",
    "schema": {"type": "number", "minimum": 0, "maximum": TIMEOUT_S_MAX},
}
MAX = {
    "name": "max",
    "in": "query",
    "description": "Take up to so many; the answer is then a list, `messages`.",
    "schema": {"type": "integer", "minimum": 1, "maximum": COUNT_MAX},
}
FILE = {
    "name": "file",
    "in": "query",
    "description": "A plain name in the snapshot folder; by default `<name>.snapshot`. A name that "
    "ends with `.json` is JSON, any other binary.",
    "schema": {
        "type": "string",
        "minLength": 1,
        "maxLength": 251,
        "pattern": "^[A-Za-z0-9_-][A-Za-z0-9._-]*$",
        "not": {"pattern": r"\.(new|refused)$"},
    },
}

_EMPTY = Reply("Nothing was there.")
_MESSAGES = Reply(
    "The oldest message; a list of messages with `max`; the bytes alone with "
    "`Accept: application/octet-stream`.",
    {
        JSON: {"schema": {"anyOf": [ref("Dequeued"), ref("DequeuedBatch")]}},
        RAW: {"schema": BYTES},
    },
)
_QUEUE = json_reply("The queue.", "Queue")


def _body(content: dict[str, Any], *, required: bool = True) -> dict[str, Any]:
    return {"required": required, "content": content}


def _json(schema: str) -> dict[str, Any]:
    return {JSON: {"schema": ref(schema)}}


ENQUEUE_DEFAULT = operation(
    "Append raw bytes to the queue `default`",
    {202: Reply("Taken.")},
    tag="messages",
    errors=(429,),
    body=_body({RAW: {"schema": BYTES}}, required=False),
)
DEQUEUE_DEFAULT = operation(
    "Take the oldest message of the queue `default`, raw",
    {200: Reply("The message.", {RAW: {"schema": BYTES}}), 204: _EMPTY},
    tag="messages",
    errors=(429,),
    parameters=(TIMEOUT,),
)
ENQUEUE = operation(
    "Append one message",
    {
        200: json_reply("Taken.", "Queued"),
        202: Reply("Taken, when it was sent as `application/octet-stream`."),
    },
    tag="messages",
    errors=(429,),
    parameters=(NAME,),
    body=_body(_json("Message") | {RAW: {"schema": BYTES}}),
    description="Makes the queue when it is not there. As a WebSocket: a stream of messages in, "
    "with one confirmation each.",
)
ENQUEUE_BATCH = operation(
    "Append many messages, or none",
    {200: json_reply("All were taken.", "QueuedBatch")},
    tag="messages",
    errors=(429,),
    parameters=(NAME,),
    body=_body(_json("Batch")),
)
DEQUEUE = operation(
    "Take the oldest messages",
    {200: _MESSAGES, 204: _EMPTY},
    tag="messages",
    errors=(404,),
    parameters=(NAME, TIMEOUT, MAX),
    description="As a WebSocket: messages as they come, for as long as the client stays.",
)

LIST = operation("All queues", {200: json_reply("All of them.", "QueueList")}, tag="queues")
SHOW = operation("One queue", {200: _QUEUE}, tag="queues", errors=(404,), parameters=(NAME,))
CONFIGURE = operation(
    "Make a queue, or change its limits",
    {200: _QUEUE},
    tag="queues",
    errors=(429,),
    parameters=(NAME,),
    body=_body(_json("Limits"), required=False),
    description="What is left out stays as it is. A queue keeps what it holds, also when that is "
    "more than its new limits.",
)
DELETE = operation(
    "Remove a queue and its messages",
    {204: Reply("Gone.")},
    tag="queues",
    errors=(404,),
    parameters=(NAME,),
)
CLEAR = operation(
    "Drop a queue's messages",
    {200: json_reply("What was dropped.", "Cleared")},
    tag="queues",
    errors=(404,),
    parameters=(NAME,),
)
CLEAR_DEFAULT = operation(
    "Drop the messages of the queue `default`",
    {200: json_reply("What was dropped.", "Cleared")},
    tag="queues",
    errors=(429,),
)

_WRITTEN = {200: json_reply("What was written.", "Snapshot")}
_READ = {200: json_reply("What the queue holds now.", "Snapshot")}
_LOADING = "The file is checked whole; when it is damaged or does not fit, nothing changes."

PERSIST = operation(
    "Write a queue to a file",
    _WRITTEN,
    tag="snapshots",
    errors=(404,),
    parameters=(NAME, FILE),
)
LOAD = operation(
    "Replace a queue's messages by those of a file",
    _READ,
    tag="snapshots",
    errors=(404, 429),
    parameters=(NAME, FILE),
    description=_LOADING,
)
PERSIST_DEFAULT = operation(
    "Write the queue `default` to a file",
    _WRITTEN,
    tag="snapshots",
    errors=(404,),
    parameters=(FILE,),
)
LOAD_DEFAULT = operation(
    "Replace the messages of the queue `default` by those of a file",
    _READ,
    tag="snapshots",
    errors=(404, 429),
    parameters=(FILE,),
    description=_LOADING,
)
