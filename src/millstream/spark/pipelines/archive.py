"""`archive`: topics into a lake of Parquet files, each record once.

    mill pipeline run archive --topics orders,payments --to lake/

The first run takes all there is, later ones what came since. What is in the lake, and how it stays
exact through crashes, is told in `lake`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from millstream.errors import ArchiveInvalid
from millstream.kinds import Size
from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.lake import Ends, Entry, Lake, OffsetRange
from millstream.spark.pipelines.places import query_id
from millstream.spark.pipelines.registry import Option, Pipeline

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What a file holds of a record; topic and date are in its path.
COLUMNS = (
    ("key", "BINARY"),
    ("value", "BINARY"),
    ("partition", "INT"),
    ("offset", "BIGINT"),
    ("timestamp", "TIMESTAMP"),
    ("timestampType", "INT"),
    ("headers", "ARRAY<STRUCT<key: STRING, value: BINARY>>"),
    ("lane", "STRING"),
    # Which of several topics that had this name, one after the other.
    ("topic_uuid", "STRING"),
)
SCHEMA = ", ".join(f"`{name}` {kind}" for name, kind in COLUMNS) + ", topic STRING, date STRING"
# Rows of one file: a file of small records ends here, one of large ones by its bytes.
FILE_RECORDS_MAX = 5_000_000
EARLIEST = -2
# A continuous run that wrote files as soon as there is a record would write very small ones.
CONTINUOUS_EVERY = "1 minute"

OPTIONS = (
    Option("topics", "Which topics, with commas between.", metavar="TOPICS", is_required=True),
    Option("to", "The lake: a folder, or s3a://….", metavar="DIR", is_required=True),
    Option("file-size", "About how large files may be.", default="128MiB", metavar="SIZE"),
    Option(
        "skip-lost",
        "Go on when retention removed records before they were archived.",
        is_switch=True,
    ),
)


def run(context: Context) -> None:
    options = context.options
    try:
        file_bytes = Size(1).parse(options["file-size"])
    except ValueError as error:
        options.refuse("file-size", f"is {options['file-size']!r}, which {error}")
    topics = options.names("topics")
    lake = Lake.at(options["to"])
    lake.finish_all()
    entries = lake.entries()
    ends = lake.ends(entries)
    uuids, starting = _where_to_begin(context, lake, topics, ends)
    frame = context.read(
        *topics,
        includeHeaders="true",
        includeLane="true",
        startingOffsets=json.dumps(starting),
        failOnDataLoss="false" if options.is_on("skip-lost") else "true",
    )
    newest_ms = max((entry.written_ms for entry in entries), default=0)
    archive = MicroBatches(
        lake, f"{context.checkpoint}/main", uuids, file_bytes or 1, ends, newest_ms
    )
    context.every = context.every or CONTINUOUS_EVERY
    context.run(frame.writeStream.foreachBatch(archive.write))
    files = sum(len(entry.files) for entry in archive.added)
    records = sum(entry.records for entry in archive.added)
    context.say(f"{records:,} records in {files:,} new files of {lake.url}")


PIPELINE = Pipeline(
    name="archive",
    help="Topics into a lake of Parquet files, by topic and date; each record once.",
    options=OPTIONS,
    run=run,
    # A larger micro-batch makes larger files.
    records_max=5_000_000,
)


def _where_to_begin(
    context: Context, lake: Lake, topics: list[str], ends: Ends
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """The topics' UUIDs, and for a new checkpoint: after what the lake holds already."""
    uuids: dict[str, str] = {}
    starting: dict[str, dict[str, int]] = {}
    with context.client() as client:
        for topic in topics:
            uuid = uuids[topic] = client.topics.describe(topic).uuid
            starting[topic] = {}
            for one in client.topics.offsets(topic):
                end = ends.get((topic, uuid, one.partition), EARLIEST)
                starting[topic][str(one.partition)] = end
                if 0 <= end < one.start and not context.options.is_on("skip-lost"):
                    raise ArchiveInvalid(
                        f"partition {one.partition} of {topic} begins at offset {one.start}, and "
                        f"{lake.url} ends at {end}: retention removed what lies between before "
                        "it was archived; --skip-lost goes on without it",
                        archive=lake.url,
                    )
                if 0 <= end < one.start:
                    starting[topic][str(one.partition)] = EARLIEST
    return uuids, starting


@dataclass(slots=True)
class MicroBatches:
    """What is done with each micro-batch; see `lake` for the steps."""

    lake: Lake
    checkpoint: str
    uuids: dict[str, str]
    file_bytes: int
    ends: Ends
    newest_ms: int
    added: list[Entry] = field(default_factory=list)

    def write(self, frame: DataFrame, number: int) -> None:
        id = f"{query_id(self.checkpoint)}-{number:010d}"
        entry = self.lake.find(id)
        if entry is None:
            url = self.lake.stage_url(id)
            ranges = _write_files(frame, url, self.file_bytes, self.uuids)
            if not ranges:
                self.lake.drop_staged(id)
                return
            # Entries are in the order of these, also when a clock is set back.
            self.newest_ms = max(self.newest_ms + 1, time.time_ns() // 1_000_000)
            entry = Entry(id, self.newest_ms, self.lake.staged_names(id), ranges)
            self.lake.add(entry, self.ends)
            self.added.append(entry)
        self.lake.finish(entry)


def _write_files(
    frame: DataFrame, url: str, file_bytes: int, uuids: dict[str, str]
) -> list[OffsetRange]:
    from pyspark.sql import functions as f

    session = frame.sparkSession
    # Rows of one topic and day come together, and are divided again where they are many.
    session.conf.set("spark.sql.adaptive.enabled", "true")
    session.conf.set("spark.sql.adaptive.advisoryPartitionSizeInBytes", str(file_bytes))
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    names = f.create_map(*(f.lit(text) for pair in uuids.items() for text in pair))
    dated = frame.withColumn("date", f.date_format("timestamp", "yyyy-MM-dd")).withColumn(
        "topic_uuid", names[f.col("topic")]
    )
    spread = dated.hint("rebalance", "topic", "date")
    ordered = spread.sortWithinPartitions("topic", "date", "partition", "offset")
    writer = ordered.write.partitionBy("topic", "date").mode("overwrite")
    writer.option("maxRecordsPerFile", FILE_RECORDS_MAX).parquet(url)
    written = session.read.schema(SCHEMA).parquet(url)
    found = written.groupBy("topic", "partition").agg(
        f.min("offset"),
        f.max("offset") + 1,
        f.count("*"),
        f.unix_millis(f.min("timestamp")),
        f.unix_millis(f.max("timestamp")),
    )
    return [_range(row, uuids) for row in found.orderBy("topic", "partition").collect()]


def _range(row: Any, uuids: dict[str, str]) -> OffsetRange:
    topic, *numbers = row
    return OffsetRange(topic, uuids.get(topic, ""), *numbers)
