"""When which schedule is due: a hierarchical wheel on the wall clock, of arrays.

    level 0   slots of 1 tick         within 2.56 s
    level 1   slots of 256 ticks      within 2.7 min
    level 2   slots of 2^14 ticks     within 2.9 h
    level 3   slots of 2^20 ticks     within 7.76 days
    level 4   slots of 2^26 ticks     all beyond, 7.76 days each

A tick is 10 ms. The levels are those of `wheel.py`, and so is the rounding: a deadline rounds up
to the next tick, so nothing is early. What differs is that a slot is three arrays and no objects,
20 bytes for a schedule, and that slots have absolute numbers: the wall clock may be put forward or
back, and then the hand is simply somewhere else. Slots between here and there are opened when they
are reached, and what is due by the hand but not by the clock is put in again by its owner.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

TICK_MS = 10
SHIFTS = (0, 8, 14, 20, 26)
LEVELS = len(SHIFTS)
# By how many bits hand and deadline differ: the lowest level in whose round both lie.
_LEVEL_OF_BITS = tuple(
    next((level for level in range(1, LEVELS) if bits <= SHIFTS[level]), LEVELS) - 1
    for bits in range(65)
)
# How many are moved to a lower level between two looks at the time: about 0.1 ms.
BURST = 256
# How many are looked at in one go when those that are over are dropped.
TIDY_ROWS = 5_000


class Slot:
    """Schedules, by columns: due time, place in the log, and the number of the topic."""

    __slots__ = ("_taken", "dues", "places", "topics")

    def __init__(self) -> None:
        # So many in front are no longer here: to remove them would move all others.
        self._taken = 0
        self.dues = array("q")
        self.places = array("q")
        self.topics = array("I")

    def __len__(self) -> int:
        return len(self.dues) - self._taken

    def take(self, count: int) -> Slot:
        """The first so many; they are no longer here."""
        first, last = self._taken, self._taken + count
        self._taken = min(last, len(self.dues))
        taken = Slot()
        taken.dues = self.dues[first:last]
        taken.places = self.places[first:last]
        taken.topics = self.topics[first:last]
        return taken

    def keep(self, is_wanted: Callable[[int, int], bool]) -> Iterator[int]:
        """Drop all rows but these, a slice at a time: answers how many each has looked at. What is
        added meanwhile is looked at too; when some are taken meanwhile, it is left as it was."""
        kept, at, first = Slot(), self._taken, self._taken
        while at < len(self.dues):
            end = at + TIDY_ROWS
            columns = (self.dues[at:end], self.places[at:end], self.topics[at:end])
            for due, place, topic in zip(*columns, strict=True):
                if is_wanted(place, topic):
                    kept.dues.append(due)
                    kept.places.append(place)
                    kept.topics.append(topic)
            at += len(columns[0])
            yield len(columns[0])
            if self._taken != first:
                return
        self.dues, self.places, self.topics, self._taken = kept.dues, kept.places, kept.topics, 0

    def rows(self) -> Iterator[tuple[int, int, int]]:
        first = self._taken
        return zip(self.dues[first:], self.places[first:], self.topics[first:], strict=True)


class ScheduleTable:
    __slots__ = ("_levels", "_spreading", "_tick", "ready")

    def __init__(self, now_ms: int) -> None:
        # The tick up to which slots were opened.
        self._tick = now_ms // TICK_MS
        self._levels: tuple[dict[int, Slot], ...] = tuple({} for _ in SHIFTS)
        # Slots that were reached and are being spread out over lower levels.
        self._spreading: list[Slot] = []
        # Slots of what is due, or was, before the clock was put back.
        self.ready: deque[Slot] = deque()

    def __len__(self) -> int:
        return sum(self.sizes()) + sum(map(len, self._spreading)) + sum(map(len, self.ready))

    def sizes(self) -> list[int]:
        """How many each level holds."""
        return [sum(map(len, level.values())) for level in self._levels]

    def add(self, dues: Iterable[int], places: Iterable[int], topics: Iterable[int]) -> None:
        """Schedules, by columns as in a slot; the last may be longer."""
        hand, levels, of_bits, shifts = self._tick, self._levels, _LEVEL_OF_BITS, SHIFTS
        for due, place, topic in zip(dues, places, topics, strict=False):
            tick = -(-due // TICK_MS)
            if tick <= hand:
                slot = self._ready_slot()
            else:
                level = of_bits[(tick ^ hand).bit_length()]
                key = tick >> shifts[level]
                found = levels[level].get(key)
                if found is None:
                    found = levels[level][key] = Slot()
                slot = found
            slot.dues.append(due)
            slot.places.append(place)
            slot.topics.append(topic)

    def _ready_slot(self) -> Slot:
        if not self.ready:
            self.ready.append(Slot())
        return self.ready[-1]

    def tidy(self, is_wanted: Callable[[int, int], bool]) -> Iterator[int]:
        """Drop what is not wanted, by place and topic; between two slices anything may happen."""
        for level in self._levels:
            for key, slot in list(level.items()):
                yield from slot.keep(is_wanted)
                if not len(slot) and level.get(key) is slot:
                    del level[key]

    def slots(self) -> list[Slot]:
        """All of them, as they are now."""
        waiting = [slot for level in self._levels for slot in level.values()]
        return [*waiting, *self._spreading, *self.ready]

    def next_ms(self) -> int | None:
        """When to call `advance` next; None when there is nothing to wait for."""
        if self.ready or self._spreading:
            return self._tick * TICK_MS
        level, key = self._first()
        return None if level < 0 else (key << SHIFTS[level]) * TICK_MS

    def advance(self, now_ms: int, spent: Callable[[], bool]) -> bool:
        """Open every slot up to now. False when `spent` said stop with some left."""
        now = now_ms // TICK_MS
        # The clock was put back: slots that are open stay so, new ones are opened from here on.
        self._tick = min(self._tick, now)
        while True:
            while self._spreading:
                self._spread()
                if spent():
                    return False
            level, key = self._first()
            tick = key << SHIFTS[level] if level >= 0 else now + 1
            if tick > now:
                self._tick = now
                return True
            self._tick = max(self._tick, tick)
            slot = self._levels[level].pop(key)
            (self._spreading if level else self.ready).append(slot)

    def _first(self) -> tuple[int, int]:
        """Level and number of the slot that is reached first, of equals the highest; level -1
        without any."""
        best, best_tick = (-1, 0), -1
        for level, slots in enumerate(self._levels):
            if slots:
                key = min(slots)
                tick = key << SHIFTS[level]
                if best_tick < 0 or tick <= best_tick:
                    best, best_tick = (level, key), tick
        return best

    def _spread(self) -> None:
        slot = self._spreading[-1]
        part = slot.take(BURST)
        if not len(slot):
            self._spreading.pop()
        self.add(part.dues, part.places, part.topics)
