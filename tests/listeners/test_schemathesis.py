"""All but `/v1` against its OpenAPI page."""

from __future__ import annotations

from pathlib import Path

from listeners.schemathesis_run import check_page


def test_the_broker_does_what_its_openapi_page_says(tmp_path: Path) -> None:
    check_page(tmp_path, "--exclude-path-regex", "^/v1/", examples_full=200)
