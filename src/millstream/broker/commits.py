"""Commits by Kafka's clients: of members, and of those who only use a group's name.

Kafka commits what it can of a request, and says of each partition what was wrong. Which partitions
a member has only its group knows, so a member may commit any; what counts is that it is in the
group, in its generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.broker.group_values import check_group_name
from millstream.engine.pending import Pending, follow
from millstream.errors import MemberUnknown, MillstreamError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from millstream.broker.consuming import Consuming
    from millstream.broker.group_values import Commit


class Committer(NamedTuple):
    """Who commits; nobody in particular has no id and a generation below 0."""

    member_id: str = ""
    generation: int = -1
    instance_id: str | None = None

    @property
    def is_member(self) -> bool:
        return self.generation >= 0 or bool(self.member_id)


def commit(
    consuming: Consuming, group: str, commits: Sequence[Commit], by: Committer
) -> Pending[list[MillstreamError | None]]:
    """Of each commit what was wrong with it; done when the others are durable. Fails when nothing
    of it can be done."""
    return follow(_commit(consuming, group, commits, by))


def _commit(
    consuming: Consuming, group: str, commits: Sequence[Commit], by: Committer
) -> Generator[Pending[Any], Any, list[MillstreamError | None]]:
    check_group_name(group)
    offsets = consuming.group_offsets
    check_member(consuming, group, by)
    outcomes: list[MillstreamError | None] = []
    good: list[Commit] = []
    leases_ended: Pending[None] = Pending.of(None)
    for one in commits:
        try:
            offsets.check_loosely(one)
            if not by.is_member:
                leases_ended = offsets.use_by_offset(group, (one.topic,))
        except MillstreamError as error:
            outcomes.append(error)
        else:
            outcomes.append(None)
            good.append(one)
    if good:
        written = offsets.write(group, good)
        # The last of them is done when the others are.
        yield leases_ended
        yield written
    return outcomes


def check_member(consuming: Consuming, group: str, by: Committer) -> None:
    """Raises unless they may commit there."""
    offsets = consuming.group_offsets
    if by.is_member:
        if consuming.consumer_groups.has_members(group):
            consuming.consumer_groups.check_commit(group, by.member_id, by.generation)
        else:
            consuming.classic_groups.check_commit(group, *by)
        return
    if offsets.has_members(group):
        raise MemberUnknown(
            f"group {group} has members, and only they commit; stop them first, or take another "
            "group",
            group=group,
            member_id="",
        )
    consuming.groups.check_new(group)
