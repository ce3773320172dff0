"""`mill pipeline run` as a program: it goes on, ends in order, and is killed without harm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from cli_transcripts import mill
from millstream.client import Client
from millstream.errors import DataLost, PipelineFailed
from millstream.spark.pipelines.context import Context
from millstream.spark.pipelines.last_commit import least
from millstream.spark.pipelines.registry import Pipeline
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from millstream.spark.pipelines.state import RunFolder
from millstream.spark.positions import Position
from spark.records import publish, read_all
from spark.sparks import SPARK_SECONDS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OWN = """
from millstream.spark.pipelines import pipeline

@pipeline(source="run-in", sink="run-out", key="n",
          source_options={"valueFormat": "json", "valueSchema": "n INT"})
def halves(numbers):
    return numbers.select("value.n")
"""


@contextmanager
def running(folder: Path, broker: BrokerProcess) -> Iterator[subprocess.Popen[bytes]]:
    command = [*MILL, "pipeline", "run", str(folder / "own.py:halves"), "--continuous", "--json"]
    environment = plain_environment(
        {
            "MILLSTREAM_SERVER": broker.url(""),
            "MILLSTREAM_PIPELINES": str(folder / "runs"),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
    )
    command += ["--master", "local[1]", "--conf", "spark.driver.memory=700m"]
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        # A group of its own, so that what Spark starts can be ended with it.
        process = subprocess.Popen(
            command, stdout=out, stderr=err, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)


def status(folder: Path) -> dict[str, Any]:
    code, out, err = mill("pipeline", "status", "halves", "--dir", str(folder / "runs"), "--json")
    assert code == 0, err
    [page] = json.loads(out)
    assert isinstance(page, dict)
    return page


def test_a_continuous_run_is_killed_goes_on_and_ends_in_order(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    publish(broker, "run-in", [{"value": {"n": number}} for number in range(50)])
    publish(broker, "run-out", [])

    def arrived(end: int) -> bool:
        return len(read_all(broker, "run-out")) >= end

    with running(tmp_path, broker) as process:
        wait_until(
            lambda: arrived(50) or process.poll() is not None, "the first records", SPARK_SECONDS
        )
        assert process.poll() is None, (tmp_path / "err").read_text(encoding="utf-8")
        assert status(tmp_path)["state"] == "running"
        publish(broker, "run-in", [{"value": {"n": number}} for number in range(50, 60)])
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE_SECONDS)
    assert status(tmp_path)["state"] == "died"
    with running(tmp_path, broker) as process:
        wait_until(
            lambda: arrived(60) or process.poll() is not None, "what came meanwhile", SPARK_SECONDS
        )
        # The group follows a moment behind what has arrived.
        wait_until(lambda: status(tmp_path)["lag"] == 0, "the group", SPARK_SECONDS)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, (tmp_path / "err").read_text(encoding="utf-8")
    page = status(tmp_path)
    assert (page["state"], page["lag"]) == ("stopped", 0)
    assert json.loads((tmp_path / "out").read_text(encoding="utf-8"))["state"] == "stopped"
    numbers = [one.json()["n"] for one in read_all(broker, "run-out")]
    assert sorted(numbers) == list(range(60))


def test_a_run_whose_whole_process_group_is_asked_to_stop_is_stopped(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    """As many supervisors do it: the JVM ends under the run."""
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    publish(broker, "run-in", [{"value": {"n": 1}}])
    publish(broker, "run-out", [])
    before = len(read_all(broker, "run-out"))
    with running(tmp_path, broker) as process:
        wait_until(
            lambda: len(read_all(broker, "run-out")) > before or process.poll() is not None,
            "the first records",
            SPARK_SECONDS,
        )
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0, (tmp_path / "err").read_text(encoding="utf-8")
    assert status(tmp_path)["state"] == "stopped"


def test_the_group_of_a_run_that_was_asked_to_stop_is_not_behind(
    spark: SparkSession, broker: BrokerProcess, tmp_path: Path
) -> None:
    """Though the batch after, with which the source would say so, is an hour away."""
    publish(broker, "stopped-in", [{"value": {"n": number}} for number in range(20)])

    def run(context: Context) -> None:
        rows = context.read("stopped-in").writeStream.format("noop")
        query = context.start(rows)
        wait_until(lambda: query.lastProgress is not None, "the first batch", SPARK_SECONDS)
        signal.raise_signal(signal.SIGTERM)
        context.wait()

    settings = RunSettings(
        server=broker.url(""), folder=tmp_path, name="stopped", is_continuous=True, every="1 hour"
    )
    done = run_pipeline(Pipeline("stopped", "", run), {}, settings, session=spark)
    assert (done.state, done.records) == ("stopped", 20)
    with Client(broker.url("")) as client:
        assert client.groups.lag("pipeline-stopped").messages == 0


def test_a_group_is_told_only_what_all_sources_of_a_run_have_done() -> None:
    ids = {"a": "1", "b": "2"}
    one = Position({("a", 0): 5, ("a", 1): 7, ("b", 0): 3}, ids)
    other = Position({("a", 0): 6, ("a", 1): 2}, ids)
    assert least([one, other], {"a", "b"}) == Position({("a", 0): 5, ("a", 1): 2, ("b", 0): 3}, ids)
    assert least([one, other], {"b"}) == Position({("b", 0): 3}, {"b": "2"})
    again = Position({("a", 0): 6, ("a", 1): 2}, {"a": "9"})
    fewer = Position({("a", 0): 6}, ids)
    for torn in (again, fewer):
        assert least([one, torn], {"a", "b"}) == Position({("b", 0): 3}, {"b": "2"})


@pytest.mark.parametrize(
    ("error", "is_asked", "state"),
    [
        (ConnectionRefusedError("no JVM"), True, "stopped"),
        (PySparkException("no JVM"), True, "stopped"),
        (PySparkException("no JVM"), False, "failed"),
        (ValueError("of the user's own"), True, "failed"),
        (DataLost("records are gone"), True, "failed"),
    ],
)
def test_a_run_that_was_asked_to_stop_does_not_fail_of_a_spark_that_is_gone(
    tmp_path: Path, error: Exception, is_asked: bool, state: str
) -> None:
    def run(_: Context) -> None:
        if is_asked:
            signal.raise_signal(signal.SIGTERM)
        raise error

    settings = RunSettings(folder=tmp_path, name="gone")
    spark: Any = object()
    kept = nullcontext() if state == "stopped" else pytest.raises((type(error), PipelineFailed))
    with kept:
        run_pipeline(Pipeline("gone", "", run), {}, settings, session=spark)
    found = RunFolder(tmp_path, "gone").read()
    assert found is not None
    assert (found.state, found.error is None) == (state, state == "stopped")
