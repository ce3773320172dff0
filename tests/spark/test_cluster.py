"""Source, sink and pipelines on a real cluster."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow.parquet as pq
import pytest

from broker_process import BrokerProcess
from spark.records import publish, read_all
from spark.sink_proxy import Moment, SinkProxy
from spark.sparks import SPARK_SECONDS, cluster, run_program
from spark.test_sink_kills import assert_once, make_files

HERE = Path(__file__).parent
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"

ORDERS = [{"key": f"u{n % 3}", "value": {"who": f"u{n % 3}", "total": n}} for n in range(300)]

# One session for everything: executors are started once.
ON_CLUSTER = """
import sys
from pathlib import Path
from pyspark.sql import functions as f
from millstream.spark.pipelines import archive, pipeline
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from millstream.spark.session import spark_session

@pipeline(source="cl-orders", sink="cl-doubled", key="who",
          source_options={"valueFormat": "json", "valueSchema": "who STRING, total INT"})
def doubled(orders):
    @f.udf("int")
    def twice(total):
        return 2 * total
    return orders.select("value.who", twice("value.total").alias("twice"))

master, server, folder = sys.argv[1:]
spark = spark_session("cluster", master=master, settings={
    "spark.executor.memory": "512m", "spark.sql.shuffle.partitions": "2"})
settings = RunSettings(server=server, folder=Path(folder) / "runs")
given = {"topics": "cl-orders", "to": f"{folder}/lake"}
print(run_pipeline(archive.PIPELINE, given, settings, session=spark).records)
print(run_pipeline(doubled, {}, settings, session=spark).records)
print(spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1)
spark.stop()
"""


def test_source_sink_and_pipelines_run_on_a_cluster(broker: BrokerProcess, tmp_path: Path) -> None:
    publish(broker, "cl-orders", ORDERS, partitions=4)
    with cluster(tmp_path / "cluster") as master:
        program = ("-c", ON_CLUSTER, master, broker.url(""), str(tmp_path))
        archived, doubled, executors = map(int, run_program(*program).split())
    assert (archived, doubled, executors) == (300, 300, 2)
    out = [one.json() for one in read_all(broker, "cl-doubled")]
    assert sorted(one["twice"] for one in out) == [2 * n for n in range(300)]
    lake = pq.read_table(tmp_path / "lake" / "topic=cl-orders")
    totals = [json.loads(value)["total"] for value in lake.column("value").to_pylist()]
    assert sorted(totals) == list(range(300))


def executors() -> list[psutil.Process]:
    """Of the clusters that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if EXECUTOR in process.cmdline():
                found.append(process)
    return found


@pytest.mark.slow
def test_executors_that_are_killed_while_they_write_write_each_row_once(tmp_path: Path) -> None:
    """One of two, and later both, while tasks stage their rows; and both before the commit."""
    moments: list[tuple[Moment, int]] = [("writing", 1), ("staged", 2), ("writing", 2)]
    values = make_files(tmp_path / "rows", len(moments) + 2)
    killed: list[int] = []

    def kill() -> None:
        _, count = moments.pop(0)
        for process in executors()[:count]:
            process.kill()
            killed.append(process.pid)
        if moments:
            proxy.arm(moments[0][0], kill)

    with (
        cluster(tmp_path / "cluster") as master,
        BrokerProcess(str(tmp_path)) as broker,
        SinkProxy(broker.wait_until_ready().url("")) as proxy,
    ):
        proxy.arm(moments[0][0], kill)
        places = (proxy.url, "once", str(tmp_path / "rows"), str(tmp_path / "checkpoint"))
        run_program(str(HERE / "sink_driver.py"), *places, master, patience_s=2 * SPARK_SECONDS)
        assert not moments
        # One that is not replaced yet cannot be killed.
        assert len(set(killed)) >= 3
        assert_once(broker, "once", values)
