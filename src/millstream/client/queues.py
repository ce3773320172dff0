"""The queues of a broker: volatile, in memory, quick."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from millstream.client.transport import RAW, Transport
from millstream.client.values import encode_json
from millstream.client.websocket import open_websocket


class QueueFacts(msgspec.Struct):
    """What there is to know of a queue."""

    name: str
    size: int
    capacity: int
    bytes: int
    max_bytes: int
    waiting: int
    enqueued_total: int
    dequeued_total: int
    full_total: int


class Enqueued(msgspec.Struct):
    queue_size: int
    enqueued_at: int  # microseconds since 1970


class Message(msgspec.Struct):
    """A message of a queue. `payload` is its JSON, or its bytes when it came as bytes."""

    payload: Any
    enqueued_at: int  # microseconds since 1970
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.encoding == "base64":
            self.payload = base64.b64decode(self.payload)


class _Messages(msgspec.Struct):
    messages: list[Message]


class _Listed(msgspec.Struct):
    queues: list[QueueFacts]


class _Snapshot(msgspec.Struct):
    messages: int
    file: str


_message = msgspec.json.Decoder(Message)
_messages = msgspec.json.Decoder(_Messages)


class Queues:
    """Queues by name. A queue is made by its first message."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # ---- messages

    async def enqueue(self, name: str, payload: object) -> Enqueued:
        """Append anything that JSON can say. Not tried again when nobody knows whether it was
        taken: that would be an OutcomeUnknown."""
        body = b'{"payload":%b}' % encode_json(payload)
        reply = await self._transport.ask("POST", f"{_path(name)}/enqueue", body)
        return msgspec.json.decode(reply.body, type=Enqueued)

    async def enqueue_bytes(self, name: str, data: bytes) -> None:
        """Append bytes as they are."""
        await self._transport.ask("POST", f"{_path(name)}/enqueue", data, media=RAW)

    async def enqueue_batch(self, name: str, payloads: Sequence[object]) -> Enqueued:
        """Append all of them, or none."""
        body = b'{"payloads":%b}' % encode_json(list(payloads))
        reply = await self._transport.ask("POST", f"{_path(name)}/enqueue/batch", body)
        return msgspec.json.decode(reply.body, type=Enqueued)

    async def dequeue(self, name: str, *, timeout_s: float = 0.0) -> Message | None:
        """Take the oldest message; None when none came in time."""
        found = await self.dequeue_batch(name, count_max=1, timeout_s=timeout_s)
        return found[0] if found else None

    async def dequeue_batch(
        self, name: str, *, count_max: int = 100, timeout_s: float = 0.0
    ) -> list[Message]:
        """Take up to so many. Waits up to 30 s for the first."""
        query = urlencode({"max": count_max, "timeout": f"{timeout_s:g}"})
        # A second try would take others, and the first ones would be lost without a word.
        reply = await self._transport.ask(
            "GET", f"{_path(name)}/dequeue?{query}", is_repeatable=False, hold_s=timeout_s
        )
        return [] if reply.status == 204 else _messages.decode(reply.body).messages

    async def stream(self, name: str) -> AsyncIterator[Message]:
        """Messages as they come, over one connection, until the caller stops."""
        socket = await open_websocket(self._transport, f"{_path(name)}/dequeue")
        try:
            while True:
                _, payload = await socket.receive()
                yield _message.decode(payload)
        finally:
            await socket.close()

    # ---- management

    async def create(
        self, name: str, *, capacity: int | None = None, bytes_max: int | None = None
    ) -> QueueFacts:
        """Make a queue, or change the limits of one that is there."""
        limits = {"capacity": capacity, "max_bytes": bytes_max}
        body = encode_json({key: value for key, value in limits.items() if value is not None})
        reply = await self._transport.ask("PUT", _path(name), body)
        return msgspec.json.decode(reply.body, type=QueueFacts)

    async def describe(self, name: str) -> QueueFacts:
        reply = await self._transport.ask("GET", _path(name))
        return msgspec.json.decode(reply.body, type=QueueFacts)

    async def clear(self, name: str) -> int:
        """Drop all messages; answers how many there were."""
        reply = await self._transport.ask("POST", f"{_path(name)}/clear", is_repeatable=True)
        return int(msgspec.json.decode(reply.body)["messages"])

    async def delete(self, name: str) -> None:
        await self._transport.ask("DELETE", _path(name))

    async def persist(self, name: str, file: str | None = None) -> int:
        """Write its messages to a file of the broker; answers how many."""
        return await self._snapshot(name, "persist", file)

    async def load(self, name: str, file: str | None = None) -> int:
        """Replace its messages by those of such a file; answers how many."""
        return await self._snapshot(name, "load", file)

    async def _snapshot(self, name: str, verb: str, file: str | None) -> int:
        query = "" if file is None else "?" + urlencode({"file": file})
        path = f"{_path(name)}/{verb}{query}"
        reply = await self._transport.ask("POST", path, is_repeatable=True)
        return msgspec.json.decode(reply.body, type=_Snapshot).messages

    # Last, so that in the class above the builtin of that name is meant.
    async def list(self) -> list[QueueFacts]:
        reply = await self._transport.ask("GET", "/queues")
        return msgspec.json.decode(reply.body, type=_Listed).queues


def _path(name: str) -> str:
    return f"/queues/{quote(name, safe='')}"
