"""The benchmarks run, and say what they should. How fast anything is, no test can say."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import WORKLOADS, delivery, kafka, schedules, topics
from bench.harness import (
    SMOKE,
    Bench,
    Goal,
    Line,
    Measurement,
    NotMeasured,
    Peer,
    Report,
    Unit,
    alternate,
    make_line,
    run_all,
)
from bench.kafka_load import Load, Outcome
from bench.log import MEASUREMENTS
from bench.machine import look

import millstream
from broker_process import MILL, plain_environment

RATE = Unit("things/s")
TIME = Unit("s", is_higher_better=False)
FIELDS = {
    "name",
    "mode",
    "value",
    "unit",
    "peer",
    "peer_value",
    "ratio",
    "goal",
    "goal_of",
    "met",
    "runs",
    "taken",
    "values",
    "peer_values",
    "note",
}


def mill(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MILL, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env=plain_environment({"NO_COLOR": "1", **environment}),
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Any:
    scratch = tmp_path_factory.mktemp("bench")
    done = mill("bench", "log", "--smoke", "--json", "--dir", str(scratch))
    assert done.returncode == 0, done.stderr
    assert list(scratch.iterdir()) == [], "the scratch folder is left as it was"
    return json.loads(done.stdout)


def test_one_object_tells_of_the_machine(report: Any) -> None:
    assert (report["bench"], report["scale"]) == ("log", "smoke")
    machine = report["machine"]
    assert machine["cores"] >= 1
    assert machine["memory_bytes"] > 0
    assert machine["fdatasync_p50_ms"] > 0


def test_every_line_is_there_and_has_every_field(report: Any) -> None:
    names = [name for measurement in MEASUREMENTS for name in measurement.names]
    assert sorted(line["name"] for line in report["lines"]) == sorted(names)
    assert all(set(line) == FIELDS for line in report["lines"])


def test_a_line_has_a_value_or_says_why_not(report: Any) -> None:
    for line in report["lines"]:
        assert line["mode"] or line["value"] is None
        if line["value"] is None:
            assert line["note"], line
        else:
            assert line["runs"] == len(line["values"]) >= 1, line
        if line["ratio"] is not None:
            assert line["ratio"] == pytest.approx(line["value"] / line["peer_value"], rel=0.01)


def test_every_goal_is_told_with_what_it_bounds(report: Any) -> None:
    goals = {
        line["name"]: (line["goal_of"], line["goal"])
        for line in report["lines"]
        if line["value"] is not None
    }
    expected = {
        "append.64k": ("ratio at least", 0.7),
        "append.beside-compaction": ("ratio at most", 3),
        "codec.arrow-crc": ("ratio at least", 3),
        "codec.decode": ("ratio at least", 1),
        "codec.decode-crc": (None, None),
        "codec.encode": ("ratio at least", 1),
        "every.1-partition": ("ratio at least", 20),
        "every.64-partitions": ("ratio at least", 0.8),
        "open.memory": ("value at most", 1),
        "open.time": ("value at most", 1),
        "read.engine": ("ratio at least", 0.8),
        "read.first-pass": (None, None),
        "read.partition": ("ratio at least", 0.8),
    }
    assert goals == {name: expected[name] for name in goals}


def test_for_people_there_is_a_table(tmp_path: Path) -> None:
    done = mill("bench", "log", "--smoke", "--only", "append.64k", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("append.64k")]
    assert len(rows) == 1
    assert "≥ 0.7" in rows[0]
    assert "every.1-partition" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bench", "lgo"], "there is no benchmark lgo; there is: log"),
        (["bench", "log", "--only", "nothing"], "no line starts with nothing"),
    ],
)
def test_a_wrong_name_is_a_usage_error_that_lists_the_right_ones(
    arguments: list[str], says: str
) -> None:
    done = mill(*arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_an_installed_package_says_where_the_benchmarks_are(tmp_path: Path) -> None:
    package = Path(millstream.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__", "*.c", "*.so", "*.pyx")
    shutil.copytree(package, tmp_path / "site" / "millstream", ignore=ignored)
    done = subprocess.run(
        [sys.executable, "-c", "from millstream.cli.main import main; main(['bench', 'log'])"],
        capture_output=True,
        text=True,
        env=plain_environment({"PYTHONPATH": str(tmp_path / "site")}),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 1
    assert "clone the repository" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_workload_is_a_module() -> None:
    assert all(importlib.util.find_spec(module) for module in WORKLOADS.values())


def test_topics_are_measured_through_the_client(tmp_path: Path) -> None:
    done = mill("bench", "topics", "--smoke", "--only", "client", "--json", "--dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert [line["name"] for line in lines] == ["client.publish", "client.read"]
    assert all(line["value"] > 0 and line["goal"] == 2 for line in lines)


def test_kafka_is_measured_and_says_why_its_peer_is_missing(tmp_path: Path) -> None:
    wanted = ("bench", "kafka", "--smoke", "--only", "produce.100B-none-1", "--json")
    nowhere = {"KAFKA_HOME": str(tmp_path / "none"), "HOME": str(tmp_path)}
    done = mill(*wanted, "--dir", str(tmp_path), **nowhere)
    assert done.returncode == 0, done.stderr
    (line,) = json.loads(done.stdout)["lines"]
    assert (line["name"], line["mode"], line["goal"]) == ("produce.100B-none-1", "none", 650_000)
    assert line["value"] > 0
    assert (line["peer"], line["peer_value"]) == ("Apache Kafka", None)
    assert "make kafka-peer" in line["note"]


def test_every_goal_of_topics_is_measured() -> None:
    names = [name for measurement in topics.MEASUREMENTS for name in measurement.names]
    assert names == [
        "http.publish",
        "http.publish-64-partitions",
        "client.publish",
        "client.read",
        "latency.p50",
        "latency.p99",
        "partitions.throughput",
        "partitions.start",
        "rebalance.join",
        "rebalance.leave",
        "rebalance.kill",
        "offsets.start",
    ]


def test_work_queues_are_measured_through_the_client(tmp_path: Path) -> None:
    done = mill(
        "bench", "delivery", "--smoke", "--only", "members", "--json", "--dir", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert [line["name"] for line in lines] == ["members.8", "members.64"]
    assert all(line["value"] > 0 and line["goal"] == 0.8 for line in lines)


def test_every_goal_of_work_queues_is_measured() -> None:
    names = [name for measurement in delivery.MEASUREMENTS for name in measurement.names]
    assert names == [
        "batches.none",
        "batches.every",
        "single.none",
        "single.every",
        "members.8",
        "members.64",
        "backlog",
        "lanes.shares",
        "lanes.longest-gap",
        "lanes.critical-p99",
        "schedules.memory",
        "schedules.insert",
        "schedules.at-once",
        "schedules.lateness-p99",
        "schedules.restart",
    ]


def test_schedules_are_measured_on_the_local_log(tmp_path: Path) -> None:
    done = mill(
        "bench", "delivery", "--smoke", "--only", "schedules", "--json", "--dir", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout)["lines"]
    assert [line["name"] for line in lines] == [
        name for one in schedules.MEASUREMENTS for name in one.names
    ]
    assert all(line["value"] > 0 for line in lines)


def test_sides_alternate_and_take_turns_in_going_first() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return len(order)

    values = alternate({"a": lambda: side("a"), "b": lambda: side("b")}, 3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert values == {"a": [1, 4, 5], "b": [2, 3, 6]}


@pytest.mark.parametrize(
    ("unit", "taken", "value"), [(RATE, "best", 9), (TIME, "best", 1), (TIME, "median", 4)]
)
def test_the_best_of_a_time_is_the_lowest(unit: Unit, taken: Any, value: float) -> None:
    line = make_line("x", mode="none", unit=unit, values=[4, 1, 9], taken=taken)
    assert (line.value, line.runs, line.taken) == (value, 3, taken)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (Goal("ratio at least", 0.5), True),
        (Goal("ratio at least", 0.51), False),
        (Goal("ratio at most", 0.5), True),
        (Goal("ratio at most", 0.49), False),
        (Goal("value at most", 5), True),
        (Goal("value at most", 4.9), False),
        (Goal("value at least", 5), True),
        (Goal("value at least", 5.1), False),
    ],
)
def test_a_goal_is_met_at_its_number_and_not_past_it(goal: Goal, met: bool) -> None:
    line = make_line("x", mode="none", unit=RATE, values=[5], peer=Peer("a peer", [10]), goal=goal)
    assert (line.ratio, line.met) == (0.5, met)


@pytest.mark.parametrize(
    ("of", "number", "peer", "met"),
    [
        ("value at least", 5, [5], True),
        ("value at least", 5, [5.1], False),
        ("value at least", 5.1, [4], False),
        ("value at least", 5, [], True),
        ("value at least", 5.1, [], False),
        ("value at most", 5, [5], True),
        ("value at most", 5, [4.9], False),
        ("value at most", 4.9, [6], False),
        ("value at most", 5, [], True),
    ],
)
def test_a_goal_may_ask_for_a_value_and_for_no_less_than_the_peer(
    of: Any, number: float, peer: list[float], met: bool
) -> None:
    goal = Goal(of, number, ratio=1.0)
    line = make_line("x", mode="none", unit=RATE, values=[5], peer=Peer("p", peer, "-"), goal=goal)
    assert (line.goal_of, line.goal, line.met) == (of, number, met)


@pytest.mark.parametrize(("rate", "met"), [(700_000, True), (800_000, False), (None, True)])
def test_a_rate_of_kafkas_clients_is_good_when_it_is_no_less_than_kafkas(
    rate: float | None, met: bool
) -> None:
    values = {"ours-produce": [700_000.0], "peer-produce": [] if rate is None else [rate]}
    line = kafka._line("produce", 100, "none", 1, values, "" if rate else "no jars")
    assert (line.goal, line.met) == (650_000, met)
    values["ours-produce"] = [600_000.0]
    assert kafka._line("produce", 100, "none", 1, values, "").met is False


@pytest.mark.parametrize(("peer_ms", "met"), [(1.2, [True, True]), (0.9, [False, False])])
def test_a_wait_of_kafkas_clients_is_good_when_it_is_no_longer_than_kafkas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, peer_ms: float, met: list[bool]
) -> None:
    def outcome(load: Load) -> Outcome:
        wait_ms = 1.0 if load.server == "ours" else peer_ms
        return Outcome(p50_ms=wait_ms, p99_ms=wait_ms)

    monkeypatch.setattr(kafka, "run", outcome)
    monkeypatch.setattr(kafka, "_ours", lambda *_: (None, "ours"))
    monkeypatch.setattr(kafka, "kafka_or_why", lambda *_, **__: ("theirs", ""))
    assert [line.met for line in kafka.latency(Bench(SMOKE, tmp_path))] == met


def test_without_its_peer_a_line_is_there_with_why() -> None:
    peer = Peer("a peer", [], "it is not installed")
    goal = Goal("ratio at least", 1)
    line = make_line("x", mode="none", unit=RATE, values=[5], peer=peer, goal=goal)
    assert (line.value, line.peer, line.peer_value) == (5, "a peer", None)
    assert (line.ratio, line.met, line.note) == (None, None, "it is not installed")


def test_what_cannot_be_measured_is_a_line_with_why(tmp_path: Path) -> None:
    def fail(_: Bench) -> list[Line]:
        raise NotMeasured("the disk is full")

    measurement = Measurement(("x", "y"), fail)
    lines = list(run_all([measurement], Bench(SMOKE, tmp_path), "x", lambda _: None))
    assert [(line.name, line.value, line.note) for line in lines] == [
        ("x", None, "the disk is full")
    ]


def test_a_measurement_that_breaks_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Bench) -> list[Line]:
        raise OSError("no such disk")

    def succeed(_: Bench) -> list[Line]:
        return [make_line("y", mode="none", unit=RATE, values=[5])]

    measurements = [Measurement(("x",), fail), Measurement(("y",), succeed)]
    bench = Bench(SMOKE, tmp_path)
    x, y = run_all(measurements, bench, None, lambda _: None)
    assert (x.value, x.note) == (None, "failed: OSError('no such disk')")
    assert y.value == 5
    machine = look(tmp_path)
    assert Report("log", "smoke", 1.0, machine, [x, y]).has_failed
    assert not Report("log", "smoke", 1.0, machine, [y]).has_failed
    assert "Traceback" in capsys.readouterr().err
