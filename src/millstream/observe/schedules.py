"""Schedules on the metrics page."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily

from millstream.broker.schedule_state import LATENESS_BOUNDS_S
from millstream.observe.metrics import PREFIX, counter, gauge, gauges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from millstream.broker.named_schedules import NamedSchedules
    from millstream.broker.schedules import Schedules


def schedule_metrics(schedules: Schedules, named: NamedSchedules) -> Iterator[Metric]:
    found = schedules.statistics()
    yield gauge("named_schedules", "Named schedules.", len(named))
    yield counter("named_schedule_runs", "Records that named schedules published.", named.runs)
    yield counter(
        "named_schedule_failures", "Runs that were refused, or had no topic.", named.failed
    )
    yield gauge("schedules_pending", "Records that are scheduled.", found.pending)
    yield gauges(
        "schedules_level",
        "Records in each level of the timing wheel, from due soonest to beyond 7.76 days.",
        ("level",),
        {(str(level),): count for level, count in enumerate(found.levels)},
    )
    yield counter("schedules_added", "Records that were scheduled.", found.scheduled)
    yield counter("schedules_fired", "Records that were due, and went to their topic.", found.fired)
    yield counter("schedules_cancelled", "Schedules that were cancelled.", found.cancelled)
    yield counter("schedules_expired", "Schedules whose topic was gone.", found.expired)
    yield counter("schedules_moved", "Schedules written again to cut the log.", found.moved)
    yield counter("schedules_retried", "Firings that were refused and tried again.", found.retries)
    bounds = [*map(str, LATENESS_BOUNDS_S), "+Inf"]
    yield HistogramMetricFamily(
        PREFIX + "schedule_lateness_seconds",
        "How long after it was due a record was in its topic, durable.",
        buckets=list(zip(bounds, accumulate(found.lateness), strict=True)),
        sum_value=found.lateness_sum_s,
    )
