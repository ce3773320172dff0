"""What is said to a group, and what it answers: values without behaviour."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from millstream.errors import GroupNameInvalid
from millstream.wire.groups import GROUP_NAME

if TYPE_CHECKING:
    from millstream.broker.group_settings import GroupSettings
    from millstream.log.batch import Record
    from millstream.log.partition import PartitionId

Assignor: TypeAlias = Literal["sticky", "range", "round_robin"]
OffsetReset: TypeAlias = Literal["earliest", "latest", "none"]
GroupState: TypeAlias = Literal["empty", "stable", "rebalancing"]

# How members talk to the broker: HTTP's `/v1/groups`; Kafka's classic protocol, in which members
# deal out partitions; Kafka's consumer protocol, in which the broker does; Kafka's share groups,
# which receive by lease.
GroupProtocol: TypeAlias = Literal["http", "classic", "consumer", "share"]

ASSIGNORS: tuple[Assignor, ...] = ("sticky", "range", "round_robin")
OFFSET_RESETS: tuple[OffsetReset, ...] = ("earliest", "latest", "none")

_GROUP_NAME = re.compile(GROUP_NAME)
# The broker's own: sequential consumers keep their positions there.
RESERVED_PREFIX = "__"


class Join(NamedTuple):
    """What a member wants. None is what the settings say."""

    topics: tuple[str, ...]
    client_id: str = "member"
    # Of an earlier join, to change what was said there or to go on after `stale_generation`.
    member_id: str | None = None
    # Makes the member static: whoever joins with this name takes over what it had.
    instance_id: str | None = None
    assignor: Assignor | None = None
    session_timeout_ms: int | None = None
    auto_offset_reset: OffsetReset | None = None
    auto_commit: bool = True
    auto_commit_interval_ms: int | None = None


class Standing(NamedTuple):
    """Where a member stands; part of every answer to it."""

    member_id: str
    generation: int
    # What it may read and commit.
    assignment: tuple[PartitionId, ...]
    # What it has to give up. It has, once it calls `heartbeat` or `poll` with this generation;
    # until then it may still commit them.
    revoking: tuple[PartitionId, ...]
    # The group is not yet where it is going.
    is_rebalancing: bool
    # The UUIDs of the topics of both. A topic that was made again has another one, and offsets of
    # the old one mean nothing in it.
    topic_ids: Mapping[str, str] = MappingProxyType({})


class Joined(NamedTuple):
    standing: Standing
    session_timeout_ms: int
    heartbeat_interval_ms: int


class Poll(NamedTuple):
    """None is what the settings say."""

    count_max: int | None = None
    bytes_max: int | None = None
    wait_ms: int | None = None
    # The number of the last answer that came through. An answer after it was lost on its way:
    # its records are given again. None: the last one came through.
    received: int | None = None


class PolledPart(NamedTuple):
    topic: str
    partition: int
    records: list[Record]
    next_offset: int
    high_watermark: int


class Polled(NamedTuple):
    standing: Standing
    number: int
    parts: list[PolledPart]


class Commit(NamedTuple):
    """`offset` is the next one to be read, as in Kafka."""

    topic: str
    partition: int
    offset: int
    metadata: str = ""
    # In which the last record that was read was written; below 0 where nobody said.
    leader_epoch: int = -1


class Committed(NamedTuple):
    topic: str
    partition: int
    offset: int
    metadata: str
    committed_ms: int
    leader_epoch: int = -1


class GroupSummary(NamedTuple):
    group: str
    state: GroupState
    members: int
    generation: int
    # One of ours, or what the members of a classic group agreed on.
    assignor: str
    topics: tuple[str, ...]
    # That of its members; None while it has none.
    protocol: GroupProtocol | None


class MemberFacts(NamedTuple):
    member_id: str
    client_id: str
    instance_id: str | None
    generation: int
    topics: tuple[str, ...]
    assignment: tuple[PartitionId, ...]
    revoking: tuple[PartitionId, ...]
    session_timeout_ms: int
    idle_ms: int


class GroupFacts(NamedTuple):
    summary: GroupSummary
    members: list[MemberFacts]
    offsets: list[Committed]
    settings: GroupSettings


def check_group_name(name: str) -> None:
    if name.startswith(RESERVED_PREFIX):
        raise GroupNameInvalid(
            f"group names that begin with `{RESERVED_PREFIX}` are the broker's own; "
            "choose another one",
            group=name[:260],
        )
    if not _GROUP_NAME.fullmatch(name):
        raise GroupNameInvalid(
            f"{name[:260]!r} is not a group name: "
            "1 to 255 of letters, digits, `.`, `_`, `:` and `-`",
            group=name[:260],
        )
