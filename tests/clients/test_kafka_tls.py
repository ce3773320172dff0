"""Kafka's port with TLS: other people's clients, with the certificates of HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
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
from millstream.spark.manifests import kafka_addresses
from millstream.spark.options import BrokerPlace

# A request of version 0, and its correlation id in bytes 8 to 12.
API_VERSIONS = b"\0\0\0\x0a\0\x12\0\0\0\0\0\x07\xff\xff"
VALUES = [b"secret %d" % number for number in range(20)]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.fixture
def broker(tmp_path: Path, pair: Pair) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path), *KAFKA, *pair.flags, "--topic-partitions", "1") as one:
        yield one.wait_until_ready()


@pytest.fixture
def both(tmp_path: Path, pair: Pair) -> Iterator[BrokerProcess]:
    """A plain address, and one with TLS beside it."""
    flags = (*KAFKA, "--kafka-tls", "127.0.0.1:0", *pair.flags, "--topic-partitions", "1")
    with BrokerProcess(str(tmp_path), *flags) as one:
        yield one.wait_until_ready()


def of_librdkafka(broker: BrokerProcess, pair: Pair, address: str = "") -> dict[str, Any]:
    return {
        "bootstrap.servers": address or broker.kafka,
        "security.protocol": "ssl",
        "ssl.ca.location": str(pair.authority),
    }


def serial(address: str, pair: Pair) -> object:
    """Of the certificate that a new connection is shown."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), PATIENCE_SECONDS) as opened,
        pair.trust().wrap_socket(opened, server_hostname=host) as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return found["serialNumber"]


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
    old = serial(broker.kafka, pair)
    with Producer(of_librdkafka(broker, pair)) as producer:
        producer.produce("orders", b"before")
        assert producer.flush(PATIENCE_SECONDS) == 0
        pair.renew()
        broker.process.send_signal(signal.SIGHUP)
        broker.wait_for("certificate read again")
        assert serial(broker.kafka, pair) != old
        # A connection from before goes on.
        producer.produce("orders", b"after")
        assert producer.flush(PATIENCE_SECONDS) == 0


# ---- a plain address, and one with TLS beside it


def exchange(options: dict[str, Any], group: str) -> list[bytes]:
    """Produce and consume, in a group: all that clients look up an address for."""
    with Producer(options) as producer:
        producer.produce("orders", group.encode())
        assert producer.flush(PATIENCE_SECONDS) == 0
    consumer = Consumer({**options, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe(["orders"])
    found: list[bytes] = []
    try:
        while group.encode() not in found:
            messages = consumer.consume(1, PATIENCE_SECONDS)
            assert messages, found
            found.append(messages[0].value() or b"")
    finally:
        consumer.close()
    return found


def test_both_addresses_are_those_of_one_broker_and_each_leads_back_to_itself(
    both: BrokerProcess, pair: Pair
) -> None:
    plain: dict[str, Any] = {"bootstrap.servers": both.kafka}
    secure = of_librdkafka(both, pair, both.kafka_tls)
    assert exchange(plain, "plain") == [b"plain"]
    assert exchange(secure, "secure") == [b"plain", b"secure"]
    for options, address in ((plain, both.kafka), (secure, both.kafka_tls)):
        admin = AdminClient(options)
        [node] = admin.list_topics(timeout=PATIENCE_SECONDS).brokers.values()
        assert f"{node.host}:{node.port}" == address
        [node] = admin.describe_cluster().result(PATIENCE_SECONDS).nodes
        assert f"{node.host}:{node.port}" == address
        described = admin.describe_consumer_groups(["plain"])["plain"].result(PATIENCE_SECONDS)
        assert f"{described.coordinator.host}:{described.coordinator.port}" == address
    said = {one["listener"]: one["tls"] for one in both.messages("listening")}
    assert (said["kafka"], said["kafka_tls"], said["http"]) == (False, True, True)
    page = httpx.get(both.url("/v1/admin/cluster"), verify=pair.trust(), timeout=PATIENCE_SECONDS)
    [node] = page.json()["nodes"]
    assert (node["kafka"], node["kafka_tls"]) == (both.kafka, both.kafka_tls)


def test_each_address_has_its_own_that_clients_are_told(tmp_path: Path, pair: Pair) -> None:
    told = ("--kafka-advertised", "plain.example:1", "--kafka-tls-advertised", "secure.example:2")
    flags = (*KAFKA, "--kafka-tls", "127.0.0.1:0", *pair.flags, *told)
    with BrokerProcess(str(tmp_path), *flags) as broker:
        broker.wait_until_ready()
        for options, address in (
            ({"bootstrap.servers": broker.kafka}, "plain.example:1"),
            (of_librdkafka(broker, pair, broker.kafka_tls), "secure.example:2"),
        ):
            admin = AdminClient({**options, "log_level": 0})
            [node] = admin.list_topics(timeout=PATIENCE_SECONDS).brokers.values()
            assert f"{node.host}:{node.port}" == address


def test_a_signal_changes_the_certificate_beside_a_plain_address(
    both: BrokerProcess, pair: Pair
) -> None:
    old = serial(both.kafka_tls, pair)
    pair.renew()
    both.process.send_signal(signal.SIGHUP)
    both.wait_for("certificate read again")
    assert serial(both.kafka_tls, pair) != old
    assert exchange({"bootstrap.servers": both.kafka}, "plain") == [b"plain"]


def test_one_limit_of_connections_is_for_both_addresses(tmp_path: Path, pair: Pair) -> None:
    flags = (*KAFKA, "--kafka-tls", "127.0.0.1:0", *pair.flags, "--kafka-connections-max", "2")
    with BrokerProcess(str(tmp_path), *flags) as broker, ExitStack() as opened:
        broker.wait_until_ready()

        def connect(address: str) -> socket.socket:
            host, _, port = address.rpartition(":")
            return opened.enter_context(socket.create_connection((host, int(port)), 60))

        def is_served(connection: socket.socket) -> bool:
            try:
                connection.sendall(API_VERSIONS)
                return connection.recv(8)[4:] == API_VERSIONS[8:12]
            except ConnectionError:
                return False

        first = connect(broker.kafka)
        second = opened.enter_context(
            pair.trust().wrap_socket(connect(broker.kafka_tls), server_hostname="127.0.0.1")
        )
        assert is_served(first)
        assert is_served(second)
        assert not is_served(connect(broker.kafka))
        with suppress(ConnectionError, ssl.SSLError):
            # The limit may show before the two have agreed, or after.
            third = pair.trust().wrap_socket(connect(broker.kafka_tls), server_hostname="127.0.0.1")
            assert not is_served(third)


def test_an_address_with_tls_stands_alone_when_it_is_asked_for_alone(
    tmp_path: Path, pair: Pair
) -> None:
    flags = ("--kafka-tls", "127.0.0.1:0", *pair.flags)
    with BrokerProcess(str(tmp_path), *flags) as broker:
        broker.wait_until_ready()
        assert exchange(of_librdkafka(broker, pair, broker.kafka_tls), "g") == [b"g"]
        assert {one["listener"] for one in broker.messages("listening")} == {
            "http",
            "kafka_tls",
            "metrics",
        }
        assert broker.stop() == 0


def test_without_a_certificate_the_start_says_what_is_missing(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *KAFKA, "--kafka-tls", "127.0.0.1:0") as broker:
        assert broker.process.wait(PATIENCE_SECONDS) == 2
        assert (
            "kafka_tls = '127.0.0.1:0' (flag --kafka-tls) needs a certificate, and there is none; "
            "set tls_cert and tls_key too" in broker.output()
        )


def test_an_address_in_use_is_named_with_its_setting(tmp_path: Path, pair: Pair) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = (*KAFKA, *pair.flags, "--kafka-tls", address)
        with BrokerProcess(str(tmp_path), *flags) as broker:
            assert broker.process.wait(PATIENCE_SECONDS) != 0
            assert f"cannot listen on {address}, the setting kafka_tls" in broker.output()


@pytest.mark.parametrize(("is_secure", "name"), [(None, "kafka_tls"), (False, "kafka")])
def test_spark_asks_http_and_goes_to_the_address_that_speaks_as_it_does(
    both: BrokerProcess, pair: Pair, is_secure: bool | None, name: str
) -> None:
    place = BrokerPlace((), both.url(""), str(pair.authority), is_secure, "spark", 60.0)
    assert kafka_addresses(place) == (getattr(both, name),)
