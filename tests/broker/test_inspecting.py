"""Batches of Kafka's clients that are opened for their headers."""

from __future__ import annotations

from typing import Any

import pytest

from broker.making import House, RefusingDisk, local_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker.inspected_producers import InspectedProducers
from millstream.broker.topics import Topic, Topics
from millstream.engine.pending import Pending
from millstream.errors import (
    DelayInvalid,
    DiskFull,
    LaneUnknown,
    MillstreamError,
    ProducerFenced,
    SequenceDuplicate,
    SequenceOutOfOrder,
    TopicUnknown,
)
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


# ---- order


def sent(number: int, *headers: tuple[str, bytes], is_idempotent: bool) -> bytes:
    """The batch of one producer with this number."""
    options: dict[str, Any] = {}
    if is_idempotent:
        options = {"producer_id": 7, "producer_epoch": 0, "base_sequence": number}
    return batch((str(number).encode(), list(headers)), **options)


def together(house: House, *datas: bytes) -> list[int]:
    """Sent one after the other, before any of them is answered."""
    pending = [house.broker.sealed_batches.append("t", 0, data)[0] for data in datas]
    house.scheduler.run()
    return [one.result() for one in pending]


def values(house: House, lane: str | None = None) -> list[bytes | None]:
    return [one.value for one in stored(house) if one.lane == lane]


@pytest.mark.parametrize("is_idempotent", [False, True])
@pytest.mark.parametrize("asking", [{0, 2, 4}, {1, 3, 5}, {3}, {0, 1, 4}])
def test_batches_appear_in_the_order_in_which_they_came(
    house: House, is_idempotent: bool, asking: set[int]
) -> None:
    header = ("ms-lane", b"normal")
    datas = [
        sent(number, *([header] if number in asking else []), is_idempotent=is_idempotent)
        for number in range(6)
    ]
    assert together(house, *datas) == [0, 1, 2, 3, 4, 5]
    assert values(house) == [b"0", b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.parametrize("is_idempotent", [False, True])
def test_records_of_a_lane_appear_in_the_order_in_which_they_came(
    house: House, is_idempotent: bool
) -> None:
    """Also those that come while the topic's first record of another lane is waited for."""
    lanes = [None, b"critical", None, b"critical", b"low", None, b"critical"]
    datas = [
        sent(number, *([("ms-lane", lane)] if lane else []), is_idempotent=is_idempotent)
        for number, lane in enumerate(lanes)
    ]
    together(house, *datas)
    assert values(house) == [b"0", b"2", b"5"]
    assert values(house, "critical") == [b"1", b"3", b"6"]
    assert values(house, "low") == [b"4"]


def test_a_batch_of_several_lanes_keeps_the_order_within_each(house: House) -> None:
    mixed = [
        batch((f"{number}n".encode(), []), (f"{number}c".encode(), [("ms-lane", b"critical")]))
        for number in range(3)
    ]
    together(house, batch((b"first", [])), *mixed, batch((b"last", [])))
    assert values(house) == [b"first", b"0n", b"1n", b"2n", b"last"]
    assert values(house, "critical") == [b"0c", b"1c", b"2c"]


def test_those_that_wait_for_a_topic_that_goes_are_told(house: House) -> None:
    datas = [batch((b"a", [("ms-lane", b"low")])), batch((b"b", []))]
    pending = [house.broker.sealed_batches.append("t", 0, data)[0] for data in datas]
    deleted = house.broker.topics.delete("t")
    house.scheduler.run()
    deleted.result()
    # Those that were on their way before it went may be in it, and nobody waits for ever.
    assert all(one.is_done for one in pending)


# ---- sequences


def sequenced(epoch: int, sequence: int, *headers: tuple[str, bytes], id: int = 7) -> bytes:
    return batch(
        (f"{epoch}/{sequence}".encode(), list(headers)),
        producer_id=id,
        producer_epoch=epoch,
        base_sequence=sequence,
    )


def test_an_older_epoch_is_fenced_and_a_gap_is_refused(house: House) -> None:
    assert append(house, sequenced(0, 0)) == 0
    assert append(house, sequenced(1, 0, ("ms-lane", b"normal"))) == 1
    with pytest.raises(ProducerFenced):
        append(house, sequenced(0, 1))
    with pytest.raises(SequenceOutOfOrder):
        append(house, sequenced(1, 2))
    with pytest.raises(SequenceOutOfOrder):
        append(house, sequenced(2, 1))
    assert append(house, sequenced(1, 1)) == 2
    assert values(house) == [b"0/0", b"1/0", b"1/1"]
    # Another producer knows nothing of it.
    assert append(house, sequenced(0, 40, id=8)) == 3


def test_a_repeated_batch_of_long_ago_is_told_to_be_one(house: House) -> None:
    for sequence in range(8):
        append(house, sequenced(0, sequence))
    assert append(house, sequenced(0, 3)) == 3
    with pytest.raises(SequenceDuplicate):
        append(house, sequenced(0, 2))
    # The window of its idempotency key is over, and it is known all the same.
    house.scheduler.advance(3600)
    assert append(house, sequenced(0, 7)) == 7
    assert house.engine.offsets(T0).high_watermark == 8


def test_a_batch_that_was_refused_may_come_again(house: House) -> None:
    assert append(house, sequenced(0, 0)) == 0
    with pytest.raises(LaneUnknown):
        append(house, sequenced(0, 1, ("ms-lane", b"fast")))
    assert append(house, sequenced(0, 1, ("ms-lane", b"normal"))) == 1


def test_a_batch_that_is_repeated_on_its_way_is_stored_once(house: House) -> None:
    data = sequenced(0, 0, ("ms-lane", b"low"))
    assert together(house, data, data) == [0, 0]
    assert values(house, "low") == [b"0/0"]


def test_a_batch_that_failed_on_its_way_may_come_again() -> None:
    house, disk = full_house()
    assert append(house, sequenced(0, 0)) == 0
    disk.is_full = True
    pending, _ = house.broker.sealed_batches.append("t", 0, sequenced(0, 1))
    assert isinstance(house.failed(pending), DiskFull)
    disk.is_full = False
    assert append(house, sequenced(0, 1)) == 1
    assert append(house, sequenced(0, 2)) == 2
    assert values(house) == [b"0/0", b"0/1", b"0/2"]


def test_after_a_restart_only_keys_are_known() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1, {"inspect": True}))
    assert [append(house, sequenced(3, sequence)) for sequence in range(2)] == [0, 1]
    house.engine.close()
    again = local_house(disk).start()
    # What is repeated is not stored again, and the next one follows.
    assert [append(again, sequenced(3, sequence)) for sequence in (1, 2)] == [1, 2]
    # One that was not heard of since may be of any epoch and sequence.
    append(again, sequenced(1, 5, id=8))
    assert len(values(again)) == 4


def test_producers_are_remembered_within_a_limit() -> None:
    known = InspectedProducers(2)
    place = (b"t", 0)

    def note(id: int) -> None:
        header = batches.read_header(sequenced(0, 0, id=id))
        assert known.check(place, header) is None
        known.note(place, header, 0)

    note(1)
    note(2)
    assert len(known) == 2
    known.settled(place, batches.read_header(sequenced(0, 0, id=1)), 9)
    assert known.check(place, batches.read_header(sequenced(0, 0, id=1))) == 9
    note(3)
    # The one that wrote least recently is forgotten: it may begin at any sequence.
    assert len(known) == 2
    assert known.check(place, batches.read_header(sequenced(0, 8, id=1))) is None
    with pytest.raises(SequenceOutOfOrder):
        known.check(place, batches.read_header(sequenced(0, 8, id=2)))


def test_a_batch_that_asks_for_nothing_stays_as_it_is(house: House) -> None:
    data = batch((b"a", [("x", b"1")]), compression="zstd")
    append(house, data)
    chunk = house.done(house.engine.read(T0, 0, 1 << 20))
    assert bytes(chunk.data[batches.PLACE_BYTES :]) == data[batches.PLACE_BYTES :]


def test_headers_mean_nothing_in_topics_that_do_not_ask(house: House) -> None:
    house.done(house.broker.topics.alter("t", {"inspect": None}))
    append(house, batch((b"a", [DELAYED])))
    assert [one.headers for one in stored(house)] == [(DELAYED,)]


# ---- the setting is changed while a producer writes


def inspect(house: House, *, is_on: bool) -> None:
    house.done(house.broker.topics.alter("t", {"inspect": is_on}))


def plain_house(disk: SimulatedDisk | None = None) -> House:
    house = local_house(disk).start()
    if "t" not in house.broker.topics.by_name:
        house.done(house.broker.topics.create("t", 1))
    return house


def test_a_producer_goes_on_when_its_topic_is_inspected_and_when_it_is_not_any_more() -> None:
    house = plain_house()
    sequence = 0
    for is_on in (True, False, True, False):
        for _ in range(7):
            assert append(house, sequenced(0, sequence)) == sequence
            sequence += 1
        inspect(house, is_on=is_on)
    with pytest.raises(SequenceOutOfOrder):
        append(house, sequenced(0, sequence + 1))
    assert append(house, sequenced(1, 0)) == sequence
    with pytest.raises(ProducerFenced):
        append(house, sequenced(0, sequence))
    assert len(values(house)) == sequence + 1


@pytest.mark.parametrize("is_on", [True, False])
def test_a_batch_from_before_the_change_is_known_when_it_is_repeated(is_on: bool) -> None:
    house = plain_house()
    inspect(house, is_on=not is_on)
    for sequence in range(3):
        append(house, sequenced(0, sequence))
    inspect(house, is_on=is_on)
    assert [append(house, sequenced(0, sequence)) for sequence in (1, 2, 3, 2)] == [1, 2, 3, 2]
    assert values(house) == [b"0/0", b"0/1", b"0/2", b"0/3"]


@pytest.mark.parametrize("is_on", [True, False])
def test_batches_that_are_on_their_way_at_the_change_are_stored_once(is_on: bool) -> None:
    house = plain_house()
    inspect(house, is_on=not is_on)
    append(house, sequenced(0, 0))
    house.broker.topics.alter("t", {"inspect": is_on})
    pending = []
    for sequence in range(1, 6):
        pending.append(house.broker.sealed_batches.append("t", 0, sequenced(0, sequence))[0])
        house.scheduler.turn()
    pending += [
        house.broker.sealed_batches.append("t", 0, sequenced(0, sequence))[0]
        for sequence in range(3, 8)
    ]
    house.scheduler.run()
    assert [one.result() for one in pending] == [1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    assert values(house) == [f"0/{sequence}".encode() for sequence in range(8)]


@pytest.mark.parametrize("restarts_first", [True, False])
def test_a_producer_goes_on_after_a_restart_and_a_change(restarts_first: bool) -> None:
    disk = SimulatedDisk()
    house = plain_house(disk)
    append(house, sequenced(0, 0))
    inspect(house, is_on=True)
    append(house, sequenced(0, 1))
    append(house, sequenced(0, 2))
    if not restarts_first:
        inspect(house, is_on=False)
    house.engine.close()
    house = plain_house(disk)
    if restarts_first:
        append(house, sequenced(0, 3))
        inspect(house, is_on=False)
        append(house, sequenced(0, 4))
    append(house, sequenced(0, 5))
    # The log has it again, also across one more restart.
    house.engine.close()
    house = plain_house(disk)
    assert append(house, sequenced(0, 5)) == (5 if restarts_first else 3)
    with pytest.raises(SequenceOutOfOrder):
        append(house, sequenced(0, 7))


# ---- what fails


def full_house() -> tuple[House, RefusingDisk]:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Any:
        disks.append(RefusingDisk(disk))
        return disks[0]

    house = local_house(through=through).start()
    house.done(house.broker.topics.create("t", 1, {"inspect": True}))
    return house, disks[0]


def test_what_follows_a_batch_that_failed_waits_for_it_to_come_again() -> None:
    house, disk = full_house()
    append(house, sequenced(0, 0))
    disk.is_full = True
    pending = [
        house.broker.sealed_batches.append("t", 0, sequenced(0, sequence))[0] for sequence in (1, 2)
    ]
    assert isinstance(house.failed(pending[0]), DiskFull)
    assert isinstance(house.failed(pending[1]), DiskFull)
    disk.is_full = False
    with pytest.raises(SequenceOutOfOrder):
        append(house, sequenced(0, 2))
    assert [append(house, sequenced(0, sequence)) for sequence in (1, 2, 3)] == [1, 2, 3]
    assert values(house) == [b"0/0", b"0/1", b"0/2", b"0/3"]


def test_those_that_wait_are_not_stored_in_another_topic_of_that_name(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = house.broker.topics
    noted: Pending[Topic] = Pending()
    monkeypatch.setattr(Topics, "use_lanes", lambda *_: noted)
    datas = [batch((b"a", [("ms-lane", b"low")])), batch((b"b", []))]
    pending = [house.broker.sealed_batches.append("t", 0, data)[0] for data in datas]
    house.done(topics.delete("t"))
    noted.succeed(house.done(topics.create("t", 1, {"inspect": True})))
    assert all(isinstance(house.failed(one), TopicUnknown) for one in pending)
    assert stored(house) == []


def test_a_batch_is_told_when_its_lane_is_refused_at_once(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: Pending[Topic] = Pending.failed(DiskFull("full"))
    with monkeypatch.context() as changed:
        changed.setattr(Topics, "use_lanes", lambda *_: refused)
        data = batch((b"a", [("ms-lane", b"low")]))
        pending, _ = house.broker.sealed_batches.append("t", 0, data)
        assert isinstance(house.failed(pending), DiskFull)
    # Nobody waits behind it.
    assert append(house, data) == 0


# ---- idempotency keys


def test_a_producer_takes_no_more_keys_than_batches_it_may_repeat(house: House) -> None:
    for sequence in range(20):
        append(house, sequenced(0, sequence))
    assert len(house.broker.idempotency) == 5
    append(house, sequenced(0, 7, id=8))
    append(house, sequenced(1, 0))
    # Nobody repeats what was sent in the epoch before.
    assert len(house.broker.idempotency) == 2


def test_a_key_stays_when_the_batch_that_would_drop_it_is_not_stored() -> None:
    house, disk = full_house()
    for sequence in range(5):
        append(house, sequenced(0, sequence))
    disk.is_full = True
    pending, _ = house.broker.sealed_batches.append("t", 0, sequenced(0, 5))
    assert isinstance(house.failed(pending), DiskFull)
    assert len(house.broker.idempotency) == 5
    disk.is_full = False
    assert [append(house, sequenced(0, sequence)) for sequence in range(5, 20)] == [*range(5, 20)]
    # The one that was to be dropped then stays until its window is over.
    assert len(house.broker.idempotency) == 6


def test_the_batches_that_a_producer_may_repeat_are_known_after_a_restart() -> None:
    disk = SimulatedDisk()
    house = local_house(disk).start()
    house.done(house.broker.topics.create("t", 1, {"inspect": True}))
    for sequence in range(9):
        append(house, sequenced(0, sequence))
    house.engine.close()
    again = local_house(disk).start()
    assert [append(again, sequenced(0, sequence)) for sequence in range(4, 10)] == [*range(4, 10)]
    assert len(values(again)) == 10
