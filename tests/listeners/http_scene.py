"""A listener inside a test, and an HTTP client that sends exactly the bytes it is given."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Self, TypeVar

import uvloop

from broker.making import loop_broker
from millstream.broker.queues import QueueLimits, Queues
from millstream.clock import SystemClock
from millstream.kinds import Address
from millstream.listeners.http.app import http_app
from millstream.listeners.http.guard import Guard
from millstream.listeners.http.lane import LaneProtocol
from millstream.listeners.http.listener import HttpListener
from millstream.listeners.http.queue_lane import BodyLimits, QueueLane
from millstream.listeners.http.v1 import V1, Bounds
from millstream.observe.metrics import Metrics
from millstream.observe.status import Status
from millstream.process import bind

PATIENCE_S = 60.0
MIB = 1024 * 1024

T = TypeVar("T")


def run(scenario: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(asyncio.wait_for(scenario, PATIENCE_S))


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        await asyncio.sleep(0.005)


class Scene:
    """Queues and all their routes behind a listener on a free port."""

    def __init__(
        self,
        *,
        connections_max: int = 10_000,
        lane_of: Callable[[QueueLane], QueueLane | None] = lambda lane: lane,
        **limits: int,
    ) -> None:
        self.queues = Queues(QueueLimits(**limits), lambda: time.time_ns() // 1000)
        self.queues.get_or_create("default")
        self._connections_max = connections_max
        self._lane_of = lane_of

    async def __aenter__(self) -> Self:
        broker = loop_broker(self.queues)
        self.timers = broker.timers
        status = Status(node_id=1, clock=SystemClock())
        app = http_app(status, Metrics(), broker, V1(broker, status, Bounds()))
        self.guard = Guard(app, listener="http", hosts=())
        limits = BodyLimits(self.queues.limits.message_bytes_max, MIB)
        self.lane = QueueLane(self.queues, self.timers, self.guard, limits)
        taken = bind("http", Address("127.0.0.1", 0))
        self.port: int = taken.getsockname()[1]
        self.listener = HttpListener(
            self.guard,
            taken,
            name="http",
            address="test",
            lane=self._lane_of(self.lane),
            connections_max=self._connections_max,
        )
        await self.listener.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.lane.drain()
        await self.listener.stop(0.05)

    @property
    def lanes(self) -> list[LaneProtocol]:
        return [one for one in self.listener.connections if isinstance(one, LaneProtocol)]

    async def connect(self) -> Client:
        client = Client()
        await client.connect(self.port)
        return client

    async def only_lane(self) -> LaneProtocol:
        await until(lambda: len(self.lanes) == 1, "the connection")
        return self.lanes[0]

    def fill(self, name: str, bodies: list[bytes], *, is_json: bool = False) -> None:
        self.queues.enqueue_many(self.queues.get_or_create(name), bodies, is_json)

    def held(self, name: str) -> list[bytes]:
        return [message.body for message in self.queues.get(name).snapshot()]


class Response(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.socket = socket.socket()
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Small, so that a client that does not read is felt soon.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 * 1024)
        self.socket.setblocking(False)
        self._data = b""

    async def connect(self, port: int) -> None:
        await self._loop.sock_connect(self.socket, ("127.0.0.1", port))

    async def send(self, *packets: bytes) -> None:
        for packet in packets:
            await self._loop.sock_sendall(self.socket, packet)

    async def answer(self) -> Response:
        """The next one; `100 Continue` counts as one."""
        while b"\r\n\r\n" not in self._data:
            assert await self._more(), f"the connection ended: {self._data!r}"
        head, _, self._data = self._data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        length = int(headers.get("content-length", "0"))
        while len(self._data) < length:
            assert await self._more(), "the connection ended inside a body"
        body, self._data = self._data[:length], self._data[length:]
        return Response(int(first.split(" ")[1]), headers, body)

    async def answers(self, count: int) -> list[Response]:
        return [await self.answer() for _ in range(count)]

    async def ask(self, request: bytes) -> Response:
        await self.send(request)
        return await self.answer()

    async def rest(self) -> bytes:
        """Everything up to the end of the connection."""
        try:
            while await self._more():
                pass
        except ConnectionResetError:
            pass
        return self._data

    async def _more(self) -> bool:
        data = await self._loop.sock_recv(self.socket, 65536)
        self._data += data
        return bool(data)

    def close(self) -> None:
        self.socket.close()

    def kill(self) -> None:
        """As when the process dies with bytes unread: a reset, not an orderly end."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


def get(path: str, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\n{lines}content-length: {len(body)}\r\n\r\n"
    return head.encode() + body
