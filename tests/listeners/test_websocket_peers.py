"""Other people's WebSocket clients."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from listeners.websocket_client import House, run
from millstream.listeners.http.websocket import SocketTimes


def test_messages_pass_from_one_client_to_the_other() -> None:
    async def scenario() -> None:
        async with House() as house:
            base = f"ws://127.0.0.1:{house.port}/queues/q"
            async with connect(base + "/enqueue") as producer:
                for number in range(200):
                    await producer.send(json.dumps({"payload": {"n": number}}))
                for number in range(200):
                    assert json.loads(await producer.recv())["queue_size"] == number + 1
                await producer.send(b"\x00raw")
                assert json.loads(await producer.recv())["queued"] is True
                async with connect(base + "/dequeue") as consumer:
                    for number in range(200):
                        assert json.loads(await consumer.recv())["payload"] == {"n": number}
                    assert json.loads(await consumer.recv())["encoding"] == "base64"
                    await (await consumer.ping())
                    long = "ü" * 40_000
                    await producer.send(json.dumps({"payload": long}, ensure_ascii=False))
                    assert json.loads(await consumer.recv())["payload"] == long

    run(scenario())


def test_a_text_in_fragments_is_one_message() -> None:
    async def scenario() -> None:
        async with House() as house:
            async with connect(f"ws://127.0.0.1:{house.port}/queues/q/enqueue") as producer:
                await producer.send(["{", '"payload":', "[1,2]", "}"])
                assert json.loads(await producer.recv())["queued"] is True
            assert house.held("q") == [b"[1,2]"]

    run(scenario())


def test_a_stop_is_seen_as_going_away() -> None:
    async def scenario() -> None:
        async with House() as house:
            house.queues.get_or_create("q")
            async with connect(f"ws://127.0.0.1:{house.port}/queues/q/dequeue") as consumer:
                stopping = asyncio.create_task(house.listener.stop(30))
                with pytest.raises(ConnectionClosed) as closed:
                    await consumer.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1001
                await stopping

    run(scenario())


def test_a_message_too_large_is_seen_as_such_without_a_wait() -> None:
    async def scenario() -> None:
        times = SocketTimes(ping_s=3600, slow_s=3600, close_s=3600)
        async with House(times=times) as house:
            producer = await connect(f"ws://127.0.0.1:{house.port}/queues/q/enqueue")
            await producer.send(b"x" * 4_000_000)
            with pytest.raises(ConnectionClosed) as closed:
                await producer.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1009
            await producer.wait_closed()

    run(scenario())


def test_a_refused_upgrade_has_its_status() -> None:
    async def scenario() -> None:
        async with House() as house:
            with pytest.raises(InvalidStatus) as refused:
                await connect(f"ws://127.0.0.1:{house.port}/queues/nope/dequeue")
            assert refused.value.response.status_code == 404
            body = json.loads(refused.value.response.body or b"")
            assert body["error"] == "queue_not_found"

    run(scenario())
