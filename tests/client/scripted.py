"""A server on a real socket that answers as it is told, and a proxy that loses what it is told to.

The server is for what a broker does seldom: being busy, being slow, talking nonsense. The proxy
stands before a real broker, for answers that get lost on their way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

PATIENCE_SECONDS = 60.0
T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 2 * PATIENCE_SECONDS))


async def until(condition: Callable[[], object], what: str) -> None:
    """Wait for a condition, and fail with what was waited for."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110  conditions of all kinds
            await asyncio.sleep(0.005)
    assert condition(), what


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


# Bytes are sent as they are; None cuts the connection without a word.
Answer: TypeAlias = bytes | None
Handler: TypeAlias = Callable[[Request], Awaitable[Answer]]


def answer(status: int, body: bytes = b"{}", **headers: str) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n"
    head += "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
    return head.encode() + b"\r\n" + body


class ScriptedServer:
    """Answers each request by a function, or by a list of answers, one after the other."""

    def __init__(self, script: Handler | list[Answer]) -> None:
        self._script = script
        self.requests: list[Request] = []
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                request = await read_request(reader)
                self.requests.append(request)
                reply = await self._answer(request)
                if reply is None:
                    break
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(self, request: Request) -> Answer:
        if isinstance(self._script, list):
            return self._script.pop(0)
        return await self._script(request)


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *fields = head.rstrip("\r\n").split("\r\n")
    method, path, _ = line.split(" ")
    pairs = (field.split(": ", 1) for field in fields)
    headers = {name.lower(): text for name, text in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body)


class LossyProxy:
    """Passes bytes on, but for what a plan says of each request: 'request' loses the request,
    'answer' loses the answer after the broker gave it, 'half' cuts it in the middle."""

    def __init__(self, port: int, plan: Callable[[Request], str | None]) -> None:
        self._port = port
        self._plan = plan
        self.lost: list[str] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._pass_on(reader, writer):
                pass
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            writer.transport.abort()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await read_request(reader)
        loss = self._plan(request)
        if loss is not None:
            self.lost.append(loss)
        if loss == "request":
            return False
        reply = await self._ask_broker(request)
        if loss == "answer":
            return False
        if loss == "half":
            writer.write(reply[: len(reply) // 2])
            await writer.drain()
            return False
        writer.write(reply)
        await writer.drain()
        return True

    async def _ask_broker(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            head = f"{request.method} {request.path} HTTP/1.1\r\n" + "".join(
                f"{name}: {text}\r\n" for name, text in request.headers.items() if name != "host"
            )
            writer.write(
                f"{head}host: 127.0.0.1:{self._port}\r\nconnection: close\r\n\r\n".encode("latin-1")
                + request.body
            )
            reply = await reader.read()
        finally:
            writer.transport.abort()
        return reply.replace(b"connection: close\r\n", b"")
