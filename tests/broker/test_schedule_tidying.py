"""What is over leaves the wheel of schedules long before it would be due."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from broker.making import House, memory_house
from millstream.broker import schedule_log, schedule_table, schedules
from millstream.broker.publishing import Outgoing, Placed
from millstream.broker.schedule_table import ScheduleTable

DAY = 86_400_000


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(schedules, "ROWS_SPARE", 20)
    monkeypatch.setattr(schedules, "SWEEP", 10)
    monkeypatch.setattr(schedule_table, "TIDY_ROWS", 5)
    house = memory_house()
    house.done(house.broker.topics.create("t", 1))
    house.done(house.broker.topics.create("other", 1))
    return house


def plan(house: House, count: int, delay_ms: int, topic: str = "t") -> list[Placed]:
    records = [Outgoing(None, b"%d" % n, partition=0, delay_ms=delay_ms) for n in range(count)]
    return house.done(house.broker.publisher.publish(topic, records)).placed


def cancel(house: House, placed: list[Placed], topic: str = "t") -> None:
    cancelling = [house.broker.schedules.cancel(topic, 0, one.offset) for one in placed]
    house.scheduler.run()
    assert all(one.error is None for one in cancelling)


def rows(house: House) -> int:
    return len(house.broker.schedules._state.table)


def pass_time(house: House, seconds: float) -> None:
    house.scheduler.advance(seconds)
    house.scheduler.run()


def test_cancelled_schedules_cost_no_memory_until_they_would_be_due(house: House) -> None:
    kept = plan(house, 30, 5 * 365 * DAY)
    for _ in range(10):
        cancel(house, plan(house, 100, 5 * 365 * DAY))
        pass_time(house, 11)
        assert rows(house) <= 2 * len(kept) + 20
    assert house.broker.schedules.pending == len(kept)


def test_purged_schedules_cost_no_memory_until_they_would_be_due(house: House) -> None:
    plan(house, 300, 400 * DAY)
    plan(house, 3, 400 * DAY, "other")
    house.done(house.broker.topics.purge("t"))
    pass_time(house, 11)
    assert rows(house) <= 2 * 3 + 20


def test_schedules_that_were_moved_on_are_in_the_wheel_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_log, "SPAN_MIN", 50)
    for _ in range(6):
        plan(house, 40, 400 * DAY)
        cancel(house, plan(house, 200, 400 * DAY, "other"), "other")
        pass_time(house, 11)
    pass_time(house, 11)
    pending = house.broker.schedules.pending
    assert pending == 240
    assert rows(house) <= 2 * pending + 20


def test_what_is_left_fires_when_it_is_due_whatever_came_while_others_were_dropped(
    house: House,
) -> None:
    plan(house, 20, 30_000)
    cancel(house, plan(house, 200, 60_000))
    cancelled = plan(house, 20, 30_000)
    house.scheduler.advance(10.5)
    for _ in range(8):
        house.scheduler.turn()
        record = Outgoing(None, b"new", partition=0, delay_ms=15_000)
        house.broker.publisher.publish("t", [record])
    cancel(house, cancelled)
    pass_time(house, 1)
    assert house.broker.schedules.pending == 28
    for _ in range(40):
        pass_time(house, 1)
    assert house.broker.reader.offsets("t", 0).high_watermark == 28
    assert house.broker.schedules.pending == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_table_that_is_tidied_while_it_is_used_loses_and_doubles_nothing(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_table, "TIDY_ROWS", 3)
    random, table, now = Random(seed), ScheduleTable(0), 0
    wanted: dict[int, int] = {}
    tidying: Any = iter(())
    for place in range(600):
        due = now + random.choice((5, 100, 3_000, 200_000, 10**8, 10**10))
        table.add((due,), (place,), (0,))
        if random.random() < 0.4:
            wanted[place] = due
        if random.random() < 0.5 and next(tidying, None) is None:
            tidying = table.tidy(lambda one, _: one in wanted)
        if random.random() < 0.1:
            now += random.choice((10, 500, 100_000))
            table.advance(now, lambda: random.random() < 0.3)
            for slot in table.ready:
                for _, met, _ in slot.take(len(slot)).rows():
                    due_ms = wanted.pop(met, None)
                    assert due_ms is None or due_ms <= now
    for _ in table.tidy(lambda one, _: one in wanted):
        pass
    left = sorted(place for slot in table.slots() for _, place, _ in slot.rows())
    ready = {place for slot in table.ready for _, place, _ in slot.rows()}
    spreading = {place for slot in table._spreading for _, place, _ in slot.rows()}
    assert [one for one in left if one in wanted] == sorted(wanted)
    assert set(left) - set(wanted) <= ready | spreading
