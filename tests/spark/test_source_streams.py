"""The source in Spark, as a stream: limits, restarts, groups, and topics that change under it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer
from pyspark.errors import StreamingQueryException

from broker_process import BrokerProcess, wait_until
from spark.producing import client_of, fill, kafka_of, make_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class Streams:
    """Queries on one broker, whose rows are gathered batch by batch."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, folder: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.folder = folder
        self.batches: list[list[tuple[str, int, int]]] = []
        self.queries: list[StreamingQuery] = []

    def start(
        self, topic: str, *, name: str = "query", available: bool = False, **options: object
    ) -> StreamingQuery:
        reader = self.spark.readStream.format("millstream").option("servers", self.broker.kafka)
        named = {"subscribe": topic, "startingOffsets": "earliest"} | {
            key.replace("__", "."): str(value) for key, value in options.items()
        }
        if "subscribePattern" in named:
            del named["subscribe"]
        writer = (
            reader.options(**named)
            .load()
            .select("topic", "partition", "offset")
            .writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self.folder / name))
        )
        query = (writer.trigger(availableNow=True) if available else writer).start()
        self.queries.append(query)
        return query

    def run(self, topic: str, **options: object) -> list[int]:
        """To the end; how many rows each batch has."""
        before = len(self.batches)
        query = self.start(topic, available=True, name="query", **options)
        query.awaitTermination()
        return [len(batch) for batch in self.batches[before:] if batch]

    def _keep(self, frame: Any, number: int) -> None:
        rows = [(row.topic, row.partition, row.offset) for row in frame.collect()]
        self.batches.append(rows)

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        return sorted(row for batch in self.batches for row in batch)

    def stop(self) -> None:
        for query in self.queries:
            query.stop()


@pytest.fixture
def streams(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Iterator[Streams]:
    made = Streams(spark, broker, tmp_path)
    yield made
    made.stop()


def expected(topic: str, *counts: int) -> list[tuple[str, int, int]]:
    return [(topic, part, offset) for part, count in enumerate(counts) for offset in range(count)]


def committed(broker: BrokerProcess, group: str, topic: str, partitions: int) -> list[int | None]:
    parts = [(topic, number) for number in range(partitions)]
    with kafka_of(broker.kafka) as kafka:
        found = kafka.committed(group, parts)
    return [found.get(part) for part in parts]


def test_limits_hold_with_available_now_and_its_group_is_not_behind(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "limits", 2)
    fill(broker.kafka, ("limits", 0), 300)
    fill(broker.kafka, ("limits", 1), 100)
    counts = streams.run("limits", maxOffsetsPerTrigger=150, groupId="limited")
    assert counts == [150, 150, 100]
    assert streams.rows == expected("limits", 300, 100)
    assert committed(broker, "limited", "limits", 2) == [300, 100]
    # What came later is for the next run, which goes on where this one was.
    fill(broker.kafka, ("limits", 1), 7)
    assert streams.run("limits", maxOffsetsPerTrigger=150, groupId="limited") == [7]
    assert committed(broker, "limited", "limits", 2) == [300, 107]


def test_bytes_are_limited(streams: Streams) -> None:
    make_topic(streams.broker, "bytes")
    fill(streams.broker.kafka, ("bytes", 0), 1000, value=b"v" * 1000, batch_records=20)
    counts = streams.run("bytes", maxBytesPerTrigger="256K")
    assert sum(counts) == 1000
    # A thousand records of a kilobyte.
    assert 3 <= len(counts) <= 6


def test_positions_are_those_of_sparks_connector_and_tell_the_lag(streams: Streams) -> None:
    make_topic(streams.broker, "progress", 2)
    fill(streams.broker.kafka, ("progress", 1), 40)
    query = streams.start("progress", available=True, maxOffsetsPerTrigger=10)
    query.awaitTermination()
    source = json.loads(query.recentProgress[0].json)["sources"][0]
    end, latest = source["endOffset"], source["latestOffset"]
    assert end["progress"] == {"0": 0, "1": 10}
    assert latest["progress"] == {"0": 0, "1": 40}
    assert re.fullmatch(r"[0-9a-f-]{36}", end["@ids"]["progress"])


def test_a_stream_starts_at_the_end_and_waits_for_enough(streams: Streams) -> None:
    make_topic(streams.broker, "enough")
    fill(streams.broker.kafka, ("enough", 0), 10)
    query = streams.start(
        "enough", startingOffsets="latest", minOffsetsPerTrigger=20, groupId="waiting"
    )
    # It is there, at the end, when its group says so.
    wait_until(lambda: committed(streams.broker, "waiting", "enough", 1) == [10], "the start")
    fill(streams.broker.kafka, ("enough", 0), 5)
    wait_until(lambda: len(streams.rows) == 5, "the first batch, which waits for nothing")
    fill(streams.broker.kafka, ("enough", 0), 6)
    fill(streams.broker.kafka, ("enough", 0), 14)
    wait_until(lambda: len(streams.rows) == 25, "twenty more")
    assert [len(batch) for batch in streams.batches if batch] == [5, 20]
    assert query.isActive


def test_new_partitions_and_topics_are_read_from_their_start(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "grow-one")
    fill(broker.kafka, ("grow-one", 0), 3)
    streams.start("", subscribePattern="grow-.*")
    wait_until(lambda: len(streams.rows) == 3, "what is there")
    with client_of(broker) as client:
        client.topics.add_partitions("grow-one", 2)
    fill(broker.kafka, ("grow-one", 1), 4)
    make_topic(broker, "grow-two")
    fill(broker.kafka, ("grow-two", 0), 5)
    wait_until(lambda: len(streams.rows) == 12, "what came with a partition and a topic")
    assert streams.rows == expected("grow-one", 3, 4) + expected("grow-two", 5)


def test_a_topic_that_is_made_again_fails_the_query(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "replaced")
    fill(broker.kafka, ("replaced", 0), 10)
    query = streams.start("replaced")
    wait_until(lambda: len(streams.rows) == 10, "the first rows")
    with client_of(broker) as client:
        client.topics.delete("replaced")
    make_topic(broker, "replaced")
    fill(broker.kafka, ("replaced", 0), 30)
    with pytest.raises(StreamingQueryException, match="records from 10 on of replaced/0 are gone"):
        query.awaitTermination(60)
    assert len(streams.rows) == 10


def test_a_topic_that_is_made_again_is_read_anew_when_loss_is_allowed(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "allowed")
    fill(broker.kafka, ("allowed", 0), 10)
    assert streams.run("allowed", failOnDataLoss=False) == [10]
    with client_of(broker) as client:
        client.topics.delete("allowed")
    make_topic(broker, "allowed")
    fill(broker.kafka, ("allowed", 0), 4)
    assert streams.run("allowed", failOnDataLoss=False) == [4]
    assert streams.batches[-1] == expected("allowed", 4)


def test_a_query_that_named_another_topic_by_mistake_goes_on_with_its_own(streams: Streams) -> None:
    for topic in ("mine", "mistaken"):
        make_topic(streams.broker, topic)
        fill(streams.broker.kafka, (topic, 0), 5)
    assert streams.run("mine") == [5]
    with pytest.raises(StreamingQueryException, match="mine is no longer subscribed"):
        streams.run("mistaken")
    fill(streams.broker.kafka, ("mine", 0), 3)
    assert streams.run("mine") == [3]


def test_retention_that_overtakes_a_query_is_told_or_skipped(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "overtaken")
    fill(broker.kafka, ("overtaken", 0), 10)
    assert streams.run("overtaken") == [10]
    fill(broker.kafka, ("overtaken", 0), 10)
    with client_of(broker) as client:
        client.topics.purge("overtaken")
    fill(broker.kafka, ("overtaken", 0), 10)
    with pytest.raises(StreamingQueryException, match="offsets 10 to 19 of overtaken/0 are gone"):
        streams.run("overtaken")
    assert streams.run("overtaken", failOnDataLoss=False) == [10]
    assert streams.batches[-1] == [("overtaken", 0, offset) for offset in range(20, 30)]


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Callable[[], BrokerProcess]]:
    """Starts, and starts again, a broker on the same data and addresses."""
    started: list[BrokerProcess] = []

    def start() -> BrokerProcess:
        flags = ["--kafka", started[-1].kafka if started else "127.0.0.1:0"]
        if started:
            flags += ["--http", started[-1].url("").removeprefix("http://")]
        started.append(BrokerProcess(str(tmp_path / "broker"), *flags))
        return started[-1].wait_until_ready()

    (tmp_path / "broker").mkdir()
    yield start
    for process in started:
        process.__exit__()


def test_a_broker_that_is_killed_under_a_query_costs_no_row_and_doubles_none(
    spark: SparkSession, restarted: Callable[[], BrokerProcess], tmp_path: Path
) -> None:
    broker = restarted()
    make_topic(broker, "endless", 2)
    fill(broker.kafka, ("endless", 0), 50)
    streams = Streams(spark, broker, tmp_path)
    query = streams.start("endless", maxOffsetsPerTrigger=20)
    wait_until(lambda: len(streams.rows) >= 20, "a first batch")
    broker.process.kill()
    broker.process.wait()
    again: list[BrokerProcess] = []
    starter = threading.Thread(target=lambda: again.append(restarted()))
    starter.start()
    starter.join()
    fill(again[0].kafka, ("endless", 1), 30)
    wait_until(lambda: len(streams.rows) >= 80, "all rows")
    assert streams.rows == expected("endless", 50, 30)
    assert query.isActive
    streams.stop()


def test_a_group_is_never_ahead_of_a_query_that_goes_on(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "behind-it")
    fill(broker.kafka, ("behind-it", 0), 40)
    keep = streams._keep
    ahead: list[tuple[int, int]] = []

    def looked(frame: Any, number: int) -> None:
        keep(frame, number)
        done = committed(broker, "followers", "behind-it", 1)[0] or 0
        first = min((row[2] for row in streams.batches[-1]), default=done)
        if done > first:
            ahead.append((done, first))

    streams._keep = looked  # type: ignore[method-assign]
    query = streams.start("behind-it", groupId="followers", maxOffsetsPerTrigger=8)
    wait_until(lambda: len(streams.rows) == 40, "what is there")
    wait_until(lambda: committed(broker, "followers", "behind-it", 1) == [40], "its commit")
    fill(broker.kafka, ("behind-it", 0), 16)
    wait_until(lambda: committed(broker, "followers", "behind-it", 1) == [56], "the rest")
    assert ahead == []
    assert len([batch for batch in streams.batches if batch]) == 7
    assert query.isActive


def test_a_group_with_members_refuses_and_the_query_goes_on(streams: Streams) -> None:
    broker = streams.broker
    make_topic(broker, "shared")
    fill(broker.kafka, ("shared", 0), 10)
    member = Consumer(
        {
            "bootstrap.servers": broker.kafka,
            "group.id": "crowded",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        member.subscribe(["shared"])
        wait_until(lambda: member.poll(0.1) is not None, "a member that is at work")
        query = streams.start("shared", groupId="crowded")
        wait_until(lambda: len(streams.rows) == 10, "what is there")
        fill(broker.kafka, ("shared", 0), 5)
        wait_until(lambda: len(streams.rows) == 15, "what came since")
        assert query.isActive
        assert committed(broker, "crowded", "shared", 1) == [None]
    finally:
        member.close()
    # Its last member is gone; the query goes on, and the group is told.
    wait_until(lambda: committed(broker, "crowded", "shared", 1) == [15], "the commit")


def test_options_of_batches_are_refused(streams: Streams) -> None:
    make_topic(streams.broker, "refusing")
    with pytest.raises(Exception, match="streams do not end"):
        streams.run("refusing", endingOffsets="latest")
