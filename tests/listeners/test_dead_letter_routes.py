"""Dead letters and redrives over HTTP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.letters import bury
from listeners.v1_client import V1, fresh


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker"))) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


def values(v1: V1, topic: str, **query: Any) -> list[Any]:
    page = v1.good("GET", f"/topics/{topic}/dead-letters", **query)
    return [one["message"]["value"] for one in page["letters"]]


def redrive(v1: V1, topic: str, timeout: float = 30, **body: Any) -> dict[str, Any]:
    path = f"/topics/{topic}/dead-letters/redrive?timeout={timeout}"
    job: dict[str, Any] = v1.good("POST", path, body)
    return job


def test_a_dead_letter_is_listed_with_how_it_died(v1: V1) -> None:
    topic = v1.topic()
    bury(v1, topic, "a", key=b"k", lane="high")
    page = v1.good("GET", f"/topics/{topic}/dead-letters")
    [letter] = page["letters"]
    assert letter == {
        "partition": 0,
        "offset": 0,
        "origin": {"topic": topic, "partition": 0, "offset": 0},
        "group": "billing",
        "deliveries": 4,
        "reason": "deliveries",
        "error": "no such account",
        "first_failure_ms": 1_000,
        "last_failure_ms": 9_000,
        "redrives": 0,
        "message": {
            "partition": 0,
            "offset": 0,
            "timestamp_ms": 123,
            "key": "k",
            "value": "a",
            "lane": "high",
            "headers": {"mine": "1"},
        },
    }
    assert page["total"] == 1
    assert page["next"] is None
    assert page["dead_letter_topic"] == f"{topic}.dlq"
    assert v1.good("GET", f"/topics/{topic}/dead-letters/0/0") == letter


def test_who_reads_the_log_itself_learns_what_is_gone(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    assert v1.good("GET", f"/topics/{topic}/dead-letters/gone")["gone"] == []
    bury(v1, topic, "a", "b", "c", "d", "e")
    bury(v1, topic, "f", "g", partition=1)
    places = [(0, 1), (0, 2), (0, 4), (1, 1)]
    letters = [{"partition": partition, "offset": offset} for partition, offset in places]
    v1.good("POST", f"/topics/{topic}/dead-letters/delete", {"letters": letters})
    page = v1.good("GET", f"/topics/{topic}/dead-letters/gone")
    expected = [
        {"partition": 0, "first": 1, "last": 2},
        {"partition": 0, "first": 4, "last": 4},
        {"partition": 1, "first": 1, "last": 1},
    ]
    assert page == {
        "topic": topic,
        "dead_letter_topic": f"{topic}.dlq",
        "gone": expected,
        "next": None,
    }
    found: list[Any] = []
    cursor: str | None = "0:0"
    while cursor is not None:
        page = v1.good("GET", f"/topics/{topic}/dead-letters/gone", cursor=cursor, limit=1)
        found += page["gone"]
        cursor = page["next"]
    assert found == expected
    # What is gone at the front leaves the log, and there is nothing to leave out any more.
    v1.good(
        "POST", f"/topics/{topic}/dead-letters/delete", {"letters": [letters[0] | {"offset": 0}]}
    )
    wait_until(
        lambda: v1.good("GET", f"/topics/{topic}/dead-letters/gone")["gone"] == expected[1:],
        "the front to be trimmed",
    )


def test_filters_and_pages(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    bury(v1, topic, "a", "b", reason="rejected")
    bury(v1, topic, "c", group="mail", key=b"\xff", partition=1)
    bury(v1, topic, "d", when_ms=10_000, partition=1)
    assert values(v1, topic, reason="rejected") == ["a", "b"]
    assert values(v1, topic, group="mail") == ["c"]
    assert values(v1, topic, key="/w==", key_encoding="base64") == ["c"]
    assert values(v1, topic, text="d") == ["d"]
    assert values(v1, topic, since_ms=9_001) == ["d"]
    assert values(v1, topic, until_ms=9_001) == ["a", "b", "c"]
    assert values(v1, topic, partition=1) == ["c", "d"]
    found: list[Any] = []
    cursor: str | None = "0:0"
    while cursor is not None:
        page = v1.good("GET", f"/topics/{topic}/dead-letters", limit=3, cursor=cursor)
        found += [one["message"]["value"] for one in page["letters"]]
        cursor = page["next"]
    assert found == ["a", "b", "c", "d"]


def test_they_are_deleted_one_by_one_some_or_all(v1: V1) -> None:
    topic = v1.topic()
    bury(v1, topic, *"abcdef")
    path = f"/topics/{topic}/dead-letters"
    v1.good("DELETE", f"{path}/0/1")
    v1.refused(404, "dead_letter_unknown", "DELETE", f"{path}/0/1")
    v1.refused(404, "dead_letter_unknown", "GET", f"{path}/0/1")
    places = [{"partition": 0, "offset": n} for n in (0, 3)]
    assert v1.good("POST", f"{path}/delete", {"letters": places}) == {"deleted": 2}
    v1.refused(404, "dead_letter_unknown", "POST", f"{path}/delete", {"letters": places})
    assert values(v1, topic) == ["c", "e", "f"]
    v1.good("DELETE", path)
    assert values(v1, topic) == []


def test_a_redrive_puts_them_back(v1: V1) -> None:
    topic = v1.topic(partitions=2)
    bury(v1, topic, "a", "b", partition=1)
    bury(v1, topic, "c", reason="rejected")
    job = redrive(v1, topic, reason="deliveries")
    assert (job["state"], job["matched"], job["moved"], job["total"]) == ("done", 2, 2, 3)
    assert job["skipped"] == {}
    assert job["examples"][0] == {
        "partition": 1,
        "offset": 0,
        "to": topic,
        "to_partition": 1,
        "skipped": None,
    }
    assert v1.values(topic, partition=1) == ["a", "b"]
    assert values(v1, topic) == ["c"]
    assert v1.good("GET", f"/redrives/{job['id']}") == job
    assert job in v1.good("GET", "/redrives")["redrives"]
    assert v1.good("GET", "/redrives", topic=topic)["redrives"] == [job]
    assert v1.good("DELETE", f"/redrives/{job['id']}") == job


def test_a_dry_run_changes_nothing(v1: V1) -> None:
    topic, other = v1.topic(), v1.topic()
    bury(v1, topic, "a", "b")
    job = redrive(v1, topic, dry_run=True, to=other, text="b")
    assert (job["dry_run"], job["seen"], job["matched"], job["moved"]) == (True, 2, 1, 0)
    assert [one["to"] for one in job["examples"]] == [other]
    assert values(v1, topic) == ["a", "b"]
    assert v1.values(other) == []


def test_a_running_redrive_is_told_of_refuses_another_and_can_be_cancelled(v1: V1) -> None:
    topic = v1.topic()
    bury(v1, topic, *(str(n) for n in range(100)))
    job = redrive(v1, topic, timeout=0, rate=1)
    assert job["state"] == "running"
    page = v1.refused(409, "redrive_running", "POST", f"/topics/{topic}/dead-letters/redrive", {})
    assert page["redrive"] == job["id"]
    wait_until(lambda: v1.good("GET", f"/redrives/{job['id']}")["moved"] >= 1, "a step")
    now = v1.good("GET", f"/redrives/{job['id']}", timeout=0.01)
    assert now["state"] == "running"
    cancelled = v1.good("DELETE", f"/redrives/{job['id']}")
    assert cancelled["state"] == "cancelled"
    assert len(values(v1, topic, limit=1000)) == 100 - cancelled["moved"]
    assert len(v1.values(topic)) == cancelled["moved"]


def test_topics_with_dead_letters_are_listed(v1: V1) -> None:
    topic = v1.topic()
    bury(v1, topic, "a", "b")
    page = v1.good("GET", "/dead-letters")
    assert page["paused"] == []
    row = {"topic": topic, "dead_letter_topic": f"{topic}.dlq", "dead_letters": 2}
    assert row in page["topics"]


def test_metrics_and_health_know_of_them(v1: V1) -> None:
    topic = v1.topic()
    bury(v1, topic, "one", "two", "three")
    redrive(v1, topic, text="three")
    text = v1.http.get(v1.broker.url("/metrics")).text
    assert f'millstream_dead_letters_redriven_total{{topic="{topic}"}} 1.0' in text
    assert f'millstream_dead_letters{{topic="{topic}"}} 2.0' in text
    assert "millstream_redrives_running 0.0" in text
    health = v1.http.get(v1.broker.url("/health")).json()
    assert health["dead_letters_paused"] == []


@pytest.mark.parametrize(
    ("status", "code", "method", "path", "body"),
    [
        (404, "topic_unknown", "GET", "/topics/nowhere/dead-letters", None),
        (404, "topic_unknown", "POST", "/topics/nowhere/dead-letters/redrive", {}),
        (404, "topic_unknown", "POST", "{}/redrive", {"to": "nowhere"}),
        (403, "topic_reserved", "POST", "{}/redrive", {"to": "__topics"}),
        (400, "body_invalid", "POST", "{}/redrive", {"too": "misspelt"}),
        (400, "body_invalid", "POST", "{}/redrive", {"since_ms": -1}),
        (400, "body_invalid", "POST", "{}/redrive", {"reason": "bored"}),
        (400, "body_invalid", "POST", "{}/redrive", {"key": "x", "key_encoding": "base64"}),
        (400, "parameter_invalid", "POST", "{}/redrive", {"rate": 0}),
        (400, "parameter_invalid", "POST", "{}/redrive", {"text": ""}),
        (400, "parameter_invalid", "POST", "{}/redrive?timeout=31", {}),
        (400, "parameter_invalid", "GET", "{}?cursor=7", None),
        (400, "parameter_invalid", "GET", "{}?limit=1001", None),
        (400, "parameter_invalid", "GET", "{}?reason=bored", None),
        (400, "parameter_invalid", "GET", "{}?raeson=rejected", None),
        (404, "partition_unknown", "GET", "{}?partition=9", None),
        (400, "body_invalid", "POST", "{}/delete", {"letters": []}),
        (404, "dead_letter_unknown", "GET", "{}/0/99", None),
        (400, "parameter_invalid", "GET", "{}/0/x", None),
        (404, "redrive_unknown", "GET", "/redrives/none", None),
        (404, "redrive_unknown", "GET", "/redrives/none?timeout=5", None),
        (404, "redrive_unknown", "DELETE", "/redrives/none", None),
    ],
)
def test_what_is_wrong_is_refused(  # noqa: PLR0917
    v1: V1, status: int, code: str, method: str, path: str, body: Any
) -> None:
    topic = v1.topic()
    bury(v1, topic, "a")
    v1.refused(status, code, method, path.format(f"/topics/{topic}/dead-letters"), body)
    assert values(v1, topic) == ["a"]


def test_a_redrive_survives_a_kill_and_puts_each_back_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, name = str(tmp_path_factory.mktemp("killed")), fresh("topic")
    with BrokerProcess(folder) as broker:
        v1 = V1(broker.wait_until_ready())
        v1.good("POST", "/topics", {"name": name, "partitions": 1})
        bury(v1, name, *(str(n) for n in range(300)))
        job = redrive(v1, name, timeout=0, rate=400)
        wait_until(lambda: v1.good("GET", f"/redrives/{job['id']}")["moved"] > 0, "a step")
        broker.stop(signal.SIGKILL)
    with BrokerProcess(folder) as broker:
        v1 = V1(broker.wait_until_ready())
        done = v1.good("GET", f"/redrives/{job['id']}", timeout=30)
        assert (done["state"], done["moved"]) == ("done", 300)
        assert v1.values(name, limit=1000) == [str(n) for n in range(300)]
        assert values(v1, name) == []
