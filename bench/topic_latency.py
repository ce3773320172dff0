"""How long a publish takes at half of the highest rate, open loop.

Requests are due at even distances, whatever the broker does; the latency of each counts from when
it was due, so that a broker that stalls cannot hide it by slowing the load down. The generator
spins on one core: sleeping would add its own lateness to every figure.
"""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator
from urllib.parse import urlsplit

from bench import topics
from bench.harness import Bench, Goal, Line, Unit
from bench.harness import make_line as line_of
from bench.servers import CONNECTIONS, broker

MILLISECONDS = Unit("ms", is_higher_better=False)
PARTITIONS = 3


def publish_latency(bench: Bench) -> Iterator[Line]:
    with broker(bench.scratch) as ours:
        topics.create(ours.url, "t", PARTITIONS, "every")
        highest = max(
            topics.publish_rate(bench.scratch, ours.url, "t", bench.scale.seconds)
            for _ in range(min(3, bench.scale.runs))
        )
        rate = highest / 2
        runs = [
            _open_loop(ours.url, rate, max(1.0, bench.scale.seconds))
            for _ in range(bench.scale.runs)
        ]
    for name, share, goal in (("latency.p50", 0.50, 1.0), ("latency.p99", 0.99, 10.0)):
        yield line_of(
            name,
            mode="fsync every",
            unit=MILLISECONDS,
            values=[_quantile(run, share) for run in runs],
            taken="median",
            goal=Goal("value at most", goal),
            note=f"{rate:,.0f} publishes/s, half of the highest, from when each was due",
        )


def _quantile(latencies_ms: list[float], share: float) -> float:
    return statistics.quantiles(latencies_ms, n=1000)[round(share * 1000) - 1]


def _open_loop(url: str, rate: float, seconds: float) -> list[float]:
    """Latencies in milliseconds of all requests that were due in this time."""
    generator = _Generator(url)
    try:
        return generator.run(rate, seconds)
    finally:
        generator.close()


class _Generator:
    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        host, port = str(place.hostname), int(place.port or 80)
        self._request = (
            f"POST /v1/topics/t/messages HTTP/1.1\r\nhost: {place.netloc}\r\n"
            "content-type: application/octet-stream\r\n"
            f"content-length: {topics.SMALL_BYTES}\r\n\r\n{'x' * topics.SMALL_BYTES}"
        ).encode()
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        # When the requests under way on a connection were due, and the end of what was read.
        self._due: dict[int, deque[float]] = {}
        self._tails: dict[int, bytes] = {}
        for _ in range(CONNECTIONS):
            one = socket.create_connection((host, port))
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setblocking(False)
            number = one.fileno()
            self._sockets[number] = one
            self._due[number] = deque()
            self._tails[number] = b""
            self._poll.register(number, select.EPOLLIN)

    def close(self) -> None:
        self._poll.close()
        for one in self._sockets.values():
            one.close()

    def run(self, rate: float, seconds: float) -> list[float]:
        latencies: list[float] = []
        count = int(rate * seconds)
        step = 1 / rate
        numbers = list(self._sockets)
        clock = time.perf_counter
        start = clock() + 0.01
        sent = 0
        # What is slower than this is a failure, not a latency.
        deadline = start + seconds + 30
        while len(latencies) < count:
            now = clock()
            while sent < count and start + sent * step <= now:
                number = numbers[sent % len(numbers)]
                self._sockets[number].send(self._request)
                self._due[number].append(start + sent * step)
                sent += 1
            for number, _ in self._poll.poll(0):
                self._receive(number, latencies)
            if now > deadline:
                raise RuntimeError(f"{count - len(latencies)} of {count} were not answered")
        return latencies

    def _receive(self, number: int, latencies: list[float]) -> None:
        data = self._tails[number] + self._sockets[number].recv(65536)
        if b"HTTP/1.1 " in data and b"HTTP/1.1 200 " not in data:
            raise RuntimeError(f"a publish was refused: {data[:300]!r}")
        now = time.perf_counter()
        # A blank line ends each head, and there is none in a body.
        due = self._due[number]
        latencies.extend((now - due.popleft()) * 1000 for _ in range(data.count(b"\r\n\r\n")))
        self._tails[number] = data[-3:] if not data.endswith(b"\r\n\r\n") else b""
