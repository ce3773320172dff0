"""Garbage: whatever comes, nothing is raised, nothing grows, and who comes after is served."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from listeners.http_scene import Scene, get, post, run

pytestmark = pytest.mark.usefixtures("short_linger")

PIECES = [
    b"GET ", b"POST ", b"/dequeue", b"/enqueue", b"/queues/q/enqueue", b" HTTP/1.1", b" HTTP/1.0",
    b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"host: localhost", b"content-length: 5", b"hello", b"\x00",
    b"transfer-encoding: chunked", b"5\r\nhello\r\n", b"0\r\n\r\n", b"expect: 100-continue",
    b"connection: upgrade", b"upgrade: h2c", b"upgrade: websocket", b"connection: close", b"\xff",
    b"sec-websocket-version: 13", b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", b": ", b" ",
    post("/enqueue", b"hello"), get("/dequeue"), get("/livez"), get("/dequeue?timeout=0.01"),
]  # fmt: skip


async def send_all(scene: Scene, packets: list[bytes]) -> None:
    failures: list[dict[str, object]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    client = await scene.connect()
    try:
        for packet in packets:
            await client.send(packet)
            await asyncio.sleep(0)
    except (ConnectionResetError, BrokenPipeError):
        pass
    client.close()
    other = await scene.connect()
    assert (await other.ask(post("/enqueue", b"after"))).status == 202
    assert (await other.ask(get("/livez"))).status == 200
    other.close()
    assert not failures


@settings(max_examples=150)
@given(packets=st.lists(st.lists(st.sampled_from(PIECES)).map(b"".join), max_size=6))
def test_pieces_of_requests_in_any_order(packets: list[bytes]) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            await send_all(scene, [packet for packet in packets if packet])

    run(scenario())


@settings(max_examples=60)
@given(packets=st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=5))
def test_bytes_of_any_kind(packets: list[bytes]) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            await send_all(scene, packets)

    run(scenario())


def test_requests_with_a_byte_flipped() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            chance = random.Random(11)
            whole = post("/queues/q/enqueue", b'{"payload":[1,2]}') + get("/dequeue?timeout=0")
            for _ in range(300):
                data = bytearray(whole * 2)
                data[chance.randrange(len(data))] = chance.randrange(256)
                cut = chance.randrange(1, len(data))
                await send_all(scene, [bytes(data[:cut]), bytes(data[cut:])])

    run(scenario())
