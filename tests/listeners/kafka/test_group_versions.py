"""Every version of every message about groups, from a request of kio's to an answer that kio
reads, with what was good and with what was wrong."""

from __future__ import annotations

import datetime as dt
from typing import Any
from uuid import UUID

import pytest
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64, i64Timedelta

from broker.kafka_members import FORMING_S, assignment, pass_time, subscription
from broker.leasing import publish
from listeners.kafka.group_scene import Asked, Scene
from millstream.broker.group_values import Commit
from millstream.log import batch as batches
from millstream.wire.kafka.codes import Code


def ms(number: int) -> i32Timedelta:
    return i32Timedelta.parse(dt.timedelta(milliseconds=number))


def versions(api: str) -> range:
    return Scene().versions(api)


def code(answer: Any) -> str:
    """Kafka's name of what was wrong."""
    return Code(int(answer.error_code.value)).name


def start_join(scene: Scene, version: int, member_id: str = "", **changes: Any) -> Asked:
    fields: dict[str, Any] = {
        "group_id": "g",
        "session_timeout": ms(10_000),
        "rebalance_timeout": ms(30_000),
        "member_id": member_id,
        "group_instance_id": None,
        "protocol_type": "consumer",
        "protocols": [
            ("JoinGroupRequestProtocol", {"name": "range", "metadata": subscription("orders")})
        ],
        "reason": None,
    }
    return scene.start("join_group", version, **(fields | changes))


def join(scene: Scene, version: int, **changes: Any) -> Any:
    """As clients do: with the id that they are given first, in newer versions."""
    asked = start_join(scene, version, **changes)
    if not asked.is_waiting:
        refusal = asked.answer()
        assert code(refusal) == "MEMBER_ID_REQUIRED"
        assert version >= 4
        asked = start_join(scene, version, refusal.member_id, **changes)
    pass_time(scene.house, FORMING_S * 2.5)
    return asked.answer()


def sync(scene: Scene, version: int, member_id: str, generation: int, *parts: int) -> Any:
    assigned = {"member_id": member_id, "assignment": assignment("orders", *parts)}
    return scene.ask(
        "sync_group",
        version,
        group_id="g",
        generation_id=i32(generation),
        member_id=member_id,
        group_instance_id=None,
        protocol_type="consumer",
        protocol_name="range",
        assignments=[("SyncGroupRequestAssignment", assigned)],
    )


def settled(scene: Scene) -> str:
    """One member with all partitions; its id."""
    joined = join(scene, 5)
    sync(scene, 3, joined.member_id, joined.generation_id, 0, 1, 2, 3)
    return str(joined.member_id)


@pytest.mark.parametrize("version", versions("join_group"))
def test_a_member_joins(version: int) -> None:
    scene = Scene()
    joined = join(scene, version)
    assert (code(joined), joined.generation_id, joined.protocol_name) == ("NONE", 1, "range")
    assert joined.leader == joined.member_id
    assert joined.member_id.startswith("client-")
    assert [one.metadata for one in joined.members] == [subscription("orders")]
    if version >= 7:
        assert joined.protocol_type == "consumer"


@pytest.mark.parametrize("version", versions("join_group"))
@pytest.mark.parametrize(
    ("member_id", "changes", "expected"),
    [
        ("", {"session_timeout": ms(1)}, "INVALID_SESSION_TIMEOUT"),
        ("", {"group_id": "a b"}, "INVALID_GROUP_ID"),
        ("", {"protocol_type": ""}, "INCONSISTENT_GROUP_PROTOCOL"),
        ("made-up", {}, "UNKNOWN_MEMBER_ID"),
    ],
)
def test_what_is_wrong_with_a_join_is_said(
    version: int, member_id: str, changes: dict[str, Any], expected: str
) -> None:
    scene = Scene()
    answer = start_join(scene, version, member_id, **changes).answer()
    assert (code(answer), answer.generation_id, answer.member_id) == (expected, -1, member_id)
    assert scene.counts.errors == {expected: 1}


def test_a_static_leader_that_comes_back_may_skip_dealing_out() -> None:
    scene = Scene()
    joined = join(scene, 9, group_instance_id="one")
    sync(scene, 5, joined.member_id, 1, 0)
    again = start_join(scene, 9, group_instance_id="one").answer()
    assert (code(again), again.skip_assignment, again.leader) == ("NONE", True, again.member_id)


@pytest.mark.parametrize("version", versions("sync_group"))
def test_a_member_gets_its_part(version: int) -> None:
    scene = Scene()
    joined = join(scene, 5)
    synced = sync(scene, version, joined.member_id, 1, 2, 3)
    assert (code(synced), synced.assignment) == ("NONE", assignment("orders", 2, 3))
    if version >= 5:
        assert (synced.protocol_type, synced.protocol_name) == ("consumer", "range")
    assert code(sync(scene, version, joined.member_id, 9)) == "ILLEGAL_GENERATION"
    assert code(sync(scene, version, "made-up", 1)) == "UNKNOWN_MEMBER_ID"


def beat(scene: Scene, version: int, member_id: str, generation: int = 1) -> str:
    answer = scene.ask(
        "heartbeat",
        version,
        group_id="g",
        generation_id=i32(generation),
        member_id=member_id,
        group_instance_id=None,
    )
    return code(answer)


@pytest.mark.parametrize("version", versions("heartbeat"))
def test_a_member_that_lives_is_told_what_to_do(version: int) -> None:
    scene = Scene()
    member_id = settled(scene)
    assert beat(scene, version, member_id) == "NONE"
    assert beat(scene, version, member_id, 7) == "ILLEGAL_GENERATION"
    assert beat(scene, version, "made-up") == "UNKNOWN_MEMBER_ID"
    start_join(scene, 3)
    assert beat(scene, version, member_id) == "REBALANCE_IN_PROGRESS"


@pytest.mark.parametrize("version", versions("leave_group"))
def test_members_leave(version: int) -> None:
    scene = Scene()
    member_id = settled(scene)
    leaving = [
        ("MemberIdentity", {"member_id": one, "group_instance_id": None, "reason": None})
        for one in (member_id, "made-up")
    ]
    answer = scene.ask("leave_group", version, group_id="g", member_id=member_id, members=leaving)
    assert code(answer) == "NONE"
    if version >= 3:
        assert [code(one) for one in answer.members] == ["NONE", "UNKNOWN_MEMBER_ID"]
    assert beat(scene, 0, member_id) == "UNKNOWN_MEMBER_ID"
    if version < 3:
        again = scene.ask("leave_group", version, group_id="g", member_id=member_id)
        assert code(again) == "UNKNOWN_MEMBER_ID"


@pytest.mark.parametrize("version", versions("describe_groups"))
def test_groups_are_described(version: int) -> None:
    scene = Scene()
    member_id = settled(scene)
    scene.house.done(scene.house.broker.group_offsets.write("idle", [Commit("orders", 0, 0)]))
    answer = scene.ask(
        "describe_groups",
        version,
        groups=("g", "idle", "unknown", "a b"),
        include_authorized_operations=True,
    )
    one, idle, unknown, unnamed = answer.groups
    assert (code(one), one.group_state, one.protocol_type, one.protocol_data) == (
        "NONE",
        "Stable",
        "consumer",
        "range",
    )
    (member,) = one.members
    assert (member.member_id, member.client_id, member.client_host) == (
        member_id,
        "client",
        "127.0.0.1:5",
    )
    assert member.member_assignment == assignment("orders", 0, 1, 2, 3)
    assert (code(idle), idle.group_state, idle.members) == ("NONE", "Empty", ())
    assert code(unknown) == ("GROUP_ID_NOT_FOUND" if version >= 6 else "NONE")
    assert unknown.group_state == "Dead"
    assert code(unnamed) == "INVALID_GROUP_ID"


@pytest.mark.parametrize("version", versions("list_groups"))
def test_groups_are_listed(version: int) -> None:
    scene = Scene()
    settled(scene)
    scene.house.done(scene.house.broker.group_offsets.write("idle", [Commit("orders", 0, 0)]))
    answer = scene.ask("list_groups", version, states_filter=(), types_filter=())
    assert [(one.group_id, one.protocol_type) for one in answer.groups] == [
        ("g", "consumer"),
        ("idle", "consumer"),
    ]
    if version >= 4:
        answer = scene.ask("list_groups", version, states_filter=("Stable",), types_filter=())
        assert [(one.group_id, one.group_state) for one in answer.groups] == [("g", "Stable")]
    if version >= 5:
        answer = scene.ask("list_groups", version, states_filter=(), types_filter=("Share",))
        assert answer.groups == ()


@pytest.mark.parametrize("version", versions("delete_groups"))
def test_groups_are_deleted(version: int) -> None:
    scene = Scene()
    settled(scene)
    scene.house.done(scene.house.broker.group_offsets.write("idle", [Commit("orders", 0, 0)]))
    answer = scene.ask("delete_groups", version, groups_names=("g", "idle", "unknown"))
    assert [code(one) for one in answer.results] == [
        "NON_EMPTY_GROUP",
        "NONE",
        "GROUP_ID_NOT_FOUND",
    ]


def test_offsets_are_deleted_where_nobody_reads() -> None:
    scene = Scene()
    house = scene.house
    house.done(house.broker.topics.create("old", 1))
    settled(scene)
    kept = [Commit("orders", 0, 0), Commit("old", 0, 0)]
    house.done(house.broker.group_offsets.write("g", kept))

    def delete(group: str) -> Any:
        part = ("OffsetDeleteRequestPartition", {"partition_index": i32(0)})
        topics = [
            ("OffsetDeleteRequestTopic", {"name": name, "partitions": [part]})
            for name in ("orders", "old", "unknown")
        ]
        return scene.ask("offset_delete", 0, group_id=group, topics=topics)

    answer = delete("g")
    assert code(answer) == "NONE"
    assert [code(topic.partitions[0]) for topic in answer.topics] == [
        "GROUP_SUBSCRIBED_TO_TOPIC",
        "NONE",
        "UNKNOWN_TOPIC_OR_PARTITION",
    ]
    left = house.done(house.broker.group_offsets.committed("g"))
    assert [one.topic for one in left] == ["orders"]
    assert code(delete("unknown")) == "GROUP_ID_NOT_FOUND"


# ---- committed offsets


def commit(scene: Scene, version: int, *, member_id: str = "", generation: int = -1) -> list[str]:
    parts = [
        (
            "OffsetCommitRequestPartition",
            {
                "partition_index": i32(number),
                "committed_offset": i64(offset),
                "committed_leader_epoch": i32(epoch),
                "committed_metadata": metadata,
            },
        )
        for number, offset, metadata, epoch in (
            (0, 5, "note", 3),
            (1, 6, None, -1),
            (9, 1, "", 0),
            (2, 1, "x" * 4097, 0),
        )
    ]
    answer = scene.ask(
        "offset_commit",
        version,
        group_id="g",
        generation_id_or_member_epoch=i32(generation),
        member_id=member_id,
        group_instance_id=None,
        retention_time=i64Timedelta.parse(dt.timedelta(0)),
        topics=[("OffsetCommitRequestTopic", {"name": "orders", "partitions": parts})],
    )
    return [code(one) for one in answer.topics[0].partitions]


def fetch_offsets(scene: Scene, version: int, **by: Any) -> Any:
    name = "OffsetFetchRequestTopics" if version >= 8 else "OffsetFetchRequestTopic"
    topics = [(name, {"name": "orders", "partition_indexes": (i32(0), i32(1), i32(3))})]
    group = {"group_id": "g", "topics": topics, "member_id": None, "member_epoch": i32(-1)} | by
    answer = scene.ask(
        "offset_fetch",
        version,
        **group,
        groups=[("OffsetFetchRequestGroup", group)],
        require_stable=False,
    )
    return answer.groups[0] if version >= 8 else answer


@pytest.mark.parametrize("version", versions("offset_commit"))
def test_a_commit_does_what_it_can_and_says_of_each_partition_what_was_wrong(version: int) -> None:
    scene = Scene()
    good = ["NONE", "NONE", "UNKNOWN_TOPIC_OR_PARTITION", "OFFSET_METADATA_TOO_LARGE"]
    assert commit(scene, version) == good
    kept = scene.house.done(scene.house.broker.group_offsets.committed("g"))
    assert [(one.partition, one.offset, one.metadata) for one in kept] == [
        (0, 5, "note"),
        (1, 6, ""),
    ]
    member_id = settled(scene)
    refused = commit(scene, version, member_id=member_id, generation=9)
    assert set(refused) == {"ILLEGAL_GENERATION"}
    assert commit(scene, version, member_id=member_id, generation=1) == good
    assert set(commit(scene, version)) == {"UNKNOWN_MEMBER_ID"}
    start_join(scene, 3)
    assert commit(scene, version, member_id=member_id, generation=1) == good


@pytest.mark.parametrize("version", versions("offset_fetch"))
def test_offsets_are_found(version: int) -> None:
    scene = Scene()
    commit(scene, 6)
    found = fetch_offsets(scene, version)
    parts = [
        (one.partition_index, one.committed_offset, one.metadata)
        for one in found.topics[0].partitions
    ]
    assert parts == [(0, 5, "note"), (1, 6, ""), (3, -1, "")]
    if version >= 2:
        everything = fetch_offsets(scene, version, topics=None)
        assert [one.partition_index for one in everything.topics[0].partitions] == [0, 1]
        assert code(fetch_offsets(scene, version, group_id="a b")) == "INVALID_GROUP_ID"
    else:
        refused = fetch_offsets(scene, version, group_id="a b")
        assert {code(one) for one in refused.topics[0].partitions} == {"INVALID_GROUP_ID"}
    if version >= 5:
        epochs = [int(one.committed_leader_epoch) for one in found.topics[0].partitions]
        assert epochs == [3, -1, -1]
    unknown = fetch_offsets(scene, version, group_id="unknown")
    assert [one.committed_offset for one in unknown.topics[0].partitions] == [-1, -1, -1]


# ---- the consumer protocol


def consumer_beat(scene: Scene, version: int, epoch: int, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": i32(epoch),
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": ms(10_000),
        "subscribed_topic_names": ("orders",) if epoch == 0 else None,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": None,
    }
    return scene.ask("consumer_group_heartbeat", version, **(fields | changes))


@pytest.mark.parametrize("version", versions("consumer_group_heartbeat"))
def test_a_consumer_joins_commits_and_leaves(version: int) -> None:
    scene = Scene()
    topic = scene.house.broker.topics.get("orders")
    joined = consumer_beat(scene, version, 0)
    (part,) = joined.assignment.topic_partitions
    assert (code(joined), part.topic_id, part.partitions) == ("NONE", topic.uuid, (0, 1, 2, 3))
    epoch = int(joined.member_epoch)
    assert consumer_beat(scene, version, epoch).assignment is None
    assert code(consumer_beat(scene, version, epoch + 1)) == "FENCED_MEMBER_EPOCH"
    assert code(consumer_beat(scene, version, 3, member_id="other")) == "UNKNOWN_MEMBER_ID"
    assert code(consumer_beat(scene, version, 0, server_assignor="x")) == "UNSUPPORTED_ASSIGNOR"
    assert commit(scene, 9, member_id="m", generation=epoch)[:2] == ["NONE", "NONE"]
    assert commit(scene, 9, member_id="m", generation=epoch + 1)[0] == "STALE_MEMBER_EPOCH"
    # Clients of older versions would not know what a stale epoch is.
    for generation in (epoch, epoch + 1):
        assert commit(scene, 8, member_id="m", generation=generation)[0] == "UNSUPPORTED_VERSION"
    assert commit(scene, 8, member_id="other", generation=epoch)[0] == "UNKNOWN_MEMBER_ID"
    by = {"member_id": "m", "member_epoch": i32(epoch)}
    assert fetch_offsets(scene, 9, **by).topics[0].partitions[0].committed_offset == 5
    by["member_epoch"] = i32(epoch + 1)
    assert code(fetch_offsets(scene, 9, **by)) == "STALE_MEMBER_EPOCH"
    assert consumer_beat(scene, version, -1).member_epoch == -1
    assert code(consumer_beat(scene, version, epoch)) == "UNKNOWN_MEMBER_ID"


@pytest.mark.parametrize("version", versions("consumer_group_describe"))
def test_groups_of_the_consumer_protocol_are_described(version: int) -> None:
    scene = Scene()
    consumer_beat(scene, 1, 0)
    answer = scene.ask(
        "consumer_group_describe",
        version,
        group_ids=("g", "unknown"),
        include_authorized_operations=False,
    )
    one, unknown = answer.groups
    assert (code(one), one.group_state, one.assignor_name) == ("NONE", "Stable", "uniform")
    assert one.members[0].assignment.topic_partitions[0].topic_name == "orders"
    assert code(unknown) == "GROUP_ID_NOT_FOUND"


# ---- share groups


def share_beat(scene: Scene, epoch: int, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": i32(epoch),
        "rack_id": None,
        "subscribed_topic_names": ("orders",) if epoch == 0 else None,
    }
    return scene.ask("share_group_heartbeat", 1, **(fields | changes))


def start_fetch(
    scene: Scene, version: int, epoch: int, *acknowledged: tuple[int, int], **changes: Any
) -> Asked:
    topic = scene.house.broker.topics.get("orders")
    acks = [_ack(offset, kind) for offset, kind in acknowledged]
    part = ("FetchPartition", {"partition_index": i32(0), "acknowledgement_batches": acks})
    fields: dict[str, Any] = {
        "group_id": "g",
        "member_id": "m",
        "share_session_epoch": i32(epoch),
        "max_wait": ms(0),
        "min_bytes": i32(1),
        "max_bytes": i32(1 << 20),
        "max_records": i32(100),
        "batch_size": i32(100),
        "share_acquire_mode": i8(0),
        "is_renew_ack": False,
        "topics": [("FetchTopic", {"topic_id": topic.uuid, "partitions": [part]})],
        "forgotten_topics_data": [],
    }
    return scene.start("share_fetch", version, **(fields | changes))


def _ack(offset: int, kind: int) -> tuple[str, dict[str, Any]]:
    fields = {"first_offset": i64(offset), "last_offset": i64(offset)}
    return "AcknowledgementBatch", fields | {"acknowledge_types": (i8(kind),)}


@pytest.mark.parametrize("version", versions("share_fetch"))
def test_a_share_gets_batches_of_just_its_records(version: int) -> None:
    scene = Scene()
    publish(scene.house, "a", "b", "c", topic="orders")
    topic = scene.house.broker.topics.get("orders")
    joined = share_beat(scene, 0)
    assert joined.assignment.topic_partitions[0].topic_id == topic.uuid
    fetched = start_fetch(scene, version, 0).answer()
    (part,) = fetched.responses[0].partitions
    assert fetched.acquisition_lock_timeout == ms(topic.settings.visibility_ms)
    records = batches.decode(bytes(part.records))
    assert [(one.offset, one.value) for one in records] == [(0, b"a"), (1, b"b"), (2, b"c")]
    given = [
        (one.first_offset, one.last_offset, one.delivery_count) for one in part.acquired_records
    ]
    assert given == [(0, 2, 1)]
    acked = start_fetch(scene, version, 1, (1, 1), (7, 1)).answer()
    (part,) = acked.responses[0].partitions
    assert part.acknowledge_error_code == i16(Code.INVALID_RECORD_STATE)
    assert code(start_fetch(scene, version, 1).answer()) == "INVALID_SHARE_SESSION_EPOCH"
    assert code(start_fetch(scene, version, 5, member_id="x").answer()) == "SHARE_SESSION_NOT_FOUND"
    assert code(start_fetch(scene, version, 0, (1, 1)).answer()) == "INVALID_REQUEST"


def test_a_share_is_told_how_long_its_group_says_that_leases_are() -> None:
    scene = Scene()
    publish(scene.house, "a", topic="orders")
    share_beat(scene, 0)
    scene.house.done(scene.house.broker.groups.alter("g", {"visibility_ms": "90s"}))
    fetched = start_fetch(scene, versions("share_fetch")[-1], 0).answer()
    assert fetched.acquisition_lock_timeout == ms(90_000)
    (lease,) = scene.house.broker.delivery.leases("g")
    assert lease.when_ms == scene.house.scheduler.clock.now_ms + 90_000


def test_a_fetch_of_a_share_that_may_not_wait_longer_is_answered() -> None:
    scene = Scene()
    share_beat(scene, 0)
    asked = start_fetch(scene, 1, 0, max_wait=ms(5000))
    assert asked.is_waiting
    asked.call.hurry()
    assert asked.answer().responses == ()


def test_topics_and_partitions_that_are_not_there_are_said() -> None:
    scene = Scene()
    share_beat(scene, 0)
    bare = ("FetchPartition", {"partition_index": i32(9), "acknowledgement_batches": []})
    topic = scene.house.broker.topics.get("orders")
    topics = [
        ("FetchTopic", {"topic_id": one, "partitions": [bare]}) for one in (topic.uuid, UUID(int=3))
    ]
    answer = start_fetch(scene, 1, 0, topics=topics).answer()
    assert [code(one.partitions[0]) for one in answer.responses] == [
        "UNKNOWN_TOPIC_OR_PARTITION",
        "UNKNOWN_TOPIC_ID",
    ]


@pytest.mark.parametrize("version", versions("share_acknowledge"))
def test_a_share_says_what_became_of_records(version: int) -> None:
    scene = Scene()
    publish(scene.house, "a", "b", topic="orders")
    topic = scene.house.broker.topics.get("orders")
    share_beat(scene, 0)
    start_fetch(scene, 1, 0).answer()

    def acknowledge(epoch: int, offset: int) -> Any:
        part = {"partition_index": i32(0), "acknowledgement_batches": [_ack(offset, 1)]}
        topics = {"topic_id": topic.uuid, "partitions": [("AcknowledgePartition", part)]}
        return scene.ask(
            "share_acknowledge",
            version,
            group_id="g",
            member_id="m",
            share_session_epoch=i32(epoch),
            is_renew_ack=False,
            topics=[("AcknowledgeTopic", topics)],
        )

    done = acknowledge(1, 0)
    assert [code(done), code(done.responses[0].partitions[0])] == ["NONE", "NONE"]
    late = acknowledge(2, 0)
    assert code(late.responses[0].partitions[0]) == "INVALID_RECORD_STATE"
    assert code(acknowledge(2, 1)) == "INVALID_SHARE_SESSION_EPOCH"
    assert code(acknowledge(-1, 1)) == "NONE"
    kept = scene.house.done(scene.house.broker.group_offsets.committed("g"))
    assert {one.partition: one.offset for one in kept}[0] == 2


def test_share_groups_are_described_and_their_members_refused_what_is_wrong() -> None:
    scene = Scene()
    epoch = int(share_beat(scene, 0).member_epoch)
    answer = scene.ask(
        "share_group_describe",
        1,
        group_ids=("g", "unknown"),
        include_authorized_operations=False,
    )
    one, unknown = answer.groups
    assert (code(one), one.group_state, one.members[0].member_id) == ("NONE", "Stable", "m")
    assert code(unknown) == "GROUP_ID_NOT_FOUND"
    assert code(share_beat(scene, epoch + 1)) == "FENCED_MEMBER_EPOCH"
    assert code(share_beat(scene, 4, member_id="x")) == "UNKNOWN_MEMBER_ID"
    assert share_beat(scene, -1).member_epoch == -1
