"""One HTTP listener: uvicorn with the httptools parser, on a socket that is already bound."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import uvicorn

from millstream.listeners.http.lane import LaneProtocol, lane_class
from millstream.observe.logs import get_logger

if TYPE_CHECKING:
    import socket

    from starlette.types import ASGIApp

    from millstream.listeners.http.lane import HotRoutes

# Connections that wait to be accepted; the kernel cuts it to its own limit (net.core.somaxconn).
BACKLOG = 2048
# An idle connection is closed after this; longer than common proxies keep theirs (60 s), so that
# it is the proxy that closes and no request is lost between the two.
KEEP_ALIVE_SECONDS = 75

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
    ) -> None:
        self.name = name
        self.address = address
        config = uvicorn.Config(
            app,
            http=lane_class(lane) if lane is not None else "httptools",
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
        config.load()
        self._socket = bound
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._ticking: asyncio.Task[None] | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Listen. After this, connections are accepted."""
        await self._server.startup(sockets=[self._socket])
        log.info("listening", listener=self.name, address=self.address)
        # uvicorn's own loop keeps the Date header right.
        self._ticking = asyncio.create_task(self._server.main_loop())
        self._sweep()

    def _sweep(self) -> None:
        """Once a second: end connections that are idle or do not get on."""
        loop = asyncio.get_running_loop()
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, LaneProtocol):
                connection.sweep(loop.time(), KEEP_ALIVE_SECONDS)
        self._sweeping = loop.call_later(1.0, self._sweep)

    async def stop(self, within_seconds: float) -> None:
        """Accept no more, let requests end for a while, then close what is left."""
        if self._ticking is None:
            self._socket.close()
            return
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._server.should_exit = True
        await self._ticking
        try:
            async with asyncio.timeout(within_seconds):
                await self._server.shutdown(sockets=[self._socket])
        except TimeoutError:
            state = self._server.server_state
            if state.connections:
                log.warning("requests cut off", connections=len(state.connections))
            for task in list(state.tasks):
                task.cancel()
            for connection in list(state.connections):
                transport = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
