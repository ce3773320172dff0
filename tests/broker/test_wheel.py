"""The timing wheel against a sorted list of deadlines."""

from __future__ import annotations

from bisect import insort
from random import Random

import pytest

from millstream.broker.timers import TURN_S, Timers
from millstream.broker.wheel import HORIZON_TICKS, TICK_S, Timer, Wheel
from millstream.clock import ManualClock

# How far away a deadline is, and how far time goes on: within a tick up to beyond the horizon.
DISTANCES = (0.0, 0.001, 0.5, 3.0, 100.0, 5_000.0, 90_000.0, 700_000.0, 2_000_000.0)
STEPS = (0.004, 0.01, 0.5, 2.56, 200.0, 10_000.0, 300_000.0)


class Model:
    """What the wheel should do, in the plainest way."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 1_000.0
        self.wheel = Wheel(self.now)
        self.timers: dict[int, tuple[float, Timer]] = {}
        self.deadlines: list[tuple[float, int]] = []
        self.met: list[int] = []
        self.count = 0

    def set(self) -> None:
        deadline = self.now + self.random.choice(DISTANCES) * self.random.random()
        self.count += 1
        number = self.count
        self.timers[number] = (deadline, self.wheel.set(deadline, lambda: self.met.append(number)))
        insort(self.deadlines, (deadline, number))

    def cancel(self) -> None:
        number = next(iter(self.timers), None)
        if number is not None:
            deadline, timer = self.timers.pop(number)
            self.deadlines.remove((deadline, number))
            assert self.wheel.cancel(timer)
            assert not self.wheel.cancel(timer)

    def advance(self) -> None:
        self.now += self.random.choice(STEPS) * self.random.random()
        self.met.clear()
        assert self.wheel.advance(self.now, lambda: False)
        for number in self.met:
            deadline, timer = self.timers.pop(number)
            self.deadlines.remove((deadline, number))
            assert deadline <= self.now, "early"
            assert not timer.is_set
        if self.deadlines:
            first = self.deadlines[0][0]
            assert first > self.now - 2 * TICK_S, "late"
            next_s = self.wheel.next_s()
            assert next_s is not None
            assert next_s <= first + TICK_S
        else:
            assert self.wheel.next_s() is None
        assert len(self.wheel) == len(self.timers)


def play(seed: int, operations: int) -> None:
    model = Model(seed)
    for _ in range(operations):
        chance = model.random.random()
        if chance < 0.5:
            model.set()
        elif chance < 0.8:
            model.cancel()
        else:
            model.advance()


@pytest.mark.parametrize("seed", range(8))
def test_it_does_what_a_sorted_list_does(seed: int) -> None:
    play(seed, 12_500)


@pytest.mark.slow
def test_it_does_what_a_sorted_list_does_over_a_million_operations() -> None:
    for seed in range(100, 180):
        play(seed, 12_500)


def test_a_deadline_is_never_early_and_at_most_a_tick_late() -> None:
    wheel = Wheel(0.0)
    met: list[float] = []
    now = 0.0
    for at in (0.0101, 0.02, 2.555, 2.561, 163.84, 163.85):
        wheel.set(at, lambda at=at: met.append(now - at))  # type: ignore[misc]
    while wheel.next_s() is not None:
        now = wheel.next_s() or now
        wheel.advance(now, lambda: False)
    assert len(met) == 6
    assert all(-1e-9 <= late <= TICK_S + 1e-9 for late in met)


def test_a_deadline_beyond_the_horizon_is_met_on_time() -> None:
    wheel = Wheel(0.0)
    met: list[float] = []
    deadline = 3.5 * HORIZON_TICKS * TICK_S
    wheel.set(deadline, lambda: met.append(1))
    wheel.advance(deadline - 1.0, lambda: False)
    assert not met
    wheel.advance(deadline + TICK_S, lambda: False)
    assert met == [1]


def test_an_advance_stops_when_its_budget_is_spent_and_goes_on_later() -> None:
    wheel = Wheel(0.0)
    met: list[int] = []
    for number in range(1_000):
        wheel.set(1.0, lambda number=number: met.append(number))  # type: ignore[misc]
    assert not wheel.advance(2.0, lambda: True)
    assert 0 < len(met) < 1_000
    assert wheel.next_s() is not None
    while not wheel.advance(2.0, lambda: True):
        pass
    assert sorted(met) == list(range(1_000))


def test_a_timer_may_set_and_cancel_others_when_it_is_met() -> None:
    wheel = Wheel(0.0)
    met: list[str] = []
    other = wheel.set(1.0, lambda: met.append("other"))

    def first() -> None:
        met.append("first")
        wheel.cancel(other)
        wheel.set(0.0, lambda: met.append("next"))

    wheel.set(0.5, first)
    wheel.advance(0.6, lambda: False)
    wheel.advance(2.0, lambda: False)
    assert met == ["first", "next"]


class Loop:
    """The one call that timers make of a loop."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.armed: list[Armed] = []

    def call_later(self, delay: float, call: object) -> Armed:
        armed = Armed(self.clock.monotonic() + delay, call)
        self.armed.append(armed)
        return armed

    def run_until(self, seconds: float) -> None:
        end = self.clock.monotonic() + seconds
        while due := [one for one in self.armed if not one.is_cancelled and one.at <= end]:
            one = min(due, key=lambda armed: armed.at)
            self.armed.remove(one)
            self.clock.advance(max(0.0, one.at - self.clock.monotonic()))
            assert callable(one.call)
            one.call()
        self.clock.advance(max(0.0, end - self.clock.monotonic()))


class Armed:
    def __init__(self, at: float, call: object) -> None:
        self.at = at
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_timers_wake_for_the_next_deadline_and_sleep_without_one() -> None:
    clock = ManualClock()
    loop = Loop(clock)
    timers = Timers(clock, loop.call_later)
    met: list[float] = []
    start = clock.monotonic()
    for seconds in (30.0, 0.2, 5.0):
        timers.after(seconds, lambda: met.append(clock.monotonic() - start))
    loop.run_until(60.0)
    assert [round(at, 1) for at in met] == [0.2, 5.0, 30.0]
    assert not [one for one in loop.armed if not one.is_cancelled]
    assert TURN_S < TICK_S
