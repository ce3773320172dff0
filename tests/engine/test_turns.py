"""The end of a turn: what gathers, and what gathers that again, before anything else is read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.scheduler import LoopScheduler
from millstream.engine.turns import STAGES, LoopTurns
from millstream.log.disk import SystemDisk

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def in_loop(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def run(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(scenario, 30))

    return run


def test_stages_of_one_turn_come_before_what_is_read_next(
    in_loop: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        turns, seen = LoopTurns(loop), []
        near, far = socket.socketpair()
        near.setblocking(False)
        done = loop.create_future()

        def stage(number: int) -> None:
            seen.append(f"stage {number}")
            if number == 0:
                # There is something to read from now on.
                far.send(b"x")
            if number < STAGES:
                turns.at_end(lambda: stage(number + 1))
            else:
                done.set_result(None)

        def read() -> None:
            loop.remove_reader(near)
            seen.append("read")

        loop.add_reader(near, read)
        turns.at_end(lambda: stage(0))
        await done
        assert seen[:STAGES] == [f"stage {number}" for number in range(STAGES)]
        # One stage more than fit waits for the next turn, as the socket does: neither for ever.
        assert sorted(seen[STAGES:]) == ["read", f"stage {STAGES}"]
        near.close()
        far.close()

    in_loop(scenario())


def test_all_that_is_asked_for_at_one_stage_is_done_before_the_next(
    in_loop: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        turns, seen = LoopTurns(asyncio.get_running_loop()), []
        done = asyncio.get_running_loop().create_future()
        turns.at_end(lambda: seen.append("a"))
        turns.at_end(lambda: turns.at_end(lambda: seen.append("c")))
        turns.at_end(lambda: turns.at_end(lambda: done.set_result(None)))
        turns.at_end(lambda: seen.append("b"))
        await done
        assert seen == ["a", "b", "c"]

    in_loop(scenario())


def _fail() -> None:
    raise ZeroDivisionError


def _cancel() -> None:
    raise asyncio.CancelledError


def test_one_that_fails_is_told_of_and_keeps_no_other_from_its_turn(
    in_loop: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        turns, errors = LoopTurns(loop), []
        loop.set_exception_handler(lambda _, said: errors.append(said["exception"]))
        for again in range(2):
            done = loop.create_future()
            turns.at_end(_fail)
            turns.at_end(_cancel)
            turns.at_end(lambda done=done: done.set_result(None))  # type: ignore[misc]
            await done
            both = [ZeroDivisionError, asyncio.CancelledError]
            assert [type(one) for one in errors] == both * (again + 1)

    in_loop(scenario())


def test_an_engine_ends_its_turn_with_those_who_gather_for_it(tmp_path: Any) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        turns = LoopTurns(loop)
        engine = LocalEngine(
            SystemDisk(), str(tmp_path), SystemClock(), LocalOptions(), turns=turns
        )
        await engine.start()
        try:
            own = LoopScheduler(loop, turns)
            scheduler: Any = engine._scheduler
            assert own.at_end == scheduler.at_end == turns.at_end
            await own.close()
        finally:
            await engine.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
