"""Requests to `/v1` made from the OpenAPI page, right ones and wrong ones: it answers as it says.

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
EXAMPLES = 100 if IS_FULL else 5
SEED = random.randrange(2**32) if IS_FULL else 1

# What a page cannot say, because it depends on what the broker holds: an offset that is not there,
# a message that is larger than its topic takes, fewer partitions than there are, a key that a
# compacted topic needs. And no page can say which bytes are a batch.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", 401, 403, 404, 409, 413, 416, 429, "5xx"]

[checks.negative_data_rejection]
expected-statuses = [400, 403, 404, 405, 409, 413, 416, 429, "5xx"]

# A 404 may be about something else that the request names: a partition, a consumer.
[checks.ensure_resource_availability]
enabled = false

[[operations]]
include-path-regex = "(/partitions|/batches|/batch|/messages|/publish)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 404, 409, 413, 416, 429]
"""
# Topics are made by the hundred.
FLAGS = ("--topic-partitions-max", "4", "--partitions-max", "100000", "--fsync", "none")


def test_v1_does_what_its_openapi_page_says(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
    with BrokerProcess(str(tmp_path), *FLAGS) as broker:
        url = broker.wait_until_ready().url("/openapi.json")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", url),
                *("--include-path-regex", "^/v1/"),
                *("--max-examples", str(EXAMPLES)),
                *("--seed", str(SEED)),
                *("--request-timeout", "120"),
                *("--suppress-health-check", "all"),
                *("--generation-database", "none"),
                *("--warnings", "off"),
                "--no-color",
            ],
            cwd=tmp_path,
            env=plain_environment(
                {"SCHEMATHESIS_HOOKS": "schemathesis_v1_hooks", "PYTHONPATH": str(HERE)}
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
