"""Groups: consumers that share the partitions of topics.

Members live in memory: after a restart they join again. What survives is what was committed, and
the group's generation, so that no number is ever given twice. Generations are reserved in blocks,
one append for many of them; a group that becomes empty gives the rest of its block back.

Every answer waits until what it says is durable. Sessions, long polls, the time that a member has
to give partitions up and commits by the clock are timers on the monotonic clock: the wall clock
may jump as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from millstream.broker.group_values import (
    Commit,
    Committed,
    GroupSummary,
    Join,
    Joined,
    MemberFacts,
    Poll,
    Polled,
    PolledPart,
    Standing,
    check_group_name,
)
from millstream.broker.joining import GroupOptions, check_join, check_poll
from millstream.broker.membership import Member
from millstream.broker.polling import Polling, Session, read, wait_for_more
from millstream.broker.rebalancing import Rebalancing
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    MemberUnknown,
    MillstreamError,
    ParameterInvalid,
    TooManyGroups,
    TooManyMembers,
)
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.group_settings import GroupSettings
    from millstream.broker.rebalancing import Group
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic

# The random part of a member id: nobody guesses it, no two are the same.
MEMBER_ID_BYTES = 8
# How long a poll pauses that was woken and found nothing, so that it never turns the loop alone.
PAUSE_SECONDS = 0.01


class Groups:
    """All groups of one broker, as listeners call them."""

    __slots__ = (
        "_clock",
        "_offsets",
        "_options",
        "_random_hex",
        "_reader",
        "_rebalancing",
        "_timers",
        "_topics",
        "counts",
    )

    def __init__(
        self,
        around: Surroundings,
        offsets: GroupOffsets,
        options: GroupOptions,
        random_hex: Callable[[int], str],
    ) -> None:
        self._offsets = offsets
        self._topics = around.topics
        self._reader = around.reader
        self._clock = around.clock
        self._timers = around.timers
        self._options = options
        self._random_hex = random_hex
        self._rebalancing = rebalancing = Rebalancing(around, offsets, options)
        self.counts = self._rebalancing.counts
        offsets.count_members_by("http", lambda name: rebalancing.count_members(name, "http"))
        around.topics.watch_deleted(self._topic_deleted)
        around.topics.watch_partitions(self._topic_grown)

    # ---- joining and leaving

    def join(self, group: str, join: Join) -> Pending[Joined]:
        """Become a member, or change what one asked for. The answer has the first partitions."""
        return follow(self._join(group, join))

    def _join(self, name: str, join: Join) -> Generator[Pending[Any], Any, Joined]:
        check_group_name(name)
        join = check_join(join, self._options)
        self._offsets.refuse_others(name, "http")
        for topic in join.topics:
            self._topics.get(topic)
        leases_ended = self._offsets.use_by_offset(name, join.topics)
        group = self._rebalancing.groups.get(name)
        if join.member_id is not None:
            if group is None:
                raise _member_unknown(name, join.member_id)
            session = self._join_again(group, join, join.member_id)
        else:
            session = self._join_new(name, group, join)
            group = self._rebalancing.groups[name]
        self._rebalancing.reconcile(group, session)
        session.member.acknowledged = session.member.generation
        standing = self._standing(group, session.member)
        yield leases_ended
        yield self._offsets.settled()
        assert join.session_timeout_ms is not None
        # Two heartbeats may get lost before the session is over.
        interval_ms = min(self._options.heartbeat_interval_ms, join.session_timeout_ms // 3)
        return Joined(standing, join.session_timeout_ms, interval_ms)

    def _join_again(self, group: Group, join: Join, member_id: str) -> Session:
        member = group.membership.find(member_id)
        if join.instance_id != member.instance_id:
            raise ParameterInvalid(
                f"member {member_id} has the instance id {member.instance_id}; "
                "join without a member id to have another",
                parameter="instance_id",
            )
        old = group.sessions[member_id]
        session = self._session(member, join)
        # An old number must not be taken for one of this session.
        session.positions.number = old.positions.number
        wanted = frozenset(join.topics)
        is_new = (wanted, join.assignor) != (member.topics, member.assignor)
        self._set_partitions(group, join.topics)
        group.membership.rejoin(member, wanted, join.assignor)
        self._rebalancing.close(old)
        self._rebalancing.open(group, session, "subscription" if is_new else None)
        return session

    def _join_new(self, name: str, group: Group | None, join: Join) -> Session:
        new_id = f"{join.client_id}-{self._random_hex(MEMBER_ID_BYTES)}"
        member = Member(
            new_id, join.client_id, frozenset(join.topics), join.instance_id, join.assignor
        )
        session = self._session(member, join)
        static = None
        if group is not None and join.instance_id is not None:
            static = group.membership.static_member(join.instance_id)
        if group is not None and static is not None:
            is_new = (member.topics, member.assignor) != (static.topics, static.assignor)
            self._set_partitions(group, join.topics)
            group.membership.take_over(static, member)
            self._rebalancing.close(group.sessions.pop(static.id))
            self._rebalancing.open(group, session, "subscription" if is_new else None)
            return session
        self._check_room(name, group)
        group = self._rebalancing.get_or_create(name, "http")
        self._set_partitions(group, join.topics)
        group.membership.add(member)
        self._rebalancing.open(group, session, "join")
        return session

    def _session(self, member: Member, join: Join) -> Session:
        assert join.session_timeout_ms is not None
        assert join.auto_offset_reset is not None
        assert join.auto_commit_interval_ms is not None
        now = self._clock.monotonic()
        return Session(
            member,
            timeout_ms=join.session_timeout_ms,
            auto_offset_reset=join.auto_offset_reset,
            auto_commit_s=join.auto_commit_interval_ms / 1000 if join.auto_commit else None,
            last_call=now,
            last_commit=now,
        )

    def _set_partitions(self, group: Group, topics: Sequence[str]) -> None:
        for topic in topics:
            group.membership.set_partitions(topic, self._topics.get(topic).partitions)

    def _check_room(self, name: str, group: Group | None) -> None:
        options = self._options
        if group is not None:
            if len(group.sessions) >= options.members_max:
                raise TooManyMembers(
                    f"group {name} has {options.members_max} members, which is the limit; "
                    "let one leave, or raise `group_members_max`",
                    group=name,
                    members_max=options.members_max,
                )
        else:
            self.check_new(name)

    def check_new(self, name: str) -> None:
        """Raises when that would be one group too many."""
        groups_max = self._options.groups_max
        if not self._offsets.table.has_group(name) and self.count() >= groups_max:
            raise too_many_groups(groups_max)

    def leave(
        self,
        group: str,
        member_id: str,
        received: int | None = None,
        generation: int | None = None,
    ) -> Pending[None]:
        """Go, with what was polled so far committed if the broker commits for this member. What a
        static member has stays its own until its session ends. `received` as in `Poll`. Without a
        generation it goes whatever it has heard."""
        return follow(self._leave(group, member_id, received, generation))

    def _leave(
        self, name: str, member_id: str, received: int | None, generation: int | None
    ) -> Generator[Pending[Any], Any, None]:
        group = self._find(name, member_id)
        member = group.membership.find(member_id)
        if generation is not None:
            group.membership.called(member_id, generation)
        session = group.sessions[member_id]
        session.positions.receive(received)
        self._rebalancing.commit_handled(group, session)
        if member.instance_id is None:
            self._rebalancing.remove(group, session, "leave")
        else:
            self._rebalancing.called(session)
            session.has_left = True
            if session.polling is not None:
                session.polling.end()
        yield self._offsets.settled()

    # ---- being there

    def heartbeat(self, group: str, member_id: str, generation: int) -> Pending[Standing]:
        """Say that one is there, and hear what changed."""
        return follow(self._heartbeat(group, member_id, generation))

    def _heartbeat(
        self, name: str, member_id: str, generation: int
    ) -> Generator[Pending[Any], Any, Standing]:
        group = self._find(name, member_id)
        member = group.membership.called(member_id, generation)
        session = group.sessions[member_id]
        self._rebalancing.called(session)
        self._rebalancing.acknowledge(group, session, generation)
        self._rebalancing.reconcile(group, session)
        standing = self._standing(group, member)
        if standing.generation != generation:
            yield self._offsets.settled()
        return standing

    # ---- polling

    def poll(
        self, group: str, member_id: str, generation: int, poll: Poll | None = None
    ) -> Polling[Polled]:
        """Records of the partitions that the member has. It waits while there are none, and ends
        early when the member's partitions change. A poll takes the place of one under way."""
        poll = poll if poll is not None else Poll()
        try:
            count_max, bytes_max, wait_ms = check_poll(poll, self._options)
            found = self._find(group, member_id)
            found.membership.called(member_id, generation)
        except MillstreamError as error:
            return Polling.failed(error)
        session = found.sessions[member_id]
        if session.polling is not None:
            session.polling.end()
        self._rebalancing.called(session)
        session.positions.receive(poll.received)
        self._rebalancing.acknowledge(found, session, generation)
        self._rebalancing.commit_when_due(found, session)
        polling = Polling[Polled](lambda one: _give_back(session, one))
        session.polling = polling
        deadline = self._clock.monotonic() + wait_ms / 1000
        steps = self._poll(found, session, polling, (count_max, bytes_max, deadline))
        follow(steps).then(lambda one: self._polled(session, polling, one))
        return polling

    def _polled(self, session: Session, polling: Polling[Polled], done: Pending[Polled]) -> None:
        if session.polling is polling:
            session.polling = None
            session.last_call = self._clock.monotonic()
        if done.error is not None:
            polling.pending.fail(done.error)
        else:
            polling.pending.succeed(done.result())

    def _poll(
        self,
        group: Group,
        session: Session,
        polling: Polling[Polled],
        limits: tuple[int, int, float],
    ) -> Generator[Pending[Any], Any, Polled]:
        count_max, bytes_max, deadline = limits
        heard = session.positions.number
        member = session.member
        before = member.generation
        has_waited = False
        parts: list[PolledPart] = []
        had: dict[PartitionId, int] = {}
        while not polling.is_over:
            self._rebalancing.reconcile(group, session)
            # Also when a heartbeat of the member was told first.
            has_changed = member.generation != before
            had = dict(member.owned)
            self._check_placed(group, session)
            parts = yield from read(
                session,
                self._reader,
                count_max,
                bytes_max,
                lambda id: self._rebalancing.out_of_range(group, session, id),
            )
            if not parts:
                self._check_placed(group, session)
            rest = deadline - self._clock.monotonic()
            if parts or has_changed or rest <= 0 or polling.is_over:
                break
            if group.membership.has_news(member):
                continue
            if has_waited:
                # Woken for nothing, such as a topic that is about to go.
                has_waited = False
                yield self._pause(polling)
                continue
            has_waited = True
            yield from wait_for_more(session, polling, self._reader, rest)
        pins = session.pins
        if member.generation != member.acknowledged or session.pins_settled < pins:
            yield self._offsets.settled()
            session.pins_settled = max(session.pins_settled, pins)
        if session.is_gone:
            # It went, was replaced, or joined again in the meantime.
            group.membership.find(member.id)
        if polling.is_over:
            # The one that took its place may have given something, and nobody may say for the
            # member that it came through.
            return Polled(group.membership.standing(member), heard, [])
        return self._answer(group, session, [one for one in parts if _still(one, had, member)])

    def _check_placed(self, group: Group, session: Session) -> None:
        """Every partition has a position, or the member asked for none to be made up."""
        missing = [id for id in session.member.owned if id not in session.positions]
        if not missing:
            return
        self._rebalancing.place(group, session, missing)
        for id in missing:
            if id not in session.positions and session.auto_offset_reset == "none":
                raise self._rebalancing.no_position(group, id)

    def _answer(self, group: Group, session: Session, parts: list[PolledPart]) -> Polled:
        number = session.positions.give(
            {PartitionId(one.topic, one.partition): one.next_offset for one in parts}
        )
        for one in parts:
            self.counts.consumed(group.name, one.topic, len(one.records))
        return Polled(self._standing(group, session.member), number, parts)

    def _pause(self, polling: Polling[Polled]) -> Pending[None]:
        self._timers.after(PAUSE_SECONDS, polling.wake)
        return polling.wait()

    # ---- committing

    def commit(
        self,
        group: str,
        commits: Sequence[Commit],
        member_id: str | None = None,
        generation: int | None = None,
    ) -> Pending[list[Committed]]:
        """All of them or none; done when they are durable. Without a member only while the group
        has none: its members would not know."""
        return follow(self._commit(group, commits, member_id, generation))

    def _commit(
        self,
        name: str,
        commits: Sequence[Commit],
        member_id: str | None,
        generation: int | None,
    ) -> Generator[Pending[Any], Any, list[Committed]]:
        check_group_name(name)
        leases_ended: Pending[None] = Pending.of(None)
        if member_id is None:
            self._offsets.refuse_members(name)
            self.check_new(name)
            self._offsets.check(commits)
            leases_ended = self._offsets.use_by_offset(name, [one.topic for one in commits])
        else:
            self._check_member_commit(name, commits, member_id, generation)
        if not commits:
            yield self._offsets.settled()
            return []
        written = self._offsets.write(name, commits)
        yield leases_ended
        done: list[Committed] = yield written
        return done

    def _check_member_commit(
        self, name: str, commits: Sequence[Commit], member_id: str, generation: int | None
    ) -> None:
        if generation is None:
            raise ParameterInvalid(
                "a commit by a member needs its generation", parameter="generation"
            )
        group = self._find(name, member_id)
        member = group.membership.called(member_id, generation)
        session = group.sessions[member_id]
        ids = [PartitionId(one.topic, one.partition) for one in commits]
        for id in ids:
            self._topics.partition_of(id.topic, id.number)
            # Before its offset, which may lie past the end of a topic that was made again.
            group.membership.may_commit(member, generation, id)
        self._offsets.check(commits)
        self._rebalancing.called(session)
        for id in ids:
            session.positions.committed(id)

    # ---- looking

    def count(self) -> int:
        """Groups that have members or a past. Who joins leaves a mark in the table."""
        return len(self._offsets.table.groups())

    def facts(self, name: str) -> tuple[GroupSummary, list[MemberFacts]] | None:
        """None unless it has members."""
        group = self._rebalancing.groups.get(name)
        if group is None:
            return None
        membership = group.membership
        summary = GroupSummary(
            name,
            "stable" if membership.is_settled else "rebalancing",
            len(membership.members),
            membership.generation,
            membership.assignor,
            tuple(sorted(membership.topics())),
            group.protocol,
        )
        return summary, sorted(self._member_facts(one) for one in group.sessions.values())

    def _member_facts(self, session: Session) -> MemberFacts:
        member = session.member
        return MemberFacts(
            member.id,
            member.client_id,
            member.instance_id,
            member.generation,
            tuple(sorted(member.topics)),
            tuple(sorted(member.owned)),
            tuple(sorted(member.revoking)),
            session.timeout_ms,
            int((self._clock.monotonic() - session.last_call) * 1000),
        )

    @property
    def rebalancing(self) -> Rebalancing:
        """For groups of another protocol, whose members are dealt out to in the same way."""
        return self._rebalancing

    @property
    def members(self) -> int:
        return sum(len(group.sessions) for group in self._rebalancing.groups.values())

    def names(self) -> list[str]:
        """Of the groups that have members."""
        return list(self._rebalancing.groups)

    def owners(self, group: str) -> dict[PartitionId, str]:
        """Which member has a partition."""
        found = self._rebalancing.groups.get(group)
        owners = found.membership.owners if found is not None else {}
        return {id: member.id for id, member in owners.items()}

    # ---- settings

    def alter(self, group: str, changes: Mapping[str, object]) -> Pending[GroupSettings]:
        """Change what is set for a group, whether it was used yet or not."""
        return follow(self._alter(group, changes))

    def _alter(
        self, name: str, changes: Mapping[str, object]
    ) -> Generator[Pending[Any], Any, GroupSettings]:
        check_group_name(name)
        self.check_new(name)
        yield self._offsets.alter(name, changes)
        return self._offsets.settings(name)

    # ---- the end of a group, and of all

    def delete(self, group: str) -> Pending[None]:
        """Forget a group that has no members, and what it committed."""
        return follow(self._delete(group))

    def _delete(self, name: str) -> Generator[Pending[Any], Any, None]:
        self._offsets.known(name)
        self._offsets.refuse_members(name)
        yield self._offsets.delete_group(name)

    def drain(self) -> None:
        """Before a stop: polls that wait are answered now, without records."""
        for group in self._rebalancing.groups.values():
            for session in list(group.sessions.values()):
                if session.polling is not None:
                    session.polling.end()

    def commit_handled(self) -> None:
        """At a stop: what members have handled and the broker has not committed for them yet."""
        for group in self._rebalancing.groups.values():
            for session in group.sessions.values():
                self._rebalancing.commit_handled(group, session)

    # ---- topics

    def _topic_deleted(self, topic: Topic) -> None:
        self._rebalancing.set_partitions(topic.name, 0)

    def _topic_grown(self, topic: Topic) -> None:
        self._rebalancing.set_partitions(topic.name, topic.partitions)

    # ---- inside

    def _standing(self, group: Group, member: Member) -> Standing:
        """With the ids that the topics have at this moment: by the time that it is sent, they may
        be others."""
        standing = group.membership.standing(member)
        names = {one.topic for one in (*standing.assignment, *standing.revoking)}
        ids = {name: str(self._topics.get(name).uuid) for name in sorted(names)}
        return standing._replace(topic_ids=ids)

    def _find(self, name: str, member_id: str) -> Group:
        group = self._rebalancing.groups.get(name)
        if group is None or group.protocol != "http":
            check_group_name(name)
            raise _member_unknown(name, member_id)
        return group


def _still(part: PolledPart, had: dict[PartitionId, int], member: Member) -> bool:
    """Whether a partition is the member's as it was when it was read."""
    id = PartitionId(part.topic, part.partition)
    return id in had and member.owned.get(id) == had[id]


def _give_back(session: Session, polling: Polling[Polled]) -> None:
    if not polling.is_over and session.positions.number == polling.pending.result().number:
        session.positions.take_back()


def _member_unknown(group: str, member_id: str) -> MemberUnknown:
    return MemberUnknown(
        f"group {group} has no member {member_id[:300]}, or its session ended; "
        "join again without a member id",
        group=group,
        member_id=member_id[:300],
    )


def too_many_groups(groups_max: int) -> TooManyGroups:
    return TooManyGroups(
        f"there are {groups_max} groups, which is the limit; delete one, or raise `groups_max`",
        groups_max=groups_max,
    )
