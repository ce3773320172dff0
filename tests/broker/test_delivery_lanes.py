"""Lanes as workers see them: a record keeps its own whatever happens to it, and what a topic says
of lanes counts from when it says so."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.burying import wish
from broker.leasing import house_of, outcome, pass_time, receive, settle, values
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from log.effort import effort
from millstream.broker.delivery_values import Delivered, LaneFacts
from millstream.broker.outgoing import Outgoing
from millstream.log.batch import LANES

CRITICAL, HIGH, NORMAL, BACKGROUND = 0, 1, 2, 4


def publish(house: House, lane: int, count: int, delay_ms: int | None = None) -> None:
    records = [
        Outgoing(b"key", b"%d" % n, partition=0, lane=lane, delay_ms=delay_ms) for n in range(count)
    ]
    house.done(house.broker.publisher.publish("jobs", records))


def lanes_of(records: list[Delivered]) -> list[str]:
    return [one.lane for one in records]


def test_a_record_keeps_its_lane_through_all_that_can_happen_to_it() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("jobs", 1))
    # Scheduled,
    publish(house, HIGH, 1, delay_ms=1000)
    pass_time(house, 1.1)
    (record,) = receive(house)
    assert record.lane == "high"
    # failed and tried again,
    assert outcome(house, "nack", record, delay_ms=0) == "retried"
    (record,) = receive(house)
    assert (record.lane, record.deliveries) == ("high", 2)
    # over a crash,
    now_ms = house.scheduler.clock.now_ms
    house = local_house(disk.crash("nothing"), now_ms=now_ms).start()
    assert outcome(house, "release", record) == "released"
    (record,) = receive(house)
    assert record.lane == "high"
    # among the dead letters, where any group may work on it,
    assert outcome(house, "reject", record) == "dead"
    (record,) = receive(house, "undertaker", "jobs.dlq")
    assert record.lane == "high"
    assert outcome(house, "release", record) == "released"
    # and put back.
    house.done(house.broker.redrive.begin("jobs", wish()))
    (record,) = receive(house)
    assert (record.lane, record.deliveries) == ("high", 1)


def test_weights_of_a_topic_count_from_the_next_receive_on() -> None:
    house = house_of(receive_records_max=1000)
    for lane in range(len(LANES)):
        publish(house, lane, 400)
    assert Counter(lanes_of(receive(house, count_max=100))) == dict(
        zip(LANES, (50, 25, 15, 7, 3), strict=True)
    )
    house.done(house.broker.topics.alter("jobs", {"lane_weights": "10/10/10/10/60"}))
    found = Counter(lanes_of(receive(house, count_max=500)))
    # One round may have been under way.
    assert abs(found["background"] - 300) <= 10


def test_a_lane_waits_no_longer_than_its_topic_says() -> None:
    house = house_of(settings={"lane_weights": "1000/1/1/1/1"})
    publish(house, BACKGROUND, 2)
    house.done(house.broker.topics.alter("jobs", {"lane_boost_ms": 5_000}))
    served: list[int] = []
    for second in range(12):
        publish(house, CRITICAL, 3)
        records = receive(house, count_max=2)
        settle(house, "ack", *records)
        served += [second] * lanes_of(records).count("background")
        pass_time(house, 1)
    assert served == [5, 10]


@effort(30)
@given(
    sizes=st.lists(st.integers(1, 200), min_size=10, max_size=30),
    partitions=st.integers(1, 3),
    weights=st.sampled_from([(50, 25, 15, 7, 3), (20, 20, 20, 20, 20), (90, 4, 3, 2, 1)]),
)
def test_what_goes_out_is_within_two_points_of_the_weights_while_all_lanes_are_full(
    sizes: list[int], partitions: int, weights: tuple[int, ...]
) -> None:
    house = house_of(partitions, {"lane_weights": "/".join(map(str, weights))})
    whole = sum(sizes)
    for partition in range(partitions):
        for lane in range(len(LANES)):
            records = [Outgoing(None, b"v", partition=partition, lane=lane)] * whole
            house.done(house.broker.publisher.publish("jobs", records))
    found: Counter[str] = Counter()
    for size in sizes:
        records_ = receive(house, count_max=size)
        assert len(records_) == size
        found.update(lanes_of(records_))
    for name, weight in zip(LANES, weights, strict=True):
        # Less than one round is out of balance.
        assert abs(found[name] - whole * weight / 100) <= max(100, whole * 0.02)


def facts(house: House) -> dict[str, LaneFacts]:
    return {one.lane: one for one in house.done(house.broker.delivery.lanes("jobs", "g"))}


@pytest.mark.parametrize("lane", [NORMAL, HIGH])
def test_each_lane_has_rates_of_what_arrives_and_of_what_goes_out(lane: int) -> None:
    house = house_of()
    publish(house, lane, 1000)
    receive(house, count_max=1)
    pass_time(house, 11)
    assert facts(house)[LANES[lane]].arrived_per_s is None
    publish(house, lane, 50)
    receive(house, count_max=20)
    pass_time(house, 10)
    found = facts(house)[LANES[lane]]
    assert found.arrived_per_s == pytest.approx(5, rel=0.1)
    assert found.delivered_per_s == pytest.approx(2, rel=0.1)
    assert (found.ready, found.inflight, found.delivered) == (1050 - 21, 21, 21)
    assert found.last_served_ms is not None
    assert found.oldest_age_ms == pytest.approx(21_000, abs=50)
    pass_time(house, 10)
    found = facts(house)[LANES[lane]]
    assert (found.arrived_per_s, found.delivered_per_s) == (0, 0)


def test_what_a_topic_says_by_now_counts_when_a_lease_runs_out() -> None:
    house = house_of()
    publish(house, HIGH, 1)
    (record,) = receive(house)
    house.done(house.broker.topics.alter("jobs", {"deliveries_max": 1}))
    pass_time(house, 31)
    assert receive(house) == []
    (dead,) = receive(house, "undertaker", "jobs.dlq")
    assert values([dead]) == values([record])
