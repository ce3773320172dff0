"""Queues through the client, asyncio and blocking, against a real broker."""

from __future__ import annotations

import asyncio

import pytest

from broker_process import BrokerProcess
from client.scripted import run, until
from millstream.client import AsyncClient, Client
from millstream.errors import BodyInvalid, QueueFull, QueueUnknown, StreamClosed


def test_what_goes_in_comes_out_in_order(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            sent = await client.queues.enqueue("q", {"to": "ada"})
            assert sent.queue_size == 1
            await client.queues.enqueue_bytes("q", bytes(range(256)))
            assert (await client.queues.enqueue_batch("q", ["x", None, 3])).queue_size == 5
            first = await client.queues.dequeue("q")
            assert first is not None
            assert (first.payload, first.enqueued_at) == ({"to": "ada"}, sent.enqueued_at)
            rest = await client.queues.dequeue_batch("q", count_max=10)
            assert [message.payload for message in rest] == [bytes(range(256)), "x", None, 3]
            assert await client.queues.dequeue("q") is None
            assert await client.queues.dequeue_batch("q") == []

    run(scenario())


def test_a_dequeue_waits_for_a_message(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.queues.create("q")
            waiting = asyncio.ensure_future(client.queues.dequeue("q", timeout_s=30))
            while (await client.queues.describe("q")).waiting == 0:
                pass
            await client.queues.enqueue("q", 1)
            message = await waiting
            assert message is not None
            assert message.payload == 1

    run(scenario())


def test_a_queue_is_managed(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url(""), retry_s=0.1) as client:
            made = await client.queues.create("q", capacity=2, bytes_max=1000)
            assert (made.capacity, made.max_bytes) == (2, 1000)
            await client.queues.enqueue_batch("q", [1, 2])
            with pytest.raises(QueueFull):
                await client.queues.enqueue("q", 3)
            assert [queue.name for queue in await client.queues.list()] == ["default", "q"]
            assert await client.queues.persist("q") == 2
            assert await client.queues.clear("q") == 2
            assert await client.queues.load("q") == 2
            await client.queues.delete("q")
            with pytest.raises(QueueUnknown):
                await client.queues.describe("q")
            with pytest.raises(BodyInvalid):
                await client.queues.enqueue("q", object())

    run(scenario())


def test_a_stream_gives_messages_as_they_come_and_ends_with_its_queue(
    broker: BrokerProcess,
) -> None:
    async def scenario() -> None:
        async with AsyncClient(broker.url("")) as client:
            await client.queues.create("q")
            found: list[object] = []

            async def follow() -> None:
                async for message in client.queues.stream("q"):
                    found.append(message.payload)  # noqa: PERF401  looked at while it grows

            following = asyncio.ensure_future(follow())
            await client.queues.enqueue_batch("q", list(range(3000)))
            await client.queues.enqueue_bytes("q", b"\xff")
            await until(lambda: len(found) == 3001, "all messages")
            assert found == [*range(3000), b"\xff"]
            await client.queues.delete("q")
            with pytest.raises(StreamClosed, match="queue_deleted"):
                await following
            with pytest.raises(QueueUnknown):
                await anext(aiter(client.queues.stream("q")))

    run(scenario())


def test_the_blocking_face_does_the_same(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.queues.enqueue("q", "a")
        client.queues.enqueue_batch("q", ["b", "c"])
        first = client.queues.dequeue("q", timeout_s=5)
        assert first is not None
        assert first.payload == "a"
        stream = client.queues.stream("q")
        assert [next(stream).payload for _ in range(2)] == ["b", "c"]
        assert client.queues.describe("q").dequeued_total == 3
        assert [queue.name for queue in client.queues.list()] == ["default", "q"]
        client.queues.delete("q")
        with pytest.raises(QueueUnknown):
            client.queues.describe("q")
