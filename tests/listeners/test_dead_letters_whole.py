"""From a worker that fails to the record that it gets again, over HTTP; what the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker_process import BrokerProcess, plain_environment
from listeners.v1_client import V1, fresh

PAGE = Path(__file__).parent.parent.parent / "docs" / "dead-letters.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker"))) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


def receive(v1: V1, topic: str, group: str = "workers", limit: int = 100) -> list[dict[str, Any]]:
    body = {"topics": [topic], "limit": limit, "wait_ms": 2_000}
    found: list[dict[str, Any]] = v1.good("POST", f"/groups/{group}/receive", body)["messages"]
    return found


def letters(v1: V1, topic: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = v1.good("GET", f"/topics/{topic}/dead-letters")["letters"]
    return found


def test_a_rejected_record_is_a_dead_letter_is_put_back_and_comes_again(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    v1.publish(topic, {"n": 1}, key="k", lane="high", headers={"mine": "1"})
    [one] = receive(v1, topic)
    v1.good("POST", "/messages/reject", {"receipt": one["receipt"], "error": "no such account"})
    [letter] = letters(v1, topic)
    assert letter["reason"] == "rejected"
    assert letter["error"] == "no such account"
    assert letter["group"] == "workers"
    assert letter["deliveries"] == 1
    assert letter["origin"] == {
        "topic": topic,
        "partition": one["partition"],
        "offset": one["offset"],
    }
    assert letter["message"]["value"] == {"n": 1}
    path = f"/topics/{topic}/dead-letters/redrive?timeout=30"
    assert v1.good("POST", path, {})["moved"] == 1
    [again] = receive(v1, topic)
    assert (again["value"], again["key"], again["lane"]) == ({"n": 1}, "k", "high")
    assert (again["partition"], again["deliveries"]) == (one["partition"], 1)
    assert again["headers"]["mine"] == "1"
    assert again["headers"]["ms-redrives"] == "1"
    assert not [name for name in again["headers"] if name.startswith("ms-dead-")]
    v1.good("POST", "/messages/reject", {"receipt": again["receipt"]})
    [letter] = letters(v1, topic)
    assert letter["redrives"] == 1


def test_a_record_that_used_up_its_deliveries_says_so(v1: V1) -> None:
    topic = v1.topic(deliveries_max=2, retry_delay_ms=0)
    v1.publish(topic, "a")
    for _ in range(2):
        [one] = receive(v1, topic)
        v1.good("POST", "/messages/nack", {"receipt": one["receipt"], "error": "bad day"})
    [letter] = letters(v1, topic)
    assert (letter["reason"], letter["deliveries"], letter["error"]) == ("deliveries", 2, "bad day")
    text = v1.http.get(v1.broker.url("/metrics")).text
    moved = f'millstream_dead_letters_moved_total{{reason="deliveries",topic="{topic}"}} 1.0'
    assert moved in text


def test_a_group_whose_records_all_fail_is_named_and_its_dead_letters_pause(v1: V1) -> None:
    topic, group = v1.topic(deliveries_max=1), fresh("group")
    v1.publish(topic, *range(30))
    received = receive(v1, topic, group)
    assert len(received) == 30
    outcomes = []
    for one in received:
        body = {"receipt": one["receipt"], "error": "the database is down"}
        outcomes.append(v1.good("POST", "/messages/nack", body)["outcome"])
    assert outcomes[:19] == ["dead"] * 19
    assert outcomes[20:] == ["retried"] * 10
    assert len(letters(v1, topic)) == outcomes.count("dead")
    health = v1.http.get(v1.broker.url("/health"))
    assert health.status_code == 200
    assert health.json()["status"] == "healthy"
    assert group in health.json()["dead_letters_paused"]
    [paused] = [one for one in v1.good("GET", "/dead-letters")["paused"] if one["group"] == group]
    assert paused["openings"] == 1
    text = v1.http.get(v1.broker.url("/metrics")).text
    assert f'millstream_dead_letters_paused{{group="{group}"}} 1.0' in text
    assert f'millstream_breaker_openings_total{{group="{group}"}} 1.0' in text
    [said] = [
        one for one in v1.broker.messages() if one.get("group") == group and "fail" in one["event"]
    ]
    assert said["level"] == "warning"


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_page_says_what_works(number: int, v1: V1) -> None:
    v1.publish("orders", {"n": 1})
    program = BLOCKS[number].replace("Client()", f'Client("{v1.broker.url("")}")')
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=plain_environment(),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
