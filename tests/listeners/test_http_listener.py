"""The end of a listener: requests may finish, but not for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from broker.making import loop_broker
from millstream.clock import ManualClock
from millstream.kinds import Address
from millstream.listeners.http.app import http_app
from millstream.listeners.http.listener import HttpListener
from millstream.listeners.http.v1 import V1, Bounds
from millstream.observe.metrics import Metrics
from millstream.observe.status import Status
from millstream.process import bind

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Waiting:
    """An application that answers when it is told to."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrived.set()
        await self.answer.wait()
        await PlainTextResponse("done")(scope, receive, send)


def bound() -> socket.socket:
    return bind("http", Address("127.0.0.1", 0))


async def started(app: Waiting, taken: socket.socket) -> HttpListener:
    listener = HttpListener(app, taken, name="http", address="test")
    await listener.start()
    return listener


def test_a_request_in_flight_is_answered_before_the_end() -> None:
    async def scenario() -> bytes:
        app, taken = Waiting(), bound()
        listener = await started(app, taken)
        reader, writer = await asyncio.open_connection(*taken.getsockname())
        writer.write(REQUEST)
        await app.arrived.wait()
        stopping = asyncio.create_task(listener.stop(30))
        app.answer.set()
        await stopping
        answer = await reader.read()
        writer.close()
        return answer

    answer = asyncio.run(scenario())
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert answer.endswith(b"done")


def test_a_request_that_does_not_end_is_cut_off_within_the_bound() -> None:
    async def scenario() -> float:
        app, taken = Waiting(), bound()
        listener = await started(app, taken)
        reader, writer = await asyncio.open_connection(*taken.getsockname())
        writer.write(REQUEST)
        await app.arrived.wait()
        begin = time.monotonic()
        await listener.stop(0.2)
        took = time.monotonic() - begin
        with contextlib.suppress(ConnectionResetError):
            assert b"done" not in await reader.read()
        writer.close()
        return took

    assert asyncio.run(scenario()) < 5


def test_a_listener_that_never_started_gives_its_address_back() -> None:
    async def scenario() -> None:
        taken = bound()
        listener = HttpListener(Waiting(), taken, name="http", address="test")
        await listener.stop(0)
        assert taken.fileno() == -1

    asyncio.run(scenario())


def test_a_bug_is_answered_without_its_details() -> None:
    async def scenario() -> tuple[int, dict[str, str]]:
        import httpx

        status, broker = Status(node_id=1, clock=ManualClock()), loop_broker()
        app = http_app(status, Metrics(), broker, V1(broker, status, Bounds()))

        @app.get("/bug")
        async def bug() -> None:
            raise RuntimeError("a secret")

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.get("/bug")
        return answer.status_code, answer.json()

    status, body = asyncio.run(scenario())
    assert (status, body["error"]) == (500, "internal")
    assert "secret" not in body["message"]
