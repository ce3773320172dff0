"""A WebSocket from the client's side.

What arrives waits in a queue until it is read; when that is full, the connection is not read from,
so that the broker feels it and sends no more. Pings are answered here.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections import deque
from typing import cast

from millstream.client.http import HEAD_BYTES_MAX, AnswerInvalid, AnswerParser
from millstream.client.transport import CONNECT_S, Transport
from millstream.errors import BrokerUnreachable, OutcomeUnknown, StreamClosed
from millstream.wire.frames import (
    BINARY,
    CLOSE,
    PING,
    TEXT,
    Closing,
    FrameError,
    FrameReader,
    accept_key,
    encode_masked,
    read_close,
)
from millstream.wire.refusals import refusal

NORMAL = 1000
# What one frame may hold, and how much may wait to be read.
FRAME_BYTES_MAX = 64 * 2**20
WAITING_BYTES_MAX = 4 * 2**20
CLOSE_S = 5.0


class WebSocket(asyncio.Protocol):
    """A connection that is open. `receive` gives what came, in order, then raises StreamClosed."""

    def __init__(self, request: bytes, key: bytes, server: str) -> None:
        self._request = request
        self._key = key
        self._server = server
        self._head = bytearray()
        self._reader = FrameReader(FRAME_BYTES_MAX, FRAME_BYTES_MAX, from_client=False)
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._events: deque[tuple[int, bytes]] = deque()
        self._waiting_bytes = 0
        self._reading: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self.closing: Closing | None = None

    async def receive(self) -> tuple[int, bytes]:
        """The next message: its opcode and payload."""
        while not self._events:
            if self._ended.done():
                raise self._closed()
            self._reading = asyncio.get_running_loop().create_future()
            try:
                await self._reading
            finally:
                self._reading = None
        opcode, payload = self._events.popleft()
        self._waiting_bytes -= len(payload)
        if self._waiting_bytes < WAITING_BYTES_MAX // 2 and self._transport is not None:
            self._transport.resume_reading()
        return opcode, payload

    async def send_text(self, text: bytes) -> None:
        await self._send(TEXT, text)

    async def send_binary(self, data: bytes) -> None:
        await self._send(BINARY, data)

    async def close(self, code: int = NORMAL) -> None:
        """Say goodbye, wait a little for the answer, and end the connection."""
        if self._transport is not None and not self._transport.is_closing():
            self._write(CLOSE, code.to_bytes(2, "big"))
            # What the broker still sends is not read any more, only its goodbye.
            self._events.clear()
            self._waiting_bytes = 0
            self._transport.resume_reading()
            await asyncio.wait([self._ended], timeout=CLOSE_S)
        if self._transport is not None:
            self._transport.abort()
            await self._ended

    async def _send(self, opcode: int, payload: bytes) -> None:
        await self._writable.wait()
        if self._transport is None or self.closing is not None:
            raise self._closed()
        self._write(opcode, payload)

    def _write(self, opcode: int, payload: bytes) -> None:
        assert self._transport is not None
        self._transport.write(encode_masked(opcode, payload, os.urandom(4)))

    def _closed(self) -> StreamClosed:
        if self.closing is None:
            return StreamClosed(f"the connection to {self._server} broke off")
        return StreamClosed(
            f"{self._server} closed the stream: {self.closing.reason or 'no reason given'}",
            close_code=self.closing.code,
            reason=self.closing.reason,
        )

    # ---- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # What uvloop gives is one, though not by its class.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.opened.done():
            data = self._shake_hands(data)
        if data:
            self._take(data)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, _error: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        if not self.opened.done():
            self.opened.set_exception(
                OutcomeUnknown(f"{self._server} ended the connection without an answer")
            )
        if not self._ended.done():
            self._ended.set_result(None)
        self._wake()

    def _shake_hands(self, data: bytes) -> bytes:
        """What follows the answer to the handshake, once that is there."""
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if end < 0:
            if len(self._head) > HEAD_BYTES_MAX:
                self._fail(BrokerUnreachable(f"what answers at {self._server} is no broker"))
            return b""
        parser = AnswerParser(HEAD_BYTES_MAX)
        try:
            reply = parser.feed(bytes(self._head))
        except AnswerInvalid as error:
            self._fail(BrokerUnreachable(f"{self._server} is no broker: {error}"))
            return b""
        if reply is None:
            return b""
        if reply.status != 101:
            self._fail(refusal(self._server, reply.status, reply.body))
            return b""
        if reply.headers.get(b"sec-websocket-accept") != accept_key(self._key):
            self._fail(BrokerUnreachable(f"{self._server} does not speak WebSocket"))
            return b""
        rest = bytes(self._head[end + 4 :])
        self._head.clear()
        self.opened.set_result(None)
        return rest

    def _fail(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)
        if self._transport is not None:
            self._transport.abort()

    def _take(self, data: bytes) -> None:
        assert self._transport is not None
        for opcode, payload in self._reader.feed(data):
            if opcode == PING:
                self._write(10, payload)
            elif opcode == CLOSE:
                self._on_close(payload)
            elif opcode in (TEXT, BINARY) and self.closing is None:
                self._events.append((opcode, payload))
                self._waiting_bytes += len(payload)
        if self._reader.error is not None:
            self._transport.abort()
        elif self._waiting_bytes > WAITING_BYTES_MAX:
            self._transport.pause_reading()
        self._wake()

    def _on_close(self, payload: bytes) -> None:
        assert self._transport is not None
        if self.closing is not None:
            return
        try:
            self.closing = read_close(payload)
        except FrameError as error:
            self.closing = Closing(error.close_code, error.reason)
        self._write(CLOSE, payload[:2])
        self._transport.close()

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


async def open_websocket(transport: Transport, path: str) -> WebSocket:
    """A WebSocket at a path of the broker; raises what the broker refuses."""
    place = transport.place
    key = base64.b64encode(os.urandom(16))
    request = (
        f"GET {path} HTTP/1.1\r\nhost: {place.authority}\r\nconnection: Upgrade\r\n"
        "upgrade: websocket\r\nsec-websocket-version: 13\r\n"
        f"sec-websocket-key: {key.decode()}\r\n\r\n"
    ).encode("ascii")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            _, socket = await loop.create_connection(
                lambda: WebSocket(request, key, place.url),
                place.host,
                place.port,
                ssl=transport.tls,
            )
            await socket.opened
    except (OSError, TimeoutError) as error:
        raise transport.unreachable(error) from error
    return socket
