"""Idempotency keys: a publish that is repeated within a window is stored once.

A mark says that a key was used in a topic, and where its records are to be looked for. It is in
the same atomic append as the records, whatever their partitions, so after any crash both are
there or neither is. Offsets are known only after the append; therefore the mark has the ends of
the partitions before it, and each record has the key's digest in a header. A repeat reads on from
there until it meets them, which is at once, and answers where they are.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from millstream.broker.ages import Ages
from millstream.broker.lanes import NORMAL, lane_of
from millstream.broker.schedule_values import PARTITION as SCHEDULES
from millstream.engine.pending import Pending
from millstream.errors import (
    IdempotencyKeyConflict,
    IdempotencyKeyInvalid,
    MillstreamError,
    OffsetOutOfRange,
    TooManyIdempotencyKeys,
)
from millstream.log import batch as batches
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from millstream.broker.timers import Timers
    from millstream.broker.topics import Topic
    from millstream.broker.views import Change, Entry, Views
    from millstream.broker.wheel import Timer
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine

HEADER = "ms-once"
DIGEST_BYTES = 16
KEY_LENGTH_MAX = 255
KEY = re.compile(rf"[!-~]{{1,{KEY_LENGTH_MAX}}}")
# Keys that are forgotten in one turn of the loop.
SWEEP_KEYS = 5000
SWEEPS_IN_WINDOW = 20
SWEEP_S_MIN, SWEEP_S_MAX = 0.5, 30.0
READ_BYTES = 64 * 1024
# What lies between the end before an append and its records was in flight then; records that are
# not found this far on are gone.
SEARCH_BYTES_MAX = 256 * 1024 * 1024


class Part(NamedTuple):
    """Some of the records, of one partition and lane: how many, and where they are not before."""

    partition: int
    from_offset: int
    count: int  # type: ignore[assignment]  # hides the method of tuples, which nobody needs here
    lane: int = NORMAL


class Mark(msgspec.Struct, frozen=True, array_like=True):
    created_ms: int
    parts: list[Part]
    # Of each record, in which part it is; None when there is one part.
    order: list[int] | None = None


class Place(NamedTuple):
    """Of one record; the offset is -1 when it is no longer there."""

    partition: int
    offset: int
    timestamp_ms: int


class MarksView:
    """UUID of a topic and digest of a key → mark, oldest first."""

    __slots__ = ("marks",)

    name = "idempotency"
    partition = PartitionId("__idempotency", 0)

    def __init__(self) -> None:
        self.marks: dict[bytes, bytes] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in changes:
            # Out first, so that a key that is used again is the youngest.
            self.marks.pop(key, None)
            if value is not None:
                self.marks[key] = value

    def value_of(self, key: bytes) -> bytes | None:
        return self.marks.get(key)

    def entries(self) -> Iterable[Change]:
        return list(self.marks.items())


class Idempotency:
    """Which keys were used, and for how long that is remembered."""

    __slots__ = (
        "_ages",
        "_dropped",
        "_engine",
        "_keys_max",
        "_timer",
        "_timers",
        "_view",
        "_views",
        "_window_ms",
    )

    def __init__(
        self,
        engine: Engine,
        views: Views,
        clock: Clock,
        timers: Timers,
        *,
        window_ms: int,
        keys_max: int,
    ) -> None:
        self._engine = engine
        self._views = views
        self._ages = Ages(clock)
        self._timers = timers
        self._window_ms = window_ms
        self._keys_max = keys_max
        self._view = MarksView()
        # By the key of a mark that is to come, those that go with its append.
        self._dropped: dict[bytes, list[bytes]] = {}
        self._timer: Timer | None = None
        views.add(self._view)

    def __len__(self) -> int:
        return len(self._view.marks)

    def start(self) -> None:
        """Forget what is over now, and then regularly."""
        self._sweep()

    def stop(self) -> None:
        if self._timer is not None:
            self._timers.cancel(self._timer)
            self._timer = None

    def find(self, mark_key: bytes) -> Mark | None:
        """The mark of a key that was used within the window."""
        value = self._view.marks.get(mark_key)
        if value is None:
            return None
        mark = msgspec.msgpack.decode(value, type=Mark)
        return None if self._is_over(mark) else mark

    def require_room(self, waiting: int) -> None:
        """For one more key, beside those that wait to be appended."""
        if len(self._view.marks) + waiting < self._keys_max:
            return
        self._forget()
        if len(self._view.marks) + waiting >= self._keys_max:
            raise TooManyIdempotencyKeys(
                f"{self._keys_max} idempotency keys are remembered, and no more are allowed; send "
                "it later, or raise idempotency_keys_max",
                limit=self._keys_max,
            )

    def drop_with(self, mark_key: bytes, old: list[bytes]) -> None:
        """Nobody will ask for some marks any more once there is another: they go in its append.
        With none, what was said before is taken back."""
        if old:
            self._dropped[mark_key] = old
        else:
            self._dropped.pop(mark_key, None)

    def append(
        self, publishes: list[tuple[bytes, list[tuple[int, int]]]], entries: Sequence[Entry]
    ) -> Pending[list[int]]:
        """The records of publishes and their marks, in one atomic append: the offsets of the
        entries. Each publish is its mark's key, and partition and lane of each of its records."""
        now_ms = self._ages.stamp_ms()
        try:
            ends = {
                -1 if id == SCHEDULES else id.number: self._engine.offsets(id).high_watermark
                for id, *_ in entries
            }
        except MillstreamError as error:
            # Deleted in this very turn.
            return Pending.failed(error)
        changes: list[Change] = [
            (key, msgspec.msgpack.encode(_mark(now_ms, places, ends))) for key, places in publishes
        ]
        changes += [(old, None) for key, _ in publishes for old in self._dropped.pop(key, ())]
        return self._views.change_with(self._view, changes, entries)

    def places(
        self, topic: Topic, mark_key: bytes, mark: Mark
    ) -> Generator[Pending[Any], Any, list[Place]]:
        """Where the records of a mark are, in the order in which they were published."""
        found: list[list[Place]] = []
        for part in mark.parts:
            is_scheduled = part.partition < 0
            id = SCHEDULES if is_scheduled else PartitionId(topic.name, part.partition)
            places = yield from self._search(id, digest_of(mark_key), part)
            missing = Place(part.partition, -1, mark.created_ms)
            found.append(places + [missing] * (part.count - len(places)))
        if mark.order is None:
            return found[0]
        following = [iter(places) for places in found]
        return [next(following[at]) for at in mark.order]

    def _search(
        self, id: PartitionId, digest: bytes, part: Part
    ) -> Generator[Pending[Any], Any, list[Place]]:
        places: list[Place] = []
        offset = max(part.from_offset, self._engine.offsets(id).start)
        left = SEARCH_BYTES_MAX
        while left > 0:
            try:
                chunk = yield self._engine.read(id, offset, READ_BYTES)
            except OffsetOutOfRange:
                return places
            if not len(chunk.data):
                return places
            for position, header in batches.walk(chunk.data):
                if part.partition >= 0 and lane_of(header.attributes) != part.lane:
                    continue
                for record in batches.decode(chunk.data[position : position + header.size]):
                    if (HEADER, digest) in record.headers and record.offset >= offset:
                        places.append(Place(part.partition, record.offset, record.timestamp))
                        if len(places) == part.count:
                            return places
            left -= len(chunk.data)
            offset = chunk.next_offset
        return places

    # ---- forgetting

    def _is_over(self, mark: Mark) -> bool:
        return self._ages.age_ms(mark.created_ms) >= self._window_ms

    def _sweep(self) -> None:
        self._timer = None
        seconds = 0.0
        if self._forget() < SWEEP_KEYS:
            seconds = self._window_ms / 1000 / SWEEPS_IN_WINDOW
            seconds = min(max(seconds, SWEEP_S_MIN), SWEEP_S_MAX)
        self._timer = self._timers.after(seconds, self._sweep)

    def _forget(self) -> int:
        """Marks that are over go, oldest first; how many. What the disk refuses stays for later."""
        over: list[Change] = []
        for key, value in self._view.marks.items():
            if len(over) == SWEEP_KEYS or not self._is_over(
                msgspec.msgpack.decode(value, type=Mark)
            ):
                break
            over.append((key, None))
        if over:
            self._views.change(self._view, over)
        return len(over)


def _mark(now_ms: int, places: list[tuple[int, int]], ends: dict[int, int]) -> Mark:
    """`places` has partition and lane of each record, `ends` where each partition ended before."""
    used = list(dict.fromkeys(places))
    parts = [Part(place[0], ends[place[0]], places.count(place), place[1]) for place in used]
    order = None if len(parts) == 1 else [used.index(place) for place in places]
    return Mark(now_ms, parts, order)


def mark_key(topic: Topic, key: str) -> bytes:
    """Raises for a key that cannot be used."""
    if KEY.fullmatch(key) is None:
        raise IdempotencyKeyInvalid(
            f"an idempotency key has 1 to {KEY_LENGTH_MAX} visible ASCII characters"
        )
    return topic.uuid.bytes + blake2b(key.encode(), digest_size=DIGEST_BYTES).digest()


def require_count(before: int, count: int) -> None:
    """Another number of records is another publish, which must not be taken for stored."""
    if count != before:
        raise IdempotencyKeyConflict(
            f"this idempotency key was used for a publish of {before} records, and this one has "
            f"{count}; use a new key for it",
            records=before,
        )


def digest_of(mark_key: bytes) -> bytes:
    return mark_key[-DIGEST_BYTES:]
