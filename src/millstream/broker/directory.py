"""All groups, whatever protocol their members use: who is in them, and what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.broker.classic_group import CONSUMER
from millstream.broker.group_values import (
    GroupFacts,
    GroupProtocol,
    GroupSummary,
    MemberFacts,
)
from millstream.engine.pending import Pending, follow
from millstream.log.partition import PartitionId
from millstream.wire.kafka.consumer_protocol import assigned_partitions, subscribed_topics

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from millstream.broker.classic_groups import ClassicGroups
    from millstream.broker.classic_values import ClassicFacts, ClassicMemberFacts
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.groups import Groups
    from millstream.broker.share_groups import ShareGroups


class Directory:
    __slots__ = ("_assignor", "_classic", "_groups", "_offsets", "_shares")

    def __init__(
        self,
        offsets: GroupOffsets,
        groups: Groups,
        classic: ClassicGroups,
        shares: ShareGroups,
        assignor: str,
    ) -> None:
        """`assignor` is what groups without members are said to use."""
        self._offsets = offsets
        self._groups = groups
        self._classic = classic
        self._shares = shares
        self._assignor = assignor

    def summaries(self) -> Pending[list[GroupSummary]]:
        """All groups, by name."""
        return follow(self._summaries())

    def _summaries(self) -> Generator[Pending[Any], Any, list[GroupSummary]]:
        yield self._offsets.settled()
        names = {*self._groups.names(), *self._classic.names(), *self._shares.names()}
        names.update(self._offsets.table.groups())
        topics = self._offsets.topic_names()
        return [self._look(name, topics)[0] for name in sorted(names)]

    def describe(self, group: str) -> Pending[GroupFacts]:
        return follow(self._describe(group))

    def _describe(self, name: str) -> Generator[Pending[Any], Any, GroupFacts]:
        self._offsets.known(name)
        yield self._offsets.settled()
        summary, members = self._look(name, self._offsets.topic_names())
        settings = self._offsets.settings(name)
        return GroupFacts(summary, members, self._offsets.all_of(name), settings)

    def _look(self, name: str, topics: dict[bytes, str]) -> tuple[GroupSummary, list[MemberFacts]]:
        classic = self._classic.facts(name)
        if classic is not None:
            return _of_classic(name, classic)
        found = self._groups.facts(name) or self._shares.facts(name)
        if found is not None:
            return found
        generation = self._offsets.generation(name)
        known = self._offsets.topics_of(name, topics)
        return GroupSummary(name, "empty", 0, generation, self._assignor, known, None), []

    def last_protocol(self, group: str) -> GroupProtocol | None:
        """Of a group without members: what its last ones used, if that is known."""
        return self._offsets.last_protocol(group)

    def generation(self, group: str) -> int:
        """The newest of a group without members."""
        return self._offsets.generation(group)

    def has_groups(self) -> bool:
        """Whether there is any."""
        sources = (self._groups, self._classic, self._shares)
        return any(one.names() for one in sources) or bool(self._offsets.table.groups())

    @property
    def members(self) -> int:
        return self._groups.members + self._classic.members + self._shares.members

    def owners(self, group: str) -> Mapping[PartitionId, str]:
        """Which member has a partition."""
        classic = self._classic.facts(group)
        if classic is None:
            return self._groups.owners(group)
        return {id: one.member_id for one in classic.members for id in _assigned(one)}


def _of_classic(name: str, facts: ClassicFacts) -> tuple[GroupSummary, list[MemberFacts]]:
    is_consumer = facts.protocol_type == CONSUMER
    members = [
        MemberFacts(
            one.member_id,
            one.client_id,
            one.instance_id,
            facts.generation,
            tuple(sorted(subscribed_topics(one.metadata))) if is_consumer else (),
            tuple(sorted(_assigned(one))) if is_consumer else (),
            (),
            one.session_timeout_ms,
            one.idle_ms,
        )
        for one in facts.members
    ]
    summary = GroupSummary(
        name,
        "stable" if facts.state == "stable" else "rebalancing",
        len(members),
        facts.generation,
        facts.protocol,
        tuple(sorted({topic for one in members for topic in one.topics})),
        "classic",
    )
    return summary, sorted(members)


def _assigned(member: ClassicMemberFacts) -> set[PartitionId]:
    return {
        PartitionId(topic, number)
        for topic, numbers in assigned_partitions(member.assignment)
        for number in numbers
    }
