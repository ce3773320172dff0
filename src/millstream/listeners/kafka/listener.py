"""The Kafka listener: connections on sockets that are already bound, from start to stop.

There may be two doors, a plain one and one with TLS. Whoever came in, by whichever, counts and
shares alike."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, cast

from millstream.listeners.http.tls import TlsDoor
from millstream.listeners.kafka.connection import Connection
from millstream.observe.logs import get_logger
from millstream.observe.metrics import counter, counters, gauge

if TYPE_CHECKING:
    import socket
    import ssl
    from collections.abc import Iterator, Sequence

    from prometheus_client.core import Metric

    from millstream.kinds import Address
    from millstream.listeners.kafka.connection import Shared

# Connections that wait to be accepted; the kernel cuts it to its own limit (net.core.somaxconn).
BACKLOG = 2048
# How many connections are looked after in one turn of the loop.
SWEEP_CONNECTIONS = 256
# How often a listener that stops looks whether all connections have ended.
STOP_LOOK_SECONDS = 0.01

log = get_logger("kafka")


class Door(NamedTuple):
    """Where clients come in."""

    # The setting that asks for it.
    name: str
    bound: socket.socket
    address: str
    tls: ssl.SSLContext | None = None
    # What those who came in by it are told to come back to; None is where they came to.
    advertised: Address | None = None


class KafkaListener:
    name = "kafka"

    def __init__(self, shared: Shared, doors: Sequence[Door], *, connections_max: int) -> None:
        self.shared = shared
        self._connections_max = connections_max
        self._doors = doors
        self._listening: list[asyncio.Server | TlsDoor] = []
        self._ticking: asyncio.TimerHandle | None = None
        self._turned_away = 0
        self._invalid = 0

    async def start(self) -> None:
        """Listen. After this, connections are accepted."""
        for door in self._doors:
            self._listening.append(await self._open(door))
            has_tls = door.tls is not None
            log.info("listening", listener=door.name, address=door.address, tls=has_tls)
        self._tick()

    async def _open(self, door: Door) -> asyncio.Server | TlsDoor:
        loop = asyncio.get_running_loop()

        def connection() -> asyncio.BaseProtocol:
            shared = self.shared
            if len(shared.connections) >= self._connections_max:
                shared.counts.turned_away += 1
                return _TurnedAway()
            return Connection(shared, loop, door.advertised)

        if door.tls is None:
            return await loop.create_server(connection, sock=door.bound, backlog=BACKLOG)
        return TlsDoor(
            door.bound,
            door.tls,
            connection,
            backlog=BACKLOG,
            connections_max=self._connections_max,
        )

    def _tick(self) -> None:
        """Once a second: whether everybody gets on, and who did not."""
        counts = self.shared.counts
        if counts.turned_away > self._turned_away:
            self._turned_away = counts.turned_away
            log.warning(
                "too many connections",
                listener=self.name,
                connections_max=self._connections_max,
                turned_away=self._turned_away,
            )
        if counts.invalid > self._invalid:
            self._invalid = counts.invalid
            log.info(
                "requests refused",
                listener=self.name,
                refused=self._invalid,
                last=self.shared.complaint,
            )
        self._sweep(list(self.shared.connections))
        self._ticking = asyncio.get_running_loop().call_later(1.0, self._tick)

    def _sweep(self, connections: list[Connection]) -> None:
        """End connections that are idle or do not get on, some of them in each turn."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        for connection in connections[-SWEEP_CONNECTIONS:]:
            connection.sweep(now_s)
        del connections[-SWEEP_CONNECTIONS:]
        if connections:
            loop.call_soon(self._sweep, connections)

    async def stop(self, within_seconds: float) -> None:
        """Accept no more, let requests end for a while, then close what is left."""
        if self._ticking is None:
            for door in self._doors:
                door.bound.close()
            return
        self._ticking.cancel()
        for one in self._listening:
            one.close()
        for connection in list(self.shared.connections):
            connection.shut()
        try:
            async with asyncio.timeout(within_seconds):
                while self.shared.connections:  # noqa: ASYNC110  a set has no event
                    await asyncio.sleep(STOP_LOOK_SECONDS)
        except TimeoutError:
            log.warning("requests cut off", connections=len(self.shared.connections))
            for connection in list(self.shared.connections):
                connection.cut()

    def metrics(self) -> Iterator[Metric]:
        shared, counts = self.shared, self.shared.counts
        yield gauge("kafka_connections", "Connections that are open.", len(shared.connections))
        yield counter("kafka_connections_opened", "Connections taken.", counts.connections)
        yield counter("kafka_connections_refused", "Connections too many.", counts.turned_away)
        yield counter(
            "kafka_connections_ended", "Connections ended: too slow, or idle.", counts.ended
        )
        yield counter("kafka_bytes_in", "Bytes received.", counts.bytes_in)
        yield counter("kafka_bytes_out", "Bytes sent.", counts.bytes_out)
        yield gauge(
            "kafka_buffer_bytes",
            "Bytes of requests that arrive or wait, and of answers that are not read.",
            shared.buffer_bytes + shared.claimed_bytes,
        )
        yield counter("kafka_requests_invalid", "Requests that cannot be read.", counts.invalid)
        yield counters(
            "kafka_requests",
            "Requests, by API.",
            ("api",),
            {(name,): number for name, number in counts.requests.items()},
        )
        yield counters(
            "kafka_errors",
            "Errors in answers, by Kafka's names of them.",
            ("error",),
            {(name,): number for name, number in counts.errors.items()},
        )


class _TurnedAway(asyncio.Protocol):
    """There is no answer for a connection too many, so it only ends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).abort()
