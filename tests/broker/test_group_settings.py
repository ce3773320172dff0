"""What is set for a group: how long its leases are, and how much it may have in flight."""

from __future__ import annotations

from typing import Any

import pytest

from broker.leasing import house_of, outcome, pass_time, publish, receive, settle, start, values
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.group_settings import GroupSettings
from millstream.errors import GroupSettingInvalid, GroupUnknown

DAY_SECONDS = 24 * 60 * 60.0


def alter(house: House, group: str = "g", **settings: Any) -> GroupSettings:
    return house.done(house.broker.groups.alter(group, settings))


def test_a_group_says_how_long_its_leases_are_before_the_topic_and_after_the_request() -> None:
    house = house_of(settings={"visibility_ms": 20_000})
    publish(house, "a", "b", "c")
    assert alter(house, visibility_ms="10m").visibility_ms == 600_000
    (record,) = receive(house, count_max=1)
    (short,) = receive(house, count_max=1, visibility_ms=1_000)
    (other,) = receive(house, "another", count_max=1)
    pass_time(house, 25)
    assert outcome(house, "ack", record) == "acked"
    assert outcome(house, "ack", short) == "receipt_stale"
    assert outcome(house, "ack", other) == "receipt_stale"
    assert alter(house, visibility_ms=None) == GroupSettings()
    (again,) = receive(house, count_max=1)
    pass_time(house, 25)
    assert outcome(house, "ack", again) == "receipt_stale"


def test_a_group_says_how_much_it_and_its_members_may_have_and_who_waits_hears_of_more() -> None:
    house = house_of()
    publish(house, *"abcdef")
    alter(house, inflight_max=3, member_inflight_max=2)
    assert values(receive(house, member="w")) == ["a", "b"]
    assert values(receive(house, member="v")) == ["c"]
    assert len(receive(house, "another", member="w")) == 6
    of_group = start(house, count_max=2, wait_ms=20_000)
    of_member = start(house, member="w", wait_ms=20_000)
    house.scheduler.run()
    assert not of_group.pending.is_done
    alter(house, inflight_max=None, member_inflight_max=3)
    assert len(house.done(of_group.pending).records) == 2
    assert len(house.done(of_member.pending).records) == 1


def test_what_was_set_for_a_group_survives_a_restart_and_goes_with_the_group() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    alter(house, visibility_ms=90_000)
    again = local_house(disk.crash("nothing")).start()
    facts = again.done(again.broker.directory.describe("g"))
    assert facts.settings == GroupSettings(visibility_ms=90_000)
    again.done(again.broker.groups.delete("g"))
    assert isinstance(again.failed(again.broker.directory.describe("g")), GroupUnknown)
    assert again.broker.group_offsets.settings("g") == GroupSettings()


def test_what_was_set_for_a_group_stays_when_the_group_is_long_gone() -> None:
    house = house_of()
    publish(house, "a")
    alter(house, visibility_ms=90_000)
    (record,) = receive(house)
    settle(house, "ack", record)
    for _ in range(3):
        pass_time(house, 8 * DAY_SECONDS)
    assert house.broker.group_offsets.position("g", "jobs", 0) is None
    assert house.broker.group_offsets.expired_groups == 1
    assert house.broker.group_offsets.settings("g").visibility_ms == 90_000


@pytest.mark.parametrize(
    "wrong",
    [
        {"visibility_ms": 99},
        {"visibility_ms": "13h"},
        {"inflight_max": 0},
        {"member_inflight_max": True},
        {"deliveries_max": 4},
        {"visibility_ms": 1000, "colour": "red"},
    ],
)
def test_what_cannot_be_set_for_a_group_is_refused_and_sets_nothing(wrong: dict[str, Any]) -> None:
    house = house_of()
    error = house.failed(house.broker.groups.alter("g", wrong))
    assert isinstance(error, GroupSettingInvalid)
    assert house.broker.group_offsets.settings("g") == GroupSettings()
