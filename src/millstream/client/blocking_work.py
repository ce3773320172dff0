"""The blocking face of work queues."""

from __future__ import annotations

from typing import Any, Self

from millstream.client.leases import Leased
from millstream.client.threads import LoopThread, blocking, next_of
from millstream.client.work import Work, WorkStatistics


class BlockingLeased:
    """As `Leased`: a record that is yours until its lease runs out."""

    __slots__ = ("inner", "thread")

    def __init__(self, thread: LoopThread, inner: Leased) -> None:
        self.thread = thread
        self.inner = inner

    ack = blocking(Leased.ack)
    nack = blocking(Leased.nack)
    reject = blocking(Leased.reject)
    release = blocking(Leased.release)
    extend = blocking(Leased.extend)

    def __repr__(self) -> str:
        return repr(self.inner)

    @property
    def topic(self) -> str:
        return self.inner.topic

    @property
    def partition(self) -> int:
        return self.inner.partition

    @property
    def offset(self) -> int:
        return self.inner.offset

    @property
    def timestamp_ms(self) -> int:
        return self.inner.timestamp_ms

    @property
    def key(self) -> bytes | None:
        return self.inner.key

    @property
    def value(self) -> bytes | None:
        return self.inner.value

    @property
    def headers(self) -> tuple[tuple[str, bytes | None], ...]:
        return self.inner.headers

    @property
    def is_json(self) -> bool:
        return self.inner.is_json

    @property
    def lane(self) -> str:
        return self.inner.lane

    @property
    def deliveries(self) -> int:
        return self.inner.deliveries

    @property
    def receipt(self) -> str:
        return self.inner.receipt

    @property
    def text(self) -> str:
        return self.inner.text

    def json(self) -> Any:
        return self.inner.json()


class BlockingWork:
    """As `Work`: a context manager, and an iterator of leased messages."""

    def __init__(self, thread: LoopThread, inner: Work) -> None:
        self.thread = thread
        self.inner = inner

    stop = blocking(Work.stop)
    close = blocking(Work.close)

    def take(self, timeout_s: float | None = None) -> BlockingLeased | None:
        message = self.thread.run(self.inner.take(timeout_s))
        return None if message is None else BlockingLeased(self.thread, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BlockingLeased:
        return BlockingLeased(self.thread, next_of(self.thread, self.inner))

    def statistics(self) -> WorkStatistics:
        return self.inner.statistics()
