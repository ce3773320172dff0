"""A broker with a Kafka listener, and topics on it."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import httpx
from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from broker_process import PATIENCE_SECONDS, BrokerProcess

KAFKA = ("--kafka", "127.0.0.1:0")


def free_port() -> int:
    """For a broker that comes back where it was."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def make_topic(broker: BrokerProcess, name: str, partitions: int = 1, **settings: object) -> str:
    page = {"name": name, "partitions": partitions, "settings": settings}
    answer = httpx.post(broker.url("/v1/topics"), json=page, timeout=PATIENCE_SECONDS)
    assert answer.status_code == 201, answer.text
    return name


def produce(
    broker: BrokerProcess,
    topic: str,
    values: list[bytes],
    *,
    key: bytes | None = None,
    headers: Sequence[tuple[str, bytes]] = (),
    options: Mapping[str, object] = MappingProxyType({}),
) -> list[int]:
    """By librdkafka, to partition 0; the offset of each, in the order of their answers."""
    placed: list[int] = []

    def done(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise KafkaException(error)
        placed.append(message.offset() or 0)

    with Producer({"bootstrap.servers": broker.kafka, "linger.ms": 5, **options}) as producer:
        for value in values:
            producer.produce(
                topic, value, key=key, headers=list(headers), partition=0, on_delivery=done
            )
        assert producer.flush(PATIENCE_SECONDS) == 0
    return placed


def consume(
    broker: BrokerProcess,
    topic: str,
    count: int,
    *,
    offset: int = 0,
    options: Mapping[str, object] = MappingProxyType({}),
) -> list[Message]:
    """By librdkafka, from partition 0; messages as they come."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": "readers",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            **options,
        }
    )
    consumer.assign([TopicPartition(topic, 0, offset)])
    found: list[Message] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} messages came"
            for message in consumer.consume(count - len(found), 0.2):
                if message.error() is not None:
                    raise KafkaException(message.error())
                found.append(message)
    finally:
        consumer.close()
    return found
