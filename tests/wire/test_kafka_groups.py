"""Messages of groups that are built and read by hand, held against kio's and kafka-python's."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.consumer.group import (
    HeartbeatRequest,
    HeartbeatResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kio.static.primitive import i8, i16, i32, i32Timedelta, i64, i64Timedelta

from millstream.wire.kafka import group_beats, heartbeat, offsets, shares
from millstream.wire.kafka.primitives import RequestInvalid
from wire.kio_messages import request, response

ID, OTHER = UUID(int=2**100 + 7), UUID(int=5)
MS = i32Timedelta.parse(dt.timedelta(milliseconds=1500))
NAMES = ("orders", "größe")


def versions(span: tuple[int, int]) -> list[int]:
    return list(range(span[0], span[1] + 1))


# ---- Heartbeat


@pytest.mark.parametrize("version", versions(heartbeat.VERSIONS))
def test_heartbeats_are_read_and_answered_as_others_do(version: int) -> None:
    theirs = HeartbeatRequest(
        group_id="größe", generation_id=7, member_id="m", group_instance_id="one"
    )
    ours = heartbeat.read_heartbeat(memoryview(theirs.encode(version=version)), version)
    assert ours == ("größe", 7, "m", "one" if version >= 3 else None)
    (data,) = heartbeat.heartbeat_answer(version, 27)
    assert HeartbeatResponse.decode(data, version=version).error_code == 27
    assert response("heartbeat", version, bytes(data)).error_code.value == 27


# ---- OffsetCommit and OffsetFetch


def commit_as_kio(version: int) -> bytes:
    partitions = [_kio_commit(4, 2**40, "note"), _kio_commit(5, 6, None)]
    topics = [
        ("OffsetCommitRequestTopic", {"name": name, "partitions": partitions}) for name in NAMES
    ]
    fields = {
        "group_id": "g",
        "generation_id_or_member_epoch": i32(3),
        "member_id": "m",
        "group_instance_id": "one",
        "retention_time": i64Timedelta.parse(dt.timedelta(0)),
        "topics": topics,
    }
    return request("offset_commit", version, fields)


def commit_as_kafka_python(version: int) -> bytes:
    Topic = OffsetCommitRequest.OffsetCommitRequestTopic  # noqa: N806  a class
    Part = Topic.OffsetCommitRequestPartition  # noqa: N806  a class
    partitions = [
        Part(
            partition_index=number,
            committed_offset=offset,
            committed_leader_epoch=1,
            committed_metadata=metadata,
        )
        for number, offset, metadata in ((4, 2**40, "note"), (5, 6, None))
    ]
    theirs = OffsetCommitRequest(
        group_id="g",
        generation_id_or_member_epoch=3,
        member_id="m",
        group_instance_id="one",
        retention_time_ms=-1,
        topics=[Topic(name=name, partitions=partitions) for name in NAMES],
    )
    data: bytes = theirs.encode(version=version)
    return data


@pytest.mark.parametrize("version", versions(offsets.COMMIT_VERSIONS))
def test_commits_are_read_as_others_write_them(version: int) -> None:
    Part = offsets.CommittedPartition  # noqa: N806  a class
    epoch = 1 if version >= 6 else -1
    expected = offsets.CommitAsked(
        "g",
        3,
        "m",
        "one" if version >= 7 else None,
        [
            (name, [Part(name, 4, 2**40, "note", epoch), Part(name, 5, 6, "", epoch)])
            for name in NAMES
        ],
    )
    assert offsets.read_commit(memoryview(commit_as_kio(version)), version) == expected
    theirs = commit_as_kafka_python(version)
    assert offsets.read_commit(memoryview(theirs), version) == expected


def _kio_commit(number: int, offset: int, metadata: str | None) -> tuple[str, dict[str, Any]]:
    fields = {
        "partition_index": i32(number),
        "committed_offset": i64(offset),
        "committed_leader_epoch": i32(1),
        "committed_metadata": metadata,
    }
    return "OffsetCommitRequestPartition", fields


@pytest.mark.parametrize("version", versions(offsets.COMMIT_VERSIONS))
def test_others_read_our_answers_to_commits(version: int) -> None:
    (data,) = offsets.commit_answer(version, [("orders", [(4, 0), (5, 3)]), ("größe", [(0, 25)])])
    kio = response("offset_commit", version, bytes(data))
    assert [
        (topic.name, [(one.partition_index, one.error_code.value) for one in topic.partitions])
        for topic in kio.topics
    ] == [("orders", [(4, 0), (5, 3)]), ("größe", [(0, 25)])]
    theirs = OffsetCommitResponse.decode(data, version=version)
    assert theirs.topics[1].partitions[0].error_code == 25


@pytest.mark.parametrize(
    ("version", "is_everything"),
    [
        (version, is_everything)
        for version in versions(offsets.FETCH_VERSIONS)
        for is_everything in (False, True)
        # There was no way to ask for everything.
        if version >= 2 or not is_everything
    ],
)
def test_we_read_who_asks_for_offsets(version: int, is_everything: bool) -> None:
    topics = [(name, [1, 2]) for name in NAMES]
    numbers = (i32(1), i32(2))
    listed = [
        (
            "OffsetFetchRequestTopics" if version >= 8 else "OffsetFetchRequestTopic",
            {"name": name, "partition_indexes": numbers},
        )
        for name in NAMES
    ]
    group = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": i32(4),
        "topics": None if is_everything else listed,
    }
    fields = {**group, "require_stable": True}
    if version >= 8:
        fields["groups"] = [("OffsetFetchRequestGroup", group)] * 2
    data = request("offset_fetch", version, fields)
    asked = offsets.read_fetch(memoryview(data), version)
    by = ("m", 4) if version >= 9 else (None, -1)
    one = offsets.FetchGroup("g", None if is_everything else topics, *by)
    assert asked == [one] * (2 if version >= 8 else 1)
    theirs = fetch_as_kafka_python(version, is_everything)
    assert offsets.read_fetch(memoryview(theirs), version) == asked


def fetch_as_kafka_python(version: int, is_everything: bool) -> bytes:
    Group = OffsetFetchRequest.OffsetFetchRequestGroup  # noqa: N806  a class
    topic = OffsetFetchRequest.OffsetFetchRequestTopic
    if version >= 8:
        topic = Group.OffsetFetchRequestTopics
    topics = None
    if not is_everything:
        topics = [topic(name=name, partition_indexes=[1, 2]) for name in NAMES]
    group = {"group_id": "g", "topics": topics}
    if version >= 8:
        by = {"member_id": "m", "member_epoch": 4} if version >= 9 else {}
        theirs = OffsetFetchRequest(groups=[Group(**group, **by)] * 2, require_stable=True)
    else:
        theirs = OffsetFetchRequest(**group, require_stable=True)
    data: bytes = theirs.encode(version=version)
    return data


@pytest.mark.parametrize("version", versions(offsets.FETCH_VERSIONS))
def test_others_read_our_offsets(version: int) -> None:
    found = [offsets.FoundOffset(1, 2**40, "note", 0, 7), offsets.FoundOffset(2, -1, "", 3)]
    group = offsets.FoundGroup("g", [("orders", found), ("größe", [])], 0)
    (data,) = offsets.fetch_answer(version, [group])
    kio = response("offset_fetch", version, bytes(data))
    topics = kio.groups[0].topics if version >= 8 else kio.topics
    assert [one.name for one in topics] == ["orders", "größe"]
    shown = [
        (one.partition_index, one.committed_offset, one.metadata, one.error_code.value)
        for one in topics[0].partitions
    ]
    assert shown == [(1, 2**40, "note", 0), (2, -1, "", 3)]
    if version >= 5:
        assert [int(one.committed_leader_epoch) for one in topics[0].partitions] == [7, -1]
    theirs = OffsetFetchResponse.decode(data, version=version)
    topics = theirs.groups[0].topics if version >= 8 else theirs.topics
    assert topics[0].partitions[0].committed_offset == 2**40


# ---- groups that the broker deals out to


@pytest.mark.parametrize("version", versions(group_beats.CONSUMER_VERSIONS))
def test_heartbeats_of_consumers_are_read(version: int) -> None:
    full = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": i32(4),
        "instance_id": "one",
        "rack_id": "here",
        "rebalance_timeout": MS,
        "subscribed_topic_names": ("orders", "größe"),
        "subscribed_topic_regex": "a.*",
        "server_assignor": "range",
        "topic_partitions": [("TopicPartitions", {"topic_id": ID, "partitions": (i32(1), i32(3))})],
    }
    data = request("consumer_group_heartbeat", version, full)
    assert group_beats.read_consumer_beat(memoryview(data), version) == group_beats.BeatAsked(
        "g",
        "m",
        4,
        ["orders", "größe"],
        "one",
        1500,
        "a.*" if version >= 1 else None,
        "range",
        [(ID.bytes, (1, 3))],
    )
    nothing = full | dict.fromkeys(
        (
            "instance_id",
            "rack_id",
            "subscribed_topic_names",
            "subscribed_topic_regex",
            "server_assignor",
            "topic_partitions",
        )
    )
    data = request("consumer_group_heartbeat", version, nothing)
    asked = group_beats.read_consumer_beat(memoryview(data), version)
    assert asked == group_beats.BeatAsked("g", "m", 4, None, None, 1500)


def test_heartbeats_of_share_groups_are_read() -> None:
    fields = {
        "group_id": "g",
        "member_id": "m",
        "member_epoch": i32(0),
        "rack_id": None,
        "subscribed_topic_names": ("orders",),
    }
    data = request("share_group_heartbeat", 1, fields)
    asked = group_beats.read_share_beat(memoryview(data))
    assert asked == group_beats.BeatAsked("g", "m", 0, ["orders"])


@pytest.mark.parametrize(
    ("api", "version"),
    [
        ("consumer_group_heartbeat", 0),
        ("consumer_group_heartbeat", 1),
        ("share_group_heartbeat", 1),
    ],
)
def test_others_read_our_answers_to_heartbeats(api: str, version: int) -> None:
    (data,) = group_beats.beat_answer(
        code=0,
        message=None,
        member_id="m",
        epoch=3,
        interval_ms=1500,
        assignment=[(ID.bytes, [0, 2]), (OTHER.bytes, [])],
    )
    kio = response(api, version, bytes(data))
    assert (kio.member_id, kio.member_epoch, kio.heartbeat_interval) == ("m", 3, MS)
    given = kio.assignment.topic_partitions
    assert [(one.topic_id, one.partitions) for one in given] == [(ID, (0, 2)), (OTHER, ())]
    (data,) = group_beats.beat_answer(
        code=110, message="no", member_id=None, epoch=0, interval_ms=0, assignment=None
    )
    kio = response(api, version, bytes(data))
    assert (kio.error_code.value, kio.error_message) == (110, "no")
    assert (kio.member_id, kio.assignment) == (None, None)


MEMBER = group_beats.DescribedMember(
    "m", "one", 3, "c", "127.0.0.1:5", ("orders",), [(ID.bytes, "orders", [1, 2])], []
)
GROUPS = [
    group_beats.DescribedGroup("g", 0, None, "Stable", 4, "range", [MEMBER, MEMBER]),
    group_beats.DescribedGroup("h", 69, "not there"),
]


@pytest.mark.parametrize("version", versions(group_beats.CONSUMER_VERSIONS))
def test_others_read_our_descriptions_of_consumers(version: int) -> None:
    (data,) = group_beats.consumer_describe_answer(version, GROUPS)
    group, other = response("consumer_group_describe", version, bytes(data)).groups
    assert (group.group_state, group.group_epoch, group.assignor_name) == ("Stable", 4, "range")
    assert (other.error_code.value, other.error_message, other.members) == (69, "not there", ())
    member = group.members[1]
    assert (member.member_id, member.instance_id, member.member_epoch) == ("m", "one", 3)
    assert member.subscribed_topic_names == ("orders",)
    (part,) = member.assignment.topic_partitions
    assert (part.topic_id, part.topic_name, part.partitions) == (ID, "orders", (1, 2))
    assert member.target_assignment.topic_partitions == ()
    asked = {"group_ids": ("g", "h"), "include_authorized_operations": True}
    data = request("consumer_group_describe", version, asked)
    assert group_beats.read_describe(memoryview(data)) == ["g", "h"]


def test_others_read_our_descriptions_of_share_groups() -> None:
    (data,) = group_beats.share_describe_answer(GROUPS)
    group, other = response("share_group_describe", 1, bytes(data)).groups
    assert other.error_code.value == 69
    (part,) = group.members[0].assignment.topic_partitions
    assert (part.topic_id, part.topic_name, part.partitions) == (ID, "orders", (1, 2))
    assert group.members[1].client_host == "127.0.0.1:5"


# ---- shares

ACKNOWLEDGEMENTS = [
    (
        "AcknowledgementBatch",
        {
            "first_offset": i64(2**40),
            "last_offset": i64(2**40 + 2),
            "acknowledge_types": (i8(1), i8(2), i8(3)),
        },
    ),
    (
        "AcknowledgementBatch",
        {"first_offset": i64(9), "last_offset": i64(9), "acknowledge_types": (i8(4),)},
    ),
]
READ = [shares.Acknowledged(2**40, 2**40 + 2, b"\1\2\3"), shares.Acknowledged(9, 9, b"\4")]


@pytest.mark.parametrize("version", versions(shares.VERSIONS))
def test_fetches_of_shares_are_read(version: int) -> None:
    part = {"partition_index": i32(2), "acknowledgement_batches": ACKNOWLEDGEMENTS}
    bare = {"partition_index": i32(3), "acknowledgement_batches": []}
    fields = {
        "group_id": "g",
        "member_id": "m",
        "share_session_epoch": i32(5),
        "max_wait": MS,
        "min_bytes": i32(1),
        "max_bytes": i32(2**20),
        "max_records": i32(500),
        "batch_size": i32(100),
        "share_acquire_mode": i8(1),
        "is_renew_ack": True,
        "topics": [
            (
                "FetchTopic",
                {
                    "topic_id": ID,
                    "partitions": [("FetchPartition", part), ("FetchPartition", bare)],
                },
            )
        ],
        "forgotten_topics_data": [("ForgottenTopic", {"topic_id": OTHER, "partitions": (i32(7),)})],
    }
    data = request("share_fetch", version, fields)
    assert shares.read_fetch(memoryview(data), version) == shares.ShareAsked(
        "g",
        "m",
        5,
        [shares.AskedPartition(ID.bytes, 2, READ), shares.AskedPartition(ID.bytes, 3, [])],
        version >= 2,
        1500,
        2**20,
        500,
        [(OTHER.bytes, (7,))],
    )


@pytest.mark.parametrize("version", versions(shares.VERSIONS))
def test_acknowledgements_of_shares_are_read(version: int) -> None:
    part = {"partition_index": i32(2), "acknowledgement_batches": ACKNOWLEDGEMENTS}
    topic = {"topic_id": ID, "partitions": [("AcknowledgePartition", part)]}
    fields = {
        "group_id": "g",
        "member_id": "m",
        "share_session_epoch": i32(-1),
        "is_renew_ack": True,
        "topics": [("AcknowledgeTopic", topic)],
    }
    data = request("share_acknowledge", version, fields)
    asked = shares.read_acknowledge(memoryview(data), version)
    parts = [shares.AskedPartition(ID.bytes, 2, READ)]
    assert asked == shares.ShareAsked("g", "m", -1, parts, version >= 2)


@pytest.mark.parametrize("version", versions(shares.VERSIONS))
def test_others_read_what_we_give_to_shares(version: int) -> None:
    parts = [
        shares.GivenPartition(
            ID.bytes, 2, records=(b"one batch", b"another"), given=[(5, 7, 1), (9, 9, 2)]
        ),
        shares.GivenPartition(ID.bytes, 3, 3, "gone", 121, "late"),
        shares.GivenPartition(OTHER.bytes, 0),
    ]
    data = b"".join(map(bytes, shares.fetch_answer(0, None, 1500, parts)))
    kio = response("share_fetch", version, data)
    assert kio.acquisition_lock_timeout == MS
    first, second = kio.responses[0].partitions
    assert bytes(first.records) == b"one batchanother"
    given = [
        (one.first_offset, one.last_offset, one.delivery_count) for one in first.acquired_records
    ]
    assert given == [(5, 7, 1), (9, 9, 2)]
    assert (second.error_code.value, second.error_message) == (3, "gone")
    assert (second.acknowledge_error_code, second.acknowledge_error_message) == (i16(121), "late")
    assert kio.responses[1].topic_id == OTHER
    assert kio.node_endpoints == ()


@pytest.mark.parametrize("version", versions(shares.VERSIONS))
def test_others_read_our_answers_to_acknowledgements(version: int) -> None:
    parts = [
        shares.GivenPartition(ID.bytes, 2, acknowledge_code=121, acknowledge_message="late"),
        shares.GivenPartition(ID.bytes, 3),
    ]
    data = b"".join(map(bytes, shares.acknowledge_answer(version, 0, None, 1500, parts)))
    kio = response("share_acknowledge", version, data)
    first, second = kio.responses[0].partitions
    assert (first.partition_index, first.error_code.value, first.error_message) == (2, 121, "late")
    assert second.error_code.value == 0
    if version >= 2:
        assert kio.acquisition_lock_timeout == MS


# ---- anything else

READERS: list[Callable[[memoryview, int], object]] = [
    lambda data, version: heartbeat.read_heartbeat(data, version % 5),
    lambda data, version: offsets.read_commit(data, 2 + version % 8),
    lambda data, version: offsets.read_fetch(data, 1 + version % 9),
    lambda data, version: group_beats.read_consumer_beat(data, version % 2),
    lambda data, _: group_beats.read_share_beat(data),
    lambda data, _: group_beats.read_describe(data),
    lambda data, version: shares.read_fetch(data, 1 + version % 2),
    lambda data, version: shares.read_acknowledge(data, 1 + version % 2),
]


@given(st.binary(max_size=200), st.integers(0, 100), st.sampled_from(range(len(READERS))))
def test_bytes_that_are_no_request_are_refused_and_cost_nothing(
    data: bytes, version: int, reader: int
) -> None:
    with contextlib.suppress(RequestInvalid):
        READERS[reader](memoryview(data), version)
