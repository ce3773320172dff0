"""Snapshots of views, now and then, so that a start has little to replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.broker.timers import Timers
    from millstream.broker.views import Views
    from millstream.broker.wheel import Timer
    from millstream.engine.protocol import Engine


class ViewSnapshots:
    """Asks the engine, view by view: two children at once would only share the disk."""

    __slots__ = (
        "_engine",
        "_is_stopped",
        "_seconds",
        "_timer",
        "_timers",
        "_views",
        "failed",
        "taken",
    )

    def __init__(self, engine: Engine, views: Views, timers: Timers, seconds: float) -> None:
        self._engine = engine
        self._views = views
        self._timers = timers
        self._seconds = seconds
        self._timer: Timer | None = None
        self._is_stopped = False
        self.taken = 0
        self.failed = 0

    def start(self) -> None:
        self._timer = self._timers.after(self._seconds, self._run)

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._timers.cancel(self._timer)

    def _run(self) -> None:
        follow(self.take()).then(lambda _: None if self._is_stopped else self.start())

    def take(self) -> Generator[Pending[Any], Any, None]:
        """Of every view that has something new."""
        for view in self._views:
            if self._is_stopped:
                return
            try:
                offset = yield self._engine.save_view(view.partition, view.name)
            except (MillstreamError, OSError) as error:
                # The log has it all; the next time may be better.
                self.failed += 1
                _logger().warning("no snapshot of a view", view=view.name, error=str(error))
            else:
                self.taken += offset is not None


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
