"""Schedules as values, and as records of their internal topic.

`__schedules` has one partition, and three kinds of records in it. Offsets there are the ids of
schedules, and never change.

    a schedule    time   when it is due
                  key    `s`, then what a topic's record has and this one has no field for:
                           16  UUID of the topic
                            8  the record's own time, or -1: that of its firing
                            4  the partition that was named, or -1: that of its key
                            1  lane
                            1  whether there is a key, which follows
                  value, headers: as they will be in the topic

    the same, moved on   key `r`, then its id (8), then as above: its first place is to be given up

    a mark        key    `m`
                  value  1 byte: fired, cancelled, expired with why, or moved; then the offsets
                         of schedules that are so from here on, 8 bytes each, little-endian

    a purge       key    `p`, then the UUID of a topic: every schedule of it before this is over
                  value  1 byte: why

A mark that says `fired` is in one atomic append with the records in their topics. Batches of
schedules have one topic each and few records, because a schedule that is due is read with its
whole batch. The log is cut at the oldest schedule that is pending; one that keeps much more than
itself is moved on: written again at the end, in one atomic append with a mark for where it was.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from millstream.broker.views import Entry, encoded
from millstream.errors import DelayInvalid, MessageTooLarge
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.wire.lanes import lane_headers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.outgoing import Outgoing
    from millstream.broker.topics import Topic
    from millstream.log.batch import Fields, Headers, Record

PARTITION = PartitionId("__schedules", 0)
# A record fires in one journal frame with its mark, and a frame has at most 64 MiB.
RECORD_BYTES_MAX = 32 * 1024 * 1024
SETTINGS = PartitionSettings(
    fsync="every",
    segment_bytes=32 * 1024 * 1024,
    retention_age_ms=None,
    retention_bytes=None,
    batch_bytes_max=RECORD_BYTES_MAX + 1024 * 1024,
)
# Of one batch of schedules: about 0.1 ms to decode, for one record that is due.
BATCH_RECORDS_MAX = 32
DAY_MS = 86_400_000
# Ten years: beyond that a date is far more often a mistake of units than a plan.
HORIZON_MS = 3653 * DAY_MS

_META = struct.Struct(">16sqib?")
_ORIGIN = struct.Struct(">q")
SCHEDULE, MOVED_ON, MARK, PURGE = b"s", b"r", b"m", b"p"
UUID_BYTES = 16


class State(IntEnum):
    """Of an offset in the topic of schedules; one byte in memory and on disk."""

    # No schedule, or one that is no longer known.
    NONE = 0
    PENDING = 1
    FIRED = 2
    CANCELLED = 3
    # Over without a record in its topic, and why.
    TOPIC_DELETED = 4
    TOPIC_PURGED = 5
    REFUSED = 6
    DAMAGED = 7
    # Written again further on; known there.
    MOVED = 8

    @property
    def word(self) -> str:
        """One of the four that users know."""
        if self in _WHYS:
            return "expired"
        return self.name.lower()

    @property
    def why(self) -> str | None:
        return _WHYS.get(self)


_WHYS = {
    State.TOPIC_DELETED: "its topic was deleted",
    State.TOPIC_PURGED: "its topic was purged",
    State.REFUSED: "its topic does not take the record any more",
    State.DAMAGED: "the record was lost to damage on disk",
}


class Plan(NamedTuple):
    """A record of a topic that is to be, as it is read from the topic of schedules."""

    id: int
    due_ms: int
    uuid: bytes
    timestamp_ms: int | None
    partition: int | None
    lane: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def due_of(record: Outgoing, now_ms: int, at: int) -> int | None:
    """When a record is to be in its topic; None when that is now."""
    delay_ms, due_ms = record.delay_ms, record.deliver_at_ms
    if delay_ms is not None:
        if due_ms is not None:
            raise DelayInvalid("there are a delay and a time; give one of them", record=at)
        if delay_ms < 0:
            raise DelayInvalid(f"a delay of {delay_ms} ms is in the past", record=at)
        due_ms = now_ms + delay_ms
    if due_ms is None or due_ms <= now_ms:
        return None
    if due_ms > now_ms + HORIZON_MS:
        raise DelayInvalid(
            "a record can be scheduled for the next ten years, and this is for later; times are "
            "in milliseconds",
            record=at,
            most_ms=HORIZON_MS,
        )
    return due_ms


def check_schedule(size: int, at: int) -> None:
    if size > RECORD_BYTES_MAX:
        raise MessageTooLarge(
            f"the record has {size} bytes; one that is scheduled has at most {RECORD_BYTES_MAX}",
            limit_bytes=RECORD_BYTES_MAX,
            record=at,
        )


def schedule_fields(topic: Topic, record: Outgoing, due_ms: int) -> Fields:
    """A record of a topic as a schedule."""
    key = record.key
    meta = _META.pack(
        topic.uuid.bytes,
        -1 if record.timestamp_ms is None else record.timestamp_ms,
        -1 if record.partition is None else record.partition,
        record.lane,
        key is not None,
    )
    headers = lane_headers(record.headers, record.lane)
    return due_ms, b"".join((SCHEDULE, meta, key or b"")), record.value, headers


def plan_of(record: Record) -> Plan:
    """Raises ValueError for what is no schedule."""
    raw = record.key or b""
    start, id = 1, record.offset
    if raw[:1] == MOVED_ON:
        (id,) = _ORIGIN.unpack_from(raw, 1)
        start += _ORIGIN.size
    elif raw[:1] != SCHEDULE:
        raise ValueError(f"there is no schedule at {record.offset}")
    uuid, timestamp_ms, partition, lane, has_key = _META.unpack_from(raw, start)
    return Plan(
        id,
        record.timestamp,
        uuid,
        None if timestamp_ms < 0 else timestamp_ms,
        None if partition < 0 else partition,
        lane,
        raw[start + _META.size :] if has_key else None,
        record.value,
        record.headers,
    )


def moved_fields(record: Record, id: int) -> Fields:
    """A schedule as it is written again."""
    raw = record.key or b""
    rest = raw[1:] if raw[:1] == SCHEDULE else raw[1 + _ORIGIN.size :]
    return record.timestamp, MOVED_ON + _ORIGIN.pack(id) + rest, record.value, record.headers


def uuid_in(key: bytes) -> bytes:
    """The topic of a schedule, by its key here."""
    start = 1 if key[:1] == SCHEDULE else 1 + _ORIGIN.size
    return key[start : start + UUID_BYTES]


def id_in(key: bytes) -> int:
    """The id of a schedule that was moved on."""
    id: int = _ORIGIN.unpack_from(key, 1)[0]
    return id


def mark_entry(now_ms: int, state: State, places: Sequence[int]) -> Entry:
    value = bytes((state,)) + struct.pack(f"<{len(places)}q", *places)
    return encoded(PARTITION, [(now_ms, MARK, value, ())])


def read_mark(value: bytes) -> tuple[State, tuple[int, ...]]:
    return State(value[0]), struct.unpack(f"<{(len(value) - 1) // 8}q", value[1:])


def purge_entry(now_ms: int, uuid: bytes, why: State) -> Entry:
    return encoded(PARTITION, [(now_ms, PURGE + uuid, bytes((why,)), ())])
