"""What GoQueue's milestone 5 promises, delays, and of milestone 6 what publishers see of lanes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1
from millstream.broker import wheel
from millstream.broker.schedule_table import LEVELS, SHIFTS, TICK_MS
from millstream.broker.schedule_values import State
from millstream.log.batch import LANES, decode, walk

FAR = 1_900_000_000_000


@pytest.fixture(scope="module")
def goqueue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("goqueue"))) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


def schedule(v1: V1, topic: str, value: Any, **said: Any) -> dict[str, Any]:
    placed: dict[str, Any] = v1.good("POST", f"/topics/{topic}/messages", {"value": value} | said)
    assert placed["scheduled"]
    return placed


def test_the_wheel_has_the_levels_that_were_promised() -> None:
    assert (TICK_MS, wheel.TICK_S) == (10, 0.01)
    spans_s = [(1 << shift) * TICK_MS / 1000 for shift in SHIFTS[1:]]
    assert spans_s == [2.56, 163.84, 10485.76, 671088.64]
    assert spans_s[-1] / 86_400 == pytest.approx(7.767, abs=0.001)
    # One more, for all that lies beyond.
    assert len(wheel.SHIFTS) + 1 == LEVELS
    assert SHIFTS[:4] == wheel.SHIFTS
    assert wheel.SLOTS == (256, 64, 64, 64)


def test_a_schedule_is_in_one_of_four_states() -> None:
    words = {state.word for state in State if state not in (State.NONE, State.MOVED)}
    assert words == {"pending", "fired", "cancelled", "expired"}


def test_a_delay_is_relative(goqueue: V1) -> None:
    topic = goqueue.topic(partitions=1)
    schedule(goqueue, topic, "later", delay=100)
    wait_until(lambda: goqueue.values(topic) == ["later"], "it has fired")


def test_a_time_is_absolute(goqueue: V1) -> None:
    topic = goqueue.topic()
    assert schedule(goqueue, topic, 1, deliverAt=FAR)["timestamp_ms"] == FAR


def test_zero_and_past_delays_fire_at_once(goqueue: V1) -> None:
    topic = goqueue.topic(partitions=1)
    goqueue.good("POST", f"/topics/{topic}/messages", {"value": 1, "delay": 0})
    goqueue.good("POST", f"/topics/{topic}/messages", {"value": 2, "deliverAt": 1})
    assert goqueue.values(topic) == [1, 2]


def test_pending_messages_are_listed_with_limit_and_skip(goqueue: V1) -> None:
    topic = goqueue.topic()
    for n in range(5):
        schedule(goqueue, topic, n, deliverAt=FAR)
    page = goqueue.good("GET", f"/topics/{topic}/delayed", limit=2, skip=1)
    assert [one["value"] for one in page["delayed"]] == [1, 2]
    assert page["count"] == 5


def test_a_delayed_message_is_cancelled(goqueue: V1) -> None:
    topic = goqueue.topic()
    placed = schedule(goqueue, topic, 1, deliverAt=FAR)
    path = f"/topics/{topic}/delayed/{placed['partition']}/{placed['offset']}"
    assert goqueue.good("DELETE", path)["state"] == "cancelled"
    assert goqueue.good("GET", f"/topics/{topic}/delayed")["count"] == 0


def test_statistics_tell_of_the_scheduler_and_its_wheel(goqueue: V1) -> None:
    schedule(goqueue, goqueue.topic(), 1, deliverAt=FAR)
    page = goqueue.good("GET", "/delay/stats")
    assert page["pending"] >= 1
    assert len(page["levels"]) == LEVELS


def test_delayed_messages_survive_a_crash(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic(partitions=1)
        placed = [schedule(v1, topic, n, delay="30d") for n in range(20)]
        cancelled = f"/topics/{topic}/delayed/0/{placed[3]['offset']}"
        v1.good("DELETE", cancelled)
        schedule(v1, topic, "soon", delay=1000)
        v1.close()
        broker.stop(signal.SIGKILL)
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        wait_until(lambda: v1.values(topic) == ["soon"], "what came due has fired, once")
        listed = v1.good("GET", f"/topics/{topic}/delayed")["delayed"]
        assert [one["value"] for one in listed] == [n for n in range(20) if n != 3]
        v1.close()


@pytest.mark.parametrize("priority", range(5))
def test_a_priority_is_stored_with_the_message(goqueue: V1, priority: int) -> None:
    topic = goqueue.topic(partitions=1)
    goqueue.good("POST", f"/topics/{topic}/messages", {"value": 1, "priority": priority})
    body = goqueue.call("GET", f"/topics/{topic}/partitions/0/batches").content
    [(at, header)] = walk(body)
    [record] = decode(body[at : at + header.size])
    assert (record.lane or "normal") == LANES[priority]
    [shown] = goqueue.good("GET", f"/topics/{topic}/messages")["messages"]
    assert shown["lane"] == LANES[priority]
