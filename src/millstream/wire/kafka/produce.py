"""Produce, versions 0 to 9. Batches stay where they are in the request.

    request    transactional id (nullable STRING, from 3), acks (INT16), timeout (INT32),
               topics: name, partitions: index (INT32), records (nullable BYTES)
    response   topics: name, partitions: index (INT32), error (INT16), base offset (INT64),
               append time (INT64, from 2), log start offset (INT64, from 5),
               record errors (ARRAY, from 8), error message (nullable STRING, from 8);
               throttle time (INT32, from 1)

Versions 0 to 2 carry old message formats. They are advertised, because old clients compress nothing
for a broker without them, and their records are refused.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.primitives import (
    INT32,
    NO_TAGS,
    Cursor,
    Pieces,
    count,
    nullable_string,
    string,
)

KEY = 0
VERSIONS = (0, 9)
FLEXIBLE_FROM = 9
# The first version with the batches that are stored here.
BATCHES_FROM = 3

_ACKS_AND_TIMEOUT = Struct(">hi")
# A topic has a name and a count; a partition an index and a length.
_TOPIC_BYTES_MIN = 2
_PARTITION_BYTES_MIN = 5

_RESULT_0 = Struct(">ihq")
_RESULT_2 = Struct(">ihqq")
_RESULT_5 = Struct(">ihqqq")
NO_OFFSET = -1
NO_TIME = -1


class Part(NamedTuple):
    """What a request has for one partition."""

    number: int
    records: memoryview | None


class Request(NamedTuple):
    transactional_id: str | None
    acks: int
    topics: list[tuple[str, list[Part]]]


class Result(NamedTuple):
    number: int
    code: int
    base_offset: int = NO_OFFSET
    append_time_ms: int = NO_TIME
    start_offset: int = NO_OFFSET
    message: str | None = None


def read(body: memoryview, version: int) -> Request:
    flexible = version >= FLEXIBLE_FROM
    cursor = Cursor(body, flexible=flexible)
    transactional_id = cursor.nullable_string() if version >= BATCHES_FROM else None
    acks, _ = cursor.unpack(_ACKS_AND_TIMEOUT)
    topics = []
    for _ in range(cursor.count(_TOPIC_BYTES_MIN)):
        name = cursor.string()
        parts = []
        for _ in range(cursor.count(_PARTITION_BYTES_MIN)):
            number = cursor.unpack(INT32)[0]
            parts.append(Part(number, cursor.nullable_bytes()))
            if flexible:
                cursor.skip_tags()
        topics.append((name, parts))
        if flexible:
            cursor.skip_tags()
    cursor.end()
    return Request(transactional_id, acks, topics)


def response(topics: list[tuple[str, list[Result]]], version: int) -> Pieces:
    flexible = version >= FLEXIBLE_FROM
    out = [count(len(topics), flexible)]
    for name, results in topics:
        out += (string(name, flexible), count(len(results), flexible))
        for one in results:
            out.append(_result(one, version))
        if flexible:
            out.append(NO_TAGS)
    if version >= 1:
        out.append(b"\0\0\0\0")
    if flexible:
        out.append(NO_TAGS)
    return [b"".join(out)]


def _result(one: Result, version: int) -> bytes:
    number, code, base_offset, append_time_ms, start_offset, message = one
    if version < 2:
        return _RESULT_0.pack(number, code, base_offset)
    if version < 5:
        return _RESULT_2.pack(number, code, base_offset, append_time_ms)
    fixed = _RESULT_5.pack(number, code, base_offset, append_time_ms, start_offset)
    if version < 8:
        return fixed
    if version < FLEXIBLE_FROM:
        return fixed + b"\0\0\0\0" + nullable_string(message, False)
    if message is None:
        # No errors of single records, no message, no tagged fields.
        return fixed + b"\1\0\0"
    return fixed + b"\1" + nullable_string(message, True) + NO_TAGS
