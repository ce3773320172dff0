"""A topic with what was archived of it: the lake and the live log as one frame.

Where they meet is decided once, when the frame is made: of each partition the lake gives all before
the offset at which it ends then, and the broker all from that offset on. So no record is there
twice, and none is missing, also while the archive grows and while retention removes what the lake
holds. If the log begins after the lake ends, records are in neither, and that is an error; so it is
where the lake holds nothing and the log no longer begins at 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from millstream.errors import ArchiveInvalid
from millstream.spark.pipelines.archive import COLUMNS, EARLIEST, SCHEMA
from millstream.spark.pipelines.context import FORMAT, broker_client
from millstream.spark.pipelines.lake import Entry, Lake

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROW = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


class Boundary(msgspec.Struct, frozen=True):
    """By partition: the offset before which records come from the lake, and 0 without any."""

    topic: str
    uuid: str
    ends: dict[int, int]


def read_with_archive(
    spark: SparkSession,
    topic: str,
    lake: str,
    *,
    server: str,
    options: Mapping[str, str] | None = None,
    is_stream: bool = False,
) -> DataFrame:
    """All records of a topic that the lake or the broker has, each once.

    As a stream it begins with the lake and goes on with the log. A stream that is started again
    from its checkpoint must be made with the same boundary: use `boundary_of` once, keep it, and
    give it as the option `boundary`.
    """
    given = dict(options or {})
    kept = given.pop("boundary", None)
    place = Lake.at(lake)
    place.finish_all()
    # Names of options have no case.
    ca = {name.lower(): text for name, text in given.items()}.get("ca")
    boundary = (
        msgspec.json.decode(kept, type=Boundary)
        if kept
        else boundary_of(topic, place, server, ca=ca)
    )
    old = archived(spark, place, boundary, is_stream=is_stream)
    starting = {topic: {str(one): end or EARLIEST for one, end in boundary.ends.items()}}
    reader = spark.readStream if is_stream else spark.read
    live = (
        reader.format(FORMAT)
        .options(
            server=server,
            subscribe=topic,
            includeHeaders="true",
            includeLane="true",
            startingOffsets=json.dumps(starting),
            **given,
        )
        .load()
    )
    columns = [*ROW, "headers", "lane"]
    return old.select(*columns).unionByName(live.select(*columns))


def boundary_of(topic: str, lake: Lake, server: str, *, ca: str | None = None) -> Boundary:
    """Where lake and log meet now."""
    with broker_client(server, ca) as client:
        uuid = client.topics.describe(topic).uuid
        starts = {one.partition: one.start for one in client.topics.offsets(topic)}
    ends = lake.ends()
    meets = {partition: ends.get((topic, uuid, partition), 0) for partition in starts}
    for partition, start in starts.items():
        if meets[partition] < start:
            raise _in_neither(lake.url, topic, partition, meets[partition], start)
    return Boundary(topic, uuid, meets)


def _in_neither(url: str, topic: str, partition: int, end: int, start: int) -> ArchiveInvalid:
    if end == 0:
        what = (
            f"{url} holds nothing of partition {partition} of {topic}, and the broker begins at "
            f"{start}: records before are in neither; name the folder of its archive, or read the "
            "topic alone"
        )
    else:
        what = (
            f"{url} ends before offset {end} of partition {partition} of {topic}, and the broker "
            f"begins at {start}: records between are in neither; archive the topic before its "
            "retention comes"
        )
    return ArchiveInvalid(what, archive=url)


def archived(spark: SparkSession, lake: Lake, boundary: Boundary, *, is_stream: bool) -> DataFrame:
    """What the lake holds of a topic before its boundary."""
    from pyspark.sql import functions as f

    if is_stream:
        frame = spark.readStream.schema(SCHEMA).parquet(lake.url)
    else:
        frame = files_of(spark, lake, lake.entries(), boundary.topic)
    frame = frame.where((f.col("topic") == boundary.topic) & (f.col("topic_uuid") == boundary.uuid))
    is_before = f.lit(False)
    for partition, end in boundary.ends.items():
        is_before |= (f.col("partition") == partition) & (f.col("offset") < end)
    return frame.where(is_before)


def files_of(spark: SparkSession, lake: Lake, entries: list[Entry], topic: str) -> DataFrame:
    """The records of a topic that some entries hold."""
    urls = lake.urls(entries, topic)
    if not urls:
        names = ", ".join(f"CAST(NULL AS {kind}) AS `{name}`" for name, kind in COLUMNS)
        return spark.sql(f"SELECT {names}, '' AS topic, '' AS date WHERE false")
    return spark.read.schema(SCHEMA).option("basePath", lake.url).parquet(*urls)
