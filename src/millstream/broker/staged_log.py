"""The topic `__staged`: appended to, and cut as far as nobody needs it.

A log only loses what is at its front. So what keeps much more than itself is moved on: written
again at the end, and the view says so, before anything is cut.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from millstream.broker.staged_values import PARTITION, SETTINGS, Part, Place, StagedOptions
from millstream.broker.staged_view import part_change
from millstream.engine.pending import Pending
from millstream.errors import EngineStopped, LogDamaged, MillstreamError, OffsetOutOfRange
from millstream.log import batch as batches

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from millstream.broker.staged_view import WritersView
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.views import Entry
    from millstream.engine.protocol import Engine

# What is in front is moved on when less than this part of the log is needed.
NEEDED_PART = 4


class StagedLog:
    __slots__ = (
        "_around",
        "_cut_bytes",
        "_engine",
        "_floors",
        "_is_cutting",
        "_move_bytes",
        "_view",
        "forgotten_bytes",
        "moved",
    )

    def __init__(
        self, engine: Engine, around: Surroundings, view: WritersView, options: StagedOptions
    ) -> None:
        self._cut_bytes, self._move_bytes = options.cut_bytes, options.move_bytes
        self._engine = engine
        self._around = around
        self._view = view
        # Of appends that the view does not know yet: where they may begin.
        self._floors: dict[object, int] = {}
        self._is_cutting = False
        # About how much of the log nobody needs, since it was cut.
        self.forgotten_bytes = 0
        self.moved = 0

    def open(self) -> Generator[Pending[Any], Any, None]:
        """At the start."""
        engine = self._engine
        if PARTITION.topic in {topic.name for topic in engine.topics()}:
            yield engine.alter(PARTITION.topic, settings=SETTINGS)
        else:
            yield engine.create(PARTITION.topic, 1, SETTINGS)
        yield engine.claim(PARTITION.topic)

    @property
    def bytes(self) -> int:
        return self._engine.extent(PARTITION).bytes

    # ---- appending

    @contextmanager
    def adding(self) -> Iterator[None]:
        """What is appended inside is not cut away before the view knows it."""
        token = object()
        self._floors[token] = self._engine.offsets(PARTITION).high_watermark
        try:
            yield
        finally:
            del self._floors[token]

    def append(
        self, ready: Sequence[Entry], counts: Sequence[int]
    ) -> Generator[Pending[Any], Any, list[Place]]:
        """Done when all of them are durable. One that is refused lets the others be for nothing."""
        appends = [self._engine.append(*entry) for entry in ready]
        error: BaseException | None = None
        places: list[Place] = []
        for entry, count, append in zip(ready, counts, appends, strict=True):
            try:
                offset = yield append
            except MillstreamError as refusal:
                error = error or refusal
            else:
                places.append(Place(offset, count, len(entry.data)))
        if error is not None:
            self.forgotten_bytes += sum(place.bytes for place in places)
            raise error
        return places

    # ---- cutting

    def is_long(self) -> bool:
        return self.forgotten_bytes >= self._cut_bytes

    def cut(self, is_busy: Callable[[Part], bool]) -> Generator[Pending[Any], Any, None]:
        """Cut what nobody needs. `is_busy` says which parts are being copied, and stay."""
        if self._is_cutting:
            return
        self._is_cutting = True
        try:
            yield from self._trim()
            moved: set[str] = set()
            while self._is_sparse():
                id = self._first_part()
                if id is None or id in moved or is_busy(self._view.parts[id]):
                    break
                moved.add(id)
                yield from self._move(id, is_busy)
                yield from self._trim()
        finally:
            self._is_cutting = False

    def _trim(self) -> Generator[Pending[Any], Any, None]:
        first = self._first_needed()
        forgotten = self.forgotten_bytes
        if first <= self._engine.offsets(PARTITION).start:
            return
        # What the view forgot may come back, when that is refused: until then nothing is cut.
        yield self._around.views.settled(self._view)
        yield self._engine.trim(PARTITION, first)
        self.forgotten_bytes = max(0, self.forgotten_bytes - forgotten)

    def _first_needed(self) -> int:
        first = self._engine.offsets(PARTITION).high_watermark
        first = min(self._floors.values(), default=first)
        return min(first, min(self._view.firsts.values(), default=first))

    def _is_sparse(self) -> bool:
        size = self.bytes
        return size >= self._move_bytes and self._view.bytes * NEEDED_PART < size

    def _first_part(self) -> str | None:
        """The part that lies first."""
        firsts = self._view.firsts
        return min(firsts, key=firsts.__getitem__, default=None)

    def _move(self, id: str, is_busy: Callable[[Part], bool]) -> Generator[Pending[Any], Any, None]:
        part = self._view.parts[id]
        with self.adding():
            places: list[Place] = []
            for place in part.places:
                try:
                    chunk = yield self._engine.read(PARTITION, place.offset, 1)
                except (LogDamaged, OffsetOutOfRange):
                    # Whoever commits it is told.
                    places.append(place)
                    continue
                header = batches.read_header(chunk.data)
                data = bytes(chunk.data[: header.size])
                offset = yield self._engine.append(PARTITION, data, header)
                places.append(msgspec.structs.replace(place, offset=offset))
            if self._view.parts.get(id) is not part or is_busy(part):
                return
            moved = msgspec.structs.replace(part, places=places)
            self.moved += 1
            yield self._around.views.change(self._view, [part_change(id, moved)])


def log_failure(done: Pending[Any]) -> None:
    if done.error is not None and not isinstance(done.error, EngineStopped):
        structlog.get_logger("millstream.broker").warning(
            "staged batches that nobody needs were not removed; the next time tries again",
            error=str(done.error),
        )
