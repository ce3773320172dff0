"""What is published, where it came to lie, and what cannot be published."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from millstream.broker.topics import partition_unknown
from millstream.errors import (
    HeaderInvalid,
    KeyRequired,
    MessageTooLarge,
    ParameterInvalid,
    TimestampInvalid,
)
from millstream.log.batch import LANES, Headers, Record
from millstream.wire.batches import OWN_PREFIX
from millstream.wire.lanes import NORMAL, lane_unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.topics import Topic

Acks: TypeAlias = Literal["none", "leader", "all"]
ACKS = ("none", "leader", "all")

TIMESTAMP_MS_MAX = 2**63 - 1
HEADER_NAME_BYTES_MAX = 255
# What a header takes beside its name and value, about.
HEADER_OVERHEAD_BYTES = 4


class Outgoing(NamedTuple):
    """A record to be published. Without a time it gets the broker's."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int | None = None
    # Its place in LANES.
    lane: int = NORMAL
    # It is to appear in its topic after so long, or at a time.
    delay_ms: int | None = None
    deliver_at_ms: int | None = None


class Placed(NamedTuple):
    """Where a record is; the offset is -1 when nobody waited for it. Of one that is scheduled it
    is where its schedule is, which is its id, and when it is due."""

    partition: int
    offset: int
    timestamp_ms: int


class Published(NamedTuple):
    placed: list[Placed]
    # Sent before, with the same idempotency key: these are the places of the first time.
    is_duplicate: bool = False
    # Which of them are scheduled; empty when none is.
    scheduled: frozenset[int] = frozenset()


def check_records(topic: Topic, records: Sequence[Outgoing]) -> list[int]:
    """Their sizes; the error of the first that cannot be published."""
    return [check_record(topic, record, at) for at, record in enumerate(records)]


def check_record(topic: Topic, record: Outgoing, at: int) -> int:
    """Its size in a batch, about; raises for what cannot be published."""
    key, value, headers, timestamp_ms, partition, lane, *_ = record
    size = 0 if value is None else len(value)
    if key is not None:
        size += len(key)
    elif topic.settings.compact:
        raise key_required(topic, at)
    if headers:
        size += _check_headers(headers, at)
    if size > topic.settings.message_bytes_max:
        require_size(topic, record, at)
    if timestamp_ms is not None and not 0 <= timestamp_ms <= TIMESTAMP_MS_MAX:
        raise TimestampInvalid(
            f"{timestamp_ms} is not a time in milliseconds since 1970",
            timestamp_ms=timestamp_ms,
            record=at,
        )
    if partition is not None and not 0 <= partition < topic.partitions:
        error = partition_unknown(topic, partition)
        error.fields["record"] = at
        raise error
    if not 0 <= lane < len(LANES):
        raise lane_unknown(lane, at)
    return size


def require_size(topic: Topic, record: Outgoing, at: int) -> None:
    size, limit = size_of(record), topic.settings.message_bytes_max
    if size > limit:
        raise MessageTooLarge(
            f"the record has {size} bytes, topic {topic.name} takes {limit}",
            limit_bytes=limit,
            record=at,
        )


def size_of(record: Outgoing | Record) -> int:
    """What counts for the limit of messages: what its sender has written, not what we added."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum(
        len(name.encode()) + len(value or b"") + HEADER_OVERHEAD_BYTES
        for name, value in record.headers
        if not name.startswith(OWN_PREFIX)
    )


def key_required(topic: Topic, at: int) -> KeyRequired:
    return KeyRequired(
        f"topic {topic.name} keeps the newest record of each key, and this one has no key",
        topic=topic.name,
        record=at,
    )


def _check_headers(headers: Headers, at: int) -> int:
    size = 0
    for name, value in headers:
        try:
            raw = name.encode()
        except UnicodeEncodeError:
            raise _header_invalid(name, "is not a text", at) from None
        if not 1 <= len(raw) <= HEADER_NAME_BYTES_MAX:
            raise _header_invalid(name, f"has not 1 to {HEADER_NAME_BYTES_MAX} bytes", at)
        size += len(raw) + (0 if value is None else len(value)) + HEADER_OVERHEAD_BYTES
    return size


def _header_invalid(name: str, why: str, at: int) -> HeaderInvalid:
    shown = name.encode(errors="replace").decode()
    return HeaderInvalid(f"the name of header {shown!r} {why}", header=shown, record=at)


def check_acks(acks: str) -> None:
    if acks not in ACKS:
        raise ParameterInvalid(
            f"there is no acks {acks!r}; take one of {', '.join(ACKS)}", parameter="acks"
        )
