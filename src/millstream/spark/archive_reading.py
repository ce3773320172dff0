"""`includeArchive`: a batch takes what an archive has of its topics, and the rest from the log.

Where they meet is decided once, when the batch is planned: of each partition the archive gives all
before the offset at which it ends then, the broker all from there on. So no record is there twice,
and none is missing, while the archive grows or retention removes what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pd
from pyspark.sql.datasource import InputPartition

from millstream.spark.options import option_invalid
from millstream.spark.pipelines.lake import Lake
from millstream.spark.positions import Limit, Part, Position
from millstream.spark.rows import Shape, dead_letters
from millstream.spark.typed_values import CORRUPT, Values

# Of a value that several rows are read for at once.
BATCH_ROWS = 16 * 1024
STORED = ("key", "value", "partition", "offset", "timestamp", "timestampType", "headers", "lane")


class Losing(Protocol):
    """Told of records that are in neither."""

    def found(self, part: Part, first: int, until: int | None, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of one topic: which offsets of which partitions the archive gives."""

    topic: str
    uuid: str
    offsets: Mapping[int, tuple[int, int]]


class ArchivedFile(InputPartition):
    """One file of an archive, as a task of a batch."""

    def __init__(self, url: str, name: str, wanted: Wanted, shape: Shape) -> None:
        super().__init__(name)
        self.url = url
        self.name = name
        self.wanted = wanted
        self.shape = shape

    def batches(self) -> Iterator[Any]:
        """Its rows, as pa.RecordBatches."""
        lake = Lake.at(self.url)
        path = f"{lake.root}/{self.name}"
        found = pd.dataset(path, format="parquet", filesystem=lake.files)
        rows = found.to_batches(
            columns=list(STORED), filter=_filter(self.wanted), batch_size=BATCH_ROWS
        )
        for batch in rows:
            if batch.num_rows:
                yield _shaped(batch, self.wanted.topic, self.shape)


def with_archive(
    url: str, starting: Limit, start: Position, end: Position, loss: Losing
) -> tuple[list[tuple[str, Wanted]], Position]:
    """Files to be read, each with what is wanted of it; and where the log is read from."""
    if starting.kind != "earliest":
        raise option_invalid(
            "includeArchive",
            url,
            "and the batch does not begin with the earliest record; leave the starting offsets "
            "out, and filter by offset or timestamp",
        )
    lake = Lake.at(url)
    lake.finish_all()
    entries = lake.entries()
    ends = lake.ends(entries)
    offsets = dict(start.offsets)
    wanted: dict[str, dict[int, tuple[int, int]]] = {}
    for (topic, partition), first in start.offsets.items():
        until = ends.get((topic, end.ids.get(topic, ""), partition), 0)
        if first > until:
            why = "retention took them before they were archived"
            if until == 0:
                why = f"{url} holds nothing of {topic} there; is it the folder of its archive?"
            loss.found((topic, partition), until, first, why)
        if until == 0:
            continue
        wanted.setdefault(topic, {})[partition] = (0, min(until, end.offsets[topic, partition]))
        offsets[topic, partition] = min(max(first, until), end.offsets[topic, partition])
    files = []
    for topic, ranges in wanted.items():
        uuid = end.ids.get(topic, "")
        mine = [entry for entry in entries if entry.has(topic, uuid)]
        names = [name for entry in mine for name in entry.files]
        folder = f"topic={topic}/"
        one = Wanted(topic, uuid, ranges)
        files += [(name, one) for name in names if name.startswith(folder)]
    return files, Position(offsets, start.ids)


def bounded(
    wanted: Wanted,
    topics: frozenset[str] | None,
    partitions: frozenset[int] | None,
    first: int,
    end: int | None,
) -> Wanted:
    """What filters leave of it."""
    if topics is not None and wanted.topic not in topics:
        return Wanted(wanted.topic, wanted.uuid, {})
    cut = {
        partition: (max(low, first), high if end is None else min(high, end))
        for partition, (low, high) in wanted.offsets.items()
        if partitions is None or partition in partitions
    }
    left = {partition: (low, high) for partition, (low, high) in cut.items() if low < high}
    return Wanted(wanted.topic, wanted.uuid, left)


def _filter(wanted: Wanted) -> Any:
    is_wanted = pc.scalar(False)
    for partition, (first, until) in wanted.offsets.items():
        is_wanted |= (
            (pc.field("partition") == partition)
            & (pc.field("offset") >= first)
            & (pc.field("offset") < until)
        )
    return (pc.field("topic_uuid") == wanted.uuid) & is_wanted


def _shaped(batch: Any, topic: str, shape: Shape) -> Any:
    """The columns that are wanted, with the types that Spark expects."""
    made: dict[str, Any] = {}
    if "value" in shape.names or CORRUPT in shape.names:
        part = (topic, batch.column("partition")[0].as_py())
        kind = shape.schema.field("value").type if "value" in shape.names else None
        values = Values(shape.value_format, kind, shape.is_failing_fast, part)
        made = values.read(batch.column("value"), batch.column("offset"))
    if "topic" in shape.names:
        made["topic"] = pa.repeat(pa.scalar(topic, pa.string()), batch.num_rows)
    if "dead_letter" in shape.names:
        made["dead_letter"] = dead_letters(batch.column("headers"))
    arrays = [
        made[field.name] if field.name in made else batch.column(field.name).cast(field.type)
        for field in shape.schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=shape.schema)
