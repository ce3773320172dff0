"""Many clients in one process, to be killed: `clients.py ROLE WAY HOST:PORT QUEUE JOURNAL FIRST
CLIENTS COUNT`.

ROLE is `produce` or `consume`, WAY is `http` or `ws`. A client writes what it does into the journal
as it does it, past any buffer, so that what it knew is known after a SIGKILL:

    s ID   a producer is about to send a message
    c ID   the broker confirmed it
    a      a consumer is about to ask for a message, over HTTP
    e      it was told that there is none
    r ID   it has received a message

A producer ends when it has sent its COUNT messages. A consumer goes on until SIGTERM; then it ends
properly: it waits for its last answer, or closes its WebSocket and reads up to the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

PATIENCE_S = 300.0


class Journal:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: str) -> None:
        os.write(self._file, f"{line}\n".encode())


class Http:
    """One connection, kept open."""

    def __init__(self, place: str) -> None:
        self._host, _, self._port = place.rpartition(":")

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._host, int(self._port))

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = answer.partition("content-length: ")[2].partition("\r\n")[0]
        content = await self._reader.readexactly(int(length)) if length else b""
        return int(answer.split(" ")[1]), content


async def produce_http(place: str, queue: str, journal: Journal, name: int, count: int) -> None:
    http = Http(place)
    await http.open()
    for number in range(count):
        message = f"{name}-{number}"
        journal.write(f"s {message}")
        body = json.dumps({"payload": message}).encode()
        status, _ = await http.call("POST", f"/queues/{queue}/enqueue", body)
        assert status == 200, status
        journal.write(f"c {message}")


async def produce_ws(place: str, queue: str, journal: Journal, name: int, count: int) -> None:
    url = f"ws://{place}/queues/{queue}/enqueue"
    async with connect(
        url, open_timeout=PATIENCE_S, close_timeout=PATIENCE_S, ping_timeout=None
    ) as socket:
        for number in range(count):
            message = f"{name}-{number}"
            journal.write(f"s {message}")
            await socket.send(json.dumps({"payload": message}))
            assert json.loads(await socket.recv())["queued"] is True
            journal.write(f"c {message}")


async def consume_http(
    place: str, queue: str, journal: Journal, name: int, stop: asyncio.Event
) -> None:
    del name
    http = Http(place)
    await http.open()
    while not stop.is_set():
        journal.write("a")
        status, body = await http.call("GET", f"/queues/{queue}/dequeue?timeout=1")
        journal.write(f"r {json.loads(body)['payload']}" if status == 200 else "e")


async def consume_ws(
    place: str, queue: str, journal: Journal, name: int, stop: asyncio.Event
) -> None:
    del name
    url = f"ws://{place}/queues/{queue}/dequeue"
    async with connect(
        url, open_timeout=PATIENCE_S, close_timeout=PATIENCE_S, ping_timeout=None
    ) as socket:

        async def leave() -> None:
            await stop.wait()
            await socket.close()

        leaving = asyncio.create_task(leave())
        try:
            while True:
                journal.write(f"r {json.loads(await socket.recv())['payload']}")
        except ConnectionClosed:
            await leaving


async def main(arguments: list[str]) -> None:
    role, way, place, queue, path, first, clients, count = arguments
    journal = Journal(path)
    names = range(int(first), int(first) + int(clients))
    async with asyncio.TaskGroup() as group:
        if role == "produce":
            produce = {"http": produce_http, "ws": produce_ws}[way]
            for name in names:
                group.create_task(produce(place, queue, journal, name, int(count)))
            return
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        consume = {"http": consume_http, "ws": consume_ws}[way]
        for name in names:
            group.create_task(consume(place, queue, journal, name, stop))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
