"""Requests of real clients, changed: the broker answers or ends the connection, and goes on."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from clients.making import KAFKA, make_topic
from clients.proxy import Proxy

CHANGES = 1500
# What a broker may grow by, whatever it is sent.
GROWTH_BYTES_MAX = 100 * 1024 * 1024
SIZES = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000)
API_VERSIONS = b"\0\0\0\x0a\0\x12\0\0\0\0\0\x07\xff\xff"


def by_librdkafka(server: str) -> None:
    admin = AdminClient({"bootstrap.servers": server})
    for future in admin.create_topics([NewTopic("rd", 1, 1)]).values():
        future.result(PATIENCE_SECONDS)
    with Producer({"bootstrap.servers": server, "enable.idempotence": True}) as producer:
        producer.produce("rd", b"value", key=b"key")
        assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = Consumer(
        {"bootstrap.servers": server, "group.id": "rd", "auto.offset.reset": "earliest"}
    )
    consumer.subscribe(["rd"])
    assert consumer.poll(PATIENCE_SECONDS) is not None
    consumer.commit(asynchronous=False)
    consumer.close()
    resource = ConfigResource(ResourceType.TOPIC, "rd")
    for described in admin.describe_configs([resource]).values():
        described.result(PATIENCE_SECONDS)
    admin.list_consumer_groups().result(PATIENCE_SECONDS)


def by_kafka_python(server: str) -> None:
    producer = KafkaProducer(bootstrap_servers=server)
    producer.send("python", b"value").get(PATIENCE_SECONDS)
    producer.close()
    consumer = KafkaConsumer(
        "python", bootstrap_servers=server, group_id="python", auto_offset_reset="earliest"
    )
    assert next(consumer).value == b"value"
    consumer.close()
    admin = KafkaAdminClient(bootstrap_servers=server)
    admin.describe_cluster()
    admin.list_groups()
    admin.close()


async def by_aiokafka(server: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=server)
    await producer.start()
    await producer.send_and_wait("aio", b"value")
    await producer.stop()
    consumer = AIOKafkaConsumer(
        "aio", bootstrap_servers=server, group_id="aio", auto_offset_reset="earliest"
    )
    await consumer.start()
    assert (await consumer.getone()).value == b"value"
    await consumer.stop()


def frames_of(heard: bytearray) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(heard):
        end = at + 4 + int.from_bytes(heard[at : at + 4], "big")
        if end <= len(heard):
            yield bytes(heard[at + 4 : end])
        at = end


def recorded(proxy: Proxy) -> list[bytes]:
    """One request of each API and version, without sizes."""
    found: dict[bytes, bytes] = {}
    for heard in proxy.heard:
        for frame in frames_of(heard):
            found.setdefault(frame[:4], frame)
    return list(found.values())


def changed(frame: bytes, chance: random.Random) -> bytes:
    """As it would come, its size included, which is right more often than not."""
    data = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(data))
        match chance.randrange(5):
            case 0:
                data[at] = chance.randrange(256)
            case 1:
                del data[at + 1 :]
            case 2:
                data[at:at] = chance.randbytes(chance.randint(1, 8))
            case 3:
                # Lengths and counts are where harm is done.
                width = chance.choice((1, 2, 4))
                size = chance.choice(SIZES) & (256**width - 1)
                data[at : at + width] = size.to_bytes(width, "big")
            case _:
                data += data[at:]
    size = len(data) if chance.random() < 0.9 else chance.choice(SIZES)
    return size.to_bytes(4, "big") + bytes(data)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as one:
        yield one


@pytest.fixture
def broker(tmp_path: Path, proxy: Proxy) -> Iterator[BrokerProcess]:
    """Its clients are told to come to the proxy."""
    few = ("--topic-partitions-max", "8", "--topics-max", "200", "--fsync", "none")
    flags = (*KAFKA, "--kafka-advertised", proxy.address, *few)
    with BrokerProcess(str(tmp_path), *flags) as one:
        yield one.wait_until_ready()


def metric(broker: BrokerProcess, name: str) -> float:
    page = broker.get("/metrics", listener="metrics").text
    found = re.search(rf"(?m)^millstream_{name} (\S+)$", page)
    assert found is not None, name
    return float(found[1])


def test_changed_requests_neither_end_the_broker_nor_stay_in_it(
    broker: BrokerProcess, proxy: Proxy
) -> None:
    host, _, port = broker.kafka.rpartition(":")
    proxy.target = address = (host, int(port))
    for topic in ("python", "aio"):
        make_topic(broker, topic)
    by_librdkafka(proxy.address)
    by_kafka_python(proxy.address)
    asyncio.run(asyncio.wait_for(by_aiokafka(proxy.address), PATIENCE_SECONDS))
    proxy.cut()
    requests = recorded(proxy)
    assert len(requests) > 20
    memory = psutil.Process(broker.process.pid).memory_info
    before = memory().rss
    chance = random.Random(20)
    for number in range(CHANGES):
        with suppress(OSError), socket.create_connection(address) as connection:
            for _ in range(chance.randint(1, 3)):
                connection.sendall(changed(chance.choice(requests), chance))
            if number % 100 == 0:
                # Whoever comes meanwhile is served.
                with socket.create_connection(address, timeout=PATIENCE_SECONDS) as other:
                    other.sendall(API_VERSIONS)
                    assert other.recv(8)[4:] == b"\0\0\0\x07"
    wait_until(lambda: metric(broker, "kafka_connections") == 0, "the end of all connections")
    assert metric(broker, "kafka_buffer_bytes") == 0
    assert metric(broker, "kafka_requests_invalid_total") > CHANGES / 10
    assert memory().rss < before + GROWTH_BYTES_MAX
    failed = broker.messages("a request failed")
    assert failed == [], failed[0]["exception"]
    assert broker.messages("a callback failed") == []
    assert broker.stop() == 0
