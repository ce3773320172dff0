"""Mistakes of others that the local engine must not suffer from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.bad_batches import UNOPENABLE
from engine.engines import T0, ManualHouse
from log.making import batch
from millstream.log import batch as batches
from millstream.log.partition import PartitionSettings

if TYPE_CHECKING:
    from millstream.engine.pending import Pending


def test_a_callback_that_fails_stops_nobody_else() -> None:
    house = ManualHouse()
    house.done(house.engine.create("t", 1, PartitionSettings()))
    first = house.engine.append(T0, batch(b"one"))

    def fail(_: Pending[int]) -> None:
        raise RuntimeError("the owner's own mistake")

    first.then(fail)
    assert house.done(first) == 0
    assert house.done(house.engine.append(T0, batch(b"two"))) == 1


@pytest.mark.parametrize("wrong", UNOPENABLE)
def test_compaction_keeps_a_batch_that_does_not_open(wrong: str) -> None:
    house = ManualHouse()
    house.done(house.engine.create("t", 1, PartitionSettings(segment_bytes=4096)))
    data = UNOPENABLE[wrong].data
    house.done(house.engine.append(T0, data, batches.read_header(data)))
    for n in range(100):
        house.done(house.engine.append(T0, batch(b"v%d" % n, key=b"k")))
    house.done(house.engine.alter("t", settings=PartitionSettings(compact=True)))
    house.scheduler.advance(1.0)
    house.upkeep.compact()
    house.scheduler.run()
    assert house.upkeep.counts.compactions == 1
    assert house.upkeep.counts.records_compacted > 0
    chunk = house.engine.read(T0, 0, 1)
    house.scheduler.run()
    assert batches.read_header(chunk.result().data).base_offset == 0
