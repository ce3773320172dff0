"""The sink: `df.write.format("millstream")` and `df.writeStream.format("millstream")`.

Against Millstream every write is exactly once. Tasks stage their rows (`staging.py`); the commit
names the parts of the attempts that won, and the broker puts all of them into their topics, or has
done so before. A stream's writer is its query's id, and its batches are its micro-batches: what is
replayed after a crash adds nothing. A batch write has a writer of its own, so it is there whole or
not at all; with the options `writer` and `batch` it can be repeated too.

Against any other broker of the Kafka protocol rows are there at least once (`kafka_sink.py`).
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from millstream.client.writers import LastBatch
from millstream.errors import (
    MillstreamError,
    OptionInvalid,
    SaveModeInvalid,
    WriterAhead,
    WriterNameless,
    WriterUnknown,
)
from millstream.spark.datasource import table_options
from millstream.spark.kafka_client import Kafka
from millstream.spark.kafka_sink import produce_rows
from millstream.spark.options import (
    BROKER_ROWS,
    BrokerPlace,
    option_invalid,
    read_options,
    read_place,
    was_given,
)
from millstream.spark.sink_options import SinkOptions, sink_options
from millstream.spark.sink_schema import check_columns
from millstream.spark.staging import MillstreamBroker, TaskDone, TaskPlace, client_of, stage_rows
from millstream.wire.staged import NO_PART

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Under these names Spark tells a task which query it works for. They are documented nowhere, and
# held by a test.
QUERY_PROPERTY = "sql.streaming.queryId"
BATCH_PROPERTY = "streaming.sql.batchId"
HTTP_CONFIG = "millstream.http"
# The options that say where a broker is.
PLACES = ("server", "servers", "kafka.bootstrap.servers")
# What names one write. The next one would be taken for the same.
OF_ONE_WRITE = frozenset(("writer", "batch"))
# What tasks told the driver; None for a task that failed.
Messages: TypeAlias = list[WriterCommitMessage | None]

logger = logging.getLogger("millstream.spark")


@dataclass(frozen=True, slots=True)
class Target:
    """Where rows go. `url` is Millstream's; None: another broker of the Kafka protocol."""

    url: str | None
    options: SinkOptions


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver."""

    done: TaskDone


def batch_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> BatchSink:
    if overwrite:
        raise SaveModeInvalid("a topic cannot be overwritten, only written to; use .mode('append')")
    target = _target(given, schema, is_stream=False)
    options = target.options
    return BatchSink(target, options.writer or f"spark-{uuid.uuid4().hex}", options.batch or 0)


def stream_writer(given: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSink:
    if overwrite:
        raise SaveModeInvalid(
            "a topic takes new records and keeps the old ones; use .outputMode('append'), or "
            "foreachBatch for a query in another mode"
        )
    return StreamSink(_target(given, schema, is_stream=True))


def _target(given: Mapping[str, str], schema: StructType, *, is_stream: bool) -> Target:
    """Everything that can be wrong with a write before it has a row is found here."""
    made_with = _made_with(given, schema)
    options = sink_options(made_with | dict(given), os.environ, is_stream=is_stream)
    url = http_of(options.place)
    if any(was_given(made_with, name) for name in PLACES):
        _require_one_broker(url, options.place)
    check_columns(
        [(field.name, field.dataType.simpleString()) for field in schema.fields],
        has_topic=options.topic is not None,
        is_millstream=url is not None,
    )
    if url is None:
        _require_plain(options)
        logger.warning(
            "%s is no Millstream: rows are written at least once", ", ".join(options.place.servers)
        )
    return Target(url, options)


def _made_with(given: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """The options of the table that rows are inserted into.

    Spark gives an INSERT no options but those of the statement itself, and columns with the
    comments of the table. But so it does with rows that were read from a table and go elsewhere:
    only a broker or a topic of their own tells them apart."""
    if any(was_given(given, name) for name in (*PLACES, "topic")):
        return {}
    ours = OF_ONE_WRITE | {name.lower() for name in given}
    found = table_options(schema, {})
    return {name: text for name, text in found.items() if name.lower() not in ours}


def _require_one_broker(url: str | None, place: BrokerPlace) -> None:
    """Into a table, rows go where it is; from a table, where the environment says. When these are
    two, the rows could be in the wrong one."""
    if not os.environ.get("MILLSTREAM_SERVER"):
        return
    said = read_place(read_options({}, BROKER_ROWS), os.environ).url
    if said != url:
        where = url or ", ".join(place.servers)
        raise OptionInvalid(
            f"MILLSTREAM_SERVER is {said!r}, and the table of these columns was made with {where}; "
            "say where rows are to go with the options server and topic, or unset "
            "MILLSTREAM_SERVER",
            option="server",
            value=said or "",
        )


def _require_plain(options: SinkOptions) -> None:
    """Another broker of the Kafka protocol has neither dead letters nor writers."""
    asked = {
        "onError": "deadletter" if options.to_dead_letters else None,
        "writer": options.writer,
        "batch": options.batch,
    }
    for name, value in asked.items():
        if value is not None:
            raise option_invalid(
                name, value, "and only Millstream can do that; this broker is another: leave it out"
            )


def http_of(place: BrokerPlace) -> str | None:
    """Millstream's HTTP address, as given or as the broker itself says it."""
    if place.url is not None:
        return place.url
    with Kafka(place, place.servers) as kafka:
        address = kafka.broker_config(HTTP_CONFIG)
    if not address:
        return None
    if address.endswith(":0"):
        where = ",".join(place.servers)
        raise OptionInvalid(
            f"the Millstream at {where} does not say where its HTTP listener is; give the option "
            "server too",
            option="server",
            value="",
        )
    scheme = "https" if place.uses_tls else "http"
    return address if "://" in address else f"{scheme}://{address}"


# ---- batch


class BatchSink(DataSourceArrowWriter):
    def __init__(self, target: Target, writer: str, batch: int) -> None:
        self.target = target
        self.writer = writer
        self.batch = batch

    def write(self, iterator: Iterator[Any]) -> Written:
        context = _context()
        place = TaskPlace(self.writer, self.batch, context.partitionId(), context.attemptNumber())
        return Written(_write(self.target, place, iterator))

    def commit(self, messages: Messages) -> None:
        done = _done(messages)
        if self.target.url is None or not done:
            return
        is_final = self.target.options.writer is None
        was_there = commit_staged(self.target.url, self.target.options, done, is_final=is_final)
        if not is_final and (was_there or not _has_parts(done)):
            _require_same(self.target, done)
        if is_final:
            # Nobody will come by this name again. The broker forgets it too, only later.
            with suppress(MillstreamError), _client(self.target) as client:
                client.writers.forget(self.writer)

    def abort(self, messages: Messages) -> None:  # noqa: ARG002
        abort_staged(self.target, self.writer, self.batch)


# ---- stream


class StreamSink(DataSourceStreamArrowWriter):
    def __init__(self, target: Target) -> None:
        self.target = target

    def write(self, iterator: Iterator[Any]) -> Written:
        context = _context()
        query = context.getLocalProperty(QUERY_PROPERTY)
        batch = context.getLocalProperty(BATCH_PROPERTY)
        if not query or batch is None:
            raise WriterNameless(
                "Spark did not tell the task its query and its micro-batch; use the Spark that "
                "this version of Millstream is made for, or write with foreachBatch and the "
                "options writer and batch"
            )
        writer, task = self.target.options.writer or query, context.partitionId()
        place = TaskPlace(writer, int(batch), task, context.attemptNumber(), query)
        return Written(_write(self.target, place, iterator))

    def commit(self, messages: Messages, batchId: int) -> None:  # noqa: ARG002, N803
        done = _done(messages)
        if self.target.url is None or not done:
            return
        was_there = commit_staged(self.target.url, self.target.options, done)
        if was_there or not _has_parts(done):
            _require_same(self.target, done)

    def abort(self, messages: Messages, batchId: int) -> None:  # noqa: N803
        # Without a message nobody knows the query's name; what is staged goes by its age.
        for one in _done(messages)[:1]:
            abort_staged(self.target, one.writer, batchId)


def _require_same(target: Target, done: list[TaskDone]) -> None:
    """What is committed already should be these rows. Only a writer's last batch is ever written
    again: an older one comes of a checkpoint that was put back or deleted, and so does the last
    one when it has another number of rows now. Another query's the broker has refused before."""
    writer = done[0].writer
    with _client(target) as client:
        try:
            last = client.writers.get(writer).last
        except WriterUnknown:
            # It has had no rows yet, and has none now.
            return
    if last is not None:
        _require_last(done, last)


def _require_last(done: list[TaskDone], last: LastBatch) -> None:
    """WriterAhead unless these are the rows of the writer's last batch, or of a newer one."""
    writer, batch, rows = done[0].writer, done[0].batch, sum(one.rows for one in done)
    is_stream = done[0].owner is not None
    noun, mine = ("micro-batch", "this query") if is_stream else ("batch", "this write")
    if last.batch > batch:
        what = f"{noun} {last.batch}, and {mine} is at {batch}"
    elif last.batch == batch and not last.skipped and last.records != rows:
        what = f"{noun} {batch} with {last.records} records, and {mine} has {rows} for it"
    else:
        return
    if is_stream:
        why = "its checkpoint is older than what it wrote. Go on with the newest checkpoint"
    else:
        why = (
            "these rows are not written, for numbers of batches rise. In foreachBatch, go on with "
            "the newest checkpoint; elsewhere, give the write the next number"
        )
    raise WriterAhead(
        f"the writer {writer} has committed {what}: {why}, or start with another writer (option "
        "writer), which may write records again",
        writer=writer,
        batch=batch,
        last=last.batch,
    )


# ---- both


def _context() -> TaskContext:
    context = TaskContext.get()
    assert context is not None, "rows are written by tasks"
    return context


def _done(messages: Messages) -> list[TaskDone]:
    return [cast(Written, one).done for one in messages if one is not None]


def _client(target: Target) -> Any:
    assert target.url is not None
    return client_of(target.url, target.options.place, target.options.patience_s)


def _write(target: Target, place: TaskPlace, batches: Iterable[Any]) -> TaskDone:
    if target.url is None:
        return produce_rows(batches, target.options, place, wall_ms)
    with _client(target) as client:
        return stage_rows(batches, target.options, place, MillstreamBroker(client), wall_ms)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def _has_parts(done: list[TaskDone]) -> bool:
    """Without rows there is nothing to commit, and only the writer's last batch can tell whether
    that is right."""
    return any(one.parts for one in done)


def commit_staged(
    url: str, options: SinkOptions, done: list[TaskDone], *, is_final: bool = False
) -> bool:
    """Whether it was committed before. All tasks are of one writer and one batch."""
    writer, batch, owner = done[0].writer, done[0].batch, done[0].owner
    parts = [part for one in done for part in one.parts]
    if not parts:
        return False
    if NO_PART in parts:
        return True
    with client_of(url, options.place, options.patience_s) as client:
        committed = client.writers.commit(writer, batch, parts, owner=owner, forget=is_final)
    if committed.skipped:
        logger.warning("batch %s of %s left records out: %s", batch, writer, committed.skipped)
    return bool(committed.already)


def abort_staged(target: Target, writer: str, batch: int) -> None:
    """What is left behind when this fails, goes by its age. A commit that runs goes on."""
    if target.url is None:
        return
    with suppress(MillstreamError), client_of(target.url, target.options.place, 5.0) as client:
        client.writers.abort(writer, batch)
