"""A great many connections at once: all are served, and those that do not get on are ended."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from broker_process import BrokerProcess, wait_until
from soak.sizes import raise_open_files, sized

CONNECTIONS = sized(1_000, 10_000)
SLOW = sized(200, 2_000)
PATIENCE_S = 120.0
# Connections are opened a few at a time, so that none has to knock twice.
AT_ONCE = 100


class Connection:
    def __init__(self, place: str) -> None:
        self._host, _, self._port = place.rpartition(":")

    async def open(self, gate: asyncio.Semaphore) -> None:
        async with gate:
            self.reader, self.writer = await asyncio.open_connection(self._host, int(self._port))

    async def ask(self, path: str) -> tuple[int, bytes]:
        self.writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = head.partition("content-length: ")[2].partition("\r\n")[0]
        body = await self.reader.readexactly(int(length)) if length else b""
        return int(head.split(" ")[1]), body

    async def message(self, queue: str) -> int:
        """The next message of a queue, a number, however long it takes to come."""
        while True:
            status, body = await self.ask(f"/queues/{queue}/dequeue?timeout=30")
            if status == 200:
                return int(httpx.Response(200, content=body).json()["payload"])
            assert status == 204, body


async def opened(place: str, count: int) -> list[Connection]:
    gate = asyncio.Semaphore(AT_ONCE)
    connections = [Connection(place) for _ in range(count)]
    await asyncio.gather(*(one.open(gate) for one in connections))
    return connections


def closed(connections: list[Connection]) -> None:
    for one in connections:
        one.writer.transport.abort()


@pytest.fixture
def broker(tmp_path_factory: pytest.TempPathFactory) -> BrokerProcess:
    # The broker keeps a fifth of its files for itself.
    if not raise_open_files(CONNECTIONS * 5 // 4 + 500):
        pytest.skip(f"this user may not open {CONNECTIONS} connections (ulimit -Hn)")
    return BrokerProcess(str(tmp_path_factory.mktemp("many")))


def test_everybody_who_waits_gets_one_message(broker: BrokerProcess) -> None:
    async def scenario() -> list[int]:
        connections = await opened(place, CONNECTIONS)
        asking = [asyncio.create_task(one.message("q")) for one in connections]
        async with httpx.AsyncClient(base_url=broker.url(""), timeout=PATIENCE_S) as client:
            while (await client.get("/queues/q")).json()["waiting"] < CONNECTIONS:
                assert not any(one.done() for one in asking)
            numbers = list(range(CONNECTIONS))
            for first in range(0, CONNECTIONS, 1000):
                batch = {"payloads": numbers[first : first + 1000]}
                sent = await client.post("/queues/q/enqueue/batch", json=batch)
                assert sent.status_code == 200
        taken = await asyncio.gather(*asking)
        closed(connections)
        return taken

    with broker:
        place = broker.wait_until_ready().url("").removeprefix("http://")
        broker.put("/queues/q", {})
        assert sorted(asyncio.run(scenario())) == list(range(CONNECTIONS))
        page = broker.get("/queues/q").json()
        assert (page["size"], page["waiting"]) == (0, 0)
        # And it can still end.
        assert broker.stop() == 0


def test_clients_that_send_a_byte_at_a_time_are_ended_and_hold_up_nobody(
    broker: BrokerProcess,
) -> None:
    async def trickle(one: Connection) -> bytes:
        """Bytes of a head that never ends, until the other side has had enough."""
        answer = asyncio.create_task(one.reader.read())
        while not answer.done():
            if not one.writer.is_closing():
                one.writer.write(b"x")
            await asyncio.wait((answer,), timeout=0.5)
        try:
            return answer.result()
        except ConnectionResetError:
            # It wrote once more to an end that was closed.
            return b""

    async def scenario() -> list[bytes]:
        slow = await opened(place, SLOW)
        for one in slow:
            one.writer.write(b"POST /enqueue HTTP/1.1\r\nhost: localhost\r\nx: ")
        trickling = [asyncio.create_task(trickle(one)) for one in slow]
        async with httpx.AsyncClient(base_url=broker.url(""), timeout=PATIENCE_S) as client:
            while not all(one.done() for one in trickling):
                assert (await client.post("/enqueue", content=b"1")).status_code == 202
                assert (await client.get("/dequeue")).content == b"1"
                await asyncio.sleep(0.1)
        closed(slow)
        return [one.result() for one in trickling]

    with broker:
        place = broker.wait_until_ready().url("").removeprefix("http://")
        files = broker.get("/metrics", headers={"Accept": "application/json"}).json()["open_files"]
        answers = asyncio.run(scenario())
        assert {answer[:12] for answer in answers} <= {b"", b"HTTP/1.1 408"}
        assert b"HTTP/1.1 408" in {answer[:12] for answer in answers}

        def is_as_before() -> bool:
            page = broker.get("/metrics", headers={"Accept": "application/json"}).json()
            return bool(page["open_files"] <= files + 2)

        wait_until(is_as_before, "the files of connections that ended")
