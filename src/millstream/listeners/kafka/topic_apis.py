"""Topics by Kafka's administration: made, deleted, given partitions, and their records deleted.

A request has many topics, and each has its own outcome. The broker's own topics are not there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.listeners.kafka.apis import Api, control
from millstream.listeners.kafka.cluster import NO_TOPIC_ID
from millstream.listeners.kafka.codes import message_of
from millstream.listeners.kafka.configs import describe, read_configs
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Generator

    from millstream.broker.topics import Topic
    from millstream.listeners.kafka.apis import Call
    from millstream.listeners.kafka.context import Context

# As many partitions, or copies, as the broker likes.
DEFAULT = -1
COPIES = 1
# Of the records to delete: all.
HIGH_WATERMARK = -1
# Topics that one request makes: the answer describes each with all its configs, in one go. And how
# many are looked at in one turn of the loop.
MADE_MAX = 1000
IN_TURN = 100


class _Refused(Exception):
    """Of one topic, for a reason that only Kafka has."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def topic_apis(context: Context) -> list[Api]:
    return [
        control(
            CreateTopicsRequest, (0, 7), lambda call, asked: follow(_create(context, call, asked))
        ),
        control(
            DeleteTopicsRequest, (0, 6), lambda call, asked: follow(_delete(context, call, asked))
        ),
        control(
            CreatePartitionsRequest,
            (0, 3),
            lambda _, asked: follow(_add_partitions(context, asked)),
        ),
        control(
            DeleteRecordsRequest, (0, 2), lambda _, asked: follow(_delete_records(context, asked))
        ),
    ]


def _outcome(context: Context, error: MillstreamError | _Refused) -> tuple[Code, str]:
    if isinstance(error, _Refused):
        return context.count(error.code), error.message
    return context.code(error), message_of(error)


# ---- CreateTopics


def _create(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    names = Counter(one.name for one in asked.topics)
    is_trial = call.version >= 1 and asked.validate_only
    results = []
    for at, one in enumerate(asked.topics):
        if at and at % IN_TURN == 0:
            yield context.pause()
        try:
            if len(asked.topics) > MADE_MAX:
                raise _Refused(Code.INVALID_REQUEST, f"a request makes at most {MADE_MAX} topics")
            if names[one.name] > 1:
                raise _Refused(Code.INVALID_REQUEST, f"the request has {one.name} twice")
            topic = yield from _create_one(context, one, is_trial)
        except (MillstreamError, _Refused) as error:
            code, message = _outcome(context, error)
            results.append(_created(context, one.name, code, message, None))
        else:
            results.append(_created(context, one.name, Code.NONE, None, topic))
    return CreateTopicsResponse(throttle_time_ms=0, topics=results)


def _create_one(context: Context, one: Any, is_trial: bool) -> Generator[Pending[Any], Any, Topic]:
    count = _partitions(context, one)
    settings = read_configs({config.name: config.value for config in one.configs})
    settings = {name: value for name, value in settings.items() if value is not None}
    topics = context.broker.topics
    if is_trial:
        return topics.imagine(one.name, count, settings)
    topic: Topic = yield topics.create(one.name, count, settings)
    return topic


def _partitions(context: Context, one: Any) -> int | None:
    """How many; None for the broker's default. There is one copy of each, on this broker."""
    if one.assignments:
        if one.num_partitions != DEFAULT or one.replication_factor != DEFAULT:
            why = "a topic whose places are given has counts of -1"
            raise _Refused(Code.INVALID_REQUEST, why)
        numbers = sorted(place.partition_index for place in one.assignments)
        if numbers != list(range(len(numbers))):
            why = "the places are not those of partitions 0, 1 and so on"
            raise _Refused(Code.INVALID_REPLICA_ASSIGNMENT, why)
        for place in one.assignments:
            _check_place(context, place.broker_ids)
        return len(numbers)
    if one.replication_factor not in (DEFAULT, COPIES):
        why = f"there is one broker, so a replication factor of {one.replication_factor} cannot be"
        raise _Refused(Code.INVALID_REPLICATION_FACTOR, why)
    return None if one.num_partitions == DEFAULT else one.num_partitions


def _check_place(context: Context, brokers: list[int]) -> None:
    if list(brokers) != [context.node_id]:
        why = f"there is one broker, {context.node_id}; a partition cannot be on {brokers}"
        raise _Refused(Code.INVALID_REPLICA_ASSIGNMENT, why)


def _created(
    context: Context, name: str, code: Code, message: str | None, topic: Topic | None
) -> Any:
    Result = CreateTopicsResponse.CreatableTopicResult  # noqa: N806  a class
    Shown = Result.CreatableTopicConfigs  # noqa: N806  a class
    return Result(
        name=name,
        topic_id=NO_TOPIC_ID if topic is None else topic.uuid,
        error_code=code,
        error_message=message,
        num_partitions=DEFAULT if topic is None else topic.partitions,
        replication_factor=DEFAULT if topic is None else COPIES,
        configs=None
        if topic is None
        else [
            Shown(
                name=one.name,
                value=one.value,
                read_only=one.is_read_only,
                config_source=one.source,
                is_sensitive=False,
            )
            for one in describe(topic, context.broker.topics.batch_bytes_max(topic))
        ],
    )


# ---- DeleteTopics


def _delete(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    Result = DeleteTopicsResponse.DeletableTopicResult  # noqa: N806  a class
    topics = context.broker.topics
    if call.version >= 6:
        wanted = [(one.name, one.topic_id) for one in asked.topics]
    else:
        wanted = [(name, NO_TOPIC_ID) for name in asked.topic_names]
    results = []
    for at, (asked_name, id) in enumerate(wanted):
        if at and at % IN_TURN == 0:
            yield context.pause()
        code, message, name = Code.NONE, None, asked_name
        if name is None and id is not None:
            known = topics.by_id.get(id.bytes)
            name = None if known is None else known.name
        try:
            if name is None:
                raise _Refused(Code.UNKNOWN_TOPIC_ID, f"there is no topic with the id {id}")
            yield topics.delete(name)
        except (MillstreamError, _Refused) as error:
            code, message = _outcome(context, error)
        results.append(Result(name=name, topic_id=id, error_code=code, error_message=message))
    return DeleteTopicsResponse(throttle_time_ms=0, responses=results)


# ---- CreatePartitions


def _add_partitions(context: Context, asked: Any) -> Generator[Pending[Any], Any, Any]:
    Result = CreatePartitionsResponse.CreatePartitionsTopicResult  # noqa: N806  a class
    results = []
    for one in asked.topics:
        code, message = Code.NONE, None
        try:
            topic = context.broker.topics.get(one.name)
            if one.count <= topic.partitions:
                why = f"topic {one.name} has {topic.partitions} partitions already"
                raise _Refused(Code.INVALID_PARTITIONS, why)
            if one.assignments is not None:
                if len(one.assignments) != one.count - topic.partitions:
                    why = "there has to be a place for each new partition"
                    raise _Refused(Code.INVALID_REPLICA_ASSIGNMENT, why)
                for place in one.assignments:
                    _check_place(context, place.broker_ids)
            if asked.validate_only:
                context.broker.topics.imagine_partitions(one.name, one.count)
            else:
                yield context.broker.topics.add_partitions(one.name, one.count)
        except (MillstreamError, _Refused) as error:
            code, message = _outcome(context, error)
        results.append(Result(name=one.name, error_code=code, error_message=message))
    return CreatePartitionsResponse(throttle_time_ms=0, results=results)


# ---- DeleteRecords


def _delete_records(context: Context, asked: Any) -> Generator[Pending[Any], Any, Any]:
    Topic = DeleteRecordsResponse.DeleteRecordsTopicResult  # noqa: N806  a class
    topics = []
    for one in asked.topics:
        results = []
        for part in one.partitions:
            trimmed = yield from _trimmed(context, one.name, part)
            results.append(trimmed)
        topics.append(Topic(name=one.name, partitions=results))
    return DeleteRecordsResponse(throttle_time_ms=0, topics=topics)


def _trimmed(context: Context, name: str, part: Any) -> Generator[Pending[Any], Any, Any]:
    start, code = -1, Code.NONE
    try:
        offset = None if part.offset == HIGH_WATERMARK else part.offset
        start = yield context.broker.topics.trim(name, part.partition_index, offset)
    except MillstreamError as error:
        code = context.code(error)
    Topic = DeleteRecordsResponse.DeleteRecordsTopicResult  # noqa: N806  a class
    Result = Topic.DeleteRecordsPartitionResult  # noqa: N806  a class
    return Result(partition_index=part.partition_index, low_watermark=start, error_code=code)
