"""Committed offsets: OffsetCommit, OffsetFetch, OffsetDelete. They are those of all groups."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kafka.protocol.consumer.group import OffsetDeleteRequest, OffsetDeleteResponse

from millstream.broker.commits import Committer, check_member, commit
from millstream.broker.group_values import Commit, check_group_name
from millstream.engine.pending import Pending, follow
from millstream.errors import GroupNotEmpty, MillstreamError, StaleGeneration
from millstream.listeners.kafka import offsets_topic
from millstream.listeners.kafka.apis import Api, control
from millstream.log.partition import PartitionId
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.offsets import (
    COMMIT_FLEXIBLE,
    COMMIT_VERSIONS,
    FETCH_FLEXIBLE,
    FETCH_VERSIONS,
    NO_OFFSET,
    FoundGroup,
    FoundOffset,
    commit_answer,
    fetch_answer,
    read_commit,
    read_fetch,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context
    from millstream.wire.kafka.offsets import CommitAsked, FetchGroup

OFFSET_COMMIT, OFFSET_FETCH = 8, 9
# From this version on, clients of the consumer protocol know how their epochs are refused.
EPOCHS_FROM = 9
# Groups that are looked at in one turn of the loop.
IN_TURN = 100


def offset_apis(context: Context) -> list[Api]:
    return [
        Api(
            OFFSET_COMMIT,
            "OffsetCommit",
            COMMIT_VERSIONS,
            COMMIT_FLEXIBLE,
            lambda call: offset_commit(context, call),
        ),
        Api(
            OFFSET_FETCH,
            "OffsetFetch",
            FETCH_VERSIONS,
            FETCH_FLEXIBLE,
            lambda call: offset_fetch(context, call),
        ),
        control(OffsetDeleteRequest, (0, 0), lambda _, asked: offset_delete(context, asked)),
    ]


# ---- OffsetCommit


def offset_commit(context: Context, call: Call) -> Pending[Reply]:
    return follow(_commit(context, call, read_commit(call.body, call.version)))


def _commit(
    context: Context, call: Call, asked: CommitAsked
) -> Generator[Pending[Any], Any, Reply]:
    by = Committer(asked.member_id, asked.generation, asked.instance_id)
    commits = [Commit(*one) for _, partitions in asked.topics for one in partitions]
    try:
        if call.version < EPOCHS_FROM and by.is_member:
            _refuse_old(context, asked.group, by)
        outcomes = yield commit(context.broker.consuming, asked.group, commits, by)
        codes = [
            # Who reads all topics commits for this one too, and nothing is lost by forgetting it.
            Code.NONE
            if error is None or one.topic == offsets_topic.NAME
            else context.coordinator_code(error)
            for one, error in zip(commits, outcomes, strict=True)
        ]
    except MillstreamError as error:
        codes = [_refusal(context, asked.group, error)] * len(commits)
    except _TooOld:
        codes = [context.count(Code.UNSUPPORTED_VERSION)] * len(commits)
    next_code = iter(codes)
    return commit_answer(
        call.version,
        [
            (topic, [(one.partition, next(next_code)) for one in partitions])
            for topic, partitions in asked.topics
        ],
    )


class _TooOld(Exception):
    """A version whose clients do not know how epochs are refused."""


def _refuse_old(context: Context, group: str, by: Committer) -> None:
    """As Kafka does: such a member commits by a version that has its epochs, or not at all."""
    if context.broker.consumer_groups.has_members(group):
        with suppress(StaleGeneration):
            check_member(context.broker.consuming, group, by)
        raise _TooOld


def _refusal(context: Context, group: str, error: MillstreamError) -> Code:
    is_epoch = context.broker.consumer_groups.has_members(group)
    if is_epoch and isinstance(error, StaleGeneration):
        return context.count(Code.STALE_MEMBER_EPOCH)
    return context.coordinator_code(error)


# ---- OffsetFetch


def offset_fetch(context: Context, call: Call) -> Pending[Reply]:
    return follow(_fetch(context, call, read_fetch(call.body, call.version)))


def _fetch(
    context: Context, call: Call, asked: list[FetchGroup]
) -> Generator[Pending[Any], Any, Reply]:
    found = []
    for at, one in enumerate(_once(asked)):
        if at and at % IN_TURN == 0:
            yield context.pause()
        try:
            found.append((yield from _found(context, one)))
        except MillstreamError as error:
            code = _refusal(context, one.group, error)
            # Before there was a code for all of it, each partition had to say.
            topics = [
                (topic, [FoundOffset(number, NO_OFFSET, "", code) for number in numbers])
                for topic, numbers in one.topics or ()
            ]
            found.append(FoundGroup(one.group, topics if call.version < 2 else (), code))
    return fetch_answer(call.version, found)


def _once(asked: list[FetchGroup]) -> list[FetchGroup]:
    """Without groups of which everything is wanted again."""
    whole: set[str] = set()
    wanted = []
    for one in asked:
        if one.topics is not None:
            wanted.append(one)
        elif one.group not in whole:
            whole.add(one.group)
            wanted.append(one)
    return wanted


def _found(context: Context, asked: FetchGroup) -> Generator[Pending[Any], Any, FoundGroup]:
    check_group_name(asked.group)
    if asked.member_id and asked.epoch >= 0:
        check_member(context.broker.consuming, asked.group, Committer(asked.member_id, asked.epoch))
    offsets = context.broker.group_offsets
    yield offsets.settled()
    if asked.topics is None:
        everything: dict[str, list[FoundOffset]] = {}
        for one in offsets.all_of(asked.group):
            epoch = one.leader_epoch
            found = FoundOffset(one.partition, one.offset, one.metadata, Code.NONE, epoch)
            everything.setdefault(one.topic, []).append(found)
        return FoundGroup(asked.group, list(everything.items()), Code.NONE)
    topics = [
        (topic, [_offset(context, asked.group, topic, number) for number in numbers])
        for topic, numbers in asked.topics
    ]
    return FoundGroup(asked.group, topics, Code.NONE)


def _offset(context: Context, group: str, topic: str, number: int) -> FoundOffset:
    known = context.broker.topics.by_name.get(topic)
    entry = None
    if known is not None:
        entry = context.broker.group_offsets.table.get(group, known.uuid.bytes, number)
    if entry is None:
        return FoundOffset(number, NO_OFFSET, "", Code.NONE)
    return FoundOffset(number, entry.offset, entry.metadata, Code.NONE, entry.leader_epoch)


# ---- OffsetDelete


def offset_delete(context: Context, asked: Any) -> Pending[Any]:
    return follow(_delete(context, asked))


def _delete(context: Context, asked: Any) -> Generator[Pending[Any], Any, Any]:
    broker, group = context.broker, asked.group_id
    codes: dict[PartitionId, Code] = {}
    try:
        facts = yield broker.directory.describe(group)
        if facts.summary.protocol == "share":
            raise GroupNotEmpty(f"group {group} has members", group=group)
        subscribed = frozenset(facts.summary.topics if facts.members else ())
        for topic in asked.topics:
            for one in topic.partitions:
                id = PartitionId(topic.name, one.partition_index)
                codes[id] = _deletable(context, subscribed, id)
        good = [id for id, code in codes.items() if code == Code.NONE]
        if good:
            yield broker.group_offsets.forget_partitions(group, good)
    except MillstreamError as error:
        code = context.coordinator_code(error)
        return OffsetDeleteResponse(error_code=code, throttle_time_ms=0, topics=[])
    Topic = OffsetDeleteResponse.OffsetDeleteResponseTopic  # noqa: N806  a class
    Partition = Topic.OffsetDeleteResponsePartition  # noqa: N806  a class
    topics = [
        Topic(
            name=topic.name,
            partitions=[
                Partition(
                    partition_index=one.partition_index,
                    error_code=codes[PartitionId(topic.name, one.partition_index)],
                )
                for one in topic.partitions
            ],
        )
        for topic in asked.topics
    ]
    return OffsetDeleteResponse(error_code=Code.NONE, throttle_time_ms=0, topics=topics)


def _deletable(context: Context, subscribed: frozenset[str], id: PartitionId) -> Code:
    """Not while members read it: they would go on where they are."""
    try:
        context.broker.topics.partition_of(id.topic, id.number)
    except MillstreamError as error:
        return context.code(error)
    if id.topic in subscribed:
        return context.count(Code.GROUP_SUBSCRIBED_TO_TOPIC)
    return Code.NONE
