"""What docs/websocket.md shows is what happens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import BrokerProcess, plain_environment

PAGE = (Path(__file__).parents[2] / "docs" / "websocket.md").read_text(encoding="utf-8")
SERVER = "ws://127.0.0.1:8080"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(str(tmp_path_factory.mktemp("docs"))) as broker:
        yield broker.wait_until_ready().url("").replace("http", "ws", 1)


def started(program: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=plain_environment({"PYTHONUNBUFFERED": "1"}),
    )


def test_the_terminal(server: str) -> None:
    blocks = re.findall(r"```\n(.*?)```", PAGE, re.DOTALL)
    commands = [block for block in blocks if "-m websockets" in block]
    assert len(commands) == 2
    for block in commands:
        address = re.search(rf"{SERVER}(\S+)", block)
        said = re.findall(r"(?m)^> (.*)$", block)
        heard = re.findall(r"(?m)^< (.*)$", block)
        assert address is not None
        assert len(heard) == 1
        with started(["-m", "websockets", server + address.group(1)]) as terminal:
            assert terminal.stdin is not None
            assert terminal.stdout is not None
            for line in said:
                terminal.stdin.write(line + "\n")
                terminal.stdin.flush()
            for line in terminal.stdout:
                if "< " in line:
                    break
            terminal.kill()
        found = re.sub(r"\d{16}", "1701234567890123", line.partition("< ")[2].rstrip("\n"))
        assert found == heard[0]


def test_the_python_program(server: str) -> None:
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 1
    assert SERVER in programs[0]
    with started(["-c", programs[0].replace(SERVER, server)]) as program:
        assert program.stdout is not None
        confirmation = json.loads(program.stdout.readline())
        assert (confirmation["queued"], confirmation["queue_name"]) == (True, "emails")
        assert program.stdout.readline() == "{'to': 'user@example.com'}\n"
        program.kill()
