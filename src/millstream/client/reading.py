"""Reading a topic by offset or time, without a group: nothing is kept on the broker.

Up to where the log ends when it starts, a read takes whole record batches, partition after
partition, and asks for the next ones while the caller works on these. From there on, when it is to
follow, it takes what comes in all partitions together, those included that the topic gets later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Literal, NamedTuple, TypeAlias
from urllib.parse import urlencode

import msgspec

from millstream.client.topics import PartitionOffsets, TopicFacts, Topics, topic_path
from millstream.client.transport import Transport
from millstream.client.values import ReadMessage, Received, received
from millstream.errors import OffsetOutOfRange, ParameterInvalid
from millstream.wire.batches import decode, walk
from millstream.wire.retry import RetryPolicy

Start: TypeAlias = Literal["earliest", "latest"] | int

# What one request asks for: enough to make its cost small beside that of the records.
FETCH_BYTES = 2**20
FOLLOW_S = 20.0
# How often who follows all partitions asks whether there are more of them.
GROW_S = 3.0


class ReadOptions(NamedTuple):
    topic: str
    partition: int | None = None
    offset: Start = "earliest"
    time_ms: int | None = None
    # The last so many records of each partition, instead of an offset or a time.
    last: int | None = None
    follow: bool = False
    # How long a broker that does not answer is waited for.
    patience_s: float = 30.0


class _Page(msgspec.Struct):
    messages: list[ReadMessage]
    next: str


_page = msgspec.json.Decoder(_Page)
_facts = msgspec.json.Decoder(TopicFacts)


async def read(transport: Transport, options: ReadOptions) -> AsyncIterator[Received]:
    async for chunk in read_chunks(transport, options):
        for record in chunk:
            yield record


async def read_chunks(transport: Transport, options: ReadOptions) -> AsyncIterator[list[Received]]:
    """The same, in the helpings in which records come."""
    retry = RetryPolicy(timeout_s=options.patience_s)
    positions: dict[int, int] = {}
    for known in await _starts(Topics(transport), options):
        position = positions[known.partition] = _start(known, options)
        fetch = _Fetch(transport, retry, options.topic, known.partition)
        async for chunk in fetch.until(position, known.end):
            yield chunk
        positions[known.partition] = max(position, known.end)
    if options.follow:
        is_whole = options.partition is None
        following = _Following(transport, retry, options.topic, positions, is_whole=is_whole)
        async for chunk in following.chunks():
            yield chunk


async def _starts(topics: Topics, options: ReadOptions) -> list[PartitionOffsets]:
    starts = (options.offset != "earliest", options.time_ms is not None, options.last is not None)
    if sum(starts) > 1:
        raise ParameterInvalid("give an offset, a time or a count", parameter="offset")
    known = await topics.offsets(
        options.topic, partition=options.partition, time_ms=options.time_ms
    )
    if isinstance(options.offset, int) and len(known) > 1:
        raise ParameterInvalid(
            f"{options.topic} has {len(known)} partitions: name the one that the offset is of",
            parameter="partition",
        )
    return known


def _start(known: PartitionOffsets, options: ReadOptions) -> int:
    if options.time_ms is not None:
        return known.end if known.offset is None else known.offset
    if options.last is not None:
        return max(known.start, known.end - options.last)
    if options.offset == "earliest":
        return known.start
    if options.offset == "latest":
        return known.end
    if not known.start <= options.offset <= known.end:
        raise OffsetOutOfRange(
            f"offset {options.offset} of {options.topic}, partition {known.partition}: it has "
            f"{known.start} to {known.end}",
            offset=options.offset,
            start=known.start,
            end=known.end,
        )
    return options.offset


class _Fetch:
    """Raw batches of one partition."""

    def __init__(
        self, transport: Transport, retry: RetryPolicy, topic: str, partition: int
    ) -> None:
        self._transport = transport
        self._retry = retry
        self._topic = topic
        self._partition = partition

    async def until(self, offset: int, end: int) -> AsyncIterator[list[Received]]:
        """Records from an offset on, up to another; gaps are where compaction was."""
        loop = asyncio.get_running_loop()
        fetching = loop.create_task(self._batches(offset)) if offset < end else None
        try:
            while fetching is not None:
                data = await fetching
                next_offset, opened = self._next_offset(data, offset)
                if next_offset <= offset:
                    return
                is_more = next_offset < end
                fetching = loop.create_task(self._batches(next_offset)) if is_more else None
                records = opened(offset, end)
                offset = next_offset
                if records:
                    yield records
        finally:
            if fetching is not None:
                fetching.cancel()
                with suppress(asyncio.CancelledError):
                    await fetching

    async def _batches(self, offset: int) -> bytes:
        query = urlencode({"offset": offset, "bytes": FETCH_BYTES})
        path = topic_path(self._topic, "partitions", str(self._partition), "batches", query=query)
        return (await self._transport.ask("GET", path, retry=self._retry)).body

    def _next_offset(
        self, data: bytes, offset: int
    ) -> tuple[int, Callable[[int, int], list[Received]]]:
        """Where the batches end, before they are opened: the next ones are asked for first."""
        batches = walk(data)
        view = memoryview(data)
        topic, partition = self._topic, self._partition

        def opened(start: int, end: int) -> list[Received]:
            records = [
                received(topic, partition, record)
                if record.headers
                else Received(
                    topic, partition, record.offset, record.timestamp, record.key, record.value
                )
                for position, header in batches
                if not header.is_control
                for record in decode(view[position : position + header.size], check_crc=True)
            ]
            # Batches come whole: only the first and the last can hold what was not asked for.
            if records and (records[0].offset < start or records[-1].offset >= end):
                return [record for record in records if start <= record.offset < end]
            return records

        return (batches[-1][1].next_offset if batches else offset), opened


class _Following:
    """What comes in several partitions, page by page."""

    def __init__(
        self,
        transport: Transport,
        retry: RetryPolicy,
        topic: str,
        positions: dict[int, int],
        *,
        is_whole: bool,
    ) -> None:
        self._transport = transport
        self._retry = retry
        self._topic = topic
        self._count = len(positions)
        self._place = ",".join(f"{partition}:{at}" for partition, at in positions.items())
        # A page says nothing of partitions that were not asked for, and of one alone there is
        # nothing more to hear: its pages can be held for longer.
        self._hold_s = GROW_S if is_whole else FOLLOW_S
        self._is_whole = is_whole

    async def chunks(self) -> AsyncIterator[list[Received]]:
        loop = asyncio.get_running_loop()
        # Reading up to here may have taken long.
        look_at_s = loop.time()
        while True:
            if self._is_whole and loop.time() >= look_at_s:
                await self._grow()
                look_at_s = loop.time() + GROW_S
            query = urlencode({"positions": self._place, "timeout": self._hold_s}, safe=":,")
            path = topic_path(self._topic, "messages", query=query)
            reply = await self._transport.ask("GET", path, hold_s=self._hold_s, retry=self._retry)
            page = _page.decode(reply.body)
            self._place = page.next
            if page.messages:
                yield [message.received(self._topic) for message in page.messages]

    async def _grow(self) -> None:
        """Partitions that were added: all of their records are new."""
        reply = await self._transport.ask("GET", topic_path(self._topic), retry=self._retry)
        facts = _facts.decode(reply.body)
        for known in facts.details[self._count :]:
            self._place += f",{known.partition}:{known.start}"
        self._count = max(self._count, facts.partitions)
