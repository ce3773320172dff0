"""WebSockets over TLS, where our side cannot end alone and buffers lie below buffers."""

from __future__ import annotations

import json
import ssl

import pytest
import trustme
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from listeners.websocket_client import House, run, until
from millstream.listeners.http.websocket import FRAMES_PER_TURN, SocketTimes

AUTHORITY = trustme.CA()
PATIENT = SocketTimes(ping_s=3600, slow_s=3600, close_s=3600)
# More than all buffers between a broker and a client that does not read.
FLOOD = [b"%06d" % number + b"x" * 1000 for number in range(6000)]


def certificate() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    AUTHORITY.issue_cert("127.0.0.1").configure_cert(context)
    return context


def open_socket(house: House, path: str) -> connect:
    trust = ssl.create_default_context()
    AUTHORITY.configure_trust(trust)
    return connect(f"wss://127.0.0.1:{house.port}{path}", ssl=trust, max_queue=1)


async def messages_of(client: ClientConnection) -> tuple[list[object], int | None]:
    found: list[object] = []
    try:
        while True:
            found.append(await client.recv())
    except ConnectionClosed as closed:
        return found, closed.rcvd.code if closed.rcvd else None


def test_many_frames_in_a_packet_are_confirmed_in_order() -> None:
    async def scenario() -> None:
        async with House(PATIENT, certificate(), capacity=10**6) as house:
            async with open_socket(house, "/queues/q/enqueue") as producer:
                count = 4 * FRAMES_PER_TURN
                for _ in range(count):
                    await producer.send(b"")
                for place in range(1, count + 1):
                    assert json.loads(await producer.recv())["queue_size"] == place
            await until(lambda: not house.connections, "the end")

    run(scenario())


def test_who_sends_too_much_is_told_so_without_a_wait() -> None:
    async def scenario() -> None:
        async with House(PATIENT, certificate()) as house:
            client = await open_socket(house, "/queues/q/enqueue")
            await client.send(b"x" * 4_000_000)
            assert await messages_of(client) == ([], 1009)
            await client.wait_closed()
            await until(lambda: not house.connections, "the end")

    run(scenario())


def test_what_a_slow_consumer_was_not_sent_goes_back_in_order() -> None:
    async def scenario() -> None:
        times = SocketTimes(ping_s=3600, slow_s=0.2, close_s=0.2)
        async with House(times, certificate()) as house:
            house.fill("q", FLOOD, is_json=False)
            client = await open_socket(house, "/queues/q/dequeue?format=binary")
            await until(lambda: not house.connections, "the broker to lose its patience")
            held = house.held("q")
            assert held == FLOOD[-len(held) :]
            # What lies encrypted below counts as sent, and some of it is lost; nothing comes
            # twice.
            found, _ = await messages_of(client)
            assert found
            assert found == FLOOD[: len(found)]
            assert len(found) + len(held) <= len(FLOOD)

    run(scenario())


@pytest.mark.parametrize("path", ["/queues/q/enqueue", "/queues/q/dequeue"])
def test_a_stop_closes_with_1001(path: str) -> None:
    async def scenario() -> None:
        async with House(PATIENT, certificate()) as house:
            house.queues.get_or_create("q")
            client = await open_socket(house, path)
            await house.listener.stop(30)
            assert await messages_of(client) == ([], 1001)

    run(scenario())
