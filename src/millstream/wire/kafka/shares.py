"""ShareFetch and ShareAcknowledge (KIP-932, with KIP-1222's renewals), by hand. All versions are
flexible.

    ShareFetch        1-2   group, member, session epoch, most wait, least bytes, most bytes, most
                            records, batch size, acquire mode and whether it renews (2-), topics of
                            partitions: index, acknowledgements; forgotten topics
    ShareAcknowledge  1-2   group, member, session epoch, whether it renews (2-), topics as above
    acknowledgement         first offset, last offset, types (INT8 each)

An answer to a fetch has batches of records, and beside them which of their offsets the member has
been given, with how often. Here a batch holds just those, so the two say the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import Struct
from typing import NamedTuple

from millstream.wire.kafka.group_beats import ID_BYTES, Partitions, read_partitions
from millstream.wire.kafka.primitives import (
    INT16,
    INT32,
    NO_TAGS,
    Cursor,
    Pieces,
    count,
    nullable_string,
    size_of,
    varint,
)

FETCH, ACKNOWLEDGE = 78, 79
VERSIONS = (1, 2)
RENEWALS_FROM = 2
_NO_THROTTLE = INT32.pack(0)
_LIMITS = Struct(">iiiiii")
_RANGE = Struct(">qq")
_GIVEN = Struct(">qqh")
_LEADER = Struct(">ii")
# Two offsets, a count, tags.
_ACKNOWLEDGEMENT_BYTES_MIN = 18


class Acknowledged(NamedTuple):
    first: int
    last: int
    # One byte each.
    kinds: bytes


class AskedPartition(NamedTuple):
    topic: bytes
    partition: int
    acknowledged: list[Acknowledged]


class ShareAsked(NamedTuple):
    group: str
    member_id: str
    epoch: int
    partitions: list[AskedPartition]
    is_renewal: bool = False
    wait_ms: int = 0
    bytes_max: int = 0
    count_max: int = 0
    forgotten: Partitions = ()


def read_fetch(body: memoryview, version: int) -> ShareAsked:
    cursor = Cursor(body, flexible=True)
    group, member_id = cursor.nullable_string() or "", cursor.nullable_string() or ""
    epoch, wait_ms, _, bytes_max, count_max, _ = cursor.unpack(_LIMITS)
    is_renewal = False
    if version >= RENEWALS_FROM:
        cursor.take(1)
        is_renewal = cursor.take(1)[0] != 0
    partitions = _partitions(cursor)
    forgotten = read_partitions(cursor) or ()
    cursor.end()
    return ShareAsked(
        group, member_id, epoch, partitions, is_renewal, wait_ms, bytes_max, count_max, forgotten
    )


def read_acknowledge(body: memoryview, version: int) -> ShareAsked:
    cursor = Cursor(body, flexible=True)
    group, member_id = cursor.nullable_string() or "", cursor.nullable_string() or ""
    (epoch,) = cursor.unpack(INT32)
    is_renewal = version >= RENEWALS_FROM and cursor.take(1)[0] != 0
    partitions = _partitions(cursor)
    cursor.end()
    return ShareAsked(group, member_id, epoch, partitions, is_renewal)


def _partitions(cursor: Cursor) -> list[AskedPartition]:
    found = []
    for _ in range(cursor.count(ID_BYTES + 2)):
        topic = bytes(cursor.take(ID_BYTES))
        for _ in range(cursor.count(6)):
            (number,) = cursor.unpack(INT32)
            acknowledged = []
            for _ in range(cursor.count(_ACKNOWLEDGEMENT_BYTES_MIN)):
                first, last = cursor.unpack(_RANGE)
                kinds = cursor.int8s()
                cursor.skip_tags()
                acknowledged.append(Acknowledged(first, last, kinds))
            cursor.skip_tags()
            found.append(AskedPartition(topic, number, acknowledged))
        cursor.skip_tags()
    return found


class GivenPartition(NamedTuple):
    topic: bytes
    partition: int
    code: int = 0
    message: str | None = None
    acknowledge_code: int = 0
    acknowledge_message: str | None = None
    # Batches of records; and the ranges that the member has: first, last, how often.
    records: Sequence[bytes] = ()
    given: Sequence[tuple[int, int, int]] = ()


def fetch_answer(
    code: int, message: str | None, lock_ms: int, partitions: Sequence[GivenPartition]
) -> Pieces:
    out: Pieces = [_NO_THROTTLE + INT16.pack(code) + nullable_string(message, flexible=True)]
    by_topic = _by_topic(partitions)
    out.append(INT32.pack(lock_ms) + count(len(by_topic), flexible=True))
    for topic, ones in by_topic.items():
        out.append(topic + count(len(ones), flexible=True))
        for one in ones:
            out.append(_outcome(one) + _no_leader())
            out.append(varint(size_of(one.records) + 1))
            out += one.records
            out.append(count(len(one.given), flexible=True))
            out += [_GIVEN.pack(*given) + NO_TAGS for given in one.given]
            out.append(NO_TAGS)
        out.append(NO_TAGS)
    # No endpoints of other brokers.
    out.append(count(0, flexible=True) + NO_TAGS)
    return out


def acknowledge_answer(
    version: int,
    code: int,
    message: str | None,
    lock_ms: int,
    partitions: Sequence[GivenPartition],
) -> Pieces:
    out = [_NO_THROTTLE, INT16.pack(code), nullable_string(message, flexible=True)]
    if version >= RENEWALS_FROM:
        out.append(INT32.pack(lock_ms))
    by_topic = _by_topic(partitions)
    out.append(count(len(by_topic), flexible=True))
    for topic, ones in by_topic.items():
        out += [topic, count(len(ones), flexible=True)]
        for one in ones:
            out.append(INT32.pack(one.partition) + INT16.pack(one.acknowledge_code))
            out.append(nullable_string(one.acknowledge_message, flexible=True))
            out.append(_no_leader() + NO_TAGS)
        out.append(NO_TAGS)
    out.append(count(0, flexible=True) + NO_TAGS)
    return [b"".join(out)]


def _outcome(one: GivenPartition) -> bytes:
    return b"".join(
        (
            INT32.pack(one.partition),
            INT16.pack(one.code),
            nullable_string(one.message, flexible=True),
            INT16.pack(one.acknowledge_code),
            nullable_string(one.acknowledge_message, flexible=True),
        )
    )


def _no_leader() -> bytes:
    """Only who asked the wrong broker is told of another."""
    return _LEADER.pack(-1, -1) + NO_TAGS


def _by_topic(partitions: Sequence[GivenPartition]) -> Mapping[bytes, list[GivenPartition]]:
    found: dict[bytes, list[GivenPartition]] = {}
    for one in partitions:
        found.setdefault(one.topic, []).append(one)
    return found
