"""The pipelines that report, and `rollup`, run against a broker: what users get to see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from broker_process import BrokerProcess
from listeners.letters import bury
from listeners.v1_client import V1
from millstream.client import Client
from millstream.client.dead_letters import RedriveFacts
from millstream.errors import PipelineFailed, SettingInvalid
from millstream.spark.pipelines import deadletters, lag, rollup
from millstream.spark.pipelines.running import RunSettings, run_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.spark.pipelines.state import Status

# 2026-01-01, so that windows are where a reader can see them.
BEGIN_MS = 1_767_225_600_000


@pytest.fixture(scope="module")
def v1(broker: BrokerProcess) -> Iterator[V1]:
    client = V1(broker)
    yield client
    client.close()


class Runs:
    """Runs of pipelines against a broker, with their state in one folder."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, folder: Path) -> None:
        self.spark = spark
        self.server = broker.url("")
        self.folder = folder

    def deadletters(self, **given: str) -> Status:
        settings = RunSettings(server=self.server, folder=self.folder)
        return run_pipeline(deadletters.PIPELINE, given, settings, session=self.spark)

    def lag(self, **given: str) -> Status:
        settings = RunSettings(server=self.server, folder=self.folder)
        return run_pipeline(lag.PIPELINE, given, settings, session=self.spark)

    def rollup(self, **given: str) -> Status:
        settings = RunSettings(server=self.server, folder=self.folder)
        return run_pipeline(rollup.PIPELINE, given, settings, session=self.spark)


@pytest.fixture
def runs(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Runs:
    return Runs(spark, broker, tmp_path)


def kind_on(page: Path, shape: str) -> str:
    """The name of the kind with that shape, as a reader finds it in the report."""
    row = next(line for line in page.read_text().splitlines() if f"| {shape} |" in line)
    return row.split("|")[1].strip()


def test_dead_letters_become_a_report(v1: V1, runs: Runs) -> None:
    topic = v1.topic(partitions=2)
    bury(v1, topic, "a", "b", error="no account 17", key=b"ada", when_ms=BEGIN_MS)
    bury(v1, topic, "c", error="no account 4", partition=1, when_ms=BEGIN_MS + 60_000)
    bury(v1, topic, "d", error="<b>bored</b>", reason="rejected", when_ms=BEGIN_MS)
    done = runs.deadletters(topics=topic)
    page = runs.folder / "deadletters" / "report" / "report.md"
    assert done.results == [f"4 dead letters of 2 kinds; the report is {page}"]
    assert done.records == 4
    text = page.read_text()
    assert "4 records were given up between 1970-01-01 00:00:01Z and 2026-01-01 00:01:00Z" in text
    assert "| no account &lt;n&gt; | 2026-01-01 00:01:00Z |" in text
    assert "| 0/1 | ada | no account 17 | b |" in text
    assert "after at most 4 deliveries" in text
    assert "<b>" not in text
    assert (page.parent / "over-time.png").exists()
    assert (page.parent / "kinds.png").exists()


def test_a_topic_without_dead_letters_is_a_report_too(v1: V1, runs: Runs) -> None:
    done = runs.deadletters(topics=v1.topic())
    assert done.records == 0
    assert "There are none." in (runs.folder / "deadletters/report/report.md").read_text()


def test_one_kind_is_put_back_and_gone_from_the_next_report(v1: V1, runs: Runs) -> None:
    topic = v1.topic()
    bury(v1, topic, "a", error="no account 17 in Lima")
    bury(v1, topic, "b", error="bored")
    bury(v1, topic, "c", error="no account 4 in Lima")
    folder = runs.folder / "mended"
    page = folder / "report.md"
    runs.deadletters(topics=topic, report=str(folder))
    kind = kind_on(page, "no account &lt;n&gt; in Lima")
    done = runs.deadletters(topics=topic, report=str(folder), redrive=kind)
    assert "done: put 2 back" in done.results[-1]
    with Client(runs.server) as client:
        assert sorted(record.text for record in client.read(topic)) == ["a", "c"]
    # They lie in the log until what is before them is gone, and are in no report any more.
    assert runs.deadletters(topics=topic, report=str(folder)).records == 1
    assert "Lima" not in page.read_text()


def test_others_are_only_put_back_when_that_is_said(v1: V1, runs: Runs) -> None:
    topic = v1.topic()
    bury(v1, topic, "a", error="4 5")
    bury(v1, topic, "b", error="4 x")
    page = runs.folder / "deadletters/report/report.md"
    runs.deadletters(topics=topic)
    kind = kind_on(page, "&lt;n&gt; &lt;n&gt;")
    with pytest.raises(SettingInvalid, match="would put 1 letters of other kinds back too"):
        runs.deadletters(topics=topic, redrive=kind)
    with pytest.raises(SettingInvalid, match="names no kind of dead letters"):
        runs.deadletters(topics=topic, redrive="feedbeef")
    done = runs.deadletters(topics=topic, redrive=kind, others="true", to=v1.topic(), rate="1000")
    assert "done: put 2 back" in done.results[-1]


def test_a_redrive_that_puts_nothing_back_fails_and_says_why(v1: V1, runs: Runs) -> None:
    topic = v1.topic()
    bury(v1, topic, "a", error="bored")
    runs.deadletters(topics=topic)
    kind = kind_on(runs.folder / "deadletters/report/report.md", "bored")
    with pytest.raises(
        PipelineFailed,
        match=r"done: nothing was put back, left 1: their topic is compacted; --to names another",
    ):
        runs.deadletters(topics=topic, redrive=kind, to=v1.topic(compact=True))
    assert runs.deadletters(topics=topic).records == 1


def test_letters_that_somebody_else_put_back_are_said_to_be_gone() -> None:
    done = RedriveFacts(
        id="4711", topic="t", state="done", total=0, seen=0, matched=0, moved=0, skipped={},
        started_ms=0,
    )  # fmt: skip
    assert deadletters.told(done) == (
        "redrive 4711 done: nothing was put back, none of these letters is there any more"
    )
    failed = msgspec.structs.replace(done, state="failed", moved=2, error="the disk is full")
    assert deadletters.told(failed) == "redrive 4711 failed: put 2 back, the disk is full"


def test_lag_becomes_a_report_that_grows(v1: V1, runs: Runs) -> None:
    topic = v1.topic(partitions=2)
    with Client(runs.server) as client:
        for number in range(20):
            client.publish(topic, number, key="ada" if number % 2 else None)
        group = f"group-of-{topic}"
        first, second = client.receive(topic, group=group, count=2, start="earliest")
        first.ack()
        second.nack()
        done = runs.lag(groups=group, watch="0s")
        page = runs.folder / "lag" / "report" / "report.md"
        assert done.results[0].startswith("1 groups are ")
        text = page.read_text()
        assert f"| {group} | " in text
        assert "| ada | 10 | 50.0% |" in text
        client.ack(client.receive(topic, group=group, count=20))
    runs.lag(groups=group, watch="100ms", interval="50ms")
    text = page.read_text()
    redelivered = text[text.index("## Redeliveries") :]
    assert f"| {group} | " in redelivered
    pictures = {path.name for path in page.parent.glob("*.png")}
    assert pictures == {
        "lag-records.png", "lag-seconds.png", "done.png", "arrived.png", "redelivered.png",
    }  # fmt: skip
    row = next(line for line in text.splitlines() if line.startswith(f"| {group} | "))
    assert "caught up" not in row
    assert float(row.split("|")[4].replace(",", "")) > 0, "what was done between the two runs"


def test_a_group_that_nobody_knows_is_a_report_of_none(runs: Runs) -> None:
    runs.lag(groups="nobody", watch="0s")
    assert "No group was seen" in (runs.folder / "lag/report/report.md").read_text()


def test_windows_go_to_a_topic_and_to_files(v1: V1, runs: Runs) -> None:
    topic, totals, lake = v1.topic(), v1.topic(), runs.folder / "lake"
    with Client(runs.server) as client:

        def publish(second: int, key: str, total: float) -> None:
            value = {"total": total}
            client.publish(topic, value, key=key, timestamp_ms=BEGIN_MS + 1000 * second)

        publish(0, "ada", 1)
        publish(1, "bob", 2)
        publish(59, "ada", 3)
        publish(130, "ada", 50)
        given = {
            "topics": topic, "to": f"topic:{totals},parquet:{lake}", "by": "key", "sum": "total",
            "watermark": "5s",
        }  # fmt: skip
        assert runs.rollup(**given).records == 4, "each counts once, however many targets"
        assert runs.rollup(**given).records == 0
        records = {record.key: json.loads(record.text) for record in client.read(totals)}
    assert {key: window["sum_total"] for key, window in records.items()} == {
        b"ada": 4.0,
        b"bob": 2.0,
    }
    assert records[b"ada"]["start"] == "2026-01-01T00:00:00.000Z"
    rows = runs.spark.read.parquet(str(lake)).collect()
    assert sorted((row["key"], row["records"], row["sum_total"]) for row in rows) == [
        ("ada", 2, 4.0),
        ("bob", 1, 2.0),
    ]
