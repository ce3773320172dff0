"""Loads of Kafka's protocol, by librdkafka in a process of its own.

    python -m bench.kafka_load '{"server": "127.0.0.1:9092", "what": "produce", …}'

Ours and Apache Kafka are loaded by the same program with the same settings.
"""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from bench.servers import environment

# What one client may have waiting to be sent.
QUEUE_RECORDS, QUEUE_KIB = 1_000_000, 1_000_000
CONSUME_RECORDS = 10_000
# Answers may take this long after the last was due.
GRACE_S = 60.0
# Different keys of `rows`, what its values are made of, and by which chance.
ROW_KEYS = 10_000
# So much text that a value is not one that a compression has just seen, or a piece of it.
ROW_TEXT_BYTES = 4 * 2**20
ROW_LETTERS = b"abcdefghijklmnopqrstuvwxyz0123456789"
ROWS_SEED = 7
# The first records of a latency run find caches cold; they are not counted.
WARM_SHARE = 0.1


class Load(msgspec.Struct, frozen=True):
    server: str
    # `produce`, `rows`, `consume` or `latency`.
    what: str
    topic: str
    partitions: int
    count: int
    record_bytes: int
    # Records a second, of a latency run.
    rate: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """Records a second; or milliseconds from when a record was due until it was consumed."""

    rate: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    late_p99_ms: float = 0.0


def producer_of(load: Load, linger_ms: float) -> Producer:
    producer = Producer(
        {
            "bootstrap.servers": load.server,
            "acks": "all",
            "linger.ms": linger_ms,
            "batch.size": 1_000_000,
            "batch.num.messages": 100_000,
            "queue.buffering.max.messages": QUEUE_RECORDS,
            "queue.buffering.max.kbytes": QUEUE_KIB,
            "log_level": 0,
        }
    )
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        found = producer.list_topics(load.topic, timeout=GRACE_S).topics[load.topic]
        if found.error is None and all(one.leader >= 0 for one in found.partitions.values()):
            return producer
        # A topic that was just made has no leader yet.
        time.sleep(0.05)
    raise RuntimeError(f"the topic {load.topic} was not made in time")


def consumer_of(load: Load, wait_ms: int) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": load.server,
            "group.id": "bench",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": wait_ms,
            "queued.min.messages": 1_000_000,
            "queued.max.messages.kbytes": 200_000,
            "log_level": 0,
        }
    )


def produce(load: Load) -> Outcome:
    producer = producer_of(load, 50)
    value = b"x" * load.record_bytes
    send, topic = producer.produce, load.topic
    begin = time.perf_counter()
    for _ in range(load.count):
        while True:
            try:
                send(topic, value)
                break
            except BufferError:
                producer.poll(0.01)
    if producer.flush(GRACE_S):
        raise RuntimeError("records were not acknowledged in time")
    return Outcome(rate=load.count / (time.perf_counter() - begin))


def rows(load: Load) -> Outcome:
    """Records with keys and with values that differ: the same ones each time."""
    producer = producer_of(load, 50)
    source = random.Random(ROWS_SEED)
    text = bytes(source.choices(ROW_LETTERS, k=ROW_TEXT_BYTES))
    keys = [f"key-{number:05}".encode() for number in range(ROW_KEYS)]
    rest = load.record_bytes - 8
    begin = time.perf_counter()
    for number in range(load.count):
        at = number * rest % (ROW_TEXT_BYTES - rest)
        value = number.to_bytes(8, "big") + text[at : at + rest]
        while True:
            try:
                producer.produce(load.topic, value, keys[number % ROW_KEYS])
                break
            except BufferError:
                producer.poll(0.01)
    if producer.flush(GRACE_S):
        raise RuntimeError("records were not acknowledged in time")
    return Outcome(rate=load.count / (time.perf_counter() - begin))


def consume(load: Load) -> Outcome:
    consumer = consumer_of(load, 500)
    consumer.assign([TopicPartition(load.topic, at, 0) for at in range(load.partitions)])
    deadline = time.monotonic() + GRACE_S
    count, begin = 0, 0.0
    while count < load.count:
        found = consumer.consume(CONSUME_RECORDS, 1.0)
        if not begin and found:
            # Connecting is not what is measured.
            begin = time.perf_counter()
            load = msgspec.structs.replace(load, count=load.count - len(found))
            continue
        count += len(found)
        if time.monotonic() > deadline:
            raise RuntimeError("records did not come in time")
    rate = count / (time.perf_counter() - begin)
    consumer.close()
    return Outcome(rate=rate)


def latency(load: Load) -> Outcome:
    """A record at a time, when it is due, whether or not others arrived."""
    producer, consumer = producer_of(load, 0), consumer_of(load, 500)
    parts = [TopicPartition(load.topic, at) for at in range(load.partitions)]
    for part in parts:
        part.offset = consumer.get_watermark_offsets(part, timeout=GRACE_S)[1]
    consumer.assign(parts)
    # What comes first finds connections to be made; it is not measured.
    for part in parts:
        producer.produce(load.topic, bytes(load.record_bytes), partition=part.partition)
    producer.flush(GRACE_S)
    for _ in parts:
        if consumer.poll(GRACE_S) is None:
            raise RuntimeError("the first record did not come in time")
    # A record has its number in front.
    rest = b"x" * (load.record_bytes - 8)
    seen: list[float] = []
    late: list[float] = []
    sent, interval = 0, 1 / load.rate
    begin = time.perf_counter() + 1.0
    end = begin + load.count * interval + GRACE_S

    def take(messages: list[Message]) -> None:
        now = time.perf_counter()
        for message in messages:
            number = int.from_bytes((message.value() or b"")[:8], "big")
            seen.append(now - (begin + number * interval))

    while len(seen) < load.count:
        now = time.perf_counter()
        if now > end:
            raise RuntimeError(f"{load.count - len(seen)} records never came")
        while sent < load.count and begin + sent * interval <= now:
            producer.produce(load.topic, sent.to_bytes(8, "big") + rest)
            late.append(now - (begin + sent * interval))
            sent += 1
        producer.poll(0)
        # Never long: the next record is due.
        take(consumer.consume(1000, 0.0))
    consumer.close()
    cut = int(load.count * WARM_SHARE)
    seen, late = sorted(seen[cut:]), sorted(late[cut:])
    return Outcome(p50_ms=_ms(seen, 0.5), p99_ms=_ms(seen, 0.99), late_p99_ms=_ms(late, 0.99))


LOADS: dict[str, Callable[[Load], Outcome]] = {
    "produce": produce,
    "rows": rows,
    "consume": consume,
    "latency": latency,
}


def run(load: Load) -> Outcome:
    """In a process of its own."""
    program = [sys.executable, "-m", "bench.kafka_load", msgspec.json.encode(load).decode()]
    output = subprocess.run(program, capture_output=True, check=True, env=environment()).stdout
    return msgspec.json.decode(output, type=Outcome)


def _ms(ordered: list[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] * 1000


if __name__ == "__main__":
    gc.disable()
    asked = msgspec.json.decode(sys.argv[1], type=Load)
    sys.stdout.write(msgspec.json.encode(LOADS[asked.what](asked)).decode() + "\n")
