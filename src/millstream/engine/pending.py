"""A result that comes later: with callbacks, and without a task.

An asyncio future schedules a call for each of its callbacks; on a hot path that is a third of
the cost of a request. A `Pending` runs them where it completes. It can be awaited too.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from millstream.engine.appends import Pending

__all__ = ["Pending", "follow"]

T = TypeVar("T")


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
