"""The topics of a broker, and publishing to them one call at a time."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias
from urllib.parse import quote, urlencode

import msgspec

from millstream.client.transport import JSON, Transport
from millstream.client.values import (
    Delay,
    HeaderMap,
    Key,
    Place,
    Value,
    When,
    encode_json,
    message_body,
    message_body_of,
)

Acks: TypeAlias = Literal["none", "leader", "all"]
# Topics of one page of a list.
_PAGE = 1000


class PartitionFacts(msgspec.Struct):
    partition: int
    start: int  # the oldest offset that is kept
    end: int  # the next offset: records before it are durable
    bytes: int = 0
    leader_epoch: int = 0


class TopicFacts(msgspec.Struct):
    """What there is to know of a topic. `details` is empty in a list."""

    name: str
    uuid: str
    partitions: int
    created_ms: int
    settings: dict[str, Any]
    details: list[PartitionFacts] = []


class PartitionOffsets(msgspec.Struct):
    partition: int
    start: int
    end: int
    offset: int | None = None  # the first at or after the time that was asked for


class _Listed(msgspec.Struct):
    topics: list[TopicFacts]
    next: str | None = None


class _Offsets(msgspec.Struct):
    offsets: list[PartitionOffsets]


class _Placed(msgspec.Struct):
    partition: int
    offset: int
    timestamp_ms: int


class _AllPlaced(msgspec.Struct):
    placed: list[_Placed]


class Topics:
    """Topics by name."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def create(
        self,
        name: str,
        *,
        partitions: int | None = None,
        settings: Mapping[str, object] | None = None,
    ) -> TopicFacts:
        """Make a topic. TopicExists when there is one; also when the answer to a first try was
        lost and the second finds what the first has made."""
        body: dict[str, object] = {"name": name}
        if partitions is not None:
            body["partitions"] = partitions
        if settings:
            body["settings"] = dict(settings)
        reply = await self._transport.ask("POST", "/v1/topics", encode_json(body))
        return _facts(reply.body)

    async def describe(self, name: str) -> TopicFacts:
        return _facts((await self._transport.ask("GET", topic_path(name))).body)

    async def alter(self, name: str, settings: Mapping[str, object]) -> TopicFacts:
        """Change settings; None sets one back to its default."""
        body = encode_json({"settings": dict(settings)})
        reply = await self._transport.ask("PATCH", topic_path(name), body, is_repeatable=True)
        return _facts(reply.body)

    async def add_partitions(self, name: str, partitions: int) -> TopicFacts:
        """Have so many partitions from now on. Records that are there stay where they are."""
        body = encode_json({"partitions": partitions})
        reply = await self._transport.ask("POST", topic_path(name, "partitions"), body)
        return _facts(reply.body)

    async def delete(self, name: str) -> None:
        """Remove a topic with its records."""
        await self._transport.ask("DELETE", topic_path(name), is_repeatable=False)

    async def purge(self, name: str) -> None:
        """Remove all records, and keep the topic; offsets go on from where they were. It is not
        tried again when its answer got lost: that would remove what came since."""
        await self._transport.ask("POST", topic_path(name, "purge"), is_repeatable=False)

    async def offsets(
        self, name: str, *, partition: int | None = None, time_ms: int | None = None
    ) -> list[PartitionOffsets]:
        """The first and next offset of partitions, and the first offset at or after a time."""
        asked = {"partition": partition, "time": time_ms}
        query = urlencode({key: value for key, value in asked.items() if value is not None})
        reply = await self._transport.ask("GET", topic_path(name, "offsets", query=query))
        return msgspec.json.decode(reply.body, type=_Offsets).offsets

    async def _pages(self) -> AsyncIterator[TopicFacts]:
        after: str | None = ""
        while after is not None:
            query = urlencode({"limit": _PAGE} | ({"after": after} if after else {}))
            reply = await self._transport.ask("GET", f"/v1/topics?{query}")
            page = msgspec.json.decode(reply.body, type=_Listed)
            for topic in page.topics:
                yield topic
            after = page.next

    # ---- publishing

    async def publish(
        self,
        name: str,
        value: Value,
        *,
        key: Key = None,
        headers: HeaderMap | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        lane: str | int | None = None,
        delay: Delay | None = None,
        deliver_at: When | None = None,
        acks: Acks = "all",
        idempotency_key: str | None = None,
    ) -> Place:
        """Store one record, and answer where. With `delay` or `deliver_at` it appears in its topic
        then, and its place is that of its schedule. It is stored once, however often it is tried:
        the key that sees to it is made up when none is given.

        For many records a producer is many times quicker.
        """
        body = encode_json(
            message_body(
                value,
                key=key,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                lane=lane,
                delay=delay,
                deliver_at=deliver_at,
            )
        )
        reply = await self._publish(name, "messages", body, acks, idempotency_key)
        place = msgspec.json.decode(reply, type=_Placed)
        return Place(place.partition, place.offset, place.timestamp_ms)

    async def publish_many(
        self,
        name: str,
        messages: Sequence[Mapping[str, object]],
        *,
        acks: Acks = "all",
        idempotency_key: str | None = None,
    ) -> list[Place]:
        """Store all of them, or none. Each is what `publish` takes, by name: `value`, and
        `key`, `headers`, `timestamp_ms`, `partition`, `lane`, `delay`, `deliver_at`
        where wanted."""
        bodies = [message_body_of(message, index) for index, message in enumerate(messages)]
        body = encode_json({"messages": bodies})
        reply = await self._publish(name, "batch", body, acks, idempotency_key)
        placed = msgspec.json.decode(reply, type=_AllPlaced).placed
        return [Place(place.partition, place.offset, place.timestamp_ms) for place in placed]

    async def _publish(
        self, name: str, verb: str, body: bytes, acks: Acks, idempotency_key: str | None
    ) -> bytes:
        query = "" if acks == "all" else f"acks={acks}"
        reply = await self._transport.ask(
            "POST",
            topic_path(name, verb, query=query),
            body,
            media=JSON,
            headers={
                "idempotency-key": uuid.uuid4().hex if idempotency_key is None else idempotency_key
            },
            is_repeatable=True,
        )
        return reply.body

    # Last, so that in the class above the builtin of that name is meant.
    async def list(self) -> list[TopicFacts]:
        """All topics, by name."""
        return [topic async for topic in self._pages()]


def topic_path(name: str, *parts: str, query: str = "") -> str:
    path = "/".join(("/v1/topics", quote(name, safe=""), *parts))
    return f"{path}?{query}" if query else path


_facts = msgspec.json.Decoder(TopicFacts).decode
