"""Produce and InitProducerId as a client sends them, and their answers.

Produce has the version 7, the last before the compact forms, and the first with zstd; its layout
is in `produce.py`. InitProducerId has the version 1:

    request    transactional id (nullable STRING), its timeout (INT32)
    response   throttle time (INT32), error (INT16), producer id (INT64), producer epoch (INT16)
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.frames import FIXED, SIZE
from millstream.wire.kafka.primitives import INT32, Cursor, string

PRODUCE, PRODUCE_VERSION = 0, 7
INIT_PRODUCER_ID, INIT_PRODUCER_ID_VERSION = 22, 1
# All replicas that are in sync have it: what an idempotent producer needs.
ACKS_ALL = -1
NO_TEXT = b"\xff\xff"

_ACKS_AND_TIMEOUT = Struct(">hi")
_RESULT = Struct(">ihqqq")
_PRODUCER = Struct(">ihqh")
_TOPIC_BYTES_MIN = 6


class Answered(NamedTuple):
    """What became of one batch."""

    topic: str
    partition: int
    code: int
    base_offset: int


class Producer(NamedTuple):
    id: int
    epoch: int


def framed(key: int, version: int, correlation_id: int, client_id: str, body: bytes) -> bytes:
    """A whole request, of a version without tagged fields."""
    name = client_id.encode()
    head = FIXED.pack(key, version, correlation_id, len(name)) + name
    return b"".join((SIZE.pack(len(head) + len(body)), head, body))


def produce_request(batches: Mapping[tuple[str, int], bytes], timeout_ms: int) -> bytes:
    """One batch for each of several partitions."""
    by_topic: dict[str, list[tuple[int, bytes]]] = {}
    for (topic, partition), batch in batches.items():
        by_topic.setdefault(topic, []).append((partition, batch))
    pieces = [NO_TEXT, _ACKS_AND_TIMEOUT.pack(ACKS_ALL, timeout_ms), INT32.pack(len(by_topic))]
    for topic, parts in by_topic.items():
        pieces += (string(topic, False), INT32.pack(len(parts)))
        for partition, batch in parts:
            pieces += (INT32.pack(partition), INT32.pack(len(batch)), batch)
    return b"".join(pieces)


def read_produced(frame: memoryview) -> list[Answered]:
    """Of a frame with its correlation id."""
    cursor = Cursor(frame, 4, flexible=False)
    found = []
    for _ in range(cursor.count(_TOPIC_BYTES_MIN)):
        topic = cursor.string()
        for _ in range(cursor.count(_RESULT.size)):
            partition, code, base_offset, _, _ = cursor.unpack(_RESULT)
            found.append(Answered(topic, partition, code, base_offset))
    return found


def init_producer_id_request(timeout_ms: int) -> bytes:
    return NO_TEXT + INT32.pack(timeout_ms)


def read_producer(frame: memoryview) -> tuple[int, Producer]:
    """The error, and the producer."""
    _, code, id, epoch = Cursor(frame, 4, flexible=False).unpack(_PRODUCER)
    return code, Producer(id, epoch)
