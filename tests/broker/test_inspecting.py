"""Batches of Kafka's clients that are opened for their headers."""

from __future__ import annotations

from typing import Any

import pytest

from broker.making import House, local_house
from millstream.errors import DelayInvalid, LaneUnknown, MillstreamError
from millstream.log import batch as batches
from millstream.log.batch import Record
from millstream.log.partition import PartitionId

T0 = PartitionId("t", 0)
DELAYED = ("ms-delay", b"5s")


@pytest.fixture
def house() -> House:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 1, {"inspect": True}))
    return house


def batch(*records: tuple[bytes, list[tuple[str, bytes]]], **options: Any) -> bytes:
    return batches.encode([(5, b"k", value, headers) for value, headers in records], **options)


def append(house: House, data: bytes) -> int:
    pending, _ = house.broker.sealed_batches.append("t", 0, data)
    return house.done(pending)


def stored(house: House) -> list[Record]:
    chunk = house.done(house.engine.read(T0, 0, 1 << 20))
    walked = batches.walk(chunk.data)
    found = [batches.decode(chunk.data[at : at + head.size]) for at, head in walked]
    return sorted((one for records in found for one in records), key=lambda one: one.offset)


def test_a_lane_is_taken_from_its_header(house: House) -> None:
    append(house, batch((b"a", [("ms-lane", b"critical"), ("x", b"1")]), (b"b", [("x", b"2")])))
    by_value = {one.value: one for one in stored(house)}
    assert by_value[b"a"].lane == "critical"
    assert by_value[b"a"].headers == (("x", b"1"), ("ms-lane", b"critical"))
    assert by_value[b"b"].lane is None
    assert by_value[b"b"].timestamp == 5


def test_a_delayed_record_appears_when_it_is_due(house: House) -> None:
    assert append(house, batch((b"later", [DELAYED]), (b"now", []))) == 0
    assert [one.value for one in stored(house)] == [b"now"]
    house.scheduler.advance(6)
    later = stored(house)[1]
    assert (later.value, later.headers) == (b"later", ())


def test_where_all_are_for_later_there_is_no_offset(house: House) -> None:
    now_ms = house.scheduler.clock.now_ms
    at = str(now_ms + 5000).encode()
    assert append(house, batch((b"a", [DELAYED]), (b"b", [("ms-deliver-at", at)]))) == -1
    assert stored(house) == []


def test_the_offset_is_that_of_the_first_record_that_is_not_for_later(house: House) -> None:
    append(house, batch((b"before", [("ms-lane", b"normal")])))
    assert append(house, batch((b"later", [DELAYED]), (b"a", []), (b"b", []))) == 1


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (("ms-lane", b"fast"), LaneUnknown),
        (("ms-lane", b"5"), LaneUnknown),
        (("ms-delay", b"-1"), DelayInvalid),
        (("ms-delay", b"soon"), DelayInvalid),
        (("ms-deliver-at", b"tomorrow"), DelayInvalid),
        (("ms-delay", b"4000d"), DelayInvalid),
        (("ms-lane", b"\xff"), MillstreamError),
    ],
)
def test_a_wrong_header_refuses_the_whole_batch(
    house: House, header: tuple[str, bytes], error: type[MillstreamError]
) -> None:
    with pytest.raises(error):
        append(house, batch((b"a", []), (b"b", [header])))
    assert stored(house) == []


def test_a_repeated_batch_is_known_with_its_delays(house: House) -> None:
    options = {"producer_id": 7, "producer_epoch": 0}
    first = batch((b"later", [DELAYED]), (b"now", []), base_sequence=0, **options)
    second = batch((b"plain", []), base_sequence=2, **options)
    assert [append(house, one) for one in (first, first, second, first, second)] == [0, 0, 1, 0, 1]
    assert [one.value for one in stored(house)] == [b"now", b"plain"]
    house.scheduler.advance(6)
    assert [one.value for one in stored(house)] == [b"now", b"plain", b"later"]


def test_a_batch_that_asks_for_nothing_stays_as_it_is(house: House) -> None:
    data = batch((b"a", [("x", b"1")]), compression="zstd")
    append(house, data)
    chunk = house.done(house.engine.read(T0, 0, 1 << 20))
    assert bytes(chunk.data[batches.PLACE_BYTES :]) == data[batches.PLACE_BYTES :]


def test_headers_mean_nothing_in_topics_that_do_not_ask(house: House) -> None:
    house.done(house.broker.topics.alter("t", {"inspect": None}))
    append(house, batch((b"a", [DELAYED])))
    assert [one.headers for one in stored(house)] == [(DELAYED,)]
