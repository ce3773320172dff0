"""The batches that librdkafka writes, as it writes them.

Its producer comes with a broker in memory for its own tests. Messages are sent to that one, and
the stored bytes fetched back over a plain socket, without any client in between. The mock broker
patches the base offset, as every broker does, and nothing else.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import TypeAlias

from confluent_kafka import Producer

Sent: TypeAlias = tuple[int, bytes | None, bytes | None, Sequence[tuple[str, bytes | None]]]

TOPIC = "captured"
_FETCH_KEY = 1
_FETCH_VERSION = 4
_BYTES_MAX = 64 * 2**20


def capture(records: Sequence[Sent], **settings: object) -> bytes:
    """All batches of partition 0 after these records were produced to it."""
    # One batch, which `flush` sends: a fetch from the mock broker gives one at a time, and a busy
    # machine must not end it early.
    producer = Producer({"test.mock.num.brokers": 1, "linger.ms": 60_000, **settings})
    for timestamp, key, value, headers in records:
        producer.produce(
            TOPIC, value=value, key=key, headers=list(headers), timestamp=timestamp, partition=0
        )
    assert producer.flush(60) == 0
    broker = next(iter(producer.list_topics(TOPIC, timeout=60).brokers.values()))
    with socket.create_connection((broker.host, broker.port), timeout=60) as connection:
        connection.sendall(_fetch_request())
        return _records_of(_read_answer(connection))


def _fetch_request() -> bytes:
    topic = TOPIC.encode()
    body = (
        struct.pack(">hhih", _FETCH_KEY, _FETCH_VERSION, 1, -1)  # key, version, id, no client id
        + struct.pack(">iiiib", -1, 1000, 1, _BYTES_MAX, 0)  # replica, wait, least, most, isolation
        + struct.pack(">ih", 1, len(topic))
        + topic
        + struct.pack(">iiqi", 1, 0, 0, _BYTES_MAX)  # one partition: index, offset, most
    )
    return struct.pack(">i", len(body)) + body


def _read_answer(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as stream:
        (size,) = struct.unpack(">i", stream.read(4))
        return stream.read(size)


def _records_of(answer: bytes) -> bytes:
    # Correlation id, throttle time, one topic with its name, one partition.
    position = 4 + 4 + 4
    (name_bytes,) = struct.unpack_from(">h", answer, position)
    position += 2 + name_bytes + 4
    _, error, _, _, aborted = struct.unpack_from(">ihqqi", answer, position)
    assert error == 0
    position += struct.calcsize(">ihqqi") + max(aborted, 0) * 16
    (size,) = struct.unpack_from(">i", answer, position)
    return answer[position + 4 : position + 4 + size]
