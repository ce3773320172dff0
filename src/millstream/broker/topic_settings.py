"""What can be set for a topic: one table, with the broker's settings as defaults.

A topic keeps only what was set for it. All else follows the broker's settings, also when those
change at a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import msgspec

from millstream.errors import TopicSettingInvalid
from millstream.kinds import Choice, Duration, Kind, Size
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


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is in force for a topic. Times are milliseconds; None is no limit."""

    retention_ms: int | None
    retention_bytes: int | None
    segment_bytes: int
    segment_ms: int
    fsync: FsyncMode
    compact: bool
    tombstone_retention_ms: int
    message_bytes_max: int
    partitioner: Partitioner


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
        Size(1, 64 * MIB),
        "The largest message: key, value and headers together.",
    ),
    Row(
        "partitioner",
        Choice(get_args(Partitioner)),
        "Which hash of a key chooses its partition. `murmur2` is what Kafka's clients use.",
    ),
)
_BY_NAME = {row.name: row for row in TABLE}
assert tuple(_BY_NAME) == TopicSettings.__struct_fields__

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
        parsed = row.kind.parse(_text(row.kind, value))
    except ValueError as error:
        raise TopicSettingInvalid(
            f"{name} = {value!r} {error}; use {row.kind.expects}", setting=name, value=value
        ) from None
    # None would be the default; this is no limit.
    return UNLIMITED if parsed is None else parsed


UNLIMITED = "unlimited"


def _text(kind: Kind, value: object) -> str:
    if isinstance(value, bool):
        if not isinstance(kind, Flag):
            raise ValueError("is neither a number nor a text")
        return "true" if value else "false"
    if isinstance(value, int):
        # A number of the unit that the name ends with.
        return f"{value}ms" if isinstance(kind, Duration) else str(value)
    if isinstance(value, str):
        return value.strip()
    raise ValueError("is neither a number nor a text")


def merge(old: Mapping[str, object], changes: Mapping[str, object]) -> Given:
    """Settings with changes; a None takes one out."""
    return {name: value for name, value in {**old, **changes}.items() if value is not None}


@dataclass(frozen=True, slots=True)
class TopicDefaults:
    """What the broker's settings mean for topics that say nothing."""

    partition: PartitionSettings
    message_bytes_max: int = MIB
    partitioner: Literal["murmur2", "murmur3"] = "murmur2"

    def effective(self, given: Mapping[str, object]) -> TopicSettings:
        base = self.partition
        values: Given = {
            "retention_ms": base.retention_age_ms,
            "retention_bytes": base.retention_bytes,
            "segment_bytes": base.segment_bytes,
            "segment_ms": base.segment_age_ms,
            "fsync": base.fsync,
            "compact": base.compact,
            "tombstone_retention_ms": base.tombstone_age_ms,
            "message_bytes_max": self.message_bytes_max,
            "partitioner": self.partitioner,
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
