"""Work queues at their limits: memory goes with what is in flight, and not with what waits."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import httpx
import psutil

from broker_process import BrokerProcess, wait_until
from millstream.client import Client

IS_FULL = os.environ.get("MILLSTREAM_SOAK") == "full"
IN_FLIGHT = 1_000_000 if IS_FULL else 60_000
BACKLOG = 3_000_000 if IS_FULL else 200_000
BATCH = 10_000
# As the setting `group_inflight_max` says, with some room: of one that is leased, and one that
# failed and comes back.
LEASED_BYTES, FAILED_BYTES = 200, 1_000
# What is read ahead, journals that are not cut yet, and what the allocator keeps.
BYTES_BESIDE = 96 * 1024 * 1024
HOUR_MS = 3_600_000
FLAGS = (
    "--group-inflight-max=2000000",
    f"--receive-records-max={BATCH}",
    "--receive-bytes-max=64M",
)


class Group:
    """Requests of one group, and how much memory the broker has."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.http = httpx.Client(base_url=broker.url("/v1"), timeout=300)
        self.process = psutil.Process(broker.process.pid)

    @property
    def memory(self) -> int:
        return self.process.memory_info().rss

    def receive(self) -> list[str]:
        wish = {"topics": ["jobs"], "limit": BATCH, "visibility_ms": HOUR_MS}
        answer = self.http.post("/groups/g/receive", json=wish).raise_for_status().json()
        return [one["receipt"] for one in answer["messages"]]

    def settle(self, word: str, receipts: list[str], **how: Any) -> int:
        body = {"receipts": receipts} | how
        answer = self.http.post(f"/messages/{word}", json=body).raise_for_status().json()
        return sum("outcome" in one for one in answer["results"])

    def counts(self) -> dict[str, int]:
        page = self.http.get("/reliability/stats", params={"group": "g"}).raise_for_status()
        (group,) = page.json()["groups"]
        (topic,) = group["topics"]
        return {word: topic[word] for word in ("leased", "waiting", "ready")}


def fill(broker: BrokerProcess, count: int) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("jobs", partitions=1, settings={"fsync": "none"})
        producer = client.producer(batch_records=1000, batch_bytes=1 << 20)
        for n in range(count):
            producer.send("jobs", b"%d" % n)
        producer.flush()


def test_a_million_in_flight_take_what_the_setting_says_and_outlive_a_kill(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        fill(broker.wait_until_ready(), IN_FLIGHT)
        group = Group(broker)
        before = group.memory
        receipts: list[str] = []
        while len(receipts) < IN_FLIGHT:
            found = group.receive()
            assert found
            receipts += found
        assert group.counts() == {"leased": IN_FLIGHT, "waiting": 0, "ready": 0}
        assert group.memory - before < IN_FLIGHT * LEASED_BYTES + BYTES_BESIDE
        # Those that failed take most: when they come back, and why they failed.
        for first in range(0, IN_FLIGHT // 2, BATCH):
            part = receipts[first : first + BATCH]
            assert group.settle("nack", part, delay_ms=HOUR_MS, error="why") == len(part)
        half = IN_FLIGHT // 2
        assert group.counts() == {"leased": half, "waiting": half, "ready": 0}
        most = half * (LEASED_BYTES + FAILED_BYTES) + BYTES_BESIDE
        assert group.memory - before < most
        broker.process.kill()
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        group = Group(broker.wait_until_ready())
        assert group.counts() == {"leased": half, "waiting": half, "ready": 0}
        for first in range(half, IN_FLIGHT, BATCH):
            part = receipts[first : first + BATCH]
            assert group.settle("ack", part) == len(part)
        assert group.counts() == {"leased": 0, "waiting": half, "ready": 0}


def test_a_backlog_takes_no_memory(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        fill(broker.wait_until_ready(), BACKLOG)
        group = Group(broker)
        done = group.settle("ack", group.receive())
        before = group.memory
        while done < BACKLOG:
            done += group.settle("ack", group.receive())
        wait_until(lambda: group.counts() == {"leased": 0, "waiting": 0, "ready": 0}, "the end")
        assert group.memory - before < BYTES_BESIDE
