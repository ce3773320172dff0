"""The collector looks less often, and not at what is there for good."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from millstream.engine.collector import THRESHOLDS, calm_collector


class Node(list["Node"]):
    """Holds itself, so that no count of references frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.append(self)


@pytest.fixture
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("as_before")
def test_what_is_there_is_not_looked_at_again() -> None:
    calm_collector()
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == THRESHOLDS


@pytest.mark.usefixtures("as_before")
def test_cycles_that_are_made_later_are_still_found() -> None:
    calm_collector()
    assert gc.isenabled()
    gone = weakref.ref(Node())
    kept = [Node() for _ in range(2 * THRESHOLDS[0])]
    assert gone() is None
    assert len(kept) == 2 * THRESHOLDS[0]
