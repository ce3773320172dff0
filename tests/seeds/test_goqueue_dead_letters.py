"""What GoQueue promises of dead letters in its milestone 4, one test each, over real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1


@pytest.fixture(scope="module")
def goqueue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("goqueue"))) as broker:
        v1 = V1(broker.wait_until_ready())
        yield v1
        v1.close()


def receive(v1: V1, topic: str) -> dict[str, Any]:
    body = {"topics": [topic], "limit": 1, "wait_ms": 10_000}
    page = v1.good("POST", "/groups/workers/receive", body)
    [one] = page["messages"]
    assert isinstance(one, dict)
    return one


def fail(v1: V1, topic: str, word: str, **more: Any) -> dict[str, Any]:
    one = receive(v1, topic)
    v1.good("POST", f"/messages/{word}", {"receipt": one["receipt"], **more})
    return one


def dead(v1: V1, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = v1.good("GET", f"/topics/{topic}/dead-letters")["letters"]
    return found


def test_the_topic_of_dead_letters_has_the_suffix_dlq_and_is_made_by_itself(goqueue: V1) -> None:
    topic = goqueue.topic()
    assert goqueue.call("GET", f"/topics/{topic}.dlq").status_code == 404
    goqueue.publish(topic, "poison")
    fail(goqueue, topic, "reject")
    assert goqueue.values(f"{topic}.dlq") == ["poison"]


def test_it_has_as_many_partitions_as_its_topic(goqueue: V1) -> None:
    topic = goqueue.topic(partitions=5)
    goqueue.publish(topic, "poison", partition=4)
    fail(goqueue, topic, "reject")
    assert goqueue.good("GET", f"/topics/{topic}.dlq")["partitions"] == 5
    [letter] = dead(goqueue, topic)
    assert letter["partition"] == letter["origin"]["partition"] == 4


def test_a_dead_letter_keeps_what_is_known_of_it(goqueue: V1) -> None:
    topic = goqueue.topic()
    [placed] = goqueue.publish(topic, {"n": 7}, key="k", headers={"trace": "x"})
    fail(goqueue, topic, "reject", error="no such account")
    [letter] = dead(goqueue, topic)
    message = letter["message"]
    assert (message["key"], message["value"], message["headers"]) == ("k", {"n": 7}, {"trace": "x"})
    assert message["timestamp_ms"] == placed["timestamp_ms"]
    assert letter["origin"] == {"topic": topic, "partition": 0, "offset": placed["offset"]}
    assert letter["group"] == "workers"
    assert letter["error"] == "no such account"
    assert letter["first_failure_ms"] == letter["last_failure_ms"] >= placed["timestamp_ms"]


def test_three_retries_come_before_the_dead_letters(goqueue: V1) -> None:
    topic = goqueue.topic(retry_delay_ms=0)
    goqueue.publish(topic, "again")
    counts = [fail(goqueue, topic, "nack")["deliveries"] for _ in range(4)]
    assert counts == [1, 2, 3, 4]
    [letter] = dead(goqueue, topic)
    assert (letter["reason"], letter["deliveries"]) == ("deliveries", 4)


def test_a_reject_goes_there_at_once(goqueue: V1) -> None:
    topic = goqueue.topic()
    goqueue.publish(topic, "poison")
    assert fail(goqueue, topic, "reject")["deliveries"] == 1
    [letter] = dead(goqueue, topic)
    assert letter["reason"] == "rejected"


def test_leases_that_run_out_lead_there_too(goqueue: V1) -> None:
    topic = goqueue.topic(deliveries_max=1, visibility_ms=100)
    goqueue.publish(topic, "slow")
    receive(goqueue, topic)
    wait_until(lambda: dead(goqueue, topic), "the dead letter")
    [letter] = dead(goqueue, topic)
    assert letter["reason"] == "deliveries"
