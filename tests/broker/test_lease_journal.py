"""What is noted of leases, and found again: changes of mode, resets, clocks and crashes."""

from __future__ import annotations

from broker.leasing import (
    delivery_options,
    house_of,
    outcome,
    pass_time,
    publish,
    receive,
    settle,
    start,
    values,
)
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.delivery_values import Settle
from millstream.broker.group_offsets import ResetTo
from millstream.log import batch as batches
from millstream.log.batch import LANE_HEADER


def durable_house(settings: dict[str, object], partitions: int = 1) -> House:
    house = local_house(None, delivery_options()).start()
    house.done(house.broker.topics.create("jobs", partitions, settings))
    return house


def reopened(house: House, *, kills_the_machine: bool = True) -> House:
    """A broker on what the disk has, after the old one, or the machine, was killed."""
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    left = disk.crash("nothing") if kills_the_machine else disk.copy()
    return local_house(left, house.options, now_ms=house.scheduler.clock.now_ms).start()


def test_a_group_that_is_full_of_records_that_came_back_goes_on() -> None:
    house = house_of(group_inflight_max=3)
    publish(house, *"abcde")
    assert len(receive(house, visibility_ms=1000)) == 3
    pass_time(house, 1.1)
    again = receive(house)
    assert values(again) == ["a", "b", "c"]
    settle(house, "nack", *again, delay_ms=0)
    assert values(receive(house, count_max=2)) == ["a", "b"]


def test_a_hot_key_that_fills_a_group_goes_on_after_its_lease_runs_out() -> None:
    house = house_of(settings={"delivery_order": "key"}, group_inflight_max=4)
    publish(house, *"abcdefgh", key="hot")
    seen = []
    assert values(receive(house, visibility_ms=1000)) == ["a"]
    pass_time(house, 1.1)
    for _ in range(8):
        (record,) = receive(house)
        seen += values([record])
        assert outcome(house, "ack", record) == "acked"
    assert seen == list("abcdefgh")


def test_acks_on_their_way_while_the_mode_changes_outlive_a_crash() -> None:
    for before, after in (("every", "none"), ("none", "every"), ("interval", "every")):
        house = durable_house({"fsync": before})
        publish(house, *"abcd")
        records = receive(house)
        delivery = house.broker.delivery
        altering = house.broker.topics.alter("jobs", {"fsync": after})
        first = delivery.settle([Settle("ack", records[0].receipt)])
        while not altering.is_done:
            house.scheduler.turn()
        second = delivery.settle([Settle("ack", records[1].receipt)])
        while not second.is_done:
            house.scheduler.turn()
        assert first.result()[0].outcome == second.result()[0].outcome == "acked"
        house = reopened(house, kills_the_machine=False)
        assert outcome(house, "ack", records[2]) == "acked"
        pass_time(house, 40)
        assert values(receive(house)) == ["d"]


def test_a_ledger_that_changes_journals_is_in_one_of_them_at_every_moment() -> None:
    house = durable_house({"fsync": "none"}, partitions=2)
    publish(house, *"abc")
    records = receive(house)
    settle(house, "ack", records[1])
    house.done(house.broker.topics.alter("jobs", {"fsync": "every"}))
    house.broker.delivery.settle([Settle("ack", records[0].receipt)])
    is_left = True
    while is_left:
        is_left = house.scheduler.turn()
        again = reopened(house, kills_the_machine=False)
        assert outcome(again, "ack", records[1]) == "receipt_stale"
        assert outcome(again, "extend", records[2]) == "extended"
    again = reopened(house, kills_the_machine=False)
    pass_time(again, 40)
    assert values(receive(again)) == ["c"]


def test_a_reset_in_the_turn_of_a_grant_is_not_undone_by_a_crash() -> None:
    house = durable_house({})
    publish(house, *"abcd")
    settle(house, "ack", *receive(house, count_max=3))
    receiving = start(house)
    resetting = house.broker.group_offsets.reset("g", "jobs", ResetTo("earliest"))
    while not resetting.is_done:
        house.scheduler.turn()
    assert receiving.pending.is_done
    house = reopened(house)
    pass_time(house, 40)
    assert values(receive(house)) == list("abcd")


def test_where_a_group_begins_is_kept_for_all_partitions_with_its_first_grant() -> None:
    house = durable_house({}, partitions=2)
    publish(house, "old", partition=1)
    assert receive(house, start="latest") == []
    publish(house, "new", partition=0)
    assert values(receive(house)) == ["new"]
    house = reopened(house)
    assert receive(house, start="earliest") == []


def test_a_wait_for_a_retry_gets_no_longer_by_a_clock_put_back() -> None:
    house = durable_house({})
    publish(house, "a")
    assert outcome(house, "nack", receive(house)[0], delay_ms=5000) == "retried"
    house.scheduler.clock.now_ms -= 3_600_000
    house = reopened(house)
    pass_time(house, 4.8)
    assert receive(house) == []
    pass_time(house, 0.4)
    assert values(receive(house)) == ["a"]


def test_an_extend_is_as_long_as_it_says_whatever_the_wall_clock_does() -> None:
    house = durable_house({})
    publish(house, "a")
    (record,) = receive(house, visibility_ms=1000)
    settling = house.broker.delivery.settle(
        [Settle("extend", record.receipt, visibility_ms=10_000)]
    )
    # Between the request and its answer.
    house.scheduler.clock.now_ms += 3_600_000
    assert house.done(settling)[0].outcome == "extended"
    pass_time(house, 9.8)
    assert outcome(house, "ack", record) == "acked"


def test_a_key_that_was_leased_in_a_quicker_lane_is_leased_after_a_restart() -> None:
    house = durable_house({"delivery_order": "key"})
    house.done(house.broker.topics.use_lanes("jobs"))
    for value, lane in ((b"normal", None), (b"critical", "critical")):
        headers = ((LANE_HEADER, lane.encode()),) if lane is not None else ()
        now_ms = house.scheduler.clock.wall_ms()
        fields: list[batches.Fields] = [(now_ms, b"k", value, headers)]
        data = batches.encode(fields, lane=lane)
        house.done(house.broker.publisher.publish_batch("jobs", 0, data))
    (record,) = receive(house)
    assert values([record]) == ["critical"]
    house = reopened(house)
    assert receive(house) == []
    assert outcome(house, "ack", record) == "acked"
    assert values(receive(house)) == ["normal"]


def test_records_that_retention_took_do_not_hide_those_that_are_left() -> None:
    house = house_of(settings={"delivery_order": "key"})
    publish(house, *"abc", key="k")
    publish(house, "d")
    records = receive(house, visibility_ms=1000)
    assert values(records) == ["a", "d"]
    pass_time(house, 1.1)
    house.done(house.engine.trim(house.broker.topics.partition_of("jobs", 0), 2))
    assert sorted(values(receive(house))) == ["c", "d"]
