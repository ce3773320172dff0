"""What a member of a group says to the broker, and what it hears."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias
from urllib.parse import urlencode

import msgspec

from millstream.client.groups import TopicPartitions, group_path
from millstream.client.transport import Transport
from millstream.client.values import ReadMessage, Received, encode_json
from millstream.errors import ParameterInvalid, StaleGeneration
from millstream.wire.retry import RetryPolicy

Assignor: TypeAlias = Literal["sticky", "range", "round_robin"]
OffsetReset: TypeAlias = Literal["earliest", "latest", "none"]
TopicPartition: TypeAlias = tuple[str, int]


class Standing(NamedTuple):
    """What a member may read, and what it must give up; in every answer."""

    member_id: str
    generation: int
    assignment: frozenset[TopicPartition]
    revoking: frozenset[TopicPartition]
    # Of the topics of both. A topic that was made again has another one.
    topic_ids: Mapping[str, str] = MappingProxyType({})

    @property
    def held(self) -> frozenset[TopicPartition]:
        """What it may commit."""
        return self.assignment | self.revoking


class Joined(NamedTuple):
    standing: Standing
    heartbeat_s: float


class Polled(NamedTuple):
    standing: Standing
    number: int
    records: list[Received]


class JoinOptions(NamedTuple):
    topics: tuple[str, ...]
    client_id: str
    instance_id: str | None = None
    assignor: Assignor | None = None
    session_timeout_ms: int | None = None
    auto_offset_reset: OffsetReset | None = None


class _Standing(msgspec.Struct):
    member_id: str
    generation: int
    assignment: list[TopicPartitions]
    revoking: list[TopicPartitions]
    topic_ids: dict[str, str] = {}

    def plain(self) -> Standing:
        return Standing(
            self.member_id,
            self.generation,
            _flat(self.assignment),
            _flat(self.revoking),
            self.topic_ids,
        )


class _Joined(_Standing):
    heartbeat_interval_ms: int = 3000


class _Polled(_Standing):
    number: int = 0
    messages: list[ReadMessage] = []


_standing = msgspec.json.Decoder(_Standing)
_joined = msgspec.json.Decoder(_Joined)
_polled = msgspec.json.Decoder(_Polled)


class Membership:
    """The calls of one member of a group."""

    def __init__(self, transport: Transport, group: str, retry: RetryPolicy) -> None:
        self._transport = transport
        self.group = group
        self._retry = retry

    async def join(self, options: JoinOptions, member_id: str | None) -> Joined:
        # The client commits what was worked on; the broker would commit what was fetched.
        body: dict[str, Any] = {"auto_commit": False, "member_id": member_id}
        body |= options._asdict()
        reply = await self._post("join", {k: v for k, v in body.items() if v is not None})
        joined = _joined.decode(reply)
        return Joined(joined.plain(), joined.heartbeat_interval_ms / 1000)

    async def heartbeat(self, member_id: str, generation: int) -> Standing:
        body = {"member_id": member_id, "generation": generation}
        return _standing.decode(await self._post("heartbeat", body)).plain()

    async def poll(
        self, member_id: str, generation: int, *, received: int, limit: int, wait_s: float
    ) -> Polled:
        """Records that come in time. An answer that was lost is given again, because the next
        poll says which one was received last."""
        asked: dict[str, object] = {
            "member_id": member_id,
            "generation": generation,
            "limit": limit,
            "timeout": f"{wait_s:g}",
            "received": received,
        }
        path = f"{group_path(self.group, 'poll')}?{urlencode(asked)}"
        try:
            reply = await self._transport.ask("GET", path, hold_s=wait_s, retry=self._retry)
        except ParameterInvalid as error:
            if error.fields.get("parameter") != "limit":
                raise
            # As the broker calls it; the caller knows it by another name.
            raise ParameterInvalid(
                f"poll_records is {limit}, which the broker does not take: {error.message}; say "
                "fewer, or raise its setting `poll_records_max`",
                parameter="poll_records",
            ) from error
        polled = _polled.decode(reply.body)
        records = [message.received(message.topic) for message in polled.messages]
        return Polled(polled.plain(), polled.number, records)

    async def commit(
        self, member_id: str, generation: int, offsets: Mapping[TopicPartition, int]
    ) -> None:
        """Durable when it returns. Again is no harm."""
        listed = [
            {"topic": topic, "partition": partition, "offset": offset}
            for (topic, partition), offset in offsets.items()
        ]
        body = {"member_id": member_id, "generation": generation, "offsets": listed}
        await self._post("commit", body)

    async def leave(self, member_id: str, generation: int, retry: RetryPolicy) -> None:
        body: dict[str, Any] = {"member_id": member_id}
        try:
            await self._post("leave", body | {"generation": generation}, retry)
        except StaleGeneration:
            # It was told something that it has not heard of, and goes all the same: else nobody
            # would have its partitions until its session ends.
            await self._post("leave", body, retry)

    async def _post(
        self, verb: str, body: dict[str, Any], retry: RetryPolicy | None = None
    ) -> bytes:
        # A join whose answer was lost leaves a member behind that nobody is; its session ends.
        reply = await self._transport.ask(
            "POST",
            group_path(self.group, verb),
            encode_json(body),
            is_repeatable=True,
            retry=retry or self._retry,
        )
        return reply.body


def _flat(listed: list[TopicPartitions]) -> frozenset[TopicPartition]:
    return frozenset((one.topic, number) for one in listed for number in one.partitions)
