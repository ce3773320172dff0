"""Schedules, with time by hand: when a record appears in its topic, and when it does not."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from broker.making import House, local_house, memory_house, options
from faults.simulated_disk import SimulatedDisk
from millstream.broker import schedules
from millstream.broker.publishing import Outgoing, Placed
from millstream.broker.schedule_state import ScheduleState
from millstream.broker.schedule_table import ScheduleTable
from millstream.broker.schedule_values import HORIZON_MS, PARTITION, State
from millstream.broker.schedules import ScheduleOptions
from millstream.errors import (
    DelayInvalid,
    ScheduleOver,
    ScheduleUnknown,
    TooManySchedules,
)
from millstream.log.batch import LANES, Record
from millstream.wire.partitioning import partition_of_key

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000


@pytest.fixture
def house() -> House:
    house = memory_house()
    house.done(house.broker.topics.create("t", 3))
    return house


def now(house: House) -> int:
    return house.scheduler.clock.now_ms


def plan(house: House, value: bytes, delay_ms: int, topic: str = "t", **more: Any) -> Placed:
    record = Outgoing(None, value, delay_ms=delay_ms)._replace(**more)
    published = house.done(house.broker.publisher.publish(topic, [record]))
    assert published.scheduled == {0}
    return published.placed[0]


def stored(house: House, topic: str = "t") -> list[tuple[int, Record]]:
    found: list[tuple[int, Record]] = []
    for number in range(house.broker.topics.get(topic).partitions):
        fetched = house.broker.reader.fetch(topic, number, 0, 100_000, 1 << 30)
        found += [(number, record) for record in house.done(fetched).records]
    return found


def values(house: House, topic: str = "t") -> set[bytes | None]:
    listed = [record.value for _, record in stored(house, topic)]
    assert len(set(listed)) == len(listed), "something is there twice"
    return set(listed)


def advance(house: House, milliseconds: int) -> None:
    house.scheduler.advance(milliseconds / 1000)
    house.scheduler.run()


# ---- when


@pytest.mark.parametrize("delay_ms", [1, 10, 999, 2560, 90 * SECOND, 3 * HOUR, 8 * DAY, 400 * DAY])
def test_a_record_appears_when_it_is_due_and_not_before(house: House, delay_ms: int) -> None:
    placed = plan(house, b"v", delay_ms)
    assert placed == (0, 0, now(house) + delay_ms)
    if delay_ms > HOUR:
        # The clock is looked at again each second; a test need not wait through all of them.
        house.scheduler.clock.now_ms += delay_ms - HOUR
        delay_ms = HOUR
    advance(house, delay_ms - 1)
    assert values(house) == set()
    advance(house, 30)
    assert values(house) == {b"v"}
    advance(house, HOUR)
    assert values(house) == {b"v"}


def test_a_time_may_be_named_instead(house: House) -> None:
    due_ms = now(house) + HOUR
    record = Outgoing(None, b"v", deliver_at_ms=due_ms)
    placed = house.done(house.broker.publisher.publish("t", [record])).placed
    assert placed == [Placed(0, 0, due_ms)]
    advance(house, HOUR - 1)
    assert values(house) == set()
    advance(house, 30)
    assert values(house) == {b"v"}


@pytest.mark.parametrize(
    "record",
    [
        Outgoing(None, b"v", delay_ms=0),
        Outgoing(None, b"v", deliver_at_ms=0),
        Outgoing(None, b"v", deliver_at_ms=1_700_000_000_000),
    ],
)
def test_zero_and_what_is_past_is_now(house: House, record: Outgoing) -> None:
    published = house.done(house.broker.publisher.publish("t", [record]))
    assert not published.scheduled
    assert values(house) == {b"v"}
    assert house.broker.schedules.pending == 0


def test_ten_years_are_taken_and_more_is_refused(house: House) -> None:
    plan(house, b"v", HORIZON_MS)
    late = Outgoing(None, b"v", delay_ms=HORIZON_MS + 1)
    error = house.failed(house.broker.publisher.publish("t", [Outgoing(None, b"a"), late]))
    assert isinstance(error, DelayInvalid)
    assert error.fields["record"] == 1
    assert values(house) == set()


@pytest.mark.parametrize(
    "record",
    [
        Outgoing(None, b"v", delay_ms=-1),
        Outgoing(None, b"v", delay_ms=1, deliver_at_ms=1_800_000_000_000),
    ],
)
def test_a_delay_that_makes_no_sense_is_refused(house: House, record: Outgoing) -> None:
    assert isinstance(house.failed(house.broker.publisher.publish("t", [record])), DelayInvalid)
    assert isinstance(house.failed(house.broker.publisher.publish_one("t", *record)), DelayInvalid)


def test_many_at_one_moment_all_appear(house: House) -> None:
    records = [Outgoing(None, b"%d" % n, delay_ms=5 * SECOND) for n in range(3000)]
    published = house.done(house.broker.publisher.publish("t", records))
    assert [one.offset for one in published.placed] == list(range(3000))
    assert house.broker.schedules.count("t") == 3000
    advance(house, 5 * SECOND - 1)
    assert values(house) == set()
    advance(house, 30)
    assert len(values(house)) == 3000
    assert house.broker.schedules.pending == 0


def test_what_is_due_in_another_order_comes_in_the_order_of_time() -> None:
    house = memory_house()
    house.done(house.broker.topics.create("t", 1))
    delays = [(n * 7919) % 1000 * 20 + 20 for n in range(500)]
    for n, delay in enumerate(delays):
        plan(house, b"%d" % n, delay)
    advance(house, 30 * SECOND)
    found = [int(record.value or b"") for _, record in stored(house)]
    assert [delays[n] for n in found] == sorted(delays)


# ---- the wall clock


def test_the_clock_put_forward_an_hour_fires_what_is_due_then(house: House) -> None:
    plan(house, b"v", HOUR)
    plan(house, b"later", 2 * HOUR)
    house.scheduler.clock.now_ms += HOUR
    advance(house, 1100)
    assert values(house) == {b"v"}


def test_the_clock_put_back_an_hour_delays_by_an_hour(house: House) -> None:
    plan(house, b"v", 10 * SECOND)
    advance(house, 5 * SECOND)
    house.scheduler.clock.now_ms -= HOUR
    advance(house, HOUR)
    assert values(house) == set()
    advance(house, 6100)
    assert values(house) == {b"v"}


def test_schedules_made_after_the_clock_was_put_back_are_on_time(house: House) -> None:
    plan(house, b"first", 2 * HOUR)
    advance(house, HOUR)
    house.scheduler.clock.now_ms -= HOUR
    plan(house, b"second", 10 * SECOND)
    advance(house, 9999)
    assert values(house) == set()
    advance(house, 1100)
    assert values(house) == {b"second"}
    advance(house, 2 * HOUR)
    assert values(house) == {b"first", b"second"}


# ---- what


def test_a_record_is_in_its_topic_as_it_was_published(house: House) -> None:
    plan(house, b"v", SECOND, key=b"k", headers=(("a", b"1"), ("b", None)), timestamp_ms=77)
    advance(house, 1100)
    [(number, record)] = stored(house)
    assert number == partition_of_key(b"k", 3, "murmur2")
    assert record == Record(0, 77, b"k", b"v", (("a", b"1"), ("b", None)))


def test_without_a_time_of_its_own_a_record_has_that_of_its_firing(house: House) -> None:
    plan(house, b"v", SECOND)
    advance(house, 3000)
    [(_, record)] = stored(house)
    assert now(house) - 2000 <= record.timestamp <= now(house)


def test_a_lane_and_a_partition_keep_their_meaning(house: House) -> None:
    plan(house, b"v", SECOND, lane=LANES.index("high"), partition=2)
    advance(house, 1100)
    [(number, record)] = stored(house)
    assert (number, record.lane) == (2, "high")
    assert house.broker.topics.get("t").uses_lanes


def test_a_key_is_hashed_by_the_partitions_there_are_then(house: House) -> None:
    plan(house, b"v", SECOND, key=b"some key")
    house.done(house.broker.topics.add_partitions("t", 64))
    advance(house, 1100)
    assert [number for number, _ in stored(house)] == [partition_of_key(b"some key", 64, "murmur2")]


def test_one_call_may_publish_now_and_later(house: House) -> None:
    records = [Outgoing(None, b"now"), Outgoing(None, b"later", delay_ms=SECOND)]
    published = house.done(house.broker.publisher.publish("t", records))
    assert published.scheduled == {1}
    assert values(house) == {b"now"}
    advance(house, 1100)
    assert values(house) == {b"now", b"later"}


def test_a_schedule_is_made_once_for_an_idempotency_key(house: House) -> None:
    record = [Outgoing(None, b"v", delay_ms=SECOND), Outgoing(None, b"now")]
    publisher = house.broker.publisher
    first = house.done(publisher.publish("t", record, idempotency_key="k"))
    again = house.done(publisher.publish("t", record, idempotency_key="k"))
    assert again.is_duplicate
    assert again[::2] == first[::2]
    assert again.scheduled == {0}
    assert house.broker.schedules.pending == 1
    advance(house, 1100)
    assert values(house) == {b"v", b"now"}


# ---- cancelling, listing


def test_a_cancelled_schedule_does_not_fire(house: House) -> None:
    placed = plan(house, b"v", SECOND)
    plan(house, b"other", SECOND)
    cancelled = house.done(house.broker.schedules.cancel("t", *placed[:2]))
    assert (cancelled.value, cancelled.due_ms) == (b"v", placed.timestamp_ms)
    assert house.broker.schedules.pending == house.broker.schedules.count("t") == 1
    advance(house, 2 * SECOND)
    assert values(house) == {b"other"}
    assert house.done(house.broker.schedules.find("t", *placed[:2]))[0] == State.CANCELLED


def test_a_schedule_that_is_over_cannot_be_cancelled(house: House) -> None:
    fired, cancelled = plan(house, b"a", SECOND), plan(house, b"b", MINUTE)
    schedules = house.broker.schedules
    house.done(schedules.cancel("t", *cancelled[:2]))
    advance(house, 1100)
    for placed, state in ((fired, "fired"), (cancelled, "cancelled")):
        error = house.failed(schedules.cancel("t", *placed[:2]))
        assert isinstance(error, ScheduleOver)
        assert error.fields["state"] == state


def test_of_two_who_cancel_one_is_told_that_it_is_over(house: House) -> None:
    placed = plan(house, b"v", SECOND)
    schedules = house.broker.schedules
    first, second = (schedules.cancel("t", *placed[:2]) for _ in range(2))
    house.scheduler.run()
    assert first.result().value == b"v"
    assert isinstance(second.error, ScheduleOver)


@pytest.mark.parametrize(("topic", "partition", "offset"), [("t", 0, 1), ("t", 1, 0), ("u", 0, 0)])
def test_an_id_that_is_not_of_the_topic_is_unknown(
    house: House, topic: str, partition: int, offset: int
) -> None:
    house.done(house.broker.topics.create("u", 1))
    plan(house, b"v", SECOND)
    plan(house, b"v", SECOND, "u")
    if topic == "t" and not partition:
        offset = 7
    error = house.failed(house.broker.schedules.cancel(topic, partition, offset))
    assert isinstance(error, ScheduleUnknown)
    assert house.broker.schedules.pending == 2


def test_schedules_are_listed_in_pages_by_topic(house: House) -> None:
    house.done(house.broker.topics.create("u", 1))
    for n in range(100):
        plan(house, b"%d" % n, MINUTE, "tu"[n % 2], key=b"k%d" % n)
    schedules = house.broker.schedules
    found: list[bytes | None] = []
    after: int | None = 0
    while after is not None:
        page = house.done(schedules.page("t", 7, after))
        found += [one.value for one in page.plans]
        after = page.next
    assert found == [b"%d" % n for n in range(0, 100, 2)]
    skipped = house.done(schedules.page("t", 3, skip=10)).plans
    assert [one.key for one in skipped] == [b"k20", b"k22", b"k24"]
    assert (schedules.count("t"), schedules.count("u"), schedules.pending) == (50, 50, 100)


def test_counting_looks_at_no_schedule(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [Outgoing(None, b"v", delay_ms=MINUTE + n) for n in range(500)]
    placed = house.done(house.broker.publisher.publish("t", records)).placed
    house.done(house.broker.schedules.cancel("t", *placed[7][:2]))
    # Whoever looks at schedules one by one begins there.
    monkeypatch.setattr(ScheduleTable, "slots", None)
    monkeypatch.setattr(type(house.engine), "read", None)
    assert (house.broker.schedules.count("t"), house.broker.schedules.pending) == (499, 499)


def test_statistics_count_what_became_of_schedules(house: House) -> None:
    placed = [plan(house, b"%d" % n, SECOND) for n in range(4)]
    plan(house, b"far", 9 * DAY)
    house.done(house.broker.schedules.cancel("t", *placed[0][:2]))
    statistics = house.broker.schedules.statistics()
    assert statistics.levels[4] == 1
    assert sum(statistics.levels) == 5
    assert statistics.next_due_ms is not None
    assert statistics.next_due_ms <= placed[0].timestamp_ms + 10
    advance(house, 1100)
    statistics = house.broker.schedules.statistics()
    assert (statistics.pending, statistics.scheduled) == (1, 5)
    assert (statistics.fired, statistics.cancelled, statistics.expired) == (3, 1, 0)
    assert sum(statistics.lateness) == 3


# ---- topics that end


@pytest.mark.parametrize("way", ["purge", "delete"])
def test_a_topics_schedules_end_with_its_records(house: House, way: str) -> None:
    house.done(house.broker.topics.create("u", 1))
    gone = plan(house, b"gone", SECOND)
    plan(house, b"stays", SECOND, "u")
    topics = house.broker.topics
    house.done(topics.purge("t") if way == "purge" else topics.delete("t"))
    assert house.broker.schedules.pending == 1
    if way == "delete":
        house.done(topics.create("t", 1))
    error = house.failed(house.broker.schedules.cancel("t", *gone[:2]))
    assert isinstance(error, ScheduleOver if way == "purge" else ScheduleUnknown)
    plan(house, b"new", SECOND)
    advance(house, 2 * SECOND)
    assert values(house) == {b"new"}
    assert values(house, "u") == {b"stays"}
    assert house.broker.schedules.statistics().expired == 1


def test_what_a_topic_no_longer_takes_expires(house: House) -> None:
    placed = plan(house, b"without a key", SECOND)
    plan(house, b"with one", SECOND, key=b"k")
    house.done(house.broker.topics.alter("t", {"compact": True}))
    advance(house, 1100)
    assert values(house) == {b"with one"}
    state, _ = house.done(house.broker.schedules.find("t", *placed[:2]))
    assert (state.word, state.why) == ("expired", "its topic does not take the record any more")


# ---- restarts and limits


def restarted(house: House, disk: SimulatedDisk, later_ms: int = 0) -> House:
    house.scheduler.run()
    return local_house(disk.crash("nothing"), now_ms=now(house) + later_ms).start()


def test_a_restart_knows_every_schedule() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 2))
    placed = [plan(house, b"%d" % n, (n + 1) * SECOND) for n in range(10)]
    house.done(house.broker.schedules.cancel("t", *placed[9][:2]))
    advance(house, 2500)
    house = restarted(house, disk)
    assert values(house) == {b"0", b"1"}
    assert house.broker.schedules.count("t") == 7
    advance(house, 20 * SECOND)
    assert values(house) == {b"%d" % n for n in range(9)}


def test_what_came_due_while_the_broker_was_down_fires_at_once() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 2))
    for n in range(100):
        plan(house, b"%d" % n, SECOND)
    plan(house, b"later", 2 * DAY)
    house = restarted(house, disk, DAY)
    advance(house, 100)
    assert len(values(house)) == 100


def test_a_topic_deleted_just_before_a_crash_leaves_no_schedule() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1))
    plan(house, b"v", SECOND)
    house.engine.delete("t")
    house = restarted(house, disk)
    assert house.broker.schedules.pending == 0
    house.done(house.broker.topics.create("t", 1))
    advance(house, 2 * SECOND)
    assert values(house) == set()


def test_no_more_schedules_than_the_limit() -> None:
    house = memory_house(replace(options(), schedules=ScheduleOptions(schedules_max=3)))
    house.done(house.broker.topics.create("t", 1))
    for n in range(3):
        plan(house, b"%d" % n, SECOND)
    record = Outgoing(None, b"one more", delay_ms=SECOND)
    error = house.failed(house.broker.publisher.publish("t", [record]))
    assert isinstance(error, TooManySchedules)
    advance(house, 1100)
    assert len(values(house)) == 3
    plan(house, b"now there is room", SECOND)


# ---- the log of schedules


def test_the_log_is_cut_at_the_oldest_that_is_pending(house: House) -> None:
    for n in range(50):
        plan(house, b"%d" % n, SECOND)
    plan(house, b"far", DAY)
    for n in range(50, 60):
        plan(house, b"%d" % n, SECOND)
    advance(house, 30 * SECOND)
    assert house.engine.offsets(PARTITION).start == 50


def test_a_schedule_that_keeps_much_is_moved_on_and_keeps_its_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millstream.broker.schedule_log.SPAN_MIN", 100)
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1))
    far = [plan(house, b"far-%d" % n, DAY, key=b"k") for n in range(3)]
    for n in range(200):
        plan(house, b"%d" % n, SECOND)
    advance(house, 30 * SECOND)
    assert house.engine.offsets(PARTITION).start >= 200
    assert house.broker.schedules.statistics().moved == 3
    listed = house.done(house.broker.schedules.page("t", 10)).plans
    assert [(one.id, one.value) for one in listed] == [
        (one.offset, b"far-%d" % n) for n, one in enumerate(far)
    ]
    house = restarted(house, disk)
    house.done(house.broker.schedules.cancel("t", *far[0][:2]))
    state, found = house.done(house.broker.schedules.find("t", *far[1][:2]))
    assert (state, found.value, found.key) == (State.PENDING, b"far-1", b"k")
    house.scheduler.clock.now_ms += DAY
    advance(house, 1100)
    assert {value for value in values(house) if value and value.startswith(b"far")} == {
        b"far-1",
        b"far-2",
    }


def test_a_schedule_takes_little_memory(house: House) -> None:
    state = ScheduleState(now(house))
    owner = state.owner(b"0" * 16)
    count = 100_000
    for first in range(0, count, 32):
        dues = [now(house) + (n * 7919) % (20 * DAY) for n in range(first, first + 32)]
        state.add(owner, first, dues)
    columns = [
        column for slot in state.table.slots() for column in (slot.dues, slot.places, slot.topics)
    ]
    size = sum(map(sys.getsizeof, columns)) + sys.getsizeof(state.states)
    assert size / count < 32


def test_a_page_leaves_out_as_many_as_it_was_told_to_whatever_they_take(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "PAGE_BYTES", 300)
    monkeypatch.setattr(schedules, "READ_BYTES", 100)
    for n in range(30):
        plan(house, b"%d" % n, DAY)
    place: int | None = None
    found: list[bytes | None] = []
    skip = 20
    while True:
        page = house.done(house.broker.schedules.page("t", 100, place, skip))
        found += [one.value for one in page.plans]
        place, skip = page.next, 0
        if place is None:
            break
    assert found == [b"%d" % n for n in range(20, 30)]
