"""The first steps in the README are what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from broker_process import MILL, BrokerProcess, plain_environment

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.parametrize(("title", "count"), [("A first message", 4), ("A first topic", 2)])
def test_what_the_readme_shows_is_what_happens(tmp_path: Path, title: str, count: int) -> None:
    section = README.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [index for index, line in enumerate(lines) if line.startswith("$ curl ")]
    assert len(commands) == count
    with BrokerProcess(str(tmp_path)) as broker:
        server = broker.wait_until_ready().url("")
        for index in commands:
            command = lines[index].removeprefix("$ ").replace("http://127.0.0.1:8080", server)
            done = subprocess.run(
                [*shlex.split(command), "--silent"], capture_output=True, text=True, check=True
            )
            expected = lines[index + 1] if index + 1 < len(lines) else ""
            expected = "" if expected.startswith("$ ") else expected
            # Microseconds and milliseconds since 1970.
            shown = re.sub(r"\b\d{16}\b", "1701234567890123", done.stdout)
            shown = re.sub(r"\b\d{13}\b", "1701234567890", shown)
            # The beginning of a topic's id.
            assert re.sub(r'"next":"[0-9a-f]{8}:', '"next":"5f0c9a1e:', shown) == expected


def test_the_first_job_of_the_readme_is_done_as_it_shows(tmp_path: Path) -> None:
    section = README.read_text(encoding="utf-8").split("## A first job\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    mill = " ".join(map(shlex.quote, MILL))
    with BrokerProcess(str(tmp_path)) as broker:
        place = {"MILLSTREAM_SERVER": broker.wait_until_ready().url("")}
        for part in block.removeprefix("$ ").split("\n$ "):
            command, _, expected = part.rstrip("\n").partition("\n")
            done = subprocess.run(
                ["sh", "-c", command.replace(".venv/bin/mill", mill)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=plain_environment(place),
                check=True,
            )
            assert done.stdout.rstrip("\n") == expected
