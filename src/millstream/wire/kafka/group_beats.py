"""Groups that the broker deals out to, by hand: the heartbeats of consumers (KIP-848) and of share
groups (KIP-932), and their descriptions. Every version of all four is flexible.

    ConsumerGroupHeartbeat  0-1   group, member, epoch, instance, rack, rebalance timeout, topics,
                                  pattern (1-), assignor, what it has
    ShareGroupHeartbeat     1     group, member, epoch, rack, topics
    (answer)                      throttle, code, message, member, epoch, interval, assignment

Topics are named by their ids. An assignment may be null: nothing is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple, TypeAlias

from millstream.wire.kafka.primitives import (
    INT16,
    INT32,
    NO_TAGS,
    Cursor,
    Pieces,
    count,
    nullable_string,
    string,
)

CONSUMER_HEARTBEAT, CONSUMER_DESCRIBE = 68, 69
CONSUMER_VERSIONS = (0, 1)
SHARE_HEARTBEAT, SHARE_DESCRIBE = 76, 77
SHARE_VERSIONS = (1, 1)
ID_BYTES = 16
# A member that speaks the consumer protocol itself, and not the classic one.
OWN_PROTOCOL = 1
# Nobody may do nothing: there is no access control.
_NOT_ASKED = INT32.pack(-(2**31))
_NO_THROTTLE = INT32.pack(0)
_NULL, _PRESENT = b"\xff", b"\1"

# Of each topic its id and partitions.
Partitions: TypeAlias = "Sequence[tuple[bytes, Sequence[int]]]"
# The same with names, as descriptions have it.
NamedPartitions: TypeAlias = "Sequence[tuple[bytes, str, Sequence[int]]]"


class BeatAsked(NamedTuple):
    group: str
    member_id: str
    epoch: int
    topics: list[str] | None
    instance_id: str | None = None
    # Below 0: as before.
    rebalance_timeout_ms: int = -1
    pattern: str | None = None
    assignor: str | None = None
    owned: Partitions | None = None


def read_consumer_beat(body: memoryview, version: int) -> BeatAsked:
    cursor = Cursor(body, flexible=True)
    group, member_id = cursor.string(), cursor.string()
    (epoch,) = cursor.unpack(INT32)
    instance_id = cursor.nullable_string()
    cursor.nullable_string()
    (timeout_ms,) = cursor.unpack(INT32)
    topics = _names(cursor)
    pattern = cursor.nullable_string() if version >= 1 else None
    assignor = cursor.nullable_string()
    owned = read_partitions(cursor)
    cursor.end()
    return BeatAsked(
        group, member_id, epoch, topics, instance_id, timeout_ms, pattern, assignor, owned
    )


def read_share_beat(body: memoryview) -> BeatAsked:
    cursor = Cursor(body, flexible=True)
    group, member_id = cursor.string(), cursor.string()
    (epoch,) = cursor.unpack(INT32)
    cursor.nullable_string()
    topics = _names(cursor)
    cursor.end()
    return BeatAsked(group, member_id, epoch, topics)


def _names(cursor: Cursor) -> list[str] | None:
    number = cursor.nullable_count(1)
    return None if number is None else [cursor.string() for _ in range(number)]


def read_partitions(cursor: Cursor) -> Partitions | None:
    number = cursor.nullable_count(ID_BYTES + 1)
    if number is None:
        return None
    found = []
    for _ in range(number):
        id = bytes(cursor.take(ID_BYTES))
        numbers = Struct(f">{cursor.count(4)}i")
        found.append((id, cursor.unpack(numbers)))
        cursor.skip_tags()
    return found


_MEMBER_END = Struct(">ii")


def beat_answer(
    *,
    code: int,
    message: str | None,
    member_id: str | None,
    epoch: int,
    interval_ms: int,
    assignment: Partitions | None,
) -> Pieces:
    out = [_NO_THROTTLE, INT16.pack(code), nullable_string(message, flexible=True)]
    out += [nullable_string(member_id, flexible=True), _MEMBER_END.pack(epoch, interval_ms)]
    if assignment is None:
        out.append(_NULL)
    else:
        out += [_PRESENT, count(len(assignment), flexible=True)]
        out += [id + _numbers(numbers) + NO_TAGS for id, numbers in assignment]
        out.append(NO_TAGS)
    out.append(NO_TAGS)
    return [b"".join(out)]


def _numbers(numbers: Sequence[int]) -> bytes:
    return count(len(numbers), flexible=True) + Struct(f">{len(numbers)}i").pack(*numbers)


# ---- descriptions


def read_describe(body: memoryview) -> list[str]:
    cursor = Cursor(body, flexible=True)
    # Each once: an answer may be a thousand times as long as its question.
    groups = list(dict.fromkeys(cursor.string() for _ in range(cursor.count(1))))
    # Whether to tell what one may do.
    cursor.take(1)
    cursor.end()
    return groups


class DescribedMember(NamedTuple):
    member_id: str
    instance_id: str | None
    epoch: int
    client_id: str
    host: str
    topics: Sequence[str]
    assignment: NamedPartitions
    target: NamedPartitions


class DescribedGroup(NamedTuple):
    group: str
    code: int = 0
    message: str | None = None
    state: str = ""
    epoch: int = 0
    assignor: str = ""
    members: Sequence[DescribedMember] = ()


def consumer_describe_answer(version: int, groups: Sequence[DescribedGroup]) -> Pieces:
    def member(one: DescribedMember) -> bytes:
        kind = bytes((OWN_PROTOCOL,)) if version >= 1 else b""
        return b"".join(
            (
                string(one.member_id, flexible=True),
                nullable_string(one.instance_id, flexible=True),
                _common(one),
                # No pattern: its names are among the topics.
                nullable_string(None, flexible=True),
                _assignment(one.assignment),
                _assignment(one.target),
                kind,
                NO_TAGS,
            )
        )

    return _described(groups, [[member(one) for one in group.members] for group in groups])


def share_describe_answer(groups: Sequence[DescribedGroup]) -> Pieces:
    def member(one: DescribedMember) -> bytes:
        name = string(one.member_id, flexible=True)
        return b"".join((name, _common(one), _assignment(one.assignment), NO_TAGS))

    return _described(groups, [[member(one) for one in group.members] for group in groups])


def _common(one: DescribedMember) -> bytes:
    topics = [string(topic, flexible=True) for topic in one.topics]
    return b"".join(
        (
            # No rack.
            nullable_string(None, flexible=True),
            INT32.pack(one.epoch),
            string(one.client_id, flexible=True),
            string(one.host, flexible=True),
            count(len(topics), flexible=True),
            *topics,
        )
    )


def _assignment(partitions: NamedPartitions) -> bytes:
    topics = [
        id + string(name, flexible=True) + _numbers(numbers) + NO_TAGS
        for id, name, numbers in partitions
    ]
    return b"".join((count(len(topics), flexible=True), *topics, NO_TAGS))


def _described(groups: Sequence[DescribedGroup], members: Sequence[Sequence[bytes]]) -> Pieces:
    out = [_NO_THROTTLE, count(len(groups), flexible=True)]
    for group, listed in zip(groups, members, strict=True):
        out += [
            INT16.pack(group.code),
            nullable_string(group.message, flexible=True),
            string(group.group, flexible=True),
            string(group.state, flexible=True),
            _MEMBER_END.pack(group.epoch, group.epoch),
            string(group.assignor, flexible=True),
            count(len(listed), flexible=True),
            *listed,
            _NOT_ASKED,
            NO_TAGS,
        ]
    out.append(NO_TAGS)
    return [b"".join(out)]
