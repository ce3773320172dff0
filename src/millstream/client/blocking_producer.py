"""The blocking face of the producer: many records are handed over at a time, so that a record costs
no switch of threads."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import NamedTuple, Self, TypeAlias

from millstream.client.batches import RECORD_OVERHEAD_BYTES, Delivery
from millstream.client.producer import Producer, ProducerStatistics
from millstream.client.threads import LoopThread
from millstream.client.values import Encoded, HeaderMap, Key, Place, Value, encode_value
from millstream.errors import ClientClosed

# What may wait between the threads: a few batches, so that neither waits for the other.
HAND_OVER_BYTES = 2 * 2**20
SLICE = 200


class BlockingDelivery:
    """A record on its way. `result` waits for its place; an error says why it has none."""

    __slots__ = ("_error", "_inner", "_news")

    def __init__(self, news: threading.Condition) -> None:
        self._news = news
        self._inner: Delivery | None = None
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether there is a report."""
        return self._error is not None or (self._inner is not None and self._inner.done())

    def result(self, timeout_s: float | None = None) -> Place:
        """The place, or the error raised; TimeoutError when there is no report in time."""
        error = self.exception(timeout_s)
        if error is not None:
            raise error
        assert self._inner is not None
        return self._inner.result()

    def exception(self, timeout_s: float | None = None) -> Exception | None:
        if not self.done():
            with self._news:
                if not self._news.wait_for(self.done, timeout_s):
                    raise TimeoutError("there is no report yet")
        return self._error or (self._inner.exception() if self._inner is not None else None)

    def settle(self, inner: Delivery | None, error: Exception | None) -> None:
        """For the producer: it was taken, or refused at once."""
        self._inner, self._error = inner, error


class BlockingProducer:
    """As `Producer`; any thread may send."""

    def __init__(self, thread: LoopThread, inner: Producer) -> None:
        self.thread = thread
        self.inner = inner
        self._room = threading.Condition(threading.Lock())
        self._news = threading.Condition(threading.Lock())
        self._handed: list[_Handed] = []
        self._handed_bytes = 0
        self._is_closed = False
        # Whether the loop is on its way through what was handed over.
        self._is_pumping = False
        inner.on_reports = self._tell

    def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Key = None,
        headers: HeaderMap | None = None,
        timestamp_ms: int | None = None,
        partition: int | None = None,
        lane: str | int | None = None,
    ) -> BlockingDelivery:
        """Take a record, waiting while there is no room."""
        encoded = Encoded(*encode_value(value))
        delivery = BlockingDelivery(self._news)
        size = RECORD_OVERHEAD_BYTES + len(encoded.data or b"")
        given = (key, headers, timestamp_ms, partition, lane)
        self._hand_over(_Handed(topic, encoded, given, size, delivery))
        return delivery

    def flush(self) -> None:
        """Wait until all that was sent has its report."""
        self._mark().exception()
        self.thread.run(self.inner.flush())

    def close(self, *, timeout_s: float | None = None) -> None:
        """Deliver what was sent, and take no more."""
        with self._room:
            if self._is_closed:
                return
        with suppress(TimeoutError):
            self._mark(is_last=True).exception(timeout_s)
        self.thread.run(self.inner.close(timeout_s=timeout_s))

    def statistics(self) -> ProducerStatistics:
        return self.inner.statistics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark(self, *, is_last: bool = False) -> BlockingDelivery:
        """It is done, with an error that nobody reads, when all before it were taken."""
        mark = BlockingDelivery(self._news)
        self._hand_over(_Handed(None, Encoded(None, ()), _NOTHING, 0, mark), is_last=is_last)
        return mark

    def _hand_over(self, one: _Handed, *, is_last: bool = False) -> None:
        with self._room:
            while self._handed_bytes and self._handed_bytes + one.size > HAND_OVER_BYTES:
                self._room.wait()
            if self._is_closed or not self.thread.is_running:
                raise ClientClosed("this producer was closed; make another")
            self._is_closed = is_last
            self._handed_bytes += one.size
            self._handed.append(one)
            is_idle, self._is_pumping = not self._is_pumping, True
        if is_idle:
            asyncio.run_coroutine_threadsafe(self._pump(), self.thread.loop)

    async def _pump(self) -> None:
        """Give records to the producer until there are none."""
        while True:
            with self._room:
                handed, self._handed = self._handed, []
                if not handed:
                    self._is_pumping = False
                    return
            for start in range(0, len(handed), SLICE):
                part = handed[start : start + SLICE]
                for one in part:
                    await self._give(one)
                with self._room:
                    self._handed_bytes -= sum(one.size for one in part)
                    self._room.notify_all()

    async def _give(self, one: _Handed) -> None:
        if one.topic is None:
            one.delivery.settle(None, ClientClosed("a mark"))
            self._tell()
            return
        key, headers, timestamp_ms, partition, lane = one.given
        try:
            inner = await self.inner.send(
                one.topic,
                one.value,
                key=key,
                headers=headers,
                timestamp_ms=timestamp_ms,
                partition=partition,
                lane=lane,
            )
        except Exception as error:  # noqa: BLE001  it is the record's report
            one.delivery.settle(None, error)
            self._tell()
        else:
            one.delivery.settle(inner, None)

    def _tell(self) -> None:
        with self._news:
            self._news.notify_all()


_Given: TypeAlias = tuple[Key, HeaderMap | None, int | None, int | None, str | int | None]
_NOTHING: _Given = (None, None, None, None, None)


class _Handed(NamedTuple):
    """A record between the threads; without a topic a mark that all before it have passed."""

    topic: str | None
    value: Encoded
    given: _Given
    size: int
    delivery: BlockingDelivery
