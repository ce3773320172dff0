"""Who is in a group and who has which partition: a state machine without clock, disk or loop.

There is a *target*: which member should have what. It is computed anew when members, their topics
or the partitions of a topic change. A member's own partitions follow it step by step, whenever
the member calls (`reconcile`):

1. What it has and should not have, it is told to give up (`revoking`). It still has it.
2. What it should have and nobody has, it gets.
3. When it calls with the generation in which it was told, what it had to give up is free
   (`acknowledge`), and who should have it gets it in step 2 of its next call.

So a partition never has two members, and a member keeps reading what stays with it all the while.

A member's generation changes exactly when its partitions do. Numbers are given by the group and
only rise. A member may call with any generation from the last one that it used to the newest one:
an answer may be lost, or still be on its way. Anything else is stale, and changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from millstream.broker.assignors import Wish, assign
from millstream.broker.group_values import Assignor, Standing
from millstream.errors import MemberFenced, MemberUnknown, PartitionNotAssigned, StaleGeneration
from millstream.log.partition import PartitionId


@dataclass(slots=True, eq=False)
class Member:
    id: str
    client_id: str
    topics: frozenset[str]
    instance_id: str | None = None
    assignor: Assignor | None = None
    # The newest generation that there is for it, and the newest that it has called with.
    generation: int = 0
    acknowledged: int = 0
    # What it may read and commit, with the generation in which it got it.
    owned: dict[PartitionId, int] = field(default_factory=dict)
    # What it has to give up, with the generation in which it was told.
    revoking: dict[PartitionId, int] = field(default_factory=dict)
    # It is new, or something of its own went away without its doing: it has to be told.
    is_untold: bool = True
    # Who was this static member before.
    replaced: str | None = None

    @property
    def name(self) -> str:
        """The same for whoever is this static member."""
        return f"i:{self.instance_id}" if self.instance_id is not None else f"m:{self.id}"


class Membership:
    """One group. `generation` is the newest number that was given out."""

    __slots__ = (
        "_counts",
        "_default_assignor",
        "_is_settled",
        "_target",
        "generation",
        "group",
        "members",
        "owners",
    )

    def __init__(self, group: str, assignor: Assignor, generation: int = 0) -> None:
        self.group = group
        self.generation = generation
        self.members: dict[str, Member] = {}
        self.owners: dict[PartitionId, Member] = {}
        self._default_assignor = assignor
        self._counts: dict[str, int] = {}
        # None: to be computed when it is needed next.
        self._target: dict[str, set[PartitionId]] | None = {}
        self._is_settled: bool | None = None

    # ---- who is there

    def find(self, member_id: str) -> Member:
        member = self.members.get(member_id)
        if member is not None:
            return member
        if any(one.replaced == member_id for one in self.members.values()):
            raise MemberFenced(
                f"another member took over the instance id of {member_id}; "
                "give each running member an instance id of its own",
                group=self.group,
                member_id=member_id,
            )
        raise MemberUnknown(
            f"group {self.group} has no member {member_id[:300]}, or its session ended; "
            "join again without a member id",
            group=self.group,
            member_id=member_id[:300],
        )

    def called(self, member_id: str, generation: int) -> Member:
        """The member that calls, or why it may not."""
        member = self.find(member_id)
        if not member.acknowledged <= generation <= member.generation:
            raise StaleGeneration(
                f"member {member_id} called with generation {generation} and is in "
                f"{member.generation}; join again with this member id",
                group=self.group,
                member_id=member_id,
                generation=generation,
                current=member.generation,
            )
        return member

    def static_member(self, instance_id: str) -> Member | None:
        found = (one for one in self.members.values() if one.instance_id == instance_id)
        return next(found, None)

    def add(self, member: Member) -> None:
        self.members[member.id] = member
        self._retarget()

    def take_over(self, old: Member, new: Member) -> None:
        """A static member came back: it has what it had, under a new member id."""
        del self.members[old.id]
        self._free(old, list(old.revoking))
        new.replaced = old.id
        new.generation = new.acknowledged = self._next()
        new.owned = dict.fromkeys(old.owned, new.generation)
        new.is_untold = False
        self.members[new.id] = new
        for one in new.owned:
            self.owners[one] = new
        if (new.topics, new.assignor) != (old.topics, old.assignor):
            self._retarget()

    def rejoin(self, member: Member, topics: frozenset[str], assignor: Assignor | None) -> None:
        """A member starts anew: it has given up what it was told to, and may want other topics."""
        self._free(member, list(member.revoking))
        self.want(member, topics, assignor)
        self.reconcile(member)
        member.acknowledged = member.generation

    def want(self, member: Member, topics: frozenset[str], assignor: Assignor | None) -> None:
        if (topics, assignor) != (member.topics, member.assignor):
            member.topics, member.assignor = topics, assignor
            self._retarget()

    def remove(self, member: Member) -> None:
        del self.members[member.id]
        self._free(member, [*member.owned, *member.revoking])
        self._retarget()

    # ---- topics

    def set_partitions(self, topic: str, count: int) -> bool:
        """How many partitions a topic has; 0 when it is gone. Whether that is new."""
        if self._counts.get(topic, 0) == count:
            return False
        self._counts[topic] = count
        if not count:
            del self._counts[topic]
            for one in [one for one in self.owners if one.topic == topic]:
                self.owners[one].is_untold = True
                self._free(self.owners[one], [one])
        self._retarget()
        return True

    def wants(self, topic: str) -> bool:
        return any(topic in member.topics for member in self.members.values())

    def topics(self) -> set[str]:
        """All that somebody wants."""
        return {topic for member in self.members.values() for topic in member.topics}

    # ---- towards the target

    def acknowledged_by(self, member: Member, generation: int) -> list[PartitionId]:
        """What the member gives up by calling with a generation."""
        return [one for one, told in member.revoking.items() if told <= generation]

    def acknowledge(self, member: Member, generation: int) -> bool:
        """The member calls with a generation. Whether that makes partitions free."""
        given_up = self.acknowledged_by(member, generation)
        member.acknowledged = max(member.acknowledged, generation)
        self._free(member, given_up)
        return bool(given_up)

    def force(self, member: Member) -> bool:
        """The member took too long to give up: it has, and what it calls itself is stale."""
        return self.acknowledge(member, member.generation)

    def has_news(self, member: Member) -> bool:
        """Whether `reconcile` would change something."""
        if member.is_untold:
            return True
        if self.is_settled:
            return False
        wanted = self.wanted(member)
        return any(one not in wanted for one in member.owned) or any(
            one not in self.owners for one in wanted
        )

    def reconcile(self, member: Member) -> bool:
        """Bring a member as near to the target as it can be now; whether its partitions change."""
        if not self.has_news(member):
            return False
        wanted = self.wanted(member)
        lost = [one for one in member.owned if one not in wanted]
        gained = sorted(one for one in wanted if one not in self.owners)
        member.generation = self._next()
        member.is_untold = False
        for one in lost:
            del member.owned[one]
            member.revoking[one] = member.generation
        for one in gained:
            member.owned[one] = member.generation
            self.owners[one] = member
        self._is_settled = None
        return True

    def may_commit(self, member: Member, generation: int, one: PartitionId) -> None:
        """PartitionNotAssigned unless it has the partition, and had it in that generation: it
        must not commit for a topic that was deleted and made again in between."""
        since = member.owned.get(one)
        if (since is not None and since <= generation) or one in member.revoking:
            return
        raise PartitionNotAssigned(
            f"{one} is not assigned to member {member.id}; poll to learn what is",
            group=self.group,
            topic=one.topic,
            partition=one.number,
            member_id=member.id,
        )

    def standing(self, member: Member) -> Standing:
        return Standing(
            member.id,
            member.generation,
            tuple(sorted(member.owned)),
            tuple(sorted(member.revoking)),
            not self.is_settled,
        )

    @property
    def is_settled(self) -> bool:
        """Whether everybody has what it should have."""
        if self._is_settled is None:
            self._is_settled = all(
                not member.revoking
                and not member.is_untold
                and member.owned.keys() == self.wanted(member)
                for member in self.members.values()
            )
        return self._is_settled

    @property
    def assignor(self) -> Assignor:
        """The one that most members ask for; of several the one that was asked for first."""
        votes = Counter(one.assignor or self._default_assignor for one in self.members.values())
        return votes.most_common(1)[0][0] if votes else self._default_assignor

    def wanted(self, member: Member) -> set[PartitionId]:
        """What it should have."""
        if self._target is None:
            wishes = {
                one.name: Wish(one.topics, frozenset(one.owned)) for one in self.members.values()
            }
            self._target = assign(self.assignor, wishes, self._counts)
        return self._target[member.name]

    # ---- inside

    def _retarget(self) -> None:
        self._target = None
        self._is_settled = None

    def _free(self, member: Member, partitions: Iterable[PartitionId]) -> None:
        for one in partitions:
            del self.owners[one]
            member.owned.pop(one, None)
            member.revoking.pop(one, None)
        self._is_settled = None

    def _next(self) -> int:
        self.generation += 1
        return self.generation
