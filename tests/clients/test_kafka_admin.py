"""Administration by other people's Kafka clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka import KafkaAdminClient
from kafka import TopicPartition as PythonPartition
from kafka.structs import TopicPartitionReplica

from broker_process import PATIENCE_SECONDS, BrokerProcess
from clients.making import consume, make_topic, produce
from millstream.wire.kafka.codes import Code


@pytest.fixture
def admin(broker: BrokerProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": broker.kafka})


def done(futures: Mapping[Any, Any]) -> Any:
    """The result of the only future."""
    (future,) = futures.values()
    return future.result(PATIENCE_SECONDS)


def refused(futures: Mapping[Any, Any]) -> int:
    with pytest.raises(KafkaException) as raised:
        done(futures)
    return int(raised.value.args[0].code())


def settings_of(broker: BrokerProcess, topic: str) -> dict[str, Any]:
    page = broker.get(f"/v1/topics/{topic}").json()
    return dict(page["settings"])


def configs_of(admin: AdminClient, topic: str) -> dict[str, ConfigEntry]:
    return dict(done(admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)])))


def test_a_topic_is_made_described_and_deleted(broker: BrokerProcess, admin: AdminClient) -> None:
    config = {
        "cleanup.policy": "compact",
        "retention.ms": "86400000",
        "message.timestamp.type": "LogAppendTime",
        "millstream.fsync": "none",
    }
    done(admin.create_topics([NewTopic("made", 5, 1, config=config)]))
    settings = settings_of(broker, "made")
    assert settings["compact"] is True
    assert settings["retention_ms"] == 86_400_000
    assert settings["timestamps"] == "append"
    assert settings["fsync"] == "none"
    found = admin.list_topics(timeout=PATIENCE_SECONDS).topics["made"]
    assert sorted(found.partitions) == [0, 1, 2, 3, 4]
    assert refused(admin.create_topics([NewTopic("made", 5, 1)])) == (
        KafkaError.TOPIC_ALREADY_EXISTS
    )
    done(admin.delete_topics(["made"]))
    assert "made" not in admin.list_topics(timeout=PATIENCE_SECONDS).topics
    assert refused(admin.delete_topics(["made"])) == KafkaError.UNKNOWN_TOPIC_OR_PART


@pytest.mark.parametrize(
    ("topic", "code"),
    [
        (NewTopic("a/b", 1, 1), KafkaError.TOPIC_EXCEPTION),
        (NewTopic("__own", 1, 1), KafkaError.TOPIC_AUTHORIZATION_FAILED),
        (NewTopic("many", 100_000, 1), KafkaError.INVALID_PARTITIONS),
        (NewTopic("copies", 1, 3), KafkaError.INVALID_REPLICATION_FACTOR),
        (NewTopic("placed", 1, replica_assignment=[[7]]), KafkaError.INVALID_REPLICA_ASSIGNMENT),
        (NewTopic("odd", 1, 1, config={"no.such": "1"}), KafkaError.INVALID_CONFIG),
        (NewTopic("odd", 1, 1, config={"retention.ms": "soon"}), KafkaError.INVALID_CONFIG),
        (NewTopic("odd", 1, 1, config={"min.insync.replicas": "2"}), KafkaError.INVALID_CONFIG),
    ],
)
def test_a_topic_that_cannot_be_is_refused(admin: AdminClient, topic: NewTopic, code: int) -> None:
    assert refused(admin.create_topics([topic])) == code
    assert refused(admin.create_topics([topic], validate_only=True)) == code


def test_a_trial_makes_nothing(broker: BrokerProcess, admin: AdminClient) -> None:
    make_topic(broker, "tried", 2)
    done(admin.create_topics([NewTopic("not-made", 1, 1)], validate_only=True))
    assert "not-made" not in admin.list_topics(timeout=PATIENCE_SECONDS).topics
    done(admin.create_partitions([NewPartitions("tried", 4)], validate_only=True))
    assert len(admin.list_topics(timeout=PATIENCE_SECONDS).topics["tried"].partitions) == 2


def test_partitions_are_added_and_never_taken_away(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    make_topic(broker, "growing", 2)
    done(admin.create_partitions([NewPartitions("growing", 4)]))
    assert len(admin.list_topics(timeout=PATIENCE_SECONDS).topics["growing"].partitions) == 4
    for count in (4, 3):
        assert refused(admin.create_partitions([NewPartitions("growing", count)])) == (
            KafkaError.INVALID_PARTITIONS
        )


def test_every_config_is_described_with_its_default(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    make_topic(broker, "described", retention_ms=60_000)
    configs = configs_of(admin, "described")
    assert configs["retention.ms"].value == "60000"
    assert not configs["retention.ms"].is_default
    assert configs["cleanup.policy"].value == "delete"
    assert configs["retention.bytes"].value == "-1"
    assert configs["message.timestamp.type"].value == "CreateTime"
    assert configs["min.insync.replicas"].is_read_only
    assert configs["millstream.fsync"].value == "every"
    assert all(one.is_default for name, one in configs.items() if name != "retention.ms")
    # As many as Kafka has, and ours.
    assert len(configs) > 35


def test_the_configs_of_the_broker_are_shown(broker: BrokerProcess, admin: AdminClient) -> None:
    configs = done(admin.describe_configs([ConfigResource(ResourceType.BROKER, "1")]))
    assert configs["num.partitions"].value == "3"
    assert configs["auto.create.topics.enable"].value == "true"
    assert configs["millstream.retention_age"].value == "7d"
    assert not configs["millstream.kafka"].is_default
    # By which clients of Kafka's protocol find HTTP.
    assert configs["millstream.http"].value == broker.url("")
    assert configs["millstream.http"].is_read_only


def test_configs_change_one_by_one(broker: BrokerProcess, admin: AdminClient) -> None:
    make_topic(broker, "changing", retention_ms=60_000, segment_ms=5000)

    def change(name: str, value: str | None, operation: AlterConfigOpType) -> Mapping[Any, Any]:
        entry = ConfigEntry(name, value, incremental_operation=operation)
        resource = ConfigResource(ResourceType.TOPIC, "changing", incremental_configs=[entry])
        return dict(admin.incremental_alter_configs([resource]))

    done(change("max.message.bytes", "5000", AlterConfigOpType.SET))
    done(change("retention.ms", None, AlterConfigOpType.DELETE))
    settings = settings_of(broker, "changing")
    assert settings["message_bytes_max"] == 5000
    assert settings["retention_ms"] == 7 * 24 * 3_600_000
    assert settings["segment_ms"] == 5000
    assert refused(change("max.message.bytes", "-5", AlterConfigOpType.SET)) == (
        KafkaError.INVALID_CONFIG
    )
    assert refused(change("cleanup.policy", "compact", AlterConfigOpType.APPEND)) == (
        KafkaError.INVALID_REQUEST
    )


def test_configs_that_are_set_together_replace_all_others(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    make_topic(broker, "replaced", retention_ms=60_000, fsync="none")
    resource = ConfigResource(ResourceType.TOPIC, "replaced", set_config={"segment.ms": "9000"})
    done(admin.alter_configs([resource]))
    settings = settings_of(broker, "replaced")
    assert settings["segment_ms"] == 9000
    assert settings["retention_ms"] == 7 * 24 * 3_600_000
    assert settings["fsync"] == "every"


def test_records_are_deleted_up_to_an_offset(broker: BrokerProcess, admin: AdminClient) -> None:
    make_topic(broker, "trimmed")
    for _ in range(10):
        produce(broker, "trimmed", [b"x"])
    deleted = done(admin.delete_records([TopicPartition("trimmed", 0, 4)]))
    assert deleted.low_watermark == 4
    assert [one.offset() for one in consume(broker, "trimmed", 6, offset=4)] == [*range(4, 10)]
    asked = {TopicPartition("trimmed", 0): OffsetSpec.earliest()}  # type: ignore[no-untyped-call]
    assert done(admin.list_offsets(asked)).offset == 4
    assert refused(admin.delete_records([TopicPartition("trimmed", 0, 11)])) == (
        KafkaError.OFFSET_OUT_OF_RANGE
    )
    assert done(admin.delete_records([TopicPartition("trimmed", 0, -1)])).low_watermark == 10


def test_the_record_with_the_newest_time_is_found(
    broker: BrokerProcess, admin: AdminClient
) -> None:
    make_topic(broker, "newest")
    newest = OffsetSpec.max_timestamp()  # type: ignore[no-untyped-call]
    asked = {TopicPartition("newest", 0): newest}
    assert done(admin.list_offsets(asked)).offset == -1
    produce(broker, "newest", [b"first", b"second", b"third"])
    found = done(admin.list_offsets(asked))
    messages = consume(broker, "newest", 3)
    times = [one.timestamp()[1] for one in messages]
    assert (found.offset, found.timestamp) == (times.index(max(times)), max(times))


def test_the_cluster_is_described(broker: BrokerProcess, admin: AdminClient) -> None:
    found = admin.describe_cluster().result(PATIENCE_SECONDS)
    assert [f"{node.host}:{node.port}" for node in found.nodes] == [broker.kafka]
    assert found.controller.id == 1
    client = KafkaAdminClient(bootstrap_servers=broker.kafka)
    try:
        described = client.describe_cluster()
    finally:
        client.close()
    assert described["cluster_id"] == found.cluster_id


def test_where_partitions_are_and_how_large(broker: BrokerProcess) -> None:
    """What pages about a cluster show, and wishes for what is so already."""
    make_topic(broker, "placed", 2)
    produce(broker, "placed", [b"x" * 5000])
    client = KafkaAdminClient(bootstrap_servers=broker.kafka)
    try:
        (node,) = client.describe_log_dirs()
        (directory,) = node["log_dirs"]
        assert directory["log_dir"] == broker.data
        sizes = {
            (topic["name"], one["partition_index"]): one["partition_size"]
            for topic in directory["topics"]
            for one in topic["partitions"]
        }
        assert sizes["placed", 0] > 5000
        assert sizes["placed", 1] == 0
        assert not any(name.startswith("__") for name, _ in sizes)
        part = PythonPartition("placed", 0)
        assert client.alter_partition_reassignments({part: [node["broker"]]}) == {part: None}
        moved = client.alter_partition_reassignments({part: [7]})
        assert moved[part] is not None
        assert client.list_partition_reassignments() == {}
        asked = {"placed": [0, 9]}
        (elected,) = client.elect_leaders(0, asked, raise_errors=False).replica_election_results
        codes = [one.error_code for one in elected.partition_result]
        assert codes == [Code.ELECTION_NOT_NEEDED, Code.UNKNOWN_TOPIC_OR_PARTITION]
        replica = TopicPartitionReplica("placed", 0, node["broker"])
        assert client.alter_replica_log_dirs({replica: broker.data})[replica].errno == Code.NONE
        elsewhere = client.alter_replica_log_dirs({replica: "/elsewhere"})
        assert elsewhere[replica].errno == Code.LOG_DIR_NOT_FOUND
    finally:
        client.close()


def test_kafka_python_administers_too(broker: BrokerProcess) -> None:
    client = KafkaAdminClient(bootstrap_servers=broker.kafka)
    try:
        client.create_topics({"python-made": {"num_partitions": 2, "replication_factor": 1}})
        assert "python-made" in client.list_topics()
        client.delete_topics(["python-made"])
        assert "python-made" not in client.list_topics()
    finally:
        client.close()


def test_kafka_python_asks_what_newer_brokers_answer(broker: BrokerProcess) -> None:
    make_topic(broker, "paged", 3)
    client = KafkaAdminClient(bootstrap_servers=broker.kafka)
    try:
        first = client.describe_topic_partitions(["paged"], response_partition_limit=2)
        assert [one["partition_index"] for one in first["topics"][0]["partitions"]] == [0, 1]
        rest = client.describe_topic_partitions(["paged"], cursor=first["next_cursor"])
        assert [one["partition_index"] for one in rest["topics"][0]["partitions"]] == [2]
        assert rest["next_cursor"] is None
        found = client.list_config_resources()
        assert found["broker"] == ["1"]
        assert "paged" in found["topic"]
        [metadata] = client.describe_metadata_quorum()["topics"]
        assert metadata["partitions"][0]["leader_id"] == 1
    finally:
        client.close()
