"""Batches of any make, put into a topic as a Kafka client does; and a reader without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kafka.protocol.producer import ProduceRequest, ProduceResponse

from broker_process import BrokerProcess
from millstream.client import Client
from millstream.log import batch as batches
from millstream.spark.kafka_client import VERSIONS, Kafka
from millstream.spark.options import BROKER_ROWS, read_options, read_place
from millstream.spark.positions import Part

PRODUCE = 0


@contextmanager
def client_of(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url("")) as client:
        yield client


@contextmanager
def kafka_of(address: str, *, patience_s: float = 60.0, isolation: int = 1) -> Iterator[Kafka]:
    options = {"servers": address, "kafkaConsumer.pollTimeoutMs": str(int(patience_s * 1000))}
    place = read_place(read_options(options, BROKER_ROWS), {})
    with Kafka(place, place.servers, isolation=isolation) as kafka:
        yield kafka


def make_topic(broker: BrokerProcess, topic: str, partitions: int = 1, **settings: object) -> None:
    with client_of(broker) as client:
        client.topics.create(topic, partitions=partitions, settings=settings)


def produce(kafka: Kafka, part: Part, data: bytes) -> int:
    """One batch; its first offset."""
    VERSIONS.setdefault(PRODUCE, 9)
    answer = kafka.leader(part).ask(
        ProduceRequest,
        ProduceResponse,
        transactional_id=None,
        acks=-1,
        timeout_ms=30_000,
        topic_data=[
            ProduceRequest.TopicProduceData(
                name=part[0],
                partition_data=[
                    ProduceRequest.TopicProduceData.PartitionProduceData(
                        index=part[1], records=data
                    )
                ],
            )
        ],
    )
    one = answer.responses[0].partition_responses[0]
    assert one.error_code == 0, one
    offset: int = one.base_offset
    return offset


def fill(
    address: str,
    part: Part,
    count: int,
    *,
    batch_records: int = 1000,
    value: bytes = b"v",
    compression: str = "none",
) -> None:
    """Values are numbered: `v0`, `v1`, …; keys are the last digit."""
    with kafka_of(address) as kafka:
        for begin in range(0, count, batch_records):
            numbers = range(begin, min(begin + batch_records, count))
            records: Sequence[Any] = [
                (1_700_000_000_000 + n, b"%d" % (n % 10), value + b"%d" % n, []) for n in numbers
            ]
            produce(kafka, part, batches.encode(records, compression=compression))
