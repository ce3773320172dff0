"""When to try again, and when not to.

A call is tried again when the error says that it can help and when a second try cannot do the work
twice: because nothing was sent, because the broker refused it, or because the call may be repeated
(it only reads, or carries what lets the broker recognise it). Pauses double from try to try, up to
a limit, each a random part of that, so that many clients do not come back in step. A `Retry-After`
is waited for at least.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class RetryPolicy(NamedTuple):
    """How long a call goes on trying, and how long it pauses in between."""

    timeout_s: float = 30.0
    pause_s: float = 0.05
    pause_s_max: float = 5.0

    def pauses(self, chance: Callable[[], float] = random.random) -> Pauses:
        return Pauses(self, chance)


class Pauses:
    """The pauses of one call, one after the other."""

    __slots__ = ("_chance", "_policy", "_reach_s")

    def __init__(self, policy: RetryPolicy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        self._reach_s = policy.pause_s

    def next_s(self, retry_after_s: float | None = None) -> float:
        """From half of the reach to all of it: never at once, and seldom in step."""
        reach_s = self._reach_s
        self._reach_s = min(self._policy.pause_s_max, reach_s * 2)
        pause_s = reach_s * (0.5 + 0.5 * self._chance())
        return pause_s if retry_after_s is None else retry_after_s + pause_s
