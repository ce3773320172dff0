"""A listener inside a test, and a WebSocket client that reads only when it is told."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import uvloop

from millstream.broker.queues import QueueLimits, Queues
from millstream.broker.timers import Timers
from millstream.clock import SystemClock
from millstream.kinds import Address
from millstream.listeners.http.guard import Guard
from millstream.listeners.http.listener import HttpListener
from millstream.listeners.http.queue_lane import BodyLimits, QueueLane
from millstream.listeners.http.websocket import SocketTimes
from millstream.process import bind
from millstream.wire.frames import (
    BINARY,
    CLOSE,
    TEXT,
    Closing,
    FrameReader,
    accept_key,
    encode_masked,
    read_close,
)

PATIENCE_SECONDS = 60.0
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
MIB = 1024 * 1024

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(asyncio.wait_for(scenario, 2 * PATIENCE_SECONDS))


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for {what}"
        await asyncio.sleep(0.005)


async def nobody(*_: object) -> None:
    raise AssertionError("not called")


class House:
    """Queues behind a listener on a free port."""

    def __init__(
        self, times: SocketTimes | None = None, tls: ssl.SSLContext | None = None, **limits: int
    ) -> None:
        self.queues = Queues(QueueLimits(**limits), lambda: time.time_ns() // 1000)
        self._times = times
        self._tls = tls

    async def __aenter__(self) -> Self:
        clock = SystemClock()
        self.timers = Timers(clock, asyncio.get_running_loop().call_later)
        guard = Guard(nobody, listener="http", hosts=())
        limits = BodyLimits(self.queues.limits.message_bytes_max, MIB)
        self.lane = QueueLane(self.queues, self.timers, guard, limits, socket_times=self._times)
        taken = bind("http", Address("127.0.0.1", 0))
        self.port: int = taken.getsockname()[1]
        self.listener = HttpListener(
            guard, taken, name="http", address="test", lane=self.lane, tls=self._tls
        )
        await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lane.drain()
        await self.listener.stop(0.05)

    @property
    def connections(self) -> list[Any]:
        return self.listener.connections

    async def raw(self) -> Client:
        client = Client(self.port)
        await client.connect()
        return client

    async def open(self, path: str, **headers: str) -> Client:
        client = await self.raw()
        await client.send(client.request(path, **headers))
        await client.shake_hands()
        return client

    async def refusal(self, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
        client = await self.raw()
        await client.send(client.request(path, **headers))
        answer = await client.read_all()
        client.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), json.loads(body)

    def fill(self, name: str, bodies: list[bytes], *, is_json: bool = True) -> None:
        self.queues.enqueue_many(self.queues.get_or_create(name), bodies, is_json)

    def held(self, name: str) -> list[bytes]:
        return [message.body for message in self.queues.get(name).snapshot()]


class Client:
    def __init__(self, port: int) -> None:
        self.port = port
        self.socket = socket.socket()
        # Small, so that a client that does not read is felt soon.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        self.socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(64 * MIB, 64 * MIB, from_client=False)
        self._events: deque[tuple[int, bytes]] = deque()

    async def connect(self) -> None:
        await self._loop.sock_connect(self.socket, ("127.0.0.1", self.port))

    def request(self, path: str, **headers: str) -> bytes:
        lines = {
            "Host": f"127.0.0.1:{self.port}",
            "Upgrade": "websocket",
            "Connection": "keep-alive, Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": KEY.decode(),
        } | {name.replace("_", "-"): value for name, value in headers.items()}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value)
        return f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()

    async def shake_hands(self) -> None:
        answer = await self.read_until(b"\r\n\r\n")
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), answer
        assert accept_key(KEY) in head
        self._events.extend(self._reader.feed(rest))

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self.socket, data)

    async def send_text(self, *texts: bytes) -> None:
        await self.send(b"".join(encode_masked(TEXT, text, os.urandom(4)) for text in texts))

    async def send_json(self, *payloads: object) -> None:
        await self.send_text(*(json.dumps({"payload": one}).encode() for one in payloads))

    async def send_binary(self, body: bytes) -> None:
        await self.send(encode_masked(BINARY, body, os.urandom(4)))

    async def send_close(self, payload: bytes = b"\x03\xe8") -> None:
        await self.send(encode_masked(CLOSE, payload, os.urandom(4)))

    @property
    def has_events(self) -> bool:
        """Whether frames were received that nobody has looked at."""
        return bool(self._events)

    async def event(self) -> tuple[int, bytes]:
        while not self._events:
            data = await self._receive()
            assert data, "the connection ended"
            self._events.extend(self._reader.feed(data))
            assert self._reader.error is None
        return self._events.popleft()

    async def json(self) -> dict[str, Any]:
        opcode, payload = await self.event()
        assert opcode == TEXT, (opcode, payload)
        answer = json.loads(payload)
        assert isinstance(answer, dict)
        return answer

    async def messages_until_the_end(self) -> tuple[list[bytes], Closing | None]:
        """Payloads up to a close frame, or to where the connection breaks off."""
        found: list[bytes] = []
        while True:
            try:
                opcode, payload = await self.event()
            except (AssertionError, OSError):
                return found, None
            if opcode == CLOSE:
                return found, read_close(payload)
            found.append(payload)

    async def closing(self) -> Closing:
        _, closing = await self.messages_until_the_end()
        assert closing is not None
        return closing

    async def read_all(self) -> bytes:
        answer = b""
        while data := await self._receive():
            answer += data
        return answer

    async def read_until(self, mark: bytes, count: int = 1) -> bytes:
        answer = b""
        while answer.count(mark) < count:
            data = await self._receive()
            assert data, answer
            answer += data
        return answer

    async def _receive(self) -> bytes:
        return await self._loop.sock_recv(self.socket, 65536)

    def close(self) -> None:
        self.socket.close()

    def kill(self) -> None:
        """As when the process dies with bytes unread: a reset, not an orderly end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()
