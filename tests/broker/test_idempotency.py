"""Idempotency keys: stored once within a window, whatever happens in between."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest

from broker.making import House, RefusingDisk, local_house, memory_house, options
from faults.simulated_disk import SimulatedDisk
from millstream.broker.ages import SPANS_MAX
from millstream.broker.idempotency import HEADER
from millstream.broker.publishing import Outgoing, Placed, Published
from millstream.engine.pending import Pending
from millstream.errors import (
    DiskFull,
    IdempotencyKeyConflict,
    IdempotencyKeyInvalid,
    TooManyIdempotencyKeys,
)
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.log.disk import Disk

WINDOW_MS = 600_000
HOUR_MS = 60 * 60 * 1000


def house_of(kind: str) -> House:
    house = memory_house() if kind == "memory" else local_house().start()
    house.done(house.broker.topics.create("t", 3))
    return house


@pytest.fixture(params=["memory", "local"])
def house(request: pytest.FixtureRequest) -> House:
    return house_of(request.param)


def restarted(house: House, now_ms: int | None = None) -> House:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    now_ms = now_ms or house.scheduler.clock.now_ms
    return local_house(disk.crash("nothing"), house.options, now_ms=now_ms).start()


def publish(
    house: House, key: str, *records: Outgoing, topic: str = "t", acks: str = "all"
) -> Pending[Published]:
    return house.broker.publisher.publish(
        topic,
        records or [Outgoing(None, b"v")],
        acks=acks,  # type: ignore[arg-type]
        idempotency_key=key,
    )


def count(house: House, topic: str = "t") -> int:
    """Records of all partitions."""
    partitions = house.broker.topics.get(topic).partitions
    ids = [PartitionId(topic, number) for number in range(partitions)]
    return sum(house.engine.offsets(id).high_watermark for id in ids)


def test_a_repeat_gets_the_place_of_the_first(house: House) -> None:
    first = house.done(publish(house, "a"))
    house.done(publish(house, "b"))
    again = house.done(publish(house, "a", Outgoing(b"another key", b"another value")))
    assert not first.is_duplicate
    assert again == Published(first.placed, is_duplicate=True)
    assert count(house) == 2


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_key_with_another_number_of_records_is_a_conflict(house: House, is_stored: bool) -> None:
    two = (Outgoing(None, b"1", partition=0), Outgoing(None, b"2", partition=1))
    first = publish(house, "a", *two)
    if is_stored:
        house.done(first)
    for records in ((Outgoing(None, b"1"),), (*two, Outgoing(None, b"3"))):
        error = house.failed(publish(house, "a", *records))
        assert isinstance(error, IdempotencyKeyConflict)
        assert error.fields == {"records": 2}
    house.done(first)
    assert house.done(publish(house, "a", *two)).is_duplicate
    assert count(house) == 2


def test_a_repeat_that_comes_before_the_answer_waits_for_it(house: House) -> None:
    first, second = publish(house, "a"), publish(house, "a")
    third = publish(house, "a")
    assert not second.is_done
    assert house.done(second) == house.done(third) == Published(house.done(first).placed, True)
    assert count(house) == 1


def test_publishes_of_one_turn_are_one_append(house: House) -> None:
    before = house.broker.views.counts.appends
    pendings = [publish(house, f"key-{n}", Outgoing(b"%d" % n, b"v")) for n in range(20)]
    repeat = publish(house, "key-7")
    placed = [house.done(pending).placed for pending in pendings]
    assert house.broker.views.counts.appends == before + 1
    assert count(house) == 20
    assert house.done(repeat).placed == placed[7]
    assert [house.done(publish(house, f"key-{n}")).placed for n in range(20)] == placed


def test_a_topic_deleted_in_the_same_turn_fails_its_publishes(house: House) -> None:
    first, deleting = publish(house, "a"), house.broker.topics.delete("t")
    house.done(deleting)
    house.scheduler.run()
    assert first.is_done
    assert len(house.broker.idempotency) == (0 if first.error else 1)


def test_records_of_one_publish_keep_their_order_and_their_times(house: House) -> None:
    records = [
        Outgoing(None, b"%d" % n, timestamp_ms=100 + n, partition=(n * 2) % 3) for n in range(8)
    ]
    # Others are in the same partitions, before, between and after.
    for number in range(3):
        house.broker.publisher.publish_one("t", None, b"other", partition=number)
    first = publish(house, "a", *records)
    house.broker.publisher.publish_one("t", None, b"other", partition=0)
    placed = house.done(first).placed
    assert [one.timestamp_ms for one in placed] == list(range(100, 108))
    assert house.done(publish(house, "a", *records)).placed == placed


def test_a_restart_remembers_and_knows_the_place() -> None:
    house = house_of("local")
    records = [Outgoing(b"%d" % n, b"v%d" % n, timestamp_ms=n) for n in range(20)]
    first = house.done(publish(house, "many", *records))
    single = house.done(publish(house, "one"))
    again = restarted(house)
    assert again.done(publish(again, "many", *records)) == Published(first.placed, True)
    assert again.done(publish(again, "one")) == Published(single.placed, True)
    assert count(again) == 21


def test_topics_do_not_share_keys_and_a_topic_made_again_has_none(house: House) -> None:
    house.done(house.broker.topics.create("u", 1))
    assert not house.done(publish(house, "a")).is_duplicate
    assert not house.done(publish(house, "a", topic="u")).is_duplicate
    house.done(house.broker.topics.delete("u"))
    house.done(house.broker.topics.create("u", 1))
    assert not house.done(publish(house, "a", topic="u")).is_duplicate


def test_after_the_window_a_key_is_new(house: House) -> None:
    clock = house.scheduler.clock
    house.done(publish(house, "a"))
    clock.advance((WINDOW_MS - 1) / 1000)
    assert house.done(publish(house, "a")).is_duplicate
    clock.advance(0.001)
    assert not house.done(publish(house, "a")).is_duplicate
    # The second use counts from its own time.
    clock.advance((WINDOW_MS - 1) / 1000)
    assert house.done(publish(house, "a")).is_duplicate
    assert count(house) == 2


@pytest.mark.parametrize("put_ms", [HOUR_MS, 2 * 24 * HOUR_MS, -HOUR_MS])
def test_a_wall_clock_that_is_put_changes_nothing(house: House, put_ms: int) -> None:
    clock = house.scheduler.clock
    house.done(publish(house, "a"))
    clock.now_ms += put_ms
    assert house.done(publish(house, "a")).is_duplicate
    # What is published after it counts from its own time, and holds up nothing.
    clock.advance(1)
    house.done(publish(house, "b"))
    clock.advance(WINDOW_MS / 1000 - 1.001)
    assert house.done(publish(house, "a")).is_duplicate
    clock.advance(0.001)
    assert house.done(publish(house, "b")).is_duplicate
    assert not house.done(publish(house, "a")).is_duplicate
    clock.now_ms -= put_ms
    clock.advance(1)
    assert not house.done(publish(house, "b")).is_duplicate


@pytest.mark.parametrize("put_ms", [HOUR_MS, -HOUR_MS])
def test_a_wall_clock_that_is_put_after_a_start_forgets_no_older_key(put_ms: int) -> None:
    house = house_of("local")
    house.done(publish(house, "a"))
    house = restarted(house)
    house.scheduler.clock.now_ms += put_ms
    house.scheduler.clock.advance((WINDOW_MS - 1) / 1000)
    assert house.done(publish(house, "a")).is_duplicate


def test_keys_are_forgotten_though_the_wall_clock_is_put_again_and_again(house: House) -> None:
    clock = house.scheduler.clock
    for n in range(2 * SPANS_MAX):
        clock.now_ms += (-1) ** n * HOUR_MS
        clock.advance(0.1)
        house.done(publish(house, f"key-{n}"))
    assert len(house.broker.idempotency) == 2 * SPANS_MAX
    # No longer than the furthest that it was put.
    house.scheduler.advance((WINDOW_MS + HOUR_MS) / 1000 + 60)
    assert len(house.broker.idempotency) == 0


def test_keys_are_forgotten_without_being_asked_for(house: House) -> None:
    for n in range(30):
        house.done(publish(house, f"key-{n}"))
    assert len(house.broker.idempotency) == 30
    house.scheduler.advance(WINDOW_MS / 1000 - 1)
    house.done(publish(house, "young"))
    house.scheduler.advance(60)
    assert len(house.broker.idempotency) == 1


def test_a_restart_after_the_window_remembers_nothing() -> None:
    house = house_of("local")
    house.done(publish(house, "a"))
    again = restarted(house, house.scheduler.clock.now_ms + WINDOW_MS)
    again.scheduler.run()
    assert len(again.broker.idempotency) == 0
    assert not again.done(publish(again, "a")).is_duplicate


def test_there_is_a_limit_that_expiry_makes_room_in() -> None:
    house = memory_house(replace(options(), idempotency_keys_max=3))
    house.done(house.broker.topics.create("t", 1))
    for key in "abc":
        house.done(publish(house, key))
    error = house.failed(publish(house, "d"))
    assert isinstance(error, TooManyIdempotencyKeys)
    assert error.fields["limit"] == 3
    assert count(house) == 3
    assert house.done(publish(house, "a")).is_duplicate
    house.scheduler.clock.advance(WINDOW_MS / 1000)
    assert not house.done(publish(house, "d")).is_duplicate


@pytest.mark.parametrize("key", ["", " ", "a b", "ä", "x" * 256, "a\n", "\x7f"])
def test_a_key_is_visible_ascii(house: House, key: str) -> None:
    assert isinstance(house.failed(publish(house, key)), IdempotencyKeyInvalid)
    assert count(house) == 0


def test_the_longest_key_is_taken(house: House) -> None:
    assert not house.done(publish(house, "~" * 255)).is_duplicate
    assert house.done(publish(house, "~" * 255)).is_duplicate


def test_a_bad_record_does_not_use_up_the_key(house: House) -> None:
    house.failed(publish(house, "a", Outgoing(None, b"v", partition=9)))
    assert not house.done(publish(house, "a")).is_duplicate


def test_a_refused_publish_does_not_use_up_the_key() -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Disk:
        disks.append(RefusingDisk(disk))
        return cast("Disk", disks[0])

    house = local_house(through=through).start()
    house.done(house.broker.topics.create("t", 3))
    disks[0].is_full = True
    first, repeat = publish(house, "a"), publish(house, "a")
    plain = house.broker.publisher.publish_one("t", None, b"v")
    for pending in cast("list[Pending[object]]", [first, repeat, plain]):
        assert isinstance(house.failed(pending), DiskFull)
    assert len(house.broker.idempotency) == 0
    assert house.broker.traffic.by_topic["t"].messages_failed == 2
    disks[0].is_full = False
    assert not house.done(publish(house, "a")).is_duplicate
    assert house.done(publish(house, "a")).is_duplicate
    assert count(house) == 1


def test_records_that_are_gone_have_no_place(house: House) -> None:
    placed = house.done(publish(house, "a")).placed[0]
    house.done(house.broker.topics.purge("t"))
    again = house.done(publish(house, "a"))
    assert again.is_duplicate
    assert again.placed == [Placed(placed.partition, -1, house.scheduler.clock.now_ms)]
    assert count(house) == 1


def test_the_digest_rides_in_a_header_of_ours(house: House) -> None:
    placed = house.done(publish(house, "a", Outgoing(None, b"v", (("mine", b"1"),)))).placed[0]
    fetched = house.broker.reader.fetch("t", placed.partition, 0, 1, 1000)
    names = [name for name, _ in house.done(fetched).records[0].headers]
    assert names == ["mine", HEADER]


def test_acks_none_is_stored_once_too(house: House) -> None:
    first = publish(house, "a", acks="none")
    assert first.is_done
    second = publish(house, "a", acks="none")
    house.scheduler.run()
    assert house.done(second).is_duplicate
    assert count(house) == 1
