"""Kafka's internal topic of offsets: there for who looks for it, empty, and in nobody's way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)
from kafka import KafkaConsumer

from broker_process import PATIENCE_SECONDS, BrokerProcess
from clients.crews import committed, fill, group_page
from clients.making import KAFKA, make_topic

NAME = "__consumer_offsets"
VALUES = [b"%d" % number for number in range(6)]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """On which a group has been."""
    with BrokerProcess(str(tmp_path_factory.mktemp("broker")), *KAFKA) as one:
        one.wait_until_ready()
        make_topic(one, "orders", 2)
        fill(one, "orders", VALUES, 2)
        commit_one(one, "first")
        yield one


def commit_one(broker: BrokerProcess, group: str) -> None:
    consumer = Consumer({"bootstrap.servers": broker.kafka, "group.id": group})
    consumer.commit(offsets=[TopicPartition("orders", 0, 1)], asynchronous=False)
    consumer.close()


def names(broker: BrokerProcess) -> set[str]:
    found = AdminClient({"bootstrap.servers": broker.kafka}).list_topics(timeout=PATIENCE_SECONDS)
    return set(found.topics)


def test_it_is_there_once_a_group_is_and_after_a_restart(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *KAFKA) as fresh:
        make_topic(fresh.wait_until_ready(), "orders", 1)
        assert names(fresh) == {"orders"}
        commit_one(fresh, "g")
        assert names(fresh) == {"orders", NAME}
        fresh.stop()
    with BrokerProcess(str(tmp_path), *KAFKA) as again:
        assert names(again.wait_until_ready()) == {"orders", NAME}


def by_librdkafka(
    broker: BrokerProcess, group: str, **options: Any
) -> tuple[set[str], list[bytes]]:
    """A member of a group for all topics: what it was given, and what it read."""
    consumer = Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "topic.metadata.refresh.interval.ms": 200,
            **{name.replace("_", "."): value for name, value in options.items()},
        }
    )
    consumer.subscribe(["^.*"])
    found: list[bytes] = []

    def look() -> None:
        message = consumer.poll(0.1)
        if message is not None:
            assert message.error() is None, message.error()
            found.append(message.value() or b"")

    try:
        wait_with(look, lambda: len(found) == len(VALUES), "all records")
        consumer.commit(asynchronous=False)
        assert committed(consumer, "orders", 2) == [3, 3]
        return {one.topic for one in consumer.assignment()}, sorted(found)
    finally:
        consumer.close()


def wait_with(look: Callable[[], None], condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        look()


@pytest.mark.parametrize("way", ["range", "roundrobin", "cooperative-sticky"])
def test_who_takes_all_topics_and_leaves_none_out_has_it_and_goes_on(
    broker: BrokerProcess, way: str
) -> None:
    group = f"all-{way}"
    topics, found = by_librdkafka(broker, group, partition_assignment_strategy=way)
    assert (topics, found) == ({"orders", NAME}, VALUES)
    # HTTP shows what the group has committed, and that is nothing of this.
    assert {one["topic"] for one in group_page(broker, group)["offsets"]} == {"orders"}


def test_a_group_that_the_broker_deals_out_to_is_not_given_it(broker: BrokerProcess) -> None:
    topics, found = by_librdkafka(broker, "all-consumer", group_protocol="consumer")
    assert (topics, found) == ({"orders"}, VALUES)


@pytest.mark.parametrize("is_left_out", [True, False])
def test_aiokafka_takes_it_only_when_asked_to(broker: BrokerProcess, is_left_out: bool) -> None:
    async def scenario() -> None:
        consumer = AIOKafkaConsumer(
            bootstrap_servers=broker.kafka,
            group_id=f"aio-{is_left_out}",
            auto_offset_reset="earliest",
            exclude_internal_topics=is_left_out,
        )
        consumer.subscribe(pattern="^.*$")
        await consumer.start()
        try:
            wanted = {"orders"} if is_left_out else {"orders", NAME}
            assert consumer.subscription() == wanted
            found = [(await consumer.getone()).value for _ in VALUES]
            assert sorted(value or b"" for value in found) == VALUES
            # It commits all positions, those in the internal topic too.
            await consumer.commit()
        finally:
            await consumer.stop()

    asyncio.run(asyncio.wait_for(scenario(), PATIENCE_SECONDS))


@pytest.mark.parametrize("is_left_out", [True, False])
def test_kafka_python_takes_it_only_when_asked_to(broker: BrokerProcess, is_left_out: bool) -> None:
    consumer = KafkaConsumer(
        bootstrap_servers=broker.kafka,
        group_id=f"python-{is_left_out}",
        auto_offset_reset="earliest",
        exclude_internal_topics=is_left_out,
    )
    consumer.subscribe(pattern="^.*$")
    try:
        assert sorted(next(consumer).value for _ in VALUES) == VALUES
        assert consumer.subscription() == ({"orders"} if is_left_out else {"orders", NAME})
        consumer.commit()
    finally:
        consumer.close()


def test_it_is_read_as_an_empty_topic(broker: BrokerProcess) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": "reader",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    whole = TopicPartition(NAME, 0)
    assert consumer.get_watermark_offsets(whole, PATIENCE_SECONDS) == (0, 0)
    later = TopicPartition(NAME, 0, 1)
    assert consumer.offsets_for_times([later], PATIENCE_SECONDS)[0].offset == -1
    consumer.assign([whole])
    try:
        message = consumer.poll(PATIENCE_SECONDS)
        assert message is not None
        error = message.error()
        assert error is not None
        assert (error.code(), message.offset()) == (KafkaError._PARTITION_EOF, 0)
    finally:
        consumer.close()


def test_nobody_writes_to_it_or_changes_it(broker: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": broker.kafka})
    topic = ConfigResource(ResourceType.TOPIC, NAME)
    entry = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
    change = ConfigResource(ResourceType.TOPIC, NAME, incremental_configs=[entry])
    described = admin.describe_configs([topic])[topic].result(PATIENCE_SECONDS)
    assert described["cleanup.policy"].value == "compact"
    assert all(one.is_read_only for one in described.values())
    tried: list[Any] = [
        admin.create_topics([NewTopic(NAME, 1, 1)])[NAME],
        admin.create_partitions([NewPartitions(NAME, 2)])[NAME],
        admin.delete_topics([NAME])[NAME],
        admin.incremental_alter_configs([change])[change],
        *admin.delete_records([TopicPartition(NAME, 0, -1)]).values(),
    ]
    for one in tried:
        with pytest.raises(KafkaException) as refusal:
            one.result(PATIENCE_SECONDS)
        assert refusal.value.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    refused: list[KafkaError | None] = []
    with Producer({"bootstrap.servers": broker.kafka}) as producer:
        producer.produce(NAME, b"x", on_delivery=lambda error, _: refused.append(error))
        producer.flush(PATIENCE_SECONDS)
    assert [one and one.code() for one in refused] == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
