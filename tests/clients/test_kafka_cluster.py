"""Other people's Kafka clients find the broker and what is on it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient
from kafka import KafkaConsumer

from broker_process import BrokerProcess
from clients.making import make_topic


def test_librdkafka_makes_a_topic_by_asking_for_it(broker: BrokerProcess) -> None:
    client = AdminClient({"bootstrap.servers": broker.kafka})
    # An administrator only looks, and its library asks for no topic to be made.
    found = client.list_topics("orders.new", timeout=30)
    assert found.topics["orders.new"].error in (None, KafkaError.UNKNOWN_TOPIC_OR_PART)
    assert [f"{one.host}:{one.port}" for one in found.brokers.values()] == [broker.kafka]
    assert len(str(found.cluster_id)) == 22


def test_kafka_python_sees_the_partitions_of_a_topic(broker: BrokerProcess) -> None:
    make_topic(broker, "seen", 4)
    consumer = KafkaConsumer(bootstrap_servers=broker.kafka)
    try:
        assert "seen" in consumer.topics()
        assert consumer.partitions_for_topic("seen") == {0, 1, 2, 3}
    finally:
        consumer.close()


def test_aiokafka_lists_topics(broker: BrokerProcess) -> None:
    make_topic(broker, "listed", 1)

    async def names() -> list[str]:
        client = AIOKafkaAdminClient(bootstrap_servers=broker.kafka)
        await client.start()
        try:
            return list(await client.list_topics())
        finally:
            await client.close()

    assert "listed" in asyncio.run(names())


@pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is missing: apt-get install kcat")
def test_kcat_shows_the_cluster(broker: BrokerProcess) -> None:
    make_topic(broker, "shown", 2)
    program = ["kcat", "-b", broker.kafka, "-L"]
    shown = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    assert f"broker 1 at {broker.kafka} (controller)" in shown
    assert 'topic "shown" with 2 partitions' in shown
