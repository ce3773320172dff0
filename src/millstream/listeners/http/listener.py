"""One HTTP listener: uvicorn with the httptools parser, on a socket that is already bound."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.server import ServerState

from millstream.listeners.http.answer import Dated
from millstream.listeners.http.heads import Heads
from millstream.listeners.http.hot import NoLane
from millstream.listeners.http.lane import LaneProtocol
from millstream.listeners.http.tls import TlsDoor
from millstream.listeners.http.websocket import WebSocket
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    import socket
    import ssl

    from starlette.types import ASGIApp

    from millstream.listeners.http.hot import HotRoutes

# Connections that wait to be accepted; the kernel cuts it to its own limit (net.core.somaxconn).
BACKLOG = 2048
# An idle connection is closed after this; longer than common proxies keep theirs (60 s), so that
# it is the proxy that closes and no request is lost between the two.
KEEP_ALIVE_SECONDS = 75
# How many connections are looked after in one turn of the loop: ten thousand would take
# milliseconds, and somebody waits.
SWEEP_CONNECTIONS = 256
# How often a listener that stops looks whether all connections have ended.
STOP_LOOK_SECONDS = 0.01
# Turns of the loop until a connection that was cut is gone.
CUT_TURNS = 5

log = get_logger("http")


class HttpListener:
    """Serves an application from `start` to `stop`. Signals are the server's business, not ours."""

    def __init__(
        self,
        app: ASGIApp,
        bound: socket.socket,
        *,
        name: str,
        address: str,
        lane: HotRoutes | None = None,
        tls: ssl.SSLContext | None = None,
        connections_max: int = sys.maxsize,
    ) -> None:
        self.name = name
        self.address = address
        self._tls = tls
        self._dated = Dated(time.time())
        self._lane = lane_class(lane or NoLane(), self._dated, connections_max)
        self._config = uvicorn.Config(
            app,
            http=self._lane,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._state = ServerState()
        self._socket = bound
        self._listening: asyncio.Server | TlsDoor | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._turned_away = 0

    async def start(self) -> None:
        """Listen. After this, connections are accepted."""
        loop = asyncio.get_running_loop()
        if self._tls is None:
            self._listening = await loop.create_server(
                self._connection, sock=self._socket, backlog=BACKLOG
            )
        else:
            self._listening = TlsDoor(
                self._socket,
                self._tls,
                self._connection,
                backlog=BACKLOG,
                connections_max=self._lane.connections_max,
            )
        has_tls = self._tls is not None
        log.info("listening", listener=self.name, address=self.address, tls=has_tls)
        self._tick()

    @property
    def connections(self) -> list[object]:
        return list(self._state.connections)

    def _connection(self) -> LaneProtocol:
        return self._lane(config=self._config, server_state=self._state, app_state={})

    def _tick(self) -> None:
        """Once a second: what time it is, and whether everybody gets on."""
        self._dated.set_time(time.time())
        self._state.default_headers = [(b"date", self._dated.date)]
        if self._lane.turned_away > self._turned_away:
            self._turned_away = self._lane.turned_away
            log.warning(
                "too many connections",
                listener=self.name,
                connections_max=self._lane.connections_max,
                turned_away=self._turned_away,
            )
        self._sweep(self.connections)
        self._ticking = asyncio.get_running_loop().call_later(1.0, self._tick)

    def _sweep(self, connections: list[object]) -> None:
        """End connections that are idle or do not get on, some of them in each turn."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for connection in connections[-SWEEP_CONNECTIONS:]:
            if isinstance(connection, LaneProtocol):
                connection.sweep(now, KEEP_ALIVE_SECONDS)
        del connections[-SWEEP_CONNECTIONS:]
        if connections:
            loop.call_soon(self._sweep, connections)

    async def stop(self, within_seconds: float) -> None:
        """Accept no more, let requests end for a while, then close what is left."""
        if self._ticking is None or self._listening is None:
            self._socket.close()
            return
        self._ticking.cancel()
        self._listening.close()
        state = self._state
        for connection in list(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(within_seconds):
                # Not until the server says that it is closed: it would wait for clients that
                # connected and never began to talk.
                while state.connections or state.tasks:  # noqa: ASYNC110  uvicorn has no event
                    await asyncio.sleep(STOP_LOOK_SECONDS)
        except TimeoutError:
            if state.connections:
                log.warning("requests cut off", connections=len(state.connections))
            for task in list(state.tasks):
                task.cancel()
            for left in self.connections:
                if isinstance(left, WebSocket):
                    left.cut()
                elif (transport := getattr(left, "transport", None)) is not None:
                    transport.abort()
            # Their ends come in the next turns; what a consumer was not sent goes back then.
            for _ in range(CUT_TURNS):
                await asyncio.sleep(0)


def lane_class(routes: HotRoutes, dated: Dated, connections_max: int) -> type[LaneProtocol]:
    """A protocol class with its routes, for uvicorn's configuration."""
    shared = {
        "routes": routes,
        "heads": Heads(routes, dated),
        "dated": dated,
        "connections_max": connections_max,
    }
    return type("Lane", (LaneProtocol,), shared)
