"""The page about work queues: its commands and its program do what it says, in their order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from millstream.client import Client

PAGE = (Path(__file__).parent.parent / "docs" / "work-queues.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
BLOCKS = re.findall(r"```\n(\$ .*?)```", PAGE, re.DOTALL)
COMMANDS = [line[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("$ ")]


def test_each_command_of_the_page_works_where_the_one_before_has(tmp_path: Path) -> None:
    worker = tmp_path / "resize.sh"
    worker.write_text("#!/bin/sh\ncat\n")
    worker.chmod(0o755)
    mill = tmp_path / "mill"
    mill.write_text(f'#!/bin/sh\nexec {" ".join(MILL)} "$@"\n')
    mill.chmod(0o755)
    with BrokerProcess(str(tmp_path)) as broker:
        server = broker.wait_until_ready().url("")
        place = {"MILLSTREAM_SERVER": server, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        receipt = ""
        for shown in COMMANDS:
            command = shown.replace("localhost:8080", server).replace("jobs:0:0:1:…", receipt)
            # The page leaves it running.
            command = command.replace("mill work jobs", "mill work jobs --idle-exit 100ms")
            done = subprocess.run(
                ["sh", "-c", command],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
                env=plain_environment(place),
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stderr}"
            assert '"error"' not in done.stdout, f"{command}\n{done.stdout}"
            found = re.search(r'"receipt":"([^"]+)"', done.stdout)
            receipt = found[1] if found else receipt
        assert counts(server)["acked"] == 1


def test_the_program_of_the_page_works_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    (program,) = PROGRAMS
    with BrokerProcess(str(tmp_path)) as broker:
        server = broker.wait_until_ready().url("")
        with Client(server) as client:
            client.publish("jobs", "resize 4711.jpg")
            client.publish("jobs", "sing a song")
        command = [sys.executable, "-c", program.replace("http://127.0.0.1:8080", server)]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=plain_environment(), **pipes) as worker:
            wait_until(lambda: counts(server).get("rejected") == 1, "a reject")
            wait_until(lambda: counts(server).get("acked") == 1, "an ack")
            worker.send_signal(signal.SIGTERM)
            out, errors = worker.communicate(timeout=PATIENCE_SECONDS)
        assert (worker.returncode, out, errors) == (0, "resizing resize 4711.jpg\n", "")


def counts(server: str) -> dict[str, int]:
    page = httpx.get(f"{server}/v1/reliability/stats", timeout=PATIENCE_SECONDS).json()
    found: dict[str, int] = page["totals"]
    return found
