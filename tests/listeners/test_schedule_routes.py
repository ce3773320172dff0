"""Publishing over HTTP into lanes, and with delays; what is scheduled, shown and cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh
from millstream.log.batch import decode, walk


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker"))) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


# ---- lanes


def lanes_stored(v1: V1, topic: str) -> dict[str, str | None]:
    """Value → lane, as the bytes on disk have it."""
    body = v1.call("GET", f"/topics/{topic}/partitions/0/batches").content
    found: dict[str, str | None] = {}
    for at, header in walk(body):
        for record in decode(body[at : at + header.size]):
            assert record.lane == header.lane
            assert record.value is not None
            found[record.value.decode()] = record.lane
    return found


def test_a_message_names_its_lane_in_the_body_or_the_query(v1: V1) -> None:
    topic = v1.topic(partitions=1)
    path = f"/topics/{topic}/messages"
    v1.good("POST", path, {"value": "a", "lane": "critical"})
    v1.good("POST", path, {"value": "b", "priority": 1})
    v1.good("POST", path, raw=b"c", lane="low")
    v1.good("POST", path, raw=b"d", priority=4)
    v1.good("POST", path, {"value": "e", "lane": "high"}, lane="low")
    v1.good("POST", path, {"value": "f", "lane": "normal"})
    v1.good("POST", f"/topics/{topic}/batch", {"messages": [{"value": "g", "lane": 0.0}]})
    assert lanes_stored(v1, topic) == {
        "a": "critical", "b": "high", "c": "low", "d": "background", "e": "high", "f": None,
        "g": "critical",
    }  # fmt: skip


@pytest.mark.parametrize("word", ["urgent", "", 5, -1])
def test_a_lane_that_there_is_not_is_refused(v1: V1, word: str | int) -> None:
    topic = v1.topic(partitions=1)
    path = f"/topics/{topic}"
    v1.refused(400, "lane_unknown", "POST", path + "/messages", {"value": 1, "lane": word})
    v1.refused(400, "lane_unknown", "POST", path + "/messages", {"value": 1}, priority=word)
    many = {"messages": [{"value": 1}, {"value": 2, "lane": word}]}
    assert v1.refused(400, "lane_unknown", "POST", path + "/batch", many)["record"] == 1
    assert v1.values(topic) == []


def test_a_lane_is_named_once(v1: V1) -> None:
    path = f"/topics/{v1.topic(partitions=1)}/messages"
    v1.refused(400, "body_invalid", "POST", path, {"value": 1, "lane": "low", "priority": 3})
    v1.refused(400, "parameter_invalid", "POST", path, {"value": 1}, lane="low", priority=3)


# ---- schedules


def test_a_message_may_appear_later(v1: V1) -> None:
    topic = v1.topic(partitions=1)
    path = f"/topics/{topic}/messages"
    placed = v1.good("POST", path, {"value": "soon", "delay": 300})
    assert placed["scheduled"] is True
    assert v1.values(topic) == []
    delayed = v1.good("GET", f"/topics/{topic}/delayed")
    assert (delayed["count"], delayed["next"]) == (1, None)
    [listed] = delayed["delayed"]
    assert (listed["state"], listed["value"]) == ("pending", "soon")
    assert (listed["partition"], listed["offset"]) == (placed["partition"], placed["offset"])
    assert listed["deliver_at_ms"] == placed["timestamp_ms"]
    wait_until(lambda: v1.values(topic) == ["soon"], "it has fired")
    assert v1.good("GET", f"/topics/{topic}/delayed")["count"] == 0
    one = v1.good("GET", f"/topics/{topic}/delayed/0/{placed['offset']}")
    assert one["state"] == "fired"


@pytest.mark.parametrize(
    "said",
    [
        {"delay": "90d"},
        {"delay": 5_000_000_000},
        {"deliverAt": "2029-01-31T08:00:00Z"},
        {"deliverAt": 1_900_000_000_000},
    ],
)
def test_a_scheduled_message_is_cancelled_by_the_id_that_publish_answered(
    v1: V1, said: dict[str, Any]
) -> None:
    topic = v1.topic(partitions=1)
    base = f"/topics/{topic}"
    in_body = v1.good("POST", base + "/messages", {"value": 1} | said)
    in_query = v1.good("POST", base + "/messages", raw=b"2", **said)
    many = {"messages": [{"value": 3} | said, {"value": 4}]}
    in_batch, now = v1.good("POST", base + "/batch", many)["placed"]
    assert "scheduled" not in now
    for placed in (in_body, in_query, in_batch):
        one = f"{base}/delayed/{placed['partition']}/{placed['offset']}"
        assert v1.good("DELETE", one)["state"] == "cancelled"
        assert v1.refused(409, "schedule_over", "DELETE", one)["state"] == "cancelled"
    assert v1.values(topic) == [4]
    assert v1.good("GET", base + "/delayed")["delayed"] == []


@pytest.mark.parametrize(
    "said",
    [
        {"delay": "soon"},
        {"delay": -1},
        {"delay": 1, "deliverAt": 1},
        {"delay": "4000d"},
        {"deliverAt": "tomorrow"},
        {"deliverAt": 10**16},
    ],
)
def test_a_delay_that_cannot_be_is_refused(v1: V1, said: dict[str, Any]) -> None:
    path = f"/topics/{v1.topic(partitions=1)}/messages"
    v1.refused(400, "delay_invalid", "POST", path, {"value": 1} | said)
    v1.refused(400, "delay_invalid", "POST", path, raw=b"1", **said)


def test_a_delay_in_the_past_is_now(v1: V1) -> None:
    topic = v1.topic(partitions=1)
    v1.good("POST", f"/topics/{topic}/messages", {"value": 1, "deliverAt": "2001-01-01T00:00:00Z"})
    v1.good("POST", f"/topics/{topic}/messages", {"value": 2, "delay": 0})
    assert v1.values(topic) == [1, 2]


def test_an_unknown_schedule_is_said_to_be_unknown(v1: V1) -> None:
    topic = v1.topic(partitions=1)
    v1.refused(404, "schedule_unknown", "GET", f"/topics/{topic}/delayed/0/123456")
    v1.refused(404, "schedule_unknown", "DELETE", f"/topics/{topic}/delayed/1/0")
    v1.refused(404, "topic_unknown", "DELETE", f"/topics/{fresh('no')}/delayed/0/0")


def test_scheduled_messages_are_counted(v1: V1) -> None:
    before = v1.good("GET", "/delay/stats")
    v1.good("POST", f"/topics/{v1.topic()}/messages", {"value": 1, "delay": "8d"})
    after = v1.good("GET", "/delay/stats")
    assert after["pending"] == before["pending"] + 1
    assert after["scheduled"] == before["scheduled"] + 1
    assert len(after["levels"]) == 5
    assert sum(after["levels"]) >= 1


# ---- named schedules


def test_a_named_schedule_is_made_replaced_shown_listed_and_deleted(v1: V1) -> None:
    topic, name = v1.topic(partitions=1), fresh("schedule")
    path = f"/schedules/{name}"
    asked = {
        "topic": topic,
        "every": "1h",
        "message": {"value": {"a": 1}, "key": "k", "lane": "low", "headers": {"h": "x"}},
    }
    made = v1.good("PUT", path, asked)
    assert made["message"] == asked["message"]
    assert (made["every_ms"], made["cron"], made["runs"]) == (3_600_000, None, 0)
    assert v1.good("GET", path) == made
    cron = {"topic": topic, "cron": "30 7 * * mon-fri", "time_zone": "Europe/Berlin"}
    replaced = v1.good("PUT", path, cron | {"message": {"value": None}, "paused": True})
    assert (replaced["cron"], replaced["next_ms"]) == ("30 7 * * mon-fri", None)
    listed = v1.good("GET", "/schedules", limit=1000)["schedules"]
    assert [one for one in listed if one["name"] == name] == [replaced]
    assert v1.call("DELETE", path).status_code == 204
    v1.refused(404, "schedule_unknown", "GET", path)
    v1.refused(404, "schedule_unknown", "DELETE", path)


def test_a_named_schedule_publishes(v1: V1) -> None:
    topic, name = v1.topic(partitions=1), fresh("schedule")
    asked = {"topic": topic, "every": 1000, "message": {"value": "again"}}
    v1.good("PUT", f"/schedules/{name}", asked)
    wait_until(lambda: v1.values(topic)[:2] == ["again", "again"], "it has run twice")
    assert v1.good("GET", f"/schedules/{name}")["runs"] >= 2
    v1.good("DELETE", f"/schedules/{name}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": "1ms"},
        {"every": None},
        {"every": "1h", "cron": "* * * * *"},
        {"every": None, "cron": "61 * * * *"},
        {"time_zone": "Nowhere"},
        {"message": {"value": 1, "timestamp_ms": 1}},
        {"message": {"value": 1, "delay": 1}},
    ],
)
def test_a_named_schedule_that_cannot_be_is_refused(v1: V1, wrong: dict[str, Any]) -> None:
    asked = {"topic": v1.topic(), "every": "1h", "message": {"value": 1}} | wrong
    name = fresh("schedule")
    v1.refused(400, "schedule_invalid", "PUT", f"/schedules/{name}", asked)
    v1.refused(400, "schedule_invalid", "PUT", "/schedules/a%20b", asked)
    v1.refused(404, "schedule_unknown", "GET", f"/schedules/{name}")
