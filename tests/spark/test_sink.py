"""The sink in a real Spark, with a real broker: what is written is there, whole and once."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from broker_process import BrokerProcess
from millstream.client import Client
from millstream.log.batch import COMPRESSIONS, LANES
from millstream.wire.partitioning import partition_of_key

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOW = datetime.now(UTC).replace(microsecond=123_000)
ALL_COLUMNS = (
    "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
    "partition INT, lane STRING, deliver_at TIMESTAMP, timestamp TIMESTAMP"
)
names = itertools.count()


@pytest.fixture(scope="module")
def client(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url("")) as made:
        yield made


@pytest.fixture
def topic(client: Client) -> str:
    return client.topics.create(f"sink-{next(names)}", partitions=3).name


def write(frame: DataFrame, broker: BrokerProcess, **options: object) -> None:
    writer = frame.write.format("millstream").mode("append").option("server", broker.url(""))
    writer.options(**{name: str(value) for name, value in options.items()}).save()


def values(client: Client, topic: str) -> list[bytes | None]:
    return sorted((one.value for one in client.read(topic)), key=lambda value: value or b"")


def numbered(spark: SparkSession, count: int, tasks: int = 2) -> DataFrame:
    return spark.range(0, count, 1, tasks).selectExpr(
        "CONCAT('key-', id % 7) AS key", "CAST(id AS STRING) AS value"
    )


# ---- what is written


def test_every_column_comes_out_as_it_was(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    headers = [("one", b"1"), ("none", None), ("one", b"again")]
    rows: list[tuple[Any, ...]] = [
        (b"k", b"v", headers, topic, 2, "high", None, NOW - timedelta(hours=1)),
        (None, None, None, topic, None, None, None, None),
        (b"", b"", [], topic, 0, "background", NOW - timedelta(days=1), NOW),
        (b"key", b"keyed", None, topic, None, "normal", None, None),
    ]
    write(spark.createDataFrame(rows, ALL_COLUMNS), broker)
    found = {one.value: one for one in client.read(topic)}
    assert len(found) == 4
    full = found[b"v"]
    assert (full.key, full.partition, full.lane) == (b"k", 2, "high")
    assert list(full.headers) == headers
    assert full.timestamp_ms == int((NOW - timedelta(hours=1)).timestamp() * 1000)
    empty = found[None]
    assert (empty.key, empty.headers, empty.lane) == (None, (), "normal")
    assert abs(empty.timestamp_ms / 1000 - datetime.now(UTC).timestamp()) < 3600
    assert (found[b""].key, found[b""].partition, found[b""].lane) == (b"", 0, "background")
    assert found[b"keyed"].partition == partition_of_key(b"key", 3)


def test_text_is_written_and_a_topic_is_made(
    spark: SparkSession, broker: BrokerProcess, client: Client
) -> None:
    topic = f"sink-made-{next(names)}"
    write(numbered(spark, 1000), broker, topic=topic)
    found = list(client.read(topic))
    assert sorted(int(one.text) for one in found) == list(range(1000))
    partitions = client.topics.describe(topic).partitions
    assert all(one.partition == partition_of_key(one.key or b"", partitions) for one in found)
    # Of one key and one task, in their order.
    for key in {one.key for one in found}:
        of_key = [int(one.text) for one in found if one.key == key]
        for task in (range(500), range(500, 1000)):
            mine = [number for number in of_key if number in task]
            assert mine == sorted(mine)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_compression_can_be_read(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str, compression: str
) -> None:
    write(numbered(spark, 2000), broker, topic=topic, compression=compression)
    assert sorted(int(value or b"-1") for value in values(client, topic)) == list(range(2000))


def test_rows_go_to_the_topics_that_they_name(
    spark: SparkSession, broker: BrokerProcess, client: Client
) -> None:
    topics = [f"sink-several-{next(names)}" for _ in range(3)]
    for name, partitions in zip(topics, (1, 3, 5), strict=True):
        client.topics.create(name, partitions=partitions)
    cases = " ".join(f"WHEN {n} THEN '{name}'" for n, name in enumerate(topics))
    frame = spark.range(3000).selectExpr(
        f"CASE id % 3 {cases} END AS topic", "CAST(id AS STRING) AS value"
    )
    write(frame, broker)
    for number, name in enumerate(topics):
        found = sorted(int(value or b"-1") for value in values(client, name))
        assert found == list(range(number, 3000, 3))


def test_records_of_the_source_can_be_written_as_they_were_read(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    rows = [(b"k%d" % n, b"v%d" % n, [("h", b"%d" % n)], LANES[n % 5]) for n in range(50)]
    kind = "key BINARY, value BINARY, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
    write(spark.createDataFrame(rows, f"{kind}, lane STRING"), broker, topic=topic)
    read = (
        spark.read.format("millstream")
        .option("server", broker.url(""))
        .option("subscribe", topic)
        .option("includeHeaders", "true")
        .option("includeLane", "true")
        .load()
    )
    copy = f"{topic}-copy"
    write(read, broker, topic=copy)
    mine, theirs = (
        {(r.key, r.value, r.headers, r.lane, r.timestamp_ms) for r in client.read(name)}
        for name in (topic, copy)
    )
    assert mine == theirs
    assert len(mine) == 50


def test_rows_for_later_are_scheduled(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    later = NOW + timedelta(hours=5)
    rows = [
        (b"k", b"later", None, topic, None, "high", later, None),
        (None, b"later too", None, topic, 1, None, later, None),
        (None, b"now", None, topic, None, None, NOW - timedelta(seconds=1), None),
    ]
    write(spark.createDataFrame(rows, ALL_COLUMNS), broker)
    assert values(client, topic) == [b"now"]
    assert client.schedules.count(topic) == 2
    due = {one.deliver_at_ms for one in client.schedules.pending(topic)}
    assert due == {int(later.timestamp() * 1000)}


def test_a_row_of_ten_megabytes_is_written(
    spark: SparkSession, broker: BrokerProcess, client: Client
) -> None:
    topic = f"sink-large-{next(names)}"
    client.topics.create(topic, partitions=1, settings={"message_bytes_max": "16M"})
    frame = spark.range(2).selectExpr("REPEAT(CAST(id AS STRING), 10000000) AS value")
    write(frame, broker, topic=topic, compression="none")
    assert [(len(v or b""), (v or b"")[:1]) for v in values(client, topic)] == [
        (10_000_000, b"0"),
        (10_000_000, b"1"),
    ]


def test_nothing_to_write_is_fine(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    write(numbered(spark, 10).where("value = 'none'"), broker, topic=topic)
    assert values(client, topic) == []


def test_the_kafka_address_of_a_millstream_is_enough(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    frame = numbered(spark, 10).selectExpr("*", "'high' AS lane")
    writer = frame.write.format("millstream").mode("append").option("topic", topic)
    writer.option("kafka.bootstrap.servers", broker.kafka).save()
    assert {one.lane for one in client.read(topic)} == {"high"}


def test_a_table_of_sql_takes_rows(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    table = topic.replace("-", "_")
    options = f"server '{broker.url('')}', subscribe '{topic}', topic '{topic}'"
    spark.sql(f"CREATE TABLE {table} USING millstream OPTIONS ({options})")
    try:
        rows = "SELECT CAST('k' AS BINARY), CAST(CAST(id AS STRING) AS BINARY) FROM range(5)"
        spark.sql(f"INSERT INTO {table} (key, value) {rows}")
        assert values(client, topic) == [b"0", b"1", b"2", b"3", b"4"]
        assert spark.table(table).count() == 5
    finally:
        spark.sql(f"DROP TABLE {table}")


# ---- once


def test_a_batch_write_with_a_number_is_there_once(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    for _ in range(2):
        write(numbered(spark, 100), broker, topic=topic, writer=f"w-{topic}", batch=3)
    assert len(values(client, topic)) == 100
    write(numbered(spark, 5), broker, topic=topic, writer=f"w-{topic}", batch=4)
    assert len(values(client, topic)) == 105


def test_a_batch_write_leaves_no_writer_behind(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    before = {one.writer for one in client.writers.list()}
    write(numbered(spark, 100), broker, topic=topic)
    assert {one.writer for one in client.writers.list()} == before


def test_a_write_that_fails_leaves_nothing(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    bad = numbered(spark, 5000).selectExpr("*", "IF(value = '4999', 'urgent', NULL) AS lane")
    with pytest.raises(Exception, match=r"row 2499 of task 1.*there is no lane 'urgent'"):
        write(bad, broker, topic=topic)
    assert values(client, topic) == []


def test_the_same_micro_batch_in_another_order_adds_nothing(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    """As a driver that was killed after the commit and before its checkpoint would do it."""
    folder, checkpoint = tmp_path / "rows", tmp_path / "checkpoint"
    numbered(spark, 1000).write.json(str(folder))

    def run(order: str) -> None:
        rows = spark.readStream.schema("key STRING, value STRING").json(str(folder))
        frame = rows.repartition(3, order)
        query = (
            frame.writeStream.format("millstream")
            .option("server", broker.url(""))
            .option("topic", topic)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run("key")
    (checkpoint / "commits" / "0").unlink()
    (checkpoint / "commits" / ".0.crc").unlink(missing_ok=True)
    run("value")
    assert sorted(int(value or b"-1") for value in values(client, topic)) == list(range(1000))
    query_id = json.loads((checkpoint / "metadata").read_text())["id"]
    facts = client.writers.get(query_id)
    assert facts.last is not None
    assert (facts.last.batch, facts.staged_parts, facts.staged_bytes) == (0, 0, 0)


def test_a_stream_goes_on_where_it_was(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    folder = tmp_path / "rows"
    for number in range(3):
        frame = spark.range(number * 100, number * 100 + 100)
        frame.selectExpr("CAST(id AS STRING) AS value").write.mode("append").json(str(folder))
        rows = spark.readStream.schema("value STRING").json(str(folder))
        query = (
            rows.writeStream.format("millstream")
            .option("server", broker.url(""))
            .option("topic", topic)
            .option("writer", f"w-{topic}")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert sorted(int(value or b"-1") for value in values(client, topic)) == list(range(300))
    last = client.writers.get(f"w-{topic}").last
    assert last is not None
    assert last.batch == 2


def test_a_checkpoint_that_was_deleted_is_noticed(
    spark: SparkSession, broker: BrokerProcess, topic: str, tmp_path: Path
) -> None:
    """With a writer of its own name, new rows would pass for old ones."""
    folder = tmp_path / "rows"
    for _ in range(2):
        numbered(spark, 10).write.mode("append").json(str(folder))
        _stream_as(spark, broker, folder, topic, tmp_path / "checkpoint")
    with pytest.raises(Exception, match="checkpoint is older than what it wrote"):
        _stream_as(spark, broker, folder, topic, tmp_path / "another")


def test_a_checkpoint_that_was_deleted_after_its_first_batch_is_noticed(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    """The new query begins with the number that the old one ended with."""
    folder = tmp_path / "rows"
    numbered(spark, 10).write.json(str(folder))
    _stream_as(spark, broker, folder, topic, tmp_path / "checkpoint")
    with pytest.raises(Exception, match="checkpoint is older than what it wrote"):
        _stream_as(spark, broker, folder, topic, tmp_path / "another")
    assert len(values(client, topic)) == 10


def test_a_checkpoint_that_was_put_back_by_one_batch_is_noticed(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str, tmp_path: Path
) -> None:
    """The same query at the same number, with rows that came since."""
    folder, checkpoint, saved = (tmp_path / name for name in ("rows", "checkpoint", "saved"))
    for number in range(3):
        numbered(spark, 10).write.mode("append").json(str(folder))
        if number < 2:
            _stream_as(spark, broker, folder, topic, checkpoint)
        if number == 0:
            shutil.copytree(checkpoint, saved)
    with pytest.raises(Exception, match="with 10 records, and this query has 20 for it"):
        _stream_as(spark, broker, folder, topic, saved)
    assert len(values(client, topic)) == 20


def _stream_as(
    spark: SparkSession, broker: BrokerProcess, folder: Path, topic: str, checkpoint: Path
) -> None:
    rows = spark.readStream.schema("value STRING").json(str(folder))
    query = (
        rows.writeStream.format("millstream")
        .options(server=broker.url(""), topic=topic, writer=f"named-{topic}")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


# ---- what is refused


def test_bad_rows_go_to_the_dead_letters(
    spark: SparkSession, broker: BrokerProcess, client: Client, topic: str
) -> None:
    frame = numbered(spark, 100).selectExpr(
        "*",
        "IF(value IN ('7', '70'), 'urgent', 'high') AS lane",
        "IF(value = '9', 77, 1) AS partition",
    )
    write(frame, broker, topic=topic, onError="deadletter")
    assert len(values(client, topic)) == 97
    letters = {one.record.text: one for one in client.dead_letters.read(topic)}
    assert set(letters) == {"7", "70", "9"}
    assert letters["9"].error == f"topic {topic} has no partition 77; it has 0 to 2"
    assert (letters["7"].reason, letters["7"].deliveries) == ("rejected", 1)
    assert letters["7"].origin.topic == topic
    assert letters["70"].record.key == b"key-0"


@pytest.mark.parametrize(
    ("columns", "option", "words"),
    [
        ("value AS vlaue", "onError", "no column 'vlaue'; did you mean 'value'"),
        ("value", "onErorr", "did you mean 'onError'"),
    ],
)
def test_what_is_wrong_is_said_at_once(
    spark: SparkSession, broker: BrokerProcess, columns: str, option: str, words: str
) -> None:
    frame = numbered(spark, 10).selectExpr(columns)
    with pytest.raises(Exception, match=words):
        write(frame, broker, **{"topic": "nowhere", option: "fail"})


def test_a_topic_is_not_overwritten(spark: SparkSession, broker: BrokerProcess, topic: str) -> None:
    writer = numbered(spark, 10).write.format("millstream").mode("overwrite")
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.options(server=broker.url(""), topic=topic).save()
