"""Records of other people's Kafka clients, in and out, as they are and as HTTP shows them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import (
    OFFSET_BEGINNING,
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
)
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition

from broker_process import PATIENCE_SECONDS, BrokerProcess
from clients.making import consume, make_topic, produce

VALUES = [b"value %d " % number + b"x" * 50 for number in range(200)]
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")


def values_over_http(broker: BrokerProcess, topic: str, count: int) -> list[str]:
    """What HTTP reads: there the batches are opened."""
    url = broker.url(f"/v1/topics/{topic}/messages?partition=0&offset=0&limit={count}")
    page = httpx.get(url, timeout=PATIENCE_SECONDS).json()
    return [one["value"] for one in page["messages"]]


@pytest.mark.parametrize("acks", ["0", "1", "all"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_librdkafka_produces_and_consumes(
    broker: BrokerProcess, compression: str, acks: str
) -> None:
    topic = make_topic(broker, f"rdkafka-{compression}-{acks}")
    options = {"compression.type": compression, "acks": acks}
    produce(broker, topic, VALUES, options=options)
    assert [one.value() for one in consume(broker, topic, len(VALUES))] == VALUES
    assert values_over_http(broker, topic, len(VALUES)) == [one.decode() for one in VALUES]


@pytest.mark.parametrize("compression", [None, "gzip", "snappy", "lz4", "zstd"])
@pytest.mark.parametrize("is_idempotent", [False, True])
def test_aiokafka_produces_and_consumes(
    broker: BrokerProcess, compression: str | None, is_idempotent: bool
) -> None:
    topic = make_topic(broker, f"aio-{compression}-{is_idempotent}".lower())

    async def scenario() -> list[bytes]:
        producer = AIOKafkaProducer(
            bootstrap_servers=broker.kafka,
            compression_type=compression,
            enable_idempotence=is_idempotent,
        )
        await producer.start()
        try:
            sent = [await producer.send(topic, value, partition=0) for value in VALUES]
            placed = await asyncio.gather(*sent)
        finally:
            await producer.stop()
        assert [one.offset for one in placed] == list(range(len(VALUES)))
        consumer = AIOKafkaConsumer(bootstrap_servers=broker.kafka)
        await consumer.start()
        try:
            consumer.assign([AioPartition(topic, 0)])
            consumer.seek(AioPartition(topic, 0), 0)
            return [(await consumer.getone()).value for _ in VALUES]
        finally:
            await consumer.stop()

    assert asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS)) == VALUES
    assert values_over_http(broker, topic, 3) == [one.decode() for one in VALUES[:3]]


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_kafka_python_produces_and_consumes(
    broker: BrokerProcess, compression: str | None, acks: int | str
) -> None:
    topic = make_topic(broker, f"python-{compression}-{acks}".lower())
    producer = KafkaProducer(
        bootstrap_servers=broker.kafka,
        acks=acks,
        compression_type=compression,
        enable_idempotence=acks == "all",
    )
    for value in VALUES:
        producer.send(topic, value, key=b"key", headers=[("a", b"1")])
    producer.flush(PATIENCE_SECONDS)
    producer.close()
    partition = PythonPartition(topic, 0)
    consumer = KafkaConsumer(bootstrap_servers=broker.kafka, auto_offset_reset="earliest")
    consumer.assign([partition])
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < len(VALUES) and time.monotonic() < deadline:
        found += consumer.poll(200).get(partition, [])
    assert consumer.beginning_offsets([partition]) == {partition: 0}
    assert consumer.end_offsets([partition]) == {partition: len(VALUES)}
    consumer.close()
    assert [one.value for one in found] == VALUES
    assert {(one.key, tuple(one.headers)) for one in found} == {(b"key", (("a", b"1"),))}


def test_what_http_publishes_a_kafka_client_reads(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "from-http")
    for number in range(3):
        body = {"key": "k", "value": f"v{number}"}
        answer = httpx.post(broker.url(f"/v1/topics/{topic}/messages"), json=body)
        assert answer.is_success, answer.text
    assert [one.value() for one in consume(broker, topic, 3)] == [b"v0", b"v1", b"v2"]


def test_an_offset_inside_a_batch_is_where_reading_begins(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "mid-batch")
    produce(broker, topic, VALUES, options={"linger.ms": 500})
    assert [one.offset() for one in consume(broker, topic, 5, offset=117)] == [*range(117, 122)]


def test_small_limits_still_give_each_batch_whole(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "small-limits")
    for _ in range(3):
        produce(broker, topic, [b"x" * 20_000] * 4)
    limits = {
        "fetch.message.max.bytes": 1000,
        "fetch.max.bytes": 1000,
        "message.max.bytes": 1000,
        "receive.message.max.bytes": 1_000_000,
    }
    assert len(consume(broker, topic, 12, options=limits)) == 12


def test_an_offset_past_the_end_is_out_of_range(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "out-of-range")
    produce(broker, topic, VALUES[:2])
    with pytest.raises(KafkaException) as raised:
        consume(broker, topic, 1, offset=1000)
    assert raised.value.args[0].code() == KafkaError._AUTO_OFFSET_RESET
    reset = consume(broker, topic, 2, offset=1000, options={"auto.offset.reset": "earliest"})
    assert [one.offset() for one in reset] == [0, 1]


def test_a_consumer_that_waits_gets_what_comes(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "long-poll")
    consumer = Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": "waits",
            # Longer than the test waits: only the arrival can end it.
            "fetch.wait.max.ms": 250_000,
            "socket.timeout.ms": 260_000,
        }
    )
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        assert consumer.poll(0.5) is None
        produce(broker, topic, [b"news"])
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        assert message.value() == b"news"
    finally:
        consumer.close()


def test_offsets_are_found_by_time_to_the_record(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "by-time")
    with Producer({"bootstrap.servers": broker.kafka, "linger.ms": 100}) as producer:
        for number in range(100):
            producer.produce(topic, b"x", partition=0, timestamp=1_700_000_000_000 + number * 10)
        assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = Consumer({"bootstrap.servers": broker.kafka, "group.id": "seekers"})

    def at(timestamp_ms: int) -> int:
        asked = TopicPartition(topic, 0, timestamp_ms)
        return int(consumer.offsets_for_times([asked], timeout=PATIENCE_SECONDS)[0].offset)

    try:
        assert at(1_700_000_000_000) == 0
        assert at(1_700_000_000_001) == 1
        assert at(1_700_000_000_550) == 55
        assert at(1_700_000_000_990) == 99
        # The end, as librdkafka says it.
        assert at(1_700_000_000_991) == -1
        asked = TopicPartition(topic, 0)
        assert consumer.get_watermark_offsets(asked, timeout=PATIENCE_SECONDS) == (0, 100)
    finally:
        consumer.close()


def test_a_topic_may_keep_the_time_of_the_append(broker: BrokerProcess) -> None:
    own = make_topic(broker, "create-time")
    stamped = make_topic(broker, "append-time", timestamps="append")
    before_ms = int(time.time() * 1000)
    for topic in (own, stamped):
        with Producer({"bootstrap.servers": broker.kafka, "compression.type": "lz4"}) as producer:
            producer.produce(topic, b"old" * 100, timestamp=1_000_000)
            assert producer.flush(PATIENCE_SECONDS) == 0
    assert consume(broker, own, 1)[0].timestamp() == (TIMESTAMP_CREATE_TIME, 1_000_000)
    kind, timestamp_ms = consume(broker, stamped, 1)[0].timestamp()
    assert kind == TIMESTAMP_LOG_APPEND_TIME
    assert before_ms <= timestamp_ms <= time.time() * 1000 + 1
    assert values_over_http(broker, stamped, 1) == ["old" * 100]


def code_of(raised: pytest.ExceptionInfo[KafkaException]) -> int:
    return int(raised.value.args[0].code())


def test_a_batch_larger_than_the_topic_takes_is_refused(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "small", message_bytes_max=2000)
    produce(broker, topic, [b"x" * 1900])
    with pytest.raises(KafkaException) as raised:
        produce(broker, topic, [b"x" * 2500])
    assert code_of(raised) == KafkaError.MSG_SIZE_TOO_LARGE
    assert len(consume(broker, topic, 1)) == 1


def test_a_compacted_topic_refuses_records_without_a_key(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "compacted", compact=True)
    produce(broker, topic, [b"with"], key=b"k")
    with pytest.raises(KafkaException) as raised:
        produce(broker, topic, [b"without"])
    assert code_of(raised) == KafkaError.INVALID_RECORD


def test_a_topic_that_inspects_delays_and_ranks_by_headers(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "inspected", inspect=True)
    produce(broker, topic, [b"later"], headers=[("ms-delay", b"500ms")])
    produce(broker, topic, [b"urgent"], headers=[("ms-lane", b"critical")])
    produce(broker, topic, [b"plain"], headers=[("a", b"1")])
    found = {one.value(): one.headers() for one in consume(broker, topic, 3)}
    assert found == {
        b"later": None,
        b"urgent": [("ms-lane", b"critical")],
        b"plain": [("a", b"1")],
    }
    with pytest.raises(KafkaException) as raised:
        produce(broker, topic, [b"x"], headers=[("ms-lane", b"fast")])
    assert code_of(raised) == KafkaError.INVALID_RECORD


def test_internal_topics_are_not_for_clients(broker: BrokerProcess) -> None:
    with pytest.raises(KafkaException) as raised:
        produce(broker, "__offsets", [b"x"], options={"message.timeout.ms": 5000})
    assert code_of(raised) == KafkaError.TOPIC_AUTHORIZATION_FAILED


def test_a_producer_with_a_transactional_id_is_told_that_there_are_none(
    broker: BrokerProcess,
) -> None:
    # It is told once, in an exception, and not in the log as well.
    options = {"bootstrap.servers": broker.kafka, "transactional.id": "t", "log_level": 0}
    producer = Producer(options)
    with pytest.raises(KafkaException) as raised:
        producer.init_transactions(10)
    assert code_of(raised) == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
