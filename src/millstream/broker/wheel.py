"""A hierarchical timing wheel: many deadlines, each set, cancelled and met in constant time.

    level 0   256 slots of 1 tick       2.56 s
    level 1    64 slots of 256 ticks    2.7 min
    level 2    64 slots of 2^14 ticks   2.9 h
    level 3    64 slots of 2^20 ticks   7.76 days

A timer lies in the slot of the lowest level that reaches its deadline. When the hand of a level
has gone round, the next slot of the level above is spread out below (cascading). A deadline
beyond the last level waits there and is spread out again, so it is met on time too.

A tick is 10 ms. Deadlines round up to the next tick: a timer is never early, and at most a tick
late. The wheel has no clock and no loop: its owner calls `advance` with the time, and `next_s`
tells when that is worth while. An `advance` stops after its budget and goes on at the next call,
so that a million deadlines at one moment do not hold up the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

TICK_S = 0.01
# Bits of each level: 256, 64, 64 and 64 slots.
LEVEL_BITS = (8, 6, 6, 6)
SHIFTS = (0, 8, 14, 20)
SLOTS = tuple(1 << bits for bits in LEVEL_BITS)
HORIZON_TICKS = 1 << (SHIFTS[-1] + LEVEL_BITS[-1])
# How many timers are met, or moved, between two looks at the time.
BURST = 64


class Timer:
    """A deadline and what to call. Held by its slot, so that cancelling is one removal."""

    __slots__ = ("_slot", "call", "tick")

    def __init__(self, tick: int, call: Callable[[], None]) -> None:
        self.tick = tick
        self.call = call
        self._slot: _Slot | None = None

    @property
    def is_set(self) -> bool:
        return self._slot is not None


_Slot: TypeAlias = dict[Timer, None]


class Wheel:
    __slots__ = ("_count", "_due", "_levels", "_occupied", "_tick")

    def __init__(self, now_s: float) -> None:
        # The last tick whose deadlines were taken.
        self._tick = int(now_s / TICK_S)
        self._levels: tuple[list[_Slot], ...] = tuple([{} for _ in range(slots)] for slots in SLOTS)
        # A bit for each slot that may have timers, so that empty ones are skipped at once.
        self._occupied = [0] * len(SLOTS)
        # Slots that were reached and are not worked off yet: to be met, or to be spread out.
        self._due: list[_Slot] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def set(self, deadline_s: float, call: Callable[[], None]) -> Timer:
        """Call at a time, or at the next `advance` when it has passed."""
        tick = -int(-deadline_s // TICK_S)
        timer = Timer(max(tick, self._tick + 1), call)
        self._place(timer)
        self._count += 1
        return timer

    def cancel(self, timer: Timer) -> bool:
        """False when it was met or cancelled before."""
        slot = timer._slot
        if slot is None:
            return False
        del slot[timer]
        timer._slot = None
        self._count -= 1
        return True

    def next_s(self) -> float | None:
        """When to call `advance` next: never late for a deadline. None when there is none."""
        if self._due:
            return self._tick * TICK_S
        if not self._count:
            return None
        return self._next_tick() * TICK_S

    def advance(self, now_s: float, spent: Callable[[], bool]) -> bool:
        """Meet every deadline up to now. False when `spent` said stop with some left."""
        now = int(now_s / TICK_S)
        while True:
            if self._due and not self._work_off(spent):
                return False
            if self._tick >= now:
                return True
            if not self._count:
                self._tick = now
                return True
            # Nothing happens between here and the next slot that has timers.
            self._tick = min(max(self._next_tick(), self._tick + 1), now)
            self._reach(self._tick)

    def _place(self, timer: Timer) -> None:
        distance = timer.tick - self._tick
        if distance < SLOTS[0]:
            level = 0
        elif distance < 1 << SHIFTS[2]:
            level = 1
        elif distance < 1 << SHIFTS[3]:
            level = 2
        else:
            level = 3
        # Beyond the horizon: into the slot that is reached last, and on from there.
        tick = min(timer.tick, self._tick + HORIZON_TICKS - 1)
        index = (tick >> SHIFTS[level]) & (SLOTS[level] - 1)
        slot = self._levels[level][index]
        slot[timer] = None
        timer._slot = slot
        self._occupied[level] |= 1 << index

    def _next_tick(self) -> int:
        """The next tick at which a slot with timers is met or spread out."""
        best = self._tick + HORIZON_TICKS
        for level, shift in enumerate(SHIFTS):
            occupied = self._occupied[level]
            if not occupied:
                continue
            slots = SLOTS[level]
            hand = (self._tick >> shift) & (slots - 1)
            # Turn the bits so that the slot after the hand is the lowest.
            first = (hand + 1) & (slots - 1)
            turned = (occupied >> first) | (occupied << (slots - first))
            steps = ((turned & -turned).bit_length() - 1) % slots + 1
            best = min(best, ((self._tick >> shift) + steps) << shift)
        return best

    def _reach(self, tick: int) -> None:
        """Take the slots whose turn it is, the highest level first: what is spread out may
        belong to this very tick."""
        for level in range(len(SHIFTS) - 1, -1, -1):
            shift = SHIFTS[level]
            if tick & ((1 << shift) - 1):
                continue
            index = (tick >> shift) & (SLOTS[level] - 1)
            if not self._occupied[level] >> index & 1:
                continue
            self._occupied[level] &= ~(1 << index)
            slot = self._levels[level][index]
            if slot:
                self._levels[level][index] = {}
                self._due.append(slot)

    def _work_off(self, spent: Callable[[], bool]) -> bool:
        while self._due:
            slot = self._due[0]
            for _ in range(BURST):
                if not slot:
                    break
                timer, _none = slot.popitem()
                if timer.tick <= self._tick:
                    timer._slot = None
                    self._count -= 1
                    timer.call()
                else:
                    self._place(timer)
            if not slot:
                self._due.pop(0)
            elif spent():
                return False
        return True
