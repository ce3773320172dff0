"""Named schedules, with time by hand, and with the plug pulled."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from broker.making import House, local_house, memory_house
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import WAYS, survivor
from millstream.broker.named_schedules import NAMED_MAX, NamedView, Plan
from millstream.errors import (
    MessageTooLarge,
    PartitionUnknown,
    ScheduleInvalid,
    ScheduleUnknown,
    TooManySchedules,
)
from millstream.log.batch import LANES, Record

MINUTE_MS, HOUR_MS, DAY_MS = 60_000, 3_600_000, 86_400_000


@pytest.fixture
def house() -> House:
    house = memory_house()
    house.done(house.broker.topics.create("t", 1))
    return house


def every(seconds: int, **more: Any) -> Plan:
    given: dict[str, Any] = {"name": "n", "topic": "t", "every_ms": seconds * 1000, "value": b"v"}
    return Plan(**(given | more))


def stored(house: House) -> list[Record]:
    count = house.broker.topics.get("t").partitions
    fetched = [house.broker.reader.fetch("t", n, 0, 1000, 1 << 30) for n in range(count)]
    return [record for one in fetched for record in house.done(one).records]


def advance(house: House, seconds: float) -> None:
    house.scheduler.advance(seconds)
    house.scheduler.run()


def test_a_record_is_published_at_each_interval(house: House) -> None:
    named = house.done(
        house.broker.named_schedules.put(every(10, key=b"k", lane=LANES.index("low")))
    )
    assert named.next_ms == house.scheduler.clock.now_ms + 10_000
    advance(house, 9.9)
    assert stored(house) == []
    advance(house, 0.2)
    [record] = stored(house)
    assert (record.key, record.value, record.lane) == (b"k", b"v", "low")
    advance(house, 60)
    assert len(stored(house)) == 7
    found = house.done(house.broker.named_schedules.get("n"))
    assert (found.runs, found.error) == (7, None)
    assert found.next_ms == named.next_ms + 70_000


def test_cron_says_when_in_a_time_zone(house: House) -> None:
    plan = Plan(name="n", topic="t", cron="30 7 * * *", time_zone="Europe/Berlin", value=b"v")
    house.done(house.broker.named_schedules.put(plan))
    # It is 23:13:20 in Berlin, and 8 h 16 min 40 s from half past seven.
    advance(house, 8 * 3600 + 16 * 60 + 39)
    assert stored(house) == []
    advance(house, 1.1)
    assert len(stored(house)) == 1


def test_a_schedule_is_replaced_paused_and_deleted(house: House) -> None:
    schedules = house.broker.named_schedules
    house.done(schedules.put(every(10)))
    house.done(schedules.put(every(20, value=b"other")))
    advance(house, 20.1)
    assert [record.value for record in stored(house)] == [b"other"]
    house.done(schedules.put(every(20, is_paused=True)))
    advance(house, 100)
    assert len(stored(house)) == 1
    found = house.done(schedules.all())
    assert list(found) == ["n"]
    house.done(schedules.delete("n"))
    assert house.done(schedules.all()) == {}
    assert isinstance(house.failed(schedules.get("n")), ScheduleUnknown)
    assert isinstance(house.failed(schedules.delete("n")), ScheduleUnknown)


def test_runs_missed_in_an_outage_are_one() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1))
    house.done(house.broker.named_schedules.put(every(60)))
    next_ms = house.scheduler.clock.now_ms + MINUTE_MS
    house.scheduler.run()
    later_ms = house.scheduler.clock.now_ms + DAY_MS + 1234
    house = local_house(disk.crash("nothing"), now_ms=later_ms).start()
    advance(house, 1)
    assert len(stored(house)) == 1
    found = house.done(house.broker.named_schedules.get("n"))
    assert (found.next_ms - next_ms) % MINUTE_MS == 0
    assert later_ms < found.next_ms <= later_ms + MINUTE_MS


def test_the_clock_put_forward_runs_once_and_back_waits(house: House) -> None:
    house.done(house.broker.named_schedules.put(every(600)))
    house.scheduler.clock.now_ms += HOUR_MS
    advance(house, 1.1)
    assert len(stored(house)) == 1
    house.scheduler.clock.now_ms -= HOUR_MS
    advance(house, 1800)
    assert len(stored(house)) == 1
    advance(house, 1800 + 601)
    assert len(stored(house)) == 2


def test_without_its_topic_a_run_is_left_out_and_said(house: House) -> None:
    schedules = house.broker.named_schedules
    house.done(schedules.put(every(10)))
    house.done(house.broker.topics.delete("t"))
    advance(house, 10.1)
    assert "t" in (house.done(schedules.get("n")).error or "")
    house.done(house.broker.topics.create("t", 1))
    advance(house, 10)
    found = house.done(schedules.get("n"))
    assert (found.error, found.runs, len(stored(house))) == (None, 1, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "a" * 101},
        {"name": "a/b"},
        {"every_ms": 999},
        {"every_ms": 11 * 366 * DAY_MS},
        {"cron": "* * * * *"},
        {"every_ms": None},
        {"time_zone": "Nowhere"},
        {"time_zone": "Europe/Berlin"},
        {"value": b"x" * 300_000},
    ],
)
def test_a_schedule_that_cannot_be_is_refused(house: House, wrong: dict[str, object]) -> None:
    error = house.failed(house.broker.named_schedules.put(every(10, **wrong)))
    assert isinstance(error, ScheduleInvalid)
    assert house.done(house.broker.named_schedules.all()) == {}


def test_an_every_that_lacks_its_unit_is_told_what_it_was_taken_for(house: House) -> None:
    plan = Plan(name="n", topic="t", every_ms=30, value=b"v")
    error = house.failed(house.broker.named_schedules.put(plan))
    assert "not 30 ms; a number is milliseconds" in str(error)


def test_a_record_that_its_topic_would_not_take_is_refused(house: House) -> None:
    put = house.broker.named_schedules.put
    assert isinstance(house.failed(put(every(10, partition=1))), PartitionUnknown)
    assert isinstance(house.failed(put(every(10, value=b"x" * 2_000_000))), MessageTooLarge)


@pytest.mark.parametrize("seed", range(3))
def test_each_run_is_there_once_after_a_pulled_plug(seed: int) -> None:
    random = Random(seed)
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1))
    house.done(house.broker.named_schedules.put(every(10)))
    pulled = 0

    def pull(_index: int, _name: str) -> None:
        nonlocal pulled
        if random.randrange(3):
            return
        disk.on_operation = None
        crashed = local_house(
            survivor(disk, random.choice(WAYS), random), now_ms=house.scheduler.clock.now_ms
        ).start()
        crashed.scheduler.run()
        found = crashed.done(crashed.broker.named_schedules.get("n"))
        records = stored(crashed)
        assert len(records) == found.runs
        assert found.next_ms <= house.scheduler.clock.now_ms + 10_000
        pulled += 1
        disk.on_operation = pull

    disk.on_operation = pull
    advance(house, 60.5)
    disk.on_operation = None
    assert pulled > 5
    assert len(stored(house)) == 6


def test_as_many_as_there_may_be_run_each_second_in_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = house.broker.named_schedules
    for n in range(NAMED_MAX):
        schedules.put(every(1, name=f"n{n}"))
    house.scheduler.run()
    assert isinstance(house.failed(schedules.put(every(1, name="more"))), TooManySchedules)
    looked: list[int] = []
    next_ms = NamedView.next_ms

    def counted(view: NamedView) -> int | None:
        looked.append(len(view._dues))
        return next_ms(view)

    monkeypatch.setattr(NamedView, "next_ms", counted)
    advance(house, 1.5)
    assert schedules.runs == NAMED_MAX
    # Each run looks a few times at what is next, and never at all of them.
    assert len(looked) < 5 * NAMED_MAX
    assert max(looked) <= 2 * NAMED_MAX + 64


def test_one_that_was_due_while_its_run_was_under_way_runs_again(house: House) -> None:
    schedules = house.broker.named_schedules
    house.done(schedules.put(every(1)))
    house.scheduler.advance(1.02)
    house.scheduler.clock.now_ms += 5000
    advance(house, 3.1)
    assert house.done(schedules.get("n")).runs in {4, 5}


def test_a_schedule_that_is_paused_and_goes_on_again_and_again_is_remembered_once(
    house: House,
) -> None:
    schedules = house.broker.named_schedules
    for n in range(1000):
        house.done(schedules.put(every(10, is_paused=n % 2 == 0)))
    assert len(schedules._view._dues) <= 66
    advance(house, 10.1)
    assert len(stored(house)) == 1
