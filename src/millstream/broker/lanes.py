"""Lanes: which offsets belong to which one, and which one is served next.

A lane is a number in here, its place in `LANES`; only outside it has a name. A batch has records
of one lane, and says in its header which. So the index of a partition is made from headers, by
runs of offsets, and costs memory by runs: a backlog of a hundred million records of one lane is
one run. It lives in memory alone and is made anew when it is asked for. A topic that never had a
record of another lane than normal has none.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from millstream.engine.pending import Pending, follow
from millstream.log import batch as batches
from millstream.log.batch import LANE_MASK, LANE_SHIFT, LANES
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from uuid import UUID

    from millstream.broker.topics import Topic, Topics
    from millstream.clock import Clock
    from millstream.engine.protocol import Engine
    from millstream.engine.turns import Turns

LANE_COUNT = len(LANES)
NORMAL = LANES.index("normal")
# Offsets without records: between batches, and of batches that are not for readers.
_GAP = LANE_COUNT

# A run takes 17 bytes. The worst there can be is another lane with every record; then this is
# 17 MB a partition, and as many records are looked at ahead of the oldest one that is not settled.
# What lies behind them waits, whatever its lane.
RUNS_MAX = 1_000_000
# The same for all partitions together, 136 MB; each has at least RUNS_MIN of its own.
RUNS_TOTAL_MAX = 8_000_000
RUNS_MIN = 1_000
# Runs at the front are given up together: it moves all that follow.
CUT_RUNS_MIN = 1_024
CUT_PART = 64
# Read at once: 1,500 of the smallest batches, about 2 ms to go through.
READ_BYTES = 256 * 1024
# How long the loop is kept before others have a turn, without the last read.
SLICE_S = 0.002
# What a lane may have when no other has any.
ALONE_MAX = 1 << 30


def lane_of(attributes: int) -> int:
    """Of a batch, by its header; without a hint it is normal."""
    lane = ((attributes & LANE_MASK) >> LANE_SHIFT) - 1
    return lane if 0 <= lane < LANE_COUNT else NORMAL


class Room:
    """Runs of all indexes together."""

    __slots__ = ("runs", "runs_max")

    def __init__(self, runs_max: int = RUNS_TOTAL_MAX) -> None:
        self.runs = 0
        self.runs_max = runs_max


class LaneIndex:
    """Of one partition, from `start` to `end`: which offsets belong to which lane.

    Run i is of lane `_lanes[i]`, from `_firsts[i]` up to the first of the next, the last one up to
    `end`. Neighbours are of different lanes. `_before[i]` is how many records of that lane the
    runs before it have, since the index began.
    """

    __slots__ = ("_before", "_ends", "_firsts", "_lanes", "_room", "_totals", "end", "start")

    def __init__(self, start: int, room: Room | None = None) -> None:
        self.start = start
        self.end = start
        self._firsts = array("q")
        self._before = array("q")
        # A byte each, because the next run of a lane is then found at the speed of memory.
        self._lanes = bytearray()
        self._room = Room() if room is None else room
        # Of each lane, and of gaps: how many there have been, and where the last run ends.
        self._totals = [0] * (LANE_COUNT + 1)
        self._ends = [start] * (LANE_COUNT + 1)

    @property
    def runs(self) -> int:
        return len(self._firsts)

    @property
    def totals(self) -> list[int]:
        """How many each lane has had since the index began."""
        return self._totals[:LANE_COUNT]

    @property
    def is_full(self) -> bool:
        """Then `add` may not be called until something is forgotten."""
        runs = len(self._firsts)
        return runs >= RUNS_MAX or (runs >= RUNS_MIN and self._room.runs >= self._room.runs_max)

    def add(self, first: int, end: int, lane: int) -> None:
        """The offsets that follow; between them and those before may be a gap."""
        assert self.end <= first < end
        assert not self.is_full
        if first > self.end:
            self._add(self.end, first, _GAP)
        self._add(first, end, lane)

    def skip_to(self, offset: int) -> None:
        """There is nothing before that offset."""
        if offset > self.end:
            self._add(self.end, offset, _GAP)

    def _add(self, first: int, end: int, lane: int) -> None:
        lanes = self._lanes
        if not lanes or lanes[-1] != lane:
            lanes.append(lane)
            self._firsts.append(first)
            self._before.append(self._totals[lane])
            self._room.runs += 1
        self._totals[lane] += end - first
        self._ends[lane] = end
        self.end = end

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        """The first offset of the lane at or after this one, and where its run ends."""
        at = self._find(lane, offset)
        if at < 0:
            return None
        return max(self._firsts[at], offset, self.start), self._end_of(at)

    def count(self, lane: int, offset: int) -> int:
        """How many the lane has from that offset on."""
        at = self._find(lane, offset)
        if at < 0:
            return 0
        passed = max(0, offset - self._firsts[at], self.start - self._firsts[at])
        return self._totals[lane] - self._before[at] - passed

    def lane_at(self, offset: int) -> int | None:
        """None where nothing is known of it, or where there is a gap."""
        if not self.start <= offset < self.end:
            return None
        lane = self._lanes[bisect_right(self._firsts, offset) - 1]
        return None if lane == _GAP else lane

    def _find(self, lane: int, offset: int) -> int:
        """The run of the lane that holds the offset, or the next one; -1 without one."""
        offset = max(offset, self.start)
        if offset >= self._ends[lane]:
            return -1
        at = bisect_right(self._firsts, offset) - 1
        return self._lanes.find(lane, at)

    def _end_of(self, at: int) -> int:
        return self.end if at + 1 == len(self._firsts) else self._firsts[at + 1]

    def forget_before(self, offset: int) -> None:
        """Nobody asks for these any more."""
        if offset <= self.start:
            return
        self.start = min(offset, self.end)
        # All runs that end at or before it.
        passed = bisect_right(self._firsts, self.start) - 1
        if passed >= CUT_RUNS_MIN and passed * CUT_PART >= len(self._firsts):
            self._cut(passed)

    def drop(self) -> None:
        """The index is given up."""
        self._cut(len(self._firsts))

    def _cut(self, count: int) -> None:
        del self._firsts[:count]
        del self._before[:count]
        del self._lanes[:count]
        self._room.runs -= count


class Lanes:
    """The indexes of all partitions that somebody asked for, one for each group: a group that is
    far behind, or never comes back, fills its own and nobody else's."""

    __slots__ = ("_catching_up", "_clock", "_engine", "_indexes", "_turns", "room")

    def __init__(self, engine: Engine, topics: Topics, clock: Clock, turns: Turns) -> None:
        self._engine = engine
        self._clock = clock
        self._turns = turns
        self.room = Room()
        # By UUID: a topic made again under an old name has other records.
        self._indexes: dict[UUID, dict[tuple[int, str], LaneIndex]] = {}
        self._catching_up: dict[LaneIndex, Pending[None]] = {}
        topics.watch_deleted(self.forget)

    def index(self, topic: Topic, partition: int, offset: int, group: str) -> LaneIndex | None:
        """None for a topic that has never used lanes. It may have to catch up, and it is another
        one than before when it has to be made anew, because somebody needs records that it has
        forgotten: then it begins at `offset`."""
        if not topic.uses_lanes:
            return None
        indexes = self._indexes.setdefault(topic.uuid, {})
        index = indexes.get((partition, group))
        if index is None or index.start > offset:
            if index is not None:
                index.drop()
            index = indexes[partition, group] = LaneIndex(offset, self.room)
        return index

    def catch_up(self, topic: Topic, partition: int, group: str) -> Pending[None] | None:
        """Done when the index has all that is visible, or is full; None when there is nothing to
        do, as for a partition that nobody asked the index of."""
        index = self._indexes.get(topic.uuid, {}).get((partition, group))
        if index is None or index.is_full:
            return None
        under_way = self._catching_up.get(index)
        if under_way is not None:
            return under_way
        id = PartitionId(topic.name, partition)
        if index.end >= self._engine.offsets(id).high_watermark:
            return None
        pending = follow(self._catch_up(topic, id, group, index))
        if not pending.is_done:
            self._catching_up[index] = pending
            pending.then(lambda _: self._catching_up.__delitem__(index))
        return pending

    def _catch_up(
        self, topic: Topic, id: PartitionId, group: str, index: LaneIndex
    ) -> Generator[Pending[Any], Any, None]:
        slice_end = self._clock.monotonic() + SLICE_S
        while not index.is_full:
            start, end = self._engine.offsets(id)
            # Retention and purging go on meanwhile.
            index.skip_to(start)
            if index.end >= end:
                return
            chunk = yield self._engine.read(id, index.end, READ_BYTES)
            if not self._is_of(topic, id.number, group, index):
                return
            _add_batches(index, chunk.data)
            if not index.is_full:
                index.skip_to(chunk.next_offset)
            if self._clock.monotonic() >= slice_end:
                yield self._breath()
                if not self._is_of(topic, id.number, group, index):
                    return
                slice_end = self._clock.monotonic() + SLICE_S

    def _is_of(self, topic: Topic, partition: int, group: str, index: LaneIndex) -> bool:
        """Whether it is still the one, and not of a topic or a group that is gone."""
        return self._indexes.get(topic.uuid, {}).get((partition, group)) is index

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending

    def forget_group(self, topic: Topic, group: str) -> None:
        """It receives from the topic no more."""
        indexes = self._indexes.get(topic.uuid, {})
        for place in [place for place in indexes if place[1] == group]:
            indexes.pop(place).drop()

    def forget(self, topic: Topic) -> None:
        """Also when nobody receives from the topic any more."""
        for index in self._indexes.pop(topic.uuid, {}).values():
            index.drop()


def _add_batches(index: LaneIndex, data: memoryview) -> None:
    """By headers alone; of the first batch, what was added before is left out."""
    for _, header in batches.walk(data):
        if index.is_full:
            return
        first, end = max(header.base_offset, index.end), header.next_offset
        if first < end:
            lane = _GAP if header.is_control else lane_of(header.attributes)
            index.add(first, end, lane)


class LaneTurns:
    """Which lane is served next, for one group and topic: deficit round robin.

    In a round, each lane that has records may have as many as its weight says. The lanes are looked
    at from critical on with every choice, so a critical record that comes in the middle of a round
    waits for no other lane, unless critical had its share of this round. What is not used up is
    lost at the end of the round; a round ends when no lane that has records may have more.

    A lane that has had records for `boost_s`, and was not served, is next, also beyond its share:
    then it owes what it had too much, at most one share. Many weights and few workers are enough
    for that: a round of a hundred records takes long.
    """

    __slots__ = (
        "_boost_s",
        "_has_credit",
        "_is_alone",
        "_left",
        "_waiting_since",
        "last_served",
        "weights",
    )

    def __init__(self, weights: Sequence[int], boost_s: float, now_s: float) -> None:
        assert len(weights) == LANE_COUNT
        assert min(weights) > 0
        self.weights = tuple(weights)
        self._boost_s = boost_s
        # Of this round: what each lane may still have, and whether it was given its share.
        self._left = [0] * LANE_COUNT
        self._has_credit = [False] * LANE_COUNT
        # Since when a lane has had records, for all that is known, without being served.
        self._waiting_since: list[float | None] = [now_s] * LANE_COUNT
        self._is_alone = False
        self.last_served: list[float | None] = [None] * LANE_COUNT

    def adjust(self, weights: Sequence[int], boost_s: float) -> None:
        """The topic may say something else by now; what lanes have left of this round stays."""
        self.weights = tuple(weights)
        self._boost_s = boost_s

    def choose(self, has: Sequence[bool], now_s: float) -> tuple[int, int]:
        """The lane to serve, and how many records at most; `has` says which have any: one does."""
        self._note_waiting(has, now_s)
        self._is_alone = sum(map(bool, has)) == 1
        if self._is_alone:
            return _first(has), ALONE_MAX
        boosted = self._overdue(now_s)
        if boosted is not None:
            self._credit(boosted)
            return boosted, max(1, self._left[boosted])
        while True:
            for lane, has_records in enumerate(has):
                if has_records:
                    self._credit(lane)
                    if self._left[lane] > 0:
                        return lane, self._left[lane]
            self._begin_round()

    def served(self, lane: int, count: int, now_s: float) -> None:
        """So many of the lane that was chosen were given out; perhaps fewer than it could have."""
        if count <= 0:
            return
        self.last_served[lane] = now_s
        self._waiting_since[lane] = now_s
        # Who has no rivals takes nothing from anybody.
        if not self._is_alone:
            self._left[lane] = max(self._left[lane] - count, -self.weights[lane])

    def _note_waiting(self, has: Sequence[bool], now_s: float) -> None:
        waiting = self._waiting_since
        for lane, has_records in enumerate(has):
            if not has_records:
                waiting[lane] = None
            elif waiting[lane] is None:
                waiting[lane] = now_s

    def _overdue(self, now_s: float) -> int | None:
        """The lane that waits longest, when that is too long; of equals the first."""
        found, found_since = None, now_s - self._boost_s
        for lane, since in enumerate(self._waiting_since):
            if since is not None and (
                since < found_since or (found is None and since == found_since)
            ):
                found, found_since = lane, since
        return found

    def _credit(self, lane: int) -> None:
        """Its share of the round, once, less what it owes."""
        if not self._has_credit[lane]:
            self._has_credit[lane] = True
            self._left[lane] += self.weights[lane]

    def _begin_round(self) -> None:
        for lane in range(LANE_COUNT):
            self._has_credit[lane] = False
            self._left[lane] = min(0, self._left[lane])


def _first(has: Sequence[bool]) -> int:
    return next(lane for lane, has_records in enumerate(has) if has_records)
