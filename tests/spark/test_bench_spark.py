"""`mill bench spark` has a line for every goal, runs, and its data sources do what they should."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from bench import spark as workload
from bench import spark_connector
from bench.spark_sources import ROW, ArrowFiles, arrivals, slices, write_arrow_files

from broker_process import MILL, plain_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def smoke(tmp_path: Path, only: str, **environment: str) -> list[dict[str, Any]]:
    program = [*MILL, "bench", "spark", "--smoke", "--json", "--only", only, "--dir", str(tmp_path)]
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env=plain_environment(environment)
    )
    assert done.returncode == 0, done.stderr
    lines: list[dict[str, Any]] = json.loads(done.stdout)["lines"]
    return lines


def test_every_goal_of_spark_is_measured() -> None:
    names = [name for measurement in workload.MEASUREMENTS for name in measurement.names]
    assert names == [
        "read.files",
        "read.wire",
        "read.parquet",
        "read.ready",
        "count.files",
        "count.wire",
        "connector.files",
        "connector.wire",
        "stream.files",
        "stream.wire",
        "sink.stream",
        "sink.batch",
        "idle.broker-cpu",
        "latency.p50",
        "latency.p95",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("only", "goals"),
    [
        (
            "read",
            {
                "read.files": 2_500_000,
                "read.wire": 1_500_000,
                "read.parquet": 1,
                "read.ready": None,
            },
        ),
        ("stream", {"stream.files": 0.8, "stream.wire": None}),
        ("sink", {"sink.stream": 600_000, "sink.batch": 1_000_000}),
        ("idle", {"idle.broker-cpu": 1}),
        ("latency", {"latency.p50": 300, "latency.p95": None}),
    ],
)
def test_lines_are_measured(tmp_path: Path, only: str, goals: dict[str, float | None]) -> None:
    lines = smoke(tmp_path, only)
    assert {line["name"]: line["goal"] for line in lines} == goals
    # Noise may be more than what an idle query costs.
    assert all(line["value"] > 0 or only == "idle" for line in lines)


@pytest.mark.slow
def test_a_connector_that_is_missing_is_said(tmp_path: Path) -> None:
    lines = smoke(tmp_path, "connector", HOME=str(tmp_path))
    assert [line["name"] for line in lines] == ["connector.files", "connector.wire"]
    assert all(line["value"] > 0 and line["ratio"] is None for line in lines)
    assert all("make spark-kafka-jars" in line["note"] for line in lines)


def test_a_connector_counts_only_with_all_of_its_jars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark_connector, "home", lambda version: tmp_path / version)
    assert spark_connector.connector() is None
    libs = tmp_path / spark_connector.versions()[-1] / "libs"
    libs.mkdir(parents=True)
    for name in spark_connector.ARTIFACTS:
        assert spark_connector.connector() is None
        (libs / f"{name}-1.jar").touch()
    found = spark_connector.connector()
    assert found is not None
    assert len(found.jars) == len(spark_connector.ARTIFACTS)


def test_arrow_files_have_every_row_once_in_steps(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "arrow"
    folder.mkdir()
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 7)
    try:
        made_rows = [
            (b"k", b"v", "t", 0, number, datetime(2026, 11, 1, tzinfo=UTC), 0)
            for number in range(100)
        ]
        rows = spark.createDataFrame(made_rows, ROW).repartition(2)
        made = rows.mapInArrow(lambda some: write_arrow_files(some, str(folder)), "rows long")
        assert sorted(row["rows"] for row in made.collect()) == [50, 50]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    spark.dataSource.register(ArrowFiles)
    read = spark.read.format("bench_arrow").options(folder=str(folder)).load()
    assert read.schema == spark.createDataFrame([], ROW).schema
    assert sorted(row["offset"] for row in read.collect()) == list(range(100))
    pieces = [piece for step in range(3) for piece in slices(str(folder), step, step + 1, 3)]
    assert sum(piece.end - piece.first for piece in pieces) == 2 * 8
    assert all(piece.end > piece.first for piece in pieces)


def test_arrivals_are_told_in_the_order_of_their_sending(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("20 25\n")
    (tmp_path / "a.txt").write_text("30 31\n10 19\n")
    assert arrivals(tmp_path) == [(10, 19), (20, 25), (30, 31)]
