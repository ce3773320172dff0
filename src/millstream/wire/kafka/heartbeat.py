"""Heartbeat, by hand: every member sends one every few seconds.

group, generation, member, instance (3-)    →    throttle (1-), code
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.wire.kafka.primitives import INT16, INT32, NO_TAGS, Cursor

if TYPE_CHECKING:
    from millstream.wire.kafka.primitives import Pieces

VERSIONS = (0, 4)
FLEXIBLE = 4
_NO_THROTTLE = INT32.pack(0)


class HeartbeatAsked(NamedTuple):
    group: str
    generation: int
    member_id: str
    instance_id: str | None


def read_heartbeat(body: memoryview, version: int) -> HeartbeatAsked:
    cursor = Cursor(body, flexible=version >= FLEXIBLE)
    group = cursor.string()
    (generation,) = cursor.unpack(INT32)
    member_id = cursor.string()
    instance_id = cursor.nullable_string() if version >= 3 else None
    cursor.end()
    return HeartbeatAsked(group, generation, member_id, instance_id)


def heartbeat_answer(version: int, code: int) -> Pieces:
    throttle = _NO_THROTTLE if version >= 1 else b""
    end = NO_TAGS if version >= FLEXIBLE else b""
    return [throttle + INT16.pack(code) + end]
