"""The end of a broker, as its clients see it: what they asked is answered, then they are let go."""

from __future__ import annotations

import asyncio

import pytest

from listeners.http_scene import PATIENCE_S, Scene, get, post, run, until

HOT = post("/enqueue", b"hello world")
COLD = (
    b"PUT /queues/q HTTP/1.1\r\nhost: localhost\r\ncontent-length: 14\r\n\r\n" + b'{"capacity":5}'
)


def stopping(scene: Scene) -> asyncio.Task[None]:
    scene.lane.drain()
    return asyncio.create_task(scene.listener.stop(PATIENCE_S))


def test_an_answer_that_was_just_given_is_still_sent() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for _ in range(3):
                await client.ask(HOT)
            client.socket.send(HOT + HOT)
            await until(lambda: len(scene.held("default")) == 5, "the messages")
            await stopping(scene)
            assert [one.status for one in await client.answers(2)] == [202, 202]
            assert await client.rest() == b""

    run(scenario())


@pytest.mark.parametrize("request_", [HOT, COLD, get("/dequeue"), get("/livez")])
def test_what_lies_unread_in_the_system_is_answered(request_: bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.ask(get("/livez"))
            client.socket.send(request_)
            # The loop does not get to see it before the stop.
            scene.lane.drain()
            await scene.listener.stop(PATIENCE_S)
            answer = await client.answer()
            assert answer.status in (200, 202, 204)
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""

    run(scenario())


@pytest.mark.parametrize("request_", [HOT, COLD, get("/dequeue"), get("/livez")])
@pytest.mark.parametrize("missing", [1, 5, 30])
def test_what_is_on_its_way_is_answered(request_: bytes, missing: int) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.send(request_[:-missing])
            lane = await scene.only_lane()
            await until(lambda: lane._state, "the first part")
            ending = stopping(scene)
            await asyncio.sleep(0)
            await client.send(request_[-missing:])
            answer = await client.answer()
            assert answer.status in (200, 202, 204)
            assert answer.headers["connection"] == "close"
            assert await client.rest() == b""
            await ending

    run(scenario())


@pytest.mark.parametrize("is_hot", [True, False])
def test_a_waiting_dequeue_ends_with_nothing(is_hot: bool) -> None:
    async def scenario() -> None:
        async with Scene(lane_of=lambda lane: lane if is_hot else None) as scene:
            clients = [await scene.connect() for _ in range(5)]
            for client in clients:
                await client.send(get("/dequeue?timeout=30"))
            queue = scene.queues.get("default")
            await until(lambda: len(queue.waiters) == 5, "the waiters")
            ending = stopping(scene)
            for client in clients:
                assert (await client.answer()).status == 204
                assert await client.rest() == b""
            await ending
            assert not queue.waiters

    run(scenario())


def test_nobody_begins_to_wait_while_the_broker_stops() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.ask(get("/dequeue"))
            scene.lane.drain()
            for _ in range(3):
                assert (await client.ask(get("/dequeue?timeout=30"))).status == 204
            assert (await client.ask(get("/queues/default/dequeue?timeout=30"))).status == 204

    run(scenario())


def test_requests_in_line_are_answered_in_order() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.send(
                get("/dequeue?timeout=30") + HOT + get("/livez") + get("/dequeue") + COLD[:-3]
            )
            lane = await scene.only_lane()
            await until(lambda: len(lane._line) == 5, "the line")
            ending = stopping(scene)
            await client.send(COLD[-3:])
            answers = await client.answers(5)
            assert [one.status for one in answers] == [204, 202, 200, 200, 200]
            assert answers[3].body == b"hello world"
            closing = ["connection" in one.headers for one in answers]
            assert closing == [False, False, False, False, True]
            assert await client.rest() == b""
            await ending

    run(scenario())


def test_idle_connections_are_let_go() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            clients = [await scene.connect() for _ in range(20)]
            for client in clients[:10]:
                await client.ask(get("/livez"))
                await client.ask(get("/dequeue"))
            await until(lambda: len(scene.lanes) == 20, "the connections")
            await stopping(scene)
            for client in clients:
                assert await client.rest() == b""

    run(scenario())


def test_what_does_not_come_is_cut_off_within_the_bound() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            clients = [await scene.connect() for _ in range(3)]
            for client, part in zip(clients, (HOT[:-1], COLD[:-1], HOT[:5]), strict=True):
                await client.send(part)
            await until(lambda: [one._state for one in scene.lanes].count(0) == 0, "the parts")
            scene.lane.drain()
            await scene.listener.stop(0.2)
            for client in clients:
                assert await client.rest() == b""
            await until(lambda: not scene.lanes, "the end")

    run(scenario())
