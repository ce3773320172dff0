"""How far groups are behind: in messages, in seconds, and whether it gets better or worse.

messages  offsets between what is committed and the end of the partition
seconds   age of the oldest record that is not committed; 0 when there is none
trend     messages a second by which it grows (more than 0: falling behind), as a straight line
          through the samples of the last five minutes

Samples are taken on the monotonic clock. The age of a record is measured on the wall clock, as
its timestamp was, and is never less than 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.group_values import Committed
from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.broker.directory import Directory
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.surroundings import Surroundings

SAMPLE_SECONDS = 15.0
TREND_SECONDS = 300.0
# Partitions of groups that are sampled. A group with members is sampled before one without.
SERIES_MAX = 10_000
# Of these, how many are on the metrics page, with the age of their oldest record looked up.
METRICS_MAX = 1_000
# How many are sampled, and how many records are looked up, in one turn of the loop: about a
# millisecond each.
SLICE = 500
LOOK_UP_SLICE = 20


class PartitionLag(NamedTuple):
    topic: str
    partition: int
    committed: int
    start: int
    end: int
    messages: int
    seconds: float
    trend_per_s: float | None
    member_id: str | None


class GroupLag(NamedTuple):
    """All partitions together: the sum, the worst, the sum."""

    group: str
    messages: int
    seconds: float
    trend_per_s: float | None
    partitions: list[PartitionLag]


class LagSample(NamedTuple):
    """A row of the metrics page."""

    group: str
    topic: str
    partition: int
    messages: int
    seconds: float
    trend_per_s: float | None


class _Key(NamedTuple):
    """Of a series. With the UUID, because a topic made again has nothing of the old one."""

    group: str
    uuid: bytes
    id: PartitionId


class Series:
    """The samples of one partition of a group."""

    __slots__ = ("_lags", "_times", "oldest_ms", "oldest_offset")

    def __init__(self) -> None:
        self._times = array("d")
        self._lags = array("q")
        # The timestamp of the oldest record not committed, and where it was looked up.
        self.oldest_offset = -1
        self.oldest_ms = 0

    def add(self, now: float, messages: int) -> None:
        self._times.append(now)
        self._lags.append(messages)
        while self._times[0] < now - TREND_SECONDS:
            del self._times[0], self._lags[0]

    def slope(self) -> float | None:
        """By least squares; None while there are not two samples."""
        count = len(self._times)
        if count < 2:
            return None
        mean_time = sum(self._times) / count
        mean_lag = sum(self._lags) / count
        spread = sum((time - mean_time) ** 2 for time in self._times)
        if not spread:
            return None
        together = sum(
            (time - mean_time) * (lag - mean_lag)
            for time, lag in zip(self._times, self._lags, strict=True)
        )
        return together / spread


class Lags:
    __slots__ = (
        "_clock",
        "_directory",
        "_has_stopped",
        "_offsets",
        "_reader",
        "_series",
        "_timers",
        "_turns",
    )

    def __init__(self, around: Surroundings, offsets: GroupOffsets, directory: Directory) -> None:
        self._reader = around.reader
        self._clock = around.clock
        self._timers = around.timers
        self._turns = around.turns
        self._offsets = offsets
        self._directory = directory
        self._series: dict[_Key, Series] = {}
        self._has_stopped = False

    def of(self, group: str) -> Pending[GroupLag]:
        return follow(self._of(group))

    def _of(self, group: str) -> Generator[Pending[Any], Any, GroupLag]:
        self._offsets.known(group)
        yield self._offsets.settled()
        found: list[PartitionLag] = []
        owners = self._directory.owners(group)
        for number, committed in enumerate(self._offsets.all_of(group), 1):
            if not number % LOOK_UP_SLICE:
                yield self._breath()
            lag = yield from self._lag(group, committed, owners)
            if lag is not None:
                found.append(lag)
        trends = [one.trend_per_s for one in found if one.trend_per_s is not None]
        return GroupLag(
            group,
            sum(one.messages for one in found),
            max((one.seconds for one in found), default=0.0),
            sum(trends) if trends else None,
            found,
        )

    def _lag(
        self, group: str, committed: Committed, owners: Mapping[PartitionId, str]
    ) -> Generator[Pending[Any], Any, PartitionLag | None]:
        id = PartitionId(committed.topic, committed.partition)
        try:
            series = self._series.get(self._key(group, id)) or Series()
            yield from self._look_up(id, committed.offset, series)
            start, end = self._reader.offsets(*id)
        except MillstreamError:
            # The topic was deleted in between.
            return None
        messages = max(0, end - committed.offset)
        return PartitionLag(
            *id,
            committed.offset,
            start,
            end,
            messages,
            self._age_s(series) if messages else 0.0,
            series.slope(),
            owners.get(id),
        )

    def _look_up(
        self, id: PartitionId, committed: int, series: Series
    ) -> Generator[Pending[Any], Any, None]:
        """Have the timestamp of the oldest record that is not committed."""
        start, end = self._reader.offsets(*id)
        offset = max(start, committed)
        if offset >= end or series.oldest_offset == offset:
            return
        fetched = yield self._reader.fetch(*id, offset, 1, 1)
        if fetched.records:
            series.oldest_offset = offset
            series.oldest_ms = fetched.records[0].timestamp

    def _age_s(self, series: Series) -> float:
        if series.oldest_offset < 0:
            return 0.0
        return max(0, self._clock.wall_ms() - series.oldest_ms) / 1000

    # ---- samples

    def start(self) -> None:
        self._timers.after(SAMPLE_SECONDS, self._tick)

    def stop(self) -> None:
        self._has_stopped = True

    def _tick(self) -> None:
        if not self._has_stopped:
            self.start()
            follow(self._sample())

    def _sample(self) -> Generator[Pending[Any], Any, None]:
        now = self._clock.monotonic()
        kept: dict[_Key, Series] = {}
        for group, committed in self._all():
            id = PartitionId(committed.topic, committed.partition)
            try:
                key = self._key(group, id)
                end = self._reader.offsets(*id).high_watermark
            except MillstreamError:
                continue
            series = kept[key] = self._series.get(key) or Series()
            series.add(now, max(0, end - committed.offset))
            if len(kept) <= METRICS_MAX:
                try:
                    yield from self._look_up(id, committed.offset, series)
                except MillstreamError:
                    # Damaged or deleted: the age stays what it was.
                    continue
            if len(kept) == SERIES_MAX:
                break
            if not len(kept) % (LOOK_UP_SLICE if len(kept) <= METRICS_MAX else SLICE):
                yield self._breath()
        self._series = kept

    def _key(self, group: str, id: PartitionId) -> _Key:
        return _Key(group, self._offsets.topic(id.topic).uuid.bytes, id)

    def _all(self) -> Iterator[tuple[str, Committed]]:
        """Groups with members first."""
        groups = self._offsets.table.groups()
        names = self._offsets.topic_names()
        for group in sorted(groups, key=lambda one: (not self._offsets.has_members(one), one)):
            for committed in self._offsets.all_of(group, names):
                yield group, committed

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending

    def samples(self) -> Iterator[LagSample]:
        """For the metrics page: messages as they are now, ages by the last look."""
        for number, (key, series) in enumerate(self._series.items()):
            if number == METRICS_MAX:
                return
            group, _, id = key
            try:
                if self._key(group, id) != key:
                    continue
                committed = self._offsets.position(group, id.topic, id.number)
                end = self._reader.offsets(*id).high_watermark
            except MillstreamError:
                continue
            if committed is not None:
                messages = max(0, end - committed)
                seconds = self._age_s(series) if messages else 0.0
                yield LagSample(group, *id, messages, seconds, series.slope())
