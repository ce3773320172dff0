"""An Apache Kafka, as it is: what the sink writes there is there, and our source reads it."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from bench.kafka_peer import jars, running
from confluent_kafka.admin import AdminClient, NewTopic

from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

KIND = "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
ANSWER_S = 30
# It starts another JVM.
pytestmark = pytest.mark.slow
names = itertools.count()


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of one that was started."""
    library = jars()
    if library is None:
        pytest.skip("Kafka's jars are missing: set KAFKA_HOME, or run `make kafka-peer`")
    if shutil.which("java") is None:
        pytest.skip("java is missing: apt-get install default-jre-headless")
    with running(tmp_path_factory.mktemp("kafka"), library, mode="none", partitions=3) as server:
        yield server


def made(kafka: str, **config: str) -> str:
    """A topic of three partitions."""
    name = f"apache-{next(names)}"
    admin = AdminClient({"bootstrap.servers": kafka})
    for done in admin.create_topics([NewTopic(name, 3, 1, config=config)]).values():
        done.result(ANSWER_S)
    return name


def write(frame: DataFrame, kafka: str, topic: str, **options: str) -> None:
    writer = frame.write.format("millstream").mode("append").options(**options)
    writer.option("kafka.bootstrap.servers", kafka).option("topic", topic).save()


def read(spark: SparkSession, kafka: str, topic: str) -> list[Any]:
    reader = spark.read.format("millstream").option("kafka.bootstrap.servers", kafka)
    return reader.option("subscribe", topic).option("includeHeaders", "true").load().collect()


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_rows_with_keys_and_headers_are_as_they_were(
    spark: SparkSession, kafka: str, compression: str
) -> None:
    topic = made(kafka)
    rows: list[tuple[Any, ...]] = [
        (b"key-%d" % (n % 50), b"%d" % n, [("n", b"%d" % n), ("none", None)]) for n in range(2000)
    ]
    rows += [(None, b"no key", None), (b"tombstone", None, [])]
    frame = spark.createDataFrame(rows, KIND).repartition(2)
    write(frame, kafka, topic, compression=compression)
    found = read(spark, kafka, topic)
    # Nothing failed, so nothing is there twice.
    assert {_row(one) for one in found} == {
        (key, value, tuple(headers or ())) for key, value, headers in rows
    }
    assert len(found) == len(rows)
    for one in found:
        if one.key is not None:
            assert one.partition == partition_of_key(bytes(one.key), 3)


def _row(one: Any) -> tuple[Any, ...]:
    key, value = (None if b is None else bytes(b) for b in (one.key, one.value))
    headers = [(h.key, None if h.value is None else bytes(h.value)) for h in one.headers or ()]
    return key, value, tuple(headers)


def test_every_row_of_a_stream_is_there(spark: SparkSession, kafka: str, tmp_path: Any) -> None:
    topic = made(kafka)
    spark.range(500).selectExpr("CAST(id AS STRING) AS value").write.json(str(tmp_path / "rows"))
    rows = spark.readStream.schema("value STRING").json(str(tmp_path / "rows"))
    query = (
        rows.writeStream.format("millstream")
        .options(**{"kafka.bootstrap.servers": kafka, "topic": topic})
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(int(one.value) for one in read(spark, kafka, topic)) == list(range(500))


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_a_value_of_ten_megabytes_goes_there_and_back(
    spark: SparkSession, kafka: str, compression: str
) -> None:
    topic = made(kafka, **{"max.message.bytes": "12000000"})
    value = random.Random(1).randbytes(10_000_000)
    frame = spark.createDataFrame([(b"k", value, [("h", b"v")])], KIND)
    write(frame, kafka, topic, compression=compression)
    assert [_row(one) for one in read(spark, kafka, topic)] == [(b"k", value, (("h", b"v"),))]


def test_a_row_that_its_topic_does_not_take_is_named(spark: SparkSession, kafka: str) -> None:
    topic = made(kafka, **{"max.message.bytes": "3000"})
    chance = random.Random(2)
    small = [(b"k", chance.randbytes(100), None) for _ in range(200)]
    large = spark.createDataFrame([*small, (b"k", chance.randbytes(3000), None)], KIND).coalesce(1)
    with pytest.raises(Exception, match=r"row 200 of task 0.*takes 3000; raise its max\.message"):
        write(large, kafka, topic)
    # What is not too large is in batches that the topic takes.
    write(spark.createDataFrame(small, KIND), kafka, topic, batchSize="1M")
    assert len(read(spark, kafka, topic)) == 200
