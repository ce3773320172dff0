"""Groups of Kafka's consumer protocol (KIP-848), as the Kafka listener calls them.

Their members have the same kind of target, step by step, as those of HTTP (`membership`): an epoch
is a generation. Two things differ. A member says by name what it has, so it may use a new epoch
before it has given up what it was told to. And one that takes too long over that is out, as it
would not hear of it otherwise.

A member may read topics that are not there yet, or all whose names match a pattern.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.group_values import check_group_name
from millstream.broker.joining import CLIENT_ID, MEMBER_ID, TOPICS_MAX
from millstream.broker.membership import Member
from millstream.broker.polling import Session
from millstream.broker.topic_patterns import TopicPattern
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    AssignorUnknown,
    GroupUnknown,
    MemberFenced,
    MemberNotReleased,
    MemberUnknown,
    ParameterInvalid,
    TooManyMembers,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.group_values import Assignor
    from millstream.broker.groups import Groups
    from millstream.broker.joining import GroupOptions
    from millstream.broker.rebalancing import Group
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.log.partition import PartitionId

# What Kafka calls them. `sticky` is as even, and leaves more where it is.
ASSIGNORS: Mapping[str, Assignor] = {"uniform": "sticky", "range": "range"}
KAFKA_NAMES: Mapping[str, str] = {"sticky": "uniform", "range": "range", "round_robin": "uniform"}
# Epochs with a meaning of their own.
JOINING, LEAVING, LEAVING_FOR_NOW = 0, -1, -2
MEMBER_ID_BYTES = 16
REBALANCE_TIMEOUT_MS_MAX = 24 * 60 * 60 * 1000
# Names of topics that a pattern is tried on in one turn of the loop: a few milliseconds.
NAMES_SLICE = 500


class Beat(NamedTuple):
    """What a member says. None: as before."""

    # Empty at the first beat of a member that has the broker choose its id.
    member_id: str
    epoch: int
    client_id: str = ""
    host: str = ""
    instance_id: str | None = None
    rebalance_timeout_ms: int | None = None
    topics: frozenset[str] | None = None
    assignor: str | None = None
    # What it has.
    owned: frozenset[PartitionId] | None = None
    # Topics besides, by a pattern of their names; empty takes it back.
    pattern: str | None = None


class Beaten(NamedTuple):
    member_id: str
    epoch: int
    heartbeat_interval_ms: int
    # What it is to have now; None: as before.
    assignment: tuple[PartitionId, ...] | None


class ConsumerMemberFacts(NamedTuple):
    member_id: str
    instance_id: str | None
    epoch: int
    client_id: str
    host: str
    topics: tuple[str, ...]
    assignment: tuple[PartitionId, ...]
    target: tuple[PartitionId, ...]


class ConsumerFacts(NamedTuple):
    is_stable: bool
    epoch: int
    assignor: str
    members: list[ConsumerMemberFacts]


class ConsumerGroups:
    __slots__ = (
        "_check_new",
        "_clock",
        "_offsets",
        "_options",
        "_random_hex",
        "_rebalancing",
        "_topics",
        "_turns",
    )

    def __init__(
        self,
        around: Surroundings,
        offsets: GroupOffsets,
        options: GroupOptions,
        groups: Groups,
        random_hex: Callable[[int], str],
    ) -> None:
        self._clock = around.clock
        self._topics = around.topics
        self._offsets = offsets
        self._options = options
        self._rebalancing = rebalancing = groups.rebalancing
        self._random_hex = random_hex
        self._check_new = groups.check_new
        self._turns = around.turns
        around.topics.watch_partitions(self._topic_made)
        offsets.count_members_by(
            "consumer", lambda name: rebalancing.count_members(name, "consumer")
        )

    def heartbeat(self, group: str, beat: Beat) -> Pending[Beaten]:
        """Join, be there, hear what changed, leave: all in one."""
        return follow(self._heartbeat(group, beat))

    def _heartbeat(self, name: str, beat: Beat) -> Generator[Pending[Any], Any, Beaten]:
        check_group_name(name)
        _check(beat)
        if beat.epoch < JOINING:
            self._leave(name, beat)
            yield self._offsets.settled()
            return Beaten(beat.member_id, beat.epoch, self._options.heartbeat_interval_ms, None)
        wanted = yield from self._wanted(beat)
        if beat.epoch == JOINING:
            group, session = self._join(name, beat, wanted)
        else:
            group, session = self._called(name, beat, wanted)
        member = session.member
        self._rebalancing.reconcile(group, session)
        epoch = member.generation
        assignment = tuple(sorted(member.owned))
        is_news = beat.epoch != epoch or beat.topics is not None or beat.pattern is not None
        if is_news:
            if beat.epoch == JOINING:
                # The join has ended what there was of leases: that is durable before it is told.
                yield self._offsets.use_by_offset(name, ())
            yield self._offsets.settled()
        interval_ms = self._options.heartbeat_interval_ms
        return Beaten(member.id, epoch, interval_ms, assignment if is_news else None)

    # ---- topics

    def _wanted(self, beat: Beat) -> Generator[Pending[Any], Any, _Wanted | None]:
        """What a pattern stands for; None when it stays as it was."""
        if beat.pattern is None:
            return None
        if not beat.pattern:
            return _Wanted(None, frozenset())
        pattern = TopicPattern(beat.pattern)
        found: set[str] = set()
        seen: set[str] = set()
        while new := list(islice(self._topics.by_name.keys() - seen, NAMES_SLICE)):
            seen.update(new)
            found.update(filter(pattern.matches, new))
            if len(new) == NAMES_SLICE:
                yield self._breath()
        return _Wanted(pattern, frozenset(found))

    def _breath(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._turns.soon(lambda: pending.succeed(None))
        return pending

    def _topic_made(self, topic: Topic) -> None:
        """Also told of one that grew."""
        for group in list(self._rebalancing.groups.values()):
            for session in list(group.sessions.values()):
                pattern, member = session.pattern, session.member
                if pattern is None or topic.name in member.topics:
                    continue
                if pattern.matches(topic.name):
                    group.membership.want(member, member.topics | {topic.name}, member.assignor)
                    group.membership.set_partitions(topic.name, topic.partitions)
                    self._rebalancing.changed(group, "topics")

    # ---- joining

    def _join(self, name: str, beat: Beat, wanted: _Wanted | None) -> tuple[Group, Session]:
        pattern, matching = wanted or _Wanted(None, frozenset())
        named = beat.topics or frozenset()
        if not named and pattern is None:
            raise _invalid("a member that joins names the topics that it reads")
        topics = named | matching
        self._offsets.refuse_others(name, "consumer")
        known = [topic for topic in sorted(topics) if topic in self._topics.by_name]
        self._offsets.use_by_offset(name, known)
        group = self._rebalancing.groups.get(name)
        member_id = beat.member_id or self._random_hex(MEMBER_ID_BYTES)
        assignor = ASSIGNORS[beat.assignor] if beat.assignor is not None else None
        member = Member(member_id, beat.client_id, topics, beat.instance_id, assignor)
        session = self._session(member, beat)
        session.named, session.pattern = named, pattern
        if group is None:
            self._check_new(name)
            group = self._rebalancing.get_or_create(name, "consumer")
        self._set_partitions(group, topics)
        if member_id in group.membership.members:
            return group, self._join_again(group, session, beat)
        static = None
        if beat.instance_id is not None:
            static = group.membership.static_member(beat.instance_id)
        if static is None:
            self._check_room(group)
            group.membership.add(member)
            self._rebalancing.open(group, session, "join")
            return group, session
        if not group.sessions[static.id].has_left:
            raise MemberNotReleased(
                f"instance id {beat.instance_id} belongs to member {static.id}, which is still "
                "there; give each running member an instance id of its own",
                group=name,
                instance_id=beat.instance_id,
            )
        is_new = (member.topics, member.assignor) != (static.topics, static.assignor)
        group.membership.take_over(static, member)
        self._rebalancing.close(group.sessions.pop(static.id))
        self._rebalancing.open(group, session, "subscription" if is_new else None)
        return group, session

    def _join_again(self, group: Group, session: Session, beat: Beat) -> Session:
        """It gave up everything, and begins anew."""
        member = group.membership.find(beat.member_id)
        _check_instance(group, member, beat)
        wanted = session.member
        is_new = (wanted.topics, wanted.assignor) != (member.topics, member.assignor)
        old = group.sessions[member.id]
        session.member = member
        group.membership.rejoin(member, wanted.topics, wanted.assignor)
        self._rebalancing.close(old)
        self._rebalancing.open(group, session, "subscription" if is_new else None)
        return session

    def _session(self, member: Member, beat: Beat) -> Session:
        now = self._clock.monotonic()
        return Session(
            member,
            timeout_ms=self._options.session_timeout_ms,
            # Its client knows where to begin, and commits by itself.
            auto_offset_reset="none",
            auto_commit_s=None,
            last_call=now,
            last_commit=now,
            rebalance_timeout_ms=beat.rebalance_timeout_ms,
            host=beat.host,
        )

    def _set_partitions(self, group: Group, topics: frozenset[str]) -> None:
        for topic in topics:
            known = self._topics.by_name.get(topic)
            if known is not None:
                group.membership.set_partitions(topic, known.partitions)

    def _check_room(self, group: Group) -> None:
        members_max = self._options.members_max
        if len(group.sessions) >= members_max:
            raise TooManyMembers(
                f"group {group.name} has {members_max} members, which is the limit; "
                "let one leave, or raise `group_members_max`",
                group=group.name,
                members_max=members_max,
            )

    # ---- being there, and leaving

    def _called(self, name: str, beat: Beat, wanted: _Wanted | None) -> tuple[Group, Session]:
        group = self._find(name, beat)
        member = group.membership.called(beat.member_id, beat.epoch)
        _check_instance(group, member, beat)
        session = group.sessions[member.id]
        self._rebalancing.called(session)
        if beat.rebalance_timeout_ms is not None:
            session.rebalance_timeout_ms = beat.rebalance_timeout_ms
        self._rebalancing.confirm(group, session, beat.epoch, beat.owned)
        topics = member.topics
        if beat.topics is not None or wanted is not None:
            topics = _topics(session, beat, wanted)
        assignor = ASSIGNORS[beat.assignor] if beat.assignor is not None else member.assignor
        if (topics, assignor) != (member.topics, member.assignor):
            self._set_partitions(group, topics)
            group.membership.want(member, topics, assignor)
            self._rebalancing.changed(group, "subscription")
        return group, session

    def _leave(self, name: str, beat: Beat) -> None:
        group = self._find(name, beat)
        member = group.membership.find(beat.member_id)
        _check_instance(group, member, beat)
        session = group.sessions[member.id]
        if beat.epoch == LEAVING:
            self._rebalancing.remove(group, session, "leave")
            return
        if member.instance_id is None:
            raise _invalid("only a member with an instance id leaves for a while")
        # What it had is its own until its session ends.
        self._rebalancing.confirm(group, session, member.generation, frozenset())
        self._rebalancing.called(session)
        session.has_left = True

    def _find(self, name: str, beat: Beat) -> Group:
        group = self._rebalancing.groups.get(name)
        if group is None or group.protocol != "consumer":
            raise MemberUnknown(
                f"group {name} has no member {beat.member_id[:300]}, or its session ended; "
                "join again with epoch 0",
                group=name,
                member_id=beat.member_id[:300],
            )
        return group

    # ---- committing

    def has_members(self, group: str) -> bool:
        return self._rebalancing.count_members(group, "consumer") > 0

    def check_commit(self, group: str, member_id: str, epoch: int) -> None:
        """Raises unless the member is there, in that epoch."""
        found = self._find(group, Beat(member_id, epoch))
        found.membership.called(member_id, epoch)

    # ---- looking

    def facts(self, group: str) -> ConsumerFacts:
        """GroupUnknown unless it has members of this protocol."""
        check_group_name(group)
        found = self._rebalancing.groups.get(group)
        if found is None or found.protocol != "consumer":
            raise GroupUnknown(
                f"group {group} has no members that use the consumer protocol", group=group
            )
        membership = found.membership
        members = [
            ConsumerMemberFacts(
                one.member.id,
                one.member.instance_id,
                one.member.generation,
                one.member.client_id,
                one.host,
                tuple(sorted(one.member.topics)),
                tuple(sorted(one.member.owned)),
                tuple(sorted(membership.wanted(one.member))),
            )
            for one in found.sessions.values()
        ]
        assignor = KAFKA_NAMES[membership.assignor]
        return ConsumerFacts(membership.is_settled, membership.generation, assignor, members)


class _Wanted(NamedTuple):
    """A pattern, and the topics that it fits now."""

    pattern: TopicPattern | None
    matching: frozenset[str]


def _topics(session: Session, beat: Beat, wanted: _Wanted | None) -> frozenset[str]:
    """Those that a member has now, by name and by pattern."""
    matching = session.member.topics - session.named
    if wanted is not None:
        session.pattern, matching = wanted
    elif session.pattern is not None:
        # A name that it takes back may be one that the pattern fits.
        matching |= set(filter(session.pattern.matches, session.named))
    if beat.topics is not None:
        session.named = beat.topics
    return session.named | matching


def _check(beat: Beat) -> None:
    if beat.epoch < LEAVING_FOR_NOW:
        raise _invalid(f"{beat.epoch} is no epoch of a member")
    if not beat.member_id and beat.epoch != JOINING:
        raise _invalid("only a member that joins has no id yet")
    if beat.member_id and not MEMBER_ID.fullmatch(beat.member_id):
        raise _invalid("a member id is 1 to 200 characters of ASCII that can be seen")
    if beat.instance_id is not None and not CLIENT_ID.fullmatch(beat.instance_id):
        raise _invalid("an instance id is 1 to 200 of letters, digits, `.`, `_`, `:` and `-`")
    if beat.topics is not None and len(beat.topics) > TOPICS_MAX:
        raise _invalid(f"a member reads at most {TOPICS_MAX} topics")
    timeout_ms = beat.rebalance_timeout_ms
    if timeout_ms is not None and not 1 <= timeout_ms <= REBALANCE_TIMEOUT_MS_MAX:
        raise _invalid(f"a rebalance timeout is 1 to {REBALANCE_TIMEOUT_MS_MAX} ms")
    if beat.assignor is not None and beat.assignor not in ASSIGNORS:
        raise AssignorUnknown(
            f"the broker has no assignor {beat.assignor[:100]!r}; use one of "
            f"{', '.join(sorted(ASSIGNORS))}",
            assignor=beat.assignor[:100],
        )


def _check_instance(group: Group, member: Member, beat: Beat) -> None:
    if beat.instance_id is not None and beat.instance_id != member.instance_id:
        raise MemberFenced(
            f"member {member.id} has another instance id than {beat.instance_id}",
            group=group.name,
            member_id=member.id,
        )


def _invalid(message: str) -> ParameterInvalid:
    return ParameterInvalid(message, parameter="heartbeat")
