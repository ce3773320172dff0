"""Records that are to appear in their topic later, and those that are published again and again.

What `publish(…, delay=…)` answers is the place of the schedule: it is cancelled by that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlencode

import msgspec

from millstream.client.topics import topic_path
from millstream.client.transport import Transport
from millstream.client.values import (
    Delay,
    HeaderMap,
    Key,
    ReadMessage,
    Received,
    Value,
    delay_body,
    encode_json,
    message_body,
)

_PAGE = 1000


class Delayed(ReadMessage, kw_only=True):
    """A record that is scheduled. `partition` and `offset` are its id."""

    state: str  # pending, fired, cancelled or expired
    deliver_at_ms: int
    lane: str = "normal"
    why: str | None = None  # of one that expired

    def record(self) -> Received:
        """As it will be in its topic; its place is not known yet."""
        return self.received(self.topic)


class ScheduleFacts(msgspec.Struct):
    """A named schedule. `message` is as the broker writes it in JSON."""

    name: str
    topic: str
    message: dict[str, Any]
    every_ms: int | None = None
    cron: str | None = None
    time_zone: str = "UTC"
    paused: bool = False
    created_ms: int = 0
    next_ms: int | None = None  # None while it is paused
    last_ms: int | None = None
    runs: int = 0
    error: str | None = None  # why the last run was left out


class _DelayedPage(msgspec.Struct):
    count: int
    delayed: list[Delayed]
    next: str | None = None


class _NamedPage(msgspec.Struct):
    schedules: list[ScheduleFacts]
    next: str | None = None


_delayed = msgspec.json.Decoder(Delayed).decode
_named = msgspec.json.Decoder(ScheduleFacts).decode


class Schedules:
    """Schedules by topic and id, and by name."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    # ---- of records

    async def count(self, topic: str) -> int:
        """How many records of a topic are pending."""
        return (await self._page(topic, 1, None)).count

    async def pending(self, topic: str) -> list[Delayed]:
        """All of them, in the order in which they were scheduled."""
        return [one async for one in self._pages(topic)]

    async def find(self, topic: str, partition: int, offset: int) -> Delayed:
        """One of them, and what became of it; ScheduleUnknown when it was over long ago."""
        return _delayed((await self._transport.ask("GET", _path(topic, partition, offset))).body)

    async def cancel(self, topic: str, partition: int, offset: int) -> Delayed:
        """It will not appear. ScheduleOver when it has already, or will not anyway."""
        reply = await self._transport.ask(
            "DELETE", _path(topic, partition, offset), is_repeatable=False
        )
        return _delayed(reply.body)

    async def _pages(self, topic: str) -> AsyncIterator[Delayed]:
        after: str | None = None
        while True:
            page = await self._page(topic, _PAGE, after)
            for one in page.delayed:
                yield one
            if page.next is None:
                return
            after = page.next

    async def _page(self, topic: str, limit: int, after: str | None) -> _DelayedPage:
        query = urlencode({"limit": limit} | ({"after": after} if after else {}))
        reply = await self._transport.ask("GET", topic_path(topic, "delayed", query=query))
        return msgspec.json.decode(reply.body, type=_DelayedPage)

    # ---- by name

    async def put(
        self,
        name: str,
        topic: str,
        value: Value,
        *,
        every: Delay | None = None,
        cron: str | None = None,
        time_zone: str = "UTC",
        key: Key = None,
        headers: HeaderMap | None = None,
        partition: int | None = None,
        lane: str | int | None = None,
        paused: bool = False,
    ) -> ScheduleFacts:
        """Publish a record `every` so long, or as `cron` says. One of that name is replaced."""
        body: dict[str, object] = {
            "topic": topic,
            "time_zone": time_zone,
            "paused": paused,
            "message": message_body(
                value, key=key, headers=headers, partition=partition, lane=lane
            ),
        }
        if every is not None:
            body["every"] = delay_body(every)
        if cron is not None:
            body["cron"] = cron
        reply = await self._transport.ask(
            "PUT", _named_path(name), encode_json(body), is_repeatable=True
        )
        return _named(reply.body)

    async def get(self, name: str) -> ScheduleFacts:
        return _named((await self._transport.ask("GET", _named_path(name))).body)

    async def delete(self, name: str) -> None:
        await self._transport.ask("DELETE", _named_path(name), is_repeatable=False)

    # Last, so that in the class above the builtin of that name is meant.
    async def list(self) -> list[ScheduleFacts]:
        """All named schedules, by name."""
        return [one async for one in self._named_pages()]

    async def _named_pages(self) -> AsyncIterator[ScheduleFacts]:
        after: str | None = ""
        while after is not None:
            query = urlencode({"limit": _PAGE} | ({"after": after} if after else {}))
            reply = await self._transport.ask("GET", f"/v1/schedules?{query}")
            page = msgspec.json.decode(reply.body, type=_NamedPage)
            for one in page.schedules:
                yield one
            after = page.next


def _path(topic: str, partition: int, offset: int) -> str:
    return topic_path(topic, "delayed", str(partition), str(offset))


def _named_path(name: str) -> str:
    return "/v1/schedules/" + quote(name, safe="")
