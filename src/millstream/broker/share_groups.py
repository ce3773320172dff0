"""Kafka's share groups (KIP-932): members that receive by lease, record by record.

Everybody gets every partition of what it reads: which records go to whom is for the leases to say
(`delivery`). So there is nothing to rebalance. A member's epoch rises when topics that it reads
come, grow or go, and that is how it hears of it. Members live in memory; after a restart they are
unknown, and join again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.group_values import GroupSummary, MemberFacts, check_group_name
from millstream.broker.joining import MEMBER_ID, TOPICS_MAX
from millstream.engine.pending import Pending, follow
from millstream.errors import MemberUnknown, ParameterInvalid, StaleGeneration, TooManyMembers
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.joining import GroupOptions
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.broker.wheel import Timer

# As the one assignor of share groups is called in Kafka.
ASSIGNOR = "simple"
JOINING, LEAVING = 0, -1


class ShareBeat(NamedTuple):
    """What a member says. None: as before."""

    member_id: str
    epoch: int
    client_id: str = ""
    host: str = ""
    topics: frozenset[str] | None = None


class ShareBeaten(NamedTuple):
    member_id: str
    epoch: int
    heartbeat_interval_ms: int
    # What it is to have now; None: as before.
    assignment: tuple[PartitionId, ...] | None


@dataclass(slots=True, eq=False)
class ShareMember:
    id: str
    client_id: str
    host: str
    topics: frozenset[str]
    epoch: int
    # On the monotonic clock.
    last_call: float
    timer: Timer | None = None


@dataclass(slots=True, eq=False)
class ShareGroup:
    name: str
    epoch: int
    members: dict[str, ShareMember] = field(default_factory=dict)


class ShareMemberFacts(NamedTuple):
    member_id: str
    epoch: int
    client_id: str
    host: str
    topics: tuple[str, ...]
    assignment: tuple[PartitionId, ...]


class ShareGroupFacts(NamedTuple):
    epoch: int
    members: list[ShareMemberFacts]


class ShareGroups:
    __slots__ = (
        "_check_new",
        "_clock",
        "_gone",
        "_groups",
        "_offsets",
        "_options",
        "_timers",
        "_topics",
    )

    def __init__(
        self,
        around: Surroundings,
        offsets: GroupOffsets,
        options: GroupOptions,
        check_new: Callable[[str], None],
    ) -> None:
        """`check_new` raises when that would be one group too many."""
        self._clock = around.clock
        self._timers = around.timers
        self._topics = around.topics
        self._offsets = offsets
        self._options = options
        self._check_new = check_new
        self._groups: dict[str, ShareGroup] = {}
        self._gone: Callable[[str, str, bool], None] = lambda _group, _member, _has_left: None
        offsets.count_members_by("share", self.count_members)
        around.topics.watch_deleted(self._topic_changed)
        around.topics.watch_partitions(self._topic_changed)

    def watch_gone(self, call: Callable[[str, str, bool], None]) -> None:
        """Told the group and the id of a member that went, and whether it said so."""
        self._gone = call

    # ---- being there

    def heartbeat(self, group: str, beat: ShareBeat) -> Pending[ShareBeaten]:
        """Join, be there, hear what changed, leave: all in one."""
        return follow(self._heartbeat(group, beat))

    def _heartbeat(self, name: str, beat: ShareBeat) -> Generator[Pending[Any], Any, ShareBeaten]:
        check_group_name(name)
        _check(beat)
        interval_ms = self._options.heartbeat_interval_ms
        if beat.epoch == LEAVING:
            member = self._find(name, beat.member_id)
            self._remove(member, self._groups[name], has_left=True)
            return ShareBeaten(beat.member_id, LEAVING, interval_ms, None)
        if beat.epoch == JOINING:
            member = self._join(name, beat)
            yield self._offsets.settled()
        else:
            member = self._called(name, beat)
        is_news = beat.epoch != member.epoch or beat.topics is not None
        assignment = self._assignment(member) if is_news else None
        return ShareBeaten(member.id, member.epoch, interval_ms, assignment)

    def _join(self, name: str, beat: ShareBeat) -> ShareMember:
        if not beat.topics:
            raise _invalid("a member that joins names the topics that it reads")
        self._offsets.refuse_others(name, "share")
        group = self._groups.get(name)
        known = group.members.get(beat.member_id) if group is not None else None
        if known is None and group is not None:
            self._check_room(group)
        if group is None:
            self._check_new(name)
            group = self._groups[name] = ShareGroup(name, self._offsets.generation(name))
        epoch = self._next(group)
        now = self._clock.monotonic()
        if known is None:
            known = ShareMember(beat.member_id, beat.client_id, beat.host, beat.topics, epoch, now)
            group.members[known.id] = known
            self._watch(group, known, self._options.session_timeout_ms / 1000)
        known.topics, known.epoch, known.last_call = beat.topics, epoch, now
        return known

    def _called(self, name: str, beat: ShareBeat) -> ShareMember:
        member = self._find(name, beat.member_id)
        if beat.epoch > member.epoch:
            raise StaleGeneration(
                f"member {member.id} called with epoch {beat.epoch} and is in {member.epoch}; "
                "join again with epoch 0",
                group=name,
                member_id=member.id,
                generation=beat.epoch,
                current=member.epoch,
            )
        member.last_call = self._clock.monotonic()
        if beat.topics is not None and beat.topics != member.topics:
            member.topics = beat.topics
            member.epoch = self._next(self._groups[name])
        return member

    def _next(self, group: ShareGroup) -> int:
        group.epoch += 1
        self._offsets.reserve(group.name, group.epoch)
        return group.epoch

    def _assignment(self, member: ShareMember) -> tuple[PartitionId, ...]:
        topics = (self._topics.by_name.get(name) for name in sorted(member.topics))
        return tuple(
            PartitionId(topic.name, number)
            for topic in topics
            if topic is not None
            for number in range(topic.partitions)
        )

    def _check_room(self, group: ShareGroup) -> None:
        members_max = self._options.members_max
        if len(group.members) >= members_max:
            raise TooManyMembers(
                f"group {group.name} has {members_max} members, which is the limit; "
                "let one leave, or raise `group_members_max`",
                group=group.name,
                members_max=members_max,
            )

    def _watch(self, group: ShareGroup, member: ShareMember, seconds: float) -> None:
        member.timer = self._timers.after(seconds, lambda: self._look(group, member))

    def _look(self, group: ShareGroup, member: ShareMember) -> None:
        """One timer a member, set again for the rest: nothing to do at each call."""
        member.timer = None
        idle = self._clock.monotonic() - member.last_call
        rest = self._options.session_timeout_ms / 1000 - idle
        if rest > 0:
            self._watch(group, member, rest)
        else:
            self._remove(member, group, has_left=False)

    def _remove(self, member: ShareMember, group: ShareGroup, *, has_left: bool) -> None:
        if member.timer is not None:
            self._timers.cancel(member.timer)
        del group.members[member.id]
        if not group.members:
            del self._groups[group.name]
            self._offsets.give_back(group.name, group.epoch)
        self._gone(group.name, member.id, has_left)

    def _find(self, name: str, member_id: str) -> ShareMember:
        group = self._groups.get(name)
        member = group.members.get(member_id) if group is not None else None
        if member is None:
            raise MemberUnknown(
                f"group {name} has no member {member_id[:300]}, or its session ended; "
                "join again with epoch 0",
                group=name,
                member_id=member_id[:300],
            )
        return member

    def _topic_changed(self, topic: Topic) -> None:
        for group in self._groups.values():
            concerned = [one for one in group.members.values() if topic.name in one.topics]
            if concerned:
                epoch = self._next(group)
                for member in concerned:
                    member.epoch = epoch

    # ---- looking

    def require(self, group: str, member_id: str) -> None:
        """MemberUnknown unless it is in the group; counts as a sign of life."""
        self._find(group, member_id).last_call = self._clock.monotonic()

    def count_members(self, group: str) -> int:
        found = self._groups.get(group)
        return len(found.members) if found is not None else 0

    @property
    def members(self) -> int:
        return sum(len(group.members) for group in self._groups.values())

    def names(self) -> list[str]:
        """Of the groups that have members."""
        return list(self._groups)

    def describe(self, group: str) -> ShareGroupFacts | None:
        """None unless it has members."""
        found = self._groups.get(group)
        if found is None:
            return None
        members = [
            ShareMemberFacts(
                one.id,
                one.epoch,
                one.client_id,
                one.host,
                tuple(sorted(one.topics)),
                self._assignment(one),
            )
            for one in found.members.values()
        ]
        return ShareGroupFacts(found.epoch, members)

    def facts(self, group: str) -> tuple[GroupSummary, list[MemberFacts]] | None:
        """The same in the words of all groups."""
        found = self._groups.get(group)
        if found is None:
            return None
        now = self._clock.monotonic()
        members = [
            MemberFacts(
                one.id,
                one.client_id,
                None,
                one.epoch,
                tuple(sorted(one.topics)),
                self._assignment(one),
                (),
                self._options.session_timeout_ms,
                int((now - one.last_call) * 1000),
            )
            for one in found.members.values()
        ]
        topics = {topic for one in found.members.values() for topic in one.topics}
        summary = GroupSummary(
            group, "stable", len(members), found.epoch, ASSIGNOR, tuple(sorted(topics)), "share"
        )
        return summary, sorted(members)


def _check(beat: ShareBeat) -> None:
    if beat.epoch < LEAVING:
        raise _invalid(f"{beat.epoch} is no epoch of a member")
    if not MEMBER_ID.fullmatch(beat.member_id):
        raise _invalid("a member id is 1 to 200 characters of ASCII that can be seen")
    if beat.topics is not None and len(beat.topics) > TOPICS_MAX:
        raise _invalid(f"a member reads at most {TOPICS_MAX} topics")


def _invalid(message: str) -> ParameterInvalid:
    return ParameterInvalid(message, parameter="heartbeat")
