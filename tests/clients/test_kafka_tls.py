"""Kafka's port with TLS: other people's clients, with the certificates of HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition

from broker_process import PATIENCE_SECONDS, BrokerProcess
from certificates import Pair
from clients.making import KAFKA
from clients.readers import require_kcat

VALUES = [b"secret %d" % number for number in range(20)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.fixture
def broker(tmp_path: Path, pair: Pair) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path), *KAFKA, *pair.flags, "--topic-partitions", "1") as one:
        yield one.wait_until_ready()


def of_librdkafka(broker: BrokerProcess, pair: Pair) -> dict[str, Any]:
    return {
        "bootstrap.servers": broker.kafka,
        "security.protocol": "ssl",
        "ssl.ca.location": str(pair.authority),
    }


def test_librdkafka_speaks_tls(broker: BrokerProcess, pair: Pair) -> None:
    options = of_librdkafka(broker, pair)
    with Producer(options) as producer:
        for value in VALUES:
            producer.produce("orders", value)
        assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = Consumer({**options, "group.id": "g"})
    consumer.assign([TopicPartition("orders", 0, 0)])
    try:
        found = consumer.consume(len(VALUES), PATIENCE_SECONDS)
        assert [one.value() for one in found] == VALUES
    finally:
        consumer.close()


def test_aiokafka_speaks_tls(broker: BrokerProcess, pair: Pair) -> None:
    async def scenario() -> list[bytes]:
        where = {
            "bootstrap_servers": broker.kafka,
            "security_protocol": "SSL",
            "ssl_context": pair.trust(),
        }
        async with AIOKafkaProducer(**where) as producer:
            for value in VALUES:
                await producer.send_and_wait("orders", value)
        async with AIOKafkaConsumer(**where) as consumer:
            consumer.assign([AioPartition("orders", 0)])
            await consumer.seek_to_beginning()
            return [(await consumer.getone()).value for _ in VALUES]

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS)) == VALUES


def test_kafka_python_speaks_tls(broker: BrokerProcess, pair: Pair) -> None:
    where = {
        "bootstrap_servers": broker.kafka,
        "security_protocol": "SSL",
        "ssl_cafile": str(pair.authority),
    }
    producer = KafkaProducer(**where)
    for value in VALUES:
        producer.send("orders", value).get(PATIENCE_SECONDS)
    producer.close()
    consumer = KafkaConsumer(**where, auto_offset_reset="earliest")
    consumer.assign([PythonPartition("orders", 0)])
    assert [next(consumer).value for _ in VALUES] == VALUES
    consumer.close()


def test_kcat_speaks_tls(broker: BrokerProcess, pair: Pair) -> None:
    require_kcat()
    program = ["kcat", "-b", broker.kafka, "-X", "security.protocol=ssl"]
    program += ["-X", f"ssl.ca.location={pair.authority}", "-t", "orders"]
    subprocess.run([*program, "-P"], input=b"\n".join(VALUES), check=True, capture_output=True)
    shown = subprocess.run([*program, "-C", "-e", "-q"], check=True, capture_output=True).stdout
    assert shown.splitlines() == VALUES


def test_who_does_not_trust_the_certificate_or_speaks_plainly_is_not_served(
    broker: BrokerProcess, pair: Pair
) -> None:
    silent = {"log_level": 0}
    plain = AdminClient({"bootstrap.servers": broker.kafka, **silent})
    untrusting = {**of_librdkafka(broker, pair), **silent}
    del untrusting["ssl.ca.location"]
    for client in (plain, AdminClient(untrusting)):
        with pytest.raises(KafkaException):
            client.list_topics(timeout=2)
    assert AdminClient(of_librdkafka(broker, pair)).list_topics(timeout=PATIENCE_SECONDS).brokers


def test_a_signal_changes_the_certificate_of_new_connections(
    broker: BrokerProcess, pair: Pair
) -> None:
    def serial() -> object:
        host, _, port = broker.kafka.rpartition(":")
        with (
            socket.create_connection((host, int(port)), PATIENCE_SECONDS) as opened,
            pair.trust().wrap_socket(opened, server_hostname=host) as secure,
        ):
            found = secure.getpeercert()
            assert found is not None
            return found["serialNumber"]

    old = serial()
    with Producer(of_librdkafka(broker, pair)) as producer:
        producer.produce("orders", b"before")
        assert producer.flush(PATIENCE_SECONDS) == 0
        pair.renew()
        broker.process.send_signal(signal.SIGHUP)
        broker.wait_for("certificate read again")
        assert serial() != old
        # A connection from before goes on.
        producer.produce("orders", b"after")
        assert producer.flush(PATIENCE_SECONDS) == 0
