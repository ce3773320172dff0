"""Topics in pages, what has configs, and who keeps the metadata: every version of each message,
asked with kio and heard by kio and by kafka-python."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from kafka.protocol import admin
from kio.static.primitive import i8, i32

from listeners.kafka.group_scene import Scene
from millstream.listeners.kafka.describe_apis import PAGE_PARTITIONS_MAX
from millstream.wire.kafka.codes import Code

VERSIONS = {"describe_topic_partitions": [0], "list_config_resources": [0, 1]}
VERSIONS |= {"describe_quorum": [0, 1, 2]}
OFFSETS = "__consumer_offsets"


def asked(scene: Scene, api: str, version: int, **fields: Any) -> tuple[Any, dict[str, Any]]:
    """As kio reads the answer, and as kafka-python does."""
    under_way = scene.start(api, version, **fields)
    theirs = getattr(admin, f"{''.join(part.capitalize() for part in api.split('_'))}Response")
    return under_way.answer(), theirs.decode(under_way.data, version=version).to_dict()


def test_every_version_that_is_advertised_is_tested() -> None:
    scene = Scene()
    assert {api: list(scene.versions(api)) for api in VERSIONS} == VERSIONS


# ---- DescribeTopicPartitions


def page(
    scene: Scene, *names: str, limit: int = 100, at: tuple[str, int] | None = None
) -> tuple[list[tuple[str, str, list[int]]], tuple[str, int] | None]:
    """Topics with what was wrong and their partitions, and where the next page begins."""
    schema = importlib.import_module("kio.schema.describe_topic_partitions.v0.request")
    cursor = None
    if at is not None:
        cursor = schema.Cursor(topic_name=at[0], partition_index=i32(at[1]))
    ours, theirs = asked(
        scene,
        "describe_topic_partitions",
        0,
        topics=[("TopicRequest", {"name": name}) for name in names],
        response_partition_limit=i32(limit),
        cursor=cursor,
    )
    found = [
        (
            one.name,
            Code(int(one.error_code.value)).name,
            [int(part.partition_index) for part in one.partitions],
        )
        for one in ours.topics
    ]
    assert [
        (
            one["name"],
            Code(one["error_code"]).name,
            [part["partition_index"] for part in one["partitions"]],
        )
        for one in theirs["topics"]
    ] == found
    return found, ours.next_cursor and (
        ours.next_cursor.topic_name,
        int(ours.next_cursor.partition_index),
    )


def scene_of(**topics: int) -> Scene:
    """With `orders`, of 4 partitions, and others."""
    scene = Scene()
    for name, partitions in topics.items():
        scene.house.done(scene.house.broker.topics.create(name, partitions))
    return scene


def test_topics_come_by_name_with_their_partitions() -> None:
    scene = scene_of(bills=2)
    assert page(scene, "orders", "bills", "orders") == (
        [("bills", "NONE", [0, 1]), ("orders", "NONE", [0, 1, 2, 3])],
        None,
    )


def test_a_partition_is_on_this_broker_and_led_by_it() -> None:
    scene = scene_of()
    ours, theirs = asked(
        scene,
        "describe_topic_partitions",
        0,
        topics=[("TopicRequest", {"name": "orders"})],
        response_partition_limit=i32(1),
        cursor=None,
    )
    [topic] = ours.topics
    [part] = topic.partitions
    assert topic.topic_id == scene.house.broker.topics.get("orders").uuid
    assert not topic.is_internal
    assert (part.leader_id, part.replica_nodes, part.isr_nodes) == (1, (1,), (1,))
    assert theirs["topics"][0]["partitions"][0]["leader_epoch"] == part.leader_epoch >= 0
    assert (part.eligible_leader_replicas, part.last_known_elr) == ((), ())


def test_pages_go_on_where_the_one_before_ended() -> None:
    scene = scene_of(bills=2)
    pages, at = [], None
    while True:
        found, at = page(scene, "bills", "orders", limit=3, at=at)
        pages.append(found)
        if at is None:
            break
    assert pages == [
        [("bills", "NONE", [0, 1]), ("orders", "NONE", [0])],
        [("orders", "NONE", [1, 2, 3])],
    ]
    # A page that is full with a topic says that the next begins with another.
    assert page(scene, "bills", "orders", limit=2)[1] == ("orders", 0)


def test_without_names_all_topics_come_in_pages() -> None:
    scene = scene_of(bills=1)
    assert page(scene) == ([("bills", "NONE", [0]), ("orders", "NONE", [0, 1, 2, 3])], None)
    assert page(scene, limit=1) == ([("bills", "NONE", [0])], ("orders", 0))
    # Of a topic that is gone since, the next begins with the one after it.
    assert page(scene, at=("c", 5))[0] == [("orders", "NONE", [0, 1, 2, 3])]
    scene.ask("find_coordinator", 3, key="g", key_type=i8(0))
    assert [name for name, *_ in page(scene)[0]] == [OFFSETS, "bills", "orders"]


def test_a_page_has_at_least_one_partition_and_never_too_many() -> None:
    scene = scene_of()
    assert page(scene, "orders", limit=0) == ([("orders", "NONE", [0])], ("orders", 1))
    assert PAGE_PARTITIONS_MAX == 2000
    for number in range(3):
        scene.house.done(scene.house.broker.topics.create(f"wide-{number}", 900))
    found, at = page(scene, limit=10**6)
    assert sum(len(partitions) for *_, partitions in found) == PAGE_PARTITIONS_MAX
    assert at == ("wide-2", 196)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("none", "UNKNOWN_TOPIC_OR_PARTITION"),
        ("no topic", "INVALID_TOPIC_EXCEPTION"),
        ("__topics", "TOPIC_AUTHORIZATION_FAILED"),
    ],
)
def test_a_topic_that_is_not_there_has_its_own_error(name: str, code: str) -> None:
    found, at = page(scene_of(), name, "orders")
    assert {one: error for one, error, _ in found} == {name: code, "orders": "NONE"}
    assert at is None


@pytest.mark.parametrize("at", [("elsewhere", 0), ("orders", -1)])
def test_a_cursor_that_cannot_be_is_refused(at: tuple[str, int]) -> None:
    assert page(scene_of(), "orders", at=at) == ([("orders", "INVALID_REQUEST", [])], None)


# ---- ListConfigResources


def resources(scene: Scene, version: int, *kinds: int) -> tuple[str, list[tuple[str, int]]]:
    fields = {"resource_types": tuple(i8(one) for one in kinds)}
    ours, theirs = asked(scene, "list_config_resources", version, **fields)
    found = [
        (one.resource_name, int(getattr(one, "resource_type", 16))) for one in ours.config_resources
    ]
    assert [
        (one["resource_name"], one.get("resource_type", 16)) for one in theirs["config_resources"]
    ] == found
    return Code(int(ours.error_code.value)).name, found


def test_topics_and_the_broker_have_configs() -> None:
    scene = scene_of(bills=1)
    every = [("bills", 2), ("orders", 2), ("1", 4)]
    assert resources(scene, 1) == ("NONE", every)
    assert resources(scene, 1, 4) == ("NONE", every[2:])
    assert resources(scene, 1, 32, 2) == ("NONE", every[:2])
    assert resources(scene, 1, 8, 16, 32) == ("NONE", [])
    assert resources(scene, 1, 2, 5) == ("UNSUPPORTED_VERSION", [])


def test_the_first_version_asks_for_metrics_of_clients_of_which_there_are_none() -> None:
    assert resources(scene_of(), 0) == ("NONE", [])


# ---- DescribeQuorum


@pytest.mark.parametrize("version", VERSIONS["describe_quorum"])
def test_this_broker_keeps_the_metadata_alone(version: int) -> None:
    scene = scene_of()

    def look() -> tuple[Any, dict[str, Any]]:
        part = ("PartitionData", {"partition_index": i32(0)})
        topic = ("TopicData", {"topic_name": "__cluster_metadata", "partitions": [part]})
        return asked(scene, "describe_quorum", version, topics=[topic])

    ours, theirs = look()
    assert ours.error_code.value == 0
    [topic] = ours.topics
    [part] = topic.partitions
    assert (topic.topic_name, part.partition_index) == ("__cluster_metadata", 0)
    assert (part.error_code.value, part.leader_id, part.observers) == (0, 1, ())
    [voter] = part.current_voters
    assert (voter.replica_id, voter.log_end_offset) == (1, part.high_watermark)
    if version >= 2:
        [node] = theirs["nodes"]
        assert node["node_id"] == 1
        assert node["listeners"] == [{"name": "CONTROLLER", "host": "h", "port": 1}]
    scene.house.done(scene.house.broker.topics.create("more", 1))
    grown = look()[0].topics[0].partitions[0]
    assert grown.high_watermark > part.high_watermark
    assert grown.leader_epoch == part.leader_epoch >= 0


@pytest.mark.parametrize("version", VERSIONS["describe_quorum"])
def test_nothing_else_has_voters(version: int) -> None:
    scene = scene_of()
    numbers = [("PartitionData", {"partition_index": i32(number)}) for number in (0, 1)]
    topics = [
        ("TopicData", {"topic_name": "orders", "partitions": numbers[:1]}),
        ("TopicData", {"topic_name": "__cluster_metadata", "partitions": numbers[1:]}),
    ]
    ours, theirs = asked(scene, "describe_quorum", version, topics=topics)
    for topic in ours.topics:
        [part] = topic.partitions
        assert Code(int(part.error_code.value)).name == "UNKNOWN_TOPIC_OR_PARTITION"
        assert (part.leader_id, part.current_voters) == (-1, ())
    assert [one["topic_name"] for one in theirs["topics"]] == ["orders", "__cluster_metadata"]
    assert scene.counts.errors["UNKNOWN_TOPIC_OR_PARTITION"] == 2
