"""How the broker is: the phase of its life, and whether it can do its work.

The health pages read this. Liveness is answering at all; readiness is the phase; health is
what the engine says of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import millstream
from millstream.observe.metrics import gauge, gauges

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from millstream.clock import Clock
    from millstream.kinds import Address

Phase = Literal["starting", "ready", "draining"]


class Health(Protocol):
    """What the engine says of itself: `reason` tells why when it is not ok."""

    @property
    def ok(self) -> bool: ...

    @property
    def reason(self) -> str | None: ...


@dataclass(slots=True)
class Whereabouts:
    """Where the broker is: how clients come to it, as addresses, and where its data lies."""

    http: Address | None = None
    kafka: Address | None = None
    # Where it speaks TLS, when that is apart from the plain one.
    kafka_tls: Address | None = None
    is_secure: bool = False
    data_directory: str = ""


@dataclass(frozen=True, slots=True)
class Healthy:
    """Nothing is wrong."""

    ok: bool = True
    reason: str | None = None


class Status:
    """One a broker; the server moves it along, listeners and metrics read it."""

    __slots__ = ("_clock", "_started", "health", "node_id", "notes", "phase", "whereabouts")

    def __init__(self, *, node_id: int, clock: Clock) -> None:
        self.node_id = node_id
        self.phase: Phase = "starting"
        # The engine's own word, once there is an engine.
        self.health: Callable[[], Health] = Healthy
        # What else there is to know; nothing in it makes the broker unhealthy.
        self.notes: Callable[[], dict[str, object]] = dict
        self.whereabouts = Whereabouts()
        self._clock = clock
        self._started = clock.monotonic()

    @property
    def uptime_seconds(self) -> float:
        return self._clock.monotonic() - self._started

    def metrics(self) -> Iterator[Metric]:
        """For the metrics page."""
        version, node = millstream.__version__, str(self.node_id)
        yield gauges("info", "Which broker this is.", ("version", "node_id"), {(version, node): 1})
        yield gauge("uptime_seconds", "Time since the process started.", self.uptime_seconds)
        yield gauge("ready", "1 while clients are served.", int(self.phase == "ready"))
        yield gauge("healthy", "1 while nothing is wrong.", int(self.health().ok))
