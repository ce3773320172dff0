"""A topic over one connection: publish, read in order, acknowledge (`/v1/topics/{topic}/stream`).

The broker gives a consumer its id, and keeps its place: whoever opens a stream with that id goes on
at the first record that was not acknowledged. Records come while there is credit; credit is given
again as the caller takes them, so a caller that stops reading is sent no more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import Any, Literal, Self

import msgspec

from millstream.client.topics import Acks, topic_path
from millstream.client.transport import Transport
from millstream.client.values import (
    HeaderMap,
    Key,
    Place,
    ReadMessage,
    Received,
    Value,
    encode_json,
    message_body,
)
from millstream.client.websocket import WebSocket, open_websocket
from millstream.errors import OutcomeUnknown, ParameterInvalid, StreamClosed
from millstream.wire.refusals import refusal


class _Frame(msgspec.Struct):
    type: str
    id: int | None = None
    consumer_id: str = ""
    placed: list[dict[str, int]] = []


_frame = msgspec.json.Decoder(_Frame)
_message = msgspec.json.Decoder(ReadMessage)


class TopicStream:
    """Made by `AsyncClient.stream`; an async iterator of records once `open` was called."""

    def __init__(self, transport: Transport, topic: str) -> None:
        self._transport = transport
        self._topic = topic
        self._socket: WebSocket | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._next_id = 0
        self._records: deque[Received] = deque()
        self._arrived = asyncio.Event()
        self._credit = 0
        self._taken = 0
        self._error: StreamClosed | None = None
        self.consumer_id = ""

    async def __aenter__(self) -> Self:
        self._socket = await open_websocket(
            self._transport, topic_path(self._topic, "stream", query="format=json")
        )
        self._reading = asyncio.get_running_loop().create_task(self._read(self._socket))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(
        self,
        consumer_id: str | None = None,
        *,
        partition: int | None = None,
        start: Literal["earliest", "latest"] | int = "earliest",
        credit: int = 100,
    ) -> str:
        """Begin to receive, as a new consumer or as the one with this id; answers the id."""
        if credit < 1:
            raise ParameterInvalid(f"credit is {credit}; it must be at least 1", parameter="credit")
        body: dict[str, Any] = {
            "type": "open",
            "consumer_id": consumer_id,
            "partition": partition,
            "start": start,
        }
        self.consumer_id = _frame.decode(await self._ask(body)).consumer_id
        self._credit = credit
        await self._send({"type": "next", "credit": credit})
        return self.consumer_id

    async def publish(
        self,
        value: Value,
        *,
        key: Key = None,
        headers: HeaderMap | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        acks: Acks = "all",
        idempotency_key: str | None = None,
    ) -> Place:
        """Store a record. Calls need not wait for each other."""
        message = message_body(
            value, key=key, headers=headers, timestamp_ms=timestamp_ms, partition=partition
        )
        body: dict[str, Any] = {"type": "publish", "messages": [message], "acks": acks}
        if idempotency_key is not None:
            body["idempotency_key"] = idempotency_key
        try:
            answer = await self._ask(body)
        except StreamClosed as error:
            raise OutcomeUnknown(
                f"the stream ended before the broker said what became of it: {error.message}"
            ) from error
        place = _frame.decode(answer).placed[0]
        return Place(place["partition"], place["offset"], place["timestamp_ms"])

    async def ack(self, record: Received) -> None:
        """This record, and those before it in its partition, are done. Durable when it returns."""
        await self._ask({"type": "ack", "partition": record.partition, "offset": record.offset})

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        while not self._records:
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()
        record = self._records.popleft()
        self._taken += 1
        if self._taken * 2 >= self._credit and self._error is None:
            given, self._taken = self._taken, 0
            await self._send({"type": "next", "credit": given})
        return record

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with suppress(asyncio.CancelledError):
                await self._reading
        if self._socket is not None:
            await self._socket.close()
        self._records.clear()
        self._end(StreamClosed("this stream was closed"))

    # ---- frames

    async def _ask(self, body: dict[str, Any]) -> bytes:
        if self._error is not None:
            raise self._error
        self._next_id = number = (self._next_id + 1) & 0x7FFFFFFF
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._send(body | {"id": number})
            return await answer
        finally:
            self._answers.pop(number, None)

    async def _send(self, body: dict[str, Any]) -> None:
        assert self._socket is not None, "a stream is used inside `async with`"
        await self._socket.send_text(encode_json(body))

    async def _read(self, socket: WebSocket) -> None:
        try:
            while True:
                _, payload = await socket.receive()
                self._take(payload)
        except StreamClosed as error:
            self._end(error)
        except msgspec.MsgspecError as error:
            self._end(StreamClosed(f"the broker sent what is no message of a stream: {error}"))

    def _take(self, payload: bytes) -> None:
        frame = _frame.decode(payload)
        if frame.type == "message":
            self._records.append(_message.decode(payload).received(self._topic))
            self._arrived.set()
            return
        answer = self._answers.get(-1 if frame.id is None else frame.id)
        if frame.type != "error":
            if answer is not None and not answer.done():
                answer.set_result(payload)
            return
        error = refusal(self._transport.place.url, 400, payload)
        if answer is not None and not answer.done():
            answer.set_exception(error)
        elif frame.id is None:
            self._end(StreamClosed(f"the broker says {error.code}: {error.message}"))

    def _end(self, error: StreamClosed) -> None:
        if self._error is None:
            self._error = error
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._arrived.set()
