"""Share groups (KIP-932): ShareGroupHeartbeat, ShareGroupDescribe, ShareFetch, ShareAcknowledge.

Their records are leased (`broker.share_sessions`). A record that is given out is encoded anew, with
those beside it in one batch: whole batches of the log hold records that somebody else has, and with
lanes or retries most of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.broker.share_groups import ShareBeat
from millstream.broker.share_sessions import Acknowledgement, ShareFetch
from millstream.engine.pending import Pending, follow
from millstream.errors import GroupUnknown, MillstreamError, ParameterInvalid
from millstream.listeners.kafka.apis import Api
from millstream.listeners.kafka.codes import message_of
from millstream.listeners.kafka.consumer_apis import beat_of, refused_beat
from millstream.listeners.kafka.topic_ids import TopicIds
from millstream.log import batch as batches
from millstream.log.partition import PartitionId
from millstream.wire.kafka import group_beats, shares
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.group_beats import DescribedGroup, DescribedMember
from millstream.wire.kafka.shares import GivenPartition

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from millstream.broker.delivery_values import Delivered
    from millstream.broker.share_groups import ShareBeaten
    from millstream.broker.share_sessions import Outcomes, ShareFetched
    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context
    from millstream.wire.kafka.group_beats import BeatAsked
    from millstream.wire.kafka.shares import ShareAsked

# What does not fit the number in an answer: a record that was given out more often.
COUNT_MAX = 2**15 - 1
# Records in one batch of an answer, so that a client can decode it in one go.
BATCH_RECORDS_MAX = 500


def share_apis(context: Context) -> list[Api]:
    ids = TopicIds(context.broker.topics)

    def api(key: int, name: str, versions: tuple[int, int], handle: Any) -> Api:
        return Api(key, name, versions, 0, lambda call: handle(context, ids, call))

    return [
        api(
            group_beats.SHARE_HEARTBEAT,
            "ShareGroupHeartbeat",
            group_beats.SHARE_VERSIONS,
            heartbeat,
        ),
        api(group_beats.SHARE_DESCRIBE, "ShareGroupDescribe", group_beats.SHARE_VERSIONS, describe),
        api(shares.FETCH, "ShareFetch", shares.VERSIONS, fetch),
        api(shares.ACKNOWLEDGE, "ShareAcknowledge", shares.VERSIONS, acknowledge),
    ]


# ---- members


def heartbeat(context: Context, ids: TopicIds, call: Call) -> Pending[Reply]:
    return follow(_heartbeat(context, ids, call, group_beats.read_share_beat(call.body)))


def _heartbeat(
    context: Context, ids: TopicIds, call: Call, asked: BeatAsked
) -> Generator[Pending[Any], Any, Reply]:
    topics = frozenset(asked.topics) if asked.topics is not None else None
    beat = ShareBeat(asked.member_id, asked.epoch, call.client_id, call.peer, topics)
    try:
        beaten: ShareBeaten = yield context.broker.share_groups.heartbeat(asked.group, beat)
    except MillstreamError as error:
        return refused_beat(context, asked, error)
    return beat_of(ids, beaten.member_id, beaten.epoch, beaten)


def describe(context: Context, ids: TopicIds, call: Call) -> Reply:
    asked = group_beats.read_describe(call.body)
    return group_beats.share_describe_answer([_described(context, ids, name) for name in asked])


def _described(context: Context, ids: TopicIds, name: str) -> DescribedGroup:
    try:
        facts = context.broker.share_groups.describe(name)
    except MillstreamError as error:
        return DescribedGroup(name, context.coordinator_code(error), message_of(error))
    directory = context.broker.directory
    if facts is None and directory.last_protocol(name) == "share":
        return DescribedGroup(name, Code.NONE, None, "Empty", directory.generation(name), "simple")
    if facts is None:
        unknown = GroupUnknown(f"there is no share group {name} with members", group=name)
        return DescribedGroup(name, context.coordinator_code(unknown), message_of(unknown))
    members = [
        DescribedMember(
            one.member_id,
            None,
            one.epoch,
            one.client_id,
            one.host,
            one.topics,
            ids.named(one.assignment),
            (),
        )
        for one in facts.members
    ]
    return DescribedGroup(name, Code.NONE, None, "Stable", facts.epoch, "simple", members)


# ---- records


def fetch(context: Context, ids: TopicIds, call: Call) -> Pending[Reply]:
    asked = shares.read_fetch(call.body, call.version)
    return follow(_fetch(context, ids, call, asked))


def _fetch(
    context: Context, ids: TopicIds, call: Call, asked: ShareAsked
) -> Generator[Pending[Any], Any, Reply]:
    known, unknown = _sorted(context, ids, asked)
    wish = ShareFetch(
        asked.epoch,
        added=tuple(id for id, _ in known),
        dropped=tuple(ids.partitions(asked.forgotten)),
        acknowledged=_acknowledgements(known),
        count_max=asked.count_max,
        bytes_max=asked.bytes_max,
        wait_ms=max(asked.wait_ms, 0),
        is_renewal=asked.is_renewal,
    )
    fetching = context.broker.share_sessions.fetch(asked.group, asked.member_id, wish)
    call.on_hurry = fetching.end
    try:
        fetched: ShareFetched = yield fetching.pending
    except MillstreamError as error:
        return shares.fetch_answer(_code(context, error), message_of(error), 0, [])
    parts = {id: _outcome(context, ids, id, why) for id, why in fetched.outcomes.items()}
    for id, records in _by_partition(fetched.records).items():
        part = parts.get(id) or GivenPartition(_topic_id(ids, id), id.number)
        parts[id] = part._replace(records=_encoded(records), given=_ranges(records))
    lock_ms = _lock_ms(context, asked.group, parts or (id for id, _ in known))
    return shares.fetch_answer(Code.NONE, None, lock_ms, [*parts.values(), *unknown])


def acknowledge(context: Context, ids: TopicIds, call: Call) -> Pending[Reply]:
    asked = shares.read_acknowledge(call.body, call.version)
    return follow(_acknowledge(context, ids, call, asked))


def _acknowledge(
    context: Context, ids: TopicIds, call: Call, asked: ShareAsked
) -> Generator[Pending[Any], Any, Reply]:
    known, unknown = _sorted(context, ids, asked)
    try:
        outcomes: Outcomes = yield context.broker.share_sessions.acknowledge(
            asked.group, asked.member_id, asked.epoch, _acknowledgements(known)
        )
    except MillstreamError as error:
        code = _code(context, error)
        return shares.acknowledge_answer(call.version, code, message_of(error), 0, [])
    parts = [_outcome(context, ids, id, why) for id, why in outcomes.items()]
    lock_ms = _lock_ms(context, asked.group, outcomes)
    return shares.acknowledge_answer(call.version, Code.NONE, None, lock_ms, [*parts, *unknown])


def _sorted(
    context: Context, ids: TopicIds, asked: ShareAsked
) -> tuple[list[tuple[PartitionId, list[shares.Acknowledged]]], list[GivenPartition]]:
    """The partitions of a request that there are, and answers for those that there are not."""
    known = []
    unknown = []
    for one in asked.partitions:
        topic = ids.find(one.topic)
        if topic is None or not 0 <= one.partition < topic.partitions:
            code = context.count(Code.UNKNOWN_TOPIC_ID if topic is None else _NO_PARTITION)
            unknown.append(GivenPartition(one.topic, one.partition, code, None, code))
        else:
            known.append((PartitionId(topic.name, one.partition), one.acknowledged))
    return known, unknown


_NO_PARTITION = Code.UNKNOWN_TOPIC_OR_PARTITION


def _acknowledgements(
    known: Sequence[tuple[PartitionId, list[shares.Acknowledged]]],
) -> tuple[Acknowledgement, ...]:
    return tuple(Acknowledgement(id, *one) for id, listed in known for one in listed)


def _outcome(
    context: Context, ids: TopicIds, id: PartitionId, why: MillstreamError | None
) -> GivenPartition:
    part = GivenPartition(_topic_id(ids, id), id.number)
    if why is None:
        return part
    return part._replace(acknowledge_code=context.code(why), acknowledge_message=message_of(why))


def _code(context: Context, error: MillstreamError) -> Code:
    if isinstance(error, ParameterInvalid):
        return context.count(Code.INVALID_REQUEST)
    return context.code(error)


def _topic_id(ids: TopicIds, id: PartitionId) -> bytes:
    named = ids.named((id,))
    # One that was deleted in the meantime has no id any more.
    return named[0][0] if named else bytes(group_beats.ID_BYTES)


def _lock_ms(context: Context, group: str, ids: Iterable[PartitionId]) -> int:
    """How long a record is leased: as the group says, or the topic that says the least."""
    of_group = context.broker.group_offsets.settings(group).visibility_ms
    if of_group is not None:
        return of_group
    topics = (context.broker.topics.by_name.get(id.topic) for id in ids)
    return min((one.settings.visibility_ms for one in topics if one is not None), default=0)


def _by_partition(records: Sequence[Delivered]) -> dict[PartitionId, list[Delivered]]:
    found: dict[PartitionId, list[Delivered]] = {}
    for one in records:
        found.setdefault(PartitionId(one.topic, one.partition), []).append(one)
    for listed in found.values():
        listed.sort(key=lambda one: one.record.offset)
    return found


def _encoded(records: Sequence[Delivered]) -> list[bytes]:
    """Records beside each other make a batch."""
    return [
        batches.encode([one.record for one in run], base_offset=run[0].record.offset)
        for run in _runs(records)
    ]


def _ranges(records: Sequence[Delivered]) -> list[tuple[int, int, int]]:
    """First and last offset of each run that was given out equally often. A run lies in a batch."""
    found: list[tuple[int, int, int]] = []
    for run in _runs(records):
        for place, one in enumerate(run):
            offset, deliveries = one.record.offset, min(one.deliveries, COUNT_MAX)
            if place and found[-1][2] == deliveries:
                found[-1] = (found[-1][0], offset, deliveries)
            else:
                found.append((offset, offset, deliveries))
    return found


def _runs(records: Sequence[Delivered]) -> list[list[Delivered]]:
    runs: list[list[Delivered]] = []
    for one in records:
        is_next = bool(runs) and runs[-1][-1].record.offset + 1 == one.record.offset
        if is_next and len(runs[-1]) < BATCH_RECORDS_MAX:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs
