"""What every pipeline has: options, state, a lock, and ways to be found."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from pyspark.errors import PySparkException

from cli_transcripts import mill
from millstream.clock import ManualClock
from millstream.errors import (
    BrokerUnreachable,
    PipelineFailed,
    PipelineInvalid,
    PipelineRunning,
    PipelineUnknown,
    SettingInvalid,
)
from millstream.spark.pipelines import Context, Option, Pipeline, running
from millstream.spark.pipelines.context import Watched, left_between, plain_reason
from millstream.spark.pipelines.options import Options
from millstream.spark.pipelines.places import query_id
from millstream.spark.pipelines.progress import LINE_S, LineProgress
from millstream.spark.pipelines.registry import BUILT_IN, find
from millstream.spark.pipelines.running import RunSettings, run_pipeline, say_errors_once
from millstream.spark.pipelines.state import RunFolder, Status, all_runs
from millstream.spark.pipelines.targets import Target, as_records, show_rows, target_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OWN = '''
from millstream.spark.pipelines import Option, pipeline

@pipeline(source="orders", sink="totals")
def totals(orders):
    """How much each customer spent.

    And more."""
    return orders.groupBy("key").count()

def plain(orders):
    return orders

@pipeline(source="orders", sink="totals")
def nothing(orders):
    orders.count()

@pipeline(source="orders", options=[Option("above", "From [which] on.", default="7")])
def styled(orders):
    """What is [/left] of them."""
    return orders

@pipeline(source="orders", options=[Option("name", "Whose.")])
def named(orders):
    return orders
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


@pytest.fixture
def nobodys() -> SparkSession:
    """Of runs that ask nothing of Spark."""
    return cast("SparkSession", object())


def doing(run: Callable[[Context], None], *options: Option) -> Pipeline:
    return Pipeline(name="tried", help="", run=run, options=options)


# ---- errors


def test_an_error_of_a_query_is_raised_and_not_logged_too(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    say_errors_once()
    with pytest.raises(PySparkException, match="CAST_INVALID_INPUT"):
        spark.sql("SELECT cast(x AS INT) FROM VALUES ('no') AS t(x)").collect()
    assert "QueryContextLogger" not in capfd.readouterr().err


def test_workers_that_a_run_ends_print_no_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, str]] = []

    class Session:
        def stop(self) -> None:
            pass

    def start(*_: object, settings: dict[str, str], **__: object) -> Session:
        given.append(settings)
        return Session()

    monkeypatch.setattr(running, "spark_session", start)
    own = {"spark.python.unix.domain.socket.enabled": "true", "x": "y"}
    for settings in ({}, own):
        run = RunSettings(folder=tmp_path, spark_settings=settings)
        run_pipeline(doing(lambda _: None), {}, run)
    assert given == [{"spark.python.unix.domain.socket.enabled": "false"}, own]


def test_a_batch_after_an_idle_time_is_counted() -> None:
    def told(batch: int, second: int, rows: int) -> dict[str, object]:
        end = {"t": {"0": second}}
        source = {"numInputRows": rows, "endOffset": end, "latestOffset": end}
        return {
            "batchId": batch,
            "timestamp": f"2026-11-19T10:00:{second:02}Z",
            "sources": [source],
        }

    progress = [told(0, 1, 5)]
    watched = Watched(cast("StreamingQuery", SimpleNamespace(recentProgress=progress)), True)
    assert watched.take() == 5
    # Spark tells that nothing came, under the number of the batch that comes next.
    progress.append(told(1, 11, 0))
    assert watched.take() == 0
    progress.append(told(1, 13, 7))
    assert (watched.take(), watched.take()) == (7, 0)
    assert (watched.batch, watched.batches) == (1, 2)


# ---- finding


def test_a_decorated_function_is_a_pipeline_and_still_a_function(
    spark: SparkSession, own: str
) -> None:
    found = find(f"{own}:totals")
    assert (found.name, found.help) == ("totals", "How much each customer spent.")
    frame = spark.createDataFrame([("a",), ("a",)], "key string")
    assert found(frame).collect() == [("a", 2)]


def test_what_cannot_be_found_says_what_there_is(own: str, tmp_path: Path) -> None:
    with pytest.raises(PipelineUnknown, match="there are sql, archive"):
        find("nothing")
    with pytest.raises(PipelineUnknown, match=r"has no total; it has totals"):
        find(f"{own}:total")
    with pytest.raises(PipelineInvalid, match="@pipeline"):
        find(f"{own}:plain")
    with pytest.raises(PipelineUnknown, match="there is no file"):
        find(f"{tmp_path}/gone.py:x")
    with pytest.raises(PipelineUnknown, match="there is no module"):
        find("no_such_module:x")


def test_each_that_comes_with_millstream_can_be_loaded() -> None:
    for name in BUILT_IN:
        found = find(name)
        assert (found.name, bool(found.help)) == (name, True)


# ---- options


KNOWN = (
    Option("topics", "Which topics.", is_required=True),
    Option("window", "How long.", default="5m"),
    Option("count", "How many."),
    Option("dry", "Only look.", is_switch=True),
)


def test_options_have_defaults_and_meanings() -> None:
    options = Options(KNOWN, {"topics": "a, b,", "count": "7", "dry": "true"})
    assert options.names("topics") == ["a", "b"]
    assert options.duration_ms("window") == 300_000
    assert options.number("count", minimum=7) == 7
    assert options.is_on("dry")
    assert dict(options) == {"topics": "a, b,", "window": "5m", "count": "7", "dry": "true"}
    assert "count" not in Options(KNOWN, {"topics": "a"})


@pytest.mark.parametrize(
    ("given", "use", "said"),
    [
        ({}, None, "--topics is needed: Which topics."),
        ({"topics": "a", "speed": "1"}, None, "--speed does not exist here; there are topics"),
        ({"topics": "a"}, lambda o: o["count"], "--count is needed: How many."),
        ({"topics": "a", "count": "x"}, lambda o: o.number("count"), "takes a whole number"),
        ({"topics": "a", "count": "--5"}, lambda o: o.number("count"), "takes a whole number"),
        ({"topics": "a", "count": "1"}, lambda o: o.number("count", minimum=2), "from 2 on"),
        ({"topics": "a", "window": "5"}, lambda o: o.duration_ms("window"), "has no unit"),
        ({"topics": "a", "dry": "maybe"}, lambda o: o.is_on("dry"), "takes true or false"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(
    given: dict[str, str | None], use: Callable[[Options], object] | None, said: str
) -> None:
    def read() -> None:
        options = Options(KNOWN, given)
        if use is not None:
            use(options)

    with pytest.raises(SettingInvalid) as caught:
        read()
    assert said in caught.value.message


# ---- runs


def test_a_run_leaves_its_state(spark: SparkSession, tmp_path: Path) -> None:
    def run(context: Context) -> None:
        context.say("a report lies there")
        assert context.directory == tmp_path / "mine"

    settings = RunSettings(name="mine", folder=tmp_path, server="http://127.0.0.1:1")
    done = run_pipeline(doing(run), {}, settings, session=spark, clock=ManualClock())
    assert (done.state, done.results) == ("finished", ["a report lies there"])
    [folder] = all_runs(tmp_path)
    assert folder.read() == done
    assert not folder.is_locked()


def test_a_pause_between_micro_batches_that_is_no_time_is_refused(
    spark: SparkSession, tmp_path: Path
) -> None:
    def run(context: Context) -> None:
        rows = context.spark.readStream.format("rate").load()
        context.start(rows.writeStream.format("noop"))

    settings = RunSettings(folder=tmp_path, is_continuous=True, every="soon")
    with pytest.raises(SettingInvalid, match=r"--every is 'soon', .* such as 10s"):
        run_pipeline(doing(run), {}, settings, session=spark)
    assert RunFolder(tmp_path, "tried").read() is None


def test_a_name_belongs_to_one_pipeline(spark: SparkSession, tmp_path: Path) -> None:
    settings = RunSettings(name="mine", folder=tmp_path)
    run_pipeline(doing(lambda _: None), {}, settings, session=spark)
    other = Pipeline(name="other", help="", run=lambda _: None)
    with pytest.raises(SettingInvalid, match="belongs to the pipeline tried"):
        run_pipeline(other, {}, settings, session=spark)


def test_two_runs_of_a_name_do_not_meet(spark: SparkSession, tmp_path: Path) -> None:
    settings = RunSettings(name="mine", folder=tmp_path)

    def run(_: Context) -> None:
        run_pipeline(doing(run), {}, settings, session=spark)

    with pytest.raises(PipelineRunning, match="another --name"):
        run_pipeline(doing(run), {}, settings, session=spark)


def test_a_run_that_is_refused_leaves_what_the_one_before_left(
    nobodys: SparkSession, tmp_path: Path
) -> None:
    def run(context: Context) -> None:
        if "to" not in context.options:
            context.advance(5)
            return
        context.say("this is said, and not kept")
        context.options.refuse("to", "is nowhere")

    settings = RunSettings(folder=tmp_path)
    pipeline = doing(run, Option("to", "Where to."))
    done = run_pipeline(pipeline, {}, settings, session=nobodys, clock=ManualClock())
    assert (done.state, done.records) == ("finished", 5)
    with pytest.raises(SettingInvalid, match="--to is nowhere"):
        run_pipeline(pipeline, {"to": "x"}, settings, session=nobodys)
    assert RunFolder(tmp_path, "tried").read() == done
    # Without one before, there was none.
    with pytest.raises(SettingInvalid):
        run_pipeline(
            pipeline, {"to": "x"}, RunSettings(folder=tmp_path, name="first"), session=nobodys
        )
    assert RunFolder(tmp_path, "first").read() is None


def test_a_run_that_fails_under_way_or_finds_no_broker_is_in_the_state(
    nobodys: SparkSession, tmp_path: Path
) -> None:
    def refused_late(context: Context) -> None:
        context.advance(5)
        context.options.refuse("to", "was somewhere")

    def alone(_: Context) -> None:
        raise BrokerUnreachable("no broker answers", server="http://127.0.0.1:1")

    settings = RunSettings(folder=tmp_path)
    for run, error in ((refused_late, SettingInvalid), (alone, BrokerUnreachable)):
        with pytest.raises(error):
            run_pipeline(doing(run, Option("to", "")), {}, settings, session=nobodys)
        found = RunFolder(tmp_path, "tried").read()
        assert found is not None
        assert (found.state, (found.error or "").partition(":")[0]) == ("failed", error.code)


def test_who_is_refused_because_another_run_goes_on_changes_nothing_of_it(
    nobodys: SparkSession, tmp_path: Path
) -> None:
    settings = RunSettings(folder=tmp_path)
    folder = RunFolder(tmp_path, "tried")

    def run(context: Context) -> None:
        context.advance(5)
        with pytest.raises(PipelineRunning):
            run_pipeline(doing(lambda _: None), {}, settings, session=nobodys)
        assert (found := folder.read()) is not None
        assert (found.state, found.records) == ("running", 5)

    run_pipeline(doing(run), {}, settings, session=nobodys)


def test_two_names_do_not_share_a_checkpoint_at_a_time(
    nobodys: SparkSession, tmp_path: Path
) -> None:
    checkpoint = str(tmp_path / "shared")
    one = RunSettings(folder=tmp_path, name="one", checkpoint=checkpoint)
    other = RunSettings(folder=tmp_path, name="other", checkpoint=checkpoint)
    done = run_pipeline(doing(lambda _: None), {}, other, session=nobodys)

    def run(_: Context) -> None:
        with pytest.raises(PipelineRunning, match="another run has the checkpoint"):
            run_pipeline(doing(lambda _: None), {}, other, session=nobodys)

    run_pipeline(doing(run), {}, one, session=nobodys)
    assert RunFolder(tmp_path, "other").read() == done


def test_a_checkpoint_may_be_a_folder_as_spark_writes_it(
    nobodys: SparkSession, tmp_path: Path
) -> None:
    one = RunSettings(folder=tmp_path, name="one", checkpoint=str(tmp_path / "shared"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "metadata").write_text('{"id": "17"}', encoding="utf-8")

    def run(_: Context) -> None:
        for begin in ("file:", "file://"):
            checkpoint = f"{begin}{tmp_path}/shared"
            assert query_id(checkpoint) == "17"
            other = RunSettings(folder=tmp_path, name="other", checkpoint=checkpoint)
            with pytest.raises(PipelineRunning, match="another run has the checkpoint file:"):
                run_pipeline(doing(lambda _: None), {}, other, session=nobodys)

    run_pipeline(doing(run), {}, one, session=nobodys)


@pytest.mark.parametrize("flag", ["checkpoint", "dir"])
def test_a_folder_that_cannot_be_one_is_named_with_its_flag(
    nobodys: SparkSession, tmp_path: Path, flag: str
) -> None:
    path = tmp_path / "file"
    path.write_text("no folder", encoding="utf-8")
    settings = RunSettings(folder=path)
    if flag == "checkpoint":
        settings = RunSettings(folder=tmp_path, checkpoint=str(path))
    with pytest.raises(SettingInvalid, match=f"--{flag} is '{path}', and .* cannot be made or wr"):
        run_pipeline(doing(lambda _: None), {}, settings, session=nobodys)


@pytest.mark.parametrize("checkpoint", ["s3a://lake/checkpoint", "dbfs:/lake/checkpoint"])
def test_a_checkpoint_that_is_a_url_makes_no_folder_here(
    nobodys: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: str,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    settings = RunSettings(folder=tmp_path, checkpoint=checkpoint)
    run_pipeline(doing(lambda _: None), {}, settings, session=nobodys)
    assert list((tmp_path / "here").iterdir()) == []


def test_a_group_whose_name_no_broker_takes_is_refused_before_anything_starts(
    nobodys: SparkSession, tmp_path: Path
) -> None:
    settings = RunSettings(folder=tmp_path, group="my group")
    with pytest.raises(SettingInvalid, match=r"--group is 'my group', .* use 1 to 255 of letters"):
        run_pipeline(doing(lambda _: None), {}, settings, session=nobodys)
    assert not tmp_path.joinpath("tried").exists()


def test_what_goes_wrong_is_in_the_state(spark: SparkSession, tmp_path: Path) -> None:
    def run(context: Context) -> None:
        context.spark.sql("SELECT * FROM nowhere").collect()

    with pytest.raises(PipelineFailed, match="nowhere"):
        run_pipeline(doing(run), {}, RunSettings(folder=tmp_path), session=spark)
    state = RunFolder(tmp_path, "tried").read()
    assert state is not None
    assert state.state == "failed"
    assert "nowhere" in (state.error or "")


def test_a_run_that_was_killed_is_seen_as_dead(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "mine")
    with folder.locked():
        folder.write(Status("mine", "tried", state="running"))
        assert (found := folder.read()) is not None
        assert found.state == "running"
    assert (found := folder.read()) is not None
    assert found.state == "died"


def test_a_query_is_counted_and_goes_on_where_it_ended(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()

    def write(name: str, lines: int) -> None:
        rows = "".join(json.dumps({"n": n}) + "\n" for n in range(lines))
        (tmp_path / "in" / name).write_text(rows, encoding="utf-8")

    def run(context: Context) -> None:
        frame = context.spark.readStream.schema("n int").json(str(tmp_path / "in"))
        context.run(frame.writeStream.format("parquet").option("path", str(tmp_path / "out")))

    settings = RunSettings(folder=tmp_path / "runs")
    write("a.json", 3)
    first = run_pipeline(doing(run), {}, settings, session=spark)
    assert (first.records, first.records_ever, first.batches) == (3, 3, 1)
    write("b.json", 4)
    second = run_pipeline(doing(run), {}, settings, session=spark)
    assert (second.records, second.records_ever, second.batches) == (4, 7, 1)
    assert spark.read.parquet(str(tmp_path / "out")).count() == 7


def test_every_needs_a_run_that_goes_on(tmp_path: Path) -> None:
    settings = RunSettings(folder=tmp_path, every="5s")
    with pytest.raises(SettingInvalid, match="--continuous"):
        run_pipeline(doing(lambda _: None), {}, settings)


@pytest.mark.parametrize("name", ["", "a/b", "..", "-x", "a" * 101])
def test_names_of_runs_are_names_of_folders(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingInvalid, match="--name"):
        RunFolder(tmp_path, name)


# ---- what is shown


def test_lines_come_now_and_then() -> None:
    clock = ManualClock()
    stream = io.StringIO()
    progress = LineProgress("mine", stream, clock.monotonic)
    progress.show(1, 5)
    clock.advance(LINE_S)
    progress.show(1_000, 5)
    progress.show(1_001, 4)
    clock.advance(LINE_S)
    progress.show(1_000, 5)
    progress.show(2_000, None)
    progress.say("done")
    assert stream.getvalue().splitlines() == [
        "mine: 1,000 records, 5 to go",
        "mine: 2,000 records",
        "mine: done",
    ]


def test_what_is_left_is_between_the_positions() -> None:
    end = '{"a": {"0": 5, "1": 7}}'
    assert left_between(end, '{"a": {"0": 9, "1": 7}, "b": {"0": 3}}') == 4
    assert left_between(end, {"a": {"0": 2}}) == 0
    assert left_between("17", "19") == 0
    assert left_between(None, "no JSON") == 0


def test_reasons_are_sentences() -> None:
    ours = "Traceback…\n  File x\nmillstream.errors.TopicUnknown: there is no topic x\n\tat org.a\n"
    assert plain_reason(ours) == "there is no topic x"
    javas = (
        "An error occurred while calling o1.parquet.\n: java.io.IOException: disk full\n\tat a.b\n"
    )
    assert plain_reason(f"py4j.protocol.Py4JJavaError: {javas}") == "IOException: disk full"
    assert plain_reason(javas) == "IOException: disk full"
    sparks = "[TABLE_NOT_FOUND] The table `x` is not there; line 1\n\tat org.apache\n\tat org.b\n"
    assert plain_reason(sparks) == "[TABLE_NOT_FOUND] The table `x` is not there; line 1"


# ---- targets


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("topic:orders", Target("topic", "orders")),
        ("orders", Target("topic", "orders")),
        ("parquet:lake", Target("parquet", "lake")),
        ("lake/totals", Target("parquet", "lake/totals")),
        ("parquet:s3a://bucket/x", Target("parquet", "s3a://bucket/x")),
        ("terminal", Target("terminal")),
    ],
)
def test_targets_are_written_in_one_word(text: str, target: Target) -> None:
    assert target_of(text) == target


@pytest.mark.parametrize("text", ["", "topic:", "kafka:x", "parquet:"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="topic:NAME, parquet:DIR or terminal"):
        target_of(text)


def test_rows_become_records(spark: SparkSession) -> None:
    totals = spark.createDataFrame([("ada", 3)], "who string, n int")
    assert as_records(totals).collect() == [('{"who":"ada","n":3}',)]
    assert as_records(totals, "who").collect() == [("ada", '{"who":"ada","n":3}')]
    ready = spark.createDataFrame([("k", "v")], "key string, value string")
    assert as_records(ready).collect() == [("k", "v")]


def test_rows_are_shown_as_a_table(spark: SparkSession) -> None:
    shown = show_rows(spark.createDataFrame([("ada", None)], "who string, n int"))
    assert "who" in shown
    assert "ada" in shown
    assert "–" in shown
    assert "only the first 100" in show_rows(spark.range(101))


# ---- the command


def test_the_command_lists_and_tells(tmp_path: Path, own: str) -> None:
    code, out, _ = mill("pipeline", "list")
    assert (code, len(out.splitlines())) == (0, 1 + len(BUILT_IN))
    code, _, err = mill("pipeline", "status", "gone", "--dir", str(tmp_path))
    assert (code, err) == (
        2,
        f"mill: setting_invalid: nothing was run under the name gone in {tmp_path}\n",
    )
    code, out, _ = mill("pipeline", "run", f"{own}:totals", "--help")
    assert code == 0
    assert b"How much each customer spent." in out
    code, _, err = mill("pipeline", "run", f"{own}:totals", "--conf", "x")
    assert (code, "takes NAME=VALUE" in err) == (2, True)
    code, _, err = mill("pipeline", "run", "nothing")
    assert (code, err.startswith("mill: pipeline_unknown:")) == (1, True)


def test_help_shows_what_stands_in_brackets(own: str) -> None:
    code, out, _ = mill("pipeline", "run", f"{own}:styled", "--help")
    assert code == 0
    for text in ("What is [/left] of them.", "From [which] on. [default: 7]"):
        assert text in out.decode()
    code, out, _ = mill("pipeline", "run", "rollup", "--help")
    assert "The topics to read. [needed]" in out.decode()


def test_an_option_that_is_called_like_a_flag_of_all_pipelines_is_refused(own: str) -> None:
    code, _, err = mill("pipeline", "run", f"{own}:named", "--help")
    assert code == 1
    assert "the pipeline named has an option 'name', and there is a flag --name already" in err


def test_a_function_that_answers_no_frame_is_named(own: str) -> None:
    frame = SimpleNamespace(count=int)
    context = SimpleNamespace(
        options=Options((), {}), name="x", is_continuous=False, read=lambda *_, **__: frame
    )
    with pytest.raises(PipelineInvalid, match="nothing answers NoneType, and a pipeline answers a"):
        find(f"{own}:nothing").run(cast("Context", context))


def test_status_shows_every_run(tmp_path: Path) -> None:
    for name, state in (("a", "finished"), ("b", "failed")):
        folder = RunFolder(tmp_path, name)
        folder.path.mkdir()
        error = "pipeline_failed: it broke" if state == "failed" else None
        folder.write(Status(name, "tried", state=state, records=1_234, error=error))
    code, out, _ = mill("pipeline", "status", "--dir", str(tmp_path))
    assert code == 0
    header, first, second, reason = out.decode().splitlines()
    assert header.split()[:3] == ["name", "pipeline", "state"]
    assert first.split()[:3] == ["a", "tried", "finished"]
    assert "1,234" in second
    assert reason == "b: pipeline_failed: it broke"
    code, out, _ = mill("pipeline", "status", "a", "--dir", str(tmp_path), "--json")
    assert [(one["name"], one["lag"]) for one in json.loads(out)] == [("a", None)]
