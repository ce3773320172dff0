"""A broker with a Kafka listener, and topics on it."""

from __future__ import annotations

import httpx

from broker_process import PATIENCE_SECONDS, BrokerProcess

KAFKA = ("--kafka", "127.0.0.1:0")


def make_topic(broker: BrokerProcess, name: str, partitions: int = 1, **settings: object) -> str:
    page = {"name": name, "partitions": partitions, "settings": settings}
    answer = httpx.post(broker.url("/v1/topics"), json=page, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 201, answer.text
    return name
