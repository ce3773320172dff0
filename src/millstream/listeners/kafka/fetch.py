"""Fetch: whole batches from where a client is, or later, when there is something.

Each partition is read up to the high watermark. When all together are fewer bytes than the client
wants, it waits for more until its deadline. Meanwhile it holds no records: what comes is counted
only, and read when it is given. What is not in the page cache is read in a thread, and keeps nobody
else waiting. Long runs of batches are not read at all, where the connection can have the kernel
send them from their file.

What is read counts as held by the connections until it is in the answer. When they hold all that
they may, there is no waiting: who asks gets what there is room for, even nothing. Otherwise the
first batch always comes whole, however small the limits: a client would never get past a large one.
An offset in the middle of a batch gets the whole batch; clients skip what they
have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError, OffsetOutOfRange
from millstream.listeners.kafka import offsets_topic
from millstream.listeners.kafka.apis import Api
from millstream.listeners.kafka.sessions import Sessions, is_whole
from millstream.wire.kafka import fetch as wire
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.broker.wheel import Timer
    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.connection import Shared
    from millstream.listeners.kafka.context import Context
    from millstream.listeners.kafka.sessions import Session
    from millstream.log.partition import PartitionId
    from millstream.log.segment import Chunk
    from millstream.log.stored import StoredChunk
    from millstream.wire.kafka.fetch import Given, Part, Request
    from millstream.wire.kafka.primitives import Piece

    Found: TypeAlias = Chunk | StoredChunk
    Reading: TypeAlias = Pending[Chunk] | Pending[StoredChunk]

# The longest that a client may ask to wait: whoever asks for more is answered by then.
WAIT_S_MAX = 300.0
# How soon a fetch that has something, and wants more, looks again: it is not to be woken by every
# append.
LOOK_AGAIN_S = 0.01


def fetch_apis(context: Context) -> list[Api]:
    sessions = Sessions()
    return [
        Api(
            wire.KEY,
            "Fetch",
            wire.VERSIONS,
            wire.FLEXIBLE_FROM,
            lambda call: fetch(context, sessions, call),
        )
    ]


def fetch(context: Context, sessions: Sessions, call: Call) -> Reply | Pending[Reply]:
    request = wire.read(call.body, call.version)
    session = sessions.of(request)
    if isinstance(session, Code):
        return wire.response(context.count(session), wire.NO_SESSION, [], call.version)
    return follow(_fetch(context, call, request, session))


def _fetch(
    context: Context, call: Call, request: Request, session: Session
) -> Generator[Pending[Any], Any, Reply]:
    most = min(request.bytes_max, context.fetch_bytes_max)
    wanted = min(request.bytes_min, most, context.shared.room)
    wait_s = min(request.wait_max_ms / 1000, WAIT_S_MAX)
    parts = session.parts()
    held = _Held(context.shared)
    poll: _Poll | None = None
    try:
        places = [_Place(context, name, part, call.takes_files) for name, part in parts]
        found = yield from _read(places, held, 0, most)
        if found < wanted and wait_s > 0 and not _is_over(places, held, wanted):
            poll = _Poll(context, call, wait_s)
            dropped = 0
            while not poll.is_over and found < wanted and not _is_over(places, held, wanted):
                dropped = found
                held.drop(places)
                yield poll.wait(places, is_patient=found > 0)
                found = yield from _read(places, held, found, most)
            poll.close()
            poll = None
            if dropped:
                held.drop(places)
                places = [_Place(context, name, part, call.takes_files) for name, part in parts]
                yield from _read(places, held, 0, most)
        given = [(place.name, place.given()) for place in places]
        topics = session.answer(given, is_whole=is_whole(request))
        return wire.response(Code.NONE, session.id, topics, call.version)
    finally:
        if poll is not None:
            poll.close()
        held.release()


def _is_over(places: list[_Place], held: _Held, wanted: int) -> bool:
    """Whether there is nothing to wait for; as when there is no room for it."""
    return held.room_in_all < wanted or any(place.code for place in places)


def _read(
    places: list[_Place], held: _Held, found: int, most: int
) -> Generator[Pending[Any], Any, int]:
    """Read on everywhere; the bytes that were found by now."""
    # What other connections hold already is not given again: memory comes before speed.
    room = held.room
    for place in places:
        reading = place.read(min(most - found, room), is_first=not found and room > 0)
        if reading is None:
            continue
        try:
            if reading.is_done:
                chunk = reading.result()
            else:
                chunk = yield from held.through(reading, place.asked)
                room = held.room
        except MillstreamError as error:
            place.fail(error)
        else:
            is_first = not found and room > 0
            taken = place.take(chunk, min(most - found, room), is_first=is_first)
            held.hold(taken)
            found += taken
            room -= taken
    return found


class _Held:
    """What a fetch has read and not given yet."""

    __slots__ = ("_bytes", "_shared")

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._bytes = 0

    @property
    def room(self) -> int:
        return self._shared.room

    @property
    def room_in_all(self) -> int:
        return self._shared.room + self._bytes

    def hold(self, size: int) -> None:
        self._bytes += size
        self._shared.hold(size)

    def through(self, reading: Reading, size: int) -> Generator[Pending[Any], Any, Found]:
        """While a read is under way, its bytes are held: others must not count on that room."""
        self.hold(size)
        try:
            chunk: Found = yield reading
            return chunk
        finally:
            self._bytes -= size
            self._shared.release(size)

    def drop(self, places: list[_Place]) -> None:
        if self._bytes:
            for place in places:
                place.drop()
            self.release()

    def release(self) -> None:
        size, self._bytes = self._bytes, 0
        if size:
            self._shared.release(size)


class _Place:
    """One partition in a fetch."""

    __slots__ = (
        "_context",
        "_high_watermark",
        "_messages",
        "_part",
        "_pieces",
        "_size",
        "_start_offset",
        "_takes_files",
        "asked",
        "code",
        "id",
        "name",
        "position",
    )

    def __init__(self, context: Context, name: str, part: Part, takes_files: bool) -> None:
        self._context = context
        self._part = part
        self._takes_files = takes_files
        self._pieces: list[Piece] = []
        # Bytes, and records, that were found by now, whether they are kept or not.
        self._size = self._messages = 0
        # Bytes that were asked for last.
        self.asked = 0
        self._start_offset = self._high_watermark = wire.NO_OFFSET
        self.name = name
        self.position = part.offset
        self.id: PartitionId | None = None
        self.code = Code.NONE
        if name == offsets_topic.NAME:
            self.code = offsets_topic.code_of_offset(context, part.number, part.offset)
            self._start_offset = self._high_watermark = 0
            return
        try:
            id = self.id = context.broker.topics.partition_of(name, part.number)
            if part.leader_epoch >= 0:
                self.code = check_epoch(context, id, part.leader_epoch)
        except MillstreamError as error:
            self.fail(error)

    @property
    def is_at_end(self) -> bool:
        return self.position >= self._high_watermark

    def fail(self, error: MillstreamError) -> None:
        self.code = self._context.code(error)
        self._start_offset = self._high_watermark = wire.NO_OFFSET

    def read(self, room: int, *, is_first: bool) -> Reading | None:
        """What comes next; None without anything, or without room for it."""
        id = self.id
        if self.code or id is None:
            return None
        engine, position = self._context.engine, self.position
        try:
            start, end = engine.offsets(id)
            if not self._size and not start <= position <= end:
                raise OffsetOutOfRange(f"{id} has offsets {start} to {end}, not {position}")
        except MillstreamError as error:
            self.fail(error)
            return None
        self._start_offset, self._high_watermark = start, end
        room = min(room, self._part.bytes_max - self._size)
        if position >= end or (room <= 0 and not is_first):
            return None
        self.asked = max(room, 1)
        stored = engine.locate(id, position, self.asked) if self._takes_files else None
        return engine.read(id, position, self.asked) if stored is None else Pending.of(stored)

    def take(self, chunk: Found, room: int, *, is_first: bool) -> int:
        """Keep it, unless it is a batch too large that need not be given; the bytes kept."""
        size = len(chunk.data)
        # The first of a partition may be larger than its own limit, if there is room at all.
        fits = size <= room and (not self._size or size <= self._part.bytes_max - self._size)
        if not fits and not is_first:
            return 0
        if size:
            self._pieces.append(chunk.data)
            self._size += size
            self._messages += chunk.next_offset - self.position
        self.position = max(self.position, chunk.next_offset)
        self._high_watermark = max(self._high_watermark, self.position)
        return size

    def drop(self) -> None:
        """What was read is counted still; the position is after it."""
        self._pieces.clear()

    def given(self) -> Given:
        if self._pieces and not self.code:
            traffic = self._context.broker.traffic.of(self.name)
            traffic.messages_out += self._messages
            traffic.bytes_out += self._size
        return wire.Given(
            self._part.number,
            self.code,
            self._high_watermark,
            self._start_offset,
            () if self.code else self._pieces,
        )


def check_epoch(context: Context, id: PartitionId, epoch: int) -> Code:
    """Whether a client knows who leads: it learns of a restart by being told that it does not."""
    own = context.engine.leader_epoch(id)
    if epoch == own:
        return Code.NONE
    return context.count(Code.FENCED_LEADER_EPOCH if epoch < own else Code.UNKNOWN_LEADER_EPOCH)


class _Poll:
    """The wait of one fetch, until its deadline."""

    __slots__ = ("_context", "_pausing", "_timer", "_waits", "_woken", "is_over")

    def __init__(self, context: Context, call: Call, seconds: float) -> None:
        self._context = context
        self.is_over = False
        self._woken: Pending[None] = Pending()
        self._waits: list[tuple[PartitionId, Pending[None]]] = []
        self._pausing: Timer | None = None
        self._timer = context.broker.timers.after(seconds, self._end)
        call.on_hurry = self._end

    def wait(self, places: list[_Place], *, is_patient: bool) -> Pending[None]:
        """Done when there is more to read at one of the places, or the time is over."""
        woken = self._woken = Pending()
        engine = self._context.engine
        for place in places:
            if place.id is None or not place.is_at_end:
                continue
            one = engine.wait(place.id, place.position)
            self._waits.append((place.id, one))
            one.then(lambda _: self._wake(woken, is_patient))
        return woken

    def _wake(self, woken: Pending[None], is_patient: bool) -> None:
        if woken.is_done or woken is not self._woken or self._pausing is not None:
            return
        if is_patient:
            self._pausing = self._context.broker.timers.after(
                LOOK_AGAIN_S, lambda: self._go_on(woken)
            )
        else:
            # At the end of the turn, because other partitions may have more in the same one.
            self._context.turns.at_end(lambda: self._go_on(woken))

    def _go_on(self, woken: Pending[None]) -> None:
        self._pausing = None
        self._forget()
        woken.succeed(None)

    def _end(self) -> None:
        self.is_over = True
        self._go_on(self._woken)

    def _forget(self) -> None:
        waits, self._waits = self._waits, []
        for id, one in waits:
            if not one.is_done:
                self._context.engine.forget(id, one)

    def close(self) -> None:
        timers = self._context.broker.timers
        timers.cancel(self._timer)
        if self._pausing is not None:
            timers.cancel(self._pausing)
        self._forget()
