"""Processes of Spark's own, made from what pip installs: a cluster, and a Connect server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

from broker_process import PATIENCE_SECONDS, plain_environment, wait_until
from millstream.spark.java import java_home

# Spark takes long to start where it has to share the processor.
SPARK_SECONDS = 4 * PATIENCE_SECONDS
HOME = Path(pyspark.__file__).parent
ON_LOOPBACK = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")


def spark_environment() -> dict[str, str]:
    return plain_environment(
        {
            "JAVA_HOME": str(java_home()),
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            # Of a master, a worker and a Connect server, which refuses to start with less.
            "SPARK_DAEMON_MEMORY": "640m",
            "PYSPARK_PYTHON": sys.executable,
        }
    )


class SparkProcess:
    """A program of Spark, with what it says in a file."""

    def __init__(self, folder: Path, *command: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"{time.monotonic_ns()}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=spark_environment(), cwd=folder
            )

    def said(self, pattern: str, count: int = 1) -> str:
        """Wait until a line has been said so often; answers the last one's first group."""

        def found() -> list[str]:
            return re.findall(pattern, self.log.read_text(encoding="utf-8", errors="replace"))

        def is_there() -> bool:
            return len(found()) >= count or self.process.poll() is not None

        wait_until(is_there, pattern, SPARK_SECONDS)
        assert len(found()) >= count, self.log.read_text(encoding="utf-8")
        return found()[-1]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def cluster(folder: Path, workers: int = 2) -> Iterator[str]:
    """A standalone master with workers of one core each; gives its URL."""
    program = str(HOME / "bin" / "spark-class")
    started = []
    try:
        master = SparkProcess(
            folder / "master", program, "org.apache.spark.deploy.master.Master", *ON_LOOPBACK
        )
        started.append(master)
        url = master.said(r"Starting Spark master at (spark://\S+)")
        for number in range(workers):
            place = folder / f"worker-{number}"
            started.append(
                SparkProcess(
                    place,
                    program,
                    "org.apache.spark.deploy.worker.Worker",
                    *ON_LOOPBACK,
                    *("--cores", "1", "--memory", "1g", "--work-dir", str(place), url),
                )
            )
        master.said(r"Registering worker (\S+)", workers)
        yield url
    finally:
        for one in reversed(started):
            one.end()


@contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """A Connect server with a local Spark; gives its URL."""
    server = SparkProcess(
        folder,
        str(HOME / "bin" / "spark-submit"),
        *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer"),
        *("--master", "local[2]"),
        *("--conf", "spark.connect.grpc.binding.port=0"),
        *("--conf", "spark.connect.grpc.binding.address=127.0.0.1"),
        *("--conf", "spark.ui.enabled=false"),
        *("--conf", "spark.sql.shuffle.partitions=2"),
    )
    try:
        port = server.said(r"Spark Connect server started at: \S*?:(\d+)")
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.end()


def run_program(
    *command: str,
    environment: dict[str, str] | None = None,
    patience_s: float = SPARK_SECONDS,
) -> str:
    """A Python program of this environment; answers what it printed."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=patience_s,
        env=plain_environment(environment) | {"PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
