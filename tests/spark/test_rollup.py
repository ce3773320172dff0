"""Windows of records: what is counted in them, when they are written, which flags make sense."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from millstream.errors import SettingInvalid
from millstream.spark.pipelines.options import Options
from millstream.spark.pipelines.rollup import (
    PIPELINE,
    Plan,
    as_messages,
    column,
    late_records,
    path,
    plan_of,
    rolled_up,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEGIN = datetime(2026, 11, 1, 12, tzinfo=UTC)
SCHEMA = "key binary, value binary, timestamp timestamp"


def order(second: float, key: str | None = "ada", **value: Any) -> tuple[Any, ...]:
    text = json.dumps(value).encode()
    return (key and key.encode(), text, BEGIN + timedelta(seconds=second))


def frame(spark: SparkSession, *rows: tuple[Any, ...]) -> DataFrame:
    return spark.createDataFrame(list(rows), SCHEMA)


def windows(frame: DataFrame) -> list[dict[str, Any]]:
    """Rows with their begin in seconds since BEGIN, in order."""
    begin_s = int(BEGIN.timestamp())
    found = frame.selectExpr("*", f"unix_seconds(start) - {begin_s} AS at").drop("start", "end")
    rows = [row.asDict() for row in found.collect()]
    return sorted(rows, key=lambda row: [str(value) for value in (row["at"], *row.values())])


def test_records_are_counted_in_the_window_of_their_time(spark: SparkSession) -> None:
    found = rolled_up(frame(spark, order(0), order(59.9), order(60)), Plan())
    assert windows(found) == [{"records": 2, "at": 0}, {"records": 1, "at": 60}]


def test_each_key_has_its_own(spark: SparkSession) -> None:
    found = rolled_up(
        frame(spark, order(0, "ada"), order(1, "bob"), order(2, "ada"), order(3, None)),
        Plan(by=("key",)),
    )
    assert {row["key"]: row["records"] for row in windows(found)} == {"ada": 2, "bob": 1, None: 1}


def test_fields_of_json_are_added_up_and_told_apart(spark: SparkSession) -> None:
    rows = [
        order(0, "ada", total=5, customer={"country": "de"}, items=["a", "b"]),
        order(1, "bob", total=2.5, customer={"country": "de"}, items=["a"]),
        order(2, "ada", total="4", customer={"country": "fr"}),
        order(3, "ada", total={"no": "number"}, customer={"country": "fr"}),
        (b"eve", b"{broken", BEGIN),
        (b"eve", None, BEGIN),
    ]
    plan = Plan(
        by=("customer.country",),
        sums=("total",),
        distinct=("key", "$.items[0]"),
        percentiles_of=("total",),
        percentiles=(50.0, 99.9),
    )
    assert windows(rolled_up(frame(spark, *rows), plan)) == [
        {
            "customer_country": country,
            "records": 2,
            "broken": broken,
            "sum_total": total,
            "distinct_key": keys,
            "distinct_items_0": items,
            "p50_total": half,
            "p99_9_total": most,
            "at": 0,
        }
        for country, broken, total, keys, items, half, most in [
            (None, 2, None, 1, 0, None, None),
            ("de", 0, 7.5, 2, 1, 2.5, 5.0),
            ("fr", 0, 4.0, 1, 0, 4.0, 4.0),
        ]
    ]


def test_windows_may_overlap(spark: SparkSession) -> None:
    plan = Plan(window="60 seconds", slide="30 seconds")
    found = rolled_up(frame(spark, order(0), order(31)), plan)
    assert [(row["at"], row["records"]) for row in windows(found)] == [(-30, 1), (0, 2), (30, 1)]


def test_a_field_may_say_when_it_was(spark: SparkSession) -> None:
    later_ms = int(BEGIN.timestamp() * 1000) + 120_000
    rows = [
        order(0, at=later_ms),
        order(0, at="2026-11-01T12:02:30Z"),
        order(0, at="some day"),
        order(0),
        # Numbers that are no time.
        order(0, at=2**63 - 1),
        order(0, at=-(2**63)),
        order(0, at=1e300),
    ]
    found = rolled_up(frame(spark, *rows), Plan(time="at"))
    assert [(row["at"], row["records"]) for row in windows(found)] == [(0, 5), (120, 2)]


def test_a_window_is_a_message_under_what_it_is_grouped_by(spark: SparkSession) -> None:
    plan = Plan(by=("key", "land"), sums=("total",))
    found = rolled_up(frame(spark, order(0, "ada", land="de"), order(1, None)), plan)
    messages = {row["key"]: json.loads(row["value"]) for row in as_messages(found, plan).collect()}
    assert set(messages) == {"ada/de", "/"}
    assert messages["ada/de"] == {
        "start": "2026-11-01T12:00:00.000Z",
        "end": "2026-11-01T12:01:00.000Z",
        "key": "ada",
        "land": "de",
        "records": 1,
        "broken": 0,
        "sum_total": None,
    }
    (row,) = as_messages(rolled_up(frame(spark, order(0)), Plan()), Plan()).collect()
    assert row["key"] is None


def test_a_window_is_written_once_when_it_is_over(spark: SparkSession, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"

    def publish(*rows: tuple[Any, ...]) -> None:
        frame(spark, *rows).coalesce(1).write.mode("append").parquet(str(source))

    def catch_up() -> int:
        records = spark.readStream.schema(SCHEMA).parquet(str(source))
        writer = rolled_up(records, Plan(watermark="10 seconds")).writeStream.format("parquet")
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start(str(target))
        query.awaitTermination()
        return late_records(query)

    def written() -> list[tuple[int, int]]:
        found = windows(
            spark.read.schema("start timestamp, end timestamp, records long").parquet(str(target))
        )
        return [(row["at"], row["records"]) for row in found]

    publish(order(0), order(50))
    assert catch_up() == 0
    assert written() == []
    publish(order(69), order(51))
    catch_up()
    assert written() == []
    publish(order(71))
    catch_up()
    assert written() == [(0, 3)]
    publish(order(52), order(72))
    assert catch_up() > 0
    publish(order(200))
    catch_up()
    assert written() == [(0, 3), (60, 3)]


@pytest.mark.parametrize(
    ("field", "where", "name"),
    [
        ("total", "$['total']", "total"),
        ("customer.country", "$['customer']['country']", "customer_country"),
        ("$.items[0].price", "$.items[0].price", "items_0_price"),
        ("größe", "$['größe']", "gr_e"),
        ("$", "$", "value"),
    ],
)
def test_fields_are_paths(field: str, where: str, name: str) -> None:
    assert (path(field), column(field)) == (where, name)


def options(**given: str) -> Options:
    needed = {"topics": "orders", "to": "totals"}
    return Options(PIPELINE.options, needed | {key.replace("_", "-"): given[key] for key in given})


def test_flags_make_a_plan() -> None:
    given = options(
        by="key, customer.country", sum="total", window="5m", watermark="0s", percentiles="50,99.9"
    )
    assert plan_of(given) == Plan(
        by=("key", "customer.country"),
        sums=("total",),
        percentiles=(50.0, 99.9),
        window="300000 milliseconds",
        slide="300000 milliseconds",
        watermark="0 milliseconds",
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"window": "0s"}, "--window is 0"),
        ({"window": "soon"}, "--window is 'soon'"),
        ({"slide": "2m"}, "--slide is longer than the window"),
        ({"percentiles": "50,101"}, "--percentiles has '101'"),
        ({"percentiles": "half"}, "--percentiles has 'half'"),
        ({"by": "start"}, "--by has start"),
        ({"by": "a.b,a_b"}, "--by names two fields"),
        ({"sum": "a.b,a_b"}, "--sum names two fields"),
    ],
)
def test_flags_that_make_no_sense_are_refused(given: dict[str, str], says: str) -> None:
    with pytest.raises(SettingInvalid, match=says.replace("(", r"\(")):
        plan_of(options(**given))
