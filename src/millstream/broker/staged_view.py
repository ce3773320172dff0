"""Writers, and what they have staged: a view in memory, kept in `__writers`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from millstream.broker.staged_values import (
    COMMITTING,
    LAST,
    PART,
    PROGRESS,
    Committing,
    Last,
    Part,
    Progress,
)
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from millstream.broker.views import Change

_decode_last = msgspec.json.Decoder(Last).decode
_decode_committing = msgspec.json.Decoder(Committing).decode
_decode_progress = msgspec.json.Decoder(Progress).decode
_decode_part = msgspec.json.Decoder(Part).decode


class Writer:
    """What there is of one writer."""

    __slots__ = ("bytes", "committing", "last", "name", "parts", "progress")

    def __init__(self, name: str) -> None:
        self.name = name
        self.last: Last | None = None
        self.committing: Committing | None = None
        self.progress: Progress | None = None
        # By batch, the ids of its parts.
        self.parts: dict[int, dict[str, None]] = {}
        self.bytes = 0

    @property
    def is_empty(self) -> bool:
        return self.last is None and self.committing is None and not self.parts

    def is_committed(self, batch: int) -> bool:
        return self.last is not None and batch <= self.last.batch


class WritersView:
    __slots__ = ("_stored", "bytes", "finals", "firsts", "parts", "writers")

    name = "writers"
    partition = PartitionId("__writers", 0)

    def __init__(self) -> None:
        self._stored: dict[bytes, bytes] = {}
        self.writers: dict[str, Writer] = {}
        # Those that will not write again, and when they committed.
        self.finals: dict[str, int] = {}
        # By id, in the order in which they were staged.
        self.parts: dict[str, Part] = {}
        # Where each begins in `__staged`.
        self.firsts: dict[str, int] = {}
        self.bytes = 0

    # ---- as a view

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in changes:
            if value is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = value
            kind, name = key[:1], key[1:].decode()
            if kind == PART:
                self._set_part(name, None if value is None else _decode_part(value))
                continue
            writer = self.writers.get(name)
            if writer is None:
                if value is None:
                    continue
                writer = self.writers[name] = Writer(name)
            if kind == LAST:
                last = writer.last = None if value is None else _decode_last(value)
                self.finals.pop(name, None)
                if last is not None and last.is_final:
                    self.finals[name] = last.committed_ms
            elif kind == COMMITTING:
                writer.committing = None if value is None else _decode_committing(value)
            elif kind == PROGRESS:
                writer.progress = None if value is None else _decode_progress(value)
            self._drop_empty(writer)

    def _set_part(self, id: str, part: Part | None) -> None:
        before = self.parts.pop(id, None)
        if before is not None:
            del self.firsts[id]
            writer = self.writers[before.writer]
            writer.bytes -= before.bytes
            self.bytes -= before.bytes
            ids = writer.parts[before.batch]
            del ids[id]
            if not ids:
                del writer.parts[before.batch]
            if part is None:
                self._drop_empty(writer)
        if part is not None:
            found = self.writers.get(part.writer)
            if found is None:
                found = self.writers[part.writer] = Writer(part.writer)
            self.parts[id] = part
            self.firsts[id] = min(place.offset for place in part.places)
            found.parts.setdefault(part.batch, {})[id] = None
            found.bytes += part.bytes
            self.bytes += part.bytes

    def _drop_empty(self, writer: Writer) -> None:
        if writer.is_empty:
            self.writers.pop(writer.name, None)

    def value_of(self, key: bytes) -> bytes | None:
        return self._stored.get(key)

    def entries(self) -> Iterator[Change]:
        yield from self._stored.items()

    # ---- changes

    def without(self, ids: Iterable[str]) -> list[Change]:
        """What forgets parts."""
        return [(PART + id.encode(), None) for id in ids]

    def is_over(self, part: Part) -> bool:
        """Whether its batch is committed."""
        writer = self.writers.get(part.writer)
        return writer is not None and writer.is_committed(part.batch)

    def until(self, writer: Writer, batch: int) -> list[str]:
        """The parts of a writer's batches up to one."""
        return [id for one, ids in writer.parts.items() if one <= batch for id in ids]


def part_change(id: str, part: Part) -> Change:
    return PART + id.encode(), msgspec.json.encode(part)


def last_change(writer: str, last: Last | None) -> Change:
    return LAST + writer.encode(), None if last is None else msgspec.json.encode(last)


def committing_change(writer: str, committing: Committing | None) -> Change:
    value = None if committing is None else msgspec.json.encode(committing)
    return COMMITTING + writer.encode(), value


def progress_change(writer: str, progress: Progress | None) -> Change:
    return PROGRESS + writer.encode(), None if progress is None else msgspec.json.encode(progress)
