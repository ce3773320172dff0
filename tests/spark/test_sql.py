"""The pipeline `sql`, against a broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from broker_process import BrokerProcess
from millstream.errors import MillstreamError, PipelineFailed, SettingInvalid
from millstream.spark.pipelines.running import RunSettings, run_pipeline
from millstream.spark.pipelines.sql import PIPELINE
from millstream.spark.pipelines.state import RunFolder, Status
from spark.records import publish, read_all, values

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ORDERS = [
    {"key": who, "value": {"who": who, "total": total, "at": f"2026-11-18T10:0{minute}:00Z"}}
    for minute, (who, total) in enumerate([("ada", 1.5), ("bob", 2.0), ("ada", 3.0)])
]


class Runner:
    """Runs the pipeline with one session, one broker and one folder."""

    def __init__(self, spark: SparkSession, broker: BrokerProcess, folder: Path) -> None:
        self.spark, self.broker, self.folder = spark, broker, folder

    def __call__(self, name: str = "sql", **options: str) -> Status:
        settings = RunSettings(server=self.broker.url(""), folder=self.folder, name=name)
        return run_pipeline(PIPELINE, options, settings, session=self.spark)


@pytest.fixture
def run(spark: SparkSession, broker: BrokerProcess, tmp_path: Path) -> Runner:
    return Runner(spark, broker, tmp_path)


def test_a_query_is_shown(run: Runner, capsys: pytest.CaptureFixture[str]) -> None:
    publish(run.broker, "sql-shown", ORDERS)
    publish(run.broker, "sql-users", [{"key": "ada", "value": "plain"}])
    query = """
        CREATE OR REPLACE TEMPORARY VIEW totals AS
        SELECT who, sum(total) AS total FROM `sql-shown` GROUP BY who;
        SELECT t.who, t.total, u._value FROM totals t
        LEFT JOIN `sql-users` u ON u._key = t.who ORDER BY who
    """
    assert run(sql=query).state == "finished"
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in line.strip("│").split("│")] for line in lines] == [
        ["ada", "4.5", "plain"],
        ["bob", "2.0", "–"],
    ]


def test_a_result_goes_to_a_topic_and_goes_on(run: Runner) -> None:
    publish(run.broker, "sql-in", ORDERS)
    wanted = {"sql": "SELECT upper(who) w, total FROM `sql-in` WHERE total > 1.7", "key": "w"}
    first = run(**wanted, to="topic:sql-out")
    assert first.records == 3
    publish(run.broker, "sql-in", ORDERS[:2])
    second = run(**wanted, to="topic:sql-out")
    assert (second.records, second.records_ever) == (2, 5)
    out = read_all(run.broker, "sql-out")
    bob, ada = {"w": "BOB", "total": 2.0}, {"w": "ADA", "total": 3.0}
    assert values(out) == [ada, bob, bob]
    assert {one.key for one in out} == {b"BOB", b"ADA"}


def test_totals_are_updated_in_a_topic_and_final_in_files(run: Runner, tmp_path: Path) -> None:
    publish(run.broker, "sql-sums", ORDERS)
    done = run(
        "sums",
        sql="SELECT who, sum(total) total FROM `sql-sums` GROUP BY who",
        to="topic:sql-totals",
        key="who",
    )
    assert "--mode update" in done.results[0]
    totals = {one["who"]: one["total"] for one in values(read_all(run.broker, "sql-totals"))}
    assert totals == {"ada": 4.5, "bob": 2.0}
    windows = {
        "sql": "SELECT window.start AS start, count(*) n FROM `sql-sums` "
        "GROUP BY window(at, '1 minute')",
        "to": f"parquet:{tmp_path}/windows",
    }
    with pytest.raises(PipelineFailed, match="add --watermark"):
        run("windows-0", **windows)
    run("windows", **windows, watermark="sql-sums.at: 30 seconds")
    rows = run.spark.read.parquet(f"{tmp_path}/windows").collect()
    # The windows after it may still get rows.
    assert [(row.start.minute, row.n) for row in rows] == [(0, 1)]


def test_a_query_that_is_refused_changes_nothing_for_the_one_before(
    run: Runner, tmp_path: Path
) -> None:
    publish(run.broker, "sql-kept", ORDERS)
    wanted = {"sql": "SELECT who FROM `sql-kept`", "to": f"parquet:{tmp_path}/kept"}
    done = run(**wanted)
    columns = (tmp_path / "sql" / "columns.json").read_bytes()
    for wrong in ("SELECT other FROM `sql-kept`", "SELECT * FROM `sql-kept`, nowhere"):
        with pytest.raises(SettingInvalid):
            run(**(wanted | {"sql": wrong, "schema": "sql-kept: name STRING"}))
    assert (tmp_path / "sql" / "columns.json").read_bytes() == columns
    assert RunFolder(tmp_path, "sql").read() == done


def test_a_field_that_a_topics_own_column_is_called_like_hides_nothing(
    run: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(run.broker, "sql-own", [{"key": "ada", "value": {"_key": "other", "n": 1}}])
    run(sql="SELECT _key, n FROM `sql-own`")
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in line.strip("│").split("│")] == ["ada", "1"]


def test_of_topics_that_differ_by_case_the_one_that_is_written_is_read(
    run: Runner, capsys: pytest.CaptureFixture[str]
) -> None:
    for topic in ("sql_case", "SQL_Case"):
        publish(run.broker, topic, [{"value": {"where": topic}}])
    for topic in ("sql_case", "SQL_Case"):
        run(sql=f"SELECT where FROM {topic}")
        assert topic in capsys.readouterr().out
    error = refused(run, sql="SELECT * FROM sql_CASE")
    assert error.message.startswith("the topics SQL_Case and sql_case differ by case alone")


def test_a_number_that_is_text_in_some_records_is_told_of_its_schema(run: Runner) -> None:
    publish(run.broker, "sql-mixed", [{"value": {"n": 1}}, {"value": {"n": "many"}}])
    query = {"sql": "SELECT sum(n) AS n FROM `sql-mixed`"}
    error = refused(run, **query)
    assert error.message.startswith("[CAST_INVALID_INPUT] The value 'many'")
    assert "--schema says of which type it is" in error.message
    assert run(**query, schema="sql-mixed: n INT").state == "finished"


def refused(run: Runner, **options: str) -> MillstreamError:
    with pytest.raises(MillstreamError) as caught:
        run("refused", **options)
    return caught.value


def test_what_is_wrong_with_a_query_is_said(run: Runner, tmp_path: Path) -> None:
    publish(run.broker, "sql-wrong", ORDERS)
    assert "and not both" in refused(run).message
    assert "cannot be read" in refused(run, query=f"{tmp_path}/gone.sql").message
    assert "no statement" in refused(run, sql=" ; ").message
    missing = refused(run, sql="SELECT * FROM no.where")
    assert isinstance(missing, SettingInvalid)
    assert missing.message.startswith(
        "the query names the table no.where, and there is no such topic: each topic is a table of "
        "its name, between backticks where that has a dash or a dot; there are: "
    )
    spelled = refused(run, sql="SELEC * FROM `sql-wrong`")
    assert isinstance(spelled, SettingInvalid)
    assert "SELEC" in spelled.message
    column = refused(run, sql="SELECT totl FROM `sql-wrong`").message
    assert "`totl` cannot be resolved" in column
    assert "\n" not in column
    where = {"sql": "SELECT * FROM `sql-wrong`"}
    assert "--to is 'kafka:x'" in refused(run, **where, to="kafka:x").message
    assert "--mode is 'all'" in refused(run, **where, mode="all").message
    assert "not NAME: TEXT" in refused(run, **where, schema="x").message
    assert "no such topic" in refused(run, **where, schema="other: a INT").message
    assert "TOPIC.COLUMN" in refused(run, **where, watermark="at: 1 day").message
    marked = refused(run, **where, to="topic:x", watermark="sql-wrong.when: 1 day")
    assert "'when'" in marked.message
    marked = refused(run, **where, to="topic:x", watermark="sql-wrong.at: soon")
    assert "--watermark has 'soon', which is no time" in marked.message
    assert (
        "--schema has 'a INTT' for sql-wrong"
        in refused(run, **where, schema="sql-wrong: a INTT").message
    )
    for more in ({}, {"batch": "true"}):
        keyed = refused(run, **where, **more, to="topic:x", key="whom")
        assert keyed.message.startswith("--key is 'whom', and the result has no such column; it")
