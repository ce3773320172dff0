"""Source, sink and pipelines over Spark Connect: from a program, from `mill`, and declared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from spark.declared import declare
from spark.records import publish, read_all
from spark.sparks import HOME, SPARK_SECONDS, SparkProcess, connect_server, run_program

# A client needs nothing of ours: it names the format, and the server has it.
FROM_PYTHON = """
import sys
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

remote, server, checkpoint = sys.argv[1:]
spark = SparkSession.builder.remote(remote).getOrCreate()
place = {"server": server}

orders = spark.read.format("millstream").options(**place, subscribe="cn-orders").load()
names = orders.where("partition >= 0").selectExpr("key", "upper(cast(value AS string)) AS value")
names.write.format("millstream").mode("append").options(**place, topic="cn-copies").save()

stream = spark.readStream.format("millstream").options(
    **place, subscribe="cn-orders", startingOffsets="earliest", maxOffsetsPerTrigger="100",
    valueFormat="json", valueSchema="who STRING, total INT").load()
big = stream.where("value.total >= 100").select("key", f.to_json("value").alias("value"))
query = (big.writeStream.format("millstream").options(**place, topic="cn-big")
    .option("checkpointLocation", checkpoint).trigger(availableNow=True).start())
query.awaitTermination()
print(orders.count(), query.lastProgress["batchId"] + 1, "millstream" in sys.modules)
"""


@dataclass(frozen=True)
class Server:
    remote: str
    folder: Path


@pytest.fixture(scope="module")
def connect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder) as remote:
        yield Server(remote, folder)


def orders(count: int = 300) -> list[dict[str, object]]:
    return [
        {"key": f"u{number % 3}", "value": {"who": f"u{number % 3}", "total": number}}
        for number in range(count)
    ]


def test_a_pipeline_runs_over_connect(
    broker: BrokerProcess, connect: Server, tmp_path: Path
) -> None:
    publish(broker, "co-orders", orders())
    query = "SELECT who, total FROM `co-orders` WHERE total >= 100"
    told = run_program(
        *("-m", "millstream", "pipeline", "run", "sql", "--sql", query),
        *("--to", "topic:co-big", "--key", "who", "--remote", connect.remote),
        *("--dir", str(tmp_path / "runs"), "--server", broker.url(""), "--json"),
    )
    status = json.loads(told)
    assert (status["state"], status["records"]) == ("finished", 300)
    assert status["master"] == connect.remote
    out = [one.json()["total"] for one in read_all(broker, "co-big")]
    assert sorted(out) == list(range(100, 300))


def test_a_program_reads_and_writes_over_connect(
    broker: BrokerProcess, connect: Server, tmp_path: Path
) -> None:
    publish(broker, "cn-orders", orders())
    program = ("-c", FROM_PYTHON, connect.remote, broker.url(""), str(tmp_path / "checkpoint"))
    count, batches, has_ours = run_program(*program).split()
    assert (count, has_ours) == ("300", "False")
    assert int(batches) >= 3, "limits hold"
    copies = read_all(broker, "cn-copies")
    assert sorted(one.json()["TOTAL"] for one in copies) == list(range(300))
    assert {one.key for one in copies} == {b"u0", b"u1", b"u2"}
    big = [one.json()["total"] for one in read_all(broker, "cn-big")]
    assert sorted(big) == list(range(100, 300))


def test_declared_tables_and_sinks_are_topics(
    broker: BrokerProcess, connect: Server, tmp_path: Path
) -> None:
    project = declare(tmp_path, broker.url(""), "dp-orders", "dp-big")

    def run() -> None:
        """As `spark-pipelines --remote` does, without a JVM that only starts it."""
        run_program(project.program, *project.run, environment={"SPARK_REMOTE": connect.remote})

    write_once(broker, run, "dp-orders", "dp-big")


@pytest.mark.slow
def test_declared_tables_go_on_with_a_spark_of_their_own(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    project = declare(tmp_path, broker.url(""), "dh-orders", "dh-big")

    def run() -> None:
        # Without it the catalog is forgotten with its Spark, and the tables' files are not.
        hive = ("--conf", "spark.sql.catalogImplementation=hive")
        program = str(HOME / "bin" / "spark-pipelines")
        started = SparkProcess(tmp_path / "run", program, *hive, *project.run)
        assert started.process.wait(SPARK_SECONDS) == 0, started.log.read_text(encoding="utf-8")

    write_once(broker, run, "dh-orders", "dh-big")


def write_once(broker: BrokerProcess, run: Callable[[], None], source: str, target: str) -> None:
    """Two runs, and each record is in the sink once."""

    def totals() -> list[int]:
        return sorted(one.json()["total"] for one in read_all(broker, target))

    publish(broker, source, orders())
    publish(broker, target, [])
    run()
    assert totals() == list(range(100, 300))
    publish(broker, source, [{"value": {"who": "u9", "total": 900}}])
    run()
    assert totals() == [*range(100, 300), 900]
