"""Groups of Kafka's classic protocol, as the Kafka listener calls them.

`classic_group` says who is in a group and what they agree on; here it meets time. Members live in
memory: after a restart they are unknown, and join again. Generations are numbers that are never
given twice, as those of all groups (`group_offsets`), and an answer with one waits until that is
durable.

What waits has an end: a join at the latest when the slowest member's rebalance timeout is over, a
sync likewise. A group that nobody is in waits a moment for more before its first generation, so
that many consumers that start together make one rebalance and not one each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.broker.classic_group import (
    CONSUMER,
    ClassicGroup,
    ClassicMember,
    member_unknown,
    size_of,
)
from millstream.broker.classic_values import ClassicFacts, ClassicJoined, ClassicMemberFacts
from millstream.broker.group_values import check_group_name
from millstream.broker.groups import too_many_groups
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    GroupProtocolMismatch,
    MemberFenced,
    MemberIdRequired,
    MillstreamError,
    ParameterInvalid,
    RebalanceUnderWay,
    TooManyMembers,
)
from millstream.wire.kafka.consumer_protocol import subscribed_topics

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from millstream.broker.classic_values import ClassicJoin, ClassicSync, ClassicSynced
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.surroundings import Surroundings

# The random part of a member id: nobody guesses it, no two are the same.
MEMBER_ID_BYTES = 16
# Client ids are anything; only so much of them goes into member ids.
CLIENT_ID_MAX = 200
# A member that joined and never came back for its answer would otherwise be kept for as long as
# the rebalance goes on.
NEW_MEMBER_SECONDS = 300.0
# What one member may say of itself, for all its protocols together: a thousand topics with long
# names, and the partitions that it had.
METADATA_BYTES_MAX = 1024 * 1024
# The same of all members of all groups: a thousand honest members take a hundredth of it.
METADATA_TOTAL_BYTES_MAX = 256 * 1024 * 1024
PROTOCOLS_MAX = 100


@dataclass(frozen=True, slots=True)
class ClassicOptions:
    """As the settings have it."""

    session_timeout_min_ms: int = 500
    session_timeout_max_ms: int = 30 * 60 * 1000
    rebalance_timeout_max_ms: int = 60 * 60 * 1000
    forming_ms: int = 100
    groups_max: int = 10_000
    members_max: int = 1_000


class Hurry:
    """Held by who waits for a join or a sync, to end that when nobody will hear the answer: the
    client is gone, or the broker stops."""

    __slots__ = ("_let_go",)

    def __init__(self) -> None:
        self._let_go: Callable[[], None] | None = None

    def on(self, let_go: Callable[[], None]) -> None:
        self._let_go = let_go

    def __call__(self) -> None:
        if self._let_go is not None:
            self._let_go()


class ClassicGroups:
    __slots__ = (
        "_check_new",
        "_clock",
        "_groups",
        "_metadata_bytes",
        "_offsets",
        "_options",
        "_random_hex",
        "_timers",
        "_topics",
        "rebalances",
    )

    def __init__(
        self,
        around: Surroundings,
        offsets: GroupOffsets,
        options: ClassicOptions,
        random_hex: Callable[[int], str],
        check_new: Callable[[str], None],
    ) -> None:
        """`check_new` raises when that would be one group too many."""
        self._clock = around.clock
        self._timers = around.timers
        self._topics = around.topics
        self._offsets = offsets
        self._options = options
        self._random_hex = random_hex
        self._check_new = check_new
        self._groups: dict[str, ClassicGroup] = {}
        self._metadata_bytes = 0
        # Why members had to join again: the same words as of other groups.
        self.rebalances: Counter[str] = Counter()
        offsets.count_members_by("classic", self.count_members)

    # ---- joining

    def join(
        self, group: str, join: ClassicJoin, hurry: Hurry | None = None
    ) -> Pending[ClassicJoined]:
        """Be in the next generation. It waits for the others."""
        return follow(self._join(group, join, hurry or Hurry()))

    def _join(
        self, name: str, join: ClassicJoin, hurry: Hurry
    ) -> Generator[Pending[Any], Any, ClassicJoined]:
        check_group_name(name)
        self._check(join)
        self._offsets.refuse_others(name, "classic")
        group = self._groups.get(name)
        if group is None and join.member_id is not None:
            raise member_unknown(name, join.member_id)
        leases_ended: Pending[None] = Pending.of(None)
        if join.protocol_type == CONSUMER:
            topics = {one for _, known in join.protocols for one in subscribed_topics(known)}
            known = sorted(topics & self._topics.by_name.keys())
            leases_ended = self._offsets.use_by_offset(name, known)
        if group is None:
            # Those that nobody has been in yet have left no mark by which they are counted.
            if len(self._groups) >= self._options.groups_max:
                raise too_many_groups(self._options.groups_max)
            self._check_new(name)
            self._check_agrees(ClassicGroup(name, join.protocol_type, 0), join)
            group = ClassicGroup(name, join.protocol_type, self._offsets.generation(name))
            self._groups[name] = group
        try:
            if join.member_id is None:
                answer = self._join_new(group, join)
            else:
                answer = self._join_again(group, join, join.member_id)
        finally:
            self._drop_empty(group)
        hurry.on(lambda: self._let_go_join(group, answer))
        joined: ClassicJoined = yield answer
        yield leases_ended
        yield self._offsets.settled()
        return joined

    def _check(self, join: ClassicJoin) -> None:
        options = self._options
        least, most = options.session_timeout_min_ms, options.session_timeout_max_ms
        if not least <= join.session_timeout_ms <= most:
            raise ParameterInvalid(
                f"session.timeout.ms lies between {least} and {most}; "
                f"{join.session_timeout_ms} does not",
                parameter="session_timeout_ms",
            )
        size = size_of(join.protocols)
        if self._metadata_bytes + size > METADATA_TOTAL_BYTES_MAX:
            raise TooManyMembers(
                "the members of all groups say more of themselves than the broker keeps; let some "
                "leave, or subscribe to fewer topics",
                limit_bytes=METADATA_TOTAL_BYTES_MAX,
            )
        if size > METADATA_BYTES_MAX or len(join.protocols) > PROTOCOLS_MAX:
            raise ParameterInvalid(
                f"a member has at most {PROTOCOLS_MAX} assignors, and says at most "
                f"{METADATA_BYTES_MAX} bytes of itself",
                parameter="protocols",
            )

    def _check_agrees(self, group: ClassicGroup, join: ClassicJoin) -> None:
        static = group.static.get(join.instance_id or "")
        group.check_agrees(join, join.member_id or static)

    def _join_new(self, group: ClassicGroup, join: ClassicJoin) -> Pending[ClassicJoined]:
        self._check_agrees(group, join)
        if join.instance_id is not None:
            known = group.static.get(join.instance_id)
            if known is not None:
                return self._come_back(group, group.members[known], join)
        self._check_room(group)
        member_id = self._new_id(join)
        if join.must_know_id and join.instance_id is None:
            self._promise(group, member_id, join.session_timeout_ms)
            raise MemberIdRequired(
                f"join again with the member id {member_id}",
                group=group.name,
                member_id=member_id,
            )
        return self._add(group, member_id, join)

    def _promise(self, group: ClassicGroup, member_id: str, session_timeout_ms: int) -> None:
        def broken() -> None:
            group.promised.pop(member_id, None)
            self._drop_empty(group)
            self._complete_when_all(group)

        group.promised[member_id] = self._timers.after(session_timeout_ms / 1000, broken)

    def _add(
        self, group: ClassicGroup, member_id: str, join: ClassicJoin
    ) -> Pending[ClassicJoined]:
        member = self._member(member_id, join)
        group.protocol_type = join.protocol_type
        group.add(member)
        self._metadata_bytes += member.size
        group.has_newcomers = True
        waiting = member.joining = Pending()
        self._watch(group, member, NEW_MEMBER_SECONDS)
        self._rebalance(group, "join")
        return waiting

    def _join_again(
        self, group: ClassicGroup, join: ClassicJoin, member_id: str
    ) -> Pending[ClassicJoined]:
        promise = group.promised.get(member_id)
        if promise is not None and join.instance_id is None:
            self._check_agrees(group, join)
            del group.promised[member_id]
            self._timers.cancel(promise)
            return self._add(group, member_id, join)
        member = group.find(member_id, join.instance_id)
        self._check_agrees(group, join)
        is_same = member.protocols == join.protocols
        if group.state == "completing" and is_same:
            # Its answer was lost: it is in this generation already.
            return self._told(group, member)
        if group.state == "stable" and is_same and member.id != group.leader:
            return self._told(group, member)
        # What the leader joins for only the leader knows, such as a topic that has grown.
        self._update(group, member, join)
        waiting = self._wait(member)
        self._rebalance(group, "subscription")
        return waiting

    def _told(self, group: ClassicGroup, member: ClassicMember) -> Pending[ClassicJoined]:
        self._called(member)
        return Pending.of(group.joined(member))

    def _come_back(
        self, group: ClassicGroup, old: ClassicMember, join: ClassicJoin
    ) -> Pending[ClassicJoined]:
        """A static member, under a new id. If it wants what it wanted, nobody else notices."""
        was_leader = group.leader == old.id
        new = self._member(self._new_id(join), join)
        group.replace(old, new)
        self._metadata_bytes += new.size - old.size
        self._end(old, _replaced(group, old))
        self._watch(group, new, new.session_timeout_ms / 1000)
        is_same = old.metadata(group.protocol) == new.metadata(group.protocol)
        if group.state == "stable" and is_same and group.choose_protocol() == group.protocol:
            joined = group.joined(new)
            if was_leader and join.can_skip:
                joined = joined._replace(is_skipped=True)
            elif was_leader:
                # Told of the leader that was, so that it does not deal out again.
                joined = joined._replace(leader=old.id, members=())
            return Pending.of(joined)
        waiting = self._wait(new)
        self._rebalance(group, "subscription")
        return waiting

    def _new_id(self, join: ClassicJoin) -> str:
        name = join.instance_id or join.client_id
        return f"{name[:CLIENT_ID_MAX]}-{self._random_hex(MEMBER_ID_BYTES)}"

    def _member(self, member_id: str, join: ClassicJoin) -> ClassicMember:
        return ClassicMember(
            member_id,
            join.client_id,
            join.host,
            join.instance_id,
            join.protocols,
            join.session_timeout_ms,
            self._rebalance_timeout_ms(join),
            self._clock.monotonic(),
        )

    def _rebalance_timeout_ms(self, join: ClassicJoin) -> int:
        wanted = join.rebalance_timeout_ms
        if wanted < 0:
            wanted = join.session_timeout_ms
        return min(wanted, self._options.rebalance_timeout_max_ms)

    def _update(self, group: ClassicGroup, member: ClassicMember, join: ClassicJoin) -> None:
        group.protocol_type = join.protocol_type
        self._metadata_bytes += size_of(join.protocols) - member.size
        member.protocols = join.protocols
        member.session_timeout_ms = join.session_timeout_ms
        member.rebalance_timeout_ms = self._rebalance_timeout_ms(join)
        self._called(member)

    def _wait(self, member: ClassicMember) -> Pending[ClassicJoined]:
        if member.joining is not None:
            # It asked again, on another connection: the first one has nobody any more.
            member.joining.fail(_under_way())
        waiting = member.joining = Pending()
        return waiting

    def _let_go_join(self, group: ClassicGroup, waiting: Pending[ClassicJoined]) -> None:
        """A new member is out: nobody has its id. Another one has as long as it had to come
        back."""
        for member in list(group.members.values()):
            if member.joining is not waiting:
                continue
            if member.is_new:
                self._remove(group, member)
                self._after_removal(group, "leave")
            else:
                member.joining = None
                waiting.fail(_under_way())

    def _check_room(self, group: ClassicGroup) -> None:
        members_max = self._options.members_max
        if len(group.members) + len(group.promised) >= members_max:
            raise TooManyMembers(
                f"group {group.name} has {members_max} members, which is the limit; "
                "let one leave, or raise `group_members_max`",
                group=group.name,
                members_max=members_max,
            )

    # ---- from generation to generation

    def _rebalance(self, group: ClassicGroup, reason: str) -> None:
        """Everybody is to join; those who do already wait."""
        if group.state != "preparing":
            self.rebalances[reason] += 1
            self._cancel(group)
            for member in group.members.values():
                if member.syncing is not None:
                    syncing, member.syncing = member.syncing, None
                    self._called(member)
                    syncing.fail(_under_way())
            is_first = group.state == "empty"
            group.state = "preparing"
            seconds = group.rebalance_timeout_ms / 1000
            if is_first:
                group.has_newcomers = False
                group.forming_until = self._clock.monotonic() + seconds
                seconds = min(seconds, self._options.forming_ms / 1000)
                group.timer = self._timers.after(seconds, lambda: self._form(group))
                return
            group.timer = self._timers.after(seconds, lambda: self._complete(group))
        self._complete_when_all(group)

    def _form(self, group: ClassicGroup) -> None:
        """The first generation of a group that was empty: once nobody came for a moment."""
        group.timer = None
        assert group.forming_until is not None
        rest = group.forming_until - self._clock.monotonic()
        if group.has_newcomers and rest > 0:
            group.has_newcomers = False
            seconds = min(rest, self._options.forming_ms / 1000)
            group.timer = self._timers.after(seconds, lambda: self._form(group))
            return
        group.forming_until = None
        if group.promised and rest > 0:
            group.timer = self._timers.after(rest, lambda: self._complete(group))
            return
        self._complete(group)

    def _complete_when_all(self, group: ClassicGroup) -> None:
        if group.state == "preparing" and group.forming_until is None and group.has_all:
            self._complete(group)

    def _complete(self, group: ClassicGroup) -> None:
        """Who has joined is in the next generation; who has not is out, unless it is static."""
        self._cancel(group)
        group.forming_until = None
        for member in list(group.members.values()):
            if member.joining is None and member.instance_id is None:
                self._remove(group, member)
        if not group.members:
            self._drop_empty(group)
            return
        if all(one.joining is None for one in group.members.values()):
            # Only static members, all away: until their sessions end.
            seconds = group.rebalance_timeout_ms / 1000
            group.timer = self._timers.after(seconds, lambda: self._complete(group))
            return
        group.begin_generation()
        self._offsets.reserve(group.name, group.generation)
        seconds = group.rebalance_timeout_ms / 1000
        group.timer = self._timers.after(seconds, lambda: self._expect_synced(group))
        for member in list(group.members.values()):
            joining, member.joining = member.joining, None
            if joining is None:
                continue
            if member.is_new:
                member.is_new = False
                self._unwatch(member)
                self._watch(group, member, member.session_timeout_ms / 1000)
            self._called(member)
            joining.succeed(group.joined(member))

    def _expect_synced(self, group: ClassicGroup) -> None:
        """The time to ask for one's part is over: who did not is out."""
        group.timer = None
        missing = [one for one in group.members.values() if one.synced != group.generation]
        for member in missing:
            self._remove(group, member)
        if missing:
            self._after_removal(group, "expired")

    def _cancel(self, group: ClassicGroup) -> None:
        if group.timer is not None:
            self._timers.cancel(group.timer)
            group.timer = None

    # ---- dealing out

    def sync(
        self, group: str, sync: ClassicSync, hurry: Hurry | None = None
    ) -> Pending[ClassicSynced]:
        """What a member gets. It waits for the leader, which gives it."""
        return follow(self._sync(group, sync, hurry or Hurry()))

    def _sync(
        self, name: str, sync: ClassicSync, hurry: Hurry
    ) -> Generator[Pending[Any], Any, ClassicSynced]:
        group = self._find(name, sync.member_id)
        member = group.called(sync.member_id, sync.generation, sync.instance_id)
        for said, known in (
            (sync.protocol_type, group.protocol_type),
            (sync.protocol, group.protocol),
        ):
            if said is not None and said != known:
                raise GroupProtocolMismatch(
                    f"group {name} uses {known!r}, not {said!r}; join again", group=name
                )
        self._called(member)
        if group.state == "preparing":
            raise _under_way()
        member.synced = group.generation
        if group.state == "stable":
            return group.synced(member)
        if member.syncing is not None:
            member.syncing.fail(_under_way())
        waiting = member.syncing = Pending()
        hurry.on(lambda: self._let_go_sync(member, waiting))
        if member.id == group.leader:
            self._deal_out(group, sync)
        synced: ClassicSynced = yield waiting
        return synced

    def _let_go_sync(self, member: ClassicMember, waiting: Pending[ClassicSynced]) -> None:
        if member.syncing is waiting:
            member.syncing = None
            waiting.fail(_under_way())

    def _deal_out(self, group: ClassicGroup, sync: ClassicSync) -> None:
        group.deal_out(sync.assignments)
        for member in list(group.members.values()):
            syncing, member.syncing = member.syncing, None
            if syncing is not None:
                self._called(member)
                syncing.succeed(group.synced(member))

    # ---- being there

    def heartbeat(
        self, group: str, member_id: str, generation: int, instance_id: str | None = None
    ) -> None:
        """Raises when the member has something to do: join again, or anew."""
        found = self._find(group, member_id)
        member = found.called(member_id, generation, instance_id)
        self._called(member)
        if found.state == "preparing":
            raise _under_way()

    def leave(
        self, group: str, leaving: Sequence[tuple[str, str | None]]
    ) -> list[MillstreamError | None]:
        """Members, or static ones by their instance id, that go. Of each what was wrong."""
        check_group_name(group)
        found = self._groups.get(group)
        outcomes: list[MillstreamError | None] = []
        has_gone = False
        for member_id, instance_id in leaving:
            try:
                if found is None:
                    raise member_unknown(group, member_id or instance_id or "")
                has_gone |= self._leave(found, member_id, instance_id)
            except MillstreamError as error:
                outcomes.append(error)
            else:
                outcomes.append(None)
        if found is not None and has_gone:
            self._after_removal(found, "leave")
        return outcomes

    def _leave(self, group: ClassicGroup, member_id: str, instance_id: str | None) -> bool:
        """Whether a member has gone, not only a promise."""
        promise = group.promised.pop(member_id, None)
        if promise is not None:
            self._timers.cancel(promise)
            self._drop_empty(group)
            self._complete_when_all(group)
            return False
        if not member_id and instance_id is not None:
            # An administrator knows only the instance.
            member_id = group.static.get(instance_id, "")
        self._remove(group, group.find(member_id, instance_id))
        return True

    def _called(self, member: ClassicMember) -> None:
        member.last_call = self._clock.monotonic()

    def _watch(self, group: ClassicGroup, member: ClassicMember, seconds: float) -> None:
        member.timer = self._timers.after(seconds, lambda: self._look(group, member))

    def _unwatch(self, member: ClassicMember) -> None:
        if member.timer is not None:
            self._timers.cancel(member.timer)
            member.timer = None

    def _look(self, group: ClassicGroup, member: ClassicMember) -> None:
        """One timer a member, set again for the rest: nothing to do at each call."""
        member.timer = None
        is_waiting = member.joining is not None or member.syncing is not None
        idle = 0.0 if is_waiting else self._clock.monotonic() - member.last_call
        rest = member.session_timeout_ms / 1000 - idle
        if rest > 0 and not (member.is_new and is_waiting):
            self._watch(group, member, rest)
            return
        self._remove(group, member)
        self._after_removal(group, "expired")

    def _remove(self, group: ClassicGroup, member: ClassicMember) -> None:
        group.remove(member)
        self._metadata_bytes -= member.size
        self._end(member, member_unknown(group.name, member.id))

    def _end(self, member: ClassicMember, why: MillstreamError) -> None:
        self._unwatch(member)
        for waiting in (member.joining, member.syncing):
            if waiting is not None:
                waiting.fail(why)
        member.joining = member.syncing = None

    def _after_removal(self, group: ClassicGroup, reason: str) -> None:
        if not group.members:
            self.rebalances[reason] += 1
            self._drop_empty(group)
        elif group.state in ("stable", "completing"):
            self._rebalance(group, reason)
        else:
            self._complete_when_all(group)

    def _drop_empty(self, group: ClassicGroup) -> None:
        """Nothing is kept of a group without members but its number."""
        if group.members or self._groups.get(group.name) is not group:
            return
        if group.state != "empty":
            self._cancel(group)
            group.state = "empty"
            group.forming_until = None
            self._offsets.give_back(group.name, group.generation)
        if not group.promised:
            del self._groups[group.name]

    # ---- committing

    def check_commit(
        self, group: str, member_id: str, generation: int, instance_id: str | None = None
    ) -> None:
        """Raises unless the member may commit. What it may commit only the members know."""
        found = self._find(group, member_id)
        member = found.called(member_id, generation, instance_id)
        if found.state == "completing":
            raise _under_way()
        self._called(member)

    # ---- looking

    def count_members(self, group: str) -> int:
        found = self._groups.get(group)
        return len(found.members) if found is not None else 0

    @property
    def members(self) -> int:
        return sum(len(group.members) for group in self._groups.values())

    def names(self) -> list[str]:
        """Of the groups that have members."""
        return [name for name, group in self._groups.items() if group.members]

    def facts(self, group: str) -> ClassicFacts | None:
        """None unless it has members."""
        found = self._groups.get(group)
        if found is None or not found.members:
            return None
        members = [
            ClassicMemberFacts(
                one.id,
                one.instance_id,
                one.client_id,
                one.host,
                one.metadata(found.protocol),
                one.assignment if found.state == "stable" else b"",
                one.session_timeout_ms,
                int((self._clock.monotonic() - one.last_call) * 1000),
            )
            for one in found.members.values()
        ]
        return ClassicFacts(
            found.state, found.protocol_type, found.protocol, found.generation, members
        )

    def drain(self) -> None:
        """Before a stop: who waits is answered now."""
        for group in self._groups.values():
            for member in group.members.values():
                for waiting in (member.joining, member.syncing):
                    if waiting is not None:
                        waiting.fail(_under_way())
                member.joining = member.syncing = None

    def _find(self, name: str, member_id: str) -> ClassicGroup:
        check_group_name(name)
        group = self._groups.get(name)
        if group is None or not group.members:
            raise member_unknown(name, member_id)
        return group


def _replaced(group: ClassicGroup, old: ClassicMember) -> MemberFenced:
    return MemberFenced(
        f"another member took over the instance id {old.instance_id}; "
        "give each running member an instance id of its own",
        group=group.name,
        member_id=old.id,
    )


def _under_way() -> RebalanceUnderWay:
    return RebalanceUnderWay("the group changes its members; join again")
