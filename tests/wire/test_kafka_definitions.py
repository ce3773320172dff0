"""Messages of the newer groups and of shares, held against Kafka's own definitions of them, in
every version that those have. They run where Kafka's jars are; `test_kafka_groups.py` holds the
same messages against kio, wherever it runs."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.protocol.data_container import DataContainer

from millstream.wire.kafka import group_beats, shares
from wire.kafka_definitions import definition
from wire.test_kafka_groups import GROUPS, ID, OTHER

TOPICS = [{"topic_id": ID, "partitions": [1, 3]}, {"topic_id": OTHER, "partitions": []}]


def versions(ours: tuple[int, int], name: str) -> list[int]:
    """Those of ours that the definition of the jar has; there is at least one."""
    low, high = definition(name)._valid_versions
    found = [version for version in range(ours[0], ours[1] + 1) if low <= version <= high]
    assert found, name
    return found


def read(name: str, version: int, data: bytes) -> dict[str, Any]:
    """What is in it; written again it is the same bytes, so none was missed."""
    message = definition(name).decode(data, version=version)
    # Without which it cannot be written; what was read has none.
    message._header = None
    assert bytes(message.encode(version=version)) == data
    page: dict[str, Any] = shown(message)
    return page


def shown(value: Any) -> Any:
    """A message as plain values: bytes stay bytes, and ids are ids."""
    if isinstance(value, list):
        return [shown(one) for one in value]
    if isinstance(value, DataContainer):
        return {name: shown(getattr(value, name)) for name in value._struct.fields}
    return value


def written(name: str, version: int, fields: dict[str, Any]) -> memoryview:
    return memoryview(bytes(made(definition(name), fields).encode(version=version)))


def made(kind: Any, fields: dict[str, Any]) -> Any:
    """Of plain values."""
    values = {}
    for name, value in fields.items():
        values[name] = value
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = kind._struct.fields[name].data_class
            values[name] = [made(inner, one) for one in value]
    return kind(**values)


# ---- heartbeats


@pytest.mark.parametrize("has_changes", [True, False])
def test_heartbeats_of_consumers_are_read(has_changes: bool) -> None:
    name = "ConsumerGroupHeartbeatRequest"
    for version in versions(group_beats.CONSUMER_VERSIONS, name):
        fields: dict[str, Any] = {
            "group_id": "g",
            "member_id": "m",
            "member_epoch": 4,
            "rebalance_timeout_ms": 1500,
        }
        if has_changes:
            fields |= {
                "instance_id": "one",
                "rack_id": "here",
                "subscribed_topic_names": ["orders", "größe"],
                "subscribed_topic_regex": "a.*",
                "server_assignor": "range",
                "topic_partitions": TOPICS[:1],
            }
        asked = group_beats.read_consumer_beat(written(name, version, fields), version)
        expected = group_beats.BeatAsked("g", "m", 4, None, None, 1500)
        if has_changes:
            pattern = "a.*" if version >= 1 else None
            given = (["orders", "größe"], "one", 1500, pattern, "range", [(ID.bytes, (1, 3))])
            expected = group_beats.BeatAsked("g", "m", 4, *given)
        assert asked == expected


def test_heartbeats_of_share_groups_are_read() -> None:
    name = "ShareGroupHeartbeatRequest"
    fields = {"group_id": "g", "member_id": "m", "member_epoch": 0}
    fields["subscribed_topic_names"] = ["orders"]
    for version in versions((1, 1), name):
        asked = group_beats.read_share_beat(written(name, version, fields))
        assert asked == group_beats.BeatAsked("g", "m", 0, ["orders"])


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ConsumerGroupHeartbeatResponse", group_beats.CONSUMER_VERSIONS),
        ("ShareGroupHeartbeatResponse", (1, 1)),
    ],
)
def test_answers_to_heartbeats_are_as_kafka_defines_them(name: str, ours: tuple[int, int]) -> None:
    good = {"code": 0, "message": None, "member_id": "m", "epoch": 3, "interval_ms": 1500}
    for version in versions(ours, name):
        given: Any = [(ID.bytes, [1, 3]), (OTHER.bytes, [])]
        (data,) = group_beats.beat_answer(**good, assignment=given)  # type: ignore[arg-type]
        page = read(name, version, bytes(data))
        assert (page["member_id"], page["member_epoch"]) == ("m", 3)
        assert page["heartbeat_interval_ms"] == 1500
        assert page["assignment"]["topic_partitions"] == TOPICS
        (data,) = group_beats.beat_answer(
            code=110, message="no", member_id=None, epoch=0, interval_ms=0, assignment=None
        )
        page = read(name, version, bytes(data))
        assert (page["error_code"], page["error_message"]) == (110, "no")
        assert (page["member_id"], page["assignment"]) == (None, None)


# ---- descriptions


def described(page: dict[str, Any]) -> None:
    group, other = page["groups"]
    assert (group["group_state"], group["group_epoch"]) == ("Stable", 4)
    assert (group["assignor_name"], len(group["members"])) == ("range", 2)
    [part] = group["members"][1]["assignment"]["topic_partitions"]
    assert (part["topic_id"], part["topic_name"], part["partitions"]) == (ID, "orders", [1, 2])
    assert group["members"][0]["client_host"] == "127.0.0.1:5"
    assert (other["error_code"], other["error_message"]) == (69, "not there")


def test_descriptions_of_consumers_are_as_kafka_defines_them() -> None:
    name = "ConsumerGroupDescribeResponse"
    for version in versions(group_beats.CONSUMER_VERSIONS, name):
        (data,) = group_beats.consumer_describe_answer(version, GROUPS)
        page = read(name, version, bytes(data))
        described(page)
        assert page["groups"][0]["members"][0]["instance_id"] == "one"


def test_descriptions_of_share_groups_are_as_kafka_defines_them() -> None:
    name = "ShareGroupDescribeResponse"
    for version in versions((1, 1), name):
        (data,) = group_beats.share_describe_answer(GROUPS)
        described(read(name, version, bytes(data)))


@pytest.mark.parametrize("name", ["ConsumerGroupDescribeRequest", "ShareGroupDescribeRequest"])
def test_who_asks_for_descriptions_is_read(name: str) -> None:
    fields = {"group_ids": ["g", "h"], "include_authorized_operations": True}
    for version in versions((0, 1), name):
        assert group_beats.read_describe(written(name, version, fields)) == ["g", "h"]


# ---- shares

BATCHES = [
    {"first_offset": 2**40, "last_offset": 2**40 + 2, "acknowledge_types": [1, 2, 3]},
    {"first_offset": 9, "last_offset": 9, "acknowledge_types": [4]},
]
READ = [
    shares.Acknowledged(2**40, 2**40 + 2, bytes([1, 2, 3])),
    shares.Acknowledged(9, 9, bytes([4])),
]
BY = {"group_id": "g", "member_id": "m"}


def test_fetches_of_shares_are_read() -> None:
    name = "ShareFetchRequest"
    parts = [{"partition_index": 2, "acknowledgement_batches": BATCHES}]
    parts += [{"partition_index": 3, "acknowledgement_batches": []}]
    fields: dict[str, Any] = {
        **BY,
        "share_session_epoch": 5,
        "max_wait_ms": 1500,
        "min_bytes": 1,
        "max_bytes": 2**20,
        "max_records": 500,
        "batch_size": 100,
        "topics": [{"topic_id": ID, "partitions": parts}],
        "forgotten_topics_data": [{"topic_id": OTHER, "partitions": [7]}],
    }
    for version in versions(shares.VERSIONS, name):
        asked = shares.read_fetch(written(name, version, fields), version)
        assert asked == shares.ShareAsked(
            "g",
            "m",
            5,
            [shares.AskedPartition(ID.bytes, 2, READ), shares.AskedPartition(ID.bytes, 3, [])],
            False,
            1500,
            2**20,
            500,
            [(OTHER.bytes, (7,))],
        )


def test_acknowledgements_of_shares_are_read() -> None:
    name = "ShareAcknowledgeRequest"
    parts = [{"partition_index": 2, "acknowledgement_batches": BATCHES}]
    fields = {**BY, "share_session_epoch": -1, "topics": [{"topic_id": ID, "partitions": parts}]}
    for version in versions(shares.VERSIONS, name):
        asked = shares.read_acknowledge(written(name, version, fields), version)
        expected = [shares.AskedPartition(ID.bytes, 2, READ)]
        assert asked == shares.ShareAsked("g", "m", -1, expected, False)


def test_what_we_give_to_shares_is_as_kafka_defines_it() -> None:
    name = "ShareFetchResponse"
    parts = [
        shares.GivenPartition(
            ID.bytes, 2, records=(b"one batch", b"another"), given=[(5, 7, 1), (9, 9, 2)]
        ),
        shares.GivenPartition(ID.bytes, 3, 3, "gone", 121, "late"),
        shares.GivenPartition(OTHER.bytes, 0),
    ]
    data = b"".join(map(bytes, shares.fetch_answer(0, None, 1500, parts)))
    for version in versions(shares.VERSIONS, name):
        page = read(name, version, data)
        assert page["acquisition_lock_timeout_ms"] == 1500
        first, second = page["responses"][0]["partitions"]
        assert bytes(first["records"]) == b"one batchanother"
        given = [tuple(one.values()) for one in first["acquired_records"]]
        assert given == [(5, 7, 1), (9, 9, 2)]
        assert (second["error_code"], second["error_message"]) == (3, "gone")
        assert (second["acknowledge_error_code"], second["acknowledge_error_message"]) == (
            121,
            "late",
        )
        assert page["responses"][1]["topic_id"] == OTHER


def test_answers_to_acknowledgements_are_as_kafka_defines_them() -> None:
    name = "ShareAcknowledgeResponse"
    parts = [
        shares.GivenPartition(ID.bytes, 2, acknowledge_code=121, acknowledge_message="late"),
        shares.GivenPartition(ID.bytes, 3),
    ]
    for version in versions(shares.VERSIONS, name):
        data = b"".join(map(bytes, shares.acknowledge_answer(version, 0, None, 1500, parts)))
        first, second = read(name, version, data)["responses"][0]["partitions"]
        assert (first["partition_index"], first["error_code"]) == (2, 121)
        assert (first["error_message"], second["error_code"]) == ("late", 0)
