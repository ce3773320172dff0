"""Drivers, workers and brokers that are killed at every moment of a write: each row is there once.

The proxy stands between them and knows the moment. Kills go on along one query: what one run
leaves behind is what the next one starts from.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess
from millstream.client import Client
from spark.sink_proxy import MOMENTS, Moment, SinkProxy

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DRIVER = Path(__file__).parent / "sink_driver.py"
ROWS = 200
# A JVM starts, and a query; more than once, on a busy machine.
RUN_SECONDS = 4 * PATIENCE_SECONDS
ROUNDS = 25
WORKER = "pyspark.daemon"


def make_files(folder: Path, count: int, rows: int = ROWS, padding: str = "") -> list[str]:
    folder.mkdir()
    values = [f"{number}{padding}" for number in range(count * rows)]
    for number in range(count):
        some = values[number * rows : (number + 1) * rows]
        path = folder / f"{number:04}.json"
        path.write_text("".join(f'{{"value": "{value}"}}\n' for value in some))
        # The order in which Spark takes them.
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return values


def assert_once(broker: BrokerProcess, topic: str, expected: Iterable[str]) -> None:
    with Client(broker.url("")) as client:
        found = Counter(one.text for one in client.read(topic))
        wanted = set(expected)
        assert not [value for value, count in found.items() if count > 1]
        assert found.keys() == wanted
        [writer] = [one for one in client.writers.list() if one.last is not None]
        # What lost is cleaned up.
        assert (writer.committing, writer.staged_parts, writer.staged_bytes) == (None, 0, 0)


# ---- the driver


class DriverRun:
    def __init__(self, proxy: SinkProxy, folder: Path, checkpoint: Path) -> None:
        arguments = [proxy.url, "once", str(folder), str(checkpoint)]
        self._said = checkpoint.parent / f"driver-{time.monotonic_ns()}"
        with self._said.open("wb") as messages:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), *arguments],
                stdout=messages,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """With its JVM and its Python workers. Those have a group of their own, and one that lives
        on asks again for what the proxy did not answer: it would meet the next round's moment."""
        driver = psutil.Process(self.process.pid)
        for process in (driver, *driver.children(recursive=True)):
            with suppress(psutil.Error):
                process.kill()

    def kill_workers(self) -> None:
        """The Python processes that run its tasks, which are children of one of their kind."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                parent = process.parent()
                if (
                    parent is not None
                    and WORKER in process.cmdline()
                    and WORKER in parent.cmdline()
                ):
                    process.kill()

    def wait(self) -> int:
        try:
            return self.process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def said(self) -> str:
        return self._said.read_text(errors="replace")[-4000:]


def kill_drivers(tmp_path: Path, moments: Iterable[Moment]) -> None:
    order = list(moments)
    # What was committed when its driver was killed is not committed again.
    values = make_files(tmp_path / "rows", len(order) + 2)
    checkpoint = tmp_path / "checkpoint"
    with (
        BrokerProcess(str(tmp_path)) as broker,
        SinkProxy(broker.wait_until_ready().url("")) as proxy,
    ):
        for number, moment in enumerate(order, 1):
            run = DriverRun(proxy, tmp_path / "rows", checkpoint)
            proxy.arm(moment, run.kill)
            assert run.wait() == -signal.SIGKILL, run.said()
            assert proxy.called == number
        # The last one only loses its workers: tasks are tried again.
        last = DriverRun(proxy, tmp_path / "rows", checkpoint)
        proxy.arm("writing", last.kill_workers)
        assert last.wait() == 0, last.said()
        assert proxy.called == len(order) + 1
        assert_once(broker, "once", values)


def test_a_driver_that_is_killed_at_every_moment_writes_each_row_once(tmp_path: Path) -> None:
    kill_drivers(tmp_path, MOMENTS)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_driver_that_is_killed_again_and_again_writes_each_row_once(
    tmp_path: Path, moment: Moment
) -> None:
    kill_drivers(tmp_path, [moment] * ROUNDS)


# ---- the broker


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def kill_brokers(spark: SparkSession, tmp_path: Path, rounds: int) -> None:
    """While a commit copies what is several steps of it."""
    chance = random.Random(rounds)
    values = make_files(tmp_path / "rows", rounds + 1, padding="x" * 20_000)
    flags = ("--http", f"127.0.0.1:{free_port()}", "--topic-partitions", "2")
    brokers = [BrokerProcess(str(tmp_path), *flags).wait_until_ready()]

    def restart() -> None:
        # A commit takes some ten milliseconds.
        time.sleep(chance.random() * 0.03)
        brokers[-1].process.kill()
        brokers[-1].process.wait(PATIENCE_SECONDS)
        brokers.append(BrokerProcess(str(tmp_path), *flags).wait_until_ready())
        left[0] -= 1
        if left[0]:
            proxy.arm("committing", restart)

    left = [rounds]
    try:
        with SinkProxy(brokers[0].url("")) as proxy:
            proxy.arm("committing", restart)
            rows = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1)
            query = (
                rows.json(str(tmp_path / "rows"))
                .writeStream.format("millstream")
                .options(server=proxy.url, topic="once", compression="none")
                .option("checkpointLocation", str(tmp_path / "checkpoint"))
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination()
            assert proxy.called == rounds
        assert_once(brokers[-1], "once", values)
    finally:
        for broker in brokers:
            broker.__exit__()


def test_a_broker_that_is_killed_during_a_commit_has_each_row_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    kill_brokers(spark, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_broker_that_is_killed_again_and_again_has_each_row_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    kill_brokers(spark, tmp_path, ROUNDS)
