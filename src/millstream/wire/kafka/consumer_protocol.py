"""What consumers tell each other through the broker in a classic group.

    subscription    version, i16 | topics, array of string | user data, bytes | more by version
    assignment      version, i16 | array of (topic, string | partitions, array of i32) | user data

All numbers are big-endian; an array has a length of four bytes, a string one of two. The broker
reads them only to show who reads what: to clients they are what they sent, byte for byte.
"""

from __future__ import annotations

from struct import Struct, error
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHORT = Struct(">h")
_INT = Struct(">i")
_ZERO = _SHORT.pack(0)
_NO_USER_DATA = _INT.pack(-1)


def subscribed_topics(metadata: bytes) -> tuple[str, ...]:
    """The topics of a subscription; none of one that cannot be read."""
    try:
        count, at = _count(metadata, 2, 2)
        topics: list[str] = []
        for _ in range(count):
            topic, at = _string(metadata, at)
            topics.append(topic)
    except (error, ValueError):
        return ()
    return tuple(topics)


def assigned_partitions(assignment: bytes) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Topics and partitions of an assignment; none of one that cannot be read."""
    try:
        count, at = _count(assignment, 2, 6)
        found: list[tuple[str, tuple[int, ...]]] = []
        for _ in range(count):
            topic, at = _string(assignment, at)
            partitions, at = _count(assignment, at, 4)
            numbers = Struct(f">{partitions}i").unpack_from(assignment, at)
            found.append((topic, numbers))
            at += 4 * partitions
    except (error, ValueError):
        return ()
    return tuple(found)


def subscription(topics: Iterable[str]) -> bytes:
    """As a consumer writes one, version 0."""
    named = [_named(topic) for topic in topics]
    return b"".join((_ZERO, _INT.pack(len(named)), *named, _NO_USER_DATA))


def assignment(partitions: Iterable[tuple[str, Iterable[int]]]) -> bytes:
    """As a leader writes one, version 0."""
    parts = []
    for topic, numbers in partitions:
        listed = tuple(numbers)
        packed = Struct(f">{len(listed)}i").pack(*listed)
        parts.append(_named(topic) + _INT.pack(len(listed)) + packed)
    return b"".join((_ZERO, _INT.pack(len(parts)), *parts, _NO_USER_DATA))


def _named(topic: str) -> bytes:
    encoded = topic.encode()
    return _SHORT.pack(len(encoded)) + encoded


def _count(data: bytes, at: int, least: int) -> tuple[int, int]:
    """The length of an array whose elements have at least so many bytes."""
    (count,) = _INT.unpack_from(data, at)
    at += _INT.size
    if not 0 <= count * least <= len(data) - at:
        raise ValueError(count)
    return count, at


def _string(data: bytes, at: int) -> tuple[str, int]:
    (size,) = _SHORT.unpack_from(data, at)
    at += _SHORT.size
    if not 0 <= size <= len(data) - at:
        raise ValueError(size)
    return data[at : at + size].decode(), at + size
