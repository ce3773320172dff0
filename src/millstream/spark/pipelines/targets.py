"""Where results go: a topic, Parquet files, or the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from millstream.errors import SettingInvalid
from millstream.spark.pipelines.context import FORMAT, Context
from millstream.spark.pipelines.places import query_id

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

MODES = ("append", "update", "complete")
# What the sink reads; a frame with `value` is taken to be made for it.
SINK_COLUMNS = (
    "key", "value", "headers", "topic", "partition", "lane", "deliver_at", "timestamp",
)  # fmt: skip
ROWS_SHOWN_MAX = 100
CELL_SHOWN_MAX = 60


@dataclass(frozen=True, slots=True)
class Target:
    """`topic:NAME`, `parquet:DIR` or `terminal`."""

    kind: Literal["topic", "parquet", "terminal"]
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}" if self.where else self.kind


def target_of(text: str) -> Target:
    """A target as it is written; ValueError says what is wrong with it.

    A bare word is a topic; what has a slash is a folder for Parquet.
    """
    if text in ("terminal", "-"):
        return Target("terminal")
    kind, colon, where = text.partition(":")
    if colon and where and kind == "topic":
        return Target("topic", where)
    if colon and where and kind == "parquet":
        return Target("parquet", where)
    if "/" in text:
        return Target("parquet", text)
    if text and not colon:
        return Target("topic", text)
    raise ValueError(
        f"is {text!r}; it takes topic:NAME, parquet:DIR or terminal (a bare word is a topic)"
    )


def stream_to(
    context: Context,
    frame: DataFrame,
    target: Target,
    *,
    mode: str = "append",
    key: str | None = None,
    sink_options: dict[str, str] | None = None,
    part: str = "main",
    is_counted: bool = True,
) -> StreamingQuery:
    """Start a query that writes a streaming frame there."""
    if target.kind == "topic":
        _require_key(frame, key)
    if target.kind == "topic" and mode != "append":
        # Spark's own way to such a sink is for rows that stay as they are.
        options = context.broker_options() | {"topic": target.where} | (sink_options or {})
        batches = _NumberedWrites(f"{context.checkpoint}/{part}", key, options)
        writer = frame.writeStream.foreachBatch(batches.write)
    elif target.kind == "topic":
        writer = as_records(frame, key).writeStream.format(FORMAT)
        writer = writer.options(**context.broker_options(), topic=target.where)
        writer = writer.options(**(sink_options or {}))
    elif target.kind == "parquet":
        writer = frame.writeStream.format("parquet").option("path", target.where)
    else:
        show = context.show
        writer = frame.writeStream.foreachBatch(
            lambda rows, number: show(_batch_text(rows, number))
        )
    return context.start(writer.outputMode(mode), part, is_counted=is_counted)


@dataclass(frozen=True, slots=True)
class _NumberedWrites:
    """Each micro-batch as one write, which the broker knows by the query and its number: one that
    is repeated adds nothing."""

    checkpoint: str
    key: str | None
    options: dict[str, str]

    def write(self, frame: DataFrame, number: int) -> None:
        writer = as_records(frame, self.key).write.format(FORMAT).mode("append")
        writer = writer.options(**self.options)
        writer.option("writer", query_id(self.checkpoint)).option("batch", str(number)).save()


def write_to(
    context: Context,
    frame: DataFrame,
    target: Target,
    *,
    key: str | None = None,
    sink_options: dict[str, str] | None = None,
) -> None:
    """Write a frame that ends there."""
    if target.kind == "topic":
        _require_key(frame, key)
        writer = as_records(frame, key).write.format(FORMAT).mode("append")
        writer.options(
            **context.broker_options(), topic=target.where, **(sink_options or {})
        ).save()
    elif target.kind == "parquet":
        frame.write.mode("overwrite").parquet(target.where)
    else:
        context.show(show_rows(frame))


def _require_key(frame: DataFrame, key: str | None) -> None:
    # Spark's columns have no case.
    if key is not None and key.lower() not in {name.lower() for name in frame.columns}:
        raise SettingInvalid(
            f"--key is {key!r}, and the result has no such column; it has "
            f"{', '.join(frame.columns)}",
            setting="key",
            value=key,
        )


def as_records(frame: DataFrame, key: str | None = None) -> DataFrame:
    """Rows as the sink takes them: as they are where there is a value, or as JSON objects."""
    from pyspark.sql import functions as f

    names = frame.columns
    if "value" in names and all(name in SINK_COLUMNS for name in names):
        return frame if key in (None, "key") else frame.withColumn("key", _text(key))
    value = f.to_json(f.struct(*(f.col(f"`{name}`") for name in names))).alias("value")
    if key is None:
        return frame.select(value)
    return frame.select(_text(key).alias("key"), value)


def _text(column: str | None) -> Any:
    from pyspark.sql import functions as f

    return f.col(f"`{column}`").cast("string")


def show_rows(frame: DataFrame) -> str:
    """The first rows as a table."""
    rows = frame.limit(ROWS_SHOWN_MAX + 1).collect()
    table = Table(*frame.columns, highlight=False)
    for row in rows[:ROWS_SHOWN_MAX]:
        table.add_row(*(_cell(value) for value in row))
    console = Console(width=None, color_system=None, soft_wrap=True)
    with console.capture() as captured:
        console.print(table)
    more = f"only the first {ROWS_SHOWN_MAX} rows are shown\n" if len(rows) > ROWS_SHOWN_MAX else ""
    return captured.get().rstrip("\n") + ("\n" + more if more else "")


def _batch_text(frame: DataFrame, number: int) -> str:
    return f"batch {number}\n{show_rows(frame)}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bytes | bytearray):
        text = bytes(value).decode("utf-8", "backslashreplace")
    else:
        text = str(value)
    return text if len(text) <= CELL_SHOWN_MAX else text[: CELL_SHOWN_MAX - 1] + "…"
