"""A load that does not wait: so many requests a second, whether or not answers come.

The time of a request counts from when it should have been sent, so an answer that is late makes
all those behind it late too, as it would for users. It runs as a program of its own, in a loop that
never sleeps: a timer of the system would be late by as much as a request takes. What the program
itself is late by is measured as well, because on a busy machine that may be the larger part.

    python -m bench.open_load '{"port": 8080, "protocol": "http-enqueue", …}'
"""

from __future__ import annotations

import gc
import select
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from bench.servers import environment

CONNECTIONS = 16
# Answers may take this long after the last request was due.
GRACE_S = 30.0
BODY = b"x" * 100


class Load(msgspec.Struct, frozen=True):
    port: int
    protocol: str
    rate: int
    count: int
    connections: int = CONNECTIONS


class Times(msgspec.Struct, frozen=True):
    """In milliseconds. `late_p99`: how late the program sent."""

    p50: float
    p99: float
    most: float
    late_p99: float


class Protocol(NamedTuple):
    """A request, and what ends its answer: the same bytes so many times. `wrong` stands in an
    answer that is not the one expected."""

    request: bytes
    mark: bytes
    marks: int = 1
    wrong: bytes = b"-ERR"


PROTOCOLS = {
    "http-enqueue": Protocol(
        b"POST /enqueue HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n%b"
        % (len(BODY), BODY),
        b"\r\n\r\n",
        wrong=b"HTTP/1.1 4",
    ),
    "http-publish": Protocol(
        b"POST /v1/topics/t/messages HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n%b"
        % (len(BODY), BODY),
        b"\r\n\r\n",
        wrong=b"HTTP/1.1 4",
    ),
    "http-dequeue": Protocol(
        b"GET /dequeue HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", b"\r\n\r\n", wrong=b"HTTP/1.1 204"
    ),
    "redis-lpush": Protocol(
        b"*3\r\n$5\r\nLPUSH\r\n$4\r\nlist\r\n$%d\r\n%b\r\n" % (len(BODY), BODY), b"\r\n"
    ),
    "redis-rpop": Protocol(b"*2\r\n$4\r\nRPOP\r\n$4\r\nlist\r\n", b"\r\n", 2, b"$-1"),
}


class _Connection:
    """What is under way on one connection, oldest first."""

    __slots__ = ("_marks", "_protocol", "_tail", "socket", "waiting")

    def __init__(self, port: int, protocol: Protocol) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._protocol = protocol
        self._tail = b""
        self._marks = 0
        self.waiting: list[float] = []

    def send(self, due_s: float) -> None:
        self.socket.sendall(self._protocol.request)
        self.waiting.append(due_s)

    def receive(self, times: list[float]) -> None:
        data = self._tail + self.socket.recv(65536)
        now = time.perf_counter()
        protocol = self._protocol
        if protocol.wrong in data:
            raise RuntimeError(f"a wrong answer: {data[:100]!r}")
        self._marks += data.count(protocol.mark)
        self._tail = data[len(data) - len(protocol.mark) + 1 :]
        answers, self._marks = divmod(self._marks, protocol.marks)
        times += [now - due_s for due_s in self.waiting[:answers]]
        del self.waiting[:answers]


def measure(load: Load) -> Times:
    protocol = PROTOCOLS[load.protocol]
    with ExitStack() as stack:
        connections = [_Connection(load.port, protocol) for _ in range(load.connections)]
        for connection in connections:
            stack.enter_context(connection.socket)
        return _measure(load, connections)


def _measure(load: Load, connections: list[_Connection]) -> Times:
    by_file = {connection.socket.fileno(): connection for connection in connections}
    poll = select.epoll()
    for file in by_file:
        poll.register(file, select.EPOLLIN)
    times: list[float] = []
    late: list[float] = []
    sent, interval = 0, 1 / load.rate
    begin = time.perf_counter() + 0.05
    end = begin + load.count * interval + GRACE_S
    while len(times) < load.count:
        now = time.perf_counter()
        if now > end:
            raise RuntimeError(f"{load.count - len(times)} answers never came")
        while sent < load.count and begin + sent * interval <= now:
            due_s = begin + sent * interval
            connections[sent % load.connections].send(due_s)
            late.append(now - due_s)
            sent += 1
        for file, _ in poll.poll(0):
            by_file[file].receive(times)
    times.sort()
    late.sort()
    return Times(_ms(times, 0.5), _ms(times, 0.99), _ms(times, 1), _ms(late, 0.99))


def run(load: Load) -> Times:
    """The same in a process of its own."""
    program = [sys.executable, "-m", "bench.open_load", msgspec.json.encode(load).decode()]
    output = subprocess.run(program, capture_output=True, check=True, env=environment()).stdout
    return msgspec.json.decode(output, type=Times)


def on_time(runs: list[Times], late_ms_max: float) -> tuple[list[Times], str]:
    """The runs in which the program itself was not later than this; all, when there is none. One
    that was held up by the machine says nothing of the broker."""
    calm = [one for one in runs if one.late_p99 <= late_ms_max]
    if calm or not runs:
        return calm, f"of {len(runs)} runs, those whose load came on time"
    late_ms = min(one.late_p99 for one in runs)
    return runs, f"the machine was busy: the load itself came {late_ms:.1f} ms late (p99)"


def _ms(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000


if __name__ == "__main__":
    gc.disable()
    result = measure(msgspec.json.decode(sys.argv[1], type=Load))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
