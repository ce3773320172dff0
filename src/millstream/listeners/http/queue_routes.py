"""Queues over ASGI: every route of theirs, for the OpenAPI page and for what is not hot.

The hot ones (enqueue, dequeue) are answered in the fast lane before they get here; the code that
answers them is the same (`queue_answers.py`), and they come here when the lane passes them on.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from millstream.broker.queues import DEFAULT_QUEUE
from millstream.errors import BodyInvalid
from millstream.listeners.http import queue_docs as docs
from millstream.listeners.http.answer import RAW
from millstream.listeners.http.answers import json_answer
from millstream.listeners.http.hot import IS_LOST
from millstream.listeners.http.queue_answers import (
    BODIES_BYTES_MAX,
    dequeue_parameters,
    dequeued,
    enqueue_batch,
    enqueue_json,
    enqueue_raw,
)
from millstream.listeners.http.queue_lane import Patience
from millstream.listeners.http.v1_asgi import disconnected, respond

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.queues import Message, Queue, QueueFacts, Queues
    from millstream.broker.snapshots import Done, Snapshots
    from millstream.broker.timers import Timers


# The largest whole number that every JSON reader gives back as it is.
LIMIT_MAX = 2**53


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `PUT /queues/{name}`: what is left out stays as it is. In JSON, 5.0 is a whole
    number like 5."""

    capacity: int | float | None = None
    max_bytes: int | float | None = None


_limits = msgspec.json.Decoder(Limits)


def queue_routes(queues: Queues, timers: Timers, snapshots: Snapshots) -> APIRouter:
    routes = APIRouter()
    _add_messages(routes, queues, timers)
    _add_management(routes, queues)
    _add_snapshots(routes, snapshots)
    return routes


def _add_messages(routes: APIRouter, queues: Queues, timers: Timers) -> None:
    @routes.post("/enqueue", **docs.ENQUEUE_DEFAULT)
    async def enqueue_default(request: Request) -> Response:
        return respond(enqueue_raw(queues, DEFAULT_QUEUE, await request.body()))

    @routes.get("/dequeue", **docs.DEQUEUE_DEFAULT)
    async def dequeue_default(request: Request) -> Response:
        queues.get_or_create(DEFAULT_QUEUE)
        return await _take(request, queues, timers, DEFAULT_QUEUE, is_raw=True)

    @routes.post("/queues/{name}/enqueue", **docs.ENQUEUE)
    async def enqueue(request: Request) -> Response:
        body = await request.body()
        if request.headers.get("content-type", "").startswith(RAW.decode()):
            return respond(enqueue_raw(queues, _name_of(request), body))
        return respond(enqueue_json(queues, _name_of(request), body))

    @routes.post("/queues/{name}/enqueue/batch", **docs.ENQUEUE_BATCH)
    async def enqueue_many(request: Request) -> Response:
        return respond(enqueue_batch(queues, _name_of(request), await request.body()))

    @routes.get("/queues/{name}/dequeue", **docs.DEQUEUE)
    async def dequeue(request: Request) -> Response:
        is_raw = request.headers.get("accept", "").startswith(RAW.decode())
        return await _take(request, queues, timers, _name_of(request), is_raw=is_raw)


def _add_management(routes: APIRouter, queues: Queues) -> None:
    @routes.get("/queues", **docs.LIST)
    async def list_queues() -> Response:
        return json_answer({"queues": [_page(queue.facts()) for queue in queues]})

    @routes.get("/queues/{name}", **docs.SHOW)
    async def show_queue(request: Request) -> Response:
        return json_answer(_page(queues.get(_name_of(request)).facts()))

    @routes.put("/queues/{name}", **docs.CONFIGURE)
    async def configure_queue(request: Request) -> Response:
        capacity, bytes_max = _read_limits(await request.body())
        queue = queues.configure(_name_of(request), capacity, bytes_max)
        return json_answer(_page(queue.facts()))

    @routes.delete("/queues/{name}", **docs.DELETE)
    async def delete_queue(request: Request) -> Response:
        queues.delete(_name_of(request))
        return Response(status_code=204)

    @routes.post("/queues/{name}/clear", **docs.CLEAR)
    async def clear(request: Request) -> Response:
        return _cleared(queues, queues.get(_name_of(request)))

    @routes.post("/clear", **docs.CLEAR_DEFAULT)
    async def clear_default() -> Response:
        return _cleared(queues, queues.get_or_create(DEFAULT_QUEUE))


def _add_snapshots(routes: APIRouter, snapshots: Snapshots) -> None:
    @routes.post("/queues/{name}/persist", **docs.PERSIST)
    async def persist(request: Request) -> Response:
        return _done(await snapshots.persist(_name_of(request), _file_of(request)))

    @routes.post("/queues/{name}/load", **docs.LOAD)
    async def load(request: Request) -> Response:
        return _done(await snapshots.load(_name_of(request), _file_of(request)))

    @routes.post("/persist", **docs.PERSIST_DEFAULT)
    async def persist_default(request: Request) -> Response:
        return _done(await snapshots.persist(DEFAULT_QUEUE, _file_of(request)))

    @routes.post("/load", **docs.LOAD_DEFAULT)
    async def load_default(request: Request) -> Response:
        return _done(await snapshots.load(DEFAULT_QUEUE, _file_of(request)))


def _name_of(request: Request) -> str:
    name: str = request.path_params["name"]
    return name


def _file_of(request: Request) -> str | None:
    return request.query_params.get("file")


def _cleared(queues: Queues, queue: Queue) -> Response:
    """What was dropped, in the words of a snapshot's answer."""
    size = queue.bytes
    messages = queues.clear(queue)
    return json_answer({"queue_name": queue.name, "messages": messages, "bytes": size})


def _done(done: Done) -> Response:
    return json_answer(done._asdict())


async def _take(
    request: Request, queues: Queues, timers: Timers, name: str, *, is_raw: bool
) -> Response:
    parameters = dequeue_parameters(request.scope["query_string"])
    queue = queues.get(name)
    count = 1 if is_raw else parameters.count
    messages = queues.dequeue(queue, queue.count_within(count, BODIES_BYTES_MAX))
    if not messages and parameters.timeout_s:
        seconds = parameters.timeout_s
        messages = await _wait(request, queues, timers, queue, count=count, seconds=seconds)
    return respond(dequeued(queue, messages, is_batch=parameters.is_batch, is_raw=is_raw))


async def _wait(
    request: Request, queues: Queues, timers: Timers, queue: Queue, *, count: int, seconds: float
) -> list[Message]:
    """What comes; ClientDisconnect when the client goes away, which then takes nothing along."""
    found: asyncio.Future[list[Message]] = asyncio.get_running_loop().create_future()
    is_lost: Callable[[], bool] = request.scope[IS_LOST]

    def take(messages: list[Message]) -> None:
        if found.done() or (messages and is_lost()):
            queues.put_back(queue, messages)
        else:
            found.set_result(messages)

    patience = Patience(queues, timers, queue, count, take)
    patience.wait(seconds)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait((found, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise ClientDisconnect
        return found.result()
    except BaseException:
        patience.give_up()
        if found.done():
            queues.put_back(queue, found.result())
        raise
    finally:
        gone.cancel()


def _page(facts: QueueFacts) -> dict[str, object]:
    page = facts._asdict()
    page["max_bytes"] = page.pop("bytes_max")
    page["utilization"] = round(facts.size / facts.capacity, 5) if facts.capacity else 1.0
    return page


def _read_limits(body: bytes) -> tuple[int | None, int | None]:
    """Capacity and bytes."""
    try:
        limits = _limits.decode(body) if body else Limits()
    except msgspec.MsgspecError as error:
        raise BodyInvalid(f"the body must be JSON with capacity and max_bytes: {error}") from error
    return _limit("capacity", limits.capacity), _limit("max_bytes", limits.max_bytes)


def _limit(name: str, number: float | None) -> int | None:
    if number is None:
        return None
    if not 1 <= number <= LIMIT_MAX or number != int(number):
        raise BodyInvalid(
            f"{name} is {number}; it must be a whole number from 1 to {LIMIT_MAX}", parameter=name
        )
    return int(number)
