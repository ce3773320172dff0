"""Dead letters as frames: which belong together, when they died, and examples of each kind.

All of these are functions of frames. `letters` takes rows of the data source with the column
`dead_letter`; what comes out of it goes through the others. `kind` is a short name for topic,
group, reason and shape of the error together, the same one in every report.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import Window
from pyspark.sql import functions as sql

from millstream.spark.pipelines.columns import as_text, begin_s
from millstream.spark.pipelines.shapes import fragments, shape_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

# Offsets that one row of `gone_words` tells about: the bits of a long.
WORD_OFFSETS = 64
# Texts that are tried when a redrive has to be told which letters are meant.
FRAGMENTS_MAX = 8
# What stands for facts that a letter does not tell.
NO_GROUP, NO_REASON = "–", "unknown"
KIND = ("kind", "topic", "group", "reason", "shape")


class GoneRun(NamedTuple):
    """Dead letters that were deleted or put back, and still lie in the log."""

    partition: int
    first: int
    last: int


class Kind(NamedTuple):
    """Dead letters that have one cause, as far as their errors tell."""

    kind: str
    topic: str
    group: str
    reason: str
    shape: str
    letters: int
    # The first failure of all; then the earliest and the latest of their last ones.
    first_failure_ms: int
    since_ms: int
    last_failure_ms: int
    deliveries: int | None
    redrives: int


class Example(NamedTuple):
    kind: str
    partition: int
    offset: int
    key: str | None
    error: str | None
    value: str | None


class Search(NamedTuple):
    """What tells a redrive which dead letters are meant."""

    text: str | None
    # Letters of other kinds that it would put back too.
    others: int


def letters(records: DataFrame) -> DataFrame:
    """One row a dead letter. Somebody may have written one by hand: then it says less."""
    dead = sql.col("dead_letter")
    found = records.select(
        sql.col("partition").alias("place_partition"),
        sql.col("offset").alias("place_offset"),
        sql.coalesce(dead["topic"], sql.regexp_replace("topic", r"\.dlq$", "")).alias("topic"),
        sql.coalesce(dead["group"], sql.lit(NO_GROUP)).alias("group"),
        sql.coalesce(dead["reason"], sql.lit(NO_REASON)).alias("reason"),
        dead["error"].alias("error"),
        shape_column(dead["error"]).alias("shape"),
        dead["deliveries"].alias("deliveries"),
        _millis(dead["first_failure"]).alias("first_failure_ms"),
        _millis(dead["last_failure"]).alias("last_failure_ms"),
        _redrives(records).alias("redrives"),
        "key",
        "value",
    )
    named = sql.concat_ws("\0", "topic", "group", "reason", "shape")
    return found.withColumn("kind", sql.substring(sql.sha2(named, 256), 1, 8))


def _millis(failure: Column) -> Column:
    """The broker too takes the record's time where a letter does not say when it failed."""
    return sql.unix_millis(sql.coalesce(failure, sql.col("timestamp")))


def _redrives(records: DataFrame) -> Column:
    """How often a record was put back before it died again."""
    if "headers" not in records.columns:
        return sql.lit(0)
    said = sql.filter("headers", lambda header: header["key"] == "ms-redrives")
    count = sql.try_element_at(said, sql.lit(1))["value"].cast("string").try_cast("int")
    return sql.coalesce(count, sql.lit(0))


# ---- which of them are left


def gone_words(spark: SparkSession, runs: Iterable[GoneRun]) -> DataFrame:
    """Runs of offsets as bits, 64 in a row: so that a join on equal columns finds them."""
    rows = list(_words(runs))
    return spark.createDataFrame(rows, "gone_partition int, gone_word long, gone_bits long")


def _words(runs: Iterable[GoneRun]) -> Iterator[tuple[int, int, int]]:
    bits: dict[tuple[int, int], int] = {}
    for partition, first, last in runs:
        for word in range(first // WORD_OFFSETS, last // WORD_OFFSETS + 1):
            low = max(first - word * WORD_OFFSETS, 0)
            high = min(last - word * WORD_OFFSETS, WORD_OFFSETS - 1)
            run = ((1 << (high - low + 1)) - 1) << low
            bits[partition, word] = bits.get((partition, word), 0) | run
    for (partition, word), value in bits.items():
        # A long has a sign.
        yield partition, word, value - (value >> 63 << 64)


def left(found: DataFrame, words: DataFrame) -> DataFrame:
    """Without those that are gone."""
    offset = found["place_offset"]
    is_same = (words["gone_partition"] == found["place_partition"]) & (
        words["gone_word"] == sql.floor(offset / WORD_OFFSETS)
    )
    bit = sql.getbit("gone_bits", (offset % WORD_OFFSETS).cast("int"))
    return (
        found.join(sql.broadcast(words), is_same, "left")
        .where(sql.col("gone_bits").isNull() | (bit == 0))
        .drop("gone_partition", "gone_word", "gone_bits")
    )


# ---- what they have in common


def kinds(found: DataFrame) -> DataFrame:
    """Each kind, how many there are and from when to when; the largest first."""
    return (
        found.groupBy(*KIND)
        .agg(
            sql.count("*").alias("letters"),
            sql.min("first_failure_ms").alias("first_failure_ms"),
            sql.min("last_failure_ms").alias("since_ms"),
            sql.max("last_failure_ms").alias("last_failure_ms"),
            sql.max("deliveries").alias("deliveries"),
            sql.max("redrives").alias("redrives"),
        )
        .orderBy(sql.desc("letters"), "kind")
    )


def examples(found: DataFrame, each: int) -> DataFrame:
    """Of each kind those that failed last."""
    newest = Window.partitionBy("kind").orderBy(
        sql.desc("last_failure_ms"), "place_partition", "place_offset"
    )
    numbered = found.withColumn("number", sql.row_number().over(newest))
    return (
        numbered.where(sql.col("number") <= each)
        .orderBy("kind", "number")
        .select(
            "kind",
            sql.col("place_partition").alias("partition"),
            sql.col("place_offset").alias("offset"),
            as_text("key").alias("key"),
            "error",
            as_text("value").alias("value"),
        )
    )


def over_time(found: DataFrame, column: str, seconds: int) -> DataFrame:
    """How many failed last in each step of time, by a column; `begin_s` is when a step begins."""
    begin = begin_s("last_failure_ms", seconds).alias("begin_s")
    return found.groupBy(begin, column).agg(sql.count("*").alias("letters"))


# ---- putting a kind back


def search_for(found: DataFrame, kind: Kind) -> Search:
    """What a redrive has to look for. Its filters know group, reason, time and a text, and no
    shape. So of the error's own words those are taken that all letters of this kind have, and the
    fewest others."""
    alike = found.where(
        (sql.col("topic") == kind.topic)
        & (sql.col("group") == kind.group)
        & (sql.col("reason") == kind.reason)
        & sql.col("last_failure_ms").between(kind.since_ms, kind.last_failure_ms)
    )
    texts = [None, *fragments(kind.shape)[:FRAGMENTS_MAX]]
    counts = []
    for number, text in enumerate(texts):
        has = sql.lit(True) if text is None else _has(text)
        is_ours = sql.col("kind") == kind.kind
        counts += [
            sql.count_if(has & is_ours).alias(f"ours{number}"),
            sql.count_if(has & ~is_ours).alias(f"others{number}"),
        ]
    (row,) = alike.agg(*counts).collect()
    fitting = [
        Search(text, row[f"others{number}"])
        for number, text in enumerate(texts)
        if row[f"ours{number}"] == row["ours0"]
    ]
    return min(fitting, key=lambda one: one.others)


def _has(text: str) -> Column:
    """As the broker looks for it: in the value or in the error."""
    inside = sql.contains(sql.col("value"), sql.encode(sql.lit(text), "UTF-8"))
    return sql.coalesce(inside, sql.lit(False)) | sql.coalesce(
        sql.contains("error", sql.lit(text)), sql.lit(False)
    )
