"""Where rows go is found out before the first of them, and so is what cannot be done there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.sql.types import StructType

from millstream.errors import ColumnInvalid, OptionInvalid, SaveModeInvalid
from millstream.spark import sink
from millstream.spark.kafka_client import Kafka
from millstream.spark.options import BROKER_ROWS, read_options, read_place

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


def test_a_topic_is_never_overwritten() -> None:
    for make in (sink.batch_writer, sink.stream_writer):
        with pytest.raises(SaveModeInvalid, match="append"):
            make({"topic": "orders"}, SCHEMA, True)


def test_a_batch_write_has_a_name_of_its_own_or_the_given_one() -> None:
    mine = {"server": "http://127.0.0.1:8080", "topic": "orders"}
    one, other = (sink.batch_writer(mine, SCHEMA, False) for _ in range(2))
    assert one.writer != other.writer
    assert (one.batch, other.batch) == (0, 0)
    named = sink.batch_writer(mine | {"writer": "totals", "batch": "7"}, SCHEMA, False)
    assert (named.writer, named.batch) == ("totals", 7)
