"""Retention in a topic that waits for its groups, and in one that does not."""

from __future__ import annotations

from broker.leasing import delivery_options, pass_time, publish, receive, settle, values
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.group_values import Commit
from millstream.engine.local import LocalEngine

WEEK_S = 7 * 86_400
LARGE = "x" * 30_000


def house_with(**settings: object) -> House:
    house = local_house(None, delivery_options()).start()
    given = {"retention_ms": 3_600_000, "segment_bytes": 65_536, "retention_hold": "groups"}
    house.done(house.broker.topics.create("jobs", 1, given | settings))
    return house


def fill(house: House, count: int = 12) -> None:
    """Two or three records a segment."""
    for n in range(count):
        publish(house, f"{n}-{LARGE}")


def retain(house: House, seconds: float = 7200) -> int:
    """Where the partition begins after retention."""
    pass_time(house, seconds)
    for _ in range(3):
        assert isinstance(house.engine, LocalEngine)
        assert house.engine._upkeep is not None
        house.engine._upkeep.retain()
        house.scheduler.run()
    return house.broker.reader.offsets("jobs", 0).start


def test_what_a_group_has_not_settled_is_kept_past_its_time() -> None:
    house = house_with()
    fill(house)
    records = receive(house, count_max=8)
    settle(house, "ack", *records[:6])
    start = retain(house)
    assert 0 < start <= 6
    pass_time(house, 100)
    kept = [value.partition("-")[0] for value in values(receive(house, count_max=12))]
    assert kept == [str(n) for n in range(6, 12)]
    assert house.broker.delivery.counts["g"].expired == 0


def test_what_a_group_has_not_committed_is_kept_past_its_time() -> None:
    house = house_with()
    fill(house)
    offsets = house.broker.group_offsets
    house.done(offsets.write("slow", [Commit("jobs", 0, 4)]))
    house.done(offsets.write("quick", [Commit("jobs", 0, 12)]))
    assert 0 < retain(house) <= 4
    house.done(offsets.write("slow", [Commit("jobs", 0, 12)]))
    assert retain(house, 60) > 8


def test_the_slowest_of_all_groups_counts_also_past_the_limit_of_bytes() -> None:
    house = house_with(retention_ms="unlimited", retention_bytes=65_536)
    fill(house)
    house.done(house.broker.group_offsets.write("quick", [Commit("jobs", 0, 12)]))
    settle(house, "ack", *receive(house, count_max=5))
    assert 0 < retain(house, 60) <= 5


def test_without_groups_or_without_the_setting_nothing_is_kept_longer() -> None:
    house = house_with()
    fill(house)
    assert retain(house) > 8
    house = house_with(retention_hold="none")
    fill(house)
    receive(house, count_max=2)
    assert retain(house) > 8


def test_a_group_that_is_gone_keeps_nothing() -> None:
    house = house_with()
    fill(house)
    house.done(house.broker.group_offsets.write("slow", [Commit("jobs", 0, 1)]))
    assert retain(house) == 0
    house.done(house.broker.groups.delete("slow"))
    assert retain(house, 60) > 8


def test_after_a_restart_what_was_held_is_held_still() -> None:
    house = house_with()
    fill(house)
    settle(house, "ack", *receive(house, count_max=4))
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    later_ms = house.scheduler.clock.now_ms + WEEK_S * 1000
    again = local_house(disk.crash("nothing"), house.options, now_ms=later_ms)
    again.engine.open()
    assert isinstance(again.engine, LocalEngine)
    assert again.engine._upkeep is not None
    # Before the broker knows its groups.
    again.engine._upkeep.retain()
    starting = again.broker.begin()
    again.scheduler.run()
    starting.result()
    assert 0 < retain(again, 60) <= 4
