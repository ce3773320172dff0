"""One group of Kafka's classic protocol: who is in it, and which protocol they agree on.

Its members agree by themselves on who reads what. The broker only brings them together:

1. preparing: somebody came, went or wants something else. All members are to join (again); the
   group waits for them as long as the slowest has asked for.
2. completing: who joined is in the new generation. One of them, the leader, hears of all, and
   deals out; the others ask for their part (sync) and wait.
3. stable: the leader has dealt out, and whoever asks gets its part.

A static member (one with an instance id) may go and come back without a rebalance: its place is
its own until its session ends. Without clock, disk or loop; `classic_groups` has those.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.broker.classic_values import Candidate, ClassicJoined, ClassicState, ClassicSynced
from millstream.errors import (
    GroupProtocolMismatch,
    MemberFenced,
    MemberUnknown,
    StaleGeneration,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millstream.broker.classic_values import ClassicJoin
    from millstream.broker.wheel import Timer
    from millstream.engine.pending import Pending

CONSUMER = "consumer"
# A version, no topics, no user data: what a consumer gets that gets nothing. Clients cannot read
# an assignment without bytes.
NO_PARTITIONS = b"\0\0" + b"\0\0\0\0" + b"\xff\xff\xff\xff"


@dataclass(slots=True, eq=False)
class ClassicMember:
    id: str
    client_id: str
    host: str
    instance_id: str | None
    protocols: tuple[tuple[str, bytes], ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    # On the monotonic clock.
    last_call: float
    assignment: bytes = b""
    # What it waits for, if it does.
    joining: Pending[ClassicJoined] | None = None
    syncing: Pending[ClassicSynced] | None = None
    # The generation in which it last asked for its part.
    synced: int = -1
    # It has never been in a generation.
    is_new: bool = True
    timer: Timer | None = None

    @property
    def size(self) -> int:
        """What it says of itself, in bytes."""
        return size_of(self.protocols)

    def metadata(self, protocol: str) -> bytes:
        return next((known for name, known in self.protocols if name == protocol), b"")


@dataclass(slots=True, eq=False)
class ClassicGroup:
    name: str
    protocol_type: str
    generation: int
    state: ClassicState = "empty"
    protocol: str = ""
    leader: str | None = None
    members: dict[str, ClassicMember] = field(default_factory=dict)
    # Ids that were given out, and whose members have not come back yet.
    promised: dict[str, Timer] = field(default_factory=dict)
    # Who has an instance id.
    static: dict[str, str] = field(default_factory=dict)
    # Ends the wait for members that are to join, or to ask for their part.
    timer: Timer | None = None
    # Of a group that was empty: when it stops waiting for more, and whether more came.
    forming_until: float | None = None
    has_newcomers: bool = False

    # ---- who is there

    def find(self, member_id: str, instance_id: str | None = None) -> ClassicMember:
        if instance_id is not None:
            known = self.static.get(instance_id)
            if known is None:
                raise member_unknown(self.name, member_id)
            if known != member_id:
                raise _fenced(self.name, member_id, instance_id)
        member = self.members.get(member_id)
        if member is None:
            raise member_unknown(self.name, member_id)
        return member

    def called(
        self, member_id: str, generation: int, instance_id: str | None = None
    ) -> ClassicMember:
        member = self.find(member_id, instance_id)
        if generation != self.generation:
            raise StaleGeneration(
                f"member {member_id[:300]} called with generation {generation} and group "
                f"{self.name} is in {self.generation}; join again",
                group=self.name,
                member_id=member_id[:300],
                generation=generation,
                current=self.generation,
            )
        return member

    def add(self, member: ClassicMember) -> None:
        self.members[member.id] = member
        if member.instance_id is not None:
            self.static[member.instance_id] = member.id
        if self.leader is None:
            self.leader = member.id

    def remove(self, member: ClassicMember) -> None:
        del self.members[member.id]
        if member.instance_id is not None and self.static.get(member.instance_id) == member.id:
            del self.static[member.instance_id]
        if self.leader == member.id:
            self.leader = next(iter(self.members), None)

    def replace(self, old: ClassicMember, new: ClassicMember) -> None:
        """A static member came back under a new id, and has what it had."""
        was_leader = self.leader == old.id
        new.assignment = old.assignment
        new.is_new = False
        self.remove(old)
        self.add(new)
        if was_leader:
            self.leader = new.id

    # ---- what they agree on

    def check_agrees(self, join: ClassicJoin, besides: str | None = None) -> None:
        """Raises unless all members can work with one of the protocols."""
        others = [one for one in self.members.values() if one.id != besides]
        if not join.protocol_type or not join.protocols:
            raise GroupProtocolMismatch(
                "a member names the type of its protocol, and at least one protocol",
                group=self.name,
            )
        if not others:
            return
        if join.protocol_type != self.protocol_type:
            raise GroupProtocolMismatch(
                f"the members of group {self.name} are of type {self.protocol_type!r}, not "
                f"{join.protocol_type!r}; take another group",
                group=self.name,
            )
        if not _common(one.protocols for one in others) & {name for name, _ in join.protocols}:
            raise GroupProtocolMismatch(
                f"no assignor is known to all members of group {self.name}: give the new one "
                f"one of {', '.join(sorted(_common(one.protocols for one in others)))}",
                group=self.name,
            )

    def choose_protocol(self) -> str:
        """Of those that all know, the one that most prefer; of several the first."""
        common = _common(one.protocols for one in self.members.values())
        votes = Counter(
            next(name for name, _ in one.protocols if name in common)
            for one in self.members.values()
        )
        return votes.most_common(1)[0][0]

    # ---- a generation

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((one.rebalance_timeout_ms for one in self.members.values()), default=0)

    @property
    def has_all(self) -> bool:
        """Everybody who is in it, or was promised to be, waits for the next generation."""
        return not self.promised and all(one.joining is not None for one in self.members.values())

    def begin_generation(self) -> None:
        self.generation += 1
        self.protocol = self.choose_protocol()
        self.state = "completing"
        leader = self.members.get(self.leader or "")
        if leader is None or leader.joining is None:
            # A static leader that is away cannot deal out.
            joined = (one.id for one in self.members.values() if one.joining is not None)
            self.leader = next(joined, self.leader)

    def joined(self, member: ClassicMember) -> ClassicJoined:
        """What a member is told of the generation that there is."""
        is_leader = member.id == self.leader
        return ClassicJoined(
            self.generation,
            self.protocol_type,
            self.protocol,
            self.leader or "",
            member.id,
            self.candidates() if is_leader else (),
        )

    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(
            Candidate(one.id, one.instance_id, one.metadata(self.protocol))
            for one in self.members.values()
        )

    def deal_out(self, assignments: Iterable[tuple[str, bytes]]) -> None:
        """As the leader says. Whoever it forgot gets nothing, in words that can be read."""
        given = dict(assignments)
        nothing = NO_PARTITIONS if self.protocol_type == CONSUMER else b""
        for one in self.members.values():
            one.assignment = given.get(one.id) or nothing
        self.state = "stable"

    def synced(self, member: ClassicMember) -> ClassicSynced:
        return ClassicSynced(self.protocol_type, self.protocol, member.assignment)


def size_of(protocols: Iterable[tuple[str, bytes]]) -> int:
    return sum(len(known) for _, known in protocols)


def member_unknown(group: str, member_id: str) -> MemberUnknown:
    return MemberUnknown(
        f"group {group} has no member {member_id[:300]}, or its session ended; "
        "join again without a member id",
        group=group,
        member_id=member_id[:300],
    )


def _fenced(group: str, member_id: str, instance_id: str) -> MemberFenced:
    return MemberFenced(
        f"another member took over the instance id {instance_id[:200]} of {member_id[:300]}; "
        "give each running member an instance id of its own",
        group=group,
        member_id=member_id[:300],
    )


def _common(protocols: Iterable[tuple[tuple[str, bytes], ...]]) -> set[str]:
    """Names that stand in all of them."""
    sets = [{name for name, _ in one} for one in protocols]
    return set.intersection(*sets) if sets else set()
