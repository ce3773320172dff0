"""Schedules on the metrics page."""

from __future__ import annotations

from broker.making import memory_house
from millstream.broker.publishing import Outgoing
from millstream.observe.schedules import schedule_metrics


def test_schedules_are_counted_on_the_metrics_page() -> None:
    house = memory_house()
    house.done(house.broker.topics.create("t", 1))
    for delay_ms in (100, 200, 86_400_000):
        record = Outgoing(None, b"v", delay_ms=delay_ms)
        house.done(house.broker.publisher.publish("t", [record]))
    house.scheduler.advance(1.0)
    found = {
        (one.name, *one.labels.values()): one.value
        for family in schedule_metrics(house.broker.schedules, house.broker.named_schedules)
        for one in family.samples
    }
    assert found["millstream_schedules_pending",] == 1
    assert found["millstream_named_schedules",] == 0
    assert found["millstream_schedules_fired_total",] == 2
    assert found["millstream_schedules_level", "3"] == 1
    assert found["millstream_schedule_lateness_seconds_bucket", "+Inf"] == 2
    assert found["millstream_schedule_lateness_seconds_bucket", "0.05"] == 2
