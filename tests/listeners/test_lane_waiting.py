"""Dequeues that wait, and clients that do not."""

from __future__ import annotations

import json

import pytest

from listeners.http_scene import Scene, get, post, run, until
from millstream.listeners.http.lane import IDLE, LaneProtocol
from millstream.listeners.http.lane_limits import LINE_REQUESTS_MAX
from millstream.listeners.http.queue_answers import BODIES_BYTES_MAX
from millstream.process import raise_open_files

pytestmark = pytest.mark.usefixtures("short_linger")

MIB = 1024 * 1024


@pytest.mark.parametrize("way", ["close", "kill"])
def test_a_crowd_that_dies_while_it_waits_takes_nothing_along(way: str) -> None:
    # Each is here twice: as a client, and as a connection of the broker.
    size = min(1000, raise_open_files(None) // 2 - 100)

    async def scenario() -> None:
        async with Scene() as scene:
            crowd = [await scene.connect() for _ in range(size)]
            for client in crowd:
                await client.send(get("/dequeue?timeout=30"))
            queue = scene.queues.get("default")
            await until(lambda: len(queue.waiters) == size, "the crowd")
            for client in crowd:
                client.close() if way == "close" else client.kill()
            # The loop has not been told of one of them yet.
            for number in range(50):
                scene.fill("default", [b"%d" % number])
            assert scene.held("default") == [b"%d" % number for number in range(50)]
            assert not queue.waiters
            assert queue.facts().dequeued_total == 0

    run(scenario())


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("way", ["close", "kill"])
def test_outside_the_lane_too_who_dies_takes_nothing_along(way: str, is_told: bool) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            # A proxy's form of an address, which the lane passes on.
            waits = get("http://localhost/queues/default/dequeue?timeout=30&max=10")
            crowd = [await scene.connect() for _ in range(20)]
            for client in crowd:
                await client.send(waits)
            queue = scene.queues.get("default")
            await until(lambda: len(queue.waiters) == 20, "the crowd")
            assert scene.lanes[0]._running is not None
            for client in crowd:
                client.close() if way == "close" else client.kill()
            if is_told:
                await until(lambda: not queue.waiters, "that they are missed")
            for number in range(50):
                scene.fill("default", [b"%d" % number])
            await until(lambda: not scene.lanes, "the end of all")
            await until(lambda: len(queue) == 50, "what was on its way to them")
            assert scene.held("default") == [b"%d" % number for number in range(50)]
            assert len(scene.timers) == 0

    run(scenario())


def test_who_lives_is_served_though_those_before_died() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            dead = [await scene.connect() for _ in range(100)]
            for client in dead:
                await client.send(get("/queues/default/dequeue?timeout=30&max=10"))
            queue = scene.queues.get("default")
            await until(lambda: len(queue.waiters) == 100, "those who die")
            living = await scene.connect()
            await living.send(get("/dequeue?timeout=30"))
            await until(lambda: len(queue.waiters) == 101, "the one who lives")
            for client in dead:
                client.kill()
            scene.fill("default", [b"1", b"2", b"3"])
            assert (await living.answer()).body == b"1"
            assert scene.held("default") == [b"2", b"3"]

    run(scenario())


def test_an_answer_has_a_bound_in_bytes() -> None:
    async def scenario() -> None:
        async with Scene(message_bytes_max=20 * MIB) as scene:
            scene.fill("q", [b"x" * MIB] * 20)
            client = await scene.connect()
            counts = []
            while (answer := await client.ask(get("/queues/q/dequeue?max=1000"))).status == 200:
                assert len(answer.body) <= 8 * MIB
                counts.append(len(json.loads(answer.body)["messages"]))
            assert sum(counts) == 20
            scene.fill("q", [b"y" * (BODIES_BYTES_MAX + 1), b"z"])
            answer = await client.ask(get("/queues/q/dequeue?max=1000"))
            assert len(json.loads(answer.body)["messages"]) == 1
            # Also for who waited.
            await client.ask(get("/queues/q/dequeue?max=1000"))
            await client.send(get("/queues/q/dequeue?max=1000&timeout=30"))
            await until(lambda: scene.queues.get("q").waiters, "the waiter")
            scene.fill("q", [b"x" * MIB] * 20)
            assert len((await client.answer()).body) <= 8 * MIB
            assert len(scene.held("q")) > 10

    run(scenario())


def test_ten_thousand_small_requests_in_one_packet_are_answered_in_order() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client, other = await scene.connect(), await scene.connect()
            await client.send(get("/dequeue?timeout=30"))
            await until(lambda: scene.queues.get("default").waiters, "the waiter")
            requests = [
                post("/queues/q/enqueue", b'{"payload":%d}' % number) for number in range(5000)
            ]
            sending = client._loop.create_task(client.send(b"".join(requests)))
            lane = next(lane for lane in scene.lanes if lane._line)
            await until(lambda: lane.flow.read_paused, "that it is read no more")
            # A slice of what came may be in line, but no more.
            assert len(lane._line) < LINE_REQUESTS_MAX + 16 * 1024 // 60
            assert "q" not in [queue.name for queue in scene.queues]
            await other.ask(post("/enqueue", b"go"))
            assert (await client.answer()).body == b"go"
            answers = await client.answers(5000)
            await sending
            sizes = [json.loads(answer.body)["queue_size"] for answer in answers]
            assert sizes == list(range(1, 5001))

    run(scenario())


@pytest.mark.parametrize("known", [False, True])
def test_who_does_not_read_is_not_served(known: bool) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.fill("default", [b"x" * 100_000] * 1000)
            client = await scene.connect()
            count = 3 if known else 0
            for _ in range(count):
                assert (await client.ask(get("/dequeue"))).status == 200
            requests = get("/dequeue") * 1000
            await client.send(requests)
            lane = await scene.only_lane()
            await until(lambda: lane._is_write_paused, "that its answers pile up")
            kept = len(scene.held("default"))
            # What the system holds, and a little more, is on its way; the rest is still there.
            assert kept > 200
            assert lane.transport.get_write_buffer_size() < 2 * MIB
            bodies = [answer.body for answer in await client.answers(1000)]
            assert bodies == [b"x" * 100_000] * (1000 - count) + [b""] * count

    run(scenario())


def test_an_idle_connection_holds_no_body() -> None:
    async def scenario() -> None:
        async with Scene(message_bytes_max=MIB) as scene:
            client = await scene.connect()
            for path in ("/enqueue", "/queues/q/enqueue", "/queues/q/clear", "/nowhere"):
                await client.send(post(path, b"x" * 500_000)[:400_000])
                await client.send(post(path, b"x" * 500_000)[400_000:])
                await client.answer()
            lane = await scene.only_lane()
            # An answer may come before the body is there.
            await until(lambda: lane._state == IDLE, "the end of the last body")
            held = [getattr(lane, name) for name in LaneProtocol.__slots__]
            held += [*vars(lane).values()]
            assert not [one for one in held if isinstance(one, bytes) and len(one) > 1000]
            names = ("_hot", "_cold", "_running", "cycle", "scope")
            assert [getattr(lane, name) for name in names] == [None] * 5
            assert not lane._body

    run(scenario())
