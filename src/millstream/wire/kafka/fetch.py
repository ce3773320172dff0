"""Fetch, versions 4 to 12. Batches go out as they lie in the log.

request    replica id, longest wait in ms, least bytes, most bytes (INT32 each), isolation
           (INT8), session id and epoch (INT32, from 7),
           topics: name, partitions: index (INT32), leader epoch (INT32, from 9), offset
           (INT64), last fetched epoch (INT32, from 12), log start (INT64, from 5), most bytes
           (INT32);
           forgotten topics (from 7): name, indexes; rack (STRING, from 11)
response   throttle time (INT32), error (INT16) and session id (INT32, from 7),
           topics: name, partitions: index (INT32), error (INT16), high watermark (INT64), last
           stable offset (INT64), log start (INT64, from 5), aborted transactions (nullable
           ARRAY), preferred replica (INT32, from 11), records (nullable BYTES)
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from millstream.wire.kafka.primitives import (
    INT32,
    NO_TAGS,
    Cursor,
    Pieces,
    count,
    size_of,
    string,
    varint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.wire.kafka.primitives import Piece

KEY = 1
VERSIONS = (4, 12)
FLEXIBLE_FROM = 12
SESSIONS_FROM = 7

NO_SESSION = 0
# Of a session: the first fetch opens it, or a full one, and the last closes it.
FIRST_EPOCH, FINAL_EPOCH = 0, -1
NO_EPOCH = -1
NO_OFFSET = -1

_HEAD_4 = Struct(">iiiib")
_HEAD_7 = Struct(">iiiibii")
_PART_4 = Struct(">iqi")
_PART_5 = Struct(">iqqi")
_PART_9 = Struct(">iiqqi")
_PART_12 = Struct(">iiqiqi")
_TOPIC_BYTES_MIN = 2

_ANSWER_7 = Struct(">ihi")
# The length of the records follows.
_GIVEN_4 = Struct(">ihqqii")
_GIVEN_5 = Struct(">ihqqqii")
_GIVEN_11 = Struct(">ihqqqiii")
# Aborted transactions stand between, as a count of none; no preferred replica.
_GIVEN_12 = Struct(">ihqqqbi")


class Part(NamedTuple):
    """What is asked of one partition."""

    number: int
    leader_epoch: int
    offset: int
    bytes_max: int


class Request(NamedTuple):
    wait_max_ms: int
    bytes_min: int
    bytes_max: int
    session_id: int
    session_epoch: int
    topics: list[tuple[str, list[Part]]]
    forgotten: list[tuple[str, list[int]]]


class Given(NamedTuple):
    """What one partition gives."""

    number: int
    code: int
    high_watermark: int = NO_OFFSET
    start_offset: int = NO_OFFSET
    # Whole batches, in order.
    records: Sequence[Piece] = ()


def read(body: memoryview, version: int) -> Request:
    flexible = version >= FLEXIBLE_FROM
    cursor = Cursor(body, flexible=flexible)
    session_id, session_epoch = NO_SESSION, FINAL_EPOCH
    if version >= SESSIONS_FROM:
        head = cursor.unpack(_HEAD_7)
        session_id, session_epoch = head[5:]
    else:
        head = cursor.unpack(_HEAD_4)
    topics = []
    layout = _part_layout(version)
    for _ in range(cursor.count(_TOPIC_BYTES_MIN)):
        name = cursor.string()
        parts = []
        for _ in range(cursor.count(layout.size)):
            fields = cursor.unpack(layout)
            if version >= FLEXIBLE_FROM:
                number, leader_epoch, offset, _, _, bytes_max = fields
                cursor.skip_tags()
            elif version >= 9:
                number, leader_epoch, offset, _, bytes_max = fields
            else:
                number, offset, bytes_max = fields[0], fields[1], fields[-1]
                leader_epoch = NO_EPOCH
            parts.append(Part(number, leader_epoch, offset, bytes_max))
        topics.append((name, parts))
        if flexible:
            cursor.skip_tags()
    forgotten = _forgotten(cursor) if version >= SESSIONS_FROM else []
    if version >= 11:
        cursor.nullable_string()
    cursor.end()
    _, wait_max_ms, bytes_min, bytes_max = head[:4]
    return Request(wait_max_ms, bytes_min, bytes_max, session_id, session_epoch, topics, forgotten)


def _part_layout(version: int) -> Struct:
    if version >= FLEXIBLE_FROM:
        return _PART_12
    if version >= 9:
        return _PART_9
    return _PART_5 if version >= 5 else _PART_4


def _forgotten(cursor: Cursor) -> list[tuple[str, list[int]]]:
    forgotten = []
    for _ in range(cursor.count(_TOPIC_BYTES_MIN)):
        name = cursor.string()
        numbers = [cursor.unpack(INT32)[0] for _ in range(cursor.count(INT32.size))]
        forgotten.append((name, numbers))
        cursor.skip_tags()
    return forgotten


def response(
    code: int, session_id: int, topics: Sequence[tuple[str, Sequence[Given]]], version: int
) -> Pieces:
    """Records are pieces of their own, so nothing of them is copied."""
    flexible = version >= FLEXIBLE_FROM
    # What was not given out yet; it grows until records follow.
    head = bytearray(_ANSWER_7.pack(0, code, session_id) if version >= 7 else bytes(4))
    head += count(len(topics), flexible)
    out: Pieces = []
    for name, parts in topics:
        head += string(name, flexible)
        head += count(len(parts), flexible)
        for part in parts:
            head += _given(part, version)
            if part.records:
                out += (bytes(head), *part.records)
                head.clear()
            if flexible:
                head += NO_TAGS
        if flexible:
            head += NO_TAGS
    if flexible:
        head += NO_TAGS
    out.append(bytes(head))
    return out


def _given(part: Given, version: int) -> bytes:
    """All of a partition before its records."""
    number, code, high_watermark, start_offset, records = part
    size = size_of(records)
    if version >= FLEXIBLE_FROM:
        fixed = _GIVEN_12.pack(number, code, high_watermark, high_watermark, start_offset, 1, -1)
        return fixed + varint(size + 1)
    if version >= 11:
        return _GIVEN_11.pack(
            number, code, high_watermark, high_watermark, start_offset, 0, -1, size
        )
    if version >= 5:
        return _GIVEN_5.pack(number, code, high_watermark, high_watermark, start_offset, 0, size)
    return _GIVEN_4.pack(number, code, high_watermark, high_watermark, 0, size)
