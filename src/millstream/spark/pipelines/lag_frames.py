"""`lag` as functions of frames: samples of groups, and records by their times.

A rate is taken from the differences between one sample and the next, over the time between them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from millstream.spark.pipelines.columns import as_text, begin_s

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

COUNTS = ("delivered", "redelivered", "acked", "nacked", "timeouts", "dead")


class GroupPace(NamedTuple):
    """How a group did while it was watched."""

    group: str
    messages: int
    seconds: float
    done_per_s: float | None
    arrived_per_s: float | None

    @property
    def rest_s(self) -> float | None:
        """How long it will take to catch up at this pace; None for never."""
        if not self.messages:
            return 0.0
        gain = (self.done_per_s or 0.0) - (self.arrived_per_s or 0.0)
        return self.messages / gain if gain > 0 else None


class PartitionPace(NamedTuple):
    group: str
    topic: str
    partition: int
    messages: int
    seconds: float
    done_per_s: float | None


class HotKey(NamedTuple):
    topic: str
    key: str | None
    records: int
    # Of all records of its topic.
    share: float


class HotPartition(NamedTuple):
    topic: str
    partition: int
    records: int
    share: float


def lag_over_time(positions: DataFrame, seconds: int) -> DataFrame:
    """Of each group in each step of time, the most that it was behind: in records over all
    partitions, and in seconds in the worst of them."""
    at_once = positions.groupBy("group", "at_ms").agg(
        sql.sum("messages").alias("messages"), sql.max("seconds").alias("seconds")
    )
    return at_once.groupBy(begin_s("at_ms", seconds).alias("begin_s"), "group").agg(
        sql.max("messages").alias("messages"), sql.max("seconds").alias("seconds")
    )


def pace_over_time(positions: DataFrame, seconds: int) -> DataFrame:
    """Of each group in each step of time, the records a second that it got done."""
    steps = _steps(positions, ("group", "topic", "partition"), ("committed",))
    return (
        steps.groupBy(begin_s("at_ms", seconds).alias("begin_s"), "group")
        .agg(_per_s("committed_added").alias("per_s"))
        .where(sql.col("per_s").isNotNull())
    )


def partition_paces(positions: DataFrame) -> DataFrame:
    """Each partition of each group, as it was seen last; those that are furthest behind first."""
    place = ("group", "topic", "partition")
    last = sql.max_by(sql.struct("messages", "seconds"), "at_ms")
    return (
        _steps(positions, place, ("committed",))
        .groupBy(*place)
        .agg(last.alias("last"), _per_s("committed_added").alias("done_per_s"))
        .select(*place, "last.messages", "last.seconds", "done_per_s")
        .orderBy(sql.desc("seconds"), sql.desc("messages"), *place)
    )


def group_paces(positions: DataFrame) -> DataFrame:
    """Each group, as it was seen last; those that are furthest behind first."""
    place = ("group", "topic", "partition")
    steps = _steps(positions, place, ("committed", "end"))
    partitions = steps.groupBy(*place).agg(
        sql.max_by("messages", "at_ms").alias("messages"),
        sql.max_by("seconds", "at_ms").alias("seconds"),
        _per_s("committed_added").alias("done_per_s"),
        _per_s("end_added").alias("arrived_per_s"),
    )
    return (
        partitions.groupBy("group")
        .agg(
            sql.sum("messages").alias("messages"),
            sql.max("seconds").alias("seconds"),
            sql.sum("done_per_s").alias("done_per_s"),
            sql.sum("arrived_per_s").alias("arrived_per_s"),
        )
        .orderBy(sql.desc("seconds"), sql.desc("messages"), "group")
    )


def delivery_totals(deliveries: DataFrame) -> DataFrame:
    """How many deliveries of each group ended how, while it was watched."""
    steps = _steps(deliveries, ("group",), COUNTS)
    totals = [sql.coalesce(sql.sum(f"{one}_added"), sql.lit(0)).alias(one) for one in COUNTS]
    return steps.groupBy("group").agg(*totals).orderBy(sql.desc("redelivered"), "group")


def redelivered_over_time(deliveries: DataFrame, seconds: int) -> DataFrame:
    """Of each group in each step of time, the deliveries a second that were not the first."""
    steps = _steps(deliveries, ("group",), ("redelivered",))
    return (
        steps.groupBy(begin_s("at_ms", seconds).alias("begin_s"), "group")
        .agg(_per_s("redelivered_added").alias("per_s"))
        .where(sql.col("per_s").isNotNull())
    )


def arrivals(records: DataFrame, seconds: int) -> DataFrame:
    """Of each topic, the records a second in each step of time, by the records' own times."""
    timed = records.withColumn("at_ms", sql.unix_millis("timestamp"))
    return timed.groupBy(begin_s("at_ms", seconds).alias("begin_s"), "topic").agg(
        (sql.count("*") / seconds).alias("per_s")
    )


def hot_keys(records: DataFrame, count: int) -> DataFrame:
    """The keys with the most records; those without a key are none."""
    keyed = records.where(sql.col("key").isNotNull()).groupBy("topic", "key")
    return _shares(records, keyed.agg(sql.count("*").alias("records")), as_text("key"), count)


def hot_partitions(records: DataFrame, count: int) -> DataFrame:
    found = records.groupBy("topic", "partition").agg(sql.count("*").alias("records"))
    return _shares(records, found, sql.col("partition"), count)


def _shares(records: DataFrame, found: DataFrame, name: Column, count: int) -> DataFrame:
    """The largest, each with its part of its topic."""
    totals = records.groupBy("topic").agg(sql.count("*").alias("total"))
    return (
        found.orderBy(sql.desc("records"))
        .limit(count)
        .join(sql.broadcast(totals), "topic")
        .select("topic", name.alias("name"), "records", (sql.col("records") / sql.col("total")))
        .orderBy(sql.desc("records"), "topic", "name")
    )


def _steps(samples: DataFrame, place: tuple[str, ...], counts: tuple[str, ...]) -> DataFrame:
    """Each sample with how much its numbers grew since the one before; nothing for the first."""
    in_order = Window.partitionBy(*place).orderBy("at_ms")
    before = samples.withColumn("before_ms", sql.lag("at_ms").over(in_order))
    for name in counts:
        last = sql.lag(name).over(in_order)
        grown = sql.col(name) - last
        # Offsets go back when a group is reset, and nothing was done. Counts begin at 0 again when
        # the broker is restarted.
        fallen = sql.col(name) if name in COUNTS else sql.lit(0)
        before = before.withColumn(f"{name}_added", sql.when(grown < 0, fallen).otherwise(grown))
    return before


def _per_s(added: str) -> Column:
    """A sum of differences over the time in which they came."""
    seconds = sql.sum(sql.col("at_ms") - sql.col("before_ms")) / 1000
    return sql.sum(added) / seconds
