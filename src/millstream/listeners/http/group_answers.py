"""What HTTP says to groups and back. A member is told its generation in every answer, and says it
in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from millstream.broker.group_offsets import ResetTo
from millstream.broker.group_values import Commit, Join, Poll
from millstream.errors import BodyInvalid, OffsetOutOfRange, TimestampInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import (
    LISTED_MAX,
    LISTED_PARAMETERS,
    NO_CONTENT,
    json_of,
    read_body,
)
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import Shown, listed, shown
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters

if TYPE_CHECKING:
    from millstream.broker.consuming import Consuming
    from millstream.broker.group_offsets import ResetDone
    from millstream.broker.group_settings import GroupSettings
    from millstream.broker.group_values import (
        Committed,
        GroupFacts,
        GroupSummary,
        Joined,
        MemberFacts,
        Polled,
        Standing,
    )
    from millstream.broker.lag import GroupLag
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.waits import Waits
    from millstream.log.partition import PartitionId

GENERATION_MAX = 2**31 - 1
COMMITS_MAX = 10_000
POLL_PARAMETERS = frozenset(("member_id", "generation", "limit", "bytes", "timeout", "received"))
TOPIC_PARAMETERS = frozenset(("topic",))


class Joining(msgspec.Struct, forbid_unknown_fields=True):
    topics: list[str]
    member_id: str | None = None
    client_id: str = "member"
    instance_id: str | None = None
    assignor: Literal["sticky", "range", "round_robin"] | None = None
    session_timeout_ms: int | None = None
    auto_offset_reset: Literal["earliest", "latest", "none"] | None = None
    auto_commit: bool = True
    auto_commit_interval_ms: int | None = None


class Member(msgspec.Struct, forbid_unknown_fields=True):
    member_id: str
    generation: int


class Leaving(msgspec.Struct, forbid_unknown_fields=True):
    member_id: str
    received: int | None = None
    generation: int | None = None


class Offset(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    partition: int
    offset: int
    metadata: str = ""


class Committing(msgspec.Struct, forbid_unknown_fields=True):
    offsets: list[Offset]
    member_id: str | None = None
    generation: int | None = None


class Changes(msgspec.Struct, forbid_unknown_fields=True):
    settings: dict[str, object]


class Resetting(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    to: Literal["earliest", "latest", "offset", "time"]
    offset: int | None = None
    time_ms: int | None = None
    partitions: list[int] | None = None
    dry_run: bool = False


_joining = msgspec.json.Decoder(Joining)
_member = msgspec.json.Decoder(Member)
_leaving = msgspec.json.Decoder(Leaving)
_committing = msgspec.json.Decoder(Committing)
_changes = msgspec.json.Decoder(Changes)
_resetting = msgspec.json.Decoder(Resetting)


class GroupAnswers:
    __slots__ = ("_directory", "_groups", "_lags", "_offsets", "_poll_timeout_s_max", "_waits")

    def __init__(self, consuming: Consuming, waits: Waits, poll_timeout_s_max: float) -> None:
        self._poll_timeout_s_max = poll_timeout_s_max
        self._groups = consuming.groups
        self._directory = consuming.directory
        self._offsets = consuming.group_offsets
        self._lags = consuming.lags
        self._waits = waits

    # ---- what members say

    def join(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        said = read_body(_joining, call.body, '{"topics": […], "member_id": …, …}')
        wish = Join(
            topics=tuple(said.topics),
            client_id=said.client_id,
            member_id=said.member_id,
            instance_id=said.instance_id,
            assignor=said.assignor,
            session_timeout_ms=said.session_timeout_ms,
            auto_offset_reset=said.auto_offset_reset,
            auto_commit=said.auto_commit,
            auto_commit_interval_ms=said.auto_commit_interval_ms,
        )

        def answer(joined: Joined) -> Answer:
            page = _standing(group, joined.standing)
            page["session_timeout_ms"] = joined.session_timeout_ms
            page["heartbeat_interval_ms"] = joined.heartbeat_interval_ms
            return json_of(page)

        return later(self._groups.join(group, wish), answer)

    def heartbeat(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        member = read_body(_member, call.body, '{"member_id": …, "generation": …}')
        beat = self._groups.heartbeat(group, member.member_id, member.generation)
        return later(beat, lambda standing: json_of(_standing(group, standing)))

    def poll(self, call: Call, group: str) -> Later:
        parameters = Parameters(call.query, POLL_PARAMETERS)
        member_id = parameters.needed("member_id")
        parameters.needed("generation")
        generation = parameters.whole("generation", 0, 0, GENERATION_MAX)
        timeout_s = parameters.seconds("timeout", self._poll_timeout_s_max)
        poll = Poll(
            parameters.whole("limit", None, 1, PARTITION_MAX),
            parameters.whole("bytes", None, 1, OFFSET_MAX),
            0 if self._waits.is_draining else int(timeout_s * 1000),
            parameters.whole("received", None, 0, OFFSET_MAX),
        )
        if poll.wait_ms:
            self._waits.check_room()
        polling = self._groups.poll(group, member_id, generation, poll)
        if not polling.pending.is_done:
            self._waits.hold(call, polling)
        return later(polling.pending, lambda polled: _polled(group, polled))

    def commit(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        said = read_body(_committing, call.body, '{"offsets": [{"topic": …, …}], …}')
        if (said.member_id is None) != (said.generation is None):
            raise BodyInvalid("member_id and generation go together: give both, or neither")
        if not 1 <= len(said.offsets) <= COMMITS_MAX:
            raise BodyInvalid(
                f"there are {len(said.offsets)} offsets; one commit takes 1 to {COMMITS_MAX}",
                least=1,
                most=COMMITS_MAX,
            )
        if len({(one.topic, one.partition) for one in said.offsets}) < len(said.offsets):
            raise BodyInvalid("offsets names a partition twice; each stands in it once")
        commits = [
            Commit(one.topic, one.partition, one.offset, one.metadata) for one in said.offsets
        ]
        committed = self._groups.commit(group, commits, said.member_id, said.generation)
        body = b'{"group":"%b","committed":%d}' % (group.encode(), len(commits))
        return later(committed, lambda _: Answer(200, body))

    def leave(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        member = read_body(_leaving, call.body, '{"member_id": …}')
        leaving = self._groups.leave(group, member.member_id, member.received, member.generation)
        return later(leaving, lambda _: NO_CONTENT)

    # ---- what others ask

    def list(self, call: Call) -> Later:
        parameters = Parameters(call.query, LISTED_PARAMETERS)
        after = parameters.text("after", "")
        limit = parameters.whole("limit", LISTED_MAX, 1, LISTED_MAX)

        def answer(summaries: list[GroupSummary]) -> Answer:
            found = sorted(one for one in summaries if one.group > after)
            last = found[limit - 1].group if len(found) > limit else None
            groups = [one._asdict() for one in found[:limit]]
            return json_of({"groups": groups, "next": last})

        return later(self._directory.summaries(), answer)

    def describe(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())

        def answer(facts: GroupFacts) -> Answer:
            page: dict[str, object] = facts.summary._asdict()
            page["members"] = [_member_page(member) for member in facts.members]
            page["offsets"] = [one._asdict() for one in facts.offsets]
            page["settings"] = msgspec.structs.asdict(facts.settings)
            return json_of(page)

        return later(self._directory.describe(group), answer)

    def alter(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        said = read_body(_changes, call.body, '{"settings": {…}}')

        def answer(settings: GroupSettings) -> Answer:
            return json_of({"group": group, "settings": msgspec.structs.asdict(settings)})

        return later(self._groups.alter(group, said.settings), answer)

    def delete(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        return later(self._groups.delete(group), lambda _: NO_CONTENT)

    def committed(self, call: Call, group: str) -> Later:
        topic = Parameters(call.query, TOPIC_PARAMETERS).text("topic", None)

        def answer(offsets: list[Committed]) -> Answer:
            return json_of({"group": group, "offsets": [one._asdict() for one in offsets]})

        return later(self._offsets.committed(group, topic), answer)

    def reset(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())
        said = read_body(_resetting, call.body, '{"topic": …, "to": …}')
        _check_reset(said)
        given = {"offset": said.offset, "time": said.time_ms}
        value = given.get(said.to)
        if said.to in given and value is None:
            name = "offset" if said.to == "offset" else "time_ms"
            raise BodyInvalid(f'a reset to "{said.to}" needs {name}')
        reset = self._offsets.reset(
            group,
            said.topic,
            ResetTo(said.to, value or 0),
            said.partitions,
            is_dry_run=said.dry_run,
        )

        def answer(done: Sequence[ResetDone]) -> Answer:
            offsets = [one._asdict() for one in done]
            return json_of({"group": group, "topic": said.topic, "offsets": offsets})

        return later(reset, answer)

    def forget(self, call: Call, group: str) -> Later:
        topic = Parameters(call.query, TOPIC_PARAMETERS).needed("topic")
        forgotten = self._offsets.forget(group, topic)
        return later(forgotten, lambda count: json_of({"group": group, "forgotten": count}))

    def lag(self, call: Call, group: str) -> Later:
        Parameters(call.query, ())

        def answer(lag: GroupLag) -> Answer:
            page = lag._asdict()
            page["partitions"] = [one._asdict() for one in lag.partitions]
            return json_of(page)

        return later(self._lags.of(group), answer)


def _check_reset(said: Resetting) -> None:
    """What is wrong is refused also where it does not count."""
    if said.time_ms is not None and not 0 <= said.time_ms <= OFFSET_MAX:
        raise TimestampInvalid(
            f"{said.time_ms} is not a time in milliseconds since 1970", timestamp_ms=said.time_ms
        )
    if said.offset is not None and not 0 <= said.offset <= OFFSET_MAX:
        raise OffsetOutOfRange(f"no topic has an offset {said.offset}", offset=said.offset)
    numbers = said.partitions
    if numbers is not None and (not numbers or len(set(numbers)) < len(numbers)):
        raise BodyInvalid("partitions is a list of at least one, and each stands in it once")


def _standing(group: str, standing: Standing) -> dict[str, object]:
    return {
        "group": group,
        "member_id": standing.member_id,
        "generation": standing.generation,
        "assignment": _by_topic(standing.assignment),
        "revoking": _by_topic(standing.revoking),
        "topic_ids": dict(standing.topic_ids),
        "rebalancing": standing.is_rebalancing,
    }


def _by_topic(ids: Sequence[PartitionId]) -> list[dict[str, object]]:
    topics: dict[str, list[int]] = {}
    for id in ids:
        topics.setdefault(id.topic, []).append(id.number)
    return [{"topic": topic, "partitions": numbers} for topic, numbers in topics.items()]


def _polled(group: str, polled: Polled) -> Answer:
    messages: list[Shown] = []
    for part in polled.parts:
        messages += shown(part.partition, part.records, part.topic)
    page = _standing(group, polled.standing)
    page["number"] = polled.number
    page["parts"] = [
        {
            "topic": part.topic,
            "partition": part.partition,
            "next_offset": part.next_offset,
            "end": part.high_watermark,
        }
        for part in polled.parts
    ]
    page["messages"] = msgspec.Raw(listed(messages))
    return json_of(page)


def _member_page(member: MemberFacts) -> dict[str, object]:
    page: dict[str, object] = member._asdict()
    page["assignment"] = _by_topic(member.assignment)
    page["revoking"] = _by_topic(member.revoking)
    return page
