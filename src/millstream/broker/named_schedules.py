"""Named schedules: a record that is published again and again, at intervals or as cron says.

Each is one key of a view, with the time of its next run. A run appends the record to its topic and
moves that time on, in one atomic append: it is there once, whatever crashes. What was missed while
the broker was down, or the clock was put forward, runs once. A schedule goes by its topic's name;
while there is no such topic, its runs are left out, and `error` says so.
"""

from __future__ import annotations

import re
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from millstream.broker.cron import parse_cron, zone_of
from millstream.broker.outgoing import Outgoing, check_record
from millstream.broker.views import encoded
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    MillstreamError,
    OutcomeUnknown,
    ScheduleInvalid,
    ScheduleUnknown,
    TooManySchedules,
)
from millstream.log.partition import PartitionId
from millstream.wire.lanes import NORMAL, lane_headers, lane_name
from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from millstream.broker.surroundings import Surroundings
    from millstream.broker.views import Change
    from millstream.broker.wheel import Timer
    from millstream.log.batch import Headers

NAME_LENGTH_MAX = 100
NAME = re.compile(rf"[a-zA-Z0-9._-]{{1,{NAME_LENGTH_MAX}}}")
DEFAULT_ZONE = "UTC"
EVERY_MS_MIN = 1000
EVERY_MS_MAX = 3653 * 86_400_000
# Each may run every second, at about 0.1 ms.
NAMED_MAX = 10_000
# So many runs begin in one turn of the loop.
RUNS_AT_ONCE = 64
# Its next run is written with each run, and the record with it.
DUES_SPARE = 64
RECORD_BYTES_MAX = 256 * 1024
# How soon a jump of the wall clock is noticed.
LOOK_S = 1.0
PAUSE_S = 1.0


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for."""

    name: str
    topic: str
    # One of the two.
    every_ms: int | None = None
    cron: str | None = None
    time_zone: str = DEFAULT_ZONE
    is_paused: bool = False
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[str, bytes | None]] = []
    lane: int = NORMAL
    partition: int | None = None

    def next_ms(self, after_ms: int, from_ms: int) -> int:
        """The first run after a moment; intervals count from `from_ms`."""
        if self.cron is not None:
            found = parse_cron(self.cron).next_ms(after_ms, zone_of(self.time_zone))
            assert found is not None, self.cron
            return found
        assert self.every_ms is not None
        passed = max(0, after_ms - from_ms) // self.every_ms
        return from_ms + (passed + 1) * self.every_ms


class Named(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it is kept."""

    plan: Plan
    created_ms: int
    next_ms: int
    last_ms: int | None = None
    runs: int = 0
    # Why the last run was left out.
    error: str | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Named).decode


class NamedView:
    """Name → schedule, and which is next."""

    __slots__ = ("_dues", "found")

    name = "schedules"
    partition = PartitionId("__named_schedules", 0)

    def __init__(self) -> None:
        self.found: dict[str, Named] = {}
        # A heap of when and which; some were changed or deleted since.
        self._dues: list[tuple[int, str]] = []

    def apply(self, changes: Iterable[Change]) -> None:
        for key, value in changes:
            if value is None:
                self.found.pop(key.decode(), None)
            else:
                name = key.decode()
                self.found[name] = _decode(value)
                self.push(name)

    def push(self, name: str) -> None:
        """It may run when it is due."""
        named = self.found.get(name)
        if named is None or named.plan.is_paused:
            return
        heappush(self._dues, (named.next_ms, name))
        if len(self._dues) > 2 * len(self.found) + DUES_SPARE:
            self._dues = [
                (one.next_ms, name) for name, one in self.found.items() if not one.plan.is_paused
            ]
            heapify(self._dues)

    def next_ms(self) -> int | None:
        """When the next one is due, if any is."""
        while self._dues:
            due_ms, name = self._dues[0]
            named = self.found.get(name)
            if named is not None and named.next_ms == due_ms and not named.plan.is_paused:
                return due_ms
            heappop(self._dues)
        return None

    def pop(self, now_ms: int) -> str | None:
        """The next one that is due, no more so until it is pushed."""
        due_ms = self.next_ms()
        return None if due_ms is None or due_ms > now_ms else heappop(self._dues)[1]

    def value_of(self, key: bytes) -> bytes | None:
        found = self.found.get(key.decode())
        return None if found is None else _encode(found)

    def entries(self) -> Iterable[Change]:
        return [(name.encode(), _encode(found)) for name, found in self.found.items()]


class NamedSchedules:
    __slots__ = (
        "_armed_ms",
        "_around",
        "_busy",
        "_is_stopped",
        "_next",
        "_timer",
        "_view",
        "failed",
        "runs",
    )

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._view = NamedView()
        around.views.add(self._view)
        # Those whose run is under way.
        self._busy: set[str] = set()
        self._timer: Timer | None = None
        self._armed_ms = 0
        self._is_stopped = False
        # Where records without a key go next.
        self._next = 0
        # Since the start: runs, and those that were refused or left out.
        self.runs = 0
        self.failed = 0

    def start(self) -> None:
        """After the views and topics."""
        self._turn()

    def stop(self) -> None:
        self._is_stopped = True
        if self._timer is not None:
            self._around.timers.cancel(self._timer)

    def __len__(self) -> int:
        return len(self._view.found)

    # ---- looking

    def all(self) -> Pending[dict[str, Named]]:
        """By name."""
        return follow(self._settled(lambda: dict(self._view.found)))

    def get(self, name: str) -> Pending[Named]:
        return follow(self._settled(lambda: self._get(name)))

    def _settled(self, look: Any) -> Generator[Pending[Any], Any, Any]:
        found = look()
        yield self._around.views.settled(self._view)
        return found

    def _get(self, name: str) -> Named:
        found = self._view.found.get(name)
        if found is None:
            raise ScheduleUnknown(f"there is no schedule {name[:NAME_LENGTH_MAX]!r}", name=name)
        return found

    # ---- changing

    def put(self, plan: Plan) -> Pending[Named]:
        """Make it, or put it in the place of the one of that name; it begins anew then."""
        return follow(self._put(plan))

    def _put(self, plan: Plan) -> Generator[Pending[Any], Any, Named]:
        check_plan(plan)
        topics = self._around.topics
        topic = yield topics.ensure(plan.topic)
        size = check_record(topic, _record(plan), 0)
        if size > RECORD_BYTES_MAX:
            raise ScheduleInvalid(
                f"the record has {size} bytes; that of a named schedule has at most "
                f"{RECORD_BYTES_MAX}"
            )
        if plan.lane != NORMAL:
            yield topics.use_lanes(plan.topic)
        if plan.name not in self._view.found and len(self._view.found) >= NAMED_MAX:
            raise TooManySchedules(
                f"there are {NAMED_MAX} named schedules; delete one first", limit=NAMED_MAX
            )
        now_ms = self._around.clock.wall_ms()
        named = Named(plan=plan, created_ms=now_ms, next_ms=plan.next_ms(now_ms, now_ms))
        yield self._around.views.change(self._view, [(plan.name.encode(), _encode(named))])
        self._arm()
        return named

    def delete(self, name: str) -> Pending[None]:
        return follow(self._delete(name))

    def _delete(self, name: str) -> Generator[Pending[Any], Any, None]:
        self._get(name)
        yield self._around.views.change(self._view, [(name.encode(), None)])

    # ---- running

    def _arm(self) -> None:
        next_ms = self._view.next_ms()
        if self._is_stopped or next_ms is None:
            return
        if self._timer is not None:
            if self._armed_ms <= next_ms:
                return
            self._around.timers.cancel(self._timer)
        now_ms = self._around.clock.wall_ms()
        wait_s = min(max((next_ms - now_ms) / 1000, 0.0), LOOK_S)
        self._armed_ms = now_ms + int(wait_s * 1000)
        self._timer = self._around.timers.after(wait_s, self._turn)

    def _turn(self) -> None:
        self._timer = None
        self._run_due()

    def _run_due(self) -> None:
        if self._is_stopped:
            return
        now_ms = self._around.clock.wall_ms()
        for _ in range(RUNS_AT_ONCE):
            name = self._view.pop(now_ms)
            if name is None:
                self._arm()
                return
            if name not in self._busy:
                self._busy.add(name)
                self._run(name, self._view.found[name])
        self._around.turns.soon(self._run_due)

    def _run(self, name: str, named: Named) -> None:
        def done(one: Pending[None]) -> None:
            if one.error is None:
                again()
                return
            self.failed += 1
            _logger().warning("a schedule did not run; it is tried again", name=name,
                              why=str(one.error))  # fmt: skip
            # Whether it ran, nobody knows: the engine writes no more, and the next start will see.
            if not isinstance(one.error, OutcomeUnknown) and not self._is_stopped:
                self._around.timers.after(PAUSE_S, again)

        def again() -> None:
            self._busy.discard(name)
            # It may have been due meanwhile.
            self._view.push(name)
            self._arm()

        follow(self._publish(name, named)).then(done)

    def _publish(self, name: str, named: Named) -> Generator[Pending[Any], Any, None]:
        plan, topics, views = named.plan, self._around.topics, self._around.views
        topic = topics.by_name.get(plan.topic)
        if topic is not None and plan.lane != NORMAL and not topic.uses_lanes:
            topic = yield topics.use_lanes(plan.topic)
        if self._view.found.get(name) is not named:
            # Replaced or deleted meanwhile.
            return
        now_ms = self._around.clock.wall_ms()
        following = plan.next_ms(now_ms, named.next_ms)
        error = None
        try:
            if topic is None:
                topic = topics.get(plan.topic)
            check_record(topic, _record(plan), 0)
        except MillstreamError as refused:
            error, topic = refused.message, None
        moved = msgspec.structs.replace(
            named,
            next_ms=following,
            last_ms=named.last_ms if topic is None else now_ms,
            runs=named.runs + (topic is not None),
            error=error,
        )
        change = (name.encode(), _encode(moved))
        if topic is None:
            self.failed += 1
            yield views.change(self._view, [change])
            return
        if plan.partition is not None:
            number = plan.partition
        elif plan.key is not None:
            number = partition_of_key(plan.key, topic.partitions, topic.settings.partitioner)
        else:
            self._next += 1
            number = self._next % topic.partitions
        fields = (now_ms, plan.key, plan.value, lane_headers(_headers(plan), plan.lane))
        id, lane = PartitionId(plan.topic, number), lane_name(plan.lane)
        entry = encoded(id, [fields], lane, is_append_time=topic.is_append_time)
        yield views.change_with(self._view, [change], [entry])
        self.runs += 1


def check_plan(plan: Plan) -> None:
    """ScheduleInvalid for what cannot be."""
    if NAME.fullmatch(plan.name) is None:
        raise ScheduleInvalid(
            f"{plan.name[:NAME_LENGTH_MAX]!r} is no name of a schedule: it has 1 to "
            f"{NAME_LENGTH_MAX} letters, digits, dots, dashes and underscores"
        )
    if (plan.every_ms is None) == (plan.cron is None):
        raise ScheduleInvalid("give one of `every` and `cron`")
    if plan.every_ms is not None and plan.time_zone != DEFAULT_ZONE:
        raise ScheduleInvalid(
            "`every` is counted from when the schedule was made, so a time zone such as "
            f"{plan.time_zone[:NAME_LENGTH_MAX]!r} changes nothing; leave it out, or use `cron`"
        )
    zone_of(plan.time_zone)
    if plan.cron is not None:
        parse_cron(plan.cron)
    elif not EVERY_MS_MIN <= (plan.every_ms or 0) <= EVERY_MS_MAX:
        raise ScheduleInvalid(
            f"`every` is 1 s to ten years, not {plan.every_ms} ms; a number is milliseconds, and a "
            "text has its unit, such as `30s`"
        )


def _headers(plan: Plan) -> Headers:
    return tuple((name, value) for name, value in plan.headers)


def _record(plan: Plan) -> Outgoing:
    return Outgoing(plan.key, plan.value, _headers(plan), partition=plan.partition, lane=plan.lane)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
