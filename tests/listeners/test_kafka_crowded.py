"""Requests that have many items, or name one thing many times: bounded, and in between others are
served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import (
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
)
from kafka.protocol.admin.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    DescribeGroupsResponse,
)
from kafka.protocol.consumer import ListOffsetsRequest, ListOffsetsResponse
from kafka.protocol.consumer.group import OffsetFetchRequest, OffsetFetchResponse
from kafka.protocol.metadata import MetadataRequest, MetadataResponse
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from listeners.http_scene import run
from listeners.kafka_scene import ApiVersionsRequest, ApiVersionsResponse, Client, Scene
from millstream.listeners.kafka.apis import REQUEST_BYTES_MAX
from millstream.listeners.kafka.config_apis import DESCRIBED_MAX
from millstream.listeners.kafka.items import check_items
from millstream.listeners.kafka.sessions import SESSION_PARTITIONS_MAX, Session, Sessions
from millstream.listeners.kafka.topic_apis import MADE_MAX
from millstream.listeners.kafka.topic_ids import TopicIds
from millstream.wire.kafka import fetch as wire
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.frames import FIXED, SIZE
from millstream.wire.kafka.primitives import INT32, ITEMS_MAX, Cursor, RequestInvalid, varint

TOPIC = 2


async def asked(client: Client, message: Any, response: Any, version: int) -> Any:
    client.send(message, version)
    return (await client.answer(response, version))[1]


async def is_ended(scene: Scene, client: Client) -> bool:
    """Whether the connection, and no other, was ended by what it sent."""
    assert await client.frame() == b""
    return await (await scene.connect()).is_served()


# ---- how many


def produced(parts: int) -> Any:
    Topic = ProduceRequest.TopicProduceData  # noqa: N806  a class
    Part = Topic.PartitionProduceData  # noqa: N806  a class
    empty = [Part(index=number, records=None) for number in range(parts)]
    return ProduceRequest(
        transactional_id=None,
        acks=-1,
        timeout_ms=1000,
        topic_data=[Topic(name="t", partition_data=empty)],
    )


def test_a_request_read_by_hand_has_so_many_items_and_one_more_ends_its_connection() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            # The topic is one too.
            stored = await asked(client, produced(ITEMS_MAX - 1), ProduceResponse, 3)
            assert len(stored.responses[0].partition_responses) == ITEMS_MAX - 1
            client.send(produced(ITEMS_MAX), 3)
            assert await is_ended(scene, client)
            assert str(ITEMS_MAX) in scene.shared.complaint

    run(scenario())


def by_ids(count: int) -> Any:
    Topic = MetadataRequest.MetadataRequestTopic  # noqa: N806  a class
    return MetadataRequest(
        topics=[Topic(topic_id=UUID(int=1 + number), name=None) for number in range(count)],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=False,
    )


def test_a_request_of_a_schema_has_so_many_items_and_one_more_ends_its_connection() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            found = await asked(client, by_ids(ITEMS_MAX), MetadataResponse, 12)
            assert len(found.topics) == ITEMS_MAX
            assert {one.error_code for one in found.topics} == {Code.UNKNOWN_TOPIC_ID}
            client.send(by_ids(ITEMS_MAX + 1), 12)
            assert await is_ended(scene, client)
            assert str(ITEMS_MAX) in scene.shared.complaint

    run(scenario())


def test_tagged_fields_are_items() -> None:
    for count, is_read in ((ITEMS_MAX, True), (ITEMS_MAX + 1, False)):
        cursor = Cursor(varint(count) + b"\7\0" * count, flexible=True)
        if is_read:
            cursor.end()
        else:
            with pytest.raises(RequestInvalid):
                cursor.skip_tags()


def test_items_of_all_arrays_are_counted_together() -> None:
    half = INT32.pack(ITEMS_MAX // 2)
    cursor = Cursor(half * 3 + bytes(ITEMS_MAX), flexible=False)
    assert cursor.count(1) == cursor.count(1) == ITEMS_MAX // 2
    with pytest.raises(RequestInvalid):
        cursor.count(1)


@pytest.mark.parametrize(
    ("message", "versions"),
    [
        (by_ids(3), (10, 12)),
        (
            CreateTopicsRequest(
                topics=[
                    CreateTopicsRequest.CreatableTopic(
                        name="t",
                        num_partitions=-1,
                        replication_factor=-1,
                        assignments=[
                            CreateTopicsRequest.CreatableTopic.CreatableReplicaAssignment(
                                partition_index=0, broker_ids=[1, 2]
                            )
                        ],
                        configs=[
                            CreateTopicsRequest.CreatableTopic.CreatableTopicConfig(
                                name="a", value=None
                            )
                        ],
                    )
                ],
                timeout_ms=1,
                validate_only=True,
            ),
            (0, 7),
        ),
    ],
    ids=["metadata", "topics"],
)
def test_items_are_counted_by_the_schema_to_the_last_byte(
    message: Any, versions: tuple[int, int]
) -> None:
    for version in range(versions[0], versions[1] + 1):
        data = memoryview(bytes(message.encode(version=version)))
        check_items(type(message), data, version)
        with pytest.raises(RequestInvalid):
            check_items(type(message), data[:-1], version)


def test_a_request_without_batches_is_no_longer_than_it_may_be() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            head = FIXED.pack(12, 0, 0, 0)
            for size, is_read in ((REQUEST_BYTES_MAX, True), (REQUEST_BYTES_MAX + 1, False)):
                client = await scene.connect()
                body = bytes(size - len(head))
                client.writer.write(SIZE.pack(size) + head + body)
                # A heartbeat of zeroes says too little either way; what is told is why.
                assert await is_ended(scene, client)
                assert (str(REQUEST_BYTES_MAX) in scene.shared.complaint) is not is_read

    run(scenario())


def test_a_session_that_grew_past_what_may_be_asked_at_once_begins_anew() -> None:
    def grow(id: int, epoch: int, numbers: Iterable[int]) -> wire.Request:
        parts = [wire.Part(number, -1, 0, 100) for number in numbers]
        return wire.Request(0, 1, 100, id, epoch, [("t", parts)], [])

    for count, is_kept in ((SESSION_PARTITIONS_MAX, True), (SESSION_PARTITIONS_MAX + 1, False)):
        sessions = Sessions()
        session = sessions.of(grow(0, 0, range(1000)))
        assert isinstance(session, Session)
        grown = sessions.of(grow(session.id, 1, range(1000, count)))
        assert (grown is session) is is_kept
        assert len(sessions) == is_kept
        assert is_kept or grown is Code.FETCH_SESSION_ID_NOT_FOUND


# ---- one thing, many times


def configs_of(names: Iterable[str], keys: list[str] | None = None) -> Any:
    Resource = DescribeConfigsRequest.DescribeConfigsResource  # noqa: N806  a class
    return DescribeConfigsRequest(
        resources=[
            Resource(resource_type=TOPIC, resource_name=name, configuration_keys=keys)
            for name in names
        ],
        include_synonyms=True,
        include_documentation=True,
    )


def test_configs_of_a_topic_are_told_once() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            client.send(configs_of(["t"] * 15_000), 4)
            frame = await client.frame()
            assert len(frame) < 50_000
            found = await asked(
                client, configs_of(["t"], ["segment.ms"]), DescribeConfigsResponse, 4
            )
            assert [one.name for one in found.results[0].configs] == ["segment.ms"]

    run(scenario())


def test_the_configs_that_are_wanted_of_a_topic_are_put_together() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            message = configs_of(["t", "t"], ["segment.ms"])
            message.resources[1].configuration_keys = ["segment.bytes"]
            found = await asked(client, message, DescribeConfigsResponse, 4)
            (one,) = found.results
            assert [config.name for config in one.configs] == ["segment.bytes", "segment.ms"]

    run(scenario())


def test_so_many_resources_are_described_at_once_and_no_more() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for count, code in (
                (DESCRIBED_MAX, Code.UNKNOWN_TOPIC_OR_PARTITION),
                (DESCRIBED_MAX + 1, Code.INVALID_REQUEST),
            ):
                names = [f"none-{number}" for number in range(count)]
                found = await asked(client, configs_of(names), DescribeConfigsResponse, 4)
                assert len(found.results) == count
                assert {one.error_code for one in found.results} == {code}

    run(scenario())


def made(names: Iterable[str]) -> Any:
    Topic = CreateTopicsRequest.CreatableTopic  # noqa: N806  a class
    return CreateTopicsRequest(
        topics=[
            Topic(name=name, num_partitions=0, replication_factor=1, assignments=[], configs=[])
            for name in names
        ],
        timeout_ms=1000,
        validate_only=False,
    )


def test_so_many_topics_are_made_at_once_and_no_more() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            for count, code in (
                (MADE_MAX, Code.INVALID_PARTITIONS),
                (MADE_MAX + 1, Code.INVALID_REQUEST),
            ):
                names = [f"new-{number}" for number in range(count)]
                found = await asked(client, made(names), CreateTopicsResponse, 5)
                assert {one.error_code for one in found.topics} == {code}
            twice = await asked(client, made(["a", "b", "a"]), CreateTopicsResponse, 5)
            codes = [Code(one.error_code).name for one in twice.topics]
            assert codes == ["INVALID_REQUEST", "INVALID_PARTITIONS", "INVALID_REQUEST"]

    run(scenario())


def test_a_group_is_described_once() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            message = DescribeGroupsRequest(
                groups=["a"] * 1000 + ["b"], include_authorized_operations=False
            )
            found = await asked(client, message, DescribeGroupsResponse, 5)
            assert [one.group_id for one in found.groups] == ["a", "b"]

    run(scenario())


def test_all_offsets_of_a_group_are_told_once() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            Group = OffsetFetchRequest.OffsetFetchRequestGroup  # noqa: N806  a class
            Topic = Group.OffsetFetchRequestTopics  # noqa: N806  a class
            some = Group(group_id="a", topics=[Topic(name="t", partition_indexes=[0])])
            groups = [Group(group_id="a", topics=None)] * 1000 + [some, some]
            message = OffsetFetchRequest(groups=groups, require_stable=False)
            found = await asked(client, message, OffsetFetchResponse, 8)
            assert [len(one.topics) for one in found.groups] == [0, 1, 1]

    run(scenario())


def test_a_partition_that_is_asked_for_twice_has_no_offset() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client = await scene.connect()
            await scene.broker.topics.create("many", 2)
            Topic = ListOffsetsRequest.ListOffsetsTopic  # noqa: N806  a class
            Part = Topic.ListOffsetsPartition  # noqa: N806  a class
            parts = [
                Part(partition_index=number, current_leader_epoch=-1, timestamp=-3)
                for number in (0, 1, 0)
            ]
            message = ListOffsetsRequest(
                replica_id=-1, isolation_level=0, topics=[Topic(name="many", partitions=parts)]
            )
            found = await asked(client, message, ListOffsetsResponse, 7)
            codes = [Code(one.error_code).name for one in found.topics[0].partitions]
            assert codes == ["INVALID_REQUEST", "NONE", "INVALID_REQUEST"]

    run(scenario())


# ---- topics by id


def test_topics_are_known_by_their_ids_as_they_are_now() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            topics = scene.broker.topics
            ids = TopicIds(topics)
            first = topics.get("t")
            assert ids.find(first.uuid.bytes) is first
            grown = await topics.add_partitions("t", 3)
            altered = await topics.alter("t", {"compact": True})
            assert ids.find(first.uuid.bytes) is altered
            assert altered.partitions == grown.partitions == 3
            client = await scene.connect()
            Topic = DeleteTopicsRequest.DeleteTopicState  # noqa: N806  a class
            wanted = [Topic(name=None, topic_id=id) for id in (first.uuid, UUID(int=5))]
            message = DeleteTopicsRequest(topics=wanted, topic_names=[], timeout_ms=1000)
            gone = await asked(client, message, DeleteTopicsResponse, 6)
            codes = [Code(one.error_code).name for one in gone.responses]
            assert codes == ["NONE", "UNKNOWN_TOPIC_ID"]
            assert ids.find(first.uuid.bytes) is None
            again = await topics.create("t", 1)
            assert ids.find(first.uuid.bytes) is None
            assert ids.find(again.uuid.bytes) is again

    run(scenario())


class Unsearched(dict[str, Any]):
    """Topics that nobody may go through one by one."""

    def items(self) -> Any:
        raise AssertionError("all topics were gone through")

    values = items


def test_an_id_that_is_not_known_costs_as_little_as_one_that_is() -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            topics = scene.broker.topics
            topics.by_name = Unsearched(topics.by_name)
            owned = [(number.to_bytes(16, "big"), (0,)) for number in range(1, 20_000)]
            assert TopicIds(topics).partitions(owned) == []
            client = await scene.connect()
            found = await asked(client, by_ids(10), MetadataResponse, 12)
            assert len(found.topics) == 10

    run(scenario())


# ---- others meanwhile


def groups_gone(count: int) -> tuple[Any, int]:
    names = [f"g-{number}" for number in range(count)]
    return DeleteGroupsRequest(groups_names=names), 2


@pytest.mark.parametrize(
    ("message", "version"),
    [
        pytest.param(by_ids(5000), 12, id="metadata"),
        pytest.param(configs_of([f"none-{number}" for number in range(1000)]), 4, id="configs"),
        pytest.param(made([f"new-{number}" for number in range(1000)]), 5, id="topics"),
        pytest.param(*groups_gone(5000), id="groups"),
    ],
)
def test_others_are_served_while_a_long_request_is(message: Any, version: int) -> None:
    async def scenario() -> None:
        async with Scene() as scene:
            client, other = await scene.connect(), await scene.connect()
            order: list[str] = []

            async def long() -> None:
                client.send(message, version)
                assert await client.frame()
                order.append("long")

            async def short() -> None:
                while not scene.shared.buffer_bytes:  # noqa: ASYNC110  in the very next turn
                    await asyncio.sleep(0)
                other.send(ApiVersionsRequest(), 0)
                await other.answer(ApiVersionsResponse, 0)
                order.append("short")

            await asyncio.gather(long(), short())
            assert order == ["short", "long"]

    run(scenario())
