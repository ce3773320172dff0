"""Committed offsets as a view: what each group has done of each partition, which generation it has
reached, and what was set for it.

    key     0x01 | topic uuid, 16 bytes | partition, u32 | group, UTF-8
    value   0x01 | offset, i64 | committed at, ms since 1970, i64 | metadata, UTF-8
    or      0x02 | the same | 0x00 | leader epoch of the last record that was read, ASCII digits

    key     0x02 | group, UTF-8
    value   0x01 | generation, i64 | written at, ms since 1970, i64

    key     0x03 | group, UTF-8
    value   0x01 | settings, JSON

All numbers are big-endian; the first byte of a value is its version. Topics are named by their
UUID, so that a topic made again under an old name has no offsets. A broker that does not know 0x02
takes the epoch for the end of the metadata, and does nothing wrong by it.

There may be a million of them, so an offset is 16 bytes in two arrays, and 4 more where there are
epochs; the few that carry metadata have it in a dictionary beside them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple, TypeAlias

import msgspec

from millstream.broker.group_settings import NOTHING_SET, GroupSettings
from millstream.log.partition import PartitionId

# As `broker.views` has it: a key, and its value or None when it is gone.
Change: TypeAlias = tuple[bytes, bytes | None]

OFFSET_KIND, GROUP_KIND, SETTINGS_KIND = 1, 2, 3
VERSION, WITH_EPOCH = 1, 2
EPOCH_MARK = b"\0"
NO_EPOCH = -1

_KEY = Struct(">B16sI")
_VALUE = Struct(">Bqq")
_ABSENT = -1


class Entry(NamedTuple):
    """One committed offset."""

    uuid: bytes
    partition: int
    offset: int
    committed_ms: int
    metadata: str
    leader_epoch: int = NO_EPOCH


class Mark(NamedTuple):
    """What is kept of a group besides its offsets."""

    generation: int
    written_ms: int


def offset_key(group: str, uuid: bytes, partition: int) -> bytes:
    return _KEY.pack(OFFSET_KIND, uuid, partition) + group.encode()


def offset_value(
    offset: int, committed_ms: int, metadata: str, leader_epoch: int = NO_EPOCH
) -> bytes:
    if leader_epoch < 0:
        return _VALUE.pack(VERSION, offset, committed_ms) + metadata.encode()
    fixed = _VALUE.pack(WITH_EPOCH, offset, committed_ms)
    return b"".join((fixed, metadata.encode(), EPOCH_MARK, b"%d" % leader_epoch))


def group_key(group: str) -> bytes:
    return bytes((GROUP_KIND,)) + group.encode()


def group_value(mark: Mark) -> bytes:
    return _VALUE.pack(VERSION, mark.generation, mark.written_ms)


def settings_key(group: str) -> bytes:
    return bytes((SETTINGS_KIND,)) + group.encode()


def settings_value(settings: GroupSettings) -> bytes:
    return bytes((VERSION,)) + msgspec.json.encode(settings)


class _Row:
    """The offsets of one group in one topic: of the partitions from `first` to before `end`."""

    __slots__ = ("count", "end", "epochs", "first", "metadata", "offsets", "stamps")

    def __init__(self, first: int) -> None:
        self.first = self.end = first
        self.offsets = array("q")
        self.stamps = array("q")
        # None while no offset has one.
        self.epochs: array[int] | None = None
        self.metadata: dict[int, str] | None = None
        self.count = 0

    def put(
        self, partition: int, offset: int, stamp: int, metadata: bytes, epoch: int = NO_EPOCH
    ) -> None:
        place = partition - self.first
        if place < 0:
            room = array("q", [_ABSENT]) * -place
            self.offsets = room + self.offsets
            self.stamps = room + self.stamps
            if self.epochs is not None:
                self.epochs = array("i", [NO_EPOCH]) * -place + self.epochs
            self.first = partition
            place = 0
        elif partition >= self.end:
            room = array("q", [_ABSENT]) * (partition + 1 - self.end)
            self.offsets.extend(room)
            self.stamps.extend(room)
            if self.epochs is not None:
                self.epochs.extend(array("i", [NO_EPOCH]) * (partition + 1 - self.end))
            self.end = partition + 1
        if epoch >= 0 and self.epochs is None:
            self.epochs = array("i", [NO_EPOCH]) * len(self.offsets)
        if self.epochs is not None:
            self.epochs[place] = epoch
        if self.offsets[place] == _ABSENT:
            self.count += 1
        self.offsets[place] = offset
        self.stamps[place] = stamp
        if metadata:
            if self.metadata is None:
                self.metadata = {}
            self.metadata[partition] = metadata.decode()
        elif self.metadata is not None:
            self.metadata.pop(partition, None)

    def remove(self, partition: int) -> None:
        if self.get(partition) is not None:
            place = partition - self.first
            self.offsets[place] = self.stamps[place] = _ABSENT
            self.count -= 1
            if self.metadata is not None:
                self.metadata.pop(partition, None)

    def get(self, partition: int) -> tuple[int, int, str, int] | None:
        place = partition - self.first
        if not self.first <= partition < self.end or self.offsets[place] == _ABSENT:
            return None
        metadata = self.metadata.get(partition, "") if self.metadata is not None else ""
        epoch = self.epochs[place] if self.epochs is not None else NO_EPOCH
        return self.offsets[place], self.stamps[place], metadata, epoch

    def entries(self, uuid: bytes) -> Iterator[Entry]:
        epochs = self.epochs
        for place, offset in enumerate(self.offsets):
            if offset != _ABSENT:
                partition = self.first + place
                metadata = self.metadata.get(partition, "") if self.metadata is not None else ""
                epoch = NO_EPOCH if epochs is None else epochs[place]
                yield Entry(uuid, partition, offset, self.stamps[place], metadata, epoch)


class OffsetTable:
    """A view (see `broker.views`): it is only ever changed by `apply`."""

    __slots__ = ("_marks", "_rows", "_settings", "count", "name", "partition")

    def __init__(self, name: str) -> None:
        """`name` is also that of its internal topic, without the underscores."""
        self.name = name
        self.partition = PartitionId(f"__{name}", 0)
        self._rows: dict[bytes, dict[bytes, _Row]] = {}
        self._marks: dict[bytes, Mark] = {}
        # By text: every receive asks for them.
        self._settings: dict[str, GroupSettings] = {}
        self.count = 0

    # ---- as a view

    def apply(self, changes: Iterable[Change]) -> None:
        """A start applies a million of them, the offsets of a group in a topic one after the
        other, so the row of the one before is tried first."""
        unpack_key, unpack_value = _KEY.unpack_from, _VALUE.unpack_from
        last_group = last_uuid = b""
        row = _Row(0)
        for key, value in changes:
            if key[0] != OFFSET_KIND or value is None:
                last_group = last_uuid = b""
                self._apply_other(key, value)
                continue
            _, uuid, partition = unpack_key(key)
            version, offset, stamp = unpack_value(value)
            group = key[_KEY.size :]
            if group != last_group or uuid != last_uuid:
                row = self._row(group, uuid, partition)
                last_group, last_uuid = group, uuid
            before = row.count
            metadata, epoch = value[_VALUE.size :], NO_EPOCH
            if version == WITH_EPOCH:
                metadata, _, digits = metadata.rpartition(EPOCH_MARK)
                epoch = int(digits)
            epochs = row.epochs
            if partition == row.end and not metadata and (epochs is not None or epoch < 0):
                row.offsets.append(offset)
                row.stamps.append(stamp)
                if epochs is not None:
                    epochs.append(epoch)
                row.end += 1
                row.count += 1
            else:
                row.put(partition, offset, stamp, metadata, epoch)
            self.count += row.count - before

    def _row(self, group: bytes, uuid: bytes, partition: int) -> _Row:
        of_group = self._rows.get(group)
        if of_group is None:
            of_group = self._rows[group] = {}
        row = of_group.get(uuid)
        if row is None:
            row = of_group[uuid] = _Row(partition)
        return row

    def _apply_other(self, key: bytes, value: bytes | None) -> None:
        kind, name = key[0], key[1:]
        if kind == OFFSET_KIND:
            self._remove(key)
        elif kind == GROUP_KIND:
            if value is None:
                self._marks.pop(name, None)
            else:
                _, generation, written_ms = _VALUE.unpack_from(value)
                self._marks[name] = Mark(generation, written_ms)
        elif value is None:
            self._settings.pop(name.decode(), None)
        else:
            self._settings[name.decode()] = msgspec.json.decode(value[1:], type=GroupSettings)

    def _remove(self, key: bytes) -> None:
        _, uuid, partition = _KEY.unpack_from(key)
        of_group = self._rows.get(key[_KEY.size :])
        row = of_group.get(uuid) if of_group is not None else None
        if of_group is None or row is None:
            return
        before = row.count
        row.remove(partition)
        self.count += row.count - before
        if not row.count:
            del of_group[uuid]
            if not of_group:
                del self._rows[key[_KEY.size :]]

    def entries(self) -> Iterator[Change]:
        for group, mark in self._marks.items():
            yield bytes((GROUP_KIND,)) + group, group_value(mark)
        for name, settings in self._settings.items():
            yield settings_key(name), settings_value(settings)
        for group, of_group in self._rows.items():
            for uuid, row in of_group.items():
                for one in row.entries(uuid):
                    key = _KEY.pack(OFFSET_KIND, uuid, one.partition) + group
                    value = offset_value(
                        one.offset, one.committed_ms, one.metadata, one.leader_epoch
                    )
                    yield key, value

    def value_of(self, key: bytes) -> bytes | None:
        if key[0] == GROUP_KIND:
            mark = self._marks.get(key[1:])
            return group_value(mark) if mark is not None else None
        if key[0] == SETTINGS_KIND:
            settings = self._settings.get(key[1:].decode())
            return settings_value(settings) if settings is not None else None
        _, uuid, partition = _KEY.unpack_from(key)
        row = self._rows.get(key[_KEY.size :], {}).get(uuid)
        found = row.get(partition) if row is not None else None
        return offset_value(*found) if found is not None else None

    # ---- for reading

    def groups(self) -> list[str]:
        """All that have an offset, a mark or settings, in no order."""
        found = {group.decode() for group in self._rows.keys() | self._marks.keys()}
        return list(found | self._settings.keys())

    def has_group(self, group: str) -> bool:
        name = group.encode()
        return name in self._rows or name in self._marks or group in self._settings

    @property
    def row_groups(self) -> int:
        """How many have an offset."""
        return len(self._rows)

    def has_topic(self, group: str, uuid: bytes) -> bool:
        return uuid in self._rows.get(group.encode(), {})

    def settings(self, group: str) -> GroupSettings:
        return self._settings.get(group, NOTHING_SET)

    def mark(self, group: str) -> Mark | None:
        return self._marks.get(group.encode())

    def get(self, group: str, uuid: bytes, partition: int) -> Entry | None:
        row = self._rows.get(group.encode(), {}).get(uuid)
        found = row.get(partition) if row is not None else None
        return Entry(uuid, partition, *found) if found is not None else None

    def of_group(self, group: str) -> Iterator[Entry]:
        for uuid, row in self._rows.get(group.encode(), {}).items():
            yield from row.entries(uuid)

    def of_topic(self, group: str, uuid: bytes) -> Iterator[Entry]:
        row = self._rows.get(group.encode(), {}).get(uuid)
        return row.entries(uuid) if row is not None else iter(())

    def lowest(self, uuid: bytes, partition: int) -> int | None:
        """Of all groups that have committed there; None without any."""
        rows = (of_group.get(uuid) for of_group in self._rows.values())
        found = (row.get(partition) for row in rows if row is not None)
        return min((one[0] for one in found if one is not None), default=None)

    def topics(self, group: str) -> list[bytes]:
        return list(self._rows.get(group.encode(), ()))

    def newest_ms(self, group: str) -> int:
        """When the group last committed or was marked; 0 when there is nothing of it."""
        mark = self.mark(group)
        newest = mark.written_ms if mark is not None else 0
        for row in self._rows.get(group.encode(), {}).values():
            newest = max(newest, *row.stamps)
        return newest

    def past_ends(self, ends: dict[bytes, list[int]]) -> Iterator[tuple[str, Entry, int]]:
        """Each offset that lies past the end of its partition, with that end. `ends` has for
        each topic the ends of its partitions."""
        for group, of_group in self._rows.items():
            for uuid, row in of_group.items():
                known = ends.get(uuid)
                if known is None or not _is_past(row, known):
                    continue
                for one in row.entries(uuid):
                    if one.partition < len(known) and one.offset > known[one.partition]:
                        yield group.decode(), one, known[one.partition]

    def orphans(self, uuids: frozenset[bytes]) -> Iterator[bytes]:
        """Keys of offsets in topics that are none of these."""
        for group, of_group in self._rows.items():
            for uuid, row in of_group.items():
                if uuid not in uuids:
                    for one in row.entries(uuid):
                        yield _KEY.pack(OFFSET_KIND, uuid, one.partition) + group


def _is_past(row: _Row, ends: list[int]) -> bool:
    """Whether any offset of the row may be past its end: quick, because a start asks it of a
    million of them."""
    known = ends[row.first : row.end]
    return any(offset > end for offset, end in zip(row.offsets, known, strict=False))
