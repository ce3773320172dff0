"""Requests made from the OpenAPI page, right ones and wrong ones: the broker answers as it says.

The same requests in every run by default; `make test-faults` makes more, and others each time.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

from broker_process import BrokerProcess, plain_environment

HERE = Path(__file__).parent
IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"
SEED = random.randrange(2**32) if IS_FULL else 1


def check_page(
    folder: Path, *options: str, examples_full: int, flags: tuple[str, ...] = ()
) -> None:
    """`options` say which paths; `flags` are the broker's."""
    with BrokerProcess(str(folder), *flags) as broker:
        url = broker.wait_until_ready().url("/openapi.json")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", url),
                *options,
                *("--max-examples", str(examples_full if IS_FULL else 5)),
                *("--seed", str(SEED)),
                *("--request-timeout", "120"),
                *("--suppress-health-check", "all"),
                *("--generation-database", "none"),
                "--no-color",
            ],
            cwd=folder,
            env=plain_environment(
                {"SCHEMATHESIS_HOOKS": "schemathesis_hooks", "PYTHONPATH": str(HERE)}
            ),
            capture_output=True,
            text=True,
            timeout=3600,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]
        # It got as far as to send requests, and nothing failed in a way that only the log tells.
        assert "No issues found" in done.stdout
        assert not [one for one in broker.messages() if one["level"] == "error"]
