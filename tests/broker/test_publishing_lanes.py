"""Publishing into lanes: what is stored, what makes a batch, and what is refused."""

from __future__ import annotations

import pytest

from broker.making import House, local_house, memory_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.publishing import Outgoing, Placed
from millstream.errors import BatchInvalid, LaneUnknown
from millstream.log import batch as batches
from millstream.log._batch_layout import HEADER_BYTES, sealed
from millstream.log.batch import LANE_HEADER, LANE_MASK, LANE_SHIFT, LANES
from millstream.log.partition import PartitionId
from millstream.wire.lanes import NORMAL, lane_of_word

HIGH, LOW = LANES.index("high"), LANES.index("low")


@pytest.fixture
def house() -> House:
    house = memory_house()
    house.done(house.broker.topics.create("t", 2))
    return house


def record(value: bytes, lane: int = NORMAL, partition: int = 0) -> Outgoing:
    return Outgoing(None, value, partition=partition, lane=lane)


def batches_in(house: House, number: int = 0) -> list[tuple[str | None, list[bytes | None]]]:
    """Of each batch its lane, and the values in it."""
    chunk = house.done(house.engine.read(PartitionId("t", number), 0, 1 << 30))
    found = []
    for at, header in batches.walk(chunk.data):
        records = batches.decode(chunk.data[at : at + header.size])
        assert all(one.lane == header.lane for one in records)
        found.append((header.lane, [one.value for one in records]))
    return found


def ready_batch(lane: str | None, named: str | None) -> bytes:
    headers = () if named is None else ((LANE_HEADER, named.encode()),)
    return batches.encode([(1, None, b"v", headers)], lane=lane)


def test_a_lane_is_stored_with_the_record_and_its_batch(house: House) -> None:
    for lane in range(len(LANES)):
        house.done(house.broker.publisher.publish_one("t", None, b"%d" % lane, partition=0,
                                                      lane=lane))  # fmt: skip
    names = [None if lane == NORMAL else LANES[lane] for lane in range(len(LANES))]
    assert batches_in(house) == [(name, [b"%d" % at]) for at, name in enumerate(names)]


def test_records_of_one_turn_partition_and_lane_are_one_batch(house: House) -> None:
    house.done(house.broker.topics.use_lanes("t"))
    publisher = house.broker.publisher
    sent = [
        publisher.publish_one("t", None, b"%d" % n, partition=0, lane=(NORMAL, HIGH)[n % 2])
        for n in range(6)
    ]
    house.scheduler.run()
    assert dict(batches_in(house)) == {
        None: [b"0", b"2", b"4"],
        "high": [b"1", b"3", b"5"],
    }
    assert {one.result().offset for one in sent} == set(range(6))


def test_one_call_may_have_records_of_several_lanes(house: House) -> None:
    records = [record(b"0", HIGH), record(b"1"), record(b"2", HIGH), record(b"3", LOW)]
    placed = house.done(house.broker.publisher.publish("t", records)).placed
    values: dict[int, bytes | None] = {}
    for _, found in batches_in(house):
        values |= dict(enumerate(found, len(values)))
    assert [values[one.offset] for one in placed] == [b"0", b"1", b"2", b"3"]


def test_a_repeat_of_several_lanes_is_told_each_place(house: House) -> None:
    records = [record(b"0", HIGH), record(b"1"), record(b"2", HIGH), record(b"3", LOW, 1)]
    publisher = house.broker.publisher
    first = house.done(publisher.publish("t", records, idempotency_key="k"))
    again = house.done(publisher.publish("t", records, idempotency_key="k"))
    assert again.is_duplicate
    assert again.placed == first.placed


def test_that_a_topic_uses_lanes_is_durable_before_its_first_such_record() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1))
    seen: list[tuple[bool, bool]] = []

    def look(_index: int, _name: str) -> None:
        disk.on_operation = None
        crashed = local_house(disk.crash("nothing")).start()
        end = crashed.engine.offsets(PartitionId("t", 0)).high_watermark
        seen.append((crashed.broker.topics.get("t").uses_lanes, end > 0))
        disk.on_operation = look

    disk.on_operation = look
    house.done(house.broker.publisher.publish_one("t", None, b"v", lane=HIGH))
    disk.on_operation = None
    look(0, "")
    assert (False, True) not in seen
    assert seen[0] == (False, False)
    assert seen[-1] == (True, True)


def test_a_topic_without_lanes_has_none_noted(house: House) -> None:
    house.done(house.broker.publisher.publish_one("t", None, b"v", lane=NORMAL))
    assert not house.broker.topics.get("t").uses_lanes
    assert house.done(
        house.broker.publisher.publish_one("t", None, b"v", partition=0, lane=HIGH)
    ) == Placed(0, 1, house.scheduler.clock.now_ms)
    assert house.broker.topics.get("t").uses_lanes


@pytest.mark.parametrize("lane", [-1, len(LANES)])
def test_a_lane_that_there_is_not_is_refused(house: House, lane: int) -> None:
    sent = house.broker.publisher.publish("t", [record(b"good"), record(b"bad", lane)])
    error = house.failed(sent)
    assert isinstance(error, LaneUnknown)
    assert error.fields["record"] == 1
    assert batches_in(house) == []


@pytest.mark.parametrize(
    ("word", "lane"), [("critical", 0), ("background", 4), ("0", 0), ("4", 4), (2, 2)]
)
def test_lanes_have_names_and_numbers(word: str | int, lane: int) -> None:
    assert lane_of_word(word) == lane


@pytest.mark.parametrize("word", ["", "urgent", "5", "-1", "04", "٣", 5, -1])
def test_another_word_is_no_lane(word: str | int) -> None:
    with pytest.raises(LaneUnknown):
        lane_of_word(word)


@pytest.mark.parametrize(("lane", "named"), [("high", "high"), ("normal", None), (None, None)])
def test_a_ready_made_batch_may_be_of_a_lane(
    house: House, lane: str | None, named: str | None
) -> None:
    batch = ready_batch(lane, named)
    assert house.done(house.broker.publisher.publish_batch("t", 0, batch)) == 0
    assert house.broker.topics.get("t").uses_lanes == (lane == "high")


@pytest.mark.parametrize(("lane", "named"), [("high", None), ("high", "low"), ("normal", "low")])
def test_a_ready_made_batch_that_contradicts_its_records_is_refused(
    house: House, lane: str, named: str | None
) -> None:
    sent = house.broker.publisher.publish_batch("t", 0, ready_batch(lane, named))
    error = house.failed(sent)
    assert isinstance(error, BatchInvalid)
    assert (error.fields["batch"], error.fields["record"]) == (0, 0)
    assert not house.broker.topics.get("t").uses_lanes


@pytest.mark.parametrize("bits", [6, 7])
def test_a_ready_made_batch_of_no_known_lane_is_refused(house: House, bits: int) -> None:
    batch = ready_batch("critical", "critical")
    header = batches.read_header(batch)
    attributes = header.attributes & ~LANE_MASK | bits << LANE_SHIFT
    changed = sealed(header._replace(attributes=attributes), batch[HEADER_BYTES:])
    error = house.failed(house.broker.publisher.publish_batch("t", 0, changed))
    assert isinstance(error, BatchInvalid)
    assert "bits 8 to 10" in error.message
