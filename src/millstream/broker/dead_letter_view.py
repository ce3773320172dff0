"""Which dead letters are gone, and the redrive jobs: one view, so that both change in one append.

A log only loses what is at its front. So a dead letter that was deleted or redriven is marked as
gone, and what is gone at the front of a partition is trimmed. Marks are bits by offset, in chunks:
a key for each, so that a change writes no more than the chunks that it touches, and what is kept
is at most a bit for each offset between the start and the end of the partition.

    b"g" UUID of the topic, partition (4 bytes), chunk (8)  →  bits, low offsets first
    b"j" id  →  what a job is to do         b"p" id  →  how far it is         both JSON
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from millstream.broker.views import Change

# Offsets of a chunk: a change of one writes at most 512 bytes.
CHUNK_OFFSETS = 4096
GONE = b"g"
JOB = b"j"
PROGRESS = b"p"
_KEY = struct.Struct(">c16sIQ")


class Place(NamedTuple):
    """A partition of a topic of dead letters. One made again under an old name is another."""

    uuid: bytes
    partition: int


class DeadLetterView:
    __slots__ = ("_chunks", "_counts", "_stored")

    name = "dead_letters"
    partition = PartitionId("__dead_letters", 0)

    def __init__(self) -> None:
        # Of each partition with marks: bits by chunk, and how many there are.
        self._chunks: dict[Place, dict[int, int]] = {}
        self._counts: dict[Place, int] = {}
        self._stored: dict[bytes, bytes] = {}

    # ---- as a view

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in changes:
            if key[:1] == GONE:
                _, uuid, partition, chunk = _KEY.unpack(key)
                bits = 0 if value is None else int.from_bytes(value, "little")
                self._set(Place(uuid, partition), chunk, bits)
            elif value is None:
                self._stored.pop(key, None)
            else:
                self._stored[key] = value

    def _set(self, place: Place, number: int, bits: int) -> None:
        chunks = self._chunks.setdefault(place, {})
        more = bits.bit_count() - chunks.get(number, 0).bit_count()
        self._counts[place] = self._counts.get(place, 0) + more
        if bits:
            chunks[number] = bits
        else:
            chunks.pop(number, None)
            if not chunks:
                del self._chunks[place], self._counts[place]

    def value_of(self, key: bytes) -> bytes | None:
        if key[:1] != GONE:
            return self._stored.get(key)
        _, uuid, partition, chunk = _KEY.unpack(key)
        bits = self._chunks.get(Place(uuid, partition), {}).get(chunk)
        return None if bits is None else _value(bits)

    def entries(self) -> Iterator[Change]:
        for place, chunks in self._chunks.items():
            for number, bits in chunks.items():
                yield _key(place, number), _value(bits)
        yield from self._stored.items()

    # ---- marks

    def places(self) -> list[Place]:
        return list(self._chunks)

    def is_gone(self, place: Place, offset: int) -> bool:
        chunks = self._chunks.get(place)
        if chunks is None:
            return False
        number, bit = divmod(offset, CHUNK_OFFSETS)
        return bool(chunks.get(number, 0) >> bit & 1)

    def count(self, place: Place, start: int) -> int:
        """How many are marked from an offset on."""
        count = self._counts.get(place, 0)
        for number, bits in self._chunks.get(place, {}).items():
            before = start - number * CHUNK_OFFSETS
            if before > 0:
                count -= (bits & ((1 << min(before, CHUNK_OFFSETS)) - 1)).bit_count()
        return count

    def first_left(self, place: Place, start: int) -> int:
        """The first offset from `start` on that is not marked."""
        chunks = self._chunks.get(place, {})
        while True:
            number, bit = divmod(start, CHUNK_OFFSETS)
            bits = chunks.get(number, 0) >> bit
            # The lowest bit that is 0, counted from the offset.
            run = (~bits & (bits + 1)).bit_length() - 1
            if bit + run < CHUNK_OFFSETS:
                return start + run
            start += run

    def runs(self, place: Place, start: int, count: int) -> list[tuple[int, int]]:
        """The first runs of marked offsets from `start` on, each by its first and its last."""
        chunks = self._chunks.get(place, {})
        found: list[tuple[int, int]] = []
        for number in sorted(chunks):
            begin = number * CHUNK_OFFSETS
            offset = max(start, begin)
            bits = chunks[number] >> (offset - begin)
            while bits:
                skipped = (bits & -bits).bit_length() - 1
                bits, offset = bits >> skipped, offset + skipped
                run = (~bits & (bits + 1)).bit_length() - 1
                if found and found[-1][1] == offset - 1:
                    found[-1] = (found[-1][0], offset + run - 1)
                elif len(found) == count:
                    return found
                else:
                    found.append((offset, offset + run - 1))
                bits, offset = bits >> run, offset + run
        return found

    def marked(self, place: Place, offsets: Iterable[int]) -> list[Change]:
        """What makes offsets gone. Made from what is now, so nothing else may be under way."""
        chunks = self._chunks.get(place, {})
        found: dict[int, int] = {}
        for offset in offsets:
            number, bit = divmod(offset, CHUNK_OFFSETS)
            found[number] = found.get(number, chunks.get(number, 0)) | 1 << bit
        return [(_key(place, number), _value(bits)) for number, bits in found.items()]

    def before(self, place: Place, start: int) -> list[Change]:
        """What forgets the chunks that lie before an offset."""
        return [
            (_key(place, number), None)
            for number in self._chunks.get(place, {})
            if (number + 1) * CHUNK_OFFSETS <= start
        ]

    def past(self, place: Place, end: int) -> list[Change]:
        """What forgets the marks from an offset on."""
        changes: list[Change] = []
        for number, bits in self._chunks.get(place, {}).items():
            room = min(max(end - number * CHUNK_OFFSETS, 0), CHUNK_OFFSETS)
            left = bits & ((1 << room) - 1)
            if left != bits:
                changes.append((_key(place, number), _value(left) if left else None))
        return changes

    # ---- jobs

    def jobs(self) -> Iterator[tuple[str, bytes, bytes | None]]:
        """Their ids, what they are to do, and how far they are."""
        for key, value in self._stored.items():
            if key[:1] == JOB:
                yield key[1:].decode(), value, self._stored.get(PROGRESS + key[1:])


def job_changes(id: str, job: bytes | None, progress: bytes | None) -> Sequence[Change]:
    return ((JOB + id.encode(), job), (PROGRESS + id.encode(), progress))


def progress_change(id: str, progress: bytes) -> Change:
    return PROGRESS + id.encode(), progress


def _key(place: Place, chunk: int) -> bytes:
    return _KEY.pack(GONE, place.uuid, place.partition, chunk)


def _value(bits: int) -> bytes:
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")
