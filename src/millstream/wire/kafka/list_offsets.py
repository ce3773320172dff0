"""ListOffsets, versions 1 to 7.

request    replica id (INT32), isolation (INT8, from 2),
           topics: name, partitions: index (INT32), leader epoch (INT32, from 4),
           timestamp (INT64)
response   throttle time (INT32, from 2),
           topics: name, partitions: index (INT32), error (INT16), timestamp, offset
           (INT64 each), leader epoch (INT32, from 4)
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.primitives import INT32, NO_TAGS, Cursor, Pieces, count, string

KEY = 2
VERSIONS = (1, 7)
FLEXIBLE_FROM = 6

# Instead of a time: the end, the start, the record with the newest timestamp.
LATEST, EARLIEST, NEWEST = -1, -2, -3
NEWEST_FROM = 7
NO_EPOCH = -1
# Where there is no such record.
NOWHERE = -1

_HEAD_2 = Struct(">ib")
_PART_1 = Struct(">iq")
_PART_4 = Struct(">iiq")
_FOUND_1 = Struct(">ihqq")
_FOUND_4 = Struct(">ihqqi")
_TOPIC_BYTES_MIN = 2


class Part(NamedTuple):
    number: int
    leader_epoch: int
    timestamp_ms: int


class Found(NamedTuple):
    number: int
    code: int
    timestamp_ms: int = NOWHERE
    offset: int = NOWHERE
    leader_epoch: int = NO_EPOCH


def read(body: memoryview, version: int) -> list[tuple[str, list[Part]]]:
    flexible = version >= FLEXIBLE_FROM
    cursor = Cursor(body, flexible=flexible)
    cursor.unpack(_HEAD_2 if version >= 2 else INT32)
    layout = _PART_4 if version >= 4 else _PART_1
    topics = []
    for _ in range(cursor.count(_TOPIC_BYTES_MIN)):
        name = cursor.string()
        parts = []
        for _ in range(cursor.count(layout.size)):
            fields = cursor.unpack(layout)
            parts.append(Part(fields[0], fields[1] if version >= 4 else NO_EPOCH, fields[-1]))
            cursor.skip_tags()
        topics.append((name, parts))
        cursor.skip_tags()
    cursor.end()
    return topics


def response(topics: list[tuple[str, list[Found]]], version: int) -> Pieces:
    flexible = version >= FLEXIBLE_FROM
    out = [b"\0\0\0\0"] if version >= 2 else []
    out.append(count(len(topics), flexible))
    for name, found in topics:
        out += (string(name, flexible), count(len(found), flexible))
        for one in found:
            out.append(_FOUND_4.pack(*one) if version >= 4 else _FOUND_1.pack(*one[:4]))
            if flexible:
                out.append(NO_TAGS)
        if flexible:
            out.append(NO_TAGS)
    if flexible:
        out.append(NO_TAGS)
    return [b"".join(out)]
