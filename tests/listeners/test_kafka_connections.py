"""Connections of Kafka's clients: order, limits, patience, and what is not Kafka at all."""

from __future__ import annotations

import asyncio
import logging
import mmap
import ssl
from typing import TYPE_CHECKING, cast

import pytest
import trustme

from listeners.http_scene import run, until
from listeners.kafka_scene import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    Client,
    FetchResponse,
    ProduceResponse,
    Scene,
    batch,
    fetch,
    produce,
)
from millstream.listeners.kafka.connection import (
    IDLE_S_MAX,
    OWN_PAGES_BYTES,
    REQUEST_S_MAX,
    TOLD_MAX,
    UNREAD_S_MAX,
    Limits,
    Shared,
)
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from millstream.listeners.kafka.connection import Connection

HOUR_MS = 3_600_000


def test_answers_come_in_the_order_of_requests() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS), 4, 1)
            client.send(ApiVersionsRequest(), 0, 2)
            client.send(produce(batch(b"a")), 7, 3)
            # The fetch waits for what comes after it on the same connection.
            correlation_id, fetched = await client.answer(FetchResponse, 4)
            assert correlation_id == 1
            assert fetched.responses[0].partitions[0].high_watermark == 1
            assert (await client.answer(ApiVersionsResponse, 0))[0] == 2
            assert (await client.answer(ProduceResponse, 7))[0] == 3

    run(scenario())


def test_a_request_may_come_byte_by_byte() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            message = produce(batch(b"a" * 100))
            message.with_header(7, "test")
            data = bytes(message.encode(version=9, header=True, framed=True))
            for at in range(len(data)):
                client.writer.write(data[at : at + 1])
                await client.writer.drain()
                await asyncio.sleep(0)
            _, stored = await client.answer(ProduceResponse, 9)
            assert stored.responses[0].partition_responses[0].error_code == Code.NONE
            assert scene.shared.buffer_bytes == 0

    run(scenario())


def test_many_requests_may_come_at_once() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for number in range(500):
                client.send(produce(batch(b"x" * 2000)), 7, number)
            for number in range(500):
                correlation_id, stored = await client.answer(ProduceResponse, 7)
                part = stored.responses[0].partition_responses[0]
                assert (correlation_id, part.base_offset) == (number, number)

    run(scenario())


def test_a_version_of_api_versions_that_is_too_new_is_answered_in_the_oldest() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            # Header of a flexible request, and a body from the future.
            head = b"\0\x12\0\x63\0\0\0\x07\0\x02me\0"
            client.writer.write(len(head + b"??").to_bytes(4, "big") + head + b"??")
            frame = await client.frame()
            assert frame[:4] == b"\0\0\0\x07"
            message = ApiVersionsResponse.decode(frame[4:], version=0)
            assert message.error_code == Code.UNSUPPORTED_VERSION
            keys = {one.api_key: (one.min_version, one.max_version) for one in message.api_keys}
            assert keys[18] == (0, 4)
            # Old clients take a broker without these for one that knows no compression.
            assert keys[0][0] == 0
            assert not {71, 72} & keys.keys()
            assert await client.is_served()

    run(scenario())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="tls"),
        pytest.param(b"\xff\xff\xff\xff", id="a negative size"),
        pytest.param(b"\0\0\0\x09" + bytes(9), id="too short for a header"),
        pytest.param(b"\0\0\0\x0a\x7f\xff\0\0\0\0\0\0\xff\xff", id="an unknown api"),
        pytest.param(b"\0\0\0\x0a\0\x03\0\x63\0\0\0\0\xff\xff", id="an unknown version"),
        pytest.param(b"\0\0\0\x0a\0\x03\0\x01\0\0\0\0\xff\xff", id="no body"),
        pytest.param(b"\0\0\0\x0a\0\x00\0\x07\0\0\0\0\xff\xff", id="no body of produce"),
    ],
)
def test_what_cannot_be_read_ends_its_connection_alone(data: bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            other, client = await scene.connect(), await scene.connect()
            client.send(ApiVersionsRequest(), 0, 5)
            client.writer.write(data)
            # What came before it is answered.
            assert (await client.answer(ApiVersionsResponse, 0))[0] == 5
            assert await client.frame() == b""
            assert scene.shared.counts.invalid == 1
            assert await other.is_served()

    run(scenario())


@pytest.mark.parametrize(
    ("data", "spoken"),
    [
        (b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03", "TLS; that is spoken at the address of"),
        (b"GET / HTTP/1.1\r\nhost: a\r\n\r\n", "HTTP; that is spoken at the address of"),
        (b"\x7f\0\0\0\0\0\0\0\0\0\0", ""),
    ],
)
def test_who_speaks_another_protocol_is_told_of_as_that(data: bytes, spoken: str) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.writer.write(data)
            assert await client.frame() == b""
            complaint = scene.shared.complaint
            assert complaint.startswith("a request says that it has ")
            assert spoken in complaint
            assert ("looks like" in complaint) == bool(spoken)

    run(scenario())


def test_a_request_as_large_as_allowed_is_served_and_one_byte_more_is_not() -> None:
    async def scenario() -> None:
        message = produce(batch(b"x" * 5000))
        message.with_header(0, "test")
        size = len(message.encode(version=7, header=True))
        for limit, is_served in ((size, True), (size - 1, False)):
            async with Scene(request_bytes_max=limit) as scene:
                client = await scene.connect()
                client.send(message, 7)
                assert bool(await client.frame()) is is_served

    run(scenario())


def test_a_connection_with_too_many_requests_is_not_read() -> None:
    async def scenario() -> None:
        async with Scene(requests_max=5) as scene:
            client = await scene.connect()
            for number in range(12):
                client.send(fetch(wait_ms=HOUR_MS), 4, number)
            await until(lambda: scene.requests("Fetch") == 5, "as many as are allowed")
            other = await scene.connect()
            assert await other.is_served()
            assert scene.requests("Fetch") == 5
            await scene.append(b"a")
            for number in range(12):
                assert (await client.answer(FetchResponse, 4))[0] == number

    run(scenario())


def test_a_client_that_does_not_read_its_answers_is_not_read() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            await scene.append(b"x" * 200_000)
            client = await scene.connect()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            count = 2000
            for number in range(count):
                client.send(fetch(), 4, number)
            (connection,) = scene.shared.connections
            await until(lambda: connection._is_unread, "answers that nobody reads")
            served = scene.requests("Fetch")
            other = await scene.connect()
            assert await other.is_served()
            assert served == scene.requests("Fetch") < count
            assert 0 < scene.shared.buffer_bytes < 4_000_000
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            for number in range(count):
                assert (await client.answer(FetchResponse, 4))[0] == number
            await until(lambda: scene.shared.buffer_bytes == 0, "everything is given up")

    run(scenario())


def test_large_requests_wait_for_memory_and_go_on() -> None:
    async def scenario() -> None:
        message = produce(batch(b"x" * 400_000))
        message.with_header(0, "test")
        data = bytes(message.encode(version=7, header=True, framed=True))
        # Half of it is for requests that arrive: room for one at a time.
        async with Scene(buffer_bytes_max=1_000_000) as scene:
            shared = scene.shared
            slow = await scene.connect()
            slow.writer.write(data[:-1])
            await until(lambda: shared.claimed_bytes == len(data) - 4, "a request that begins")
            (stalled,) = shared.connections
            clients = [await scene.connect() for _ in range(3)]
            for client in clients:
                client.writer.write(data)
            await until(lambda: len(shared.claiming) == 3, "others that wait for room")
            assert shared.claimed_bytes == len(data) - 4
            # Small ones go on meanwhile.
            assert await (await scene.connect()).is_served()
            stalled.sweep(asyncio.get_running_loop().time() + REQUEST_S_MAX + 60)
            assert await slow.frame() == b""
            assert all([await client.frame() for client in clients])
            assert shared.claimed_bytes == shared.buffer_bytes == 0

    run(scenario())


class Told:
    """A connection that waits, and takes room when it goes on."""

    def __init__(self, shared: Shared, size: int) -> None:
        self._shared = shared
        self._size = size
        self.count = 0

    def go_on(self) -> None:
        self.count += 1
        self._shared.hold(self._size)


def waiting(shared: Shared, count: int, size: int) -> list[Told]:
    told = [Told(shared, size) for _ in range(count)]
    shared.waiting = cast("dict[Connection, None]", dict.fromkeys(told))
    return told


def test_a_release_lets_a_few_go_on_in_each_turn() -> None:
    async def scenario() -> None:
        shared = Shared(Limits(buffer_bytes_max=2000))
        shared.hold(1000)
        told = waiting(shared, 3 * TOLD_MAX, 0)
        shared.release(500)
        shared.release(500)
        for turn in range(3):
            assert sum(one.count for one in told) == turn * TOLD_MAX
            await asyncio.sleep(0)
        assert [one.count for one in told] == [1] * len(told)
        assert not shared.waiting

    run(scenario())


def test_those_that_wait_for_room_go_on_in_their_order_while_there_is_some() -> None:
    async def scenario() -> None:
        shared = Shared(Limits(buffer_bytes_max=2000))
        shared.hold(1000)
        told = waiting(shared, 5, 500)
        shared.release(1000)
        await asyncio.sleep(0)
        assert [one.count for one in told] == [1, 1, 0, 0, 0]
        await asyncio.sleep(0)
        assert len(shared.waiting) == 3
        shared.release(200)
        await asyncio.sleep(0)
        assert [one.count for one in told] == [1, 1, 1, 0, 0]

    run(scenario())


def test_who_waits_for_a_large_request_is_not_overtaken_for_ever() -> None:
    async def scenario() -> None:
        shared = Shared(Limits(buffer_bytes_max=2000))
        large, small = (cast("Connection", Told(shared, 0)) for _ in range(2))
        assert shared.claim(small, 600)
        assert not shared.claim(large, 600)
        # There is room for this one, and not its turn.
        assert not shared.claim(small, 100)
        shared.unclaim(600)
        await asyncio.sleep(0)
        assert not shared.claiming
        assert shared.claim(large, 600)
        assert shared.claim(small, 100)

    run(scenario())


def test_a_large_request_has_pages_of_its_own() -> None:
    """Which go back to the kernel with it. Of what malloc gives, it would keep some."""

    async def scenario() -> None:
        async with Scene() as scene:
            for size, kind in ((OWN_PAGES_BYTES, mmap.mmap), (OWN_PAGES_BYTES - 1, bytearray)):
                client = await scene.connect()
                client.writer.write(size.to_bytes(4, "big") + b"the rest never comes")
                await until(lambda: scene.shared.claimed_bytes > 0, "a request that begins")
                (connection,) = scene.shared.connections
                assert connection._frame is not None
                assert isinstance(connection._frame.obj, kind)
                client.close()
                await until(lambda: scene.shared.claimed_bytes == 0, "its end")
            client = await scene.connect()
            client.send(produce(batch(b"x" * 500_000, *[b"y" * 500_000] * 9)), 7)
            assert (await client.answer(ProduceResponse, 7))[1].responses[0].name == "t"

    run(scenario())


def test_one_connection_too_many_is_closed() -> None:
    async def scenario() -> None:
        async with Scene(connections_max=2) as scene:
            first, second = await scene.connect(), await scene.connect()
            assert await first.is_served()
            assert await second.is_served()
            third = await scene.connect()
            assert await third.frame() == b""
            assert scene.shared.counts.turned_away == 1
            first.close()
            await until(lambda: len(scene.shared.connections) == 1, "one that left")
            assert await (await scene.connect()).is_served()

    run(scenario())


async def swept(scene: Scene, client: Client, after_s: float) -> bool:
    """Whether the connection is ended when it is looked at after a while."""
    (connection,) = scene.shared.connections
    connection.sweep(asyncio.get_running_loop().time() + after_s)
    await asyncio.sleep(0)
    if scene.shared.connections:
        return False
    assert await client.frame() == b""
    return True


@pytest.mark.parametrize("start", [b"\0\0", b"\0\0\x10\0" + b"begin"])
def test_a_request_that_is_not_sent_to_its_end_ends_its_connection(start: bytes) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.writer.write(start)
            await until(lambda: scene.shared.counts.bytes_in == len(start), "its beginning")
            assert not await swept(scene, client, REQUEST_S_MAX - 1)
            assert await swept(scene, client, REQUEST_S_MAX + 2)
            assert scene.shared.counts.ended == 1

    run(scenario())


def test_an_idle_connection_ends_and_one_that_waits_does_not() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS), 4)
            await until(lambda: scene.requests("Fetch") == 1, "the fetch")
            assert not await swept(scene, client, IDLE_S_MAX + UNREAD_S_MAX)
            await scene.append(b"a")
            await client.frame()
            assert not await swept(scene, client, IDLE_S_MAX - 1)
            assert await swept(scene, client, IDLE_S_MAX + 1)

    run(scenario())


def test_a_client_without_acks_hears_only_of_other_things() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(produce(batch(b"a"), acks=0), 7, 1)
            client.send(produce(batch(b"b"), acks=1), 7, 2)
            correlation_id, stored = await client.answer(ProduceResponse, 7)
            assert correlation_id == 2
            assert stored.responses[0].partition_responses[0].base_offset == 1
            # As Kafka does: what is wrong ends the connection, there is no other way to say it.
            client.send(produce(batch(b"a"), acks=0, topic="gone"), 7, 3)
            assert await client.frame() == b""

    run(scenario())


def test_a_fetch_that_waits_ends_with_its_connection() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            timers = len(scene.broker.timers)
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS), 4)
            await until(lambda: len(scene.broker.timers) > timers, "a fetch that waits")
            client.writer.transport.abort()
            await until(lambda: len(scene.broker.timers) == timers, "its end")
            await scene.append(b"a")

    run(scenario())


def test_a_fetch_that_waits_is_answered_when_the_broker_stops() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(fetch(wait_ms=HOUR_MS), 4, 8)
            await until(lambda: scene.requests("Fetch") == 1, "the fetch")
            await scene.listener.stop(60.0)
            assert (await client.answer(FetchResponse, 4))[0] == 8
            assert await client.frame() == b""

    run(scenario())


def test_with_tls_nothing_else_is_spoken() -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)

    async def scenario() -> None:
        async with Scene(tls=ours) as scene:
            client = await scene.connect(theirs)
            for number in range(20):
                client.send(produce(batch(b"x" * 100_000)), 7, number)
            for number in range(20):
                assert (await client.answer(ProduceResponse, 7))[0] == number
            client.send(fetch(), 4)
            assert len(await client.frame()) > 100_000
            plain = await scene.connect()
            plain.send(ApiVersionsRequest(), 0)
            assert b"\0\0\0\0" not in (await plain.reader.read())[4:8]

    run(scenario())


def test_a_client_that_closes_leaves_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)

    async def scenario() -> None:
        async with Scene(tls=ours) as scene:
            client = await scene.connect(theirs)
            client.send(ApiVersionsRequest(), 0)
            await client.frame()
            client.writer.close()
            await until(lambda: not scene.shared.connections, "it is gone")

    run(scenario())
    assert [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING] == []
