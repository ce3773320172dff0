"""An hour's worth of load by Kafka's clients in minutes: what the broker holds does not grow with
what it has done.

`make test-soak` passes 3.6 million records, a thousand a second for an hour; by default it is a
short look at the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from soak.sizes import sized

# Records of a round.
ROUND = 5000
WARM_UP = sized(4, 40)
ROUNDS = sized(6, 3_600_000 // ROUND)
# What the allocator may keep of one round or another: pieces, not records. Ten bytes kept for each
# record that passed would be more, in the full run.
GROWTH_BYTES_MAX = 32 << 20
VALUE = b"x" * 100
# Small, so that retention has segments to remove.
RETENTION = {"retention.bytes": "4000000", "segment.bytes": "1000000", "retention.ms": "60000"}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    flags = ("--kafka", "127.0.0.1:0", "--fsync", "none", "--offsets-retention", "1m")
    with BrokerProcess(str(tmp_path), *flags) as one:
        yield one.wait_until_ready()


class Clients:
    """Those that stay for all rounds."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.where: dict[str, Any] = {"bootstrap.servers": broker.kafka}
        self.admin = AdminClient(self.where)
        self.make("steady")
        self.producer = Producer({**self.where, "compression.type": "lz4", "linger.ms": 5})
        self.consumer = Consumer(
            {**self.where, "group.id": "steady", "auto.offset.reset": "earliest"}
        )
        self.consumer.subscribe(["steady"])

    def make(self, topic: str) -> None:
        new = NewTopic(topic, 3, 1, config=RETENTION)
        self.admin.create_topics([new])[topic].result(PATIENCE_SECONDS)

    def round(self, number: int) -> None:
        """What clients do, right and wrong, with a topic and groups that are new and gone in the
        end."""
        self._pass_records()
        topic = f"round-{number}"
        self.make(topic)
        with Producer({**self.where, "enable.idempotence": True}) as producer:
            for _ in range(200):
                producer.produce(topic, VALUE)
            assert producer.flush(PATIENCE_SECONDS) == 0
        self._groups(topic, number)
        self._mistakes(number)
        self.admin.delete_topics([topic])[topic].result(PATIENCE_SECONDS)

    def _pass_records(self) -> None:
        for count in range(ROUND):
            self.producer.produce("steady", VALUE)
            if count % 500 == 0:
                self.producer.poll(0)
        assert self.producer.flush(PATIENCE_SECONDS) == 0
        found = 0
        while found < ROUND:
            found += len(self.consumer.consume(500, PATIENCE_SECONDS))
        self.consumer.commit(asynchronous=False)

    def _groups(self, topic: str, number: int) -> None:
        """One that uses offsets, one whose members the broker deals out to, and one with leases."""
        alone = Consumer({**self.where, "group.id": f"alone-{number}"})
        alone.assign([TopicPartition(topic, 0, 0)])
        alone.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
        alone.close()
        dealt = Consumer(
            {
                **self.where,
                "group.id": f"dealt-{number}",
                "group.protocol": "consumer",
                "auto.offset.reset": "earliest",
            }
        )
        dealt.subscribe([topic])
        assert len(dealt.consume(200, PATIENCE_SECONDS)) == 200
        dealt.close()
        worker = ShareConsumer({**self.where, "group.id": f"shared-{number}"})
        worker.subscribe([topic])
        found = 0
        while found < 200:
            found += len(worker.poll(PATIENCE_SECONDS))
        worker.commit_sync(timeout=PATIENCE_SECONDS)
        worker.close()
        groups = [f"{kind}-{number}" for kind in ("alone", "dealt", "shared")]
        for deleted in self.admin.delete_consumer_groups(groups).values():
            deleted.result(PATIENCE_SECONDS)

    def _mistakes(self, number: int) -> None:
        host, _, port = self.broker.kafka.rpartition(":")
        # One says that it has megabytes, and sends next to nothing.
        much = (number * 100_003 % 90_000_000).to_bytes(4, "big") + os.urandom(100)
        starts = (b"GET / HTTP/1.1\r\n\r\n", b"\0\1\0\0half a request", much, b"")
        for start in starts:
            with socket.create_connection((host, int(port))) as broken:
                broken.sendall(start)

    def close(self) -> None:
        self.producer.close()
        self.consumer.close()


def metric(broker: BrokerProcess, name: str) -> float:
    page = broker.get("/metrics", listener="metrics").text
    found = [line for line in page.splitlines() if line.startswith(f"millstream_{name} ")]
    return float(found[0].split()[1])


def test_memory_is_flat_under_the_load_of_kafka_clients(broker: BrokerProcess) -> None:
    process = psutil.Process(broker.process.pid)
    clients = Clients(broker)
    for number in range(WARM_UP):
        clients.round(number)
    files, before = process.num_fds(), process.memory_info().rss
    for number in range(WARM_UP, WARM_UP + ROUNDS):
        clients.round(number)
    after = process.memory_info().rss
    assert after - before < GROWTH_BYTES_MAX, f"{before} bytes before, {after} after"
    clients.close()
    wait_until(lambda: metric(broker, "kafka_connections") == 1, "clients to have left")
    assert metric(broker, "kafka_buffer_bytes") == 0
    # Segments come and go.
    wait_until(lambda: process.num_fds() <= files + 10, "the files of clients that left")
    assert not [one for one in broker.messages() if one["level"] == "error"]
    assert broker.stop() == 0
