"""Data sources that a workload of Spark needs beside ours: the least that a Python source can do,
and a sink that notes when rows came. Spark's workers import this module."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

# The row of Spark's Kafka connector, which is ours too.
ROW = (
    "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, "
    "timestampType INT"
)
Messages: TypeAlias = list[WriterCommitMessage | None]


class ArrowSlice(InputPartition):
    """Record batches of one file, from one to before another."""

    def __init__(self, path: str, first: int, end: int) -> None:
        super().__init__(path)
        self.path = path
        self.first = first
        self.end = end


def read_slice(piece: ArrowSlice) -> Iterator[Any]:
    with pa.memory_map(piece.path) as source, pa.ipc.open_file(source) as batches:
        for number in range(piece.first, piece.end):
            yield batches.get_batch(number)


def slices(folder: str, step: int, end: int, steps: int) -> list[ArrowSlice]:
    """What lies between two steps, of `steps` that all files are divided in."""
    found = []
    for path in sorted(Path(folder).glob("*.arrow")):
        with pa.memory_map(str(path)) as source:
            count = pa.ipc.open_file(source).num_record_batches
        found.append(ArrowSlice(str(path), count * step // steps, count * end // steps))
    return found


class ArrowFiles(DataSource):
    """Record batches that lie ready in files: option `folder`, and `steps`, the micro-batches of a
    stream."""

    @classmethod
    def name(cls) -> str:
        return "bench_arrow"

    def schema(self) -> str:
        return ROW

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: ARG002, N802
        return ArrowStream(self.options["folder"], int(self.options["steps"]))

    def reader(self, schema: StructType) -> DataSourceReader:  # noqa: ARG002
        return ArrowBatch(self.options["folder"])


class ArrowBatch(DataSourceReader):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def partitions(self) -> list[InputPartition]:
        return [*slices(self.folder, 0, 1, 1)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, ArrowSlice)
        return read_slice(partition)


class ArrowStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, folder: str, steps: int) -> None:
        self.folder = folder
        self.steps = steps

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"step": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        if isinstance(limit, ReadAllAvailable):
            return {"step": self.steps}
        return {"step": min(start["step"] + 1, self.steps)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        from pyspark.sql.streaming.datasource import ReadMaxFiles

        return ReadMaxFiles(1)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """There is no more than there was."""

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [*slices(self.folder, start["step"], end["step"], self.steps)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, ArrowSlice)
        return read_slice(partition)


def write_arrow_files(batches: Iterator[Any], folder: str) -> Iterator[Any]:
    """For `mapInArrow`: each task's batches into a file of its own."""
    path = f"{folder}/{uuid.uuid4()}.arrow"
    writer, rows = None, 0
    for batch in batches:
        if writer is None:
            writer = pa.ipc.new_file(path, batch.schema)
        writer.write_batch(batch)
        rows += batch.num_rows
    if writer is not None:
        writer.close()
    yield pa.RecordBatch.from_pydict({"rows": pa.array([rows], pa.int64())})


class Arrivals(DataSource):
    """A sink that notes when each row came: option `folder`. A value is the time at which its
    record was sent, in nanoseconds."""

    @classmethod
    def name(cls) -> str:
        return "bench_arrivals"

    def streamWriter(  # noqa: N802
        self,
        schema: StructType,  # noqa: ARG002
        overwrite: bool,  # noqa: ARG002
    ) -> DataSourceStreamWriter:
        return ArrivalsWriter(self.options["folder"])


class ArrivalsWriter(DataSourceStreamArrowWriter):
    def __init__(self, folder: str) -> None:
        self.folder = folder

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        lines = []
        for batch in iterator:
            now = time.time_ns()
            lines += [f"{sent.decode()} {now}\n" for sent in batch.column("value").to_pylist()]
        if lines:
            Path(self.folder, f"{uuid.uuid4()}.txt").write_text("".join(lines))
        return WriterCommitMessage()

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        pass

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        pass


def arrivals(folder: Path) -> list[tuple[int, int]]:
    """When rows were sent and came, in the order in which they were sent."""
    texts = [path.read_text() for path in folder.glob("*.txt")]
    pairs = (line.split() for text in texts for line in text.splitlines())
    return sorted((int(sent), int(came)) for sent, came in pairs)
