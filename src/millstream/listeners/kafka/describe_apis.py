"""What newer tools ask instead of Metadata, or of a cluster of Kafka's newer kind: topics in pages
(DescribeTopicPartitions), what has configs (ListConfigResources), and who keeps the log of the
cluster's metadata (DescribeQuorum): this broker, alone, in the topic that has what is set for
topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import UUID

from kafka.protocol.admin import (
    DescribeQuorumRequest,
    DescribeQuorumResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

from millstream.broker.topics import SettingsView
from millstream.errors import MillstreamError
from millstream.listeners.kafka.apis import Api, control
from millstream.listeners.kafka.cluster import NO_TOPIC_ID, TopicLook, every_topic, look_at
from millstream.listeners.kafka.config_apis import BROKER, TOPIC
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from millstream.listeners.kafka.apis import Call
    from millstream.listeners.kafka.context import Context

# Kafka's own bound on a page (max.request.partition.size.limit).
PAGE_PARTITIONS_MAX = 2000
NO_OPERATIONS = -(2**31)
# What else may have configs in Kafka; here none has: loggers, metrics of clients, groups.
BROKER_LOGGER, CLIENT_METRICS, GROUP = 8, 16, 32
RESOURCES = (TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP)
# Kafka's name for the log of its metadata, and for where controllers listen.
METADATA_TOPIC = "__cluster_metadata"
CONTROLLER = "CONTROLLER"
# Of a voter that leads, which fetches from nobody.
NEVER = -1
NO_DIRECTORY = UUID(int=0)


def describe_apis(context: Context) -> list[Api]:
    return [
        control(
            DescribeTopicPartitionsRequest, (0, 0), lambda _, asked: topic_pages(context, asked)
        ),
        control(
            ListConfigResourcesRequest, (0, 1), lambda call, asked: configs(context, call, asked)
        ),
        control(DescribeQuorumRequest, (0, 2), lambda call, asked: quorum(context, call, asked)),
    ]


# ---- DescribeTopicPartitions


def topic_pages(context: Context, asked: Any) -> Any:
    """Topics by name, from the cursor on, until the page is full; then a cursor for the next."""
    cursor = asked.cursor
    first, begin = ("", 0) if cursor is None else (cursor.topic_name, cursor.partition_index)
    wanted = sorted({one.name for one in asked.topics}) or every_topic(context)
    if asked.topics and cursor is not None and (first not in wanted or begin < 0):
        # There is no code for all of it.
        code = context.count(Code.INVALID_REQUEST)
        return _page([_topic_page(name, None, code, []) for name in wanted], None)
    room = max(1, min(asked.response_partition_limit, PAGE_PARTITIONS_MAX))
    topics: list[Any] = []
    for name in wanted:
        if name < first:
            continue
        if not room:
            return _page(topics, (name, 0))
        try:
            look = look_at(context, name)
        except MillstreamError as error:
            # Of topics that nobody named, one is gone since.
            if asked.topics:
                topics.append(_topic_page(name, None, context.code(error), []))
            continue
        start = max(begin, 0) if name == first else 0
        end = min(start + room, len(look.epochs))
        numbers = range(start, end)
        topics.append(_topic_page(name, look, Code.NONE, _parts(context, look, numbers)))
        room -= len(numbers)
        if end < len(look.epochs):
            return _page(topics, (name, end))
    return _page(topics, None)


def _page(topics: list[Any], next_at: tuple[str, int] | None) -> Any:
    Cursor = DescribeTopicPartitionsResponse.Cursor  # noqa: N806  a class
    cursor = None
    if next_at is not None:
        cursor = Cursor(topic_name=next_at[0], partition_index=next_at[1])
    return DescribeTopicPartitionsResponse(throttle_time_ms=0, topics=topics, next_cursor=cursor)


def _topic_page(name: str, look: TopicLook | None, code: Code, partitions: list[Any]) -> Any:
    Topic = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic  # noqa: N806
    return Topic(
        error_code=code,
        name=name,
        topic_id=NO_TOPIC_ID if look is None else look.id,
        is_internal=look is not None and look.is_internal,
        partitions=partitions,
        topic_authorized_operations=NO_OPERATIONS,
    )


def _parts(context: Context, look: TopicLook, numbers: range) -> list[Any]:
    Topic = DescribeTopicPartitionsResponse.DescribeTopicPartitionsResponseTopic  # noqa: N806
    Part = Topic.DescribeTopicPartitionsResponsePartition  # noqa: N806  a class
    node = [context.node_id]
    return [
        Part(
            error_code=Code.NONE,
            partition_index=number,
            leader_id=context.node_id,
            leader_epoch=look.epochs[number],
            replica_nodes=node,
            isr_nodes=node,
            eligible_leader_replicas=[],
            last_known_elr=[],
            offline_replicas=[],
        )
        for number in numbers
    ]


# ---- ListConfigResources


def configs(context: Context, call: Call, asked: Any) -> Any:
    """In version 0 it was only about metrics of clients."""
    wanted = asked.resource_types or RESOURCES if call.version >= 1 else (CLIENT_METRICS,)
    Resource = ListConfigResourcesResponse.ConfigResource  # noqa: N806  a class
    code, found = Code.NONE, []
    if not set(wanted) <= set(RESOURCES):
        code = context.count(Code.UNSUPPORTED_VERSION)
    else:
        names = {TOPIC: every_topic(context), BROKER: [str(context.node_id)]}
        found = [
            Resource(resource_name=name, resource_type=kind)
            for kind in RESOURCES
            if kind in wanted
            for name in names.get(kind, ())
        ]
    return ListConfigResourcesResponse(throttle_time_ms=0, error_code=code, config_resources=found)


# ---- DescribeQuorum


def quorum(context: Context, call: Call, asked: Any) -> Any:
    Topic = DescribeQuorumResponse.TopicData  # noqa: N806  a class
    Node = DescribeQuorumResponse.Node  # noqa: N806  a class
    Listener = Node.Listener  # noqa: N806  a class
    here = Listener(name=CONTROLLER, host=call.here.host, port=call.here.port)
    return DescribeQuorumResponse(
        error_code=Code.NONE,
        error_message=None,
        topics=[
            Topic(
                topic_name=topic.topic_name,
                partitions=[
                    _quorum(context, topic.topic_name, one.partition_index)
                    for one in topic.partitions
                ],
            )
            for topic in asked.topics
        ],
        nodes=[Node(node_id=context.node_id, listeners=[here])],
    )


def _quorum(context: Context, topic: str, number: int) -> Any:
    Topic = DescribeQuorumResponse.TopicData  # noqa: N806  a class
    Part = Topic.PartitionData  # noqa: N806  a class
    Voter = Part.ReplicaState  # noqa: N806  a class
    if (topic, number) != (METADATA_TOPIC, 0):
        return Part(
            partition_index=number,
            error_code=context.count(Code.UNKNOWN_TOPIC_OR_PARTITION),
            error_message=f"only {METADATA_TOPIC} has voters, in its partition 0",
            leader_id=-1,
            leader_epoch=-1,
            high_watermark=-1,
            current_voters=[],
            observers=[],
        )
    engine, log = context.engine, SettingsView.partition
    end = engine.offsets(log).high_watermark
    itself = Voter(
        replica_id=context.node_id,
        replica_directory_id=NO_DIRECTORY,
        log_end_offset=end,
        last_fetch_timestamp=NEVER,
        last_caught_up_timestamp=NEVER,
    )
    return Part(
        partition_index=0,
        error_code=Code.NONE,
        error_message=None,
        leader_id=context.node_id,
        leader_epoch=engine.leader_epoch(log),
        high_watermark=end,
        current_voters=[itself],
        observers=[],
    )
