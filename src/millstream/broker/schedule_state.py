"""What is known of schedules in memory: one byte for each offset of their topic that is kept, 20
more in the wheel, and nothing else for each. Records stay on disk. What is over stays in the wheel
until there are more of these than of others.

What is being fired or cancelled is busy until that is durable, and stays pending here: an answer
that depends on it waits for it, and the log is not cut past it.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import repeat
from typing import TYPE_CHECKING

from millstream.broker.schedule_table import ScheduleTable
from millstream.broker.schedule_values import State

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from millstream.engine.pending import Pending

LATENESS_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 60.0)
_PENDING = bytes((State.PENDING,))


class Owner:
    """A topic, by its UUID, and its schedules."""

    __slots__ = ("endings", "name", "number", "pending", "purged_before", "uuid", "why")

    def __init__(self, number: int, uuid: bytes) -> None:
        self.number = number
        self.uuid = uuid
        self.name = ""
        # Those that are pending and not busy.
        self.pending = 0
        # Places before this one are over, and why.
        self.purged_before = 0
        self.why = State.NONE
        # Purges that are not durable yet.
        self.endings = 0


class Counts:
    """Since the start."""

    __slots__ = ("added", "cancelled", "expired", "fired", "lateness", "lateness_sum_s", "moved",
                 "retries")  # fmt: skip

    def __init__(self) -> None:
        self.added = 0
        self.fired = 0
        self.cancelled = 0
        self.expired = 0
        self.moved = 0
        # Firings that were refused and are tried again.
        self.retries = 0
        # The last one is for what is above every bound.
        self.lateness = [0] * (len(LATENESS_BOUNDS_S) + 1)
        self.lateness_sum_s = 0.0

    def late(self, milliseconds: int) -> None:
        seconds = max(0, milliseconds) / 1000
        self.lateness[bisect_left(LATENESS_BOUNDS_S, seconds)] += 1
        self.lateness_sum_s += seconds


class ScheduleState:
    __slots__ = (
        "base",
        "busy",
        "counts",
        "dropped",
        "ids",
        "owners",
        "owners_by_uuid",
        "pending",
        "places",
        "states",
        "table",
    )

    def __init__(self, now_ms: int) -> None:
        self.table = ScheduleTable(now_ms)
        # Of each offset from `base` on.
        self.base = 0
        self.states = bytearray()
        self.owners: list[Owner] = []
        self.owners_by_uuid: dict[bytes, Owner] = {}
        self.pending = 0
        # Places that are being fired or cancelled, and what is done then.
        self.busy: dict[int, Pending[None]] = {}
        # Of those, the ones that left the wheel meanwhile.
        self.dropped: set[int] = set()
        # Of schedules that were moved on: id → place, and back.
        self.places: dict[int, int] = {}
        self.ids: dict[int, int] = {}
        self.counts = Counts()

    def owner(self, uuid: bytes) -> Owner:
        owner = self.owners_by_uuid.get(uuid)
        if owner is None:
            owner = self.owners_by_uuid[uuid] = Owner(len(self.owners), uuid)
            self.owners.append(owner)
        return owner

    @property
    def end(self) -> int:
        return self.base + len(self.states)

    def state(self, place: int) -> State:
        at = place - self.base
        return State(self.states[at]) if 0 <= at < len(self.states) else State.NONE

    def is_live(self, place: int, owner: Owner) -> bool:
        """Pending, for all that is durable."""
        return self.states[place - self.base] == State.PENDING and place >= owner.purged_before

    def is_free(self, place: int, owner: Owner) -> bool:
        """Pending, and not about to be fired or cancelled."""
        return self.is_live(place, owner) and place not in self.busy

    def add(self, owner: Owner, base: int, dues: Sequence[int]) -> None:
        """Schedules that follow each other in the log."""
        count = len(dues)
        self.extend(base + count)
        at = base - self.base
        if base < owner.purged_before:
            self.states[at : at + count] = bytes((owner.why,)) * count
            return
        self.states[at : at + count] = _PENDING * count
        owner.pending += count
        self.pending += count
        self.table.add(dues, range(base, base + count), repeat(owner.number))

    def extend(self, end: int) -> None:
        more = end - self.end
        if more > 0:
            self.states += bytes(more)

    def occupy(self, places: Iterable[tuple[int, Owner]], done: Pending[None]) -> None:
        """These are being fired or cancelled from now on."""
        for place, owner in places:
            self.busy[place] = done
            owner.pending -= 1
            self.pending -= 1

    def finish(self, place: int, state: State) -> None:
        """It is durably so."""
        del self.busy[place]
        self.dropped.discard(place)
        self.states[place - self.base] = state
        self.forget_id(place)

    def release(self, place: int, owner: Owner) -> bool:
        """It was not fired or cancelled after all; whether it is pending again."""
        del self.busy[place]
        if place < owner.purged_before:
            self.states[place - self.base] = owner.why
            self.counts.expired += 1
            return False
        owner.pending += 1
        self.pending += 1
        return True

    def forget_id(self, place: int) -> None:
        if self.ids:
            id = self.ids.pop(place, None)
            if id is not None:
                del self.places[id]

    def purge(self, owner: Owner, before: int, why: State) -> None:
        """All of a topic's that lie before an offset are over."""
        self.counts.expired += owner.pending
        self.pending -= owner.pending
        owner.pending = 0
        owner.purged_before, owner.why = before, why

    def is_wanted(self, place: int, number: int) -> bool:
        """Whether a row of the wheel is of use still: it is not when its schedule is over."""
        at, owner = place - self.base, self.owners[number]
        if at < 0 or self.states[at] != State.PENDING:
            return False
        if place >= owner.purged_before or place in self.busy:
            return True
        self.states[at] = owner.why
        self.forget_id(place)
        return False

    def first_pending(self) -> int:
        """The oldest place that is kept; the end without one."""
        at = self.states.find(_PENDING)
        return self.end if at < 0 else self.base + at

    def cut(self, before: int) -> None:
        del self.states[: before - self.base]
        self.base = max(self.base, before)
