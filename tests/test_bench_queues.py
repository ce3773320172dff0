"""The load that does not wait, against a server that is not a broker; and the lines it makes."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from bench.open_load import PROTOCOLS, Load, measure

from broker_process import MILL, plain_environment

PATIENCE_S = 60.0


@contextmanager
def server(answer: Callable[[], bytes], size: int) -> Iterator[int]:
    """Answers every so many bytes, whatever they are."""

    def serve(connection: socket.socket) -> None:
        held = 0
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                held += len(data)
                count, held = divmod(held, size)
                # In two parts, so that an answer does not come at once.
                out = b"".join(answer() for _ in range(count))
                connection.sendall(out[:-3])
                connection.sendall(out[-3:])

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)


ANSWERS = {
    "http-enqueue": b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n",
    "http-dequeue": b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
    "redis-lpush": b":12\r\n",
    "redis-rpop": b"$3\r\nabc\r\n",
}


@pytest.mark.parametrize("protocol", ANSWERS)
def test_every_request_gets_its_time(protocol: str) -> None:
    with server(lambda: ANSWERS[protocol], len(PROTOCOLS[protocol].request)) as port:
        times = measure(Load(port, protocol, rate=5000, count=500, connections=4))
    assert 0 < times.p50 <= times.p99 <= times.most < PATIENCE_S * 1000
    assert 0 <= times.late_p99 <= times.most


def test_an_answer_without_a_message_fails_the_run() -> None:
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    with (
        server(lambda: empty, len(PROTOCOLS["http-dequeue"].request)) as port,
        pytest.raises(RuntimeError, match="wrong answer"),
    ):
        measure(Load(port, "http-dequeue", rate=5000, count=50, connections=2))


def test_the_open_load_makes_its_lines(tmp_path: Path) -> None:
    program = [*MILL, "bench", "queues", "--smoke", "--json", "--only", "http.open"]
    program += ["--dir", str(tmp_path)]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env=plain_environment()
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = json.loads(done.stdout)["lines"]
    assert [line["name"] for line in lines] == [
        "http.open-enqueue-p50",
        "http.open-enqueue-p99",
        "http.open-dequeue-p99",
    ]
    assert all(line["value"] > 0 and line["unit"] == "ms" for line in lines)
    assert all("10000 requests/s" in line["note"] for line in lines)
