"""Share consumers of librdkafka: a work queue over Kafka's port, with all that leases promise."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import AcknowledgeType, KafkaException, Message, ShareConsumer

from broker_process import PATIENCE_SECONDS, BrokerProcess
from clients.crews import Watched, fill, group_page, settings, turn_until
from clients.making import KAFKA, consume, make_topic

WORKER = Path(__file__).with_name("share_worker.py")
VALUES = [b"%04d" % number for number in range(40)]


class Worker:
    def __init__(self, broker: BrokerProcess, group: str, topic: str, **options: Any) -> None:
        given = {name.replace("_", "."): value for name, value in options.items()}
        self.consumer = ShareConsumer(
            {"bootstrap.servers": broker.kafka, "group.id": group, **given}
        )
        self.consumer.subscribe([topic])
        self.messages: list[Message] = []

    def poll(self) -> list[Message]:
        found = self.consumer.poll(0.2)
        for one in found:
            if one.error() is not None:
                raise KafkaException(one.error())
        self.messages += found
        return list(found)

    def poll_until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"got {self.values}"
            self.poll()

    @property
    def values(self) -> list[bytes]:
        return [one.value() or b"" for one in self.messages]


def explicit(broker: BrokerProcess, group: str, topic: str) -> Worker:
    return Worker(broker, group, topic, share_acknowledgement_mode="explicit")


def offsets(broker: BrokerProcess, group: str) -> dict[int, int]:
    url = broker.url(f"/v1/groups/{group}/offsets")
    page = httpx.get(url, timeout=PATIENCE_SECONDS).json()
    return {one["partition"]: one["offset"] for one in page["offsets"]}


def test_workers_share_one_partition_and_each_record_is_done_once(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "jobs", 1)
    workers = [Worker(broker, "crew", topic, max_poll_records=5) for _ in range(3)]
    for one in workers:
        one.poll()
    fill(broker, topic, VALUES, 1)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sum(len(one.messages) for one in workers) < len(VALUES):
        assert time.monotonic() < deadline
        for one in workers:
            one.poll()
    assert sorted(value for one in workers for value in one.values) == VALUES
    shown = group_page(broker, "crew")
    assert (shown["protocol"], len(shown["members"])) == ("share", 3)
    for one in workers:
        # What it got last is accepted by its next poll, or by this.
        one.consumer.commit_sync(timeout=PATIENCE_SECONDS)
        one.consumer.close()
    late = Worker(broker, "crew", topic)
    fill(broker, topic, [b"last"], 1)
    late.poll_until(lambda: late.messages)
    assert late.values == [b"last"]
    late.consumer.commit_sync(timeout=PATIENCE_SECONDS)
    assert offsets(broker, "crew") == {0: len(VALUES) + 1}
    late.consumer.close()


def test_what_a_worker_releases_comes_back_and_what_it_rejects_is_a_dead_letter(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "tasks", 1, retry_delay_ms=100)
    fill(broker, topic, [b"good", b"again", b"bad"], 1)
    worker = explicit(broker, "tasks", topic)
    worker.poll_until(lambda: len(worker.messages) == 3)
    kinds = (AcknowledgeType.ACCEPT, AcknowledgeType.RELEASE, AcknowledgeType.REJECT)
    for message, kind in zip(worker.messages, kinds, strict=True):
        worker.consumer.acknowledge(message, kind)
    worker.consumer.commit_sync(timeout=PATIENCE_SECONDS)
    worker.poll_until(lambda: len(worker.messages) == 4)
    assert worker.values[3] == b"again"
    worker.consumer.acknowledge(worker.messages[3], AcknowledgeType.ACCEPT)
    worker.consumer.commit_sync(timeout=PATIENCE_SECONDS)
    assert [one.value() for one in consume(broker, f"{topic}.dlq", 1)] == [b"bad"]
    assert offsets(broker, "tasks") == {0: 3}
    worker.consumer.close()


def test_a_record_that_is_released_too_often_is_a_dead_letter(broker: BrokerProcess) -> None:
    """Each time it comes back after the topic's backoff, and not before."""
    topic = make_topic(broker, "stubborn", 1, retry_delay_ms=300, deliveries_max=3)
    fill(broker, topic, [b"poison"], 1)
    worker = explicit(broker, "stubborn", topic)
    released_at = 0.0
    for count in range(1, 4):
        worker.poll_until(lambda: len(worker.messages) == count)  # noqa: B023  called in the loop
        assert count == 1 or time.monotonic() - released_at >= 0.3
        released_at = time.monotonic()
        worker.consumer.acknowledge(worker.messages[-1], AcknowledgeType.RELEASE)
        worker.consumer.commit_sync(timeout=PATIENCE_SECONDS)
    (dead,) = consume(broker, f"{topic}.dlq", 1)
    assert dead.value() == b"poison"
    assert offsets(broker, "stubborn") == {0: 1}
    worker.consumer.close()


def test_a_lease_that_runs_out_goes_to_another(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "slow", 1, visibility_ms=1000, retry_delay_ms=0)
    fill(broker, topic, VALUES[:2], 1)
    slow = explicit(broker, "slow", topic)
    slow.poll_until(lambda: len(slow.messages) == 2)
    other = Worker(broker, "slow", topic)
    other.poll_until(lambda: len(other.messages) == 2)
    other.consumer.commit_sync(timeout=PATIENCE_SECONDS)
    assert offsets(broker, "slow") == {0: 2}
    for one in (slow, other):
        one.consumer.close()


def test_lanes_hold_over_kafka(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "lanes", 1)
    for lane in ("low", "low", "critical"):
        page = {"value": lane, "lane": lane}
        url = broker.url(f"/v1/topics/{topic}/publish")
        answer = httpx.post(url, json=page, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
    worker = Worker(broker, "lanes", topic, max_poll_records=1)
    worker.poll_until(lambda: worker.messages)
    assert worker.values[0] == b"critical"
    worker.consumer.close()


def test_what_a_worker_that_goes_away_had_comes_to_another(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "left", 1)
    fill(broker, topic, VALUES[:4], 1)
    first = explicit(broker, "left", topic)
    first.poll_until(lambda: len(first.messages) == 4)
    first.consumer.acknowledge(first.messages[0], AcknowledgeType.ACCEPT)
    first.consumer.close()
    second = Worker(broker, "left", topic)
    second.poll_until(lambda: len(second.messages) == 3)
    assert second.values == VALUES[1:4]
    second.consumer.close()


@pytest.mark.parametrize(
    ("session", "visibility_ms"),
    [
        # What ends first: the session of a member that is silent, or what it was given.
        pytest.param("3s", 600_000, id="session"),
        pytest.param("45s", 3000, id="lease"),
    ],
)
def test_what_a_worker_that_is_killed_had_comes_to_another(
    tmp_path: Path, session: str, visibility_ms: int
) -> None:
    flags = ("--group-session-timeout", session, "--group-heartbeat-interval", "500ms")
    with BrokerProcess(str(tmp_path), *KAFKA, *flags) as broker, ExitStack() as ends:
        broker.wait_until_ready()
        topic = make_topic(broker, "killed", 1, visibility_ms=visibility_ms, retry_delay_ms=0)
        fill(broker, topic, VALUES[:4], 1)
        # By a program of its own, because a thread cannot be killed.
        names = (broker.kafka, "killed", topic, "4")
        victim = ends.enter_context(
            subprocess.Popen([sys.executable, str(WORKER), *names], stdout=subprocess.PIPE)
        )
        ends.callback(victim.kill)
        assert victim.stdout is not None
        assert victim.stdout.readline().split() == VALUES[:4]
        other = Worker(broker, "killed", topic)
        ends.callback(other.consumer.close)
        other.poll_until(lambda: len(group_page(broker, "killed")["members"]) == 2)
        if session == "3s":
            # While the one that has them is there, nobody else gets them.
            assert other.messages == []
        victim.kill()
        victim.wait(PATIENCE_SECONDS)
        # What it had accepted is done.
        other.poll_until(lambda: {*other.values} == {*VALUES[1:4]})
        other.poll_until(lambda: offsets(broker, "killed") == {0: 4})
        if session == "3s":
            assert sorted(other.values) == VALUES[1:4]
            assert len(group_page(broker, "killed")["members"]) == 1


def test_a_share_group_takes_no_members_that_read_by_offset(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "apart", 1)
    worker = Worker(broker, "apart", topic)
    worker.poll()
    worker.poll_until(lambda: group_page(broker, "apart").get("members"))
    reader = Watched(settings(broker, "apart"), topic)
    with pytest.raises(KafkaException) as refusal:
        turn_until(lambda: False, reader)
    assert refusal.value.args[0].name() == "INCONSISTENT_GROUP_PROTOCOL"
    reader.close()
    worker.consumer.close()
