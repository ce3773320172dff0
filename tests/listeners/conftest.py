"""What several tests of listeners need."""

from __future__ import annotations

import pytest

from millstream.listeners.http import lane


@pytest.fixture
def short_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused client is closed soon: its answer is read at once in these tests."""
    monkeypatch.setattr(lane, "LINGER_S", 0.05)
