"""Committed offsets: written, read, reset, forgotten and expired.

An offset is the next one that a group wants to read, as in Kafka, and a commit sets what it says,
also when that is less than before. Offsets live in the view `OffsetTable`; here is what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

import structlog

from millstream.broker.group_settings import NOTHING_SET, changed
from millstream.broker.group_values import (
    Commit,
    Committed,
    GroupProtocol,
    check_group_name,
)
from millstream.broker.offset_table import (
    Mark,
    OffsetTable,
    group_key,
    group_value,
    offset_key,
    offset_value,
    settings_key,
    settings_value,
)
from millstream.broker.topics import partition_unknown
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    GroupNotEmpty,
    GroupProtocolMismatch,
    GroupUnknown,
    MetadataTooLarge,
    MillstreamError,
    OffsetOutOfRange,
    ParameterInvalid,
    TopicUnknown,
)

if TYPE_CHECKING:
    from millstream.broker.group_settings import GroupSettings
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.broker.views import Change
    from millstream.log.partition import PartitionId

# As much as Kafka takes.
METADATA_BYTES_MAX = 4096
# Generations that one append reserves.
GENERATION_BLOCK = 1000
# How many keys one append removes, and how many groups are looked at in one turn of the loop:
# a few milliseconds each.
REMOVE_MAX = 10_000
SWEEP_GROUPS = 500
# Groups whose last protocol is remembered: as many as there may be by default.
LAST_MAX = 10_000
# Times that are looked up in one turn of the loop.
LOOK_UP_SLICE = 20
# How often groups long gone are looked for. The first look is that long after the start, so that
# members have the time to come back.
SWEEP_SECONDS = 600.0

ResetKind: TypeAlias = Literal["earliest", "latest", "offset", "time"]


class ResetTo(NamedTuple):
    kind: ResetKind
    # An offset, or milliseconds since 1970.
    value: int = 0


class ResetDone(NamedTuple):
    topic: str
    partition: int
    before: int | None
    after: int


class Leases(Protocol):
    """Groups that receive by lease: where they stand is known to their leases first."""

    def mirror(self) -> None:
        """Write where they stand to their committed offsets, as far as it has moved."""
        ...

    def is_busy(self, group: str) -> bool: ...

    def refuse(self, group: str, topics: Sequence[str]) -> Pending[None]:
        """The group is to read these by offset: raises while it has leases there. Done when it is
        durable that it receives from none of them by lease."""
        ...

    def reset(self, group: str, topic: str, offsets: Mapping[int, int]) -> Pending[None]: ...

    def drop(self, group: str, topic: str | None = None) -> Pending[None]: ...

    def limits_changed(self, group: str) -> None:
        """It may have more in flight now, or less."""
        ...


class GroupOffsets:
    __slots__ = (
        "_clock",
        "_has_stopped",
        "_last",
        "_leases",
        "_members",
        "_reader",
        "_started",
        "_timers",
        "_topics",
        "_turns",
        "_views",
        "commits",
        "expired_groups",
        "retention_ms",
        "table",
    )

    def __init__(
        self, around: Surroundings, retention_ms: int | None, name: str = "offsets"
    ) -> None:
        """`name` is that of the view: sequential consumers have one of their own."""
        self.table = OffsetTable(name)
        around.views.add(self.table)
        self._views = around.views
        self._topics = around.topics
        self._reader = around.reader
        self._clock = around.clock
        self._timers = around.timers
        self._turns = around.turns
        self.retention_ms = retention_ms
        self._members: dict[GroupProtocol, Callable[[str], int]] = {}
        # That of those who came last, least recently first; memory only.
        self._last: dict[str, GroupProtocol] = {}
        self._leases: Leases | None = None
        self._started = (0, 0.0)
        self._has_stopped = False
        self.commits = 0
        self.expired_groups = 0
        around.topics.watch_deleted(self._topic_deleted)

    def topics_of(self, group: str, names: dict[bytes, str]) -> tuple[str, ...]:
        """Those in which it has committed something."""
        return tuple(sorted(names[uuid] for uuid in self.table.topics(group) if uuid in names))

    def count_members_by(self, protocol: GroupProtocol, members: Callable[[str], int]) -> None:
        """Who knows how many members of a protocol a group has."""
        self._members[protocol] = members

    def count_members(self, group: str) -> int:
        """Those that read by offset."""
        return sum(count(group) for protocol, count in self._members.items() if protocol != "share")

    def has_members(self, group: str) -> bool:
        return any(count(group) for count in self._members.values())

    def refuse_others(self, group: str, protocol: GroupProtocol) -> None:
        """Raises while the group has members of another protocol: each deals out partitions in
        its own way, and neither would know of the other."""
        for other, count in self._members.items():
            if other != protocol and (members := count(group)):
                raise GroupProtocolMismatch(
                    f"group {group} has {members} members that use the protocol `{other}`, and "
                    f"takes none of `{protocol}`; take another group, or stop them first",
                    group=group,
                    protocol=other,
                    members=members,
                )
        self._last.pop(group, None)
        self._last[group] = protocol
        if len(self._last) > LAST_MAX:
            del self._last[next(iter(self._last))]

    def last_protocol(self, group: str) -> GroupProtocol | None:
        """That of the members that a known group had last; None when nobody knows, as after a
        restart."""
        return self._last.get(group) if self.table.has_group(group) else None

    # ---- generations: numbers that are never given twice, also not after a restart

    def generation(self, group: str) -> int:
        """The newest that may have been given to a group without members."""
        mark = self.table.mark(group)
        return mark.generation if mark is not None else 0

    def reserve(self, group: str, generation: int) -> None:
        """Before a number is given out; who answers with it waits until that is settled."""
        mark = self.table.mark(group)
        if mark is None or generation > mark.generation:
            self._mark(group, generation + GENERATION_BLOCK)

    def give_back(self, group: str, generation: int) -> None:
        """The group has no members any more: the rest of its block is free."""
        self._mark(group, generation)

    def _mark(self, group: str, generation: int) -> None:
        mark = Mark(generation, self._clock.wall_ms())
        self._views.change(self.table, [(group_key(group), group_value(mark))])

    def lease_by(self, leases: Leases) -> None:
        """Who knows where groups stand that receive by lease."""
        self._leases = leases

    def use_by_offset(self, group: str, topics: Sequence[str]) -> Pending[None]:
        """Before a group reads or commits by offset: raises while it has leases there. Before it
        is done nobody may be told of a commit: after a crash the leases would be known again."""
        if self._leases is None:
            return Pending.of(None)
        return self._leases.refuse(group, topics)

    def _mirror(self) -> None:
        if self._leases is not None:
            self._leases.mirror()

    # ---- settings

    def settings(self, group: str) -> GroupSettings:
        """What was set for it."""
        return self.table.settings(group)

    def alter(self, group: str, changes: Mapping[str, object]) -> Pending[None]:
        """Raises GroupSettingInvalid; done when it is durable."""
        settings = changed(self.settings(group), changes)
        value = settings_value(settings) if settings != NOTHING_SET else None
        done = self._views.change(self.table, [(settings_key(group), value)])
        if self._leases is not None:
            self._leases.limits_changed(group)
        return done

    # ---- committing

    def check(self, commits: Sequence[Commit]) -> None:
        """Raises for the first one that cannot be kept."""
        for one in commits:
            end = self._reader.offsets(one.topic, one.partition).high_watermark
            if one.offset > end:
                raise _out_of_range(one, end)
            self.check_loosely(one)

    def check_loosely(self, one: Commit) -> None:
        """The same, but an offset past the end is kept: Kafka's clients may know better."""
        end = self._reader.offsets(one.topic, one.partition).high_watermark
        if one.offset < 0:
            raise _out_of_range(one, end)
        if len(one.metadata.encode(errors="replace")) > METADATA_BYTES_MAX:
            raise MetadataTooLarge(
                f"the metadata of a commit may have {METADATA_BYTES_MAX} bytes",
                topic=one.topic,
                partition=one.partition,
                limit_bytes=METADATA_BYTES_MAX,
            )
        if not _is_text(one.metadata):
            raise ParameterInvalid(
                "the metadata of a commit is not text that can be written as UTF-8",
                parameter="metadata",
            )

    def write(self, group: str, commits: Sequence[Commit]) -> Pending[list[Committed]]:
        """What was checked; done when it is durable."""
        now_ms = self._clock.wall_ms()
        changes: list[Change] = []
        committed = []
        for topic, partition, offset, metadata, epoch in commits:
            uuid = self._topics.get(topic).uuid.bytes
            value = offset_value(offset, now_ms, metadata, epoch)
            changes.append((offset_key(group, uuid, partition), value))
            committed.append(Committed(topic, partition, offset, metadata, now_ms, epoch))
        self.commits += len(changes)
        done: Pending[list[Committed]] = Pending()
        self._views.change(self.table, changes).then(
            lambda one: done.succeed(committed) if one.error is None else done.fail(one.error)
        )
        return done

    def position(self, group: str, topic: str, partition: int) -> int | None:
        """What is committed; not before `settled` may anybody be told."""
        entry = self.table.get(group, self._topics.get(topic).uuid.bytes, partition)
        return entry.offset if entry is not None else None

    def settled(self) -> Pending[None]:
        """Done when all that is committed now is durable."""
        self._mirror()
        return self._views.settled(self.table)

    def topic(self, name: str) -> Topic:
        return self._topics.get(name)

    # ---- reading

    def committed(self, group: str, topic: str | None = None) -> Pending[list[Committed]]:
        return follow(self._committed(group, topic))

    def _committed(
        self, group: str, topic: str | None
    ) -> Generator[Pending[Any], Any, list[Committed]]:
        self.known(group)
        if topic is not None:
            self._topics.get(topic)
        yield self._views.settled(self.table)
        return [one for one in self.all_of(group) if topic in (None, one.topic)]

    def topic_names(self) -> dict[bytes, str]:
        return {topic.uuid.bytes: topic.name for topic in self._topics.by_name.values()}

    def all_of(self, group: str, names: dict[bytes, str] | None = None) -> list[Committed]:
        """By topic and partition. What belongs to topics that are gone is not shown. Who asks for
        many groups gives `topic_names` along."""
        names = names if names is not None else self.topic_names()
        found = [
            Committed(
                names[one.uuid],
                one.partition,
                one.offset,
                one.metadata,
                one.committed_ms,
                one.leader_epoch,
            )
            for one in self.table.of_group(group)
            if one.uuid in names
        ]
        return sorted(found)

    def known(self, group: str) -> None:
        """GroupUnknown unless it has members, offsets or a past."""
        check_group_name(group)
        self._mirror()
        if not self.has_members(group) and not self.table.has_group(group):
            raise GroupUnknown(
                f"there is no group {group}; a group appears when somebody joins it, commits, "
                "receives from a topic or gives it settings",
                group=group,
            )

    # ---- resetting and forgetting

    def reset(
        self,
        group: str,
        topic: str,
        to: ResetTo,
        partitions: Sequence[int] | None = None,
        *,
        is_dry_run: bool = False,
    ) -> Pending[list[ResetDone]]:
        """Set where a group goes on. It must have no members: they would go on where they are."""
        return follow(self._reset(group, topic, to, partitions, is_dry_run))

    def _reset(
        self,
        group: str,
        topic: str,
        to: ResetTo,
        partitions: Sequence[int] | None,
        is_dry_run: bool,
    ) -> Generator[Pending[Any], Any, list[ResetDone]]:
        check_group_name(group)
        found = self._topics.get(topic)
        numbers = _numbers(found, partitions)
        after: dict[int, int] = {}
        for number in numbers:
            after[number] = yield self._where(topic, number, to)
            if not len(after) % LOOK_UP_SLICE:
                yield self._breath()
        # Last, because much may have happened while times were looked up.
        if self._topics.get(topic).uuid != found.uuid:
            raise TopicUnknown(
                f"topic {topic} was deleted and made again meanwhile; reset the group again",
                topic=topic,
            )
        if not is_dry_run:
            self.refuse_members(group)
        before = {number: self.position(group, topic, number) for number in numbers}
        if is_dry_run:
            yield self._views.settled(self.table)
        else:
            # In one step with the check: whoever joins now goes on where the reset says.
            leased = None if self._leases is None else self._leases.reset(group, topic, after)
            commits = [Commit(topic, number, after[number]) for number in numbers]
            written = self.write(group, commits)
            if leased is not None:
                yield leased
            yield written
        return [ResetDone(topic, number, before[number], after[number]) for number in numbers]

    def _where(self, topic: str, partition: int, to: ResetTo) -> Pending[int]:
        start, end = self._reader.offsets(topic, partition)
        if to.kind == "earliest":
            return Pending.of(start)
        if to.kind == "latest":
            return Pending.of(end)
        if to.kind == "time":
            return self._reader.offset_at(topic, partition, to.value)
        self._reader.require(topic, partition, to.value)
        return Pending.of(to.value)

    def forget(self, group: str, topic: str) -> Pending[int]:
        """Remove what a group committed in a topic; how many offsets that were."""
        return follow(self._forget(group, topic))

    def _forget(self, group: str, topic: str) -> Generator[Pending[Any], Any, int]:
        self.known(group)
        self.refuse_members(group)
        uuid = self._topics.get(topic).uuid.bytes
        if self._leases is not None:
            yield self._leases.drop(group, topic)
        keys = [offset_key(group, uuid, one.partition) for one in self.table.of_topic(group, uuid)]
        yield self._remove(keys)
        return len(keys)

    def forget_partitions(self, group: str, ids: Sequence[PartitionId]) -> Pending[None]:
        """The same for single partitions, also of a group that has members: who calls knows that
        they do not read them."""
        return follow(self._forget_partitions(group, ids))

    def _forget_partitions(
        self, group: str, ids: Sequence[PartitionId]
    ) -> Generator[Pending[Any], Any, None]:
        keys = []
        for id in ids:
            uuid = self._topics.get(id.topic).uuid.bytes
            if self.table.get(group, uuid, id.number) is not None:
                keys.append(offset_key(group, uuid, id.number))
        if self._leases is not None:
            for topic in sorted({id.topic for id in ids}):
                yield self._leases.drop(group, topic)
        yield self._remove(keys)

    def delete_group(self, group: str) -> Pending[None]:
        """Everything that is kept of a group."""
        return follow(self._delete_group(group))

    def _delete_group(self, group: str) -> Generator[Pending[Any], Any, None]:
        if self._leases is not None:
            yield self._leases.drop(group)
        keys = self._keys_of(group)
        if self.settings(group) != NOTHING_SET:
            keys.append(settings_key(group))
        yield self._remove(keys)

    def refuse_members(self, group: str) -> None:
        members = sum(count(group) for count in self._members.values())
        if members:
            raise GroupNotEmpty(
                f"group {group} has {members} members; stop them first",
                group=group,
                members=members,
            )

    def _keys_of(self, group: str) -> list[bytes]:
        """Of all but its settings: those somebody chose, and only a deletion takes them."""
        keys = [offset_key(group, one.uuid, one.partition) for one in self.table.of_group(group)]
        return keys if self.table.mark(group) is None else [*keys, group_key(group)]

    def _remove(self, keys: Sequence[bytes]) -> Pending[None]:
        if not keys:
            return self._views.settled(self.table)
        return self._views.change(self.table, [(key, None) for key in keys])

    # ---- topics that go

    def _topic_deleted(self, _topic: Topic) -> None:
        # Nobody can see offsets of a UUID that no topic has; this only gives back their room.
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        """In parts, so that no turn of the loop and no append gets too large."""
        uuids = frozenset(topic.uuid.bytes for topic in self._topics.by_name.values())
        keys = list(islice(self.table.orphans(uuids), REMOVE_MAX))
        if keys and not self._has_stopped:
            self._remove(keys).then(self._removed_orphans)

    def _removed_orphans(self, done: Pending[None]) -> None:
        # What could not be removed now is removed after the next deletion or start.
        if done.error is None:
            self._remove_orphans()

    # ---- the start and time

    def start(self) -> Pending[None]:
        """After views and topics: nothing points past the end of what recovery has found. A
        topic in a weaker mode may have lost its tail, and will give those offsets again."""
        self._started = (self._clock.wall_ms(), self._clock.monotonic())
        self._arm()
        return follow(self._start())

    def _start(self) -> Generator[Pending[Any], Any, None]:
        self._remove_orphans()
        ends = {
            topic.uuid.bytes: [
                self._reader.offsets(topic.name, number).high_watermark
                for number in range(topic.partitions)
            ]
            for topic in self._topics.by_name.values()
        }
        changes: list[Change] = [
            (
                offset_key(group, one.uuid, one.partition),
                offset_value(end, one.committed_ms, one.metadata),
            )
            for group, one, end in self.table.past_ends(ends)
        ]
        if changes:
            _logger().warning("offsets lay past the end of their partitions", offsets=len(changes))
        for first in range(0, len(changes), REMOVE_MAX):
            yield self._views.change(self.table, changes[first : first + REMOVE_MAX])
        yield self._views.settled(self.table)

    def stop(self) -> None:
        self._has_stopped = True

    def _arm(self) -> None:
        if self.retention_ms is not None:
            self._timers.after(SWEEP_SECONDS, self._sweep)

    def _sweep(self) -> None:
        if not self._has_stopped:
            self._arm()
            follow(self._expire()).then(_log_failure)

    def _expire(self) -> Generator[Pending[Any], Any, None]:
        """Forget groups without members that have not committed for long. Time is what has
        passed since the start, so that a wall clock that is put forward expires nothing; and no
        more than that clock says, so that what is stamped after it was put back is not old."""
        assert self.retention_ms is not None
        wall_ms, monotonic = self._started
        now_ms = wall_ms + int((self._clock.monotonic() - monotonic) * 1000)
        horizon_ms = min(now_ms, self._clock.wall_ms()) - self.retention_ms
        groups = self.table.groups()
        for first in range(0, len(groups), SWEEP_GROUPS):
            keys: list[bytes] = []
            for group in groups[first : first + SWEEP_GROUPS]:
                if self.table.newest_ms(group) < horizon_ms and not self._is_used(group):
                    if self._leases is not None:
                        self._leases.drop(group)
                    old = self._keys_of(group)
                    keys += old
                    # Of one that was forgotten already, settings may be left.
                    self.expired_groups += bool(old)
            yield self._remove(keys) if keys else self._breath()

    def _is_used(self, group: str) -> bool:
        if self._leases is not None and self._leases.is_busy(group):
            return True
        return self.has_members(group)

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending


def _numbers(topic: Topic, partitions: Sequence[int] | None) -> list[int]:
    if partitions is None:
        return list(range(topic.partitions))
    for number in partitions:
        if not 0 <= number < topic.partitions:
            raise partition_unknown(topic, number)
    return sorted(set(partitions))


def _out_of_range(one: Commit, end: int) -> OffsetOutOfRange:
    return OffsetOutOfRange(
        f"{one.topic}/{one.partition} ends at {end}; {one.offset} cannot be committed",
        topic=one.topic,
        partition=one.partition,
        offset=one.offset,
        start=0,
        end=end,
    )


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _log_failure(done: Pending[None]) -> None:
    if done.error is not None:
        why = done.error.message if isinstance(done.error, MillstreamError) else repr(done.error)
        _logger().warning("groups long gone not removed; the next sweep tries again", why=why)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
