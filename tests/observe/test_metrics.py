"""The metrics page reads plain integers when it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from millstream.clock import ManualClock
from millstream.observe.metrics import Metrics, counter, counters, families, gauge, gauges
from millstream.observe.status import Status


class Part:
    appends = 0


def test_a_source_is_read_at_each_scrape() -> None:
    part = Part()
    metrics = Metrics()
    metrics.register(lambda: [counter("appends", "Appends.", part.appends)])
    assert "millstream_appends_total 0.0" in metrics.text().decode()
    part.appends += 5
    assert "millstream_appends_total 5.0" in metrics.text().decode()
    assert metrics.values()["millstream_appends_total"] == 5


def test_labels_come_out_in_both_forms() -> None:
    def source() -> Iterator[Metric]:
        yield gauges("end", "End offset.", ("topic", "partition"), {("a", "0"): 7, ("a", "1"): 9})
        yield counters("reads", "Reads.", ("topic",), {})
        yield gauge("lag", "Lag.", 1.5)

    metrics = Metrics()
    metrics.register(source)
    text = metrics.text().decode()
    assert 'millstream_end{partition="1",topic="a"} 9.0' in text
    assert "# TYPE millstream_reads_total counter" in text
    values = metrics.values()
    assert values["millstream_lag"] == 1.5
    assert values["millstream_end"] == [
        {"labels": {"topic": "a", "partition": "0"}, "value": 7},
        {"labels": {"topic": "a", "partition": "1"}, "value": 9},
    ]


class EngineNumber(NamedTuple):
    name: str
    kind: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def test_rows_of_one_name_become_one_family() -> None:
    rows = [
        EngineNumber("millstream_log_bytes", "gauge", "Bytes.", 1, (("topic", "a"),)),
        EngineNumber("millstream_log_appends", "counter", "Appends.", 2),
        EngineNumber("millstream_log_bytes", "gauge", "Bytes.", 3, (("topic", "b"),)),
    ]
    metrics = Metrics()
    metrics.register(lambda: families(rows))
    text = metrics.text().decode()
    assert text.count("# TYPE millstream_log_bytes gauge") == 1
    assert 'millstream_log_bytes{topic="b"} 3.0' in text
    assert "# TYPE millstream_log_appends_total counter\nmillstream_log_appends_total 2.0" in text


def test_the_status_counts_time_by_the_clock_it_was_given() -> None:
    clock = ManualClock()
    status = Status(node_id=3, clock=clock)
    clock.advance(12.5)
    metrics = Metrics()
    metrics.register(status.metrics)
    assert metrics.values()["millstream_uptime_seconds"] == 12.5
    assert metrics.values()["millstream_ready"] == 0
    status.phase = "ready"
    assert metrics.values()["millstream_ready"] == 1
