"""The classes that Spark calls: `format("millstream")`.

Spark makes a DataSource in short-lived Python processes and pickles it into others, so nothing is
asked of a broker before a reader is asked for its partitions or offsets, and connections stay
behind when a reader is pickled.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructField, StructType

from millstream.errors import OptionInvalid
from millstream.spark import slices
from millstream.spark.driver import EVERYTHING, Driver
from millstream.spark.filters import bounds_of
from millstream.spark.options import plain
from millstream.spark.positions import Position
from millstream.spark.rows import ARROW_TYPES, SQL_TYPES, Shape
from millstream.spark.slices import Reading, Task
from millstream.spark.source_options import SourceOptions, read_source_options

logger = logging.getLogger("millstream.spark")

# The program by which Spark asks a reader for its filters. It runs only where the setting
# `spark.sql.python.filterPushdown.enabled` is on; elsewhere a reader that has `pushFilters` is an
# error, and nothing else tells a reader where it is.
PUSHING_PROGRAM = "pyspark.sql.worker.data_source_pushdown_filters"
# Spark 4.3.0 keeps what one query pushed for the next one of the same DataFrame, which then lacks
# rows. The Spark that keeps them apart pushes limits as well.
KEEPS_FILTERS_APART = hasattr(DataSourceReader, "pushLimit")
# Among the options only where a table of the catalog is made.
PROVIDER = "provider"
REMEMBERED = "read with "


class MillstreamSource(DataSource):
    """`format("millstream")`; the options are in `options.py` and `docs/spark.md`."""

    @classmethod
    def name(cls) -> str:
        return "millstream"

    def schema(self) -> str:
        options = read_source_options(self.options, os.environ, is_stream=None)
        return options.schema + remembered_by_tables(self.options)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = self._options(schema, is_stream=False)
        shape = shape_of(options, schema)
        is_pushing = options.pushes_filters
        if is_pushing is None:
            is_pushing = KEEPS_FILTERS_APART and _is_asked_for_filters()
        return PushingReader(options, shape) if is_pushing else BatchReader(options, shape)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        options = self._options(schema, is_stream=True)
        return StreamReader(options, shape_of(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from millstream.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802  Spark's
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from millstream.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _options(self, schema: StructType, *, is_stream: bool) -> SourceOptions:
        given = table_options(schema, self.options)
        return read_source_options(given, os.environ, is_stream=is_stream)


def _is_asked_for_filters() -> bool:
    """Whether a caller is the program that pushes filters."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == PUSHING_PROGRAM:
            return True
        frame = frame.f_back
    return False


def remembered_by_tables(given: Mapping[str, str]) -> str:
    """Spark forgets the options of a table in its catalog when it reads it, but not the comments
    of its columns: so the last one has them."""
    if PROVIDER not in given:
        return ""
    text = json.dumps({name: value for name, value in plain(given).items() if name != PROVIDER})
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f" COMMENT '{REMEMBERED}{escaped}'"


def table_options(schema: StructType, given: Mapping[str, str]) -> dict[str, str]:
    """What is given now, and what the table was made with."""
    remembered: dict[str, str] = {}
    for column in schema:
        comment = column.metadata.get("comment", "")
        if comment.startswith(REMEMBERED):
            remembered = json.loads(comment.removeprefix(REMEMBERED))
    named = {name.lower() for name in given}
    return {n: text for n, text in remembered.items() if n.lower() not in named} | dict(given)


def shape_of(options: SourceOptions, schema: StructType) -> Shape:
    """The columns that are wanted. Spark asks for those of `.schema(…)` when it was called."""
    wanted: Any = to_arrow_schema(schema, timezone="UTC")
    for column in wanted:
        known = ARROW_TYPES.get(column.name)
        is_typed = column.name == "value" and options.value_format != "bytes"
        if known is None or (not is_typed and not column.type.equals(known)):
            raise _column_invalid(schema[column.name])
    return Shape(wanted, options.value_format, options.is_failing_fast)


def _column_invalid(column: StructField) -> OptionInvalid:
    """Of the source's own columns there is none that it does not have."""
    shown = f"{column.name} {column.dataType.simpleString()}"
    right = ", ".join(f"{name} {kind}" for name, kind in SQL_TYPES.items())
    return OptionInvalid(
        f"the columns that were given, with .schema(…) or in a CREATE TABLE, have {shown!r}, "
        "which the source does not have; leave them out, for the source has columns of its own, or "
        f"give some of these: {right}. Fields of a value are named by the option valueSchema",
        option="schema",
        value=shown,
    )


class Slice(InputPartition):
    """One task of a read."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.range)
        self.task = task

    def batches(self, reading: Reading) -> Iterator[Any]:
        """Its rows, as pa.RecordBatches."""
        return slices.read(reading, self.task)


def _reading(options: SourceOptions, shape: Shape, servers: tuple[str, ...]) -> Reading:
    return Reading(
        place=options.place,
        servers=servers,
        shape=shape,
        access=options.access,
        isolation=options.isolation,
        fetch_bytes=options.fetch_bytes,
        is_failing_on_loss=options.is_failing_on_loss,
    )


class Placed(InputPartition):
    """A slice, and where to read it: tasks of a stream are made by another process than the one
    whose reader they are given to."""

    def __init__(self, slice_: Slice, reading: Reading) -> None:
        super().__init__(slice_.value)
        self.slice = slice_
        self.reading = reading

    def batches(self) -> Iterator[Any]:
        return self.slice.batches(self.reading)


class BatchReader(DataSourceReader):
    """Reads once, from the starting offsets to the ending ones."""

    def __init__(self, options: SourceOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._bounds = EVERYTHING

    def partitions(self) -> list[InputPartition]:
        driver = Driver(self._options)
        try:
            start, end = driver.starting(), driver.ending()
            archived: list[InputPartition] = []
            if self._options.archive is not None:
                archived, start = self._archived(driver, start, end)
            driver.require_order(start, end)
            tasks = driver.tasks(start, end, self._bounds)
            reading = _reading(self._options, self._shape, driver.servers)
            return [*archived, *(Placed(Slice(task), reading) for task in tasks)]
        finally:
            driver.close()

    def _archived(
        self, driver: Driver, start: Position, end: Position
    ) -> tuple[list[InputPartition], Position]:
        """The tasks that read an archive, and where the log is read from."""
        # Here, because it needs packages that other reads do not.
        from millstream.spark.archive_reading import ArchivedFile, bounded, with_archive

        url, bounds = self._options.archive, self._bounds
        assert url is not None
        files, start = with_archive(url, self._options.starting, start, end, driver.loss)
        limits = (bounds.topics, bounds.partitions, bounds.first_offset, bounds.end_offset)
        left = [(name, bounded(wanted, *limits)) for name, wanted in files]
        tasks = [ArchivedFile(url, name, one, self._shape) for name, one in left if one.offsets]
        return [*tasks], start

    def read(self, partition: InputPartition | None) -> Iterator[Any]:
        # Where there is no partition to read, Spark asks for one of its own.
        batches = getattr(partition, "batches", None)
        found: Iterator[Any] = iter(()) if batches is None else batches()
        return found


class PushingReader(BatchReader):
    """Reads only where filters may find something."""

    def pushFilters(self, filters: list[Filter]) -> list[Filter]:  # noqa: N802  Spark's
        self._bounds, left = bounds_of(filters)
        return left


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on and on. One of these lives in the driver, in a Python process of the query's own;
    tasks get copies of one that was never asked anything."""

    def __init__(self, options: SourceOptions, shape: Shape) -> None:
        self._options = options
        self._shape = shape
        self._driver = Driver(options)
        self._initial: dict[str, object] | None = None
        self._is_available_now = False
        # When a batch was given last; minOffsetsPerTrigger waits so long.
        self._given_s: float | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"options": self._options, "shape": self._shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["options"], state["shape"])  # type: ignore[misc]

    # ---- offsets; the names are Spark's

    def initialOffset(self) -> dict[str, object]:  # noqa: N802
        # Asked for more than once, and `latest` is to mean one moment.
        if self._initial is None:
            self._initial = self._driver.starting().to_json()
        return self._initial

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark takes one limit and shows it; all of them are kept in `latestOffset`."""
        options = self._options
        if options.max_offsets is not None:
            return ReadMaxRows(options.max_offsets)
        if options.max_bytes is not None:
            return ReadMaxBytes(options.max_bytes)
        if options.min_offsets is not None:
            return ReadMinRows(options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._is_available_now = True
        self._driver.fix_latest()

    def latestOffset(  # noqa: N802
        self, start: dict[str, object], limit: ReadLimit
    ) -> dict[str, object]:
        """All before `start` is done: Spark asks for the next batch when the last is written."""
        position = Position.from_json(start)
        end = self._driver.latest(position)
        if self._options.group is not None:
            self._driver.commit(position)
        if end == position:
            return start
        if not isinstance(limit, ReadAllAvailable):
            if self._is_too_little(position, end):
                return start
            end = self._driver.limited(position, end)
        if end == position:
            return start
        self._driver.require_all(position, end)
        return end.to_json()

    def _is_too_little(self, start: Position, end: Position) -> bool:
        least = self._options.min_offsets
        if least is None or self._is_available_now:
            return False
        now = time.monotonic()
        is_late = self._given_s is None or now - self._given_s >= self._options.max_delay_s
        if not is_late and self._driver.waiting(start, end) < least:
            return True
        self._given_s = now
        return False

    def reportLatestOffset(self) -> dict[str, object] | None:  # noqa: N802
        """In progress events; what is between it and the end of a batch is the lag."""
        seen = self._driver.seen
        return None if seen is None else seen.to_json()

    def partitions(self, start: dict[str, object], end: dict[str, object]) -> list[InputPartition]:
        tasks = self._driver.tasks(Position.from_json(start), Position.from_json(end))
        reading = _reading(self._options, self._shape, self._driver.servers)
        return [Placed(Slice(task), reading) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Placed)
        return partition.batches()

    def commit(self, end: dict[str, object]) -> None:
        """Nothing here: Spark calls this a batch late, and not for the last one of availableNow.
        See `latestOffset`."""

    def stop(self) -> None:
        self._driver.close()
