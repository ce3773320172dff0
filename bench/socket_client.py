"""A quick WebSocket client, in a process of its own: what the broker's sockets are measured with.

    python -m bench.socket_client through PORT QUEUE FORM SECONDS
    python -m bench.socket_client idle PORT QUEUE COUNT

`through` is one producer and one consumer of a queue: the producer keeps a window of messages
unconfirmed, the consumer counts what comes out. Prints messages a second, from the first that is
sent to the last that is received. FORM is how a frame looks: `binary`, `text`, or `batch`.

`idle` opens so many consumers, prints a line, and keeps them until its input ends.

The frames that are sent are made before the clock runs, so that the client is not what is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import NamedTuple, cast

import uvloop

from millstream.wire.frames import BINARY, PING, PONG, TEXT, FrameReader, encode_masked

MESSAGE_BYTES = 100
BATCH = 100
# Messages that are on their way: enough to keep both sides busy, little enough to stay a stream.
WINDOW = 16_000
# One write of the producer.
PACKET_BYTES = 64 * 1024
FRAME_BYTES_MAX = 64 * 1024 * 1024
PATIENCE_SECONDS = 30.0


class Form(NamedTuple):
    """One frame of the producer, how many messages are in it, and how a consumer asks for them."""

    opcode: int
    payload: bytes
    messages: int
    query: str


def forms() -> dict[str, Form]:
    payload = "x" * (MESSAGE_BYTES - 2)
    return {
        "binary": Form(BINARY, b"x" * MESSAGE_BYTES, 1, "?format=binary"),
        "text": Form(TEXT, json.dumps({"payload": payload}).encode(), 1, ""),
        "batch": Form(
            TEXT, json.dumps({"payloads": [payload] * BATCH}).encode(), BATCH, f"?max={BATCH}"
        ),
    }


class Client(asyncio.Protocol):
    """A connection that counts what comes in."""

    def __init__(self, path: str, form: Form | None, ahead: Ahead) -> None:
        self._path = path
        self._form = form
        self._ahead = ahead
        self._reader: FrameReader | None = None
        self.transport = cast(asyncio.Transport, None)
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        host, port = transport.get_extra_info("peername")[:2]
        lines = [
            f"GET {self._path} HTTP/1.1",
            f"Host: {host}:{port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        ]
        self.transport.write("\r\n".join((*lines, "", "")).encode())

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            head, end, data = data.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 101 ") or not end:
                raise SystemExit(f"no WebSocket: {head.decode()}")
            self._reader = FrameReader(FRAME_BYTES_MAX, FRAME_BYTES_MAX, from_client=False)
            self.opened.set_result(None)
        events = self._reader.feed(data)
        if self._reader.has_control:
            self._answer_pings(events)
        if self._form is None:
            self._ahead.confirmed(events)
        else:
            self._ahead.received(events, self._form)

    def _answer_pings(self, events: list[tuple[int, bytes]]) -> None:
        for opcode, payload in events[:]:
            if opcode > BINARY:
                events.remove((opcode, payload))
                if opcode != PING:
                    raise SystemExit(f"closed: {payload!r}")
                self.transport.write(encode_masked(PONG, payload, os.urandom(4)))

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._ahead.end()


class Ahead:
    """How far the producer is ahead of its confirmations and of the consumer."""

    def __init__(self, messages_per_frame: int) -> None:
        self._messages_per_frame = messages_per_frame
        self.sent = self.confirmed_count = self.received_count = 0
        self.moved = asyncio.Event()
        self.is_over = False

    def confirmed(self, events: list[tuple[int, bytes]]) -> None:
        for _, payload in events:
            if not payload.startswith(b'{"queued":'):
                raise SystemExit(f"not confirmed: {payload.decode()}")
        self.confirmed_count += len(events) * self._messages_per_frame
        self.moved.set()

    def received(self, events: list[tuple[int, bytes]], form: Form) -> None:
        if form.messages == 1:
            self.received_count += len(events)
        else:
            self.received_count += sum(payload.count(b'"payload":') for _, payload in events)
        self.moved.set()

    def end(self) -> None:
        self.is_over = True
        self.moved.set()

    @property
    def unsettled(self) -> int:
        return self.sent - min(self.confirmed_count, self.received_count)

    async def wait_until(self, unsettled_max: int) -> None:
        while self.unsettled > unsettled_max:
            self.moved.clear()
            await asyncio.wait_for(self.moved.wait(), PATIENCE_SECONDS)
            if self.is_over:
                raise SystemExit("the broker ended a connection")


async def through(port: int, queue: str, form: Form, seconds: float) -> float:
    frame = encode_masked(form.opcode, form.payload, os.urandom(4))
    frames = max(1, PACKET_BYTES // len(frame))
    packet, messages = frame * frames, frames * form.messages
    ahead = Ahead(form.messages)
    producer = await connect(port, f"/queues/{queue}/enqueue", None, ahead)
    consumer = await connect(port, f"/queues/{queue}/dequeue{form.query}", form, ahead)
    begin = time.perf_counter()
    while time.perf_counter() < begin + seconds:
        producer.transport.write(packet)
        ahead.sent += messages
        await ahead.wait_until(max(WINDOW, messages))
    await ahead.wait_until(0)
    took = time.perf_counter() - begin
    if ahead.received_count != ahead.sent:
        raise SystemExit(f"sent {ahead.sent}, received {ahead.received_count}")
    for client in (producer, consumer):
        client.transport.abort()
    return ahead.sent / took


async def idle(port: int, queue: str, count: int) -> None:
    ahead = Ahead(1)
    form = forms()["text"]
    clients = [await connect(port, f"/queues/{queue}/dequeue", form, ahead) for _ in range(count)]
    print(len(clients), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def connect(port: int, path: str, form: Form | None, ahead: Ahead) -> Client:
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: Client(path, form, ahead), "127.0.0.1", port)
    await asyncio.wait_for(client.opened, PATIENCE_SECONDS)
    return client


def main(command: str, port: str, queue: str, *rest: str) -> None:
    if command == "idle":
        uvloop.run(idle(int(port), queue, int(rest[0])))
    else:
        form, seconds = rest
        print(uvloop.run(through(int(port), queue, forms()[form], float(seconds))))


if __name__ == "__main__":
    main(*sys.argv[1:])
