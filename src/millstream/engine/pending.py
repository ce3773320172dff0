"""A result that comes later: with callbacks, and without a task.

An asyncio future schedules a call for each of its callbacks; on a hot path that is a third of
the cost of a request. A `Pending` runs them where it completes. It can be awaited too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar, cast

import structlog

T = TypeVar("T")
_UNSET = object()


class Pending(Generic[T]):
    __slots__ = ("_callback", "_error", "_more", "_value")

    def __init__(self) -> None:
        self._value: object = _UNSET
        self._error: BaseException | None = None
        # Nearly always there is one callback, so only others need a list.
        self._callback: Callable[[Pending[T]], None] | None = None
        self._more: list[Callable[[Pending[T]], None]] | None = None

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

    def _call(self, callback: Callable[[Pending[T]], None]) -> None:
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


def follow(steps: Generator[Pending[Any], Any, T]) -> Pending[T]:
    """Run a generator that yields what it waits for: a coroutine without a task.

    It runs up to its first wait at once, and goes on where that is done. An error of what it
    waits for is raised inside it.
    """
    outcome: Pending[T] = Pending()
    _advance(steps, outcome, None)
    return outcome


def _advance(
    steps: Generator[Pending[Any], Any, T], outcome: Pending[T], done: Pending[Any] | None
) -> None:
    # What is done already is taken here, not in a callback: many of them must not nest.
    while done is None or done.is_done:
        try:
            if done is None:
                done = next(steps)
            elif done.error is not None:
                done = steps.throw(done.error)
            else:
                done = steps.send(done.result())
        except StopIteration as end:
            outcome.succeed(end.value)
            return
        except Exception as error:  # noqa: BLE001  whoever waits for the outcome gets it
            outcome.fail(error)
            return
    done.then(lambda one: _advance(steps, outcome, one))
