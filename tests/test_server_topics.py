"""Topics of a real broker: its limits, its metrics, and what a kill leaves."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess


def post(broker: BrokerProcess, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(broker.url(path), json=body, headers=headers, timeout=60)


def described(broker: BrokerProcess, topic: str) -> dict[str, Any]:
    page: dict[str, Any] = broker.get(f"/v1/topics/{topic}").json()
    return page


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_topics_settings_and_idempotency_keys_survive_any_end(
    tmp_path: Path, number: signal.Signals
) -> None:
    once = {"idempotency-key": "order-17"}
    with BrokerProcess(str(tmp_path)) as broker:
        broker.wait_until_ready()
        settings = {"retention_ms": "30d", "fsync": "every", "message_bytes_max": 500}
        made = {"name": "orders", "partitions": 2, "settings": settings}
        assert post(broker, "/v1/topics", made).status_code == 201
        assert post(broker, "/v1/topics", {"name": "gone"}).status_code == 201
        assert (
            httpx.delete(broker.url("/v1/topics/gone"), timeout=PATIENCE_SECONDS).status_code == 204
        )
        before = described(broker, "orders")
        first = post(broker, "/v1/topics/orders/messages", {"value": "v"}, **once).json()
        broker.stop(number)
    with BrokerProcess(str(tmp_path)) as broker:
        broker.wait_until_ready()
        after = described(broker, "orders")
        assert after["settings"] == before["settings"]
        assert after["settings"]["message_bytes_max"] == 500
        assert broker.get("/v1/topics/gone").status_code == 404
        again = post(broker, "/v1/topics/orders/messages", {"value": "v"}, **once).json()
        assert again == first | {"duplicate": True}
        messages = broker.get("/v1/topics/orders/messages").json()["messages"]
        assert [one["value"] for one in messages] == ["v"]
        too_large = post(broker, "/v1/topics/orders/messages", {"value": "x" * 501})
        assert (too_large.status_code, too_large.json()["error"]) == (413, "message_too_large")


def test_the_settings_are_limits(tmp_path: Path) -> None:
    flags = ("--topic-auto-create", "off", "--topic-partitions", "1", "--topics-max", "2")
    with BrokerProcess(str(tmp_path), *flags, "--topic-partitions-max", "4") as broker:
        broker.wait_until_ready()
        unknown = post(broker, "/v1/topics/t/messages", {"value": 1})
        assert (unknown.status_code, unknown.json()["error"]) == (404, "topic_unknown")
        assert post(broker, "/v1/topics", {"name": "a"}).json()["partitions"] == 1
        many = post(broker, "/v1/topics", {"name": "b", "partitions": 5})
        assert (many.status_code, many.json()["error"]) == (400, "partition_count_invalid")
        assert post(broker, "/v1/topics", {"name": "b", "partitions": 4}).status_code == 201
        third = post(broker, "/v1/topics", {"name": "c"})
        assert third.json()["error"] == "too_many_topics"


def test_the_metrics_page_tells_of_topics(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        broker.wait_until_ready()
        for _ in range(3):
            assert post(broker, "/v1/topics/orders/messages", {"value": 1}).status_code == 200
        page = broker.get("/metrics", listener="metrics").text
        assert "millstream_messages_published_total 3.0" in page
        assert 'millstream_topic_messages_published_total{topic="orders"} 3.0' in page
        assert "__" not in page.replace("__name__", "")
