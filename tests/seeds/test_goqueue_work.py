"""What GoQueue promises in its milestones 4 and 6, one test each, over real sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from broker_process import BrokerProcess
from listeners.v1_client import V1, fresh

LANES = ("critical", "high", "normal", "low", "background")


@pytest.fixture(scope="module")
def goqueue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    folder = str(tmp_path_factory.mktemp("goqueue"))
    with BrokerProcess(folder, "--retry-delay", "0s") as broker:
        v1 = V1(broker.wait_until_ready())
        yield v1
        v1.close()


def receive(v1: V1, group: str, topic: str, **how: Any) -> list[dict[str, Any]]:
    body = {"topics": [topic], "limit": 100} | how
    found: list[dict[str, Any]] = v1.good("POST", f"/groups/{group}/receive", body)["messages"]
    return found


def settle(v1: V1, word: str, receipt: str, **how: Any) -> dict[str, Any]:
    page: dict[str, Any] = v1.good("POST", f"/messages/{word}", {"receipt": receipt} | how)
    return page


# ---- milestone 4: reliability


def test_acks_of_single_messages_move_the_committed_offset(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "a", "b", "c")
    a, b, _ = receive(goqueue, group, topic)
    settle(goqueue, "ack", b["receipt"])
    offsets = goqueue.good("GET", f"/groups/{group}/offsets")["offsets"]
    assert [one["offset"] for one in offsets] in ([], [0])
    settle(goqueue, "ack", a["receipt"])
    offsets = goqueue.good("GET", f"/groups/{group}/offsets")["offsets"]
    assert [one["offset"] for one in offsets] == [2]


def test_the_visibility_timeout_is_30_s_by_default_and_can_be_chosen(goqueue: V1) -> None:
    topic = goqueue.topic()
    body = {"topics": [topic]}
    path = f"/groups/{fresh('group')}/receive"
    goqueue.publish(topic, "a", "b")
    assert goqueue.good("POST", path, body)["visibility_ms"] == 30_000
    assert goqueue.good("POST", path, body | {"visibility_ms": 100})["visibility_ms"] == 100
    again = goqueue.good("POST", path, body | {"wait_ms": 30_000})["messages"]
    assert [(one["value"], one["deliveries"]) for one in again] == [("b", 2)]


def test_a_receipt_handle_names_the_delivery(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "a")
    (message,) = receive(goqueue, group, topic)
    first, partition, offset, count, nonce = message["receipt"].split(":")[:5]
    assert (first, partition, offset, count) == (topic, "0", "0", "1")
    assert len(nonce) >= 16


def test_after_3_retries_a_message_is_in_the_dead_letters_with_why(goqueue: V1) -> None:
    topic, group = goqueue.topic(partitions=2), fresh("group")
    goqueue.publish(topic, "poison", partition=1, key="k")
    outcomes = []
    for _ in range(4):
        (message,) = receive(goqueue, group, topic, wait_ms=30_000)
        outcomes.append(settle(goqueue, "nack", message["receipt"], error="no")["outcome"])
    assert outcomes == ["retried", "retried", "retried", "dead"]
    assert goqueue.good("GET", f"/topics/{topic}.dlq")["partitions"] == 2
    (dead,) = goqueue.good("GET", f"/topics/{topic}.dlq/messages")["messages"]
    assert (dead["value"], dead["key"], dead["partition"]) == ("poison", "k", 1)
    headers = dead["headers"]
    assert (headers["ms-dead-topic"], headers["ms-dead-deliveries"]) == (topic, "4")
    assert (headers["ms-dead-reason"], headers["ms-dead-error"]) == ("deliveries", "no")


def test_a_reject_goes_to_the_dead_letters_at_once(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "poison")
    (message,) = receive(goqueue, group, topic)
    assert settle(goqueue, "reject", message["receipt"], error="poison")["outcome"] == "dead"


def test_the_backoff_begins_with_1_s_and_doubles(goqueue: V1) -> None:
    topic, group = goqueue.topic(retry_delay_ms=1000), fresh("group")
    goqueue.publish(topic, "a")
    (message,) = receive(goqueue, group, topic)
    first = settle(goqueue, "nack", message["receipt"])["when_ms"]
    (message,) = receive(goqueue, group, topic, wait_ms=30_000)
    second = settle(goqueue, "nack", message["receipt"])["when_ms"]
    # The second begins when the first is over, and takes twice as long.
    assert second - first >= 2000


def test_long_work_extends_its_visibility(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "a")
    (message,) = receive(goqueue, group, topic, visibility_ms=1000)
    extended = settle(goqueue, "visibility", message["receipt"], visibility_ms=60_000)
    assert extended["outcome"] == "extended"


@pytest.mark.parametrize("word", ["ack", "nack"])
def test_a_group_settles_by_a_route_of_its_own(goqueue: V1, word: str) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "a")
    (message,) = receive(goqueue, group, topic)
    path = f"/groups/{group}/{word}"
    assert goqueue.good("POST", path, {"receipt": message["receipt"]})["outcome"]


def test_the_statistics_tell_how_deliveries_end(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "a")
    settle(goqueue, "ack", receive(goqueue, group, topic)[0]["receipt"])
    (found,) = goqueue.good("GET", "/reliability/stats", group=group)["groups"]
    assert (found["delivered"], found["acked"], found["timeouts"]) == (1, 1, 0)


# ---- milestone 6: lanes


def test_messages_have_one_of_five_lanes_and_show_it(goqueue: V1) -> None:
    topic = goqueue.topic()
    for number, lane in enumerate(LANES):
        goqueue.publish(topic, lane, priority=number)
    messages = goqueue.good("GET", f"/topics/{topic}/messages")["messages"]
    assert [(one["value"], one["lane"]) for one in messages] == [(lane, lane) for lane in LANES]


def test_lanes_share_by_their_weights_and_critical_is_first(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    for lane in reversed(LANES):
        goqueue.publish(topic, *range(100), lane=lane)
    messages = receive(goqueue, group, topic)
    counts = Counter(one["lane"] for one in messages)
    assert [counts[lane] for lane in LANES] == [50, 25, 15, 7, 3]
    assert messages[0]["lane"] == "critical"


def test_the_statistics_of_lanes_are_by_partition(goqueue: V1) -> None:
    topic, group = goqueue.topic(), fresh("group")
    goqueue.publish(topic, "a", "b", lane="high")
    (message,) = receive(goqueue, group, topic, limit=1)
    assert message["lane"] == "high"
    lanes = goqueue.good("GET", "/priority/stats", topic=topic)["lanes"]
    high = next(one for one in lanes if one["lane"] == "high")
    assert (high["partition"], high["ready"], high["inflight"]) == (0, 1, 1)
    assert high["last_served_ms"] is not None
    assert high["oldest_age_ms"] is not None
