"""What every test of faults needs: quiet, and blocks of producer ids that run out."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Recovery tells the log what it found; thousands of recoveries would tell it a lot."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture(autouse=True)
def small_blocks_of_producer_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.engine.local.PRODUCER_ID_BLOCK", 3)
