"""How long a broker that does not answer is waited for, and what is said meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millstream.wire.retry import RetryPolicy

logger = logging.getLogger("millstream.spark")

PAUSE_S, PAUSE_S_MAX = 0.05, 1.0
# A broker that restarts is back by then. One whose address is wrong never is, and who waits for the
# query should know what it waits for.
WARN_S = 3.0


class Patience:
    """Of one call: the pauses between its tries, and one warning."""

    __slots__ = ("_begin_s", "_clock", "_has_warned", "_limit_s", "_pauses", "_sleep")

    def __init__(
        self, limit_s: float, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._sleep = sleep
        self._pauses = RetryPolicy(limit_s, PAUSE_S, PAUSE_S_MAX).pauses()
        self._begin_s = clock()
        self._has_warned = False

    def pause(self, why: str) -> bool:
        """Wait for the next try; False when there is no time for one. `why` names who is away."""
        pause_s = self._pauses.next_s()
        waited_s = self._clock() - self._begin_s
        if waited_s + pause_s >= self._limit_s:
            return False
        if waited_s >= WARN_S and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s; it is tried for %g s more (the option kafkaConsumer.pollTimeoutMs)",
                why,
                round(self._limit_s - waited_s),
            )
        self._sleep(pause_s)
        return True
