"""Where rows go is found out before the first of them, and so is what cannot be done there."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from broker_process import BrokerProcess
from millstream.client import Client
from millstream.client.blocking import BlockingWriters
from millstream.errors import ColumnInvalid, OptionInvalid, SaveModeInvalid, WriterAhead
from millstream.spark import sink
from millstream.spark.datasource import remembered_by_tables
from millstream.spark.kafka_client import Kafka
from millstream.spark.options import BROKER_ROWS, read_options, read_place
from millstream.spark.staging import MillstreamBroker, TaskDone, TaskPlace, stage_rows

SCHEMA = StructType().add("value", "string")
OTHER = {"servers": "other:9092", "topic": "orders"}


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the broker's config tells of its HTTP address."""

    def say(address: str | None) -> None:
        monkeypatch.setattr(Kafka, "broker_config", lambda *_: address)

    return say


@pytest.mark.parametrize(
    ("address", "url"),
    [("127.0.0.1:8080", "http://127.0.0.1:8080"), ("https://b:1", "https://b:1"), (None, None)],
)
def test_a_millstream_says_over_kafka_where_its_http_is(
    says: Any, address: str | None, url: str | None
) -> None:
    says(address)
    place = read_place(read_options({"servers": "one:9092"}, BROKER_ROWS), {})
    assert sink.http_of(place) == url


def test_a_millstream_that_does_not_say_is_not_taken_for_another_broker(says: Any) -> None:
    says("127.0.0.1:0")
    with pytest.raises(OptionInvalid, match="give the option server too"):
        sink.stream_writer(OTHER, SCHEMA, False)


def test_another_broker_gets_rows_at_least_once_and_the_log_says_so(
    says: Any, caplog: pytest.LogCaptureFixture
) -> None:
    says(None)
    with caplog.at_level(logging.WARNING):
        assert sink.batch_writer(OTHER, SCHEMA, False).target.url is None
    assert "other:9092 is no Millstream: rows are written at least once" in caplog.text


@pytest.mark.parametrize("given", [{"onError": "deadletter"}, {"writer": "w", "batch": "1"}])
def test_what_another_broker_cannot_do_is_refused(says: Any, given: dict[str, str]) -> None:
    says(None)
    with pytest.raises(OptionInvalid, match="only Millstream"):
        sink.batch_writer(OTHER | given, SCHEMA, False)
    for column, kind in (("lane", "string"), ("deliver_at", "timestamp")):
        schema = StructType().add("value", "string").add(column, kind)
        with pytest.raises(ColumnInvalid, match="Millstream alone"):
            sink.batch_writer(OTHER, schema, False)


HERE, THERE = "http://127.0.0.1:8080", "http://there:8080"


def read_from_a_table(**made_with: str) -> StructType:
    comment = remembered_by_tables({"provider": "millstream", "subscribe": "tt", **made_with})
    text = comment.removeprefix(" COMMENT '").removesuffix("'")
    return StructType().add("value", "string", metadata={"comment": text})


def test_rows_of_an_insert_go_where_their_table_is() -> None:
    schema = read_from_a_table(server=THERE, topic="tt", compression="zstd")
    for given in ({}, {"batchSize": "1K"}):
        target = sink.batch_writer(given, schema, False).target
        assert (target.url, target.options.topic) == (THERE, "tt")
        assert target.options.compression == "zstd"
    own = sink.batch_writer({"compression": "none"}, schema, False).target.options
    assert (own.topic, own.compression) == ("tt", "none")


@pytest.mark.parametrize("given", [{"topic": "else"}, {"topic": "else", "compression": "none"}])
def test_rows_of_a_table_that_go_elsewhere_do_not_go_to_its_broker(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str]
) -> None:
    schema = read_from_a_table(server=THERE, topic="tt", writer="w1", batch="3")
    target = sink.batch_writer(given, schema, False).target
    assert (target.url, target.options.topic, target.options.writer) == (HERE, "else", None)
    monkeypatch.setenv("MILLSTREAM_SERVER", "http://mine:1")
    assert sink.batch_writer(given, schema, False).target.url == "http://mine:1"
    assert sink.stream_writer(given, schema, False).target.url == "http://mine:1"


def test_no_two_writes_have_the_name_of_one_that_a_table_remembers() -> None:
    schema = read_from_a_table(server=THERE, topic="tt", writer="w1", batch="3")
    one, other = (sink.batch_writer({}, schema, False) for _ in range(2))
    assert one.writer != other.writer
    assert sink.stream_writer({}, schema, False).target.options.writer is None
    named = sink.batch_writer({"writer": "w2", "batch": "4"}, schema, False)
    assert (named.writer, named.batch, named.target.url) == ("w2", 4, THERE)


def test_a_table_elsewhere_than_the_environment_says_is_not_guessed_about(
    says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = read_from_a_table(server=THERE, topic="tt")
    monkeypatch.setenv("MILLSTREAM_SERVER", THERE + "/")
    assert sink.batch_writer({}, schema, False).target.url == THERE
    monkeypatch.setenv("MILLSTREAM_SERVER", HERE)
    with pytest.raises(OptionInvalid, match=f"was made with {THERE}; say where rows are to go"):
        sink.batch_writer({}, schema, False)
    plain = {"server": THERE, "topic": "tt"}
    assert sink.batch_writer(plain, schema, False).target.url == THERE
    says(None)
    with pytest.raises(OptionInvalid, match="was made with other:9092"):
        sink.batch_writer({}, read_from_a_table(**OTHER), False)
    assert sink.batch_writer({}, read_from_a_table(topic="tt"), False).target.url == HERE


def test_a_topic_is_never_overwritten() -> None:
    for make in (sink.batch_writer, sink.stream_writer):
        with pytest.raises(SaveModeInvalid, match="append"):
            make({"topic": "orders"}, SCHEMA, True)


def test_a_stream_in_another_mode_is_told_of_foreach_batch() -> None:
    """Spark has no `update` for sinks in Python."""
    with pytest.raises(SaveModeInvalid, match="foreachBatch") as caught:
        sink.stream_writer({"topic": "orders"}, SCHEMA, True)
    assert "update" not in caught.value.message


def test_only_a_write_without_a_name_is_its_writers_final_one(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that dies between the commit and what it does after that."""
    monkeypatch.setattr(BlockingWriters, "forget", lambda *_: None)
    mine = {"server": broker.url(""), "topic": "finals"}
    row = pa.RecordBatch.from_arrays([pa.array([b"v"])], names=["value"])
    with Client(broker.url("")) as client:
        for given, is_final in (({}, True), ({"writer": "named", "batch": "0"}, False)):
            made = sink.batch_writer(mine | given, SCHEMA, False)
            place = TaskPlace(made.writer, made.batch, 0, 0)
            done = stage_rows(
                [row], made.target.options, place, MillstreamBroker(client), sink.wall_ms
            )
            made.commit([sink.Written(done)])
            last = client.writers.get(made.writer).last
            assert last is not None
            assert (last.final, last.records) == (is_final, 1)


def write_rows(broker: BrokerProcess, writer: str, batch: int, *values: bytes) -> None:
    """As one task of a named batch write."""
    given = {"server": broker.url(""), "topic": "named", "writer": writer, "batch": str(batch)}
    made = sink.batch_writer(given, SCHEMA, False)
    rows = pa.RecordBatch.from_arrays([pa.array(values, pa.binary())], names=["value"])
    with Client(broker.url("")) as client:
        place = TaskPlace(made.writer, made.batch, 0, 0)
        done = stage_rows(
            [rows], made.target.options, place, MillstreamBroker(client), sink.wall_ms
        )
    made.commit([sink.Written(done)])


def test_a_named_batch_write_never_drops_new_rows_for_old_ones(broker: BrokerProcess) -> None:
    """A checkpoint of a foreachBatch was lost, and its numbers begin again."""
    write_rows(broker, "lost", 3, b"a", b"b")
    write_rows(broker, "lost", 3, b"a", b"b")
    with pytest.raises(WriterAhead, match="batch 3 with 2 records, and this write has 1 for it"):
        write_rows(broker, "lost", 3, b"c")
    with pytest.raises(WriterAhead, match="committed batch 3, and this write is at 0") as caught:
        write_rows(broker, "lost", 0, b"c", b"d")
    assert caught.value.fields == {"writer": "lost", "batch": 0, "last": 3}
    with Client(broker.url("")) as client:
        last = client.writers.get("lost").last
        assert last is not None
        assert (last.batch, last.records) == (3, 2)


def test_a_named_write_without_rows_is_held_against_what_was_committed_too(
    broker: BrokerProcess,
) -> None:
    write_rows(broker, "empty", 0)
    write_rows(broker, "empty", 1, b"a")
    with pytest.raises(WriterAhead, match="batch 1 with 1 records, and this write has 0 for it"):
        write_rows(broker, "empty", 1)
    with pytest.raises(WriterAhead, match="this write is at 0"):
        write_rows(broker, "empty", 0)
    write_rows(broker, "empty", 2)


def test_a_stream_without_rows_is_held_against_what_it_committed(broker: BrokerProcess) -> None:
    write_rows(broker, "streamed", 1, b"a")
    given = {"server": broker.url(""), "topic": "named", "writer": "streamed"}
    made = sink.stream_writer(given, SCHEMA, False)
    done = TaskDone("streamed", 1, (), 0, 0, "a-query")
    with pytest.raises(WriterAhead, match="micro-batch 1 with 1 records, and this query has 0"):
        made.commit([sink.Written(done)], 1)
    made.commit([sink.Written(replace(done, batch=2))], 2)


def test_a_batch_write_has_a_name_of_its_own_or_the_given_one() -> None:
    mine = {"server": "http://127.0.0.1:8080", "topic": "orders"}
    one, other = (sink.batch_writer(mine, SCHEMA, False) for _ in range(2))
    assert one.writer != other.writer
    assert (one.batch, other.batch) == (0, 0)
    named = sink.batch_writer(mine | {"writer": "totals", "batch": "7"}, SCHEMA, False)
    assert (named.writer, named.batch) == ("totals", 7)
