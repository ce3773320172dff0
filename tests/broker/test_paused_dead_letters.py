"""The circuit breaker in the way of dead letters, with time moved by hand."""

from __future__ import annotations

from structlog.testing import capture_logs

from broker.leasing import (
    delivery_options,
    house_of,
    outcome,
    pass_time,
    publish,
    receive,
    settle,
    values,
)
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.settling import START_SECONDS


def dead(house: House) -> int:
    return house.broker.dead_letter_reading.left("jobs")


def failing_house() -> House:
    house = house_of(settings={"deliveries_max": 1, "retry_delay_max_ms": 10_000})
    publish(house, *(str(n) for n in range(60)))
    return house


def test_it_opens_pauses_dead_letters_and_closes_when_half_succeed() -> None:
    house = failing_house()
    first = receive(house, count_max=20)
    settle(house, "nack", *first[:19])
    assert (dead(house), house.broker.delivery.paused()) == (19, [])
    with capture_logs() as logs:
        assert outcome(house, "nack", first[19]) == "retried"
    assert dead(house) == 19
    [facts] = house.broker.delivery.paused()
    assert (facts.group, facts.open_s, facts.openings) == ("g", 0.0, 1)
    [said] = logs
    assert (said["log_level"], said["group"], said["openings"]) == ("warning", "g", 1)

    # Paused: what fails for good comes back later, however often.
    second = receive(house, count_max=5)
    assert {one.outcome for one in settle(house, "nack", *second)} == {"retried"}
    pass_time(house, 9)
    assert "19" not in values(receive(house, count_max=1))
    pass_time(house, 2)
    again = receive(house, count_max=6)
    assert set(values(again)) == {"19", *values(second)}
    assert all(one.deliveries == 2 for one in again)
    assert dead(house) == 19

    # Half of twenty since it opened succeed: six failed so far, and fourteen are to come.
    with capture_logs() as logs:
        settle(house, "ack", *again)
        assert house.broker.delivery.paused() != []
        settle(house, "ack", *receive(house, count_max=10))
    assert house.broker.delivery.paused() == []
    [said] = [one for one in logs if one.get("group") == "g"]
    assert said["log_level"] == "info"
    [facts] = house.broker.delivery.breakers()
    assert (facts.open_s, facts.openings) == (None, 1)

    # And dead letters are made again.
    [one] = receive(house, count_max=1)
    assert outcome(house, "nack", one) == "dead"
    assert dead(house) == 20


def test_a_lease_that_runs_out_while_it_is_open_is_retried_too() -> None:
    house = failing_house()
    settle(house, "nack", *receive(house, count_max=20))
    before = dead(house)
    held = receive(house, count_max=3, visibility_ms=1_000)
    pass_time(house, 2)
    assert dead(house) == before
    pass_time(house, 11)
    assert set(values(held)) <= set(values(receive(house, count_max=60)))


def test_a_breaker_is_of_one_group() -> None:
    house = failing_house()
    settle(house, "nack", *receive(house, count_max=20))
    [one] = receive(house, group="other", count_max=1)
    assert (
        outcome(
            house,
            "nack",
            one,
        )
        == "dead"
    )
    assert [facts.group for facts in house.broker.delivery.paused()] == ["g"]


def test_a_reject_goes_to_the_dead_letters_at_once_while_the_breaker_is_open() -> None:
    house = failing_house()
    settle(house, "nack", *receive(house, count_max=20))
    assert house.broker.delivery.paused() != []
    before = dead(house)
    [one] = receive(house, count_max=1)
    assert outcome(house, "reject", one) == "dead"
    assert dead(house) == before + 1


def test_rejects_do_not_open_the_breaker_or_keep_it_open() -> None:
    house = failing_house()
    rejected = settle(house, "reject", *receive(house, count_max=25))
    assert {one.outcome for one in rejected} == {"dead"}
    assert house.broker.delivery.paused() == []
    settle(house, "nack", *receive(house, count_max=20))
    assert house.broker.delivery.paused() != []
    publish(house, *(f"more {n}" for n in range(60)))
    settle(house, "reject", *receive(house, count_max=20))
    settle(house, "ack", *receive(house, count_max=20))
    assert house.broker.delivery.paused() == []


def restarted(house: House, seconds_down: float) -> House:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    now_ms = house.scheduler.clock.now_ms + int(seconds_down * 1000)
    return local_house(disk.copy(), house.options, now_ms=now_ms).start()


def durable_house() -> House:
    house = local_house(None, delivery_options()).start()
    house.done(house.broker.topics.create("jobs", 1, {}))
    publish(house, *(str(n) for n in range(60)))
    return house


def test_leases_that_ran_out_while_the_broker_was_down_do_not_open_the_breaker() -> None:
    house = durable_house()
    assert len(receive(house, count_max=25, visibility_ms=30_000)) == 25
    house = restarted(house, 60)
    pass_time(house, 0.1)
    assert sum(one.timeouts for one in house.broker.delivery.counts.values()) == 25
    assert house.broker.delivery.paused() == []


def test_leases_that_run_out_just_after_a_start_do_not_open_the_breaker() -> None:
    house = durable_house()
    assert len(receive(house, count_max=25, visibility_ms=30_000)) == 25
    house = restarted(house, 30 - START_SECONDS / 2)
    pass_time(house, START_SECONDS)
    assert house.broker.delivery.paused() == []


def test_leases_that_run_out_later_open_the_breaker_after_a_start_too() -> None:
    house = durable_house()
    house = restarted(house, 1)
    assert len(receive(house, count_max=25, visibility_ms=30_000)) == 25
    pass_time(house, 31)
    assert house.broker.delivery.paused() != []
