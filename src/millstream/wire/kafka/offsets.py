"""OffsetCommit and OffsetFetch, by hand: consumers send them every few seconds, with every
partition that they have.

    OffsetCommit    2-9    group, generation, member, instance (7-), retention (2-4), topics of
                           partitions: index, offset, leader epoch (6-), metadata
    OffsetFetch     1-9    group, topics of partitions; from 8 on many groups, from 9 on the member
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from millstream.wire.kafka.primitives import (
    INT16,
    INT32,
    INT64,
    NO_TAGS,
    Cursor,
    count,
    nullable_string,
    string,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from millstream.wire.kafka.primitives import Pieces

COMMIT_VERSIONS = (2, 9)
COMMIT_FLEXIBLE = 8
FETCH_VERSIONS = (1, 9)
FETCH_FLEXIBLE = 6
# What is said of an offset that nobody committed.
NO_OFFSET = -1
NO_EPOCH = -1

_INDEX_OFFSET = Struct(">iq")
_INDEX_CODE = Struct(">ih")
_NO_THROTTLE = INT32.pack(0)


class CommittedPartition(NamedTuple):
    topic: str
    partition: int
    offset: int
    metadata: str
    leader_epoch: int = NO_EPOCH


class CommitAsked(NamedTuple):
    group: str
    generation: int
    member_id: str
    instance_id: str | None
    # Topics in the order of the request, which is that of the answer.
    topics: list[tuple[str, list[CommittedPartition]]]


def read_commit(body: memoryview, version: int) -> CommitAsked:
    cursor = Cursor(body, flexible=version >= COMMIT_FLEXIBLE)
    group = cursor.string()
    (generation,) = cursor.unpack(INT32)
    member_id = cursor.string()
    instance_id = cursor.nullable_string() if version >= 7 else None
    if version <= 4:
        cursor.unpack(INT64)

    def partition(topic: str) -> CommittedPartition:
        index, offset = cursor.unpack(_INDEX_OFFSET)
        epoch = cursor.unpack(INT32)[0] if version >= 6 else NO_EPOCH
        metadata = cursor.nullable_string() or ""
        return CommittedPartition(topic, index, offset, metadata, epoch)

    topics = _topics(cursor, partition, 13)
    cursor.end()
    return CommitAsked(group, generation, member_id, instance_id, topics)


def commit_answer(version: int, topics: Sequence[tuple[str, Sequence[tuple[int, int]]]]) -> Pieces:
    """Of each topic its partitions, with the code of each."""
    flexible = version >= COMMIT_FLEXIBLE
    end = NO_TAGS if flexible else b""
    out = [_NO_THROTTLE] if version >= 3 else []
    out.append(count(len(topics), flexible))
    for topic, partitions in topics:
        out.append(string(topic, flexible) + count(len(partitions), flexible))
        out += [_INDEX_CODE.pack(*one) + end for one in partitions]
        out.append(end)
    out.append(end)
    return [b"".join(out)]


class FetchGroup(NamedTuple):
    group: str
    # None: everything that it committed.
    topics: list[tuple[str, list[int]]] | None
    member_id: str | None = None
    epoch: int = -1


def read_fetch(body: memoryview, version: int) -> list[FetchGroup]:
    cursor = Cursor(body, flexible=version >= FETCH_FLEXIBLE)
    if version >= 8:
        groups = [_read_group(cursor, version) for _ in range(cursor.count(3))]
    else:
        groups = [FetchGroup(cursor.string(), _asked_topics(cursor))]
    if version >= 7:
        # Whether to wait for transactions: there are none.
        cursor.take(1)
    cursor.end()
    return groups


def _read_group(cursor: Cursor, version: int) -> FetchGroup:
    group = cursor.string()
    member_id, epoch = None, -1
    if version >= 9:
        member_id = cursor.nullable_string()
        (epoch,) = cursor.unpack(INT32)
    topics = _asked_topics(cursor)
    cursor.skip_tags()
    return FetchGroup(group, topics, member_id, epoch)


def _asked_topics(cursor: Cursor) -> list[tuple[str, list[int]]] | None:
    number = cursor.nullable_count(4 if cursor.flexible else 6)
    if number is None:
        return None
    topics = []
    for _ in range(number):
        topic = cursor.string()
        numbers = [cursor.unpack(INT32)[0] for _ in range(cursor.count(4))]
        cursor.skip_tags()
        topics.append((topic, numbers))
    return topics


class FoundOffset(NamedTuple):
    partition: int
    offset: int
    metadata: str
    code: int
    leader_epoch: int = NO_EPOCH


class FoundGroup(NamedTuple):
    group: str
    topics: Sequence[tuple[str, Sequence[FoundOffset]]]
    code: int


def fetch_answer(version: int, groups: Sequence[FoundGroup]) -> Pieces:
    flexible = version >= FETCH_FLEXIBLE
    end = NO_TAGS if flexible else b""
    out = [_NO_THROTTLE] if version >= 3 else []
    if version >= 8:
        out.append(count(len(groups), flexible))
    for group in groups:
        if version >= 8:
            out.append(string(group.group, flexible))
        out.append(count(len(group.topics), flexible))
        for topic, partitions in group.topics:
            out.append(string(topic, flexible) + count(len(partitions), flexible))
            for one in partitions:
                out.append(_INDEX_OFFSET.pack(one.partition, one.offset))
                if version >= 5:
                    out.append(INT32.pack(one.leader_epoch))
                out += [nullable_string(one.metadata, flexible), INT16.pack(one.code), end]
            out.append(end)
        if version >= 2:
            out.append(INT16.pack(group.code))
        if version >= 8:
            out.append(end)
    out.append(end)
    return [b"".join(out)]


def _topics(
    cursor: Cursor, partition: Callable[[str], CommittedPartition], partition_bytes_min: int
) -> list[tuple[str, list[CommittedPartition]]]:
    topics = []
    for _ in range(cursor.count(2)):
        topic = cursor.string()
        partitions = []
        for _ in range(cursor.count(partition_bytes_min)):
            partitions.append(partition(topic))
            cursor.skip_tags()
        cursor.skip_tags()
        topics.append((topic, partitions))
    return topics
