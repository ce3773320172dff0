"""What group commit does for every append, in Python; `_appends.pyx` is the compiled twin."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import structlog

if TYPE_CHECKING:
    from typing import TypeAlias

    from millstream.engine.operations import Atomic, Note
    from millstream.log.batch import Data, Header
    from millstream.log.partition import Partition
    from millstream.log.placing import Mark, Placed

    Operation: TypeAlias = "Append | Atomic | Note"

T = TypeVar("T")
_UNSET = object()


class Pending(Generic[T]):
    """A result that is not there yet; `pending.py` says why."""

    __slots__ = ("_callback", "_error", "_more", "_value")

    def __init__(self) -> None:
        self._value: object = _UNSET
        self._error: BaseException | None = None
        # Nearly always there is one callback, so only others need a list.
        self._callback: Callable[[Pending[T]], object] | None = None
        self._more: list[Callable[[Pending[T]], object]] | None = None

    @classmethod
    def of(cls, value: T) -> Pending[T]:
        pending = cls()
        pending._value = value
        return pending

    @classmethod
    def failed(cls, error: BaseException) -> Pending[T]:
        pending = cls()
        pending._error = error
        return pending

    @property
    def is_done(self) -> bool:
        return self._value is not _UNSET or self._error is not None

    @property
    def error(self) -> BaseException | None:
        return self._error

    def result(self) -> T:
        """The value; raises the error if it failed."""
        if self._error is not None:
            raise self._error
        assert self._value is not _UNSET, "the result is not there yet"
        return cast("T", self._value)

    def then(self, callback: Callable[[Pending[T]], object]) -> None:
        """Call when done; at once when it is done already."""
        if self._value is not _UNSET or self._error is not None:
            self._call(callback)
        elif self._callback is None:
            self._callback = callback
        elif self._more is None:
            self._more = [callback]
        else:
            self._more.append(callback)

    def succeed(self, value: T) -> None:
        """The first outcome counts: a wait that was cancelled may still be woken."""
        if self._value is _UNSET and self._error is None:
            self._value = value
            if self._callback is not None:
                self._call(self._callback)

    def fail(self, error: BaseException) -> None:
        if self._value is _UNSET and self._error is None:
            self._error = error
            if self._callback is not None:
                self._call(self._callback)

    def _call(self, callback: Callable[[Pending[T]], object]) -> None:
        """A callback that fails is its owner's business: who completes this one goes on."""
        more = self._more
        self._callback = self._more = None
        try:
            callback(self)
        except Exception:  # noqa: BLE001
            structlog.get_logger("millstream.engine").exception("a callback failed")
        if more is not None:
            for other in more:
                self._call(other)

    def __await__(self) -> Generator[object, None, T]:
        if not self.is_done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if future.done() else future.set_result(None))
            yield from future
        return self.result()


class Append:
    """One batch for one partition."""

    __slots__ = ("data", "header", "offset", "partition", "pending", "size")

    def __init__(self, partition: Partition, data: Data, header: Header) -> None:
        self.partition = partition
        self.data = data
        self.header = header
        self.size = len(data)
        self.pending: Pending[int] = Pending()
        self.offset = -1

    def partitions(self) -> Iterable[Partition]:
        return (self.partition,)

    def succeed(self) -> None:
        self.pending.succeed(self.offset)

    def fail(self, error: BaseException) -> None:
        self.pending.fail(error)


def queue(turn: list[Operation], queued: deque[Operation]) -> int:
    """Let the first operations of a turn wait for a round, as long as they are appends that do;
    answers how many."""
    for at, operation in enumerate(turn):
        if type(operation) is not Append:
            return at
        partition = operation.partition
        if partition.settings.fsync != "every" and not partition.queued:
            return at
        partition.queued += 1
        queued.append(operation)
    return len(turn)


def size_of(operations: list[Operation]) -> int:
    return sum([operation.size for operation in operations])


def largest_of(operations: list[Operation]) -> int:
    """The size of the largest append among them."""
    return max((operation.size for operation in operations if type(operation) is Append), default=0)


def place(
    operations: list[Operation],
    first: int,
    now_ms: int,
    marks: dict[Partition, Mark],
    *,
    journalled: dict[Partition, list[Placed]],
    entries: list[Placed | bytes | memoryview],
) -> int:
    """Give their places to operations from `first` on, all of them for the journal, as far as
    `End.place` does that; answers which is the first that needs more."""
    for at in range(first, len(operations)):
        one = operations[at]
        if type(one) is not Append:
            return at
        partition = one.partition
        mark = partition.mark()
        placed = partition.place(one.data, one.header, now_ms)
        if placed is None:
            return at
        marks.setdefault(partition, mark)
        one.offset = placed.base_offset
        journalled.setdefault(partition, []).append(placed)
        entries.append(placed)
    return len(operations)


def advance(journalled: dict[Partition, list[Placed]], unapplied: dict[Partition, None]) -> None:
    """A round is durable: readers may see what is in it, and it waits for its segments."""
    for partition, placed in journalled.items():
        partition.unapplied += placed
        unapplied[partition] = None
        partition.settle()
        partition.advance(placed[-1])


def answer(operations: list[Operation], first: int) -> int:
    """Answer operations from `first` on, as long as they are appends; answers which is not."""
    end = first
    while end < len(operations):
        operation = operations[end]
        if type(operation) is not Append:
            break
        operation.partition.queued -= 1
        end += 1
    for at in range(first, end):
        operations[at].succeed()
    return end
