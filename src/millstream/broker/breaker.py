"""The circuit breaker of a group: when everything fails, the records are not to blame.

A database that is down fails every record of a group. Without a breaker all of them would use up
their deliveries and be dead letters within minutes. So the settlings of the last while are
watched: when at least so many were made and at least half of them failed, the breaker opens, and
as long as it is open the group's records are retried instead of being moved.

It closes when at least half of those since then succeed, judged from as many settlings on as it
takes to open it, however long they take. Old ones weigh less and less: after each time that twice
as many have come together, all count half. So an outage of hours is over after a few successes.

Where less than half of the settlings have to fail before it opens, as many as that have to
succeed before it closes; otherwise it would open again at once.

Nothing of it is stored: after a restart a breaker is closed, and judges anew.
"""

from __future__ import annotations

from collections import deque

# How exact the window is: a settling is forgotten at most a sixtieth of it too early.
BUCKETS = 60
# Of the settlings since it opened, at least this part has to succeed.
SUCCESSES_PERCENT_MIN = 50


class Breaker:
    """Of one group. Pure: the time comes with each call, and never goes back."""

    __slots__ = (
        "_buckets",
        "_failed",
        "_failures_percent",
        "_settlings_min",
        "_succeeded",
        "_successes_percent",
        "_window_s",
        "opened_s",
        "openings",
    )

    def __init__(self, settlings_min: int, window_s: float, failures_percent: int) -> None:
        self._settlings_min = settlings_min
        self._window_s = window_s
        self._failures_percent = failures_percent
        self._successes_percent = max(SUCCESSES_PERCENT_MIN, 100 - failures_percent)
        # While it is closed: the time of the first settling of each bucket, how many succeeded
        # and how many failed; and the sums.
        self._buckets: deque[list[float]] = deque()
        self._succeeded = 0.0
        self._failed = 0.0
        # Since when it is open.
        self.opened_s: float | None = None
        # How often it opened, for the metrics page.
        self.openings = 0

    def settled(self, now_s: float, *, succeeded: int = 0, failed: int = 0) -> None:
        """So many settlings, now."""
        if self.opened_s is None:
            self._judge_closed(now_s, succeeded, failed)
        else:
            self._judge_open(succeeded, failed)

    def is_open(self, now_s: float) -> bool:
        """Whether dead-lettering pauses: records are retried instead."""
        return self.opened_s is not None and now_s >= self.opened_s

    def open_s(self, now_s: float) -> float | None:
        """How long it has been open."""
        return None if self.opened_s is None else max(0.0, now_s - self.opened_s)

    def _judge_closed(self, now_s: float, succeeded: int, failed: int) -> None:
        buckets = self._buckets
        while buckets and buckets[0][0] <= now_s - self._window_s:
            _, old_succeeded, old_failed = buckets.popleft()
            self._succeeded -= old_succeeded
            self._failed -= old_failed
        if not buckets or now_s - buckets[-1][0] >= self._window_s / BUCKETS:
            # Never many more than BUCKETS: they are so far apart, and end with the window.
            buckets.append([now_s, 0, 0])
        buckets[-1][1] += succeeded
        buckets[-1][2] += failed
        self._succeeded += succeeded
        self._failed += failed
        total = self._succeeded + self._failed
        if total >= self._settlings_min and self._failed * 100 >= self._failures_percent * total:
            self.opened_s = now_s
            self.openings += 1
            self._begin_anew()

    def _judge_open(self, succeeded: int, failed: int) -> None:
        self._succeeded += succeeded
        self._failed += failed
        total = self._succeeded + self._failed
        if total < self._settlings_min:
            return
        if self._succeeded * 100 >= self._successes_percent * total:
            self.opened_s = None
            self._begin_anew()
            return
        while self._succeeded + self._failed >= 2 * self._settlings_min:
            self._succeeded /= 2
            self._failed /= 2

    def _begin_anew(self) -> None:
        self._buckets.clear()
        self._succeeded = self._failed = 0.0
