"""Consumer groups, as an administrator sees them: who is in them, and how far they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from millstream.client.transport import Transport
from millstream.client.values import encode_json

_PAGE = 1000

_Kind = TypeVar("_Kind")


class GroupSummary(msgspec.Struct):
    group: str
    state: str  # empty, stable or rebalancing
    members: int
    generation: int
    assignor: str = ""
    topics: list[str] = []
    protocol: str | None = None  # of its members: http, classic, consumer or share


class TopicPartitions(msgspec.Struct):
    topic: str
    partitions: list[int]


class MemberFacts(msgspec.Struct):
    member_id: str
    client_id: str = ""
    instance_id: str | None = None
    generation: int = 0
    topics: list[str] = []
    assignment: list[TopicPartitions] = []
    revoking: list[TopicPartitions] = []
    idle_ms: int = 0


class CommittedOffset(msgspec.Struct):
    topic: str
    partition: int
    offset: int  # the next to be read
    metadata: str = ""
    committed_ms: int = 0


class GroupFacts(msgspec.Struct):
    group: str
    state: str
    generation: int
    assignor: str
    members: list[MemberFacts]
    offsets: list[CommittedOffset] = []
    protocol: str | None = None
    settings: dict[str, int | None] = {}  # None: as topics and the broker say


class ResetOffset(msgspec.Struct):
    topic: str
    partition: int
    before: int | None
    after: int


class PartitionLag(msgspec.Struct):
    """How far a group is behind in a partition. `trend_per_s` is above zero when it falls further
    behind; None when there is no trend yet."""

    topic: str
    partition: int
    committed: int
    start: int
    end: int
    messages: int
    seconds: float
    trend_per_s: float | None = None
    member_id: str | None = None


class GroupLag(msgspec.Struct):
    group: str
    messages: int
    seconds: float
    trend_per_s: float | None
    partitions: list[PartitionLag]


class Lease(msgspec.Struct):
    """A record that is with a member, or waits to come back to one."""

    topic: str
    partition: int
    offset: int
    lane: str
    deliveries: int
    state: str  # leased, waiting or ready
    member: str | None
    when_ms: int  # the lease runs out, or the wait is over


class GroupDeliveries(msgspec.Struct):
    """How deliveries of a group ended since the broker started. Of `delivered`, `redelivered` were
    not the record's first; `timeouts` are leases that ran out; `dead` became dead letters."""

    group: str
    delivered: int
    redelivered: int
    acked: int
    nacked: int
    rejected: int
    released: int
    timeouts: int
    dead: int


class _Leases(msgspec.Struct):
    leases: list[Lease]
    next: str | None = None


class _Deliveries(msgspec.Struct):
    groups: list[GroupDeliveries]
    next: str | None = None


class _Listed(msgspec.Struct):
    groups: list[GroupSummary]
    next: str | None = None


class _Offsets(msgspec.Struct):
    offsets: list[CommittedOffset]


class _Settings(msgspec.Struct):
    settings: dict[str, int | None]


class _Reset(msgspec.Struct):
    offsets: list[ResetOffset]


class Groups:
    """Groups by name."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def describe(self, name: str) -> GroupFacts:
        return await self._get(group_path(name), GroupFacts)

    async def alter(self, name: str, settings: Mapping[str, object]) -> dict[str, int | None]:
        """Change what is set for a group that receives by lease, such as `visibility_ms`; None
        takes a setting out. Answers what is set now."""
        body = encode_json({"settings": dict(settings)})
        reply = await self._transport.ask("PATCH", group_path(name), body, is_repeatable=True)
        return msgspec.json.decode(reply.body, type=_Settings).settings

    async def delete(self, name: str) -> None:
        """Forget a group and its offsets; refused while it has members."""
        await self._transport.ask("DELETE", group_path(name), is_repeatable=False)

    async def offsets(self, name: str, *, topic: str | None = None) -> list[CommittedOffset]:
        query = "" if topic is None else "?" + urlencode({"topic": topic})
        return (await self._get(group_path(name, "offsets") + query, _Offsets)).offsets

    async def lag(self, name: str) -> GroupLag:
        return await self._get(group_path(name, "lag"), GroupLag)

    async def leases(self, name: str, *, topic: str | None = None) -> AsyncIterator[Lease]:
        """Records that members of a group have, or that wait to come back, by place."""
        asked: dict[str, object] = {"limit": _PAGE} | ({} if topic is None else {"topic": topic})
        after: str | None = ""
        while after is not None:
            query = urlencode(asked | ({"after": after} if after else {}))
            page = await self._get(group_path(name, "leases") + "?" + query, _Leases)
            for lease in page.leases:
                yield lease
            after = page.next

    async def deliveries(self) -> AsyncIterator[GroupDeliveries]:
        """Of each group that receives by lease, how its deliveries ended."""
        after: str | None = ""
        while after is not None:
            query = urlencode({"limit": _PAGE} | ({"after": after} if after else {}))
            page = await self._get(f"/v1/reliability/stats?{query}", _Deliveries)
            for group in page.groups:
                yield group
            after = page.next

    async def reset(
        self,
        name: str,
        topic: str,
        to: Literal["earliest", "latest", "offset", "time"],
        *,
        partitions: Sequence[int] | None = None,
        offset: int | None = None,
        time_ms: int | None = None,
        is_dry_run: bool = False,
    ) -> list[ResetOffset]:
        """Move a group that has no members; or say only where it would be."""
        body: dict[str, Any] = {"topic": topic, "to": to}
        given: dict[str, Any] = {"partitions": partitions, "offset": offset, "time_ms": time_ms}
        given["dry_run"] = is_dry_run or None
        body |= {key: value for key, value in given.items() if value is not None}
        reply = await self._transport.ask(
            "POST", group_path(name, "reset"), encode_json(body), is_repeatable=True
        )
        return msgspec.json.decode(reply.body, type=_Reset).offsets

    async def _get(self, path: str, kind: type[_Kind]) -> _Kind:
        return msgspec.json.decode((await self._transport.ask("GET", path)).body, type=kind)

    async def _pages(self) -> AsyncIterator[GroupSummary]:
        after: str | None = ""
        while after is not None:
            query = urlencode({"limit": _PAGE} | ({"after": after} if after else {}))
            page = await self._get(f"/v1/groups?{query}", _Listed)
            for group in page.groups:
                yield group
            after = page.next

    # Last, so that in the class above the builtin of that name is meant.
    async def list(self) -> list[GroupSummary]:
        return [group async for group in self._pages()]


def group_path(name: str, *parts: str) -> str:
    return "/".join(("/v1/groups", quote(name, safe=""), *parts))
