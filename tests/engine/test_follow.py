"""Generators that wait for pendings: coroutines without a task."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from millstream.engine.pending import Pending, follow
from millstream.errors import DiskFull


def test_it_runs_to_its_first_wait_at_once_and_on_from_there() -> None:
    first: Pending[int] = Pending()
    second: Pending[int] = Pending()
    seen: list[str] = []

    def steps() -> Generator[Pending[Any], Any, int]:
        seen.append("begun")
        one = yield first
        seen.append("between")
        two = yield second
        return int(one + two)

    outcome = follow(steps())
    assert seen == ["begun"]
    first.succeed(1)
    assert seen == ["begun", "between"]
    assert not outcome.is_done
    second.succeed(2)
    assert outcome.result() == 3


def test_what_is_done_already_does_not_nest() -> None:
    def steps() -> Generator[Pending[Any], Any, int]:
        total = 0
        for _ in range(100_000):
            total += yield Pending.of(1)
        return total

    assert follow(steps()).result() == 100_000


def test_an_error_is_raised_inside_and_may_be_caught() -> None:
    failing: Pending[None] = Pending()

    def steps() -> Generator[Pending[Any], Any, str]:
        try:
            yield failing
        except DiskFull:
            return "caught"
        return "not"

    outcome = follow(steps())
    failing.fail(DiskFull("full"))
    assert outcome.result() == "caught"


def test_an_error_that_nobody_catches_is_the_outcome() -> None:
    def steps() -> Generator[Pending[Any], Any, None]:
        yield Pending.failed(DiskFull("full"))

    def broken() -> Generator[Pending[Any], Any, None]:
        yield Pending.of(None)
        raise ZeroDivisionError

    assert isinstance(follow(steps()).error, DiskFull)
    with pytest.raises(ZeroDivisionError):
        follow(broken()).result()
