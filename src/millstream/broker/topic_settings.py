"""What can be set for a topic: one table, with the broker's settings as defaults.

A topic keeps only what was set for it. All else follows the broker's settings, also when those
change at a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from millstream.errors import TopicSettingInvalid
from millstream.kinds import Choice, Duration, Integer, Kind, Size
from millstream.log.batch import LANES
from millstream.log.partition import FsyncMode, PartitionSettings
from millstream.wire.partitioning import Partitioner

if TYPE_CHECKING:
    from collections.abc import Mapping

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SECOND_MS = 1000
# What a batch of one record takes beside key, value and headers; headers are counted with theirs.
BATCH_OVERHEAD_BYTES = 128
# When only the bytes to keep are set, a segment is this part of them, so that whole segments can
# go long before the limit is far behind.
SEGMENTS_IN_RETENTION = 4
SEGMENT_BYTES_MIN = 64 * KIB
# The most that a topic may be set to take.
MESSAGE_BYTES_MAX = 64 * MIB

RetentionHold: TypeAlias = Literal["none", "groups"]
DeliveryOrder: TypeAlias = Literal["none", "key"]
Timestamps: TypeAlias = Literal["create", "append"]
VISIBILITY_MS_MIN, VISIBILITY_MS_MAX = 100, 12 * 60 * 60 * SECOND_MS
RETRY_DELAY_MS_MAX = 24 * 60 * 60 * SECOND_MS
# A delivery count is a byte in the journal of leases.
DELIVERIES_MAX = 200
WEIGHT_MAX = 1000
LANE_WEIGHTS = (50, 25, 15, 7, 3)


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    expects: str = "`true` or `false`"

    def parse(self, text: str) -> bool:
        if text.lower() not in ("true", "false", "on", "off"):
            raise ValueError("is neither true nor false")
        return text.lower() in ("true", "on")

    def show(self, value: object) -> str:
        return "true" if value else "false"


@dataclass(frozen=True, slots=True)
class Weights:
    """Whole numbers with slashes between them."""

    count: int

    @property
    def expects(self) -> str:
        return f"{self.count} numbers from 1 to {WEIGHT_MAX}, such as `50/25/15/7/3`"

    def parse(self, text: str) -> tuple[int, ...]:
        parts = text.split("/")
        if len(parts) != self.count or not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"is not {self.count} numbers with slashes between them")
        weights = tuple(map(int, parts))
        if not all(1 <= weight <= WEIGHT_MAX for weight in weights):
            raise ValueError(f"has a number that is not 1 to {WEIGHT_MAX}")
        return weights

    def show(self, value: object) -> str:
        return "/".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force for a topic. Times are milliseconds; None is no limit."""

    retention_ms: int | None
    retention_bytes: int | None
    retention_hold: RetentionHold
    segment_bytes: int
    segment_ms: int
    fsync: FsyncMode
    compact: bool
    tombstone_retention_ms: int
    message_bytes_max: int
    partitioner: Partitioner
    timestamps: Timestamps
    inspect: bool
    visibility_ms: int
    deliveries_max: int
    retry_delay_ms: int
    retry_delay_max_ms: int
    dead_letters: bool
    delivery_order: DeliveryOrder
    lane_weights: tuple[int, ...]
    lane_boost_ms: int


class Row(NamedTuple):
    name: str
    kind: Kind
    causes: str


TABLE = (
    Row(
        "retention_ms",
        Duration(SECOND_MS, otherwise="unlimited"),
        "How long records are kept. Not looked at in a compacted topic.",
    ),
    Row(
        "retention_bytes",
        Size(SEGMENT_BYTES_MIN, unlimited=True),
        "How many bytes a partition keeps; the oldest go first.",
    ),
    Row(
        "retention_hold",
        Choice(get_args(RetentionHold)),
        "`groups`: records that a group has not committed or settled are kept past their time and "
        "past the limit of bytes. A group that was forgotten after `offsets_retention` holds "
        "nothing. Not looked at in a compacted topic.",
    ),
    Row(
        "segment_bytes",
        Size(SEGMENT_BYTES_MIN, 2 * GIB),
        "The size at which a partition starts a new file. Only whole files are removed.",
    ),
    Row(
        "segment_ms",
        Duration(SECOND_MS),
        "The age at which a partition starts a new file even when the old one is small.",
    ),
    Row(
        "fsync",
        Choice(get_args(FsyncMode)),
        "`every`: answered when on disk. `interval`, `none`: answered at once, synced later.",
    ),
    Row(
        "compact",
        Flag(),
        "Keep the newest record of each key, instead of those of the last days.",
    ),
    Row(
        "tombstone_retention_ms",
        Duration(0),
        "How long a compacted topic keeps the mark that a key was deleted.",
    ),
    Row(
        "message_bytes_max",
        Size(1, MESSAGE_BYTES_MAX),
        "The largest message: key, value and headers together. Of Kafka's clients: the largest "
        "batch.",
    ),
    Row(
        "partitioner",
        Choice(get_args(Partitioner)),
        "Which hash of a key chooses its partition. `murmur2` is what Kafka's clients use.",
    ),
    Row(
        "timestamps",
        Choice(get_args(Timestamps)),
        "`create`: a record has the time that its publisher gave it. `append`: that of its append.",
    ),
    Row(
        "inspect",
        Flag(),
        "Whether batches of Kafka's clients are opened, for the headers `ms-lane`, `ms-delay` and "
        "`ms-deliver-at` of their records.",
    ),
    Row(
        "visibility_ms",
        Duration(VISIBILITY_MS_MIN, VISIBILITY_MS_MAX),
        "How long a record that was received is a worker's own before it comes back.",
    ),
    Row(
        "deliveries_max",
        Integer(1, DELIVERIES_MAX),
        "How often a record is given out to workers before it goes to the dead letters.",
    ),
    Row(
        "retry_delay_ms",
        Duration(0, RETRY_DELAY_MS_MAX),
        "How long a record waits after its first failure; twice as long after each further one.",
    ),
    Row(
        "retry_delay_max_ms",
        Duration(0, RETRY_DELAY_MS_MAX),
        "The longest that a record waits after a failure.",
    ),
    Row(
        "dead_letters",
        Flag(),
        "Whether records that used up their deliveries go to `<topic>.dlq`. `false` drops them.",
    ),
    Row(
        "delivery_order",
        Choice(get_args(DeliveryOrder)),
        "`key`: while a worker has a record of a key, the next one of that key waits.",
    ),
    Row(
        "lane_weights",
        Weights(len(LANES)),
        "How many records of each lane are given out in turn while all lanes have some: critical, "
        "high, normal, low, background.",
    ),
    Row(
        "lane_boost_ms",
        Duration(SECOND_MS),
        "A lane that was not served for so long, and has records, is served next.",
    ),
)
_BY_NAME = {row.name: row for row in TABLE}
assert tuple(_BY_NAME) == TopicSettings.__struct_fields__

_OF_DELIVERY = tuple(row.name for row in TABLE[12:])
assert _OF_DELIVERY[0] == "visibility_ms"

Given = dict[str, object]


def parse_settings(given: Mapping[str, object]) -> Given:
    """Values as they were sent, as numbers or as text such as `7d` and `64M`. None is kept: it
    takes a setting back to the default. Raises TopicSettingInvalid for the first wrong one."""
    return {name: _parse(name, value) for name, value in given.items()}


def _parse(name: str, value: object) -> object:
    row = _BY_NAME.get(name)
    if row is None:
        raise TopicSettingInvalid(
            f"topics have no setting {name!r}; they have {', '.join(_BY_NAME)}",
            setting=name,
            value=value,
        )
    if value is None:
        return None
    try:
        parsed = row.kind.parse(as_text(row.kind, value))
    except ValueError as error:
        raise TopicSettingInvalid(
            f"{name} = {value!r} {error}; use {row.kind.expects}", setting=name, value=value
        ) from None
    # None would be the default; this is no limit.
    return UNLIMITED if parsed is None else parsed


UNLIMITED = "unlimited"


def as_text(kind: Kind, value: object) -> str:
    """A value as it was sent, as its kind parses it."""
    if isinstance(value, bool):
        if not isinstance(kind, Flag):
            raise ValueError("is neither a number nor a text")
        return "true" if value else "false"
    value = _whole(value)
    if isinstance(value, int):
        # A number of the unit that the name ends with.
        return f"{value}ms" if isinstance(kind, Duration) else str(value)
    if isinstance(value, str):
        return value.strip()
    if isinstance(value, list | tuple) and isinstance(kind, Weights):
        return kind.show([_whole(one) for one in value])
    raise ValueError("is neither a number nor a text")


def _whole(value: object) -> object:
    """In JSON 1000.0 is the same whole number as 1000."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def merge(old: Mapping[str, object], changes: Mapping[str, object]) -> Given:
    """Settings with changes; a None takes one out."""
    return {name: value for name, value in {**old, **changes}.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TopicDefaults:
    """What the broker's settings mean for topics that say nothing."""

    partition: PartitionSettings
    message_bytes_max: int = MIB
    partitioner: Literal["murmur2", "murmur3"] = "murmur2"
    visibility_ms: int = 30 * SECOND_MS
    deliveries_max: int = 4
    retry_delay_ms: int = SECOND_MS
    retry_delay_max_ms: int = 60 * SECOND_MS
    dead_letters: bool = True
    delivery_order: DeliveryOrder = "none"
    lane_weights: tuple[int, ...] = LANE_WEIGHTS
    lane_boost_ms: int = 30 * SECOND_MS

    def effective(self, given: Mapping[str, object]) -> TopicSettings:
        base = self.partition
        values: Given = {
            "retention_ms": base.retention_age_ms,
            "retention_bytes": base.retention_bytes,
            "retention_hold": "none",
            "segment_bytes": base.segment_bytes,
            "segment_ms": base.segment_age_ms,
            "fsync": base.fsync,
            "compact": base.compact,
            "tombstone_retention_ms": base.tombstone_age_ms,
            "message_bytes_max": self.message_bytes_max,
            "partitioner": self.partitioner,
            "timestamps": "create",
            "inspect": False,
            **{name: getattr(self, name) for name in _OF_DELIVERY},
        }
        values.update((name, None if v == UNLIMITED else v) for name, v in given.items())
        if "segment_bytes" not in given and isinstance(values["retention_bytes"], int):
            share = max(values["retention_bytes"] // SEGMENTS_IN_RETENTION, SEGMENT_BYTES_MIN)
            values["segment_bytes"] = min(base.segment_bytes, share)
        return msgspec.convert(values, TopicSettings)

    def for_engine(self, settings: TopicSettings) -> PartitionSettings:
        """What a partition of such a topic is to do."""
        batch_bytes_max = max(
            self.partition.batch_bytes_max, settings.message_bytes_max + BATCH_OVERHEAD_BYTES
        )
        return replace(
            self.partition,
            fsync=settings.fsync,
            segment_bytes=settings.segment_bytes,
            segment_age_ms=settings.segment_ms,
            retention_age_ms=settings.retention_ms,
            retention_bytes=settings.retention_bytes,
            compact=settings.compact,
            tombstone_age_ms=settings.tombstone_retention_ms,
            batch_bytes_max=batch_bytes_max,
        )


class StoredTopic(msgspec.Struct, frozen=True):
    """A topic in the view of topics: what only the broker knows of it."""

    name: str
    created_ms: int
    settings: Given = {}
    # Stored before the first record of another lane than normal is appended.
    uses_lanes: bool = False
    # Of each partition, its end when `inspect` was last switched off: batches before it may have
    # been opened, so what the log knows of their producers' sequences is not the last.
    opened_to: tuple[int, ...] = ()


def known_settings(given: Mapping[str, object]) -> tuple[Given, list[str]]:
    """What was stored, without what this version cannot use; and the names of that."""
    good: Given = {}
    bad: list[str] = []
    for name, value in given.items():
        try:
            good[name] = _parse(name, value)
        except TopicSettingInvalid:
            bad.append(name)
    return good, bad
