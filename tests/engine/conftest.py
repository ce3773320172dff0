"""One suite for every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.engines import House, LoopHouse, ManualHouse, MemoryHouse
from millstream.log.partition import PartitionSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["memory", "local", "local-uvloop"])
def house(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[House]:
    """An engine that runs, without topics."""
    made: House
    if request.param == "memory":
        made = MemoryHouse()
    elif request.param == "local":
        made = ManualHouse()
    else:
        made = LoopHouse(str(tmp_path / "data"))
    yield made
    made.stop()


@pytest.fixture
def topic(house: House) -> House:
    """An engine with the topic `t`, of two partitions."""
    house.done(house.engine.create("t", 2, PartitionSettings()))
    return house
