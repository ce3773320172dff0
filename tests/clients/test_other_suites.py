"""Other people's tests count as they should: nothing that was not run looks like a success."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

import pytest

from clients import other_suites
from clients.other_suites import ACCESS, AIOKAFKA, KAFKA_PYTHON, REASONS, Suite, judge, run

EXCUSED = MappingProxyType({"test_a.py::test_acl": ACCESS})
ENDS = MappingProxyType(
    {
        "passed": "",
        "failed": '<failure message="no"/>',
        "broken": '<error message="no"/>',
        "skipped": '<skipped type="pytest.skip" message="not here"/>',
    }
)


def judged(tmp_path: Path, outcomes: Mapping[str, str], suite: Suite | None = None) -> int:
    """Of tests by file and name, with what came of them."""
    cases = []
    for key, outcome in outcomes.items():
        file, _, name = key.partition("::")
        cases.append(f'<testcase file="test/{file}" name="{name}">{ENDS[outcome]}</testcase>')
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return judge(suite or Suite("aiokafka", "test", "", (), EXCUSED), report)


def test_all_that_pass_but_those_with_an_excuse_is_a_success(tmp_path: Path) -> None:
    good = {"test_a.py::test_one": "passed", "test_a.py::test_acl": "failed"}
    assert judged(tmp_path, good) == 0
    assert judged(tmp_path, good | {"test_a.py::test_acl": "skipped"}) == 0


@pytest.mark.parametrize("outcome", ["failed", "broken", "skipped"])
@pytest.mark.parametrize("name", ["test_a.py::test_two", "test_b.py::test_acl"])
def test_one_without_an_excuse_is_a_failure_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], outcome: str, name: str
) -> None:
    """An excuse is of one test in one file."""
    outcomes = {"test_a.py::test_one": "passed", "test_a.py::test_acl": "failed", name: outcome}
    assert judged(tmp_path, outcomes) == 1
    said = "failed" if outcome == "broken" else outcome
    assert f"{said}: {name}\n" in capsys.readouterr().out


def test_of_a_test_with_parameters_the_worst_counts(tmp_path: Path) -> None:
    outcomes = {"test_a.py::test_one": "passed", "test_a.py::test_acl": "failed"}
    some = {"test_a.py::test_each[1]": "passed", "test_a.py::test_each[2]": "skipped"}
    assert judged(tmp_path, outcomes | some) == 1
    assert judged(tmp_path, outcomes | dict.fromkeys(some, "passed")) == 0


def test_an_excuse_that_is_not_needed_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert judged(tmp_path, {"test_a.py::test_acl": "passed"}) == 1
    assert "needs no excuse any more: test_a.py::test_acl\n" in capsys.readouterr().out
    absent = {"test_a.py::test_one": "passed"}
    assert judged(tmp_path, absent) == 1
    elsewhere = Suite("aiokafka", "test", "", (), EXCUSED, elsewhere="SOURCE")
    assert judged(tmp_path, absent, elsewhere) == 0
    assert judged(tmp_path, {}, elsewhere) == 1


def test_every_excuse_is_one_that_counts() -> None:
    for suite in (KAFKA_PYTHON, AIOKAFKA):
        for name, reason in suite.excused.items():
            file, _, test = name.partition("::")
            assert file.endswith(".py"), name
            assert test.startswith("test_"), name
            assert reason in REASONS, name


@pytest.mark.parametrize("folder", ["empty", "absent"])
def test_a_suite_without_tests_is_not_run_which_is_a_failure_that_says_how(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv("AIOKAFKA_SOURCE", str(tmp_path / folder))
    assert run(AIOKAFKA) == 1
    said = capsys.readouterr().out
    assert "not run" in said
    assert f"{tmp_path / folder} gave none" in said
    assert "make test-clients AIOKAFKA_SOURCE=/tmp/aiokafka\n" in said
    assert said.endswith("make test-clients LEAVE_OUT=aiokafka\n")


def test_tests_that_a_package_lacks_come_from_the_repository_at_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("AIOKAFKA_SOURCE", raising=False)
    theirs, suite = tmp_path / "theirs", AIOKAFKA._replace(repository=str(tmp_path / "theirs"))
    assert run(suite) == 1
    assert f"{theirs} gave none" in capfd.readouterr().out
    for name in ("tests/test_one.py", "aiokafka/__init__.py"):
        (theirs / name).parent.mkdir(parents=True)
        (theirs / name).touch()
    git = ["git", "-C", str(theirs), "-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True)
    subprocess.run([*git, "tag", f"v{version('aiokafka')}"], check=True)
    (tmp_path / "here").mkdir()
    source = other_suites.fetch(suite, tmp_path / "here")
    assert [one.name for one in source.iterdir()] == ["tests"]
    assert (source / "tests/test_one.py").exists()


def test_a_suite_is_left_out_only_when_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Suite] = []

    def fetch(suite: Suite, folder: Path) -> Path:
        seen.append(suite)
        return folder

    monkeypatch.setattr(other_suites, "fetch", fetch)
    monkeypatch.setenv("LEAVE_OUT", "aiokafka")
    assert run(AIOKAFKA) == 0
    assert seen == []
    assert "left out, as LEAVE_OUT says" in capsys.readouterr().out
    assert run(KAFKA_PYTHON) == 1
    assert seen == [KAFKA_PYTHON]


def test_of_a_folder_with_their_source_only_the_tests_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their package in it is not what is installed here."""
    theirs = tmp_path / "theirs"
    for name in ("tests/test_one.py", "aiokafka/__init__.py"):
        (theirs / name).parent.mkdir(parents=True)
        (theirs / name).touch()
    monkeypatch.setenv("AIOKAFKA_SOURCE", str(theirs))
    (tmp_path / "here").mkdir()
    source = other_suites.fetch(AIOKAFKA, tmp_path / "here")
    assert [one.name for one in source.iterdir()] == ["tests"]
    assert (source / "tests/test_one.py").exists()
