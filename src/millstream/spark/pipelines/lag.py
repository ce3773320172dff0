"""`lag`: which groups fall behind, how far and where; a report with pictures.

A run watches the groups for a while, by what the broker says of committed offsets and of leases,
and keeps what it saw beside its state, so that the next report shows it too. What arrived, and
under which keys, comes from the records' own times, out of the log.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from millstream.clock import SystemClock
from millstream.errors import GroupUnknown
from millstream.spark.pipelines.context import Context
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
    Samples,
    keep,
    kept,
    take,
    watch,
)
from millstream.spark.pipelines.plots import Lines, Point, step_s
from millstream.spark.pipelines.registry import Option, Pipeline
from millstream.spark.pipelines.report import Heading, Report, Table, Text, show_time, write_report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from millstream.client import Client

# Of what there may be thousands of, a page shows the worst.
ROWS_SHOWN = 20
# Leases that are counted: a group may have a hundred thousand.
LEASES_MAX = 10_000
# In a pause, a run looks this often whether it is to end.
PAUSE_S = 0.25


class Findings(NamedTuple):
    """All that a report says."""

    begin_ms: int
    end_ms: int
    groups: Sequence[GroupPace]
    partitions: Sequence[PartitionPace]
    deliveries: Sequence[Deliveries]
    leases: dict[tuple[str, str], int]
    hot_keys: Sequence[HotKey]
    hot_partitions: Sequence[HotPartition]
    lag_records: dict[str, list[Point]]
    lag_seconds: dict[str, list[Point]]
    done: dict[str, list[Point]]
    redelivered: dict[str, list[Point]]
    arrived: dict[str, list[Point]]


def run(context: Context) -> None:
    options = context.options
    watch_ms, interval_ms = options.duration_ms("watch"), options.duration_ms("interval")
    if not interval_ms:
        options.refuse("interval", "is 0; it takes a time such as 1s")
    clock = SystemClock()
    directory = Path(options.get("report", str(context.directory / "report")))
    with context.client() as client:
        while True:
            samples = Samples()
            watch(
                partial(take, client, options.names("groups"), samples),
                now_ms=clock.wall_ms,
                pause=_pause(context),
                is_over=context.is_stopping,
                watch_ms=watch_ms,
                interval_ms=interval_ms,
            )
            keep(context.spark, samples, context.directory)
            findings = look(context, client, clock.wall_ms())
            page = write_report(report_of(findings), directory)
            behind = sum(one.messages for one in findings.groups)
            counted = f"{len(findings.groups):,} groups are {behind:,} records behind"
            if not context.is_continuous or context.is_stopping():
                break
            context.progress.say(f"{counted}; {page} is new")
    context.say(f"{counted}; the report is {page}")


def _pause(context: Context) -> Callable[[float], None]:
    def pause(seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not context.is_stopping():
            time.sleep(min(left, PAUSE_S))

    return pause


def look(context: Context, client: Client, now_ms: int) -> Findings:
    """What a report says of the time up to now."""
    options, spark = context.options, context.spark
    begin_ms = now_ms - options.duration_ms("since")
    positions = kept(spark, POSITIONS, context.directory, begin_ms).cache()
    deliveries = kept(spark, DELIVERIES, context.directory, begin_ms)
    topics = sorted(row["topic"] for row in positions.select("topic").distinct().collect())
    known = {one.name for one in client.topics.list()}
    there = [topic for topic in topics if topic in known]
    groups = [GroupPace(*row) for row in group_paces(positions).collect()]
    # What was seen is pictured as finely as it was seen; what arrived, over all of the time.
    (seen,) = positions.selectExpr("min(at_ms) AS first", "max(at_ms) AS last").collect()
    fine_s = step_s(seen["first"] or now_ms, seen["last"] or now_ms)
    coarse_s = step_s(begin_ms, now_ms)
    keys: list[HotKey] = []
    partitions: list[HotPartition] = []
    arrived: dict[str, list[Point]] = {}
    if there:
        records = context.table(
            *there,
            columns="topic,partition,timestamp,key",
            startingTimestamp=str(begin_ms),
            startingOffsetsByTimestampStrategy="latest",
        )
        count = options.number("hot", minimum=1)
        keys = [HotKey(*row) for row in hot_keys(records, count).collect()]
        partitions = [HotPartition(*row) for row in hot_partitions(records, count).collect()]
        found = lines(arrivals(records, coarse_s), "topic", "per_s")
        arrived = {
            topic: with_pauses(points, coarse_s, begin_ms, now_ms)
            for topic, points in found.items()
        }
    over_time = lag_over_time(positions, fine_s)
    findings = Findings(
        begin_ms=begin_ms,
        end_ms=now_ms,
        groups=groups,
        partitions=[
            PartitionPace(*row) for row in partition_paces(positions).limit(ROWS_SHOWN).collect()
        ],
        deliveries=[Deliveries(now_ms, *row) for row in delivery_totals(deliveries).collect()],
        leases=count_leases(client, [one.group for one in groups]),
        hot_keys=keys,
        hot_partitions=partitions,
        lag_records=lines(over_time, "group", "messages"),
        lag_seconds=lines(over_time, "group", "seconds"),
        done=lines(pace_over_time(positions, fine_s), "group", "per_s"),
        redelivered=lines(redelivered_over_time(deliveries, fine_s), "group", "per_s"),
        arrived=arrived,
    )
    positions.unpersist()
    return findings


def lines(frame: DataFrame, name: str, value: str) -> dict[str, list[Point]]:
    """Rows as lines of a picture: a point a step."""
    found: dict[str, list[Point]] = {}
    for row in frame.orderBy("begin_s").collect():
        when = datetime.fromtimestamp(row["begin_s"], UTC)
        found.setdefault(row[name], []).append((when, float(row[value])))
    return dict(sorted(found.items()))


def with_pauses(points: list[Point], seconds: int, begin_ms: int, end_ms: int) -> list[Point]:
    """Where nothing came, a line is at 0, instead of going straight on to what came next."""
    first = begin_ms // 1000 // seconds * seconds
    steps = range(first, end_ms // 1000, seconds)
    pauses = {datetime.fromtimestamp(step, UTC): 0.0 for step in steps}
    return sorted((pauses | dict(points)).items())


def count_leases(client: Client, groups: Sequence[str]) -> dict[tuple[str, str], int]:
    """By group and state: records that are with a member, or wait to come back."""
    counts: Counter[tuple[str, str]] = Counter()
    for group in groups:
        try:
            for lease in client.groups.leases(group):
                counts[group, lease.state] += 1
                if sum(counts.values()) >= LEASES_MAX:
                    return counts
        except GroupUnknown:
            continue
    return counts


# ---- the page


def report_of(findings: Findings) -> Report:
    report = Report("Lag")
    between = f"between {show_time(findings.begin_ms)} and {show_time(findings.end_ms)}"
    if not findings.groups:
        report.add(Text(f"No group was seen {between}."))
        return report
    report.add(
        Text(
            f"{len(findings.groups):,} groups were seen {between}. The slowest ones come first: "
            "those whose oldest record that is not done is the oldest."
        ),
        Table(
            ("group", "records behind", "seconds behind", "done/s", "arriving/s", "caught up in"),
            [
                (
                    one.group,
                    one.messages,
                    one.seconds,
                    one.done_per_s,
                    one.arrived_per_s,
                    _rest(one),
                )
                for one in findings.groups[:ROWS_SHOWN]
            ],
        ),
        Heading("Over time"),
        Lines("lag-records.png", "Records behind", "records", findings.lag_records),
        Lines("lag-seconds.png", "Seconds behind", "seconds", findings.lag_seconds),
        Lines("done.png", "Records done by each group", "records/s", findings.done),
        Lines("arrived.png", "Records that arrived in each topic", "records/s", findings.arrived),
        Heading("Slowest partitions"),
        Table(
            ("group", "topic", "partition", "records behind", "seconds behind", "done/s"),
            [tuple(one) for one in findings.partitions],
        ),
    )
    _add_deliveries(report, findings)
    report.add(
        Heading("Hot partitions"),
        Text("With their share of the records of their topic."),
        Table(
            ("topic", "partition", "records", "share"),
            [
                (one.topic, one.partition, one.records, _percent(one.share))
                for one in findings.hot_partitions
            ],
        ),
        Heading("Hot keys"),
        Text("A key is in one partition: one with a large share cannot be spread over members."),
        Table(
            ("topic", "key", "records", "share"),
            [(one.topic, one.key, one.records, _percent(one.share)) for one in findings.hot_keys],
        ),
    )
    return report


def _add_deliveries(report: Report, findings: Findings) -> None:
    if not findings.deliveries:
        return
    report.add(
        Heading("Redeliveries"),
        Text("Of groups that receive by lease, while they were watched."),
        Lines("redelivered.png", "Deliveries again", "a second", findings.redelivered),
        Table(
            ("group", "delivered", "again", "share", "acked", "nacked", "timeouts", "dead",
             "leased now", "waiting now"),
            [
                (
                    one.group, one.delivered, one.redelivered,
                    _percent(one.redelivered / one.delivered) if one.delivered else None,
                    one.acked, one.nacked, one.timeouts, one.dead,
                    findings.leases.get((one.group, "leased"), 0),
                    findings.leases.get((one.group, "waiting"), 0),
                )
                for one in findings.deliveries[:ROWS_SHOWN]
            ],
        ),
    )  # fmt: skip


def _rest(pace: GroupPace) -> str:
    if pace.rest_s is None:
        return "never, at this pace"
    return f"{pace.rest_s:,.0f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


PIPELINE = Pipeline(
    name="lag",
    help="Which groups fall behind, how far and where: throughput, lag, redeliveries; a report.",
    run=run,
    options=(
        Option("groups", "Only these; by default all.", metavar="GROUPS"),
        Option("report", "The folder of the report; by default beside the state.", metavar="DIR"),
        Option("watch", "How long groups are watched before a report.", "30s", "TIME"),
        Option("interval", "From one look to the next.", default="1s", metavar="TIME"),
        Option("since", "How far back a report looks.", default="1h", metavar="TIME"),
        Option("hot", "How many hot keys and partitions are shown.", default="20", metavar="N"),
    ),
)
