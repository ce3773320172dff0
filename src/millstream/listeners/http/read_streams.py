"""Messages as a stream that does not end by itself: lines of JSON, or server-sent events.

A stream holds one helping at a time and waits until the client has read it. It ends when the
client goes away, when the topic is deleted, or when the broker stops.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NamedTuple

from millstream.engine.pending import follow
from millstream.errors import MillstreamError, TopicUnknown
from millstream.listeners.http.answers import JSON_TYPE, failure, preferred
from millstream.listeners.http.messages import encoded
from millstream.listeners.http.read_answers import (
    Positions,
    Readings,
    Wish,
    read_wish,
    write_positions,
)

if TYPE_CHECKING:
    from millstream.broker.reading import Waiting
    from millstream.broker.topics import Topic
    from millstream.listeners.http.messages import Shown
    from millstream.listeners.http.route import Call

NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
HELPING_COUNT_MAX = 1000
HELPING_BYTES_MAX = 256 * 1024
# A stream without news says that it lives; proxies cut off what is silent for a minute.
KEEP_ALIVE_S = 15.0
# Ids of events name every partition. With more than so many, only the last event of a helping has
# one: else the ids would be longer than the messages.
IDS_PARTITIONS_MAX = 32
RETRY = b"retry: 1000\n\n"


class Skipped(NamedTuple):
    partition: int
    before: int
    after: int


class Stream(NamedTuple):
    media: str
    pieces: AsyncIterator[bytes]


class Streams:
    """Makes streams. Each takes one of the places of those who wait."""

    __slots__ = ("_readings", "_runs")

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        # Those that wait for something to read.
        self._runs: set[_Run] = set()
        readings.topics.watch_partitions(self._topic_grown)

    def _topic_grown(self, topic: Topic) -> None:
        for run in self._runs:
            run.topic_grown(topic.name)

    async def open(self, call: Call, *names: str) -> Stream | None:
        """None for a client that wants one answer. What cannot be streamed is refused here,
        before the answer begins."""
        (topic,) = names
        media = preferred(call.header(b"accept").decode("latin-1"), JSON_TYPE, NDJSON, EVENTS)
        if media == JSON_TYPE:
            return None
        wish = read_wish(call, is_following=media == EVENTS)
        is_resumed = media == EVENTS and wish.resumed is not None
        if is_resumed:
            wish = wish._replace(positions=wish.resumed)
        found = self._readings.topics.get(topic)
        positions = await follow(self._readings.start(topic, wish))
        skipped = self._step(topic, positions) if is_resumed else []
        for number, offset in positions.items():
            self._readings.reader.require(topic, number, offset)
        is_foreign = wish.positions is not None and not wish.positions.is_of(found)
        is_whole = is_resumed or wish.positions is None or is_foreign
        is_whole = is_whole and wish.partition is None
        run = _Run(self._readings, self._runs, topic, wish, positions, is_whole=is_whole)
        self._readings.waits.enter(run.stop)
        return Stream(media, _events(run, skipped) if media == EVENTS else _lines(run))

    def _step(self, topic: str, positions: Positions) -> list[Skipped]:
        """A browser does not try again after an error, so one that comes back goes on where there
        is something, and hears what it missed: what was purged or is past its retention, or, past
        the end, what a crash took from a topic that does not wait for the disk."""
        skipped: list[Skipped] = []
        for number, offset in positions.items():
            start, end = self._readings.reader.offsets(topic, number)
            positions[number] = min(max(offset, start), end)
            if positions[number] != offset:
                skipped.append(Skipped(number, offset, positions[number]))
        return skipped


class _Run:
    """One reading that goes on, helping by helping."""

    __slots__ = ("_ends", "_is_stopped", "_is_whole", "_left", "_name", "_readings", "_runs",
                 "_waiting", "positions", "topic")  # fmt: skip

    def __init__(
        self,
        readings: Readings,
        runs: set[_Run],
        name: str,
        wish: Wish,
        positions: Positions,
        *,
        is_whole: bool,
    ) -> None:
        self._readings = readings
        self._runs = runs
        self._name = name
        self.topic = readings.topics.get(name)
        self.positions = positions
        # All partitions are read, those too that the topic does not have yet.
        self._is_whole = is_whole
        self._left = wish.limit
        self._grow()
        # Where to stop: what came later is not part of this reading.
        self._ends: Positions | None = None
        if not wish.is_following:
            self._ends = {n: readings.reader.offsets(name, n)[1] for n in positions}
        self._waiting: Waiting | None = None
        self._is_stopped = False

    def stop(self) -> None:
        self._is_stopped = True
        self._readings.waits.leave(self.stop)
        if self._waiting is not None:
            self._waiting.cancel()

    def topic_grown(self, name: str) -> None:
        """It may have partitions that are not read yet."""
        if name == self._name and self._waiting is not None:
            self._waiting.wake()

    async def helpings(self) -> AsyncIterator[list[Shown]]:
        """An empty one is a sign of life."""
        while not self._is_stopped and self._left != 0:
            self._look()
            part = self._part()
            count = HELPING_COUNT_MAX if self._left is None else min(HELPING_COUNT_MAX, self._left)
            messages = await follow(
                self._readings.gather(self._name, part, count, HELPING_BYTES_MAX)
            )
            if self._ends is not None:
                messages = [one for one in messages if one.offset < self._ends[one.partition]]
            if messages:
                if self._left is not None:
                    self._left -= len(messages)
                yield messages
            self.positions.update(part)
            if messages:
                continue
            if self._ends is not None:
                if not self._part():
                    return
            elif not await self._wait():
                yield []

    def _look(self) -> None:
        """Whether the topic is still the same, and has the same partitions."""
        topic = self._readings.topics.get(self._name)
        if topic.uuid != self.topic.uuid:
            raise TopicUnknown(f"topic {self._name} was deleted, and made again", topic=self._name)
        if self._ends is None:
            self._grow()

    def _grow(self) -> None:
        """Partitions that were added: all of their records are new."""
        topic = self._readings.topics.get(self._name)
        if self._is_whole and len(self.positions) < topic.partitions:
            for number in set(range(topic.partitions)).difference(self.positions):
                self.positions[number] = self._readings.reader.offsets(self._name, number)[0]

    def _part(self) -> Positions:
        """What is still to be read."""
        ends = self._ends
        if ends is None:
            return dict(self.positions)
        return {n: offset for n, offset in self.positions.items() if offset < ends[n]}

    async def _wait(self) -> bool:
        """Whether something came before it was time for a sign of life."""
        topic = self._readings.topics.get(self._name)
        if self._is_stopped or (self._is_whole and len(self.positions) < topic.partitions):
            return True
        self._waiting = self._readings.reader.wait(self._name, self.positions, KEEP_ALIVE_S)
        self._runs.add(self)
        try:
            return await self._waiting.pending or self._is_stopped
        finally:
            self._runs.discard(self)
            self._waiting.cancel()


async def _lines(run: _Run) -> AsyncIterator[bytes]:
    try:
        async for messages in run.helpings():
            yield b"".join([encoded(one) + b"\n" for one in messages]) or b"\n"
    except MillstreamError as error:
        yield failure(error).body + b"\n"
    finally:
        run.stop()


async def _events(run: _Run, skipped: list[Skipped]) -> AsyncIterator[bytes]:
    try:
        yield RETRY + _skips(skipped, run)
        async for messages in run.helpings():
            yield _helping(run.topic, messages, dict(run.positions)) or b":\n\n"
    except MillstreamError as error:
        yield b"event: error\ndata: %b\n\n" % failure(error).body
    finally:
        run.stop()


def _skips(skipped: list[Skipped], run: _Run) -> bytes:
    """The last one has an id, so that who comes back again does not hear it again."""
    if not skipped:
        return b""
    events = [
        b'event: skipped\ndata: {"partition":%d,"from":%d,"to":%d}\n' % one for one in skipped
    ]
    id = b"id: %b\n\n" % write_positions(run.topic, run.positions).encode()
    return b"\n".join(events) + id


def _helping(topic: Topic, messages: list[Shown], positions: Positions) -> bytes:
    """Events with ids; `positions` are those before them."""
    pieces: list[bytes] = []
    is_short = len(positions) <= IDS_PARTITIONS_MAX
    for at, message in enumerate(messages, 1):
        positions[message.partition] = message.offset + 1
        if is_short or at == len(messages):
            pieces.append(b"id: %b\n" % write_positions(topic, positions).encode())
        pieces.append(b"data: %b\n\n" % encoded(message))
    return b"".join(pieces)
