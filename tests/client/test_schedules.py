"""Schedules by the Python client, against a broker."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from broker_process import BrokerProcess, wait_until
from millstream.client import Client
from millstream.errors import DelayInvalid, ScheduleOver, ScheduleUnknown


def test_a_record_appears_later_and_is_cancelled_by_its_place(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        client.publish("t", "soon", delay=200)
        far = [
            client.publish("t", "days", delay="9d", key="k", lane="high"),
            client.publish("t", "hours", delay=timedelta(hours=3)),
            client.publish("t", "a date", deliver_at=datetime(2029, 1, 31, 8, tzinfo=UTC)),
            client.publish("t", "a text", deliver_at="2029-01-31T08:00Z"),
        ]
        assert far[2].timestamp_ms == far[3].timestamp_ms == 1_864_540_800_000
        # It is not counted any more while it is on its way to the topic.
        wait_until(
            lambda: [one.value for one in client.read("t")] == [b"soon"], "the first to fire"
        )
        assert client.schedules.count("t") == 4
        pending = client.schedules.pending("t")
        assert [(one.partition, one.offset) for one in pending] == [place[:2] for place in far]
        first = pending[0].record()
        assert (first.key, first.value, pending[0].lane) == (b"k", b"days", "high")
        for place in far:
            assert client.schedules.cancel("t", place.partition, place.offset).state == "cancelled"
            assert client.schedules.find("t", place.partition, place.offset).state == "cancelled"
            with pytest.raises(ScheduleOver):
                client.schedules.cancel("t", place.partition, place.offset)
        with pytest.raises(ScheduleUnknown):
            client.schedules.cancel("t", 0, 10_000)
        with pytest.raises(DelayInvalid):
            client.publish("t", "never", delay="11 years")


def test_a_call_may_publish_now_and_later(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.publish_many("t", [{"value": "now"}, {"value": "later", "delay": "1h"}])
        assert [record.value for record in client.read("t")] == [b"now"]
        assert client.schedules.count("t") == 1


def test_a_named_schedule_is_kept(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        schedules = client.schedules
        made = schedules.put("a", "t", {"n": 1}, every=timedelta(minutes=5), key="k", lane="low")
        assert (made.every_ms, made.message["key"], made.message["value"]) == (
            300_000,
            "k",
            {"n": 1},
        )
        cron = schedules.put("b", "t", b"\xff", cron="@daily", time_zone="Asia/Tokyo", paused=True)
        assert (cron.next_ms, cron.paused) == (None, True)
        assert schedules.list() == [made, cron]
        assert schedules.get("b") == cron
        schedules.delete("b")
        with pytest.raises(ScheduleUnknown):
            schedules.get("b")
