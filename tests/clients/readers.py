"""Every client of Kafka as one that produces and one that reads, for tests of all with all."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition
from kafka.codec import has_lz4, has_snappy, has_zstd

from broker_process import PATIENCE_SECONDS, BrokerProcess
from clients import making

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
# kafka-python has the others from packages that it does not need.
_OF_KAFKA_PYTHON: Mapping[str, Callable[[], bool]] = {
    "snappy": has_snappy,
    "lz4": has_lz4,
    "zstd": has_zstd,
}
NO_KCAT = "kcat is missing: apt-get install kcat"


def require_kcat() -> None:
    if shutil.which("kcat") is None:
        pytest.skip(NO_KCAT)


def kafka_python_has(compression: str) -> bool:
    has = _OF_KAFKA_PYTHON.get(compression)
    return has is None or has()


def produce_by_librdkafka(
    broker: BrokerProcess, topic: str, values: Sequence[bytes], compression: str
) -> None:
    options = {"compression.type": compression}
    making.produce(broker, topic, list(values), options=options)


def produce_by_aiokafka(
    broker: BrokerProcess,
    topic: str,
    values: Sequence[bytes],
    compression: str = "none",
    **options: Any,
) -> None:
    async def scenario() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=broker.kafka,
            compression_type=None if compression == "none" else compression,
            **options,
        )
        await producer.start()
        try:
            sent = [await producer.send(topic, value, partition=0) for value in values]
            await asyncio.gather(*sent)
        finally:
            await producer.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def produce_by_kafka_python(
    broker: BrokerProcess, topic: str, values: Sequence[bytes], compression: str
) -> None:
    producer = KafkaProducer(
        bootstrap_servers=broker.kafka,
        compression_type=None if compression == "none" else compression,
    )
    try:
        for sent in [producer.send(topic, value, partition=0) for value in values]:
            sent.get(PATIENCE_SECONDS)
    finally:
        producer.close()


def produce_by_kcat(
    broker: BrokerProcess, topic: str, values: Sequence[bytes], compression: str
) -> None:
    program = ["kcat", "-b", broker.kafka, "-t", topic, "-p", "0", "-P", "-z", compression]
    lines = b"".join(value + b"\n" for value in values)
    subprocess.run(program, input=lines, check=True, capture_output=True)


def read_by_librdkafka(broker: BrokerProcess, topic: str, count: int) -> list[bytes]:
    return [one.value() or b"" for one in making.consume(broker, topic, count)]


def read_by_aiokafka(broker: BrokerProcess, topic: str, count: int) -> list[bytes]:
    async def scenario() -> list[bytes]:
        consumer = AIOKafkaConsumer(bootstrap_servers=broker.kafka)
        await consumer.start()
        try:
            consumer.assign([AioPartition(topic, 0)])
            consumer.seek(AioPartition(topic, 0), 0)
            return [(await consumer.getone()).value for _ in range(count)]
        finally:
            await consumer.stop()

    return asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


def read_by_kafka_python(broker: BrokerProcess, topic: str, count: int) -> list[bytes]:
    partition = PythonPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=broker.kafka, auto_offset_reset="earliest")
    found: list[bytes] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    try:
        consumer.assign([partition])
        while len(found) < count and time.monotonic() < deadline:
            found += [one.value for one in consumer.poll(200).get(partition, [])]
    finally:
        consumer.close()
    return found


def read_by_kcat(broker: BrokerProcess, topic: str, count: int) -> list[bytes]:
    program = ["kcat", "-b", broker.kafka, "-t", topic, "-p", "0", "-C", "-o", "beginning"]
    shown = subprocess.run([*program, "-c", str(count)], check=True, capture_output=True).stdout
    return shown.splitlines()


PRODUCERS = {
    "librdkafka": produce_by_librdkafka,
    "aiokafka": produce_by_aiokafka,
    "kafka-python": produce_by_kafka_python,
    "kcat": produce_by_kcat,
}
READERS = {
    "librdkafka": read_by_librdkafka,
    "aiokafka": read_by_aiokafka,
    "kafka-python": read_by_kafka_python,
    "kcat": read_by_kcat,
}
