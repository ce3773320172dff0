"""Batches that come ready-made and stay closed."""

from __future__ import annotations

from typing import Any

import pytest

from broker.making import House, local_house
from millstream.broker.publishing import Outgoing
from millstream.broker.topic_settings import BATCH_OVERHEAD_BYTES
from millstream.errors import (
    BatchChecksumMismatch,
    BatchInvalid,
    BatchTooLarge,
    KeyRequired,
    MillstreamError,
    PartitionUnknown,
    ProducerFenced,
    SequenceOutOfOrder,
    TimestampInvalid,
    TopicReserved,
    TopicUnknown,
)
from millstream.log import batch as batches
from millstream.log._batch_layout import HEADER_BYTES, sealed
from millstream.log.batch import Record
from millstream.log.partition import PartitionId

T0 = PartitionId("t", 0)


@pytest.fixture
def house() -> House:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 2))
    return house


def batch(*values: bytes, key: bytes | None = b"k", time: int = 5, **options: Any) -> bytes:
    return batches.encode([(time, key, value, []) for value in values], **options)


def append(house: House, data: bytes | memoryview, topic: str = "t", number: int = 0) -> int:
    pending, _ = house.broker.sealed_batches.append(topic, number, data)
    return house.done(pending)


def stored(house: House, topic: str = "t") -> list[Record]:
    chunk = house.done(house.engine.read(PartitionId(topic, 0), 0, 1 << 20))
    walked = batches.walk(chunk.data)
    return [one for at, head in walked for one in batches.decode(chunk.data[at : at + head.size])]


def test_a_batch_is_stored_as_it_came(house: House) -> None:
    data = batch(b"a", b"b", compression="zstd")
    assert append(house, data) == 0
    assert append(house, memoryview(bytearray(data))) == 2
    chunk = house.done(house.engine.read(T0, 0, 1 << 20))
    assert bytes(chunk.data[batches.PLACE_BYTES : len(data)]) == data[batches.PLACE_BYTES :]
    assert [one.offset for one in stored(house)] == [0, 1, 2, 3]
    traffic = house.broker.traffic.of("t")
    assert (traffic.messages_in, traffic.bytes_in) == (4, 2 * len(data))


def test_what_does_not_open_is_not_noticed(house: House) -> None:
    """It is the price of staying closed: who reads it, finds out."""
    header = batches.read_header(batch(b"a"))
    broken = sealed(header, b"\xff" * 20)
    assert append(house, broken) == 0


def with_attributes(mask: int) -> bytes:
    header = batches.read_header(data := batch(b"a"))
    return sealed(header._replace(attributes=mask), data[HEADER_BYTES:])


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (batch(b"a")[:-1] + b"?", BatchChecksumMismatch),
        (batch(b"a") * 2, BatchInvalid),
        (b"short", BatchInvalid),
        (with_attributes(batches.CONTROL_MASK), BatchInvalid),
        (with_attributes(batches.TRANSACTIONAL_MASK), BatchInvalid),
        (with_attributes(batches.DELETE_HORIZON_MASK), BatchInvalid),
        (with_attributes(1 << batches.LANE_SHIFT), BatchInvalid),
        (with_attributes(batches.APPEND_TIME_MASK), TimestampInvalid),
        (batch(b"a", producer_id=7, producer_epoch=0), BatchInvalid),
        (batch(b"a", producer_id=7, base_sequence=0), BatchInvalid),
    ],
)
def test_a_wrong_batch_is_refused(house: House, data: bytes, error: type[MillstreamError]) -> None:
    with pytest.raises(error):
        house.broker.sealed_batches.append("t", 0, data)
    assert house.engine.offsets(T0).high_watermark == 0


def test_a_batch_needs_a_topic_and_a_partition_that_are_there(house: House) -> None:
    for topic, number, error in (
        ("t", 2, PartitionUnknown),
        ("t", -1, PartitionUnknown),
        ("gone", 0, TopicUnknown),
        ("__offsets", 0, TopicReserved),
    ):
        with pytest.raises(error):
            house.broker.sealed_batches.append(topic, number, batch(b"a"))


def test_the_largest_message_of_a_topic_is_its_largest_batch(house: House) -> None:
    house.done(house.broker.topics.create("small", 1, {"message_bytes_max": 1000}))
    room = 1000 + BATCH_OVERHEAD_BYTES - len(batch(b""))
    fits = batch(b"x" * (room - 2))
    assert len(fits) <= 1000 + BATCH_OVERHEAD_BYTES < len(fits) + 3
    assert append(house, fits, "small") == 0
    with pytest.raises(BatchTooLarge):
        append(house, batch(b"x" * (room + 1)), "small")


def test_settings_that_change_are_seen_at_once(house: House) -> None:
    append(house, batch(b"a", key=None))
    house.done(house.broker.topics.alter("t", {"compact": True}))
    with pytest.raises(KeyRequired):
        append(house, batch(b"a", key=None))
    house.done(house.broker.topics.add_partitions("t", 3))
    assert append(house, batch(b"a"), number=2) == 0


def test_a_repeated_batch_gets_the_offset_of_the_first(house: House) -> None:
    first = batch(b"a", b"b", producer_id=7, producer_epoch=1, base_sequence=0)
    second = batch(b"c", producer_id=7, producer_epoch=1, base_sequence=2)
    assert [append(house, one) for one in (first, second, first, second)] == [0, 2, 0, 2]
    assert house.engine.offsets(T0).high_watermark == 3
    with pytest.raises(SequenceOutOfOrder):
        append(house, batch(b"e", producer_id=7, producer_epoch=1, base_sequence=9))
    with pytest.raises(ProducerFenced):
        append(house, batch(b"e", producer_id=7, producer_epoch=0, base_sequence=3))


def test_the_time_of_the_append_replaces_all_others(house: House) -> None:
    house.done(house.broker.topics.create("stamped", 1, {"timestamps": "append"}))
    now_ms = house.scheduler.clock.now_ms
    data = batch(b"a", b"b", time=5)
    pending, append_time_ms = house.broker.sealed_batches.append("stamped", 0, data)
    house.done(pending)
    house.done(house.broker.publisher.publish("stamped", [Outgoing(b"k", b"c", (), 5)]))
    house.done(house.broker.publisher.publish_one("stamped", b"k", b"d", (), 5))
    house.done(house.broker.publisher.publish_batch("stamped", 0, data))
    times = [one.timestamp for one in stored(house, "stamped")]
    assert append_time_ms == now_ms
    assert len(times) == 6
    assert all(now_ms <= time <= house.scheduler.clock.now_ms for time in times)
    _, append_time_ms = house.broker.sealed_batches.append("t", 0, data)
    assert append_time_ms == -1


def test_a_topic_made_again_starts_anew(house: House) -> None:
    append(house, batch(b"a"))
    house.done(house.broker.topics.delete("t"))
    with pytest.raises(TopicUnknown):
        append(house, batch(b"a"))
    house.done(house.broker.topics.create("t", 1))
    assert append(house, batch(b"a")) == 0
