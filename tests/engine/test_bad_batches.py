"""A batch that would not open for a reader is refused, unless somebody vouches for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from engine.bad_batches import UNOPENABLE
from engine.engines import T0, T1, House, ManualHouse, all_values
from log.making import batch, header_of
from millstream.errors import BatchInvalid
from millstream.log import batch as batches
from millstream.log.partition import PartitionSettings

if TYPE_CHECKING:
    from millstream.engine.protocol import Part

each_unopenable = pytest.mark.parametrize("wrong", UNOPENABLE)


@each_unopenable
def test_what_does_not_open_is_refused_with_its_own_error(topic: House, wrong: str) -> None:
    data, error = UNOPENABLE[wrong]
    with pytest.raises(BatchInvalid) as caught:
        topic.done(topic.engine.append(T0, data))
    assert caught.type is error
    assert topic.engine.offsets(T0) == (0, 0)
    assert topic.done(topic.engine.append(T0, batch(b"a"))) == 0


@each_unopenable
def test_one_that_does_not_open_refuses_an_atomic_append_as_a_whole(
    topic: House, wrong: str
) -> None:
    data, error = UNOPENABLE[wrong]
    good = batch(b"good")
    with pytest.raises(error):
        topic.done(topic.engine.append_atomic([(T0, good, header_of(good)), (T1, data)]))
    with pytest.raises(error):
        topic.done(topic.engine.append_atomic([(T0, good), (T1, data, None)]))
    assert topic.engine.offsets(T0) == topic.engine.offsets(T1) == (0, 0)


@pytest.mark.parametrize("fsync", ["every", "interval", "none"])
@each_unopenable
def test_nothing_is_written_for_what_does_not_open(wrong: str, fsync: str) -> None:
    house = ManualHouse()
    house.create(PartitionSettings(fsync=fsync))  # type: ignore[arg-type]
    before = house.disk.operations
    alone = house.engine.append(T0, UNOPENABLE[wrong].data)
    together = house.engine.append_atomic([(T0, batch(b"good")), (T0, UNOPENABLE[wrong].data)])
    house.run()
    assert isinstance(alone.error, BatchInvalid)
    assert isinstance(together.error, BatchInvalid)
    assert house.disk.operations == before


def test_who_passes_a_header_vouches_for_the_batch(topic: House) -> None:
    """Bytes stay bytes: what a listener verified is stored unopened."""
    data = UNOPENABLE["endless varint"].data
    header = batches.verify(data, bytes_max=len(data))
    assert topic.done(topic.engine.append(T0, data, header)) == 0
    good = batch(b"a", b"b")
    parts: list[Part] = [(T0, good, header_of(good)), (T1, data, header), (T1, batch(b"c"))]
    assert topic.done(topic.engine.append_atomic(parts)) == [1, 0, 1]
    stored = topic.done(topic.engine.read(T0, 0, 1)).data
    assert bytes(stored[16:]) == data[16:]


@each_unopenable
def test_on_a_compacted_topic_nobody_can_vouch_for_what_does_not_open(
    house: House, wrong: str
) -> None:
    house.done(house.engine.create("t", 1, PartitionSettings(compact=True)))
    data, error = UNOPENABLE[wrong]
    with pytest.raises(error):
        house.done(house.engine.append(T0, data, header_of(data)))
    with pytest.raises(error):
        house.done(house.engine.append_atomic([(T0, data, header_of(data))]))
    assert house.engine.offsets(T0) == (0, 0)


@pytest.mark.parametrize("compression", batches.COMPRESSIONS)
def test_what_opens_is_taken_whatever_its_compression(topic: House, compression: str) -> None:
    values = [b"%d" % n * 50 for n in range(30)]
    assert topic.done(topic.engine.append(T0, batch(*values, compression=compression))) == 0
    assert all_values(topic) == values
