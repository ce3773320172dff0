"""Where copies of partitions are: on one broker, in one directory, each once.

Tools ask for sizes (DescribeLogDirs), and may ask for what is so already: a partition to be on this
broker, in this directory, led by it. Anything else is refused.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import (
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

from millstream.errors import MillstreamError
from millstream.listeners.kafka import offsets_topic
from millstream.listeners.kafka.apis import Api, control
from millstream.listeners.kafka.codes import message_of
from millstream.listeners.kafka.configs import OWN_PREFIX
from millstream.log.partition import PartitionId
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Iterable

    from millstream.listeners.kafka.context import Context

# How large a disk is, and how much of it is free: the health page says that, and warns.
NOT_SAID = -1


def replica_apis(context: Context) -> list[Api]:
    return [
        control(DescribeLogDirsRequest, (1, 4), lambda _, asked: log_dirs(context, asked)),
        control(AlterReplicaLogDirsRequest, (1, 2), lambda _, asked: move_dirs(context, asked)),
        control(ElectLeadersRequest, (0, 2), lambda _, asked: elect(context, asked)),
        control(
            AlterPartitionReassignmentsRequest, (0, 1), lambda _, asked: reassign(context, asked)
        ),
        control(ListPartitionReassignmentsRequest, (0, 0), lambda _, asked: reassignments(asked)),
    ]


def _all_partitions(context: Context) -> list[tuple[str, Iterable[int]]]:
    """By topic; those of the broker itself are not there."""
    topics = context.broker.topics
    return [(name, range(topics.by_name[name].partitions)) for name in topics.names()]


def _directory(context: Context) -> str:
    """Where its records are: Kafka's directories are absolute."""
    name = f"{OWN_PREFIX}data"
    return next(
        (os.path.abspath(one.value) for one in context.broker_configs if one.name == name), ""
    )


def _is_there(context: Context, topic: str, number: int) -> tuple[Code, str | None]:
    try:
        context.broker.topics.partition_of(topic, number)
    except MillstreamError as error:
        return context.code(error), message_of(error)
    return Code.NONE, None


# ---- directories


def log_dirs(context: Context, asked: Any) -> Any:
    """A partition that is not there is left out, as Kafka does."""
    Result = DescribeLogDirsResponse.DescribeLogDirsResult  # noqa: N806  a class
    Topic = Result.DescribeLogDirsTopic  # noqa: N806  a class
    Part = Topic.DescribeLogDirsPartition  # noqa: N806  a class
    if asked.topics is None:
        wanted = _all_partitions(context)
    else:
        wanted = [(one.topic, one.partitions) for one in asked.topics]
    topics = []
    for name, numbers in wanted:
        partitions = [
            Part(
                partition_index=number,
                partition_size=context.engine.extent(PartitionId(name, number)).bytes,
                offset_lag=0,
                is_future_key=False,
            )
            for number in numbers
            if _is_there(context, name, number)[0] == Code.NONE
        ]
        if partitions:
            topics.append(Topic(name=name, partitions=partitions))
    directory = Result(
        error_code=Code.NONE,
        log_dir=_directory(context),
        topics=topics,
        total_bytes=NOT_SAID,
        usable_bytes=NOT_SAID,
    )
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=Code.NONE, results=[directory])


def move_dirs(context: Context, asked: Any) -> Any:
    Topic = AlterReplicaLogDirsResponse.AlterReplicaLogDirTopicResult  # noqa: N806  a class
    Part = Topic.AlterReplicaLogDirPartitionResult  # noqa: N806  a class

    directory = _directory(context)

    def moved(path: str, topic: str, number: int) -> Code:
        code, _ = _is_there(context, topic, number)
        if code == Code.NONE and path != directory:
            return context.count(Code.LOG_DIR_NOT_FOUND)
        return code

    results = [
        Topic(
            topic_name=topic.name,
            partitions=[
                Part(partition_index=number, error_code=moved(one.path, topic.name, number))
                for number in topic.partitions
            ],
        )
        for one in asked.dirs
        for topic in one.topics
    ]
    return AlterReplicaLogDirsResponse(throttle_time_ms=0, results=results)


# ---- leaders and places


def elect(context: Context, asked: Any) -> Any:
    Topic = ElectLeadersResponse.ReplicaElectionResult  # noqa: N806  a class
    Part = Topic.PartitionResult  # noqa: N806  a class

    def elected(topic: str, number: int) -> Any:
        code, message = _is_listed(context, topic, number)
        if code == Code.NONE:
            code, message = Code.ELECTION_NOT_NEEDED, "this broker leads it, and there is no other"
        return Part(partition_id=number, error_code=code, error_message=message)

    if asked.topic_partitions is None:
        # Kafka leaves out what needs no election when all are asked for.
        results = []
    else:
        results = [
            Topic(
                topic=one.topic,
                partition_result=[elected(one.topic, number) for number in one.partitions],
            )
            for one in asked.topic_partitions
        ]
    return ElectLeadersResponse(
        throttle_time_ms=0, error_code=Code.NONE, replica_election_results=results
    )


def reassign(context: Context, asked: Any) -> Any:
    Response = AlterPartitionReassignmentsResponse  # noqa: N806  a class
    Topic = Response.ReassignableTopicResponse  # noqa: N806  a class
    Part = Topic.ReassignablePartitionResponse  # noqa: N806  a class

    def outcome(topic: str, part: Any) -> Any:
        code, message = _is_listed(context, topic, part.partition_index)
        if code == Code.NONE:
            code, message = _place(context, part.replicas)
        return Part(partition_index=part.partition_index, error_code=code, error_message=message)

    return Response(
        throttle_time_ms=0,
        allow_replication_factor_change=True,
        error_code=Code.NONE,
        error_message=None,
        responses=[
            Topic(
                name=topic.name, partitions=[outcome(topic.name, one) for one in topic.partitions]
            )
            for topic in asked.topics
        ],
    )


def _is_listed(context: Context, topic: str, number: int) -> tuple[Code, str | None]:
    """Clients that mean all topics name each that is listed: Kafka's internal one too."""
    if topic == offsets_topic.NAME:
        return offsets_topic.code_of_partition(context, number), None
    return _is_there(context, topic, number)


def _place(context: Context, brokers: list[int] | None) -> tuple[Code, str | None]:
    """Of a wish where a partition should be; None wishes that a move ends."""
    if brokers is None:
        code = context.count(Code.NO_REASSIGNMENT_IN_PROGRESS)
        return code, "no partition is being moved"
    if list(brokers) != [context.node_id]:
        code = context.count(Code.INVALID_REPLICA_ASSIGNMENT)
        return code, f"there is one broker, {context.node_id}; nothing can be on {brokers}"
    return Code.NONE, None


def reassignments(asked: Any) -> Any:
    """Nothing ever moves."""
    del asked
    return ListPartitionReassignmentsResponse(
        throttle_time_ms=0, error_code=Code.NONE, error_message=None, topics=[]
    )
