"""The fuzzer, for as long as a test may take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from broker_process import PATIENCE_SECONDS, plain_environment

RUNS = 20_000


def test_made_up_requests_of_kafka_clients_are_read_or_refused() -> None:
    pytest.importorskip("atheris", reason="atheris is missing: there is no wheel for this Python")
    script = Path(__file__).parent / "kafka_requests.py"
    done = subprocess.run(
        [sys.executable, str(script), f"-runs={RUNS}", "-seed=1"],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_SECONDS,
        env=plain_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {RUNS} runs" in done.stderr
