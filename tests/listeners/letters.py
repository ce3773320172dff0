"""Dead letters in a running broker, written as the broker writes them."""

from __future__ import annotations

from typing import Any

from listeners.v1_client import V1
from millstream.log import batch as batches
from millstream.log.batch import Fields


def dead(value: bytes, topic: str, offset: int, **facts: Any) -> Fields:
    headers: dict[str, Any] = {
        "ms-dead-topic": topic,
        "ms-dead-partition": 0,
        "ms-dead-offset": offset,
        "ms-dead-group": facts.get("group", "billing"),
        "ms-dead-deliveries": 4,
        "ms-dead-reason": facts.get("reason", "deliveries"),
        "ms-dead-error": facts.get("error", "no such account"),
        "ms-dead-first-failure": 1_000,
        "ms-dead-last-failure": facts.get("when_ms", 9_000),
    }
    own = [("mine", b"1")]
    lane = facts.get("lane")
    if lane is not None:
        own.append(("ms-lane", lane.encode()))
    texts = [(name, str(text).encode()) for name, text in headers.items()]
    return 123, facts.get("key"), value, (*own, *texts)


def bury(v1: V1, topic: str, *values: str, partition: int = 0, **facts: Any) -> None:
    dlq = f"{topic}.dlq"
    if v1.call("GET", f"/topics/{dlq}").status_code == 404:
        count = v1.good("GET", f"/topics/{topic}")["partitions"]
        v1.good("POST", "/topics", {"name": dlq, "partitions": count})
    data = batches.encode(
        [dead(one.encode(), topic, n, **facts) for n, one in enumerate(values)],
        lane=facts.get("lane"),
    )
    v1.good("POST", f"/topics/{dlq}/partitions/{partition}/batches", raw=data)
