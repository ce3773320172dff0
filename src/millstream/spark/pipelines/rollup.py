"""`rollup`: counts, sums, distinct values and percentiles in windows of time, per key or field.

    mill pipeline run rollup --topics orders --by customer.country --sum total --window 5m

A window is written once, when it is over: when the newest time that was seen lies a watermark past
its end. What comes later than that is late, and left out; a run says how many those were. The
result goes to topics, to Parquet files, or to both: each target has a query of its own, and each
has every window once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as sql

from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.registry import Option, Pipeline
from millstream.spark.pipelines.targets import Target, stream_to, target_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from millstream.spark.pipelines.options import Options

# A word for the record's key, which is no field of its value.
KEY = "key"
# Of the estimate of distinct values: two of a hundred off, at most of the time.
DISTINCT_ERROR = 0.02
# 1 / this is how far off in rank a percentile may be.
PERCENTILE_ACCURACY = 1000
# The end of the year 9999. Spark counts in microseconds, which end in the year 294247.
TIME_MS_MAX = 253_402_300_799_999
_NAME = re.compile(r"[^0-9A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compute. Fields are paths in JSON values: `total`, `customer.country`, `$.items[0]`;
    and `key` is the record's key."""

    by: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()
    distinct: tuple[str, ...] = ()
    percentiles_of: tuple[str, ...] = ()
    percentiles: tuple[float, ...] = (50.0, 95.0, 99.0)
    # The field with the time; by default a record's own.
    time: str | None = None
    window: str = "60 seconds"
    slide: str | None = None
    watermark: str = "60 seconds"

    @property
    def fields(self) -> tuple[str, ...]:
        named = [*self.by, *self.sums, *self.distinct, *self.percentiles_of]
        named += [] if self.time is None else [self.time]
        return tuple(one for one in named if one != KEY)


def rolled_up(records: DataFrame, plan: Plan) -> DataFrame:
    """Windows of records with `key`, `value` and `timestamp`: one row for each window and each
    combination of the fields in `by`."""
    rows = records.withColumn(KEY, sql.col(KEY).cast("string"))
    if plan.fields:
        rows = rows.withColumn("json", sql.try_parse_json(sql.col("value").cast("string")))
    when = sql.col("timestamp")
    if plan.time is not None:
        # One that does not say when it was has the time at which it came.
        when = sql.coalesce(_time(plan.time), when)
    rows = rows.withColumn("time", when).withWatermark("time", plan.watermark)
    window = sql.window("time", plan.window, plan.slide)
    groups = [window.alias("window"), *(_text(one).alias(column(one)) for one in plan.by)]
    result = rows.groupBy(*groups).agg(*_aggregates(plan))
    return result.select("window.start", "window.end", *result.columns[1:])


def _aggregates(plan: Plan) -> list[Column]:
    found = [sql.count("*").alias("records")]
    if plan.fields:
        # A broken value is a record too; what cannot be read of it is not counted.
        found.append(sql.count_if(sql.col("json").isNull()).alias("broken"))
    found += [sql.sum(_number(one)).alias(f"sum_{column(one)}") for one in plan.sums]
    found += [
        sql.approx_count_distinct(_text(one), DISTINCT_ERROR).alias(f"distinct_{column(one)}")
        for one in plan.distinct
    ]
    shares = [one / 100 for one in plan.percentiles]
    for one in plan.percentiles_of:
        every = sql.percentile_approx(_number(one), shares, PERCENTILE_ACCURACY)
        found += [
            sql.element_at(every, at).alias(f"p{share:g}_{column(one)}".replace(".", "_"))
            for at, share in enumerate(plan.percentiles, 1)
        ]
    return found


def _text(field: str) -> Column:
    return sql.col(KEY) if field == KEY else sql.try_variant_get("json", path(field), "string")


def _number(field: str) -> Column:
    return sql.try_variant_get("json", path(field), "double")


def _time(field: str) -> Column:
    """ISO 8601, or milliseconds since 1970. A number that is no time is null: Spark would fail."""
    text = sql.try_variant_get("json", path(field), "string")
    number = sql.try_variant_get("json", path(field), "long")
    since_1970 = sql.when(number.between(-TIME_MS_MAX, TIME_MS_MAX), number)
    return sql.coalesce(sql.timestamp_millis(since_1970), sql.try_to_timestamp(text))


def path(field: str) -> str:
    """A field as Spark writes paths in JSON."""
    if field.startswith("$"):
        return field
    return "$" + "".join(f"['{one}']" for one in field.split("."))


def column(field: str) -> str:
    """What a field is called in the result."""
    return _NAME.sub("_", field).strip("_") or "value"


# ---- as a pipeline


def run(context: Context) -> None:
    options = context.options
    plan = plan_of(options)
    targets = [_target(options, one) for one in options.names("to")]
    columns = "key,timestamp,value" if plan.fields else "key,timestamp"
    queries = []
    for number, target in enumerate(targets):
        part = f"{target.kind}-{number}"
        # Queries are not equally far, so each has a group.
        group = context.group if number == 0 else f"{context.group}-{part}"
        records = context.read(*options.names("topics"), columns=columns, groupId=group)
        windows = rolled_up(records, plan)
        if target.kind == "topic":
            windows = as_messages(windows, plan)
        # Each reads every record; together they are no more records.
        query = stream_to(context, windows, target, part=part, is_counted=number == 0)
        queries.append(query)
    context.wait()
    if late := max(map(late_records, queries)):
        context.say(f"{late:,} records were late, and are in no window: see --watermark")


def late_records(query: StreamingQuery) -> int:
    """Records that the watermark had passed, in as many micro-batches as Spark remembers."""
    return sum(
        int(operator["numRowsDroppedByWatermark"])
        for progress in query.recentProgress
        for operator in progress["stateOperators"]
    )


def as_messages(windows: DataFrame, plan: Plan) -> DataFrame:
    """One JSON object a window, under what it is grouped by."""
    value = sql.to_json(sql.struct(*windows.columns), {"ignoreNullFields": "false"})
    by = [sql.coalesce(sql.col(column(one)), sql.lit("")) for one in plan.by]
    key = sql.concat_ws("/", *by) if by else sql.lit(None).cast("string")
    return windows.select(key.alias("key"), value.alias("value"))


def plan_of(options: Options) -> Plan:
    window_ms = _span_ms(options, "window")
    slide_ms = _span_ms(options, "slide") if "slide" in options else window_ms
    if slide_ms > window_ms:
        options.refuse("slide", "is longer than the window: records in between would be left out")
    percentiles = []
    for text in options.names("percentiles"):
        try:
            percentiles.append(float(text))
        except ValueError:
            percentiles.append(-1.0)
        if not 0 <= percentiles[-1] <= 100:
            options.refuse("percentiles", f"has {text!r}; each is a number from 0 to 100")
    plan = Plan(
        by=tuple(options.names("by")),
        sums=tuple(options.names("sum")),
        distinct=tuple(options.names("distinct")),
        percentiles_of=tuple(options.names("percentiles-of")),
        percentiles=tuple(percentiles),
        time=options.get("time"),
        window=f"{window_ms} milliseconds",
        slide=f"{slide_ms} milliseconds",
        watermark=f"{options.duration_ms('watermark')} milliseconds",
    )
    _check_names(options, plan)
    return plan


def _span_ms(options: Options, name: str) -> int:
    span_ms = options.duration_ms(name)
    if not span_ms:
        options.refuse(name, "is 0; it takes a time such as 30s or 5m")
    return span_ms


def _check_names(options: Options, plan: Plan) -> None:
    """Two columns of one name could not be told apart."""
    names = {column(one): one for one in plan.by}
    taken = sorted({"start", "end", "records", "broken"} & set(names))
    if taken:
        options.refuse(
            "by", f"has {names[taken[0]]}, and the result has a column {taken[0]} already"
        )
    for option, fields in (
        ("by", plan.by),
        ("sum", plan.sums),
        ("distinct", plan.distinct),
        ("percentiles-of", plan.percentiles_of),
    ):
        if len({column(one) for one in fields}) < len(fields):
            options.refuse(option, "names two fields that would be the same column of the result")


def _target(options: Options, text: str) -> Target:
    try:
        return target_of(text)
    except ValueError as error:
        options.refuse("to", str(error))


PIPELINE = Pipeline(
    name="rollup",
    help="Counts, sums, distinct values and percentiles in windows of time, per key or JSON field.",
    run=run,
    options=(
        Option("topics", "The topics to read.", metavar="TOPICS", is_required=True),
        Option(
            "to",
            "Where windows go: topic:NAME, parquet:DIR or terminal; several with commas.",
            metavar="TARGETS",
            is_required=True,
        ),
        Option("window", "How long a window is.", default="1m", metavar="TIME"),
        Option(
            "slide", "From one window's begin to the next's; by default its length.", None, "TIME"
        ),
        Option("watermark", "How late a record may come.", default="1m", metavar="TIME"),
        Option("time", "The field with the time; by default the record's.", metavar="FIELD"),
        Option("by", "Group by these: key, or paths such as customer.country.", None, "FIELDS"),
        Option("sum", "Add these up.", metavar="FIELDS"),
        Option("distinct", "Count different values of these, about.", metavar="FIELDS"),
        Option("percentiles-of", "Percentiles of these, about.", metavar="FIELDS"),
        Option("percentiles", "Which ones.", default="50,95,99", metavar="NUMBERS"),
    ),
)
