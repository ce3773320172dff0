"""What there is, and where: ApiVersions, Metadata, FindCoordinator, DescribeCluster.

There is one broker, so it leads every partition, coordinates every group, and is the controller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from kafka.protocol.admin import DescribeClusterRequest, DescribeClusterResponse
from kafka.protocol.metadata import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)

from millstream.engine.pending import Pending, follow
from millstream.errors import MillstreamError
from millstream.listeners.kafka import offsets_topic
from millstream.listeners.kafka.apis import Api, control, decode
from millstream.log.partition import PartitionId
from millstream.wire.kafka.codes import Code

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from millstream.listeners.kafka.apis import Call, Reply
    from millstream.listeners.kafka.context import Context

API_VERSIONS = 18
API_VERSIONS_LAST = 4
NO_TOPIC_ID = UUID(int=0)
# Coordinators are asked for by these types of key.
GROUP, TRANSACTION, SHARE = 0, 1, 2
# The brokers of a cluster, not its controllers.
BROKERS = 1
# Topics that are described in one turn of the loop.
IN_TURN = 100


def cluster_apis(context: Context) -> list[Api]:
    return [
        control(MetadataRequest, (0, 12), lambda call, asked: metadata(context, call, asked)),
        control(
            FindCoordinatorRequest,
            (0, 4),
            lambda call, asked: find_coordinator(context, call, asked),
        ),
        control(
            DescribeClusterRequest,
            (0, 1),
            lambda call, asked: describe_cluster(context, call, asked),
        ),
    ]


def api_versions(table: Mapping[int, Api]) -> Api:
    """Itself and every API of the table, once that is whole."""

    def answer(call: Call) -> Reply:
        Key = ApiVersionsResponse.ApiVersion  # noqa: N806  a class
        version, code = call.version, Code.NONE
        if not 0 <= version <= API_VERSIONS_LAST:
            # The client does not know our versions yet: it is told in the oldest form.
            version, code = 0, Code.UNSUPPORTED_VERSION
        elif version:
            decode(ApiVersionsRequest, call)
        keys = [
            Key(api_key=key, min_version=api.versions[0], max_version=api.versions[1])
            for key, api in sorted(table.items())
        ]
        response = ApiVersionsResponse(error_code=code, api_keys=keys, throttle_time_ms=0)
        return [response.encode(version=version)]

    return Api(API_VERSIONS, "ApiVersions", (0, API_VERSIONS_LAST), 3, answer)


# ---- Metadata


def metadata(context: Context, call: Call, asked: Any) -> Pending[Any]:
    return follow(_metadata(context, call, asked))


def _metadata(context: Context, call: Call, asked: Any) -> Generator[Pending[Any], Any, Any]:
    names = _names(context, call, asked)
    # Before version 4 there was no way to ask for less.
    may_make = call.version < 4 or asked.allow_auto_topic_creation
    topics = []
    for at, (name, id) in enumerate(names):
        if at and at % IN_TURN == 0:
            yield context.pause()
        topics.append((yield from _described(context, name, id, may_make)))
    place = call.here
    Broker = MetadataResponse.MetadataResponseBroker  # noqa: N806  a class
    return MetadataResponse(
        throttle_time_ms=0,
        brokers=[Broker(node_id=context.node_id, host=place.host, port=place.port, rack=None)],
        cluster_id=context.cluster_id,
        controller_id=context.node_id,
        topics=topics,
    )


def _names(context: Context, call: Call, asked: Any) -> list[tuple[str | None, UUID | None]]:
    """Of the topics that are asked for, or their ids; in version 0, none means all."""
    if asked.topics is None or (call.version == 0 and not asked.topics):
        return [(name, None) for name in every_topic(context)]
    found: dict[tuple[str | None, UUID | None], None] = {}
    for topic in asked.topics:
        id = topic.topic_id if call.version >= 10 and topic.topic_id != NO_TOPIC_ID else None
        found[None if id is not None else topic.name or "", id] = None
    return list(found)


def every_topic(context: Context) -> list[str]:
    """The names of all that clients see, in order."""
    names = context.broker.topics.names()
    return sorted([*names, offsets_topic.NAME]) if offsets_topic.is_there(context) else names


class TopicLook(NamedTuple):
    """What clients are told of a topic."""

    name: str
    id: UUID
    # The leader epochs of its partitions.
    epochs: list[int]
    is_internal: bool = False


def look_at(context: Context, name: str) -> TopicLook:
    """Raises when there is no such topic."""
    if name == offsets_topic.NAME:
        epochs = [offsets_topic.EPOCH] * offsets_topic.PARTITIONS
        return TopicLook(name, offsets_topic.ID, epochs, is_internal=True)
    topic = context.broker.topics.get(name)
    leader_epoch = context.engine.leader_epoch
    ids = (PartitionId(topic.name, number) for number in range(topic.partitions))
    return TopicLook(name, topic.uuid, [leader_epoch(id) for id in ids])


def _described(
    context: Context, name: str | None, id: UUID | None, may_make: bool
) -> Generator[Pending[Any], Any, Any]:
    topics = context.broker.topics
    if id == offsets_topic.ID:
        name = offsets_topic.NAME
    elif name is None and id is not None:
        known = topics.by_id.get(id.bytes)
        name = None if known is None else known.name
    if name is None:
        return _no_topic(None, id, context.count(Code.UNKNOWN_TOPIC_ID))
    try:
        if may_make and name != offsets_topic.NAME:
            yield topics.ensure(name)
        return _shown(context, look_at(context, name))
    except MillstreamError as error:
        return _no_topic(name, None, context.code(error))


def _shown(context: Context, look: TopicLook) -> Any:
    Response = MetadataResponse.MetadataResponseTopic  # noqa: N806  a class
    Partition = Response.MetadataResponsePartition  # noqa: N806  a class
    node = [context.node_id]
    return Response(
        error_code=Code.NONE,
        name=look.name,
        topic_id=look.id,
        is_internal=look.is_internal,
        partitions=[
            Partition(
                error_code=Code.NONE,
                partition_index=number,
                leader_id=context.node_id,
                leader_epoch=epoch,
                replica_nodes=node,
                isr_nodes=node,
                offline_replicas=[],
            )
            for number, epoch in enumerate(look.epochs)
        ],
    )


def _no_topic(name: str | None, id: UUID | None, code: Code) -> Any:
    return MetadataResponse.MetadataResponseTopic(
        error_code=code, name=name, topic_id=id or NO_TOPIC_ID, is_internal=False, partitions=[]
    )


# ---- FindCoordinator


def find_coordinator(context: Context, call: Call, asked: Any) -> Any:
    key_type = asked.key_type if call.version >= 1 else GROUP
    code, message = Code.NONE, None
    if key_type == TRANSACTION:
        code = context.count(Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        message = "this broker has no transactions; produce without a transactional id"
    elif key_type not in (GROUP, SHARE):
        code = context.count(Code.INVALID_REQUEST)
        message = f"there are no coordinators of the type {key_type}"
    else:
        context.has_groups = True
    place = call.here
    is_found = code == Code.NONE
    where = {
        "node_id": context.node_id if is_found else -1,
        "host": place.host if is_found else "",
        "port": place.port if is_found else -1,
        "error_code": code,
        "error_message": message,
    }
    if call.version < 4:
        return FindCoordinatorResponse(throttle_time_ms=0, **where)
    One = FindCoordinatorResponse.Coordinator  # noqa: N806  a class
    return FindCoordinatorResponse(
        throttle_time_ms=0,
        coordinators=[One(key=key, **where) for key in asked.coordinator_keys],
    )


# ---- DescribeCluster


def describe_cluster(context: Context, call: Call, asked: Any) -> Any:
    if call.version >= 1 and asked.endpoint_type != BROKERS:
        return DescribeClusterResponse(
            error_code=context.count(Code.INVALID_REQUEST),
            error_message="controllers have no address of their own here; ask for brokers",
            cluster_id=context.cluster_id,
            controller_id=context.node_id,
            brokers=[],
        )
    place = call.here
    Broker = DescribeClusterResponse.DescribeClusterBroker  # noqa: N806  a class
    return DescribeClusterResponse(
        throttle_time_ms=0,
        error_code=Code.NONE,
        error_message=None,
        endpoint_type=BROKERS,
        cluster_id=context.cluster_id,
        controller_id=context.node_id,
        brokers=[Broker(broker_id=context.node_id, host=place.host, port=place.port, rack=None)],
    )
