"""What one client of Kafka produces every other reads, in every compression; and topics that they
make by producing to them."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiokafka.errors import UnknownTopicOrPartitionError
from confluent_kafka import KafkaError, KafkaException

from broker_process import BrokerProcess
from clients.making import KAFKA, make_topic, produce
from clients.readers import (
    COMPRESSIONS,
    PRODUCERS,
    READERS,
    kafka_python_has,
    produce_by_aiokafka,
    require_kcat,
)

VALUES = [b"value %d " % number + b"x" * 50 for number in range(100)]


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_client_reads_what_another_produced(
    broker: BrokerProcess, producer: str, compression: str
) -> None:
    if producer == "kcat":
        require_kcat()
    if producer == "kafka-python" and not kafka_python_has(compression):
        pytest.skip(f"kafka-python has no {compression}: pip install kafka-python[{compression}]")
    topic = make_topic(broker, f"{producer}-{compression}")
    PRODUCERS[producer](broker, topic, VALUES, compression)
    for name in ("librdkafka", "aiokafka"):
        assert READERS[name](broker, topic, len(VALUES)) == VALUES, name
    if kafka_python_has(compression):
        assert READERS["kafka-python"](broker, topic, len(VALUES)) == VALUES


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("producer", ["librdkafka", "aiokafka"])
def test_kcat_reads_what_another_produced(
    broker: BrokerProcess, producer: str, compression: str
) -> None:
    require_kcat()
    topic = make_topic(broker, f"for-kcat-{producer}-{compression}")
    PRODUCERS[producer](broker, topic, VALUES, compression)
    assert READERS["kcat"](broker, topic, len(VALUES)) == VALUES


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_topic_is_made_by_producing_to_it(broker: BrokerProcess, producer: str) -> None:
    if producer == "kcat":
        require_kcat()
    topic = f"made-by-{producer}"
    PRODUCERS[producer](broker, topic, VALUES[:3], "none")
    assert READERS["librdkafka"](broker, topic, 3) == VALUES[:3]
    assert broker.get(f"/v1/topics/{topic}").json()["partitions"] == 3


def test_a_broker_that_is_not_to_make_topics_makes_none(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *KAFKA, "--topic-auto-create", "off") as broker:
        broker.wait_until_ready()
        with pytest.raises(KafkaException) as refusal:
            produce(broker, "absent", [b"x"], options={"message.timeout.ms": 2000})
        # It asks again and again whether the topic is there now.
        assert refusal.value.args[0].code() in {
            KafkaError._UNKNOWN_TOPIC,
            KafkaError._MSG_TIMED_OUT,
            KafkaError.UNKNOWN_TOPIC_OR_PART,
        }
        with pytest.raises(UnknownTopicOrPartitionError):
            produce_by_aiokafka(broker, "absent", [b"x"], request_timeout_ms=1000)
        assert broker.get("/v1/topics").json()["topics"] == []
