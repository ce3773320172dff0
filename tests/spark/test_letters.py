"""Dead letters as frames: shapes, what is gone, kinds, examples, and what a redrive looks for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from millstream.spark.pipelines.letters import (
    Example,
    GoneRun,
    Kind,
    examples,
    gone_words,
    kinds,
    left,
    letters,
    over_time,
    search_for,
)
from millstream.spark.pipelines.shapes import NO_ERROR, shape_column, shape_id
from spark.test_shapes import SHAPES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEGIN = datetime(2026, 11, 1, tzinfo=UTC)
BEGIN_MS = int(BEGIN.timestamp()) * 1000
SCHEMA = """
    key binary, value binary, topic string, partition int, offset long, timestamp timestamp,
    headers array<struct<key: string, value: binary>>,
    dead_letter struct<
        topic: string, partition: int, offset: long, `group`: string, deliveries: int,
        reason: string, error: string, first_failure: timestamp, last_failure: timestamp>
"""


def row(  # noqa: PLR0917  as a row is read
    offset: int,
    error: str | None = "timeout after 5 ms",
    second: int = 0,
    group: str | None = "billing",
    reason: str | None = "deliveries",
    value: bytes | None = b"{}",
    partition: int = 0,
    headers: list[tuple[str, bytes]] | None = None,
    topic: str = "orders",
) -> tuple[Any, ...]:
    failed = BEGIN + timedelta(seconds=second)
    dead = (topic, 0, offset, group, 4, reason, error, failed - timedelta(seconds=1), failed)
    return (b"k", value, f"{topic}.dlq", partition, offset, BEGIN, headers or [], dead)


def frame(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    return letters(spark.createDataFrame(list(rows), SCHEMA))


def found_kinds(found: DataFrame) -> list[Kind]:
    return [Kind(*one) for one in kinds(found).collect()]


def places(found: DataFrame) -> list[tuple[int, int]]:
    return sorted((one["place_partition"], one["place_offset"]) for one in found.collect())


def test_columns_have_the_shapes_that_texts_have(spark: SparkSession) -> None:
    frame = spark.createDataFrame([(error,) for error in SHAPES], "error string")
    shapes = frame.select(shape_column(frame["error"])).collect()
    assert [one[0] for one in shapes] == list(SHAPES.values())


def test_a_kind_is_what_topic_group_reason_and_shape_have_in_common(spark: SparkSession) -> None:
    found = frame(
        spark,
        row(0, "timeout after 5 ms", 1),
        row(1, "timeout after 70 ms", 9),
        row(2, "timeout after 6 ms", 3, headers=[("ms-redrives", b"2")]),
        row(3, "timeout after 5 ms", group="mail"),
        row(4, "timeout after 5 ms", reason="rejected"),
        row(5, "timeout after 5 ms", topic="parcels"),
        row(6, "no customer"),
    )
    first, *others = found_kinds(found)
    assert first == Kind(
        kind=shape_id("orders", "billing", "deliveries", "timeout after <n> ms"),
        topic="orders",
        group="billing",
        reason="deliveries",
        shape="timeout after <n> ms",
        letters=3,
        first_failure_ms=BEGIN_MS,
        since_ms=BEGIN_MS + 1000,
        last_failure_ms=BEGIN_MS + 9000,
        deliveries=4,
        redrives=2,
    )
    assert [one.letters for one in others] == [1, 1, 1, 1]
    assert len({one.kind for one in others}) == 4


def test_what_somebody_wrote_by_hand_is_a_dead_letter_too(spark: SparkSession) -> None:
    bare = (None, None, "orders.dlq", 0, 0, BEGIN, [("ms-redrives", b"soon")], None)
    (kind,) = found_kinds(frame(spark, bare))
    assert (kind.topic, kind.group, kind.reason, kind.shape) == ("orders", "–", "unknown", NO_ERROR)
    assert (kind.last_failure_ms, kind.deliveries, kind.redrives) == (BEGIN_MS, None, 0)


def test_what_is_gone_is_left_out(spark: SparkSession) -> None:
    rows = [row(offset, partition=partition) for partition in (0, 1) for offset in range(140)]
    found = frame(spark, *rows)
    runs = [GoneRun(0, 3, 3), GoneRun(0, 60, 67), GoneRun(0, 127, 139), GoneRun(1, 0, 129)]
    gone = {(run.partition, one) for run in runs for one in range(run.first, run.last + 1)}
    expected = sorted(
        place
        for partition in (0, 1)
        for one in range(140)
        if (place := (partition, one)) not in gone
    )
    assert places(left(found, gone_words(spark, runs))) == expected
    assert len(places(left(found, gone_words(spark, [])))) == 280


def test_examples_are_those_that_failed_last(spark: SparkSession) -> None:
    found = frame(
        spark,
        *(row(offset, f"timeout after {offset} ms", second=offset) for offset in range(5)),
        row(9, "no customer", value=b"\xff\x00"),
        row(10, "no customer", second=-1, value=None),
    )
    shown = [Example(*one) for one in examples(found, 2).collect()]
    by_kind = {one.kind: [other for other in shown if other.kind == one.kind] for one in shown}
    one, other = sorted(by_kind.values(), key=lambda few: few[0].offset)
    assert [(e.offset, e.error) for e in one] == [
        (4, "timeout after 4 ms"),
        (3, "timeout after 3 ms"),
    ]
    assert [(e.offset, e.key, e.value) for e in other] == [(9, "k", "/wA="), (10, "k", None)]


def test_letters_are_counted_in_steps_of_time(spark: SparkSession) -> None:
    found = frame(spark, row(0, second=0), row(1, second=59), row(2, second=60))
    counted = {
        (one["begin_s"] * 1000 - BEGIN_MS, one["group"]): one["letters"]
        for one in over_time(found, "group", 60).collect()
    }
    assert counted == {(0, "billing"): 2, (60_000, "billing"): 1}


def test_a_redrive_looks_for_words_that_only_this_kind_has(spark: SparkSession) -> None:
    found = frame(
        spark,
        row(0, "timeout after 5 ms of the bank", 1),
        row(1, "timeout after 6  ms of the bank", 3),
        row(2, "timeout after 7 ms of the post", 2),
        # Another group, reason or time is not found anyway.
        row(3, "timeout after 5 ms of the bank", 2, group="mail"),
        row(4, "other words of the bank", 9),
    )
    kind = next(one for one in found_kinds(found) if "bank" in one.shape and one.letters == 2)
    search = search_for(found, kind)
    assert search.others == 0
    assert search.text is not None
    assert "bank" in search.text


def test_a_redrive_that_would_take_others_along_says_how_many(spark: SparkSession) -> None:
    found = frame(
        spark,
        row(0, "5 5", 1),
        row(1, "6 7", 5),
        row(2, "no customer", 3),
        # In the value a text counts as well.
        row(3, "no stock", 3, value=b"no customer"),
    )
    numbers, customer = (
        next(one for one in found_kinds(found) if one.shape == shape)
        for shape in ("<n> <n>", "no customer")
    )
    assert search_for(found, numbers) == (None, 2)
    assert search_for(found, customer).others == 1
