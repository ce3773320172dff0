"""Lag: in messages, in seconds, and which way it goes."""

from __future__ import annotations

import pytest

from broker.grouping import Consumer, house_with, publish, settle
from broker.making import House
from millstream.broker.group_values import Commit
from millstream.broker.lag import SAMPLE_SECONDS, GroupLag, Series
from millstream.errors import GroupUnknown


def lag_of(house: House, group: str = "g") -> GroupLag:
    return house.done(house.broker.lags.of(group))


def test_lag_is_what_is_not_committed_and_how_old_the_oldest_of_it_is() -> None:
    house = house_with(partitions=2)
    member = Consumer(house).join(auto_commit=False)
    publish(house, "a")
    house.scheduler.advance(4)
    publish(house, "b", "c")
    publish(house, "x", partition=1)
    house.scheduler.advance(6)
    lag = lag_of(house)
    assert [one.messages for one in lag.partitions] == [3, 1]
    assert [one.seconds for one in lag.partitions] == pytest.approx([10, 6], abs=0.1)
    assert lag.messages == 4
    assert lag.seconds == pytest.approx(10, abs=0.1)
    assert lag.partitions[0].member_id == member.id
    member.heartbeat()
    member.commit(1)
    assert lag_of(house).seconds == pytest.approx(6, abs=0.1)
    member.commit(3)
    member.commit(1, partition=1)
    lag = lag_of(house)
    assert (lag.messages, lag.seconds) == (0, 0.0)


def test_what_retention_removed_is_behind_but_has_no_age() -> None:
    house = house_with(partitions=1)
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0)]))
    publish(house, "a", "b")
    house.scheduler.advance(60)
    house.done(house.broker.topics.purge("orders"))
    publish(house, "c")
    house.scheduler.advance(5)
    lag = lag_of(house)
    assert (lag.messages, lag.partitions[0].start) == (3, 2)
    assert lag.seconds == pytest.approx(5, abs=0.1)


def test_the_trend_is_messages_a_second() -> None:
    house = house_with(partitions=1)
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0)]))
    assert lag_of(house).trend_per_s is None
    for number in range(40):
        publish(house, *(f"{number}-{n}" for n in range(30)))
        house.scheduler.advance(SAMPLE_SECONDS)
    assert lag_of(house).trend_per_s == pytest.approx(30 / SAMPLE_SECONDS, rel=0.01)
    # Only the last five minutes count: it stands still, then it falls.
    house.scheduler.advance(20 * SAMPLE_SECONDS + 1)
    assert lag_of(house).trend_per_s == pytest.approx(0, abs=1e-9)
    for step in range(10):
        house.done(house.broker.groups.commit("g", [Commit("orders", 0, 100 * (step + 1))]))
        house.scheduler.advance(SAMPLE_SECONDS)
    trend = lag_of(house).trend_per_s
    assert trend is not None
    assert trend < -1


def test_a_topic_made_again_has_no_trend_and_no_age_of_the_old_one() -> None:
    house = house_with(partitions=1)
    commit = [Commit("orders", 0, 0)]
    house.done(house.broker.groups.commit("g", commit))
    for _ in range(4):
        publish(house, "a")
        house.scheduler.advance(SAMPLE_SECONDS)
    assert lag_of(house).trend_per_s is not None
    house.done(house.broker.topics.delete("orders"))
    house.done(house.broker.topics.create("orders", 1))
    house.done(house.broker.groups.commit("g", commit))
    publish(house, "b")
    lag = lag_of(house)
    assert (lag.messages, lag.trend_per_s) == (1, None)
    assert lag.seconds == pytest.approx(0, abs=0.1)
    assert list(house.broker.lags.samples()) == []
    house.scheduler.advance(SAMPLE_SECONDS)
    assert [one.trend_per_s for one in house.broker.lags.samples()] == [None]


def test_a_series_forgets_what_is_older_than_five_minutes() -> None:
    series = Series()
    series.add(0.0, 1_000_000)
    assert series.slope() is None
    for second in range(301, 400):
        series.add(float(second), 5)
    assert series.slope() == 0


@pytest.mark.parametrize("jump_s", [3600, -3600, 10 * 365 * 86400, -10 * 365 * 86400])
def test_a_jump_of_the_wall_clock_leaves_the_trend_alone_and_no_age_below_zero(
    jump_s: int,
) -> None:
    house = house_with(partitions=1)
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0)]))
    for number in range(10):
        publish(house, str(number))
        house.scheduler.advance(SAMPLE_SECONDS)
        if number == 5:
            house.scheduler.clock.now_ms += jump_s * 1000
    lag = lag_of(house)
    assert lag.trend_per_s == pytest.approx(1 / SAMPLE_SECONDS, rel=0.01)
    assert lag.messages == 10
    assert lag.seconds >= 0
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 10)]))
    assert lag_of(house).seconds == 0


@pytest.mark.parametrize("jump_s", [3600, -3600])
def test_a_jump_of_the_wall_clock_ends_no_session_and_holds_none(jump_s: int) -> None:
    house = house_with(session_timeout_ms=10_000)
    member, silent = Consumer(house).join(), Consumer(house).join()
    house.scheduler.advance(5)
    house.scheduler.clock.now_ms += jump_s * 1000
    house.scheduler.advance(4)
    member.heartbeat()

    house.scheduler.advance(2)
    facts = house.done(house.broker.directory.describe("g"))
    assert [one.member_id for one in facts.members] == [member.id]
    assert silent.id != member.id
    settle(member)
    polling = member.start_poll(wait_ms=3_000)
    house.scheduler.clock.now_ms -= 2 * jump_s * 1000
    house.scheduler.advance(2.9)
    assert not polling.pending.is_done
    house.scheduler.advance(0.2)
    assert polling.pending.is_done


def test_the_metrics_page_has_lag_and_rebalances() -> None:
    from millstream.observe.groups import group_metrics

    house = house_with(partitions=1)
    member = Consumer(house).join(auto_commit=False)
    publish(house, "a", "b")
    member.poll()
    house.scheduler.advance(SAMPLE_SECONDS + 1)
    publish(house, "c")
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in group_metrics(house.broker.consuming)
        for sample in family.samples
    }
    assert found["millstream_group_lag", "g", "orders", "0"] == 3
    assert found["millstream_group_lag_seconds", "g", "orders", "0"] >= SAMPLE_SECONDS
    assert found["millstream_group_rebalances_total", "join"] == 1
    assert found["millstream_group_records_consumed_total", "g", "orders"] == 2
    assert found["millstream_groups",] == found["millstream_group_members",] == 1
    assert found["millstream_group_rebalance_seconds_count",] == 1
    house.scheduler.advance(SAMPLE_SECONDS + 1)
    names = {family.name for family in group_metrics(house.broker.consuming) if family.samples}
    assert "millstream_group_lag_trend" in names


def test_deleted_topics_and_unknown_groups() -> None:
    house = house_with(partitions=1)
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 0)]))
    publish(house, "a")
    house.scheduler.advance(SAMPLE_SECONDS + 1)
    house.done(house.broker.topics.delete("orders"))
    assert isinstance(house.failed(house.broker.lags.of("nobody")), GroupUnknown)
    assert list(house.broker.lags.samples()) == []
    house.scheduler.advance(SAMPLE_SECONDS + 1)
