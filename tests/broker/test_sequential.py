"""Sequential consumers: in order, and on from the first record that was not acked."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from broker.grouping import group_options, house_with, make_unreadable, publish
from broker.making import House, RefusingDisk, local_house, memory_house
from faults.simulated_disk import SimulatedDisk
from millstream.broker import sequential
from millstream.broker.consuming import ConsumingOptions
from millstream.broker.reading import Fetched, Reader
from millstream.broker.sequential import SequentialConsumer
from millstream.engine.pending import Pending
from millstream.errors import (
    ConsumerFenced,
    ConsumerUnknown,
    DiskFull,
    LogDamaged,
    OffsetOutOfRange,
    ParameterInvalid,
    PartitionUnknown,
    TooManyGroups,
    TopicUnknown,
)

if TYPE_CHECKING:
    from millstream.log.disk import Disk


def values(house: House, consumer: SequentialConsumer, count: int = 100) -> list[str]:
    given = house.done(consumer.next(count))
    return [(one.record.value or b"").decode() for one in given]


def test_records_come_in_order_and_each_once() -> None:
    house = house_with(partitions=1)
    publish(house, *"abcde")
    consumer = house.done(house.broker.sequential.open("orders"))
    assert consumer.is_new
    assert values(house, consumer, 2) == ["a", "b"]
    assert values(house, consumer, 2) == ["c", "d"]
    assert values(house, consumer) == ["e"]
    assert values(house, consumer) == []


def test_who_comes_back_goes_on_at_the_first_record_that_is_not_acked() -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("orders", 1))
    publish(house, *"abcde")
    consumer = house.done(house.broker.sequential.open("orders"))
    assert values(house, consumer, 4) == ["a", "b", "c", "d"]
    assert house.done(consumer.ack(0, 1)) == 2
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    house = local_house(disk.crash("nothing")).start()
    back = house.done(house.broker.sequential.open("orders", consumer.id))
    assert not back.is_new
    assert back.positions() == {0: 2}
    assert values(house, back) == ["c", "d", "e"]


def test_an_ack_covers_all_before_it_and_repeating_one_does_no_harm() -> None:
    house = house_with(partitions=1)
    publish(house, *"abc")
    consumer = house.done(house.broker.sequential.open("orders"))
    values(house, consumer)
    assert house.done(consumer.ack(0, 2)) == 3
    assert house.done(consumer.ack(0, 0)) == 3
    assert consumer.positions() == {0: 3}


def test_what_was_given_before_a_restart_can_be_acked_after_it() -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("orders", 1))
    publish(house, *"abcd")
    consumer = house.done(house.broker.sequential.open("orders"))
    assert values(house, consumer, 3) == ["a", "b", "c"]
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    house = local_house(disk.crash("nothing")).start()
    found = house.done(house.broker.sequential.find("orders", consumer.id))
    assert house.done(found.ack(0, 1)) == 2
    # It is not given again, and what came after the restart has to be given first.
    publish(house, "e")
    assert isinstance(house.failed(found.ack(0, 4)), OffsetOutOfRange)
    assert values(house, found) == ["c", "d", "e"]
    assert house.done(found.ack(0, 4)) == 5


def test_what_is_acked_while_it_is_read_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    house = house_with(partitions=1)
    publish(house, *"abc")
    first = house.done(house.broker.sequential.open("orders"))
    assert values(house, first, 2) == ["a", "b"]
    back = house.done(house.broker.sequential.open("orders", first.id))
    fetch, gate = Reader.fetch, Pending[Fetched]()
    monkeypatch.setattr(Reader, "fetch", lambda *_: gate)
    reading = back.next(100)
    monkeypatch.undo()
    assert house.done(back.ack(0, 1)) == 2
    gate.succeed(house.done(fetch(house.broker.reader, "orders", 0, 0, 100, 1000)))
    assert house.done(reading) == []
    assert values(house, back) == ["c"]


def test_only_what_was_given_can_be_acked() -> None:
    house = house_with(partitions=2)
    publish(house, *"abc")
    consumer = house.done(house.broker.sequential.open("orders"))
    values(house, consumer, 1)
    for offset in (1, 3, -1, 2**63):
        assert isinstance(house.failed(consumer.ack(0, offset)), OffsetOutOfRange)
    assert isinstance(house.failed(consumer.ack(7, 0)), PartitionUnknown)
    assert consumer.positions() == {0: 0, 1: 0}


def test_a_consumer_of_all_partitions_keeps_each_in_order_and_none_waiting() -> None:
    house = house_with(partitions=3)
    for partition in range(3):
        publish(house, *(f"{partition}{name}" for name in "abc"), partition=partition)
    consumer = house.done(house.broker.sequential.open("orders"))
    seen = [value for _ in range(5) for value in values(house, consumer, 2)]
    assert len(seen) == 9
    for partition in range(3):
        mine = [value for value in seen if value[0] == str(partition)]
        assert mine == sorted(mine)
    assert {value[0] for value in seen[:6]} == {"0", "1", "2"}


def test_one_partition_and_where_to_start() -> None:
    house = house_with(partitions=2)
    publish(house, *"abc", partition=1)
    sequential_ = house.broker.sequential
    late = house.done(sequential_.open("orders", partition=1, start="latest"))
    middle = house.done(sequential_.open("orders", partition=1, start=1))
    publish(house, "d", partition=1)
    assert values(house, late) == ["d"]
    assert values(house, middle) == ["b", "c", "d"]
    outside = sequential_.open("orders", partition=1, start=5)
    assert isinstance(house.failed(outside), OffsetOutOfRange)
    assert isinstance(house.failed(sequential_.open("orders", partition=2)), PartitionUnknown)
    # A position that is there counts more than where one wants to start.
    again = house.done(sequential_.open("orders", middle.id, partition=1, start="latest"))
    assert values(house, again) == ["b", "c", "d"]


def test_a_consumer_of_one_partition_does_not_come_back_for_another() -> None:
    house = house_with(partitions=2)
    publish(house, "a", partition=1)
    publish(house, "b", partition=0)
    sequential_ = house.broker.sequential
    consumer = house.done(sequential_.open("orders", partition=1))
    error = house.failed(sequential_.open("orders", consumer.id, partition=0))
    assert isinstance(error, ParameterInvalid)
    assert error.fields == {"parameter": "partition"}
    assert values(house, house.done(sequential_.open("orders", consumer.id))) == ["a"]


def test_a_consumer_of_one_partition_leaves_the_others_also_after_a_restart() -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("orders", 2))
    publish(house, "other", partition=0)
    publish(house, *"abc", partition=1)
    consumer = house.done(house.broker.sequential.open("orders", partition=1))
    assert values(house, consumer) == ["a", "b", "c"]
    house.done(consumer.ack(1, 0))
    error = house.failed(consumer.ack(0, 0))
    assert isinstance(error, PartitionUnknown)
    assert "was given nothing of partition 0" in error.message
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    house = local_house(disk.crash("nothing")).start()
    found = house.done(house.broker.sequential.find("orders", consumer.id))
    assert values(house, found) == ["b", "c"]
    house.done(found.ack(1, 1))
    back = house.done(house.broker.sequential.open("orders", consumer.id))
    assert values(house, back) == ["c"]


def test_a_second_one_with_the_same_id_fences_the_first() -> None:
    house = house_with(partitions=1)
    publish(house, "a")
    first = house.done(house.broker.sequential.open("orders"))
    values(house, first)
    waiting = first.wait(30)
    second = house.done(house.broker.sequential.open("orders", first.id))
    assert waiting.pending.result()
    assert isinstance(house.failed(first.next(1)), ConsumerFenced)
    assert isinstance(house.failed(first.ack(0, 0)), ConsumerFenced)
    assert values(house, second) == ["a"]


def test_after_an_answer_that_got_lost_the_same_comes_when_it_is_opened_again() -> None:
    house = house_with(partitions=1)
    publish(house, *"abc")
    opened = house.done(house.broker.sequential.open("orders"))
    assert values(house, opened, 1) == ["a"]
    house.done(opened.ack(0, 0))
    assert values(house, opened, 1) == ["b"]
    assert values(house, opened, 1) == ["c"]
    again = house.done(house.broker.sequential.open("orders", opened.id))
    assert values(house, again) == ["b", "c"]


def test_it_waits_for_more() -> None:
    house = house_with(partitions=2)
    consumer = house.done(house.broker.sequential.open("orders"))
    waiting = consumer.wait(30)
    publish(house, "a", partition=1)
    assert house.done(waiting.pending)
    assert values(house, consumer) == ["a"]
    waiting = consumer.wait(1)
    house.scheduler.advance(1.1)
    assert not waiting.pending.result()


def test_calls_one_by_one_find_the_consumer_at_work() -> None:
    house = house_with(partitions=1)
    publish(house, *"abc")
    opened = house.done(house.broker.sequential.open("orders"))
    assert values(house, opened, 1) == ["a"]
    found = house.done(house.broker.sequential.find("orders", opened.id))
    assert values(house, found, 1) == ["b"]
    # Two at the same time do not get the same.
    one, two = found.next(1), found.next(1)
    assert [item.record.offset for item in house.done(one) + house.done(two)] == [2]


def test_the_quietest_of_too_many_open_ones_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sequential, "OPEN_MAX", 1)
    house = house_with(partitions=1)
    publish(house, "a")
    first = house.done(house.broker.sequential.open("orders"))
    assert values(house, first) == ["a"]
    house.done(house.broker.sequential.open("orders"))
    assert isinstance(house.failed(first.next(1)), ConsumerFenced)
    found = house.done(house.broker.sequential.find("orders", first.id))
    assert values(house, found) == ["a"]


def test_records_that_retention_took_are_stepped_over_and_counted() -> None:
    house = house_with(partitions=1)
    publish(house, *"abc")
    consumer = house.done(house.broker.sequential.open("orders"))
    house.done(house.broker.topics.purge("orders"))
    publish(house, "d")
    assert values(house, consumer) == ["d"]
    assert consumer.skipped == 3


def test_what_was_read_before_a_damaged_partition_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with(partitions=3)
    for partition in range(3):
        publish(house, f"{partition}a", f"{partition}b", partition=partition)
    consumer = house.done(house.broker.sequential.open("orders"))
    make_unreadable(monkeypatch, 1)
    assert values(house, consumer) == ["0a", "0b", "2a", "2b"]
    assert isinstance(house.failed(consumer.next(100)), LogDamaged)
    publish(house, "2c", partition=2)
    assert values(house, consumer) == ["2c"]
    monkeypatch.undo()
    assert values(house, consumer) == ["1a", "1b"]


def test_a_trim_in_the_middle_of_a_read_loses_nothing_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    house = house_with(partitions=2)
    publish(house, "0a", partition=0)
    publish(house, "1a", partition=1)
    consumer = house.done(house.broker.sequential.open("orders"))
    fetch = Reader.fetch

    def trimmed(self: Reader, topic: str, partition: int, *how: int) -> Pending[Fetched]:
        if partition == 1:
            return Pending.failed(OffsetOutOfRange("orders/1 has offsets 1 to 1; 0 is outside"))
        return fetch(self, topic, partition, *how)

    monkeypatch.setattr(Reader, "fetch", trimmed)
    assert values(house, consumer) == ["0a"]
    assert values(house, consumer) == []
    monkeypatch.undo()
    house.done(house.broker.topics.purge("orders"))
    publish(house, "1b", partition=1)
    assert values(house, consumer) == ["1b"]


def test_a_topic_made_again_is_not_the_consumers() -> None:
    house = house_with(partitions=1)
    consumer = house.done(house.broker.sequential.open("orders"))
    house.done(house.broker.topics.delete("orders"))
    assert isinstance(house.failed(consumer.next(1)), TopicUnknown)
    house.done(house.broker.topics.create("orders", 1))
    publish(house, "a")
    assert isinstance(house.failed(consumer.next(1)), TopicUnknown)
    again = house.broker.sequential.open("orders", consumer.id)
    assert isinstance(house.failed(again), ConsumerUnknown)


def test_unknown_and_deleted_consumers_and_too_many() -> None:
    house = memory_house(group_options(ConsumingOptions(consumers_max=1)))
    house.done(house.broker.topics.create("orders", 1))
    sequential_ = house.broker.sequential
    for id in ("0" * 24, "", "../etc", "ä" * 24):
        assert isinstance(house.failed(sequential_.open("orders", id)), ConsumerUnknown)
        assert isinstance(house.failed(sequential_.find("orders", id)), ConsumerUnknown)
    consumer = house.done(sequential_.open("orders"))
    assert len(sequential_) == 1
    assert isinstance(house.failed(sequential_.open("orders")), TooManyGroups)
    house.done(sequential_.delete("orders", consumer.id))
    assert isinstance(house.failed(consumer.next(1)), ConsumerFenced)
    assert isinstance(house.failed(sequential_.delete("orders", consumer.id)), ConsumerUnknown)
    house.done(sequential_.open("orders"))


def test_who_could_not_be_opened_is_not_at_work() -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Disk:
        disks.append(RefusingDisk(disk))
        return cast("Disk", disks[0])

    house = local_house(through=through).start()
    house.done(house.broker.topics.create("orders", 1))
    consumer = house.done(house.broker.sequential.open("orders"))
    house.done(house.broker.topics.add_partitions("orders", 2))
    publish(house, "a", partition=1)
    disks[0].is_full = True
    assert isinstance(house.failed(house.broker.sequential.open("orders", consumer.id)), DiskFull)
    disks[0].is_full = False
    found = house.done(house.broker.sequential.find("orders", consumer.id))
    assert values(house, found) == ["a"]
    assert house.done(found.ack(1, 0)) == 1


def test_a_topic_that_grew_has_its_new_partitions_read_from_the_start() -> None:
    house = house_with(partitions=1)
    consumer = house.done(house.broker.sequential.open("orders", start="latest"))
    house.done(house.broker.topics.add_partitions("orders", 2))
    publish(house, "new", partition=1)
    back = house.done(house.broker.sequential.open("orders", consumer.id))
    assert values(house, back) == ["new"]


def test_a_consumer_of_all_partitions_reads_those_that_are_added_while_it_is_open() -> None:
    house = house_with(partitions=1)
    consumer = house.done(house.broker.sequential.open("orders", start="latest"))
    alone = house.done(house.broker.sequential.open("orders", partition=0))
    assert values(house, consumer) == []
    waiting, other = consumer.wait(20.0), alone.wait(20.0)
    house.done(house.broker.topics.add_partitions("orders", 3))
    assert house.done(waiting.pending), "who waits is told"
    assert not other.pending.is_done
    publish(house, "new", partition=2)
    assert values(house, consumer) == ["new"]
    assert values(house, alone) == []
    assert house.done(consumer.ack(2, 0)) == 1
    assert consumer.positions() == {0: 0, 1: 0, 2: 1}
    publish(house, "newer", partition=2)
    back = house.done(house.broker.sequential.open("orders", consumer.id))
    assert values(house, back) == ["newer"]


def test_a_partition_that_was_added_is_given_only_once_its_position_is_kept() -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Disk:
        disks.append(RefusingDisk(disk))
        return cast("Disk", disks[0])

    house = local_house(through=through).start()
    house.done(house.broker.topics.create("orders", 1))
    consumer = house.done(house.broker.sequential.open("orders"))
    publish(house, "a")
    house.done(house.broker.topics.add_partitions("orders", 2))
    publish(house, "b", partition=1)
    disks[0].is_full = True
    assert isinstance(house.failed(consumer.next(1)), DiskFull)
    assert consumer.partitions == (0,)
    disks[0].is_full = False
    assert values(house, consumer) == ["a", "b"]
    assert house.done(consumer.ack(1, 0)) == 1
