"""The lines about WebSockets can be measured, with a client in a process of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from broker_process import MILL, plain_environment


def test_every_line_is_measured(tmp_path: Path) -> None:
    done = subprocess.run(
        [*MILL, "bench", "queues", "--smoke", "--only", "ws.", "--json", "--dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=plain_environment({"NO_COLOR": "1"}),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = {line["name"]: line for line in json.loads(done.stdout)["lines"]}
    assert {name: (line["goal_of"], line["goal"] is None) for name, line in lines.items()} == {
        "ws.single": ("value at least", False),
        "ws.batch": ("value at least", False),
        "ws.idle-1000": ("value at most", False),
    }
    assert all(line["value"] is not None for line in lines.values()), lines
    assert lines["ws.single"]["value"] > 0
    assert list(tmp_path.iterdir()) == [], "the scratch folder is left as it was"
