"""Leased records as MessagePack: what a receive answers to a client that accepts it.

Bytes stay bytes, and nothing is escaped. The answer is a map with the names of the one in JSON; a
record is an array of the fields of `LeasedFields`, in their order, and later versions may add to
its end.
"""

from __future__ import annotations

from typing import Literal

import msgspec

MEDIA = b"application/msgpack"


class LeasedFields(msgspec.Struct, array_like=True, eq=False, weakref=True):
    """A record and its lease. Headers are those that users see."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    is_json: bool
    lane: str
    deliveries: int
    receipt: str


class Settle(msgspec.Struct, omit_defaults=True):
    """How one delivery ended, in JSON."""

    kind: Literal["ack", "nack", "release", "reject", "extend"]
    receipt: str
    delay_ms: int | None = None
    visibility_ms: int | None = None
    error: str = ""
