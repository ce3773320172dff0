"""The commands on the page about queues print what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, plain_environment

PAGE = Path(__file__).parent.parent / "docs" / "queues.md"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Each command with the lines that it prints."""
    for block in re.findall(r"```\n(\$ .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        for part in block.removeprefix("$ ").split("\n$ "):
            command, *printed = part.rstrip("\n").split("\n")
            yield command, printed


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with a `mill` of this tree."""
    folder = tmp_path / "bin"
    folder.mkdir()
    mill = folder / "mill"
    mill.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m millstream "$@"\n')
    mill.chmod(0o755)
    return folder


def test_the_page_about_queues_shows_what_happens(tmp_path: Path, programs: Path) -> None:
    found = list(commands())
    assert len(found) >= 16
    with BrokerProcess(str(tmp_path)) as broker:
        server = broker.wait_until_ready().url("")
        environment = plain_environment(
            {"MILLSTREAM_SERVER": server, "PATH": f"{programs}:{os.environ['PATH']}"}
        )
        for command, printed in found:
            done = subprocess.run(
                ["sh", "-c", command.replace("http://127.0.0.1:8080", server)],
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                env=environment,
                check=False,
            )
            shown = re.sub(r"\b1\d{15}\b", "1701234567890123", done.stdout).splitlines()
            assert shown == printed, f"{command}\n{done.stdout}{done.stderr}"
