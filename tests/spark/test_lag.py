"""Lag: samples of groups and records by their times, as frames; and when samples are taken."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from millstream.spark.pipelines.lag import with_pauses
from millstream.spark.pipelines.lag_frames import (
    GroupPace,
    HotKey,
    HotPartition,
    PartitionPace,
    arrivals,
    delivery_totals,
    group_paces,
    hot_keys,
    hot_partitions,
    lag_over_time,
    pace_over_time,
    partition_paces,
    redelivered_over_time,
)
from millstream.spark.pipelines.lag_samples import (
    DELIVERIES,
    POSITIONS,
    Deliveries,
    Position,
    frame_of,
    watch,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEGIN_MS = 1_793_491_200_000
BEGIN_S = BEGIN_MS // 1000


def position(
    second: int, committed: int, end: int = 100, partition: int = 0, group: str = "billing"
) -> Position:
    at_ms = BEGIN_MS + 1000 * second
    return Position(at_ms, group, "orders", partition, committed, end, end - committed, second / 2)


def deliveries(second: int, delivered: int, redelivered: int) -> Deliveries:
    at_ms = BEGIN_MS + 1000 * second
    return Deliveries(at_ms, "billing", delivered, redelivered, 0, 0, 0, 0)


def positions_of(spark: SparkSession, *rows: Position) -> DataFrame:
    return frame_of(spark, POSITIONS, rows)


def steps(frame: DataFrame, name: str, *values: str) -> dict[tuple[int, str], tuple[Any, ...]]:
    return {
        (row["begin_s"] - BEGIN_S, row[name]): tuple(row[value] for value in values)
        for row in frame.collect()
    }


def test_lag_is_the_most_of_each_step_over_all_partitions(spark: SparkSession) -> None:
    seen = positions_of(
        spark,
        position(0, 10),
        position(0, 20, partition=1),
        position(4, 50),
        position(4, 60, partition=1),
        position(5, 100),
        position(5, 100, partition=1),
    )
    assert steps(lag_over_time(seen, 5), "group", "messages", "seconds") == {
        (0, "billing"): (170, 2.0),
        (5, "billing"): (0, 2.5),
    }


def test_the_slowest_group_is_first_and_says_when_it_is_done(spark: SparkSession) -> None:
    seen = positions_of(
        spark,
        position(0, 0),
        position(10, 50, end=120),
        position(0, 0, partition=1),
        position(10, 10, end=100, partition=1),
        position(10, 100, group="mail"),
        position(4, 3, group="audit"),
    )
    paces = [GroupPace(*row) for row in group_paces(seen).collect()]
    assert paces == [
        GroupPace("billing", 160, 5.0, 6.0, 2.0),
        GroupPace("mail", 0, 5.0, None, None),
        GroupPace("audit", 97, 2.0, None, None),
    ]
    assert [pace.rest_s for pace in paces] == [40.0, 0.0, None]
    first, second = (
        PartitionPace(*row) for row in partition_paces(seen).where("group = 'billing'").collect()
    )
    assert first == PartitionPace("billing", "orders", 1, 90, 5.0, 1.0)
    assert second == PartitionPace("billing", "orders", 0, 70, 5.0, 5.0)


def test_a_group_that_was_reset_did_nothing(spark: SparkSession) -> None:
    seen = positions_of(spark, position(0, 80), position(1, 0), position(3, 20))
    assert steps(pace_over_time(seen, 1), "group", "per_s") == {
        (1, "billing"): (0.0,),
        (3, "billing"): (10.0,),
    }


def test_counts_go_on_over_a_restart(spark: SparkSession) -> None:
    rows = [deliveries(0, 100, 10), deliveries(1, 110, 14), deliveries(2, 5, 3)]
    seen = frame_of(spark, DELIVERIES, rows)
    (row,) = delivery_totals(seen).collect()
    assert (row["group"], row["delivered"], row["redelivered"]) == ("billing", 15, 7)
    assert steps(redelivered_over_time(seen, 1), "group", "per_s") == {
        (1, "billing"): (4.0,),
        (2, "billing"): (3.0,),
    }


def test_a_group_that_was_seen_once_has_no_pace(spark: SparkSession) -> None:
    (row,) = delivery_totals(frame_of(spark, DELIVERIES, [deliveries(0, 9, 9)])).collect()
    assert (row["delivered"], row["redelivered"]) == (0, 0)
    assert steps(pace_over_time(positions_of(spark, position(0, 1)), 1), "group", "per_s") == {}


@pytest.fixture
def records(spark: SparkSession) -> DataFrame:
    begin = datetime.fromtimestamp(BEGIN_S, UTC)
    rows = [
        ("orders", 0, b"ada", 0), ("orders", 0, b"ada", 1), ("orders", 0, b"ada", 6),
        ("orders", 1, b"bob", 0), ("orders", 1, None, 0), ("mails", 0, b"\xff", 2),
    ]  # fmt: skip
    timed = [(topic, at, key, begin + timedelta(seconds=second)) for topic, at, key, second in rows]
    return spark.createDataFrame(
        timed, "topic string, partition int, key binary, timestamp timestamp"
    )


def test_what_arrived_is_told_by_the_times_of_records(records: DataFrame) -> None:
    assert steps(arrivals(records, 5), "topic", "per_s") == {
        (0, "orders"): (0.8,),
        (5, "orders"): (0.2,),
        (0, "mails"): (0.2,),
    }


def test_hot_keys_and_partitions_have_their_share(records: DataFrame) -> None:
    assert next(HotKey(*row) for row in hot_keys(records, 2).collect()) == HotKey(
        "orders", "ada", 3, 0.6
    )
    every = {HotKey(*row) for row in hot_keys(records, 10).collect()}
    assert every == {
        HotKey("orders", "ada", 3, 0.6),
        HotKey("orders", "bob", 1, 0.2),
        HotKey("mails", "/w==", 1, 1.0),
    }
    assert [HotPartition(*row) for row in hot_partitions(records, 10).collect()] == [
        HotPartition("orders", 0, 3, 0.6),
        HotPartition("orders", 1, 2, 0.4),
        HotPartition("mails", 0, 1, 1.0),
    ]


class Time:
    """A clock that only pauses move, and looks that take a while."""

    def __init__(self, look_ms: int = 0) -> None:
        self.now_ms = 1000
        self.look_ms = look_ms
        self.looks: list[int] = []

    def look(self, at_ms: int) -> None:
        self.looks.append(at_ms - 1000)
        self.now_ms += self.look_ms

    def pause(self, seconds: float) -> None:
        assert seconds >= 0
        self.now_ms += round(1000 * seconds)

    def watch(self, watch_ms: int, interval_ms: int, looks_max: int = 1000) -> list[int]:
        watch(
            self.look,
            now_ms=lambda: self.now_ms,
            pause=self.pause,
            is_over=lambda: len(self.looks) >= looks_max,
            watch_ms=watch_ms,
            interval_ms=interval_ms,
        )
        return self.looks


def test_groups_are_looked_at_first_now_and_then_and_last() -> None:
    assert Time().watch(0, 1000) == [0]
    assert Time().watch(2500, 1000) == [0, 1000, 2000, 2500]
    assert Time().watch(10_000, 1000, looks_max=2) == [0, 1000]


def test_looks_that_take_long_are_not_made_up_for() -> None:
    assert Time(look_ms=1500).watch(4000, 1000) == [0, 1500, 3000, 4500]


def test_a_picture_shows_when_nothing_came() -> None:
    def at(second: int) -> datetime:
        return datetime.fromtimestamp(second, UTC)

    points = [(at(120), 2.0), (at(300), 5.0)]
    assert with_pauses(points, 60, 65_000, 310_000) == [
        (at(60), 0.0),
        (at(120), 2.0),
        (at(180), 0.0),
        (at(240), 0.0),
        (at(300), 5.0),
    ]
