"""Connections that break and brokers that die under other people's Kafka clients: what was
acknowledged is there, and what an idempotent producer sent is there once, in order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Producer, TopicPartition
from kafka import KafkaProducer

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from clients.making import KAFKA, consume, free_port, make_topic, produce
from clients.proxy import Proxy

VALUES = [b"value %d" % number for number in range(200)]
# Of one client, how often its connections break, and what it sends between.
CUTS = 4
BURST = 50
# Who comes back comes back soon.
EAGER = MappingProxyType(
    {
        "enable.idempotence": True,
        "linger.ms": 1,
        "retry.backoff.ms": 20,
        "reconnect.backoff.ms": 10,
        "reconnect.backoff.max.ms": 50,
        # What it has to say of the broker's end is what these tests are about.
        "log_level": 0,
    }
)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as one:
        yield one


@pytest.fixture
def broker(tmp_path: Path, proxy: Proxy) -> Iterator[BrokerProcess]:
    """Its clients are told to come to the proxy."""
    with BrokerProcess(str(tmp_path), *KAFKA, "--kafka-advertised", proxy.address) as one:
        one.wait_until_ready()
        host, _, port = one.kafka.rpartition(":")
        proxy.target = (host, int(port))
        yield one


def lose_answers(proxy: Proxy) -> None:
    """Batches have arrived and their answers do not: a client cannot know, and repeats."""
    wait_until(lambda: proxy.swallowed, "an answer that is lost")
    proxy.cut()
    proxy.swallows = False


def check_once(broker: BrokerProcess, topic: str, count: int) -> None:
    """All are there in order, and the broker saw some of them twice."""
    found = consume(broker, topic, count)
    assert [int(one.value() or b"") for one in found] == list(range(count))
    page = broker.get("/metrics", listener="metrics").text
    repeated = [one for one in page.splitlines() if one.startswith("millstream_log_appends_rep")]
    assert float(repeated[0].split()[1]) > 0


def test_librdkafka_stores_each_record_once_through_lost_answers(
    broker: BrokerProcess, proxy: Proxy
) -> None:
    topic = make_topic(broker, "once")
    errors: list[KafkaError] = []
    numbers = iter(range(1_000_000))
    with Producer({"bootstrap.servers": proxy.address, **EAGER}) as producer:

        def send() -> None:
            for _ in range(BURST):
                producer.produce(
                    topic,
                    b"%d" % next(numbers),
                    partition=0,
                    on_delivery=lambda error, _: errors.append(error) if error else None,
                )

        for _ in range(CUTS):
            send()
            assert producer.flush(PATIENCE_SECONDS) == 0
            proxy.swallow()
            send()
            lose_answers(proxy)
        assert producer.flush(PATIENCE_SECONDS) == 0
    assert errors == []
    check_once(broker, topic, 2 * CUTS * BURST)


def test_aiokafka_stores_each_record_once_through_lost_answers(
    broker: BrokerProcess, proxy: Proxy
) -> None:
    topic = make_topic(broker, "once")

    async def scenario() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=proxy.address, enable_idempotence=True, retry_backoff_ms=20
        )
        await producer.start()
        try:
            for cut in range(CUTS):
                if cut:
                    proxy.swallow()
                values = range(cut * BURST, (cut + 1) * BURST)
                sent = [await producer.send(topic, b"%d" % one, partition=0) for one in values]
                if cut:
                    await asyncio.to_thread(lose_answers, proxy)
                await asyncio.gather(*sent)
        finally:
            await producer.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))
    check_once(broker, topic, CUTS * BURST)


def test_kafka_python_stores_each_record_once_through_lost_answers(
    broker: BrokerProcess, proxy: Proxy
) -> None:
    topic = make_topic(broker, "once")
    producer = KafkaProducer(
        bootstrap_servers=proxy.address,
        enable_idempotence=True,
        retry_backoff_ms=20,
        reconnect_backoff_ms=10,
        reconnect_backoff_max_ms=50,
    )
    try:
        for cut in range(CUTS):
            if cut:
                proxy.swallow()
            values = range(cut * BURST, (cut + 1) * BURST)
            sent = [producer.send(topic, b"%d" % one, partition=0) for one in values]
            if cut:
                lose_answers(proxy)
            for one in sent:
                one.get(PATIENCE_SECONDS)
    finally:
        producer.close()
    check_once(broker, topic, CUTS * BURST)


# ---- the broker dies


def killed(broker: BrokerProcess) -> None:
    broker.process.kill()
    broker.process.wait(PATIENCE_SECONDS)


def test_records_that_were_acknowledged_survive_a_kill(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *KAFKA) as broker:
        broker.wait_until_ready()
        make_topic(broker, "kept")
        produce(broker, "kept", VALUES, options={"enable.idempotence": True})
        killed(broker)
    with BrokerProcess(str(tmp_path), *KAFKA) as broker:
        broker.wait_until_ready()
        assert [one.value() for one in consume(broker, "kept", len(VALUES))] == VALUES


def test_an_idempotent_producer_goes_on_after_a_kill_and_stores_each_record_once(
    tmp_path: Path,
) -> None:
    address = f"127.0.0.1:{free_port()}"
    errors: list[KafkaError] = []
    count = 0
    with Producer({"bootstrap.servers": address, **EAGER}) as producer:
        for _ in range(3):
            with BrokerProcess(str(tmp_path), "--kafka", address) as broker:
                broker.wait_until_ready()
                if not count:
                    make_topic(broker, "once")
                for _ in range(BURST):
                    producer.produce(
                        "once",
                        b"%d" % count,
                        partition=0,
                        on_delivery=lambda error, _: errors.append(error) if error else None,
                    )
                    count += 1
                # Some are stored and some are not when it dies.
                producer.poll(0.01)
                killed(broker)
        with BrokerProcess(str(tmp_path), "--kafka", address) as broker:
            broker.wait_until_ready()
            assert producer.flush(PATIENCE_SECONDS) == 0
            assert errors == []
            found = [int(one.value() or b"") for one in consume(broker, "once", count)]
            assert found == list(range(count))


def test_a_consumer_reads_on_where_it_was_after_a_kill(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "reader",
            "auto.offset.reset": "error",
            # Otherwise it commits when it is closed, and waits for a broker to do so.
            "enable.auto.commit": False,
            "reconnect.backoff.ms": 10,
            "reconnect.backoff.max.ms": 50,
            "log_level": 0,
        }
    )
    found: list[bytes] = []

    def read(count: int) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} came"
            message = consumer.poll(0.1)
            if message is not None and message.error() is None:
                found.append(message.value() or b"")

    try:
        for start in range(3):
            with BrokerProcess(str(tmp_path), "--kafka", address) as broker:
                broker.wait_until_ready()
                if not start:
                    make_topic(broker, "orders")
                    consumer.assign([TopicPartition("orders", 0, OFFSET_BEGINNING)])
                # It learns of each start by the epoch of who leads.
                part = VALUES[start * BURST : (start + 1) * BURST]
                produce(broker, "orders", part)
                read((start + 1) * BURST)
                killed(broker)
    finally:
        consumer.close()
    assert found == VALUES[: 3 * BURST]
