"""`mill bench spark`: the data source and the sink, against what Spark has itself.

One session on two cores for all of it. Ours and the peers get the same rows: 100 bytes under ten
thousand keys, by the same producer. Every side runs once before anything is measured, because what
a JVM does first it does slowly; then they run in turn. What is measured is the wall time of a whole
query, its start and its end with it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.harness import (
    Bench,
    Goal,
    Line,
    Measurement,
    NotMeasured,
    Peer,
    Unit,
    alternate,
    make_line,
)
from bench.kafka_load import Load, run
from bench.kafka_peer import kafka_or_why
from bench.servers import Broker, broker, environment, free_port
from bench.spark_connector import MISSING, connector
from bench.spark_live import idle, latency

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_PER_SECOND = Unit("rows/s")
ROWS = {"full": 4_000_000, "quick": 1_000_000, "smoke": 20_000}
ROW_BYTES = 100
PARTITIONS = 2
# Rows of a batch in Arrow files: any size from a thousand on is as quick.
ARROW_ROWS = 10_000
# Micro-batches of a stream that is read, and of one that is written.
STEPS = 10
SINK_STEPS = 4
# A run writes everything twice, once to where it is staged: a disk holds so many runs.
SINK_RUNS_MAX = 3
TOPIC = "rows"
PARQUET, ARROW, CONNECTOR = "spark.read.parquet", "ready Arrow files", "Spark's Kafka connector"


class Stage(NamedTuple):
    """What the measurements of reads share."""

    spark: SparkSession
    scratch: Path
    rows: int
    options: dict[str, str]


def session() -> SparkSession:
    """The one of this process. Its workers find what is in `bench`."""
    from millstream.spark.session import spark_session

    os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
    settings = {"spark.driver.memory": "3g", "spark.sql.shuffle.partitions": str(PARTITIONS)}
    found = connector()
    if found is not None:
        settings["spark.jars"] = ",".join(map(str, found.jars))
    return spark_session("bench", master="local[2]", settings=settings)


# ---- reading


def reads(bench: Bench) -> Iterator[Line]:
    """Batches: from segment files, over the wire, and from Parquet files of the same rows."""
    from bench.spark_sources import ArrowFiles

    with ExitStack() as stack:
        stage = _filled(bench, stack)
        spark, rows, folder = stage.spark, stage.rows, stage.scratch / "parquet"
        _ours(stage, "files").write.parquet(str(folder))

        ready = _arrow_files(stage, ARROW_ROWS)
        spark.dataSource.register(ArrowFiles)

        def parquet() -> DataFrame:
            return spark.read.parquet(str(folder))

        def arrow() -> DataFrame:
            return spark.read.format("bench_arrow").option("folder", str(ready)).load()

        values = _warm_then_in_turn(
            bench,
            {
                "files": lambda: _timed(rows, lambda: _drain(_ours(stage, "files"))),
                "wire": lambda: _timed(rows, lambda: _drain(_ours(stage, "wire"))),
                "parquet": lambda: _timed(rows, lambda: _drain(parquet())),
                "arrow": lambda: _timed(rows, lambda: _drain(arrow())),
                "count": lambda: _timed(rows, lambda: _count_keys(_ours(stage, "files"))),
                "count-wire": lambda: _timed(rows, lambda: _count_keys(_ours(stage, "wire"))),
                "count-parquet": lambda: _timed(rows, lambda: _count_keys(parquet())),
            },
        )
    beside = f"{rows:,} rows of {ROW_BYTES} B, {PARTITIONS} partitions"
    for name, goal in (("files", 2_500_000), ("wire", 1_500_000)):
        yield make_line(
            f"read.{name}",
            mode="warm",
            unit=ROWS_PER_SECOND,
            values=values[name],
            goal=Goal("value at least", goal),
            note=beside,
        )
    yield make_line(
        "read.parquet",
        mode="warm",
        unit=ROWS_PER_SECOND,
        values=values["files"],
        peer=Peer(PARQUET, values["parquet"]),
        goal=Goal("ratio at least", 1.0),
        note="ours from segment files",
    )
    yield make_line(
        "read.ready",
        mode="warm",
        unit=ROWS_PER_SECOND,
        values=values["files"],
        peer=Peer(ARROW, values["arrow"]),
        note="the least that any data source in Python does",
    )
    yield make_line(
        "count.files",
        mode="warm",
        unit=ROWS_PER_SECOND,
        values=values["count"],
        peer=Peer(PARQUET, values["count-parquet"]),
        goal=Goal("value at least", 1_500_000),
        note="by key; Parquet reads the one column alone",
    )
    yield make_line(
        "count.wire", mode="warm", unit=ROWS_PER_SECOND, values=values["count-wire"], note="by key"
    )


def streams(bench: Bench) -> Iterator[Line]:
    """Ten micro-batches, against a data source that only hands out what lies ready."""
    from bench.spark_sources import ArrowFiles

    with ExitStack() as stack:
        stage = _filled(bench, stack)
        # Small enough that every file has some for each step.
        folder = _arrow_files(stage, min(ARROW_ROWS, stage.rows // (2 * STEPS * PARTITIONS)))
        stage.spark.dataSource.register(ArrowFiles)
        limit = str(-(-stage.rows // STEPS))

        def stream(kind: str, **options: str) -> float:
            reader = stage.spark.readStream.format(kind).options(**options)
            return _timed(stage.rows, lambda: _drain_stream(stage, reader.load()))

        named = stage.options | {"startingOffsets": "earliest", "maxOffsetsPerTrigger": limit}
        values = _warm_then_in_turn(
            bench,
            {
                "files": lambda: stream("millstream", access="files", **named),
                "wire": lambda: stream("millstream", access="wire", **named),
                "arrow": lambda: stream("bench_arrow", folder=str(folder), steps=str(STEPS)),
            },
        )
    for name, goal in (("files", Goal("ratio at least", 0.8)), ("wire", None)):
        yield make_line(
            f"stream.{name}",
            mode="warm",
            unit=ROWS_PER_SECOND,
            values=values[name],
            peer=Peer(ARROW, values["arrow"]),
            goal=goal,
            note=f"{STEPS} micro-batches of {int(limit):,} rows",
        )


def beside_connector(bench: Bench) -> Iterator[Line]:
    """Spark's own connector reads the same rows from an Apache Kafka."""
    found = connector()
    with ExitStack() as stack:
        stage = _filled(bench, stack)
        peer, why = kafka_or_why(bench, stack, mode="none", partitions=PARTITIONS)
        sides: dict[str, Callable[[], float]] = {
            access: lambda access=access: _timed(  # type: ignore[misc]
                stage.rows, lambda: _drain(_ours(stage, access))
            )
            for access in ("files", "wire")
        }
        if found is None:
            why = MISSING
        elif peer:
            run(Load(peer, "rows", TOPIC, PARTITIONS, stage.rows, ROW_BYTES))
            sides["connector"] = lambda: _timed(
                stage.rows, lambda: _drain(_theirs(stage.spark, peer))
            )
        values = _warm_then_in_turn(bench, sides)
    named = CONNECTOR if found is None else f"{CONNECTOR} {found.version}"
    for access, name in (("files", "connector.files"), ("wire", "connector.wire")):
        yield make_line(
            name,
            mode="warm",
            unit=ROWS_PER_SECOND,
            values=values[access],
            peer=Peer(named, values.get("connector", ()), why or None),
            goal=Goal("ratio at least", 2.0),
        )


def _filled(bench: Bench, stack: ExitStack) -> Stage:
    """A broker with the rows in it."""
    rows = ROWS[bench.scale.name]
    kafka = f"127.0.0.1:{free_port()}"
    flags = ("--kafka", kafka, "--fsync", "none", "--topic-partitions", str(PARTITIONS))
    one = stack.enter_context(broker(bench.scratch, *flags))
    run(Load(kafka, "rows", TOPIC, PARTITIONS, rows, ROW_BYTES))
    scratch = bench.scratch / f"spark-{time.monotonic_ns()}"
    scratch.mkdir()
    stack.callback(shutil.rmtree, scratch, ignore_errors=True)
    return Stage(session(), scratch, rows, {"server": one.url, "subscribe": TOPIC})


def _ours(stage: Stage, access: str) -> DataFrame:
    reader = stage.spark.read.format("millstream").options(**stage.options)
    return reader.option("access", access).load()


def _theirs(spark: SparkSession, server: str) -> DataFrame:
    options = {"kafka.bootstrap.servers": server, "subscribe": TOPIC}
    return spark.read.format("kafka").options(**options).load()


def _arrow_files(stage: Stage, rows: int) -> Path:
    """The same rows as Arrow lies in files, so many in a batch."""
    from bench.spark_sources import write_arrow_files

    folder = stage.scratch / "arrow"
    folder.mkdir()
    stage.spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", rows)
    ours = _ours(stage, "files")
    ours.mapInArrow(lambda batches: write_arrow_files(batches, str(folder)), "rows long").count()
    return folder


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _count_keys(frame: DataFrame) -> None:
    _drain(frame.groupBy("key").count())


def _drain_stream(stage: Stage, frame: DataFrame) -> None:
    """All there is; and the run fails when that was not all, or not in as many steps."""
    checkpoint = stage.scratch / f"checkpoint-{time.monotonic_ns()}"
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    query.awaitTermination()
    counts = [one["numInputRows"] for one in query.recentProgress if one["numInputRows"]]
    if sum(counts) != stage.rows or len(counts) != STEPS:
        raise RuntimeError(f"{stage.rows} rows in {STEPS} steps came as {counts}")


# ---- writing


def sinks(bench: Bench) -> Iterator[Line]:
    """Rows from Parquet files into a new topic each time, with a sync for every append."""
    spark, rows = session(), ROWS[bench.scale.name]
    with ExitStack() as stack:
        kafka = f"127.0.0.1:{free_port()}"
        one = stack.enter_context(broker(bench.scratch, "--kafka", kafka, "--fsync", "every"))
        scratch = bench.scratch / f"spark-{time.monotonic_ns()}"
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        source = _rows_to_write(spark, scratch, rows)
        topics = (f"sink-{number}" for number in range(1_000_000))

        def batch(topic: str) -> None:
            frame = spark.read.parquet(str(source))
            writer = frame.write.format("millstream").mode("append")
            writer.options(server=one.url, topic=topic).save()

        def stream(topic: str) -> None:
            reader = spark.readStream.schema("key binary, value binary")
            reader = reader.option("maxFilesPerTrigger", PARTITIONS)
            writer = reader.parquet(str(source)).writeStream.format("millstream")
            writer = writer.options(server=one.url, topic=topic)
            writer = writer.option("checkpointLocation", str(scratch / topic))
            writer.trigger(availableNow=True).start().awaitTermination()

        def written(write: Callable[[str], None]) -> float:
            topic = next(topics)
            body = {"name": topic, "partitions": PARTITIONS}
            one.post("/v1/topics", json.dumps(body).encode())
            rate = _timed(rows, lambda: write(topic))
            _check_written(one, topic, rows)
            return rate

        values = _warm_then_in_turn(
            bench,
            {"batch": lambda: written(batch), "stream": lambda: written(stream)},
            runs=min(bench.scale.runs, SINK_RUNS_MAX),
        )
    for name, goal, note in (
        ("stream", 600_000, f"exactly once, {SINK_STEPS} micro-batches"),
        ("batch", 1_000_000, "one commit for all"),
    ):
        yield make_line(
            f"sink.{name}",
            mode="every",
            unit=ROWS_PER_SECOND,
            values=values[name],
            goal=Goal("value at least", goal),
            note=f"{rows:,} rows of {ROW_BYTES} B; {note}",
        )


def _rows_to_write(spark: SparkSession, scratch: Path, rows: int) -> Path:
    """As many files as give each micro-batch one for every core."""
    folder = scratch / "rows"
    files = PARTITIONS * SINK_STEPS
    key = "encode(format_string('key-%05d', id % 10000), 'UTF-8') AS key"
    text = f"rpad(concat(id, sha2(cast(id AS string), 256)), {ROW_BYTES}, 'x')"
    frame = spark.range(0, rows, 1, files).selectExpr(key, f"encode({text}, 'UTF-8') AS value")
    frame.write.parquet(str(folder))
    return folder


def _check_written(one: Broker, topic: str, rows: int) -> None:
    offsets = json.loads(one.get(f"/v1/topics/{topic}/offsets"))["offsets"]
    count = sum(partition["end"] - partition["start"] for partition in offsets)
    if count != rows:
        raise RuntimeError(f"of {rows} rows, {count} are in {topic}")


# ---- both


def _timed(rows: int, do: Callable[[], None]) -> float:
    begin = time.perf_counter()
    do()
    return rows / (time.perf_counter() - begin)


def _warm_then_in_turn(
    bench: Bench, sides: dict[str, Callable[[], float]], runs: int | None = None
) -> dict[str, list[float]]:
    for side in sides.values():
        side()
    return alternate(sides, runs or bench.scale.runs)


def _with_spark(measure: Callable[[Bench], Iterator[Line]]) -> Callable[[Bench], Iterator[Line]]:
    """Where Spark or its Java is missing, every line says so."""

    def measured(bench: Bench) -> Iterator[Line]:
        from millstream.errors import MillstreamError

        try:
            import pyspark  # noqa: F401  asked for, not used

            from millstream.spark.java import java_home

            java_home()
        except (ImportError, MillstreamError) as error:
            raise NotMeasured(f"{error}; pip install 'millstream[spark]'") from error
        yield from measure(bench)

    return measured


MEASUREMENTS = (
    Measurement(
        ("read.files", "read.wire", "read.parquet", "read.ready", "count.files", "count.wire"),
        _with_spark(reads),
    ),
    Measurement(("connector.files", "connector.wire"), _with_spark(beside_connector)),
    Measurement(("stream.files", "stream.wire"), _with_spark(streams)),
    Measurement(("sink.stream", "sink.batch"), _with_spark(sinks)),
    Measurement(("idle.broker-cpu",), _with_spark(lambda bench: idle(bench, session()))),
    Measurement(
        ("latency.p50", "latency.p95"), _with_spark(lambda bench: latency(bench, session()))
    ),
)
