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
from confluent_kafka import AcknowledgeType, Consumer, Message, Producer, ShareConsumer
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from clients.making import KAFKA, make_topic
from clients.proxy import Proxy

# What becomes of the requests, in which only ids and times differ from run to run.
SEEDS = (20, 848, 932)
CHANGES = 700
# Of groups that the broker deals out to, and of share groups: only their own clients send these.
OF_NEWER_GROUPS = {68: "ConsumerGroupHeartbeat", 76: "ShareGroupHeartbeat"}
OF_NEWER_GROUPS |= {78: "ShareFetch", 79: "ShareAcknowledge"}
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


def by_newer_groups(server: str) -> None:
    options = {"bootstrap.servers": server, "auto.offset.reset": "earliest"}
    consumer = Consumer({**options, "group.id": "newer", "group.protocol": "consumer"})
    consumer.subscribe(["rd"])
    assert consumer.poll(PATIENCE_SECONDS) is not None
    consumer.close()
    sharing = {"group.id": "shared", "share.acknowledgement.mode": "explicit"}
    worker = ShareConsumer({"bootstrap.servers": server, **sharing})
    worker.subscribe(["rd"])
    found: list[Message] = []

    def is_shared() -> bool:
        found.extend(worker.poll(0.2))
        return bool(found)

    wait_until(is_shared, "a record to share")
    worker.acknowledge(found[0], AcknowledgeType.ACCEPT)
    worker.commit_sync(timeout=PATIENCE_SECONDS)
    worker.close()


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
    """Two requests of each API and version, without sizes: the shortest, and the longest, in which
    most can be wrong."""
    frames = sorted((frame for heard in proxy.heard for frame in frames_of(heard)), key=len)
    shortest = {frame[:4]: frame for frame in reversed(frames)}
    longest = {frame[:4]: frame for frame in frames}
    # In an order of their own, so that a seed means the same each time.
    return [one[kind] for kind in sorted(longest) for one in (shortest, longest)]


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
    by_newer_groups(proxy.address)
    proxy.cut()
    requests = recorded(proxy)
    assert len(requests) > 40
    keys = {int.from_bytes(one[:2], "big") for one in requests}
    assert keys >= OF_NEWER_GROUPS.keys()
    memory = psutil.Process(broker.process.pid).memory_info
    before = memory().rss
    for seed in SEEDS:
        send_changed(broker, address, requests, seed)
        why = f"after the seed {seed}"
        wait_until(lambda: metric(broker, "kafka_connections") == 0, f"no connections {why}")
        assert metric(broker, "kafka_buffer_bytes") == 0, why
        assert memory().rss < before + GROWTH_BYTES_MAX, why
        failed = broker.messages("a request failed")
        assert failed == [], f"{why}: {failed[0]['exception']}"
        assert broker.messages("a callback failed") == [], why
    assert metric(broker, "kafka_requests_invalid_total") > CHANGES * len(SEEDS) / 10
    assert broker.stop() == 0


def send_changed(
    broker: BrokerProcess, address: tuple[str, int], requests: list[bytes], seed: int
) -> None:
    chance = random.Random(seed)
    for number in range(CHANGES):
        where = f"change {number} of the seed {seed}"
        with socket.create_connection(address, timeout=PATIENCE_SECONDS) as connection:
            with suppress(OSError):
                for _ in range(chance.randint(1, 3)):
                    connection.sendall(changed(chance.choice(requests), chance))
            if number % 100 == 0:
                # Whoever comes meanwhile is served.
                assert broker.process.poll() is None, where
                with socket.create_connection(address, timeout=PATIENCE_SECONDS) as other:
                    other.sendall(API_VERSIONS)
                    assert other.recv(8)[4:] == b"\0\0\0\x07", where
