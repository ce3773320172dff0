"""Groups that the broker deals out to (KIP-848): ConsumerGroupHeartbeat, ConsumerGroupDescribe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.broker.consumer_groups import Beat
from millstream.engine.pending import Pending, follow
from millstream.errors import GroupUnknown, MillstreamError, StaleGeneration
from millstream.listeners.kafka.apis import Api
from millstream.listeners.kafka.codes import message_of
from millstream.listeners.kafka.topic_ids import TopicIds
from millstream.wire.kafka import group_beats
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.group_beats import BeatAsked, DescribedGroup, DescribedMember

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.broker.consumer_groups import Beaten
    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context


def consumer_apis(context: Context) -> list[Api]:
    ids = TopicIds(context.broker.topics)
    return [
        Api(
            group_beats.CONSUMER_HEARTBEAT,
            "ConsumerGroupHeartbeat",
            group_beats.CONSUMER_VERSIONS,
            0,
            lambda call: heartbeat(context, ids, call),
        ),
        Api(
            group_beats.CONSUMER_DESCRIBE,
            "ConsumerGroupDescribe",
            group_beats.CONSUMER_VERSIONS,
            0,
            lambda call: describe(context, ids, call),
        ),
    ]


def heartbeat(context: Context, ids: TopicIds, call: Call) -> Pending[Reply]:
    asked = group_beats.read_consumer_beat(call.body, call.version)
    return follow(_heartbeat(context, ids, call, asked))


def _heartbeat(
    context: Context, ids: TopicIds, call: Call, asked: BeatAsked
) -> Generator[Pending[Any], Any, Reply]:
    timeout_ms = asked.rebalance_timeout_ms
    beat = Beat(
        asked.member_id,
        asked.epoch,
        call.client_id,
        call.peer,
        asked.instance_id,
        timeout_ms if timeout_ms >= 0 else None,
        frozenset(asked.topics) if asked.topics is not None else None,
        asked.assignor or None,
        frozenset(ids.partitions(asked.owned)) if asked.owned is not None else None,
        asked.pattern,
    )
    try:
        beaten: Beaten = yield context.broker.consumer_groups.heartbeat(asked.group, beat)
    except MillstreamError as error:
        return refused_beat(context, asked, error)
    return beat_of(ids, beaten.member_id, beaten.epoch, beaten)


def refused_beat(context: Context, asked: BeatAsked, error: MillstreamError) -> Reply:
    if isinstance(error, StaleGeneration):
        code = context.count(Code.FENCED_MEMBER_EPOCH)
    else:
        code = context.coordinator_code(error)
    return group_beats.beat_answer(
        code=code,
        message=message_of(error),
        member_id=asked.member_id,
        epoch=asked.epoch,
        interval_ms=0,
        assignment=None,
    )


def beat_of(ids: TopicIds, member_id: str, epoch: int, beaten: Any) -> Reply:
    assignment = None
    if beaten.assignment is not None:
        assignment = [(id, numbers) for id, _, numbers in ids.named(beaten.assignment)]
    return group_beats.beat_answer(
        code=Code.NONE,
        message=None,
        member_id=member_id,
        epoch=epoch,
        interval_ms=beaten.heartbeat_interval_ms,
        assignment=assignment,
    )


def describe(context: Context, ids: TopicIds, call: Call) -> Reply:
    asked = group_beats.read_describe(call.body)
    groups = [_described(context, ids, name) for name in asked]
    return group_beats.consumer_describe_answer(call.version, groups)


def _described(context: Context, ids: TopicIds, name: str) -> DescribedGroup:
    try:
        facts = context.broker.consumer_groups.facts(name)
    except MillstreamError as error:
        directory = context.broker.directory
        if isinstance(error, GroupUnknown) and directory.last_protocol(name) == "consumer":
            epoch = directory.generation(name)
            return DescribedGroup(name, Code.NONE, None, "Empty", epoch, "uniform")
        return DescribedGroup(name, context.coordinator_code(error), message_of(error))
    members = [
        DescribedMember(
            one.member_id,
            one.instance_id,
            one.epoch,
            one.client_id,
            one.host,
            one.topics,
            ids.named(one.assignment),
            ids.named(one.target),
        )
        for one in facts.members
    ]
    state = "Stable" if facts.is_stable else "Reconciling"
    return DescribedGroup(name, Code.NONE, None, state, facts.epoch, facts.assignor, members)
