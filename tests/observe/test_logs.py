"""Messages come out as JSON or for people, those of libraries too."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging
from millstream.observe.logs import configure_logs, get_logger
log = get_logger("test")
configure_logs({level!r}, {form!r})
log.debug("too quiet")
log.warning("torn tail", cut_bytes=12, path=object)
logging.getLogger("some.library").warning("it is %s", "late")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
"""


def messages(level: str, form: str) -> list[str]:
    program = PROGRAM.format(level=level, form=form)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_is_one_object_a_line() -> None:
    lines = [json.loads(line) for line in messages("info", "json")]
    assert [line["event"] for line in lines] == ["torn tail", "it is late", "failed"]
    assert lines[0]["part"] == "test"
    assert lines[0]["cut_bytes"] == 12
    assert lines[0]["level"] == "warning"
    assert lines[1]["part"] == "some.library"
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert all("time" in line for line in lines)


def test_auto_is_json_where_there_is_no_terminal() -> None:
    assert json.loads(messages("info", "auto")[0])["event"] == "torn tail"


def test_pretty_is_for_people() -> None:
    output = messages("info", "pretty")
    assert "torn tail" in output[0]
    assert "cut_bytes=12" in output[0]
    assert any("ZeroDivisionError" in line for line in output)


def test_the_level_is_a_threshold() -> None:
    assert [json.loads(line)["event"] for line in messages("error", "json")] == ["failed"]
    assert json.loads(messages("debug", "json")[0])["event"] == "too quiet"
