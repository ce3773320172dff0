"""A result that comes later: with callbacks, and without a task.

An asyncio future schedules a call for each of its callbacks; on a hot path that is a third of
the cost of a request. A `Pending` runs them where it completes. It can be awaited too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Generic, TypeVar, cast

import structlog

T = TypeVar("T")
_UNSET = object()


class Pending(Generic[T]):
    __slots__ = ("_callbacks", "_error", "_value")

    def __init__(self) -> None:
        self._value: object = _UNSET
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Pending[T]], None]] | None = None

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

    def then(self, callback: Callable[[Pending[T]], None]) -> None:
        """Call when done; at once when it is done already."""
        if self.is_done:
            self._call(callback)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    def succeed(self, value: T) -> None:
        """The first outcome counts: a wait that was cancelled may still be woken."""
        if not self.is_done:
            self._value = value
            self._run()

    def fail(self, error: BaseException) -> None:
        if not self.is_done:
            self._error = error
            self._run()

    def _run(self) -> None:
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            self._call(callback)

    def _call(self, callback: Callable[[Pending[T]], None]) -> None:
        """A callback that fails is its owner's business: who completes this one goes on."""
        try:
            callback(self)
        except Exception:  # noqa: BLE001
            structlog.get_logger("millstream.engine").exception("a callback failed")

    def __await__(self) -> Generator[object, None, T]:
        if not self.is_done:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.then(lambda _: None if future.done() else future.set_result(None))
            yield from future
        return self.result()
