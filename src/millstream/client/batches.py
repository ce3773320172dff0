"""Records that go together, and what became of each.

A record's report is worked out when somebody asks for it: what is stored for it is its batch and
its number in it. That makes a report cost next to nothing until then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from millstream.client.values import Place
from millstream.errors import MillstreamError
from millstream.wire.batches import Fields

# What a record costs beside its bytes while it waits: its future, its fields, its header.
RECORD_OVERHEAD_BYTES = 100


class Delivery:
    """A record on its way. Await it for its place; an error says why it has none."""

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def __await__(self) -> Generator[Any, None, Place]:
        batch = self._batch
        if not batch.done.done():
            # Shielded: whoever waits for one record must not cancel the others' reports.
            yield from asyncio.shield(batch.done).__await__()
        return batch.report(self._index)

    def done(self) -> bool:
        """Whether there is a report."""
        return self._batch.is_done

    def result(self) -> Place:
        """The place, or the error raised; asyncio.InvalidStateError when there is no report yet."""
        self._require_report()
        return self._batch.report(self._index)

    def exception(self) -> MillstreamError | None:
        self._require_report()
        return self._batch.error_of(self._index)

    def _require_report(self) -> None:
        if not self._batch.is_done:
            raise asyncio.InvalidStateError("there is no report yet")


class Batch:
    """Records that go together."""

    __slots__ = (
        "_moved",
        "_parts",
        "_targets",
        "done",
        "error",
        "is_doubtful",
        "key",
        "named",
        "offset",
        "partition",
        "partitions",
        "places",
        "records",
        "size",
        "timer",
        "timestamp_ms",
        "tries",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, timestamp_ms: int) -> None:
        self.records: list[Fields] = []
        self.size = 0
        # What records get that come without a time: they are at most a linger apart.
        self.timestamp_ms = timestamp_ms
        self.done: asyncio.Future[None] = loop.create_future()
        self.timer: asyncio.TimerHandle | None = None
        self.tries = 0
        # Whether a try may have been stored without our knowing.
        self.is_doubtful = False
        # When it goes as JSON: what a broker recognises it by, the partitions that were named, and
        # the places that were answered.
        self.key = ""
        self.partitions: list[int | None] = []
        self.places: list[Place] | None = None
        # When it goes to a partition: which of its records named that one.
        self.named: list[int] = []
        # Where its first record is, or why it is nowhere.
        self.partition = -1
        self.offset = -1
        self.error: MillstreamError | None = None
        self._parts: tuple[Batch, Batch] | None = None
        # When its records were placed anew: where each went, and the batches that they are in.
        self._moved: list[Delivery] | None = None
        self._targets: list[Batch] = []

    @property
    def is_done(self) -> bool:
        if self._parts is not None:
            return self._parts[0].is_done and self._parts[1].is_done
        if self._moved is not None:
            return all(batch.is_done for batch in self._targets)
        return self.done.done()

    def report(self, index: int) -> Place:
        if self._parts is not None:
            first, second = self._parts
            count = len(first.records)
            return first.report(index) if index < count else second.report(index - count)
        if self._moved is not None:
            return self._moved[index].result()
        if self.error is not None:
            raise self.error
        if self.places is not None:
            return self.places[index]
        offset = self.offset if self.offset < 0 else self.offset + index
        return Place(self.partition, offset, self.records[index][0])

    def error_of(self, index: int) -> MillstreamError | None:
        if self._parts is not None:
            first, second = self._parts
            count = len(first.records)
            return first.error_of(index) if index < count else second.error_of(index - count)
        if self._moved is not None:
            return self._moved[index].exception()
        return self.error

    def split(self, loop: asyncio.AbstractEventLoop) -> tuple[Batch, Batch]:
        """Two batches of its records; it is done when they are."""
        middle = len(self.records) // 2
        first, second = Batch(loop, self.timestamp_ms), Batch(loop, self.timestamp_ms)
        first.records, second.records = self.records[:middle], self.records[middle:]
        first.partitions = self.partitions[:middle]
        second.partitions = self.partitions[middle:]
        first.named = [index for index in self.named if index < middle]
        second.named = [index - middle for index in self.named if index >= middle]
        first.size = self.size // 2
        second.size = self.size - first.size
        self._parts = (first, second)

        # The second is the last to go.
        def finish(_: asyncio.Future[None]) -> None:
            if not self.done.done():
                self.done.set_result(None)

        second.done.add_done_callback(finish)
        return first, second

    def move(self, place: Callable[[Fields, bool], Delivery]) -> None:
        """Each record goes into another batch, where `place` puts it, told whether it named its
        partition. This one is done when those are."""
        named = frozenset(self.named)
        moved = [place(record, index in named) for index, record in enumerate(self.records)]
        # In the order of records, and each once.
        self._targets = list(dict.fromkeys(delivery._batch for delivery in moved))
        self._moved = moved

        def finish(_: asyncio.Future[None]) -> None:
            if self.is_done and not self.done.done():
                self.done.set_result(None)

        for batch in self._targets:
            batch.done.add_done_callback(finish)


def size_of(record: Fields) -> int:
    """What a record takes in a batch, and in a producer's buffer."""
    _, key, value, headers = record
    size = RECORD_OVERHEAD_BYTES + len(key or b"") + len(value or b"")
    return size + sum(len(name) + len(text or b"") for name, text in headers)
