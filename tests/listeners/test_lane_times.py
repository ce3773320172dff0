"""Clients that take for ever. The time is told to `sweep`; nobody waits for it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from listeners.http_scene import Client, Scene, get, post, run, until
from millstream.listeners.http.lane import LaneProtocol
from millstream.listeners.http.lane_limits import (
    BODY_BYTES_PER_S_MIN,
    BODY_S_MAX,
    HEAD_S_MAX,
    UNREAD_S_MAX,
)
from millstream.listeners.http.listener import KEEP_ALIVE_SECONDS

pytestmark = pytest.mark.usefixtures("short_linger")

HOT = b"POST /enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"
COLD = b"PUT /queues/q HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n"


def sweep(lane: LaneProtocol, later_s: float) -> None:
    lane.sweep(lane.loop.time() + later_s, KEEP_ALIVE_SECONDS)


async def trickle(client: Client, lane: LaneProtocol, data: bytes) -> None:
    """Byte for byte, each of them read before the next is sent."""
    for at in range(len(data)):
        before = lane._head_bytes + lane._body_bytes
        await client.send(data[at : at + 1])
        await until(partial(has_read_more, lane, before), "a byte")


def has_read_more(lane: LaneProtocol, before: int) -> bool:
    return lane._head_bytes + lane._body_bytes != before


def test_a_fresh_connection_has_time_to_say_something() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            lane = await scene.only_lane()
            sweep(lane, KEEP_ALIVE_SECONDS - 5)
            assert (await client.ask(get("/dequeue"))).status == 204
            sweep(lane, 0)
            sweep(lane, KEEP_ALIVE_SECONDS + 1)
            assert await client.rest() == b""

    run(scenario())


def test_a_head_that_trickles_ends_in_time() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            lane = await scene.only_lane()
            await trickle(client, lane, b"GET /deq")
            sweep(lane, HEAD_S_MAX - 1)
            began = lane._since
            await trickle(client, lane, b"ueue HTTP/1.1\r\nhost: ")
            # The last byte does not count, the first does.
            assert lane._since == began
            sweep(lane, HEAD_S_MAX + 1)
            answer = await client.answer()
            assert (answer.status, json.loads(answer.body)["error"]) == (408, "too_slow")
            assert await client.rest() == b""

    run(scenario())


@pytest.mark.parametrize("head", [HOT, COLD])
def test_a_body_that_trickles_ends_in_time(head: bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.send(head)
            lane = await scene.only_lane()
            await trickle(client, lane, b"xxxxx")
            sweep(lane, BODY_S_MAX - 1)
            sweep(lane, BODY_S_MAX + 1)
            assert (await client.answer()).status == 408
            assert await client.rest() == b""
            assert scene.held("default") == []

    run(scenario())


def test_a_body_that_gets_on_has_more_time() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.send(HOT, b"x" * 50_000)
            lane = await scene.only_lane()
            await until(lambda: lane._body_bytes == 50_000, "half of the body")
            sweep(lane, BODY_S_MAX + 50_000 / BODY_BYTES_PER_S_MIN - 1)
            await client.send(b"x" * 50_000)
            assert (await client.answer()).status == 202

    run(scenario())


def test_the_metrics_port_has_the_same_limits() -> None:
    async def scenario() -> None:
        async with Scene(lane_of=lambda _: None) as scene:
            client = await scene.connect()
            lane = await scene.only_lane()
            assert (await client.ask(get("/livez"))).status == 200
            await trickle(client, lane, b"GET /")
            sweep(lane, HEAD_S_MAX + 1)
            assert (await client.answer()).status == 408
            large = await scene.connect()
            head = b"POST /clear HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n"
            assert (await large.ask(head)).status == 413

    run(scenario())


def test_who_waits_or_works_is_not_idle() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await client.send(get("/dequeue?timeout=30"))
            lane = await scene.only_lane()
            await until(lambda: lane._line, "the waiter")
            sweep(lane, 0)
            sweep(lane, 10 * KEEP_ALIVE_SECONDS)
            other = await scene.connect()
            await other.ask(post("/enqueue", b"x"))
            assert (await client.answer()).body == b"x"

    run(scenario())


def test_who_does_not_read_its_answers_is_cut_off() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            scene.fill("default", [b"x" * 100_000] * 1000)
            client = await scene.connect()
            await client.send(get("/dequeue") * 1000)
            lane = await scene.only_lane()
            await until(lambda: lane._is_write_paused, "that its answers pile up")
            sweep(lane, 0)
            sweep(lane, UNREAD_S_MAX - 1)
            assert scene.lanes
            sweep(lane, UNREAD_S_MAX + 1)
            await until(lambda: not scene.lanes, "the end")

    run(scenario())


def test_one_connection_too_many_is_turned_away() -> None:
    async def scenario() -> None:
        async with Scene(connections_max=2) as scene:
            first, second = await scene.connect(), await scene.connect()
            for client in (first, second):
                assert (await client.ask(get("/livez"))).status == 200
            third = await scene.connect()
            answer = await third.answer()
            assert answer.status == 503
            assert json.loads(answer.body)["error"] == "too_many_connections"
            assert await third.rest() == b""
            first.close()
            await until(lambda: len(scene.lanes) == 1, "room")
            fourth = await scene.connect()
            assert (await fourth.ask(get("/livez"))).status == 200

    run(scenario())
