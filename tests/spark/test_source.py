"""The source in Spark, as a batch: found by itself, from Python and from SQL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PythonException
from pyspark.sql.types import DataType

from broker_process import BrokerProcess
from millstream.log import batch as batches
from millstream.spark.datasource import MillstreamSource
from spark.producing import client_of, fill, kafka_of, make_topic, produce
from spark.test_options import RIGHT_SCHEMAS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T0 = 1_700_000_000_000


class Source:
    """Tables of one broker."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess) -> None:
        self.spark = spark
        self.broker = broker

    def table(self, topic: str, **options: object) -> DataFrame:
        reader = self.spark.read.format("millstream").option("server", self.broker.url(""))
        named = {name.replace("__", "."): str(value) for name, value in options.items()}
        which = {"assign", "subscribePattern"} & named.keys()
        return reader.options(**(({} if which else {"subscribe": topic}) | named)).load()

    def offsets(self, topic: str, **options: object) -> list[tuple[int, int]]:
        rows = self.table(topic, **options).select("partition", "offset").collect()
        return sorted((row.partition, row.offset) for row in rows)


@pytest.fixture
def source(spark: SparkSession, broker: BrokerProcess) -> Source:
    return Source(spark, broker)


def places(*counts: int) -> list[tuple[int, int]]:
    return [(number, offset) for number, count in enumerate(counts) for offset in range(count)]


@pytest.fixture(scope="module")
def orders(broker: BrokerProcess) -> str:
    """Three partitions with 300, 0 and 150 records."""
    make_topic(broker, "orders", 3)
    fill(broker.kafka, ("orders", 0), 300, batch_records=70)
    fill(broker.kafka, ("orders", 2), 150)
    return "orders"


def test_a_topic_is_a_table_of_kafkas_columns(source: Source, orders: str) -> None:
    frame = source.table(orders)
    assert [(one.name, one.dataType.simpleString()) for one in frame.schema] == [
        ("key", "binary"),
        ("value", "binary"),
        ("topic", "string"),
        ("partition", "int"),
        ("offset", "bigint"),
        ("timestamp", "timestamp"),
        ("timestampType", "int"),
    ]
    row = (
        frame.where("partition = 2 AND offset = 7")
        .selectExpr("*", "unix_millis(timestamp) AS ms")
        .collect()[0]
    )
    assert (bytes(row.key), bytes(row.value), row.topic) == (b"7", b"v7", orders)
    assert (row.ms, row.timestampType) == (T0 + 7, 0)


@pytest.mark.parametrize("access", ["wire", "files", "auto"])
def test_all_ways_give_every_record_once(source: Source, orders: str, access: str) -> None:
    assert source.offsets(orders, access=access) == places(300, 0, 150)


def test_a_broker_is_found_by_its_kafka_address_alone(source: Source, orders: str) -> None:
    reader = source.spark.read.format("millstream").option(
        "kafka.bootstrap.servers", source.broker.kafka
    )
    # And its files, by what it says of itself.
    frame = reader.option("subscribe", orders).option("access", "files").load()
    assert frame.count() == 450


def test_nulls_headers_lanes_and_dead_letters_are_columns(source: Source) -> None:
    make_topic(source.broker, "facts")
    dead = [("ms-dead-topic", b"old"), ("ms-dead-offset", b"9"), ("ms-lane", b"high")]
    with kafka_of(source.broker.kafka) as kafka:
        records: list[Any] = [(T0, None, None, [("h", None)]), (T0, b"", b"", dead)]
        produce(kafka, ("facts", 0), batches.encode(records))
    options = {"includeHeaders": True, "includeLane": True, "includeDeadLetter": True}
    first, second = source.table("facts", **options).orderBy("offset").collect()
    assert first.key is first.value is first.dead_letter is None
    assert [(one.key, one.value) for one in first.headers] == [("h", None)]
    assert first.lane == "normal"
    assert (bytes(second.key), bytes(second.value), second.lane) == (b"", b"", "high")
    assert (second.dead_letter.topic, second.dead_letter.offset) == ("old", 9)
    assert second.dead_letter.error is None


def test_only_chosen_columns_are_there(source: Source, orders: str) -> None:
    assert source.table(orders, columns="offset,key").columns == ["offset", "key"]
    reader = source.spark.read.format("millstream").option("server", source.broker.url(""))
    frame = reader.option("subscribe", orders).schema("topic STRING, offset LONG").load()
    assert frame.columns == ["topic", "offset"]
    assert frame.count() == 450
    wrong = reader.option("subscribe", orders).schema("offset STRING").load()
    with pytest.raises(AnalysisException, match=r"offset string.*leave them out.*offset BIGINT"):
        wrong.count()


def test_json_is_typed_columns(source: Source) -> None:
    make_topic(source.broker, "json")
    values = [b'{"id": 1, "tags": ["a"], "at": {"x": 1.5}}', b'{"id": "no"}', b'{"extra": 1}', None]
    with kafka_of(source.broker.kafka) as kafka:
        records: list[Any] = [(T0, None, value, []) for value in values]
        produce(kafka, ("json", 0), batches.encode(records))
    options = {
        "valueFormat": "json",
        "valueSchema": "id BIGINT, tags ARRAY<STRING>, at STRUCT<x: DOUBLE>",
    }
    rows = source.table("json", **options).orderBy("offset").collect()
    assert (rows[0].value.id, rows[0].value.tags, rows[0].value.at.x) == (1, ["a"], 1.5)
    assert (rows[1].value.id, rows[1]._corrupt_record) == (None, '{"id": "no"}')
    assert (rows[2].value.id, rows[2]._corrupt_record) == (None, None)
    assert rows[3].value is None
    with pytest.raises(PythonException, match=r"value at json/0, offset 1, does not fit"):
        source.table("json", **options, valueMode="failfast").collect()


@pytest.mark.parametrize("schema", RIGHT_SCHEMAS)
def test_what_is_taken_for_a_schema_of_values_is_one_for_spark(
    source: Source, orders: str, schema: str
) -> None:
    frame = source.table(orders, valueFormat="json", valueSchema=schema)
    expected = DataType.fromDDL(f"STRUCT<{schema}>")
    assert frame.schema["value"].dataType.simpleString() == expected.simpleString()


def test_a_wrong_schema_of_values_is_named(source: Source, orders: str) -> None:
    with pytest.raises(AnalysisException, match=r"option valueSchema .* no type 'BIGIT'"):
        source.table(orders, valueFormat="json", valueSchema="id BIGIT")


@contextmanager
def catalog_table(source: Source, topic: str, shape: str = "", more: str = "") -> Iterator[str]:
    """The name of a table of this topic; `shape` is its list of columns."""
    name, sql = "mill_orders", source.spark.sql
    sql(f"DROP TABLE IF EXISTS {name}")
    sql(
        f"CREATE TABLE {name} {shape} USING millstream OPTIONS ("
        f"server '{source.broker.url('')}', subscribe '{topic}'{more})"
    )
    try:
        yield name
    finally:
        sql(f"DROP TABLE {name}")


def test_a_table_of_the_catalog_keeps_its_options(source: Source, orders: str) -> None:
    sql, more = source.spark.sql, r", valueFormat 'text', kafka.client.id 'it\'s'"
    with catalog_table(source, orders, more=more) as name:
        found = sql(f"SELECT count(*) AS n, max(value) AS v FROM {name} WHERE partition = 2")
        assert found.collect()[0].asDict() == {"n": 150, "v": "v99"}
        fewer = sql(
            f"SELECT count(*) AS n FROM {name} WITH (startingOffsets = "
            """'{"orders": {"0": 290, "1": 0, "2": 150}}')"""
        )
        assert fewer.collect()[0].n == 10


def test_a_table_with_a_list_of_columns_says_how_it_is_made(source: Source, orders: str) -> None:
    with catalog_table(source, orders, shape="(value BINARY, offset BIGINT)") as name:
        wanted = r"`CREATE TABLE … .* without a list of col"
        with pytest.raises(AnalysisException, match=wanted):
            source.spark.sql(f"SELECT * FROM {name}").collect()


def test_columns_that_the_source_does_not_have_are_named(source: Source, orders: str) -> None:
    options = {"server": source.broker.url(""), "subscribe": orders}
    frame = source.spark.read.format("millstream").options(**options).schema("key BINARY, n INT")
    with pytest.raises(AnalysisException, match=r"with \.schema\(…\) .* 'n int', .* value BINARY"):
        frame.load().collect()


def test_a_view_in_sql_is_a_topic(source: Source, orders: str) -> None:
    source.spark.sql(
        "CREATE OR REPLACE TEMPORARY VIEW mill_view USING millstream OPTIONS ("
        f"server '{source.broker.url('')}', subscribe '{orders}')"
    )
    assert source.spark.sql("SELECT count(*) AS n FROM mill_view").collect()[0].n == 450


def test_a_source_that_is_registered_is_found_by_its_name(source: Source, orders: str) -> None:
    # As where Spark does not look for it by itself.
    class Registered(MillstreamSource):
        @classmethod
        def name(cls) -> str:
            return "registered"

    options = {"server": source.broker.url(""), "subscribe": orders}
    for one in (Registered, MillstreamSource):
        source.spark.dataSource.register(one)
        frame = source.spark.read.format(one.name()).options(**options).load()
        assert frame.where("partition = 2").count() == 150


# ---- which records


def test_a_batch_begins_and_ends_where_it_is_told(source: Source, orders: str) -> None:
    found = source.offsets(
        orders,
        startingOffsets='{"orders": {"0": 295, "1": -2, "2": 10}}',
        endingOffsets='{"orders": {"0": -1, "1": -1, "2": 12}}',
    )
    assert found == [(0, 295), (0, 296), (0, 297), (0, 298), (0, 299), (2, 10), (2, 11)]


def test_a_batch_begins_and_ends_at_times(source: Source, orders: str) -> None:
    options = {"startingTimestamp": T0 + 140, "endingTimestamp": T0 + 145}
    late = {"startingOffsetsByTimestampStrategy": "latest"}
    found = source.offsets(orders, **options, **late)
    assert found == [(part, offset) for part in (0, 2) for offset in range(140, 145)]
    with pytest.raises(AnalysisException, match="orders/1 has no record that new"):
        source.offsets(orders, **options)
    by_times = {"startingOffsetsByTimestamp": f'{{"orders": {{"0": {T0 + 298}}}}}'}
    assert source.offsets(orders, **by_times, assign='{"orders": [0]}') == [
        (0, 298),
        (0, 299),
    ]


def test_a_batch_does_not_end_before_its_start_or_past_the_log(source: Source, orders: str) -> None:
    late = {"startingOffsets": '{"orders": {"0": 9}}', "assign": '{"orders": [0]}'}
    with pytest.raises(AnalysisException, match="option endingTimestamp is '1700000000005'"):
        source.offsets(orders, **late, endingTimestamp=T0 + 5)
    past = {"endingOffsets": '{"orders": {"0": 301}}', "assign": '{"orders": [0]}'}
    with pytest.raises(AnalysisException, match=r"option endingOffsets .* read up to 300"):
        source.offsets(orders, **past)
    assert len(source.offsets(orders, **past, failOnDataLoss=False)) == 300


def test_who_names_offsets_names_every_partition(source: Source, orders: str) -> None:
    with pytest.raises(AnalysisException, match="says nothing of orders/1, orders/2"):
        source.offsets(orders, startingOffsets='{"orders": {"0": 5}}')


def test_topics_are_found_by_pattern_and_partitions_by_name(source: Source, orders: str) -> None:
    make_topic(source.broker, "orders-more")
    fill(source.broker.kafka, ("orders-more", 0), 5)
    frame = source.table("", subscribePattern="orders(-more)?")
    counts = {row.topic: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert counts == {"orders": 450, "orders-more": 5}
    assert source.offsets(orders, assign='{"orders": [2]}') == [
        (2, offset) for offset in range(150)
    ]
    assert source.table("", subscribePattern="nothing-.*").count() == 0


def test_filters_choose_what_is_read(source: Source, orders: str) -> None:
    def table() -> DataFrame:
        return source.table(orders, pushFilters=True)

    few = table().where("partition = 2 AND offset >= 100 AND offset < 103")
    assert few.rdd.getNumPartitions() == 1
    # What is left for Spark to look at is nothing.
    assert "Filter (" not in few._jdf.queryExecution().executedPlan().toString()
    assert [row.offset for row in few.orderBy("offset").collect()] == [100, 101, 102]
    late = table().where("timestamp >= timestamp_millis(1700000000290)")
    assert late.rdd.getNumPartitions() == 1
    assert sorted(row.offset for row in late.collect()) == list(range(290, 300))
    assert table().where("topic = 'other'").count() == 0
    assert table().where("partition IN (0, 1) AND value = 'v5'").count() == 1


def test_filters_of_one_query_do_not_reach_another(source: Source, orders: str) -> None:
    frame = source.table(orders)
    assert frame.where("partition = 0 AND offset < 10").count() == 10
    assert frame.where("offset = 5 OR partition = 2").count() == 151
    both = frame.where("partition = 0").unionAll(frame.where("partition = 2"))
    assert both.count() == 450


def test_a_range_is_cut_into_more_tasks(source: Source, orders: str) -> None:
    assert source.table(orders).rdd.getNumPartitions() == 2
    assert source.table(orders, minPartitions=6).rdd.getNumPartitions() == 6
    assert source.table(orders, maxRecordsPerPartition=50).rdd.getNumPartitions() == 9
    assert source.offsets(orders, maxRecordsPerPartition=50) == places(300, 0, 150)


def test_a_thousand_partitions_are_read(source: Source) -> None:
    make_topic(source.broker, "wide", 1000)
    with kafka_of(source.broker.kafka) as kafka:
        for number in range(0, 1000, 50):
            produce(kafka, ("wide", number), batches.encode([(T0, None, b"%d" % number, [])]))
    rows = source.table("wide").collect()
    assert sorted(row.partition for row in rows) == list(range(0, 1000, 50))
    assert all(bytes(row.value) == b"%d" % row.partition for row in rows)


def test_a_group_says_where_to_start(source: Source) -> None:
    make_topic(source.broker, "grouped", 2)
    for number in range(2):
        fill(source.broker.kafka, ("grouped", number), 20)
    with kafka_of(source.broker.kafka) as kafka:
        kafka.commit("readers", {("grouped", 0): 15})
    found = source.offsets("grouped", startingOffsets="committed", groupId="readers")
    assert found == [(0, n) for n in range(15, 20)] + [(1, n) for n in range(20)]


# ---- what is refused


def test_what_is_wrong_is_said_before_anything_runs(source: Source, orders: str) -> None:
    with pytest.raises(AnalysisException, match="did you mean 'startingOffsets'"):
        source.table(orders, startingOffset="earliest")
    with pytest.raises(AnalysisException, match="there is no topic 'missing'"):
        source.table("missing").count()
    with pytest.raises(AnalysisException, match="no partition 7"):
        source.table(orders, assign='{"orders": [7]}').count()
    with client_of(source.broker) as client:
        assert "missing" not in {one.name for one in client.topics.list()}
