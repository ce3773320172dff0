"""Consumers of librdkafka that work together, turn by turn in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import httpx
from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from broker_process import PATIENCE_SECONDS, BrokerProcess

# Short, so that a test of a death is over soon; a machine under load still sends in time.
QUICK = MappingProxyType(
    {
        "session.timeout.ms": 2000,
        "heartbeat.interval.ms": 200,
        "topic.metadata.refresh.interval.ms": 500,
        "reconnect.backoff.max.ms": 200,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }
)
# Settings that a consumer must not have when the broker deals out.
CLASSIC_ONLY = ("session.timeout.ms", "heartbeat.interval.ms", "partition.assignment.strategy")


def settings(broker: BrokerProcess, group: str, **options: object) -> dict[str, Any]:
    """Underscores stand for the dots in librdkafka's names."""
    given = {name.replace("_", "."): value for name, value in options.items()}
    page = {"bootstrap.servers": broker.kafka, "group.id": group, **QUICK, **given}
    if page.get("group.protocol") == "consumer":
        page = {name: value for name, value in page.items() if name not in CLASSIC_ONLY}
    return page


class Watched:
    """A consumer that remembers what it was told about its partitions."""

    def __init__(self, options: Mapping[str, Any], *topics: str) -> None:
        self.consumer = Consumer(dict(options))
        self.gained: list[list[int]] = []
        self.lost: list[list[int]] = []
        self.messages: list[Message] = []
        self.consumer.subscribe(
            list(topics),
            on_assign=lambda _, parts: self.gained.append([one.partition for one in parts]),
            on_revoke=lambda _, parts: self.lost.append([one.partition for one in parts]),
        )

    def poll(self) -> None:
        message = self.consumer.poll(0.02)
        if message is None:
            return
        if message.error() is not None:
            raise KafkaException(message.error())
        self.messages.append(message)

    @property
    def numbers(self) -> list[int]:
        return sorted(one.partition for one in self.consumer.assignment())

    def commit(self) -> None:
        self.consumer.commit(asynchronous=False)

    def close(self) -> None:
        self.consumer.close()


def turn_until(condition: Callable[[], object], *members: Watched, what: str = "") -> None:
    """Let all of them work until something holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what or "it never came to that"
        for one in members:
            one.poll()


def deal_out(partitions: int, *members: Watched) -> None:
    """Until they have all partitions between them, as evenly as can be."""

    def is_dealt() -> bool:
        sizes = [len(one.numbers) for one in members]
        numbers = sorted(number for one in members for number in one.numbers)
        return numbers == list(range(partitions)) and max(sizes) - min(sizes) <= 1

    turn_until(is_dealt, *members, what=f"not dealt out: {[one.numbers for one in members]}")


def fill(broker: BrokerProcess, topic: str, values: Sequence[bytes], partitions: int) -> None:
    """In turn to all partitions."""
    with Producer({"bootstrap.servers": broker.kafka}) as producer:
        for place, value in enumerate(values):
            producer.produce(topic, value, partition=place % partitions)
        assert producer.flush(PATIENCE_SECONDS) == 0


def values(*members: Watched) -> list[bytes]:
    return sorted(message.value() or b"" for one in members for message in one.messages)


def committed(consumer: Consumer, topic: str, partitions: int) -> list[int]:
    asked = [TopicPartition(topic, number) for number in range(partitions)]
    return [one.offset for one in consumer.committed(asked, timeout=PATIENCE_SECONDS)]


def group_page(broker: BrokerProcess, group: str) -> dict[str, Any]:
    """As HTTP shows the group."""
    page: dict[str, Any] = httpx.get(
        broker.url(f"/v1/groups/{group}"), timeout=PATIENCE_SECONDS
    ).json()
    return page
