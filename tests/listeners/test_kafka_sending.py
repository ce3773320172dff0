"""Answers that lie in files: in order with all others, whole, or the end of the connection."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import trustme
import uvloop

from listeners.http_scene import run, until
from listeners.kafka_scene import T0, FetchResponse, Scene, fetch
from millstream.clock import SystemClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.listeners.kafka import connection, sending
from millstream.listeners.kafka.sending import send, socket_file
from millstream.log import batch as batches
from millstream.log.disk import SystemDisk
from millstream.log.segment import Segment
from millstream.log.stored import Stored
from millstream.wire.kafka.primitives import Pieces

FILE_BYTES = 8 << 20
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=LOOPS)
def loop_run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    def in_loop(scenario: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(asyncio.wait_for(scenario, 60))

    return in_loop


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    """One whose file has random bytes."""
    segment = Segment(SystemDisk(), str(tmp_path), 0)
    Path(segment.path + ".log").write_bytes(os.urandom(FILE_BYTES))
    return segment


class Pair:
    """A transport, and the other end of its connection."""

    def __init__(self, transport: asyncio.Transport, far: socket.socket) -> None:
        self.transport = transport
        self.far = far
        self.file = socket_file(transport)

    def send(self, *pieces: Any) -> None:
        out: Pieces = list(pieces)
        send(self.transport, self.file, out)

    async def read(self, size: int) -> bytes:
        loop, found = asyncio.get_running_loop(), bytearray()
        while len(found) < size:
            part = await loop.sock_recv(self.far, 1 << 20)
            if not part:
                break
            found += part
        return bytes(found)


async def pair() -> Pair:
    near, far = socket.socketpair()
    for one in (near, far):
        one.setblocking(False)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=near)
    return Pair(transport, far)


def test_what_lies_in_files_comes_in_order_with_the_rest(
    loop_run: Callable[[Coroutine[Any, Any, None]], None], segment: Segment
) -> None:
    content = Path(segment.path + ".log").read_bytes()
    file = os.open(segment.path + ".log", os.O_RDONLY)

    async def scenario() -> None:
        two = await pair()
        expected = b""
        # Nobody reads yet, so the kernel takes the first of them and the transport the others.
        for number in range(6):
            at, size = number * 1_000_003, 700_001 + number
            head, tail = b"head %d" % number, memoryview(b"tail %d" % number)
            two.send(head, Stored(segment, file, at, size), tail)
            two.send(bytearray(b"small"))
            two.transport.write(b"other")
            expected += head + content[at : at + size] + bytes(tail) + b"smallother"
        assert two.transport.get_write_buffer_size() > 0
        assert await two.read(len(expected)) == expected
        two.transport.close()
        two.far.close()

    loop_run(scenario())
    os.close(file)
    assert not segment.readers


def test_bytes_that_a_transport_still_has_go_first(
    loop_run: Callable[[Coroutine[Any, Any, None]], None], segment: Segment
) -> None:
    content = Path(segment.path + ".log").read_bytes()
    file = os.open(segment.path + ".log", os.O_RDONLY)

    async def scenario() -> None:
        two = await pair()
        two.transport.write(b"first")
        two.send(b"second", Stored(segment, file, 5, 100_000))
        expected = b"firstsecond" + content[5:100_005]
        assert await two.read(len(expected)) == expected
        two.transport.close()
        two.far.close()

    loop_run(scenario())
    os.close(file)


def test_a_file_without_the_bytes_that_it_had_is_told(
    loop_run: Callable[[Coroutine[Any, Any, None]], None], segment: Segment
) -> None:
    file = os.open(segment.path + ".log", os.O_RDONLY)

    async def scenario() -> None:
        two = await pair()
        stored = Stored(segment, file, FILE_BYTES - 200_000, 100_000)
        os.truncate(segment.path + ".log", FILE_BYTES - 150_000)
        with pytest.raises(OSError, match="is shorter than it was"):
            two.send(b"head", stored)
        two.transport.abort()
        two.far.close()

    loop_run(scenario())
    os.close(file)


def test_a_connection_that_is_gone_takes_nothing_and_leaves_nothing(
    loop_run: Callable[[Coroutine[Any, Any, None]], None], segment: Segment
) -> None:
    file = os.open(segment.path + ".log", os.O_RDONLY)

    async def scenario() -> None:
        two = await pair()
        two.far.close()
        two.send(b"head", Stored(segment, file, 0, 1 << 20))
        two.send(b"head", Stored(segment, file, 0, 1 << 20))
        two.transport.abort()
        two.send(b"head", Stored(segment, file, 0, 1 << 20))

    loop_run(scenario())
    os.close(file)
    assert not segment.readers


# ---- fetches


def on_disk(root: Path) -> LocalEngine:
    return LocalEngine(SystemDisk(), str(root), SystemClock(), LocalOptions())


async def filled(scene: Scene) -> bytes:
    """About 3 MiB, as the log has them."""
    for _ in range(60):
        await scene.append(*(os.urandom(10_000) for _ in range(5)))
    chunk = await scene.engine.read(T0, 0, 1 << 30)
    return bytes(chunk.data)


def test_a_long_fetch_is_sent_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []

    def counted(*arguments: Any) -> int:
        count = os.sendfile(*arguments)
        sent.append(count)
        return count

    class Os:
        write, sendfile = staticmethod(os.write), staticmethod(counted)

    monkeypatch.setattr(sending, "os", Os)

    async def scenario() -> None:
        async with Scene(engine=on_disk(tmp_path / "data")) as scene:
            expected = await filled(scene)
            client = await scene.connect()
            client.send(fetch(bytes_max=1 << 30), 11)
            _, fetched = await client.answer(FetchResponse, 11)
            assert bytes(fetched.responses[0].partitions[0].records) == expected
            assert sum(sent) > 1 << 20
            # In the middle of a batch, and only some of what there is.
            client.send(fetch(offset=7, bytes_max=400_000), 11)
            _, fetched = await client.answer(FetchResponse, 11)
            records = bytes(fetched.responses[0].partitions[0].records)
            assert batches.read_header(records).base_offset == 5
            start = expected.index(records[:100])
            assert records == expected[start : start + len(records)]
            assert 300_000 < len(records) <= 400_000

    run(scenario())


def test_with_tls_nothing_goes_past_what_encrypts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("not with TLS")

    monkeypatch.setattr(sending, "_send_now", never)
    authority = trustme.CA()
    ours, theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(ours)
    authority.configure_trust(theirs)

    async def scenario() -> None:
        async with Scene(engine=on_disk(tmp_path / "data"), tls=ours) as scene:
            expected = await filled(scene)
            client = await scene.connect(theirs)
            client.send(fetch(bytes_max=1 << 30), 11)
            _, fetched = await client.answer(FetchResponse, 11)
            assert bytes(fetched.responses[0].partitions[0].records) == expected

    run(scenario())


def test_a_client_that_reads_slowly_gets_all_of_it_in_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Scene(engine=on_disk(tmp_path / "data")) as scene:
            expected = await filled(scene)
            client = await scene.connect()
            for number in range(20):
                client.send(fetch(bytes_max=1 << 30), 11, number)
            # Much more than the kernel takes; the rest waits, and no more is served.
            await until(lambda: scene.requests("Fetch") > 1, "the fetches")
            for number in range(20):
                correlation_id, fetched = await client.answer(FetchResponse, 11)
                assert correlation_id == number
                assert bytes(fetched.responses[0].partitions[0].records) == expected
            assert scene.shared.buffer_bytes == 0

    run(scenario())


def test_one_who_asks_for_much_at_once_does_not_keep_the_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SENT_BYTES_MAX", 1 << 20)

    async def scenario() -> None:
        async with Scene(engine=on_disk(tmp_path / "data")) as scene:
            expected = await filled(scene)
            client = await scene.connect()
            # As if the kernel took whatever it is given.
            monkeypatch.setattr(sending, "_send_now", lambda *_: [])
            request = fetch(bytes_max=1 << 30)
            request.with_header(1, "test")
            many = bytes(request.encode(version=11, header=True, framed=True)) * 30
            client.writer.write(many)
            served: list[int] = []

            def look() -> None:
                count = scene.requests("Fetch")
                if not served or served[-1] != count:
                    served.append(count)
                if count < 30:
                    asyncio.get_running_loop().call_soon(look)

            look()
            await until(lambda: scene.requests("Fetch") == 30, "all of them")
            # Others had a turn after each that was long.
            assert len(served) > 10
            assert len(expected) > 1 << 20

    run(scenario())


def test_an_answer_that_cannot_be_read_any_more_ends_its_connection_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the file lost its end between the answer and its way out.
    monkeypatch.setattr(SystemDisk, "can_send", lambda *_: True)

    async def scenario() -> None:
        async with Scene(engine=on_disk(tmp_path / "data")) as scene:
            await filled(scene)
            client, other = await scene.connect(), await scene.connect()
            (log,) = (tmp_path / "data").glob("topics/t*/*/*.log")
            os.truncate(log, 1 << 20)
            client.send(fetch(bytes_max=1 << 30), 11)
            assert await client.frame() == b""
            assert await other.is_served()

    run(scenario())
