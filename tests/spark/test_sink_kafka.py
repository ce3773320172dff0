"""Rows for a broker that is known by the Kafka protocol alone: an idempotent producer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from broker_process import BrokerProcess
from millstream.client import Client
from millstream.errors import KafkaRefused, RowInvalid
from millstream.log.batch import encode, read_header, verify
from millstream.spark import kafka_sink
from millstream.spark.encoding import Encoder, TopicShape
from millstream.spark.kafka_client import Broken, Connection, Kafka
from millstream.spark.kafka_sink import IdempotentProducer, Part, numbered, produce_rows
from millstream.spark.sink_options import SinkOptions, sink_options
from millstream.spark.staging import TaskPlace
from millstream.wire.kafka import produce, produce_request
from millstream.wire.partitioning import partition_of_key
from millstream.wire.staged import StagedEntry

PLACE = TaskPlace("w", 0, 0, 0)
NOW_MS = 1_800_000_000_000
names = itertools.count()


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url("")) as made:
        yield made


@pytest.fixture
def topic(client: Client) -> str:
    return client.topics.create(f"kafka-sink-{next(names)}", partitions=3).name


def options(broker: BrokerProcess, topic: str, **given: str) -> SinkOptions:
    return sink_options(
        {"servers": broker.kafka, "topic": topic, "batchSize": "1K", **given}, {}, is_stream=False
    )


def rows(count: int) -> Any:
    values = pa.array([b"%d" % n for n in range(count)], pa.binary())
    keys = pa.array([b"k%d" % (n % 10) for n in range(count)], pa.binary())
    return pa.RecordBatch.from_arrays([keys, values], names=["key", "value"])


def produced(broker: BrokerProcess, topic: str, batches: Iterable[Any], **given: str) -> None:
    produce_rows(batches, options(broker, topic, **given), PLACE, lambda: NOW_MS)


def numbers(client: Client, topic: str) -> list[int]:
    return sorted(int(one.text) for one in client.read(topic))


def test_rows_are_produced_where_their_keys_say(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    produced(broker, topic, [rows(1000)], compression="zstd")
    assert numbers(client, topic) == list(range(1000))
    for one in client.read(topic):
        assert one.partition == partition_of_key(one.key or b"", 3)
    of_key = [int(one.text) for one in client.read(topic) if one.key == b"k3"]
    assert of_key == sorted(of_key)


def test_a_request_whose_answer_is_lost_is_sent_again_and_stored_once(
    broker: BrokerProcess, client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = iter([True, False, True])
    exchange = kafka_sink._produced

    def lossy(
        connection: Connection, client_id: str, batches: dict[Part, bytes]
    ) -> list[produce_request.Answered]:
        answer = exchange(connection, client_id, batches)
        if next(lost, False):
            raise Broken("the answer was lost")
        return answer

    monkeypatch.setattr(kafka_sink, "_produced", lossy)
    produced(broker, topic, [rows(500)])
    assert next(lost, None) is None
    assert numbers(client, topic) == list(range(500))


def test_a_producer_that_the_broker_forgot_is_introduced_again(
    broker: BrokerProcess, client: Client, topic: str
) -> None:
    with Kafka(options(broker, topic).place, [broker.kafka]) as kafka:
        producer = IdempotentProducer(kafka)
        encoder = encoder_of(topic)
        producer.send(encoder.encode(rows(100), 0).entries)
        # As after a gap that only a broker's loss can make.
        producer._sequences = {part: at + 7 for part, at in producer._sequences.items()}
        producer.send(encoder.encode(rows(100), 0).entries)
    assert numbers(client, topic) == sorted([*range(100), *range(100)])


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """How many of the next answers know nothing of the producer, for all of their batches; and
    the producers that were introduced."""
    left, introduced = [0], list[int]()
    exchange, introduce = kafka_sink._produced, IdempotentProducer._introduced

    def refuse(
        connection: Connection, client_id: str, batches: dict[Part, bytes]
    ) -> list[produce_request.Answered]:
        if not left[0]:
            return exchange(connection, client_id, batches)
        left[0] -= 1
        code = kafka_sink.UNKNOWN_PRODUCER_ID
        return [produce_request.Answered(*part, code, -1) for part in batches]

    def note(self: IdempotentProducer, part: Part) -> produce_request.Producer:
        found = introduce(self, part)
        introduced.append(found.id)
        return found

    monkeypatch.setattr(kafka_sink, "_produced", refuse)
    monkeypatch.setattr(IdempotentProducer, "_introduced", note)
    return left, introduced


def test_a_producer_is_introduced_once_however_many_partitions_forgot_it(
    broker: BrokerProcess, client: Client, refusing: tuple[list[int], list[int]]
) -> None:
    left, introduced = refusing
    topic = client.topics.create(f"kafka-sink-{next(names)}", partitions=20).name
    left[0] = 1
    produced(broker, topic, [rows(500)], batchSize="64K")
    assert len(introduced) == 2
    assert numbers(client, topic) == list(range(500))


def test_a_producer_that_is_forgotten_now_and_then_goes_on(
    broker: BrokerProcess, client: Client, topic: str, refusing: tuple[list[int], list[int]]
) -> None:
    left, introduced = refusing
    with Kafka(options(broker, topic).place, [broker.kafka]) as kafka:
        producer, encoder = IdempotentProducer(kafka), encoder_of(topic)
        for _ in range(kafka_sink.RENEWALS_MAX + 2):
            left[0] = 1
            producer.send(encoder.encode(rows(10), 0).entries)
        assert len(introduced) == kafka_sink.RENEWALS_MAX + 3
        assert len(numbers(client, topic)) == 10 * (kafka_sink.RENEWALS_MAX + 2)
        left[0] = kafka_sink.RENEWALS_MAX + 1
        with pytest.raises(KafkaRefused, match="UNKNOWN_PRODUCER_ID"):
            producer.send(encoder.encode(rows(10), 0).entries)


def encoder_of(topic: str) -> Encoder:
    shape = TopicShape(topic, 3, "murmur2", 1000, False)
    return Encoder(
        topic=topic,
        compression="none",
        batch_bytes=1000,
        shape_of=lambda _: shape,
        now_ms=lambda: NOW_MS,
    )


def test_a_bad_row_fails_the_task(broker: BrokerProcess, topic: str) -> None:
    with pytest.raises(RowInvalid, match=r"row 0 of task 0.*no topic nowhere"):
        produced(broker, "nowhere", [rows(1)])
    wrong = pa.RecordBatch.from_arrays(
        [pa.array([b"v"]), pa.array([5], pa.int32())], names=["value", "partition"]
    )
    with pytest.raises(RowInvalid, match="no partition 5"):
        produced(broker, topic, [wrong])


def test_a_broker_that_refuses_a_batch_fails_the_task(
    broker: BrokerProcess, client: Client
) -> None:
    topic = f"kafka-sink-{next(names)}"
    client.topics.create(topic, partitions=1, settings={"compact": True})
    keyless = pa.RecordBatch.from_arrays([pa.array([b"v"])], names=["value"])
    with pytest.raises(KafkaRefused):
        produced(broker, topic, [keyless])


# ---- how large


def made(client: Client, limit: str, partitions: int = 1) -> str:
    settings = {"message_bytes_max": limit}
    name = f"kafka-sink-{next(names)}"
    return client.topics.create(name, partitions=partitions, settings=settings).name


def of(*values: bytes) -> Any:
    return pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], names=["value"])


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_value_of_ten_megabytes_is_written_where_the_topic_takes_it(
    broker: BrokerProcess, client: Client, compression: str
) -> None:
    topic = made(client, "16M")
    value = random.Random(1).randbytes(10_000_000)
    produced(broker, topic, [of(value, b"small")], compression=compression)
    assert {one.value for one in client.read(topic)} == {value, b"small"}


def test_a_row_that_the_topic_does_not_take_fails_the_task_in_words_of_kafka(
    broker: BrokerProcess, client: Client
) -> None:
    topic = made(client, "20K")
    large = random.Random(2).randbytes(30_000)
    batches = [of(*[b"small"] * 700, large, b"small")]
    with pytest.raises(RowInvalid, match=r"row 700 of task 0.*takes 20480; raise its max\.message"):
        produced(broker, topic, batches)
    assert list(client.read(topic)) == []


def test_what_is_small_enough_when_it_is_compressed_is_written(
    broker: BrokerProcess, client: Client
) -> None:
    topic = made(client, "20K")
    produced(broker, topic, [of(b"0" * 100_000)])
    with pytest.raises(RowInvalid, match="as a batch it has 100"):
        produced(broker, topic, [of(b"0" * 100_000)], compression="none")
    assert [len(one.value or b"") for one in client.read(topic)] == [100_000]


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip"])
def test_batches_are_no_larger_than_the_topic_takes(
    broker: BrokerProcess, client: Client, compression: str
) -> None:
    topic = made(client, "5000")
    chance = random.Random(3)
    values = [chance.randbytes(400) for _ in range(300)]
    produced(broker, topic, [of(*values)], compression=compression, batchSize="1M")
    assert [one.value for one in client.read(topic)] == values


def test_a_topic_that_does_not_say_what_it_takes_is_written_to(
    broker: BrokerProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Kafka, "topic_config", lambda *_: None)
    topic = made(client, "20K")
    produced(broker, topic, [of(b"small")])
    with pytest.raises(KafkaRefused, match="MESSAGE_TOO_LARGE"):
        produced(broker, topic, [of(b"0" * 100_000)], compression="none")
    assert [one.value for one in client.read(topic)] == [b"small"]


def test_the_size_of_a_request_may_be_limited(broker: BrokerProcess, client: Client) -> None:
    topic = made(client, "1M", partitions=3)
    limit = {"kafka.max.request.size": "2000"}
    with pytest.raises(RowInvalid, match=r"raise the option kafka\.max\.request\.size"):
        produced(broker, topic, [of(b"0" * 2001)], **limit)
    produced(broker, topic, [rows(1000)], **limit)
    assert numbers(client, topic) == list(range(1000))


def test_a_request_has_as_many_batches_as_there_is_room_for(
    broker: BrokerProcess, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[list[int]] = []
    monkeypatch.setattr(
        IdempotentProducer, "_store", lambda _, some: stored.append([len(b) for b in some.values()])
    )
    with Kafka(options(broker, topic).place, [broker.kafka]) as kafka:
        sizes = [(0, 400), (1, 300), (2, 400), (0, 5000), (1, 10)]
        entries = [StagedEntry(topic, part, 0, b"x" * size) for part, size in sizes]
        IdempotentProducer(kafka, 800).send(entries)
    assert stored == [[400, 300], [5000], [10, 400]]


# ---- the bytes


def test_requests_are_what_the_broker_reads() -> None:
    body = produce_request.produce_request({("a", 1): b"one", ("b", 0): b"two"}, 5000)
    read = produce.read(memoryview(body), produce_request.PRODUCE_VERSION)
    assert (read.transactional_id, read.acks) == (None, -1)
    found = [(name, [(p.number, bytes(p.records or b"")) for p in ps]) for name, ps in read.topics]
    assert found == [("a", [(1, b"one")]), ("b", [(0, b"two")])]


def test_answers_are_what_the_broker_writes() -> None:
    results = [("a", [produce.Result(1, 0, 77), produce.Result(2, 3)])]
    pieces = produce.response(results, produce_request.PRODUCE_VERSION)
    frame = memoryview(b"\0\0\0\0" + b"".join(map(bytes, pieces)))
    assert produce_request.read_produced(frame) == [("a", 1, 0, 77), ("a", 2, 3, -1)]


def test_a_batch_gets_its_numbers_and_stays_whole() -> None:
    batch = encode([(1, b"k", b"v", ())] * 3, compression="lz4", lane="low")
    made = numbered(batch, read_header(batch), produce_request.Producer(9, 2), 2**31 - 2)
    header = verify(made, bytes_max=1000)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (9, 2, 2**31 - 2)
    assert made[61:] == batch[61:]
