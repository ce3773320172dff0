"""aiokafka, beyond what the other tests of clients have of it: what its programs ask of a broker.

Its own tests are not in its source packages (see `other_suites.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import (
    MessageSizeTooLargeError,
    OffsetOutOfRangeError,
    TopicAuthorizationFailedError,
)
from aiokafka.structs import OffsetAndMetadata

from broker_process import PATIENCE_SECONDS, BrokerProcess
from clients.making import make_topic
from listeners.http_scene import until

Result = TypeVar("Result")
VALUES = [b"value %d" % number for number in range(100)]


def run(scenario: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(scenario, PATIENCE_SECONDS))


def consumer_of(broker: BrokerProcess, *topics: str, **options: Any) -> AIOKafkaConsumer:
    given = {"auto_offset_reset": "earliest", "enable_auto_commit": False, **options}
    return AIOKafkaConsumer(*topics, bootstrap_servers=broker.kafka, **given)


async def filled(broker: BrokerProcess, topic: str, values: list[bytes] = VALUES) -> None:
    """To partition 0, a record a hundredth of a second."""
    async with AIOKafkaProducer(bootstrap_servers=broker.kafka) as producer:
        for place, value in enumerate(values):
            await producer.send(
                topic, value, partition=0, timestamp_ms=1_700_000_000_000 + 10 * place
            )
        await producer.flush()


# ---- producing


def test_a_producer_is_told_where_and_when_its_records_are(broker: BrokerProcess) -> None:
    own = make_topic(broker, "aio-own", 2)
    stamped = make_topic(broker, "aio-stamped", 2, timestamps="append")

    async def scenario() -> None:
        before_ms = int(time.time() * 1000)
        async with AIOKafkaProducer(bootstrap_servers=broker.kafka) as producer:
            assert await producer.partitions_for(own) == {0, 1}
            first = await producer.send_and_wait(own, b"v", key=b"k", timestamp_ms=12_345)
            again = await producer.send_and_wait(own, None, key=b"k", headers=[("a", b"1")])
            assert (again.partition, again.offset) == (first.partition, first.offset + 1)
            assert (first.timestamp, first.timestamp_type, first.log_start_offset) == (12_345, 0, 0)
            given = await producer.send_and_wait(stamped, b"v", timestamp_ms=12_345)
            assert given.timestamp_type == 1
            assert before_ms <= given.timestamp <= time.time() * 1000 + 1
            # A batch of its own making.
            batch = producer.create_batch()
            for value in VALUES[:3]:
                batch.append(key=None, value=value, timestamp=None)
            placed = await (await producer.send_batch(batch, own, partition=1))
            more = await producer.send_and_wait(own, b"v", partition=1)
            assert more.offset == placed.offset + 3

    run(scenario())


def test_what_a_producer_may_not_do_it_is_told(broker: BrokerProcess) -> None:
    small = make_topic(broker, "aio-small", 1, message_bytes_max=2000)

    async def scenario() -> None:
        async with AIOKafkaProducer(bootstrap_servers=broker.kafka) as producer:
            with pytest.raises(MessageSizeTooLargeError):
                await producer.send_and_wait(small, b"x" * 5000)
            with pytest.raises(TopicAuthorizationFailedError):
                await producer.send_and_wait("__offsets", b"x")
            assert (await producer.send_and_wait(small, b"x")).offset == 0

    run(scenario())


# ---- consuming


def test_a_consumer_goes_wherever_it_wants(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "aio-where", 1)
    part = TopicPartition(topic, 0)

    async def scenario() -> None:
        await filled(broker, topic)
        async with consumer_of(broker, isolation_level="read_committed") as consumer:
            consumer.assign([part])
            assert await consumer.beginning_offsets([part]) == {part: 0}
            assert await consumer.end_offsets([part]) == {part: 100}
            found = await consumer.offsets_for_times({part: 1_700_000_000_501})
            assert (found[part].offset, found[part].timestamp) == (51, 1_700_000_000_510)
            assert await consumer.offsets_for_times({part: 1_800_000_000_000}) == {part: None}
            await consumer.seek_to_end(part)
            assert await consumer.position(part) == 100
            consumer.seek(part, 42)
            one = await consumer.getone()
            assert (one.offset, one.value) == (42, VALUES[42])
            assert consumer.highwater(part) == consumer.last_stable_offset(part) == 100
            batches = await consumer.getmany(part, max_records=5)
            assert [one.offset for one in batches[part]] == [43, 44, 45, 46, 47]

    run(scenario())


def test_a_consumer_without_a_reset_is_told_that_it_is_out_of_range(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "aio-range", 1)
    part = TopicPartition(topic, 0)

    async def scenario() -> None:
        await filled(broker, topic)
        async with consumer_of(broker, auto_offset_reset="none") as consumer:
            consumer.assign([part])
            consumer.seek(part, 500)
            with pytest.raises(OffsetOutOfRangeError):
                await consumer.getone()
        async with consumer_of(broker) as consumer:
            consumer.assign([part])
            consumer.seek(part, 500)
            assert (await consumer.getone()).offset == 0

    run(scenario())


def test_records_larger_than_a_fetch_come_all_the_same(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "aio-large", 1)
    values = [b"small", b"x" * 50_000, b"small too"]

    async def scenario() -> list[bytes]:
        async with AIOKafkaProducer(bootstrap_servers=broker.kafka) as producer:
            for value in values:
                await producer.send_and_wait(topic, value)
        async with consumer_of(broker, topic, max_partition_fetch_bytes=4000) as consumer:
            return [(await consumer.getone()).value for _ in values]

    assert run(scenario()) == values


def test_a_pattern_finds_topics_that_are_made_later(broker: BrokerProcess) -> None:
    make_topic(broker, "aio-found-1", 1)

    async def scenario() -> None:
        options = {"group_id": "aio-finders", "metadata_max_age_ms": 200}
        async with consumer_of(broker, **options) as consumer:
            consumer.subscribe(pattern="^aio-found-.*")
            await filled(broker, "aio-found-1", VALUES[:1])
            assert (await consumer.getone()).topic == "aio-found-1"
            await consumer.commit()
            make_topic(broker, "aio-found-2", 1)
            await filled(broker, "aio-found-2", VALUES[:1])
            assert (await consumer.getone()).topic == "aio-found-2"

    run(scenario())


async def dealt(*consumers: AIOKafkaConsumer) -> None:
    """Until each has as much as the others."""
    count = 2 // len(consumers)
    await until(lambda: all(len(one.assignment()) == count for one in consumers), "their parts")


def test_members_take_over_from_each_other_and_keep_notes_with_offsets(
    broker: BrokerProcess,
) -> None:
    topic = make_topic(broker, "aio-heard", 2)
    part = TopicPartition(topic, 0)

    async def scenario() -> None:
        await filled(broker, topic)
        options = {"group_id": "aio-heard", "heartbeat_interval_ms": 100}
        async with consumer_of(broker, topic, **options) as one:
            await dealt(one)
            async with consumer_of(broker, topic, **options) as other:
                await dealt(one, other)
            await dealt(one)
            await one.commit({part: OffsetAndMetadata(7, "a note")})
            assert await one.committed(part) == 7
        late = consumer_of(broker, topic, **options)
        async with late:
            assert (await late.getone(part)).offset == 7

    run(scenario())


# ---- administration


def test_topics_are_administered(broker: BrokerProcess) -> None:
    async def scenario() -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=broker.kafka)
        await admin.start()
        try:
            await admin.create_topics([NewTopic("aio-made", 1, 1)])
            assert "aio-made" in await admin.list_topics()
            await admin.create_partitions({"aio-made": NewPartitions(total_count=3)})
            (shown,) = await admin.describe_topics(["aio-made"])
            assert sorted(one["partition"] for one in shown["partitions"]) == [0, 1, 2]
            resource = ConfigResource(
                ConfigResourceType.TOPIC, "aio-made", {"retention.ms": "60000"}
            )
            await admin.alter_configs([resource])
            (described,) = await admin.describe_configs([resource])
            code, _, _, name, entries = described.resources[0]
            assert (code, name) == (0, "aio-made")
            assert [entry[:2] for entry in entries] == [("retention.ms", "60000")]
            of_broker = ConfigResource(ConfigResourceType.BROKER, "1")
            (described,) = await admin.describe_configs([of_broker])
            assert len(described.resources[0][4]) > 50
            await filled(broker, "aio-made")
            part = TopicPartition("aio-made", 0)
            assert await admin.delete_records({part: RecordsToDelete(before_offset=30)}) == {
                part: 30
            }
            cluster = await admin.describe_cluster()
            assert len(cluster["brokers"]) == 1
            await admin.delete_topics(["aio-made"])
            assert "aio-made" not in await admin.list_topics()
        finally:
            await admin.close()

    run(scenario())


def test_groups_are_administered(broker: BrokerProcess) -> None:
    topic = make_topic(broker, "aio-seen", 1)
    part = TopicPartition(topic, 0)

    async def scenario() -> None:
        await filled(broker, topic)
        admin = AIOKafkaAdminClient(bootstrap_servers=broker.kafka)
        await admin.start()
        try:
            async with consumer_of(broker, topic, group_id="aio-seen") as consumer:
                await consumer.getone()
                await consumer.commit()
                assert "aio-seen" in {one[0] for one in await admin.list_consumer_groups()}
                (described,) = await admin.describe_consumer_groups(["aio-seen"])
                code, group, state, *_ = described.groups[0]
                assert (code, group, state) == (0, "aio-seen", "Stable")
                offsets = await admin.list_consumer_group_offsets("aio-seen")
                assert offsets[part].offset == await consumer.position(part)
                assert await admin.list_consumer_group_offsets("aio-seen", partitions=[part])
        finally:
            await admin.close()

    run(scenario())
