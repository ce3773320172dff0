"""`/v1` against its OpenAPI page."""

from __future__ import annotations

from pathlib import Path

from listeners.schemathesis_run import check_page

# What a page cannot say, because it depends on what the broker holds: an offset that is not there,
# a message that is larger than its topic takes, fewer partitions than there are, a key that a
# compacted topic needs. And no page can say which bytes are a batch or entries,
# that a key in base64 is one, or that no two offsets of a commit are of one partition.
CONFIG = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "3xx", 401, 403, 404, 409, 413, 416, 429, "5xx"]

[checks.negative_data_rejection]
expected-statuses = [400, 403, 404, 405, 409, 413, 416, 429, "5xx"]

# A 404 may be about something else that the request names: a partition, a consumer.
[checks.ensure_resource_availability]
enabled = false

# These requests ask for no WebSocket.
[[operations]]
include-path-regex = "/stream$"
checks.positive_data_acceptance.expected-statuses = [404, 426]
checks.negative_data_rejection.expected-statuses = [404, 426]

# To delete a redrive is to cancel it: what it has done is still told.
[[operations]]
include-path-regex = "/redrives/"
checks.use_after_free.enabled = false

[[operations]]
include-path-regex = "(/partitions|/batch(es)?|/parts|/messages|/publish|/dead-letters|/commit)$"
checks.positive_data_acceptance.expected-statuses = ["2xx", 400, 404, 409, 413, 416, 429]
"""
# Topics are made by the hundred.
FLAGS = ("--topic-partitions-max", "4", "--partitions-max", "100000", "--fsync", "none")


def test_v1_does_what_its_openapi_page_says(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
    options = ("--include-path-regex", "^/v1/", "--warnings", "off")
    check_page(tmp_path, *options, examples_full=100, flags=FLAGS)
