"""What is said to a group of Kafka's classic protocol, and what it answers."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

# empty: nobody is in it. preparing: members are asked to join again. completing: the leader deals
# out. stable: everybody has what the leader gave.
ClassicState: TypeAlias = Literal["empty", "preparing", "completing", "stable"]


class ClassicJoin(NamedTuple):
    """What a member wants. Which of its protocols (assignors) is used is for the group to say."""

    # None: it has none yet.
    member_id: str | None
    protocol_type: str
    # By preference: the name, and what the leader has to know of the member.
    protocols: tuple[tuple[str, bytes], ...]
    session_timeout_ms: int
    rebalance_timeout_ms: int
    client_id: str = ""
    host: str = ""
    instance_id: str | None = None
    # A new member is first given its id, and has to come again with it: one whose answer was
    # lost leaves no trace then.
    must_know_id: bool = False
    # A leader that came back as the same static member can be told not to deal out again.
    can_skip: bool = False


class Candidate(NamedTuple):
    """A member, as the leader hears of it."""

    member_id: str
    instance_id: str | None
    metadata: bytes


class ClassicJoined(NamedTuple):
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    member_id: str
    # Everybody, for the leader alone.
    members: tuple[Candidate, ...]
    is_skipped: bool = False


class ClassicSync(NamedTuple):
    member_id: str
    generation: int
    instance_id: str | None = None
    # None: an old client, which does not say.
    protocol_type: str | None = None
    protocol: str | None = None
    # Of the leader: what each member gets.
    assignments: tuple[tuple[str, bytes], ...] = ()


class ClassicSynced(NamedTuple):
    protocol_type: str
    protocol: str
    assignment: bytes


class ClassicMemberFacts(NamedTuple):
    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    metadata: bytes
    assignment: bytes
    session_timeout_ms: int
    idle_ms: int


class ClassicFacts(NamedTuple):
    state: ClassicState
    protocol_type: str
    protocol: str
    generation: int
    members: list[ClassicMemberFacts]
