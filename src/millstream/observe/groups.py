"""Groups on the metrics page: totals, and the lag of so many partitions as a page can bear."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily

from millstream.broker.rebalancing import DURATION_BOUNDS_S
from millstream.observe.metrics import PREFIX, counter, counters, gauge, gauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.consuming import Consuming


def group_metrics(consuming: Consuming) -> Iterator[Metric]:
    counts = consuming.groups.counts
    offsets = consuming.group_offsets
    yield gauge("groups", "Groups, with members and without.", consuming.groups.count())
    yield gauge("group_members", "Members of all groups.", consuming.directory.members)
    yield gauge("group_offsets", "Committed offsets that are kept.", offsets.table.count)
    yield gauge("consumers", "Sequential consumers with a position.", len(consuming.sequential))
    yield counters(
        "group_rebalances",
        "Rebalances, by what caused them.",
        ("reason",),
        {
            (reason,): count
            for reason, count in (counts.rebalances + consuming.classic_groups.rebalances).items()
        },
    )
    yield _durations(counts.durations, counts.duration_sum_s)
    yield counter("group_commits", "Offsets committed, by members and for them.", offsets.commits)
    yield counter("group_auto_commits", "Offsets committed for members.", counts.auto_commits)
    yield counter(
        "group_auto_commit_failures",
        "Offsets that could not be committed for members, and were tried again.",
        counts.auto_commits_failed,
    )
    yield counters(
        "group_offset_resets",
        "Positions that auto_offset_reset decided: nothing committed, or removed by retention.",
        ("reason",),
        {("unset",): counts.resets_unset, ("removed",): counts.resets_removed},
    )
    yield counter(
        "group_expired_records",
        "Records that retention removed before their group read them.",
        counts.expired_records,
    )
    yield counter("groups_expired", "Groups forgotten after a long time.", offsets.expired_groups)
    yield counters(
        "group_records_consumed",
        "Records given to members; those of further groups have no names.",
        ("group", "topic"),
        dict(counts.records.items()),
    )
    yield from _lags(consuming)


def _durations(counts: list[int], sum_s: float) -> Metric:
    bounds = [*map(str, DURATION_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, accumulate(counts), strict=True))
    text = "From the cause of a rebalance until every member had its partitions."
    name = PREFIX + "group_rebalance_seconds"
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=sum_s)


def _lags(consuming: Consuming) -> Iterator[Metric]:
    labels = ("group", "topic", "partition")
    samples = list(consuming.lags.samples())
    yield gauges(
        "group_lag",
        "Messages between what is committed and the end.",
        labels,
        {(one.group, one.topic, str(one.partition)): one.messages for one in samples},
    )
    yield gauges(
        "group_lag_seconds",
        "Age of the oldest record that is not committed.",
        labels,
        {(one.group, one.topic, str(one.partition)): one.seconds for one in samples},
    )
    yield gauges(
        "group_lag_trend",
        "Messages a second by which the lag grows, over the last five minutes.",
        labels,
        {
            (one.group, one.topic, str(one.partition)): one.trend_per_s
            for one in samples
            if one.trend_per_s is not None
        },
    )
