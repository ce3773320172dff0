"""`make demo` shows everything at work, says where its results are, and leaves nothing running."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from broker_process import PATIENCE_SECONDS, plain_environment, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def demo(folder: Path, seconds: int) -> subprocess.Popen[str]:
    program = [sys.executable, str(DEMO), "--seconds", str(seconds), "--dir", str(folder)]
    output = open(folder.parent / "output.txt", "w")  # noqa: SIM115  it is the child's
    with output:
        return subprocess.Popen(
            program, stdout=output, stderr=subprocess.STDOUT, text=True, env=plain_environment()
        )


def running(folder: Path) -> list[str]:
    """Programs that have to do with a demo: all are told its folder, or where its data are."""
    return [
        " ".join(process.info["cmdline"] or ())
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]


# On a busy machine Spark alone takes minutes.
@pytest.mark.timeout(900)
def test_orders_are_worked_off_rolled_up_archived_and_reported(
    spark: SparkSession, tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    status = demo(folder, 12).wait(10 * PATIENCE_SECONDS)
    output = (tmp_path / "output.txt").read_text()
    assert status == 0, output
    assert "a worker was killed" in output
    published = int(output.split(" orders were published")[0].split()[-1].replace(",", ""))
    assert published > 100
    kinds = re.search(r"published: (\d+) urgent, (\d+) with a delay, (\d+) broken\.", output)
    assert kinds is not None, output
    assert all(int(count) > 0 for count in kinds.groups()), output
    assert f"Spark archived {published:,} of {published:,} orders." in output
    archived = spark.read.parquet(str(folder / "lake/topic=*/date=*"))
    assert archived.select("partition", "offset").distinct().count() == published
    report = (folder / "report" / "report.md").read_text()
    assert "the bank of &lt;text&gt; did not answer within &lt;n&gt; ms" in report
    assert (folder / "report" / "over-time.png").exists()
    # Windows that were not over when the last order came stay open.
    counted = spark.read.parquet(str(folder / "totals")).agg({"records": "sum"}).collect()[0][0]
    assert 0 < (counted or 0) <= published
    assert running(folder) == []


def test_ctrl_c_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    process = demo(folder, 120)
    output = tmp_path / "output.txt"
    # The broker, Spark and the workers are there.
    wait_until(lambda: "workers lease orders" in output.read_text(), "the demo to begin")
    wait_until(lambda: len(running(folder)) >= 3, "what it starts")
    process.send_signal(signal.SIGINT)
    assert process.wait(2 * PATIENCE_SECONDS) == 130
    assert "nothing is left running" in output.read_text()
    assert running(folder) == []
