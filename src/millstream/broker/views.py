"""Views: state in memory that is kept in, and rebuilt from, an internal topic.

A view is a map from keys to values. A change is applied at once, so that conflicts are seen at
once, and is appended with all others of this turn of the loop, whatever their views: one append.
What an answer depends on must be durable before it goes out. `change` is done then, and whoever
answers from a view that it only read waits for `settled`.

An append that is refused (a full disk) is taken back: each of its keys gets the value that it had
before, unless a later change has given it another by now.

At the start a view is loaded: its snapshot, if there is one that fits, then the records after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import structlog

from millstream.engine.pending import Pending, follow
from millstream.errors import LogDamaged
from millstream.log import batch as batches
from millstream.log.partition import PartitionId, PartitionSettings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns

# A key, and what it now has; None removes it.
Change: TypeAlias = tuple[bytes, bytes | None]

# The newest value of each key is all that a view needs. Small segments, because only what is in
# sealed ones is compacted and gets into snapshots.
INTERNAL_SETTINGS = PartitionSettings(
    fsync="every",
    segment_bytes=8 * 1024 * 1024,
    retention_age_ms=None,
    retention_bytes=None,
    compact=True,
    # No view reads so late that it could miss one.
    tombstone_age_ms=60_000,
    batch_bytes_max=2 * 1024 * 1024,
)
# One batch holds at most so much, unless one change alone is larger.
BATCH_RECORDS = 4096
BATCH_BYTES = 256 * 1024
READ_BYTES = 1024 * 1024


class Entry(NamedTuple):
    """A batch on its way to a partition, with the header by which the broker vouches for it."""

    id: PartitionId
    data: bytes
    header: batches.Header


def encoded(
    id: PartitionId,
    fields: list[batches.Fields],
    lane: str | None = None,
    *,
    is_append_time: bool = False,
) -> Entry:
    """A batch of the broker's own making. In a topic of append times all records have the same."""
    append_time = fields[-1][0] if is_append_time else None
    data = batches.encode(fields, lane=lane, append_time=append_time)
    return Entry(id, data, batches.read_header(data))


class View(Protocol):
    """State that `Views` keeps durable."""

    @property
    def name(self) -> str:
        """Also that of its folder of snapshots."""
        ...

    @property
    def partition(self) -> PartitionId:
        """Where its changes are appended: of a topic that begins with `__`, and its own."""
        ...

    def apply(self, changes: Iterable[Change]) -> None:
        """Take changes in their order. Must accept all that it ever gave out."""
        ...

    def value_of(self, key: bytes) -> bytes | None:
        """What it has for a key now, as `apply` would take it."""
        ...

    def entries(self) -> Iterable[Change]:
        """All that it has: applied to an empty view, they make the same one."""
        ...


class _Turn:
    """What goes into one append, and how to take it back."""

    __slots__ = ("before", "changes", "entries", "error", "is_done", "pending", "readers")

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        self.changes: dict[str, dict[bytes, bytes | None]] = {}
        self.before: dict[str, dict[bytes, bytes | None]] = {}
        self.entries = entries
        # Done with the offsets of `entries`.
        self.pending: Pending[list[int]] = Pending()
        # Of those who only read: by the view that they read.
        self.readers: dict[str, Pending[None]] = {}
        self.error: BaseException | None = None
        self.is_done = False

    def take(self, view: View, changes: Sequence[Change]) -> None:
        before = self.before.get(view.name)
        if before is None:
            before = self.before[view.name] = {}
            self.changes[view.name] = {}
        for key, _ in changes:
            if key not in before:
                before[key] = view.value_of(key)
        view.apply(changes)
        self.changes[view.name].update(changes)


@dataclass(slots=True)
class ViewCounts:
    appends: int = 0
    changes: int = 0
    refused: int = 0


class Views:
    """All views of one broker."""

    __slots__ = ("_clock", "_engine", "_flying", "_turn", "_turns", "_views", "counts")

    def __init__(self, engine: Engine, clock: Clock, turns: Turns) -> None:
        self._engine = engine
        self._clock = clock
        self._turns = turns
        self._views: dict[str, View] = {}
        self._turn: _Turn | None = None
        # Appends that are not all answered, oldest first.
        self._flying: deque[_Turn] = deque()
        self.counts = ViewCounts()

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def add(self, view: View) -> None:
        """Before the start."""
        assert view.partition.topic.startswith("__"), view.partition
        assert view.name not in self._views
        self._views[view.name] = view

    # ---- changes

    def change(self, view: View, changes: Sequence[Change]) -> Pending[None]:
        """Apply now; done when durable. A refusal has been undone when it is told."""
        turn = self._turn
        if turn is None:
            turn = self._turn = _Turn()
            self._turns.soon(self._end_turn)
        turn.take(view, changes)
        done: Pending[None] = Pending()
        turn.pending.then(
            lambda one: done.succeed(None) if one.error is None else done.fail(one.error)
        )
        return done

    def change_with(
        self, view: View, changes: Sequence[Change], entries: Sequence[Entry]
    ) -> Pending[list[int]]:
        """As `change`, in one atomic append with batches of other partitions: their offsets.

        It is an append of its own: another's batch that is refused must not take it along.
        """
        self._end_turn()
        turn = _Turn(entries)
        turn.take(view, changes)
        self._submit(turn)
        return turn.pending

    def settled(self, view: View) -> Pending[None]:
        """Done when all that is applied to a view now is durable. It fails when some of it is
        refused: an answer that was made from it must not go out."""
        turn = self._newest(view.name)
        if turn is None:
            return Pending.of(None)
        readers = turn.readers.get(view.name)
        if readers is None:
            readers = turn.readers[view.name] = Pending()
        return readers

    def _newest(self, name: str) -> _Turn | None:
        """The newest append that has changes of a view, and is not answered."""
        if self._turn is not None and name in self._turn.changes:
            return self._turn
        for turn in reversed(self._flying):
            if name in turn.changes and not turn.is_done:
                return turn
        return None

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._submit(turn)

    def _submit(self, turn: _Turn) -> None:
        self._flying.append(turn)
        self.counts.appends += 1
        entries: list[Entry] = []
        for name, changes in turn.changes.items():
            self.counts.changes += len(changes)
            entries += self._encoded(self._views[name].partition, changes)
        own = len(entries)
        entries += turn.entries
        if len(entries) == 1:
            self._engine.append(*entries[0]).then(lambda one: self._done(turn, one, []))
        else:
            self._engine.append_atomic(entries).then(
                lambda one: self._done(turn, one, one.result()[own:] if one.error is None else [])
            )

    def _encoded(
        self, id: PartitionId, changes: dict[bytes, bytes | None]
    ) -> Generator[Entry, None, None]:
        now_ms = self._clock.wall_ms()
        fields: list[batches.Fields] = []
        size = 0
        for key, value in changes.items():
            more = len(key) + len(value or b"")
            if fields and (size + more > BATCH_BYTES or len(fields) == BATCH_RECORDS):
                yield encoded(id, fields)
                fields, size = [], 0
            fields.append((now_ms, key, value, ()))
            size += more
        if fields:
            yield encoded(id, fields)

    def _done(self, turn: _Turn, appended: Pending[Any], offsets: list[int]) -> None:
        turn.is_done = True
        error = appended.error
        if error is not None:
            self.counts.refused += 1
            self._undo(turn)
            self._fail_readers(turn, error)
        while self._flying and self._flying[0].is_done:
            self._flying.popleft()
        if error is not None:
            turn.pending.fail(error)
            return
        turn.pending.succeed(offsets)
        for readers in turn.readers.values():
            readers.succeed(None)

    def _undo(self, turn: _Turn) -> None:
        later = self._after(turn)
        for name, before in turn.before.items():
            view = self._views[name]
            for key, value in before.items():
                # What a later change replaced, its own undoing would bring back.
                heir = next((one for one in later if key in one.before.get(name, ())), None)
                if heir is None:
                    view.apply(((key, value),))
                else:
                    heir.before[name][key] = value

    def _fail_readers(self, turn: _Turn, error: BaseException) -> None:
        """They may have seen what is gone now, whichever append they wait for."""
        for one in (turn, *self._after(turn)):
            for name in turn.changes.keys() & one.readers.keys():
                one.readers.pop(name).fail(error)

    def _after(self, turn: _Turn) -> list[_Turn]:
        flying = list(self._flying)
        later = flying[flying.index(turn) + 1 :]
        return later if self._turn is None else [*later, self._turn]

    # ---- the start

    def load(self) -> Pending[None]:
        """Every view as it was, once the engine has started."""
        return follow(self._load())

    def _load(self) -> Generator[Pending[Any], Any, None]:
        known = {topic.name for topic in self._engine.topics()}
        for view in self._views.values():
            yield self._engine.claim(view.name)
            id = view.partition
            if id.topic not in known:
                yield self._engine.create(id.topic, id.number + 1, INTERNAL_SETTINGS)
                known.add(id.topic)
            yield self._engine.alter(id.topic, settings=INTERNAL_SETTINGS)
            offset = self._engine.offsets(id).start
            snapshot = yield self._engine.load_view(id, view.name)
            if snapshot is not None:
                yield from self._restore(view, snapshot.data)
                offset = max(offset, snapshot.offset)
            yield from self._replay(view, offset)

    def _restore(self, view: View, data: memoryview) -> Generator[Pending[Any], Any, None]:
        """In steps, as the log: a snapshot can be large."""
        size = 0
        for position, header in batches.walk(data):
            view.apply(_changes_of(data[position : position + header.size], 0))
            size += header.size
            if size >= READ_BYTES:
                size = 0
                yield self._breath()

    def _replay(self, view: View, offset: int) -> Generator[Pending[Any], Any, None]:
        id = view.partition
        while offset < self._engine.offsets(id).high_watermark:
            try:
                chunk = yield self._engine.read(id, offset, READ_BYTES)
            except LogDamaged as error:
                _logger().error("a view lost changes to damage", view=view.name, **error.fields)
                last = error.fields.get("last")
                if not isinstance(last, int) or last < offset:
                    raise
                offset = last + 1
                continue
            for position, header in batches.walk(chunk.data):
                view.apply(_changes_of(chunk.data[position : position + header.size], offset))
            offset = chunk.next_offset
            # Others have their turn: the health pages answer while a large view is loaded.
            yield self._breath()

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending


def _changes_of(batch: memoryview, offset: int) -> list[Change]:
    """A list: a view may take the changes of one batch by columns."""
    return [
        (record.key, record.value)
        for record in batches.decode(batch)
        if record.key is not None and record.offset >= offset
    ]


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
