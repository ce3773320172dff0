"""Topics as tables for SQL.

A topic whose values are JSON objects has their fields as columns. Every topic has `_key` and
`_value` as text, `_topic`, `_partition`, `_offset` and `_timestamp`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from millstream.client import Client
from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.json_types import ddl_of
from millstream.spark.pipelines.state import write_whole

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# The newest records of a topic that tell which columns it has.
SAMPLE_RECORDS = 500
_OWN = (
    "cast(key AS string) AS _key",
    "cast(value AS string) AS _value",
    "topic AS _topic",
    "partition AS _partition",
    "offset AS _offset",
    "timestamp AS _timestamp",
)


_OWN_NAMES = frozenset(one.rpartition(" ")[2] for one in _OWN)


def columns_of(
    client: Client, topics: list[str], given: Mapping[str, str], kept: Path | None
) -> dict[str, str]:
    """The DDL of each topic's JSON columns, empty where there are none; of other topics too, where
    a run before kept them.

    What a user gave counts. What was found is to be kept for later runs with the same checkpoint: a
    query with state cannot go on with other columns.
    """
    known = _read(kept)
    for topic in topics:
        if topic in given:
            known[topic] = given[topic]
        elif topic not in known:
            sample = client.read(topic, last=SAMPLE_RECORDS)
            known[topic] = ddl_of((record.value for record in sample), _OWN_NAMES) or ""
    return known


def keep_columns(kept: Path, columns: Mapping[str, str]) -> None:
    """For later runs with the same checkpoint."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, msgspec.json.format(msgspec.json.encode(columns)))


def _read(kept: Path | None) -> dict[str, str]:
    if kept is None or not kept.exists():
        return {}
    return msgspec.json.decode(kept.read_bytes(), type=dict[str, str])


def make_view(
    context: Context, topic: str, columns: str, watermark: tuple[str, str] | None, *, is_batch: bool
) -> None:
    """Name a topic's records so that SQL finds them."""
    read = context.table if is_batch else context.read
    frame = typed(read(topic), columns)
    if watermark is not None and not is_batch:
        frame = with_watermark(frame, *watermark)
    frame.createOrReplaceTempView(f"`{topic}`")


def typed(frame: DataFrame, columns: str) -> DataFrame:
    """Records with the fields of their JSON as columns. A value that is none has nulls there."""
    from pyspark.sql import functions as f

    if not columns:
        return frame.selectExpr(*_OWN)
    fields = f.from_json(f.col("value").cast("string"), columns)
    return frame.withColumn("_fields", fields).selectExpr("_fields.*", *_OWN)


def with_watermark(frame: DataFrame, column: str, delay: str) -> DataFrame:
    """Rows may come so late by their time in a column; text is read as a time."""
    from pyspark.sql import functions as f

    if dict(frame.dtypes)[column] != "timestamp":
        frame = frame.withColumn(column, f.to_timestamp(f.col(f"`{column}`")))
    return frame.withWatermark(column, delay)
