"""What `lag` asks the broker for now and then: how far groups are, and how their deliveries end.

A broker knows the present. Rows of the past are kept as Parquet files beside the state of the run,
one file a run and kind, so that a report shows all that was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from millstream.errors import GroupUnknown

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from millstream.client import Client

# More would make one look take longer than the time between two.
GROUPS_MAX = 200
POSITIONS = "positions"
DELIVERIES = "deliveries"
SCHEMAS = {
    POSITIONS: "at_ms long, `group` string, topic string, partition int, committed long, end long, "
    "messages long, seconds double",
    DELIVERIES: "at_ms long, `group` string, delivered long, redelivered long, acked long, "
    "nacked long, timeouts long, dead long",
}


class Position(NamedTuple):
    """How far a group was in a partition, at a time."""

    at_ms: int
    group: str
    topic: str
    partition: int
    committed: int
    end: int
    messages: int
    seconds: float


class Deliveries(NamedTuple):
    """How deliveries of a group had ended, up to a time, since the broker started."""

    at_ms: int
    group: str
    delivered: int
    redelivered: int
    acked: int
    nacked: int
    timeouts: int
    dead: int


@dataclass(slots=True)
class Samples:
    positions: list[Position] = field(default_factory=list)
    deliveries: list[Deliveries] = field(default_factory=list)


def take(client: Client, wanted: Sequence[str], into: Samples, at_ms: int) -> None:
    """One look at the groups that are named, or at all."""
    names = wanted or [one.group for one in client.groups.list()]
    for name in names[:GROUPS_MAX]:
        try:
            lag = client.groups.lag(name)
        except GroupUnknown:
            # It may come, and may have gone.
            continue
        into.positions += [
            Position(
                at_ms, name, one.topic, one.partition, one.committed, one.end, one.messages,
                one.seconds,
            )
            for one in lag.partitions
        ]  # fmt: skip
    into.deliveries += [
        Deliveries(
            at_ms, one.group, one.delivered, one.redelivered, one.acked, one.nacked, one.timeouts,
            one.dead,
        )
        for one in client.groups.deliveries()
        if not wanted or one.group in wanted
    ]  # fmt: skip


def watch(
    look: Callable[[int], None],
    *,
    now_ms: Callable[[], int],
    pause: Callable[[float], None],
    is_over: Callable[[], bool],
    watch_ms: int,
    interval_ms: int,
) -> None:
    """A look at the begin, then one each interval, and one at the end."""
    next_ms = now_ms()
    end_ms = next_ms + watch_ms
    while True:
        at_ms = now_ms()
        look(at_ms)
        if at_ms >= end_ms or is_over():
            return
        after_ms = now_ms()
        # What was missed while a look took long is left out, and not made up for.
        next_ms = max(next_ms + interval_ms, after_ms)
        pause(max(0, min(next_ms, end_ms) - after_ms) / 1000)


def keep(spark: SparkSession, samples: Samples, folder: Path) -> None:
    """Add rows to those of earlier runs."""
    for name, rows in ((POSITIONS, samples.positions), (DELIVERIES, samples.deliveries)):
        frame_of(spark, name, rows).coalesce(1).write.mode("append").parquet(str(folder / name))


def kept(spark: SparkSession, name: str, folder: Path, since_ms: int) -> DataFrame:
    rows = spark.read.schema(SCHEMAS[name]).parquet(str(folder / name))
    return rows.where(rows["at_ms"] >= since_ms)


def frame_of(spark: SparkSession, name: str, rows: Iterable[tuple[object, ...]]) -> DataFrame:
    return spark.createDataFrame(list(rows), SCHEMAS[name])
