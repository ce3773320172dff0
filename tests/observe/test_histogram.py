"""Durations in buckets, one measured for many."""

from __future__ import annotations

from millstream.observe.histogram import BOUNDS_S, SAMPLE_EVERY, Histogram
from millstream.observe.metrics import Metrics


def test_a_duration_on_a_bound_belongs_below_it() -> None:
    histogram = Histogram()
    for bound in BOUNDS_S:
        histogram.observe(bound)
    histogram.observe(BOUNDS_S[-1] + 0.001)
    assert histogram.counts == [SAMPLE_EVERY] * (len(BOUNDS_S) + 1)


def test_the_page_counts_upwards() -> None:
    histogram = Histogram()
    histogram.observe(0.0002)
    histogram.observe(2.0)
    metrics = Metrics()
    metrics.register(lambda: [histogram.metric("work_seconds", "Work.")])
    text = metrics.text().decode()
    assert "# TYPE millstream_work_seconds histogram" in text
    assert 'millstream_work_seconds_bucket{le="0.0001"} 0.0' in text
    assert f'millstream_work_seconds_bucket{{le="0.0005"}} {SAMPLE_EVERY}.0' in text
    assert f'millstream_work_seconds_bucket{{le="+Inf"}} {2 * SAMPLE_EVERY}.0' in text
    assert f"millstream_work_seconds_count {2 * SAMPLE_EVERY}.0" in text
    assert f"millstream_work_seconds_sum {2.0002 * SAMPLE_EVERY}" in text
