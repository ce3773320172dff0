"""Queues over ASGI: every route of theirs, for the OpenAPI page and for what is not hot.

The hot ones (enqueue, dequeue) are answered in the fast lane before they get here; the code that
answers them is the same (`queue_answers.py`), and they come here when the lane passes them on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from millstream.broker.queues import DEFAULT_QUEUE
from millstream.errors import BodyInvalid
from millstream.listeners.http.answer import RAW, Answer
from millstream.listeners.http.answers import json_answer
from millstream.listeners.http.queue_answers import (
    BATCH_FORM,
    COUNT_MAX,
    MESSAGE_FORM,
    TIMEOUT_S_MAX,
    dequeue_parameters,
    dequeued,
    enqueue_batch,
    enqueue_json,
    enqueue_raw,
)
from millstream.listeners.http.queue_lane import Patience

if TYPE_CHECKING:
    from millstream.broker.queues import Message, Queue, QueueFacts, Queues
    from millstream.broker.snapshots import Done, Snapshots
    from millstream.broker.timers import Timers


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /queues/{name}`: what is left out stays as it is."""

    capacity: int | None = None
    max_bytes: int | None = None


_limits = msgspec.json.Decoder(Limits)


def queue_routes(queues: Queues, timers: Timers, snapshots: Snapshots) -> APIRouter:
    routes = APIRouter(tags=["queues"])
    _add_messages(routes, queues, timers)
    _add_management(routes, queues)
    _add_snapshots(routes, snapshots)
    return routes


def _add_messages(routes: APIRouter, queues: Queues, timers: Timers) -> None:
    @routes.post("/enqueue", summary="Append raw bytes to the queue `default`", **_doc(RAW_IN, 202))
    async def enqueue_default(request: Request) -> Response:
        return _respond(enqueue_raw(queues, DEFAULT_QUEUE, await request.body()))

    @routes.get(
        "/dequeue",
        summary="Take the oldest message of the queue `default`, raw",
        **_doc(WAIT, 200, 204),
    )
    async def dequeue_default(request: Request) -> Response:
        return await _take(request, queues, timers, DEFAULT_QUEUE, is_raw=True)

    @routes.post(
        "/queues/{name}/enqueue",
        summary="Append one message; as a WebSocket, many",
        **_doc(JSON_IN, 200),
    )
    async def enqueue(name: str, request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-type", "").startswith(RAW.decode()):
            return _respond(enqueue_raw(queues, name, body))
        return _respond(enqueue_json(queues, name, body))

    @routes.post(
        "/queues/{name}/enqueue/batch",
        summary="Append many messages, or none",
        **_doc(BATCH_IN, 200),
    )
    async def enqueue_many(name: str, request: Request) -> Response:
        return _respond(enqueue_batch(queues, name, await request.body()))

    @routes.get(
        "/queues/{name}/dequeue",
        summary="Take the oldest messages; as a WebSocket, a stream of them",
        **_doc(WAIT, 200, 204, 404),
    )
    async def dequeue(name: str, request: Request) -> Response:
        is_raw = request.headers.get("accept", "").startswith(RAW.decode())
        return await _take(request, queues, timers, name, is_raw=is_raw)


def _add_management(routes: APIRouter, queues: Queues) -> None:
    @routes.get("/queues", summary="All queues", **_doc({}, 200))
    async def list_queues() -> Response:
        return json_answer({"queues": [_page(queue.facts()) for queue in queues]})

    @routes.get("/queues/{name}", summary="One queue", **_doc({}, 200, 404))
    async def show(name: str) -> Response:
        return json_answer(_page(queues.get(name).facts()))

    @routes.put(
        "/queues/{name}", summary="Make a queue, or change its limits", **_doc(LIMITS_IN, 200)
    )
    async def configure(name: str, request: Request) -> Response:
        limits = _read_limits(await request.body())
        return json_answer(_page(queues.configure(name, limits.capacity, limits.max_bytes).facts()))

    @routes.delete(
        "/queues/{name}", summary="Remove a queue and its messages", **_doc({}, 204, 404)
    )
    async def delete(name: str) -> Response:
        queues.delete(name)
        return Response(status_code=204)

    @routes.post("/queues/{name}/clear", summary="Drop a queue's messages", **_doc({}, 200, 404))
    async def clear(name: str) -> Response:
        return json_answer({"cleared": queues.clear(queues.get(name)), "queue_name": name})

    @routes.post("/clear", summary="Drop the messages of the queue `default`", **_doc({}, 200))
    async def clear_default() -> Response:
        return json_answer({"cleared": queues.clear(queues.get_or_create(DEFAULT_QUEUE))})


def _add_snapshots(routes: APIRouter, snapshots: Snapshots) -> None:
    @routes.post(
        "/queues/{name}/persist", summary="Write a queue to a file", **_doc(FILE, 200, 404, 500)
    )
    async def persist(name: str, request: Request) -> Response:
        return _done(await snapshots.persist(name, _file_of(request)))

    @routes.post(
        "/queues/{name}/load",
        summary="Replace a queue's messages by those of a file",
        **_doc(FILE, 200, 404, 500),
    )
    async def load(name: str, request: Request) -> Response:
        return _done(await snapshots.load(name, _file_of(request)))

    @routes.post(
        "/persist", summary="Write the queue `default` to a file", **_doc(FILE, 200, 404, 500)
    )
    async def persist_default(request: Request) -> Response:
        return _done(await snapshots.persist(DEFAULT_QUEUE, _file_of(request)))

    @routes.post(
        "/load",
        summary="Replace the messages of the queue `default` by those of a file",
        **_doc(FILE, 200, 404, 500),
    )
    async def load_default(request: Request) -> Response:
        return _done(await snapshots.load(DEFAULT_QUEUE, _file_of(request)))


def _file_of(request: Request) -> str | None:
    return request.query_params.get("file")


def _done(done: Done) -> Response:
    return json_answer(done._asdict())


async def _take(
    request: Request, queues: Queues, timers: Timers, name: str, *, is_raw: bool
) -> Response:
    parameters = dequeue_parameters(request.scope["query_string"])
    queue = queues.get(name)
    count = 1 if is_raw else parameters.count
    messages = queues.dequeue(queue, count)
    if not messages and parameters.timeout_s:
        messages = await _wait(queues, timers, queue, count, parameters.timeout_s)
    return _respond(dequeued(queue, messages, is_batch=parameters.is_batch, is_raw=is_raw))


async def _wait(
    queues: Queues, timers: Timers, queue: Queue, count: int, seconds: float
) -> list[Message]:
    found: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()

    def take(messages: list[Message]) -> None:
        if found.cancelled():
            queues.put_back(queue, messages)
        else:
            found.set_result(messages)

    patience = Patience(queues, timers, queue, count, take)
    patience.wait(seconds)
    try:
        return await found
    except asyncio.CancelledError:
        patience.give_up()
        raise


def _page(facts: QueueFacts) -> dict[str, object]:
    page = facts._asdict()
    page["max_bytes"] = page.pop("bytes_max")
    page["utilization"] = round(facts.size / facts.capacity, 5) if facts.capacity else 1.0
    return page


def _read_limits(body: bytes) -> Limits:
    try:
        limits = _limits.decode(body) if body else Limits()
    except msgspec.MsgspecError as error:
        raise BodyInvalid(f"the body must be JSON with capacity and max_bytes: {error}") from error
    for name, number in (("capacity", limits.capacity), ("max_bytes", limits.max_bytes)):
        if number is not None and not 1 <= number <= 2**53:
            raise BodyInvalid(f"{name} is {number}; it must be at least 1", parameter=name)
    return limits


def _respond(answer: Answer) -> Response:
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    if answer.status == 204:
        return Response(status_code=204, headers=headers)
    return Response(answer.body, answer.status, headers=headers, media_type=answer.media.decode())


# ---- what the OpenAPI page says


def _body(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {media: {"schema": schema}}}}


RAW_IN = _body("application/octet-stream", {"type": "string", "format": "binary"})
JSON_IN = _body("application/json", MESSAGE_FORM)
BATCH_IN = _body("application/json", BATCH_FORM)
LIMITS_IN = _body(
    "application/json",
    {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "capacity": {"type": "integer", "minimum": 1, "maximum": 2**53},
            "max_bytes": {"type": "integer", "minimum": 1, "maximum": 2**53},
        },
    },
)
WAIT = {
    "parameters": [
        {
            "name": "timeout",
            "in": "query",
            "description": "Seconds to wait for a message.",
            "schema": {"type": "number", "minimum": 0, "maximum": TIMEOUT_S_MAX},
        },
        {
            "name": "max",
            "in": "query",
            "description": "Take up to so many; the answer is then a list, `messages`.",
            "schema": {"type": "integer", "minimum": 1, "maximum": COUNT_MAX},
        },
    ]
}
FILE = {
    "parameters": [
        {
            "name": "file",
            "in": "query",
            "description": "A plain name in the snapshot folder; by default `<name>.snapshot`. "
            "A name that ends with `.json` is JSON, any other binary.",
            "schema": {"type": "string", "minLength": 1, "maxLength": 251},
        }
    ]
}
_MEANINGS = {
    200: "Done.",
    202: "Taken.",
    204: "Nothing there.",
    400: "The request is wrong; `error` says how.",
    404: "There is no such queue, or no such file.",
    413: "Too large.",
    500: "The disk failed; `message` says how.",
    429: "No room; try again after `Retry-After` seconds.",
}


def _doc(extra: dict[str, Any], *statuses: int) -> dict[str, Any]:
    """What a route answers, in the form that FastAPI takes."""
    responses = {
        status: {"description": _MEANINGS[status]} for status in (*statuses, 400, 413, 429)
    }
    return {"response_model": None, "openapi_extra": extra, "responses": responses}
