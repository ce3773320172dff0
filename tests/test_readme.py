"""The first message in the README is what happens."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from broker_process import BrokerProcess

README = Path(__file__).parent.parent / "README.md"


def test_a_first_message_goes_as_the_readme_says(tmp_path: Path) -> None:
    section = README.read_text(encoding="utf-8").split("## A first message\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)```", section, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    commands = [index for index, line in enumerate(lines) if line.startswith("$ curl ")]
    assert len(commands) == 4
    with BrokerProcess(str(tmp_path)) as broker:
        server = broker.wait_until_ready().url("")
        for index in commands:
            command = lines[index].removeprefix("$ ").replace("http://127.0.0.1:8080", server)
            done = subprocess.run(
                [*shlex.split(command), "--silent"], capture_output=True, text=True, check=True
            )
            expected = lines[index + 1] if index + 1 < len(lines) else ""
            expected = "" if expected.startswith("$ ") else expected
            assert re.sub(r"\d{16}", "1701234567890123", done.stdout) == expected
