"""A member of a group that reads until it is told to leave, or is killed: `crew_member.py CLIENT
SERVER GROUP TOPIC WAY JOURNAL`.

WAY is how partitions are dealt out. What the member has read it writes to the journal as it reads
it, past any buffer, and commits it afterwards. At a SIGTERM it leaves as one should.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Short, so that a death is soon noticed; a machine under load still sends in time.
SESSION_MS, HEARTBEAT_MS = 3000, 200


class Journal:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, values: Iterable[bytes | None]) -> None:
        os.write(self._file, b"".join((value or b"") + b"\n" for value in values))


class Task(NamedTuple):
    server: str
    group: str
    topic: str
    way: str
    journal: Journal
    goes_on: Callable[[], bool]


# Each imports its client itself: a member needs one.


def by_librdkafka(task: Task) -> None:
    from confluent_kafka import Consumer

    options: dict[str, Any] = {
        "bootstrap.servers": task.server,
        "group.id": task.group,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "reconnect.backoff.max.ms": 200,
    }
    if task.way == "consumer":
        options["group.protocol"] = task.way
    else:
        options["partition.assignment.strategy"] = task.way
        options["session.timeout.ms"] = SESSION_MS
        options["heartbeat.interval.ms"] = HEARTBEAT_MS
    consumer = Consumer(options)
    consumer.subscribe([task.topic])
    while task.goes_on():
        found = [one for one in consumer.consume(100, 0.1) if one.error() is None]
        if found:
            task.journal.write(one.value() for one in found)
            consumer.commit(asynchronous=True)
    consumer.close()


def by_kafka_python(task: Task) -> None:
    from kafka import KafkaConsumer
    from kafka.coordinator.assignors import cooperative_sticky, roundrobin
    from kafka.coordinator.assignors import range as by_range
    from kafka.coordinator.assignors.sticky import sticky_assignor
    from kafka.errors import CommitFailedError

    assignors = {
        "range": by_range.RangePartitionAssignor,
        "roundrobin": roundrobin.RoundRobinPartitionAssignor,
        "sticky": sticky_assignor.StickyPartitionAssignor,
        "cooperative-sticky": cooperative_sticky.CooperativeStickyAssignor,
    }
    consumer = KafkaConsumer(
        task.topic,
        bootstrap_servers=task.server,
        group_id=task.group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        partition_assignment_strategy=[assignors[task.way]],
    )
    while task.goes_on():
        found = consumer.poll(timeout_ms=100).values()
        if found:
            task.journal.write(one.value for records in found for one in records)
            try:
                consumer.commit()
            except CommitFailedError:
                # The others have moved on; whoever has the partition now reads it again.
                continue
    consumer.close()


async def by_aiokafka(task: Task) -> None:
    from aiokafka import AIOKafkaConsumer
    from aiokafka.coordinator.assignors.range import RangePartitionAssignor
    from aiokafka.coordinator.assignors.roundrobin import (
        RoundRobinPartitionAssignor,
    )
    from aiokafka.coordinator.assignors.sticky.sticky_assignor import (
        StickyPartitionAssignor,
    )
    from aiokafka.errors import CommitFailedError, IllegalStateError

    assignors = {
        "range": RangePartitionAssignor,
        "roundrobin": RoundRobinPartitionAssignor,
        "sticky": StickyPartitionAssignor,
    }
    consumer = AIOKafkaConsumer(
        task.topic,
        bootstrap_servers=task.server,
        group_id=task.group,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        session_timeout_ms=SESSION_MS,
        heartbeat_interval_ms=HEARTBEAT_MS,
        partition_assignment_strategy=(assignors[task.way],),
    )
    await consumer.start()
    while task.goes_on():
        found = (await consumer.getmany(timeout_ms=100)).values()
        if found:
            task.journal.write(one.value for records in found for one in records)
            try:
                await consumer.commit()
            except (CommitFailedError, IllegalStateError):
                continue
    await consumer.stop()


def main(arguments: list[str]) -> None:
    client, server, group, topic, way, path = arguments
    is_over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: is_over.append(number))
    task = Task(server, group, topic, way, Journal(path), lambda: not is_over)
    if client == "aiokafka":
        asyncio.run(by_aiokafka(task))
    else:
        {"librdkafka": by_librdkafka, "kafka-python": by_kafka_python}[client](task)


if __name__ == "__main__":
    main(sys.argv[1:])
