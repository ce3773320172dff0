"""A group as far as it receives by lease: its limits, and who waits for room."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from millstream.broker.delivery_values import DeliveryCounts
from millstream.broker.ledger import Tally

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.breaker import Breaker
    from millstream.broker.delivery_values import Received
    from millstream.broker.polling import Polling
    from millstream.broker.shares import Share


class Crew:
    __slots__ = (
        "_freed",
        "_has_room",
        "_is_waking",
        "_limited",
        "_member_max",
        "_open_max",
        "breaker",
        "counts",
        "inflight",
        "name",
        "shares",
        "tally",
    )

    def __init__(
        self,
        name: str,
        breaker: Breaker,
        open_max: Callable[[], int],
        member_max: Callable[[], int],
    ) -> None:
        """These answer how many records may be open now, and how many one member may have."""
        self.name = name
        self._open_max = open_max
        self._member_max = member_max
        # Receives that wait for room, by the member that has too much; "" is the group. Apart
        # from those that wait for records, because news of records is of no use to them.
        self._limited: dict[str, OrderedDict[Polling[Received], None]] = {}
        # Members among them that settled something.
        self._freed: set[str] = set()
        self._has_room = False
        self._is_waking = False
        self.breaker = breaker
        self.counts = DeliveryCounts()
        self.tally = Tally()
        self.shares: dict[str, Share] = {}
        # How many records each member has leased.
        self.inflight: dict[str, int] = {}

    @property
    def open_count(self) -> int:
        return self.tally.open

    # ---- limits

    def begin(self, member: str, count: int) -> None:
        self.inflight[member] = self.inflight.get(member, 0) + count

    def end(self, member: str, count: int) -> None:
        left = self.inflight.get(member, 0) - count
        if left > 0:
            self.inflight[member] = left
        else:
            self.inflight.pop(member, None)
        if member in self._limited:
            self._freed.add(member)

    def wait_for_room(self, limit: str, polling: Polling[Received]) -> None:
        self._limited.setdefault(limit, OrderedDict())[polling] = None

    def leave(self, limit: str, polling: Polling[Received]) -> None:
        line = self._limited.get(limit)
        if line is not None:
            line.pop(polling, None)
            if not line:
                del self._limited[limit]

    def wake_limited(self) -> None:
        """One of each limit that has room now; it wakes the next, if there is more."""
        self._has_room = True
        if self._is_waking:
            return
        self._is_waking = True
        while self._has_room and self._limited:
            self._has_room = False
            freed, self._freed = self._freed, set()
            if self.tally.open < self._open_max():
                freed.add("")
            for limit in freed:
                line = self._limited.get(limit)
                if line:
                    next(iter(line)).wake()
                    if limit and limit in self._limited and self._has_member_room(limit):
                        self._freed.add(limit)
        self._is_waking = False

    def _has_member_room(self, member: str) -> bool:
        return self.inflight.get(member, 0) < self._member_max()

    def limits_changed(self) -> None:
        """Each limit may leave more room now."""
        self._freed.update(self._limited)
        self.wake_limited()

    def limited(self) -> list[Polling[Received]]:
        return [polling for line in self._limited.values() for polling in line]
