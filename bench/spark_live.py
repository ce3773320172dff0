"""Queries that run on: what one costs a broker while nothing happens, and how soon a record is in
its sink."""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bench.harness import Bench, Goal, Line, Unit, make_line
from bench.servers import Broker, broker, free_port

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery
    from pyspark.sql.streaming.readwriter import DataStreamWriter

PERCENT_OF_A_CORE = Unit("% of a core", is_higher_better=False)
MILLISECONDS = Unit("ms", is_higher_better=False)
TOPIC = "live"
WAIT_S = 120.0
# Records of a latency run, and from one to the next: no multiple of what a query does in turns.
SENT = {"full": 100, "quick": 40, "smoke": 4}
SENT_EVERY_S = 0.317
# The first find everything cold.
NOT_COUNTED = 5
IDLE_RUNS_MAX = 3
IDLE_S = 10.0


def idle(bench: Bench, spark: SparkSession) -> Iterator[Line]:
    """What the broker's threads take more while a query waits for records than without one."""
    seconds = min(IDLE_S, 5 * bench.scale.seconds)
    values = []
    with _live_broker(bench) as one:
        for number in range(min(bench.scale.runs, IDLE_RUNS_MAX)):
            alone = _share(one, seconds)
            writer = _live(spark, one, "wire").writeStream.format("noop")
            with _running(writer, bench.scratch / f"idle-{number}") as query:
                _wait_until_waiting(query)
                values.append(max(_share(one, seconds) - alone, 0.0))
    yield make_line(
        "idle.broker-cpu",
        mode="warm",
        unit=PERCENT_OF_A_CORE,
        values=values,
        taken="median",
        goal=Goal("value at most", 1.0),
        note=f"over the wire, {seconds:g} s a run, beyond what it takes alone",
    )


def latency(bench: Bench, spark: SparkSession) -> Iterator[Line]:
    """From when a record is sent to the broker until it is in the hands of a running sink."""
    from bench.spark_sources import Arrivals, arrivals

    spark.dataSource.register(Arrivals)
    folder = bench.scratch / "arrivals"
    folder.mkdir()
    count = SENT[bench.scale.name]
    with _live_broker(bench) as one:
        writer = _live(spark, one, "auto").writeStream.format("bench_arrivals")
        writer = writer.option("folder", str(folder))
        with _running(writer, bench.scratch / "latency") as query:
            _wait_until_waiting(query)
            for _ in range(NOT_COUNTED + count):
                _send(one)
                time.sleep(SENT_EVERY_S)
            _wait_for(lambda: len(arrivals(folder)) >= NOT_COUNTED + count, "the last record")
    found_ms = [(came - sent) / 1e6 for sent, came in arrivals(folder)[NOT_COUNTED:]]
    shutil.rmtree(folder)
    yield make_line(
        "latency.p50",
        mode="every",
        unit=MILLISECONDS,
        values=found_ms,
        taken="median",
        goal=Goal("value at most", 300),
        note="each run is a record",
    )
    yield make_line(
        "latency.p95",
        mode="every",
        unit=MILLISECONDS,
        values=[statistics.quantiles(found_ms, n=20)[-1]],
    )


@contextmanager
def _live_broker(bench: Bench) -> Iterator[Broker]:
    kafka = f"127.0.0.1:{free_port()}"
    with broker(bench.scratch, "--kafka", kafka, "--topic-partitions", "1") as one:
        _send(one)
        yield one


def _send(one: Broker) -> None:
    body = json.dumps({"value": str(time.time_ns())}).encode()
    one.post(f"/v1/topics/{TOPIC}/messages", body)


def _live(spark: SparkSession, one: Broker, access: str) -> DataFrame:
    reader = spark.readStream.format("millstream").options(server=one.url, subscribe=TOPIC)
    return reader.option("startingOffsets", "latest").option("access", access).load()


@contextmanager
def _running(writer: DataStreamWriter, checkpoint: Path) -> Iterator[StreamingQuery]:
    query = writer.option("checkpointLocation", str(checkpoint)).start()
    try:
        yield query
    finally:
        query.stop()
        shutil.rmtree(checkpoint, ignore_errors=True)


def _wait_until_waiting(query: StreamingQuery) -> None:
    """The query has made itself ready, and there is nothing to do."""

    def is_waiting() -> bool:
        error = query.exception()
        if error is not None:
            raise RuntimeError(str(error))
        return str(query.status["message"]).startswith("Waiting for data")

    _wait_for(is_waiting, "the query")


def _wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {WAIT_S:g} s for {what}")
        time.sleep(0.05)


def _share(one: Broker, seconds: float) -> float:
    """Of one core, in percent."""
    before_s, begin = one.cpu_s(), time.perf_counter()
    time.sleep(seconds)
    return 100 * (one.cpu_s() - before_s) / (time.perf_counter() - begin)
