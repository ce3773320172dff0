"""Reading by offset and time, and waiting for more."""

from __future__ import annotations

from random import Random

import pytest

from broker.making import House, local_house, memory_house
from millstream.broker.publishing import Outgoing
from millstream.broker.reading import AHEAD_MAX, Fetched
from millstream.engine.upkeep import UpkeepSettings
from millstream.errors import OffsetOutOfRange, PartitionUnknown, TopicReserved, TopicUnknown
from millstream.log import batch as batches
from millstream.log.partition import PartitionId


@pytest.fixture(params=["memory", "local"])
def house(request: pytest.FixtureRequest) -> House:
    house = memory_house() if request.param == "memory" else local_house().start()
    house.done(house.broker.topics.create("t", 2))
    return house


def fill(house: House, *counts: int, size: int = 10, number: int = 0) -> None:
    """Batches of so many records; a value is its number."""
    start = house.engine.offsets(PartitionId("t", number)).high_watermark
    for count in counts:
        fields = [(start + n, b"k", b"%0*d" % (size, start + n), ()) for n in range(count)]
        house.done(house.broker.publisher.publish_batch("t", number, batches.encode(fields)))
        start += count


def fetch(
    house: House, offset: int, count: int = 1000, size: int = 1 << 20, number: int = 0
) -> Fetched:
    return house.done(house.broker.reader.fetch("t", number, offset, count, size))


def offsets_of(fetched: Fetched) -> list[int]:
    return [record.offset for record in fetched.records]


def test_records_from_an_offset_on(house: House) -> None:
    fill(house, 3, 1, 5)
    fetched = fetch(house, 2)
    assert offsets_of(fetched) == [2, 3, 4, 5, 6, 7, 8]
    assert (fetched.next_offset, fetched.high_watermark, fetched.start) == (9, 9, 0)
    assert [int(record.value or b"") for record in fetched.records] == offsets_of(fetched)
    assert fetch(house, 9) == Fetched([], 9, 9, 0)


def test_as_many_as_asked_for_and_on_from_there(house: House) -> None:
    fill(house, 10, 10)
    seen: list[int] = []
    offset = 0
    while fetched := fetch(house, offset, 3).records:
        assert len(fetched) <= 3
        seen += [record.offset for record in fetched]
        offset = seen[-1] + 1
    assert seen == list(range(20))


def test_at_least_one_record_and_not_many_more_bytes(house: House) -> None:
    fill(house, 20, size=1000)
    assert len(fetch(house, 0, 100, 1).records) == 1
    assert len(fetch(house, 1, 100, 5000).records) == 5


def test_many_small_batches_are_read_at_once(house: House) -> None:
    fill(house, *[1] * 300)
    assert offsets_of(fetch(house, 0, 250)) == list(range(250))


def test_any_way_of_reading_on_gives_the_same_records(house: House) -> None:
    random = Random(5)
    fill(house, *[random.randint(1, 40) for _ in range(30)], size=50)
    end = house.engine.offsets(PartitionId("t", 0)).high_watermark
    for _ in range(20):
        offset, seen = random.randrange(end), []
        first = offset
        while offset < end:
            # Sometimes on from where the last one stopped, sometimes somewhere else.
            fetched = fetch(house, offset, random.randint(1, 60), random.choice((100, 10_000)))
            seen += offsets_of(fetched)
            offset = fetched.next_offset
        assert seen == list(range(first, end))


def test_what_is_kept_for_reading_on_is_bounded(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = house.broker.reader
    fill(house, AHEAD_MAX * 3 + 10)
    for offset in range(0, AHEAD_MAX * 3 + 6, 3):
        fetch(house, offset, 2)
    assert len(reader._ahead) == AHEAD_MAX
    monkeypatch.setattr("millstream.broker.reading.AHEAD_BYTES_MAX", 200_000)
    fields = [(0, None, b"x" * 100_000, ()) for _ in range(3)]
    batch = batches.encode(fields, compression="gzip")
    assert len(batch) < 10_000
    house.done(house.broker.publisher.publish_batch("t", 1, batch))
    fetch(house, 0, 2, number=1)
    assert reader._ahead == {}
    assert reader._ahead_bytes == 0


def test_a_reader_that_goes_on_does_not_open_the_batch_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(house, 1000)
    opened: list[int] = []
    decode = batches.decode

    def watched(data: memoryview) -> list[batches.Record]:
        opened.append(len(data))
        return decode(data)

    monkeypatch.setattr(batches, "decode", watched)
    offset = 0
    while offset < 1000:
        offset = fetch(house, offset, 100).next_offset
    assert len(opened) == 1


def test_what_was_kept_is_not_given_after_a_purge_or_to_another_topic(house: House) -> None:
    fill(house, 10)
    assert fetch(house, 0, 5).next_offset == 5
    house.done(house.broker.topics.purge("t"))
    with pytest.raises(OffsetOutOfRange):
        fetch(house, 5)
    fill(house, 10)
    assert fetch(house, 10, 5).next_offset == 15
    house.done(house.broker.topics.delete("t"))
    house.done(house.broker.topics.create("t", 1))
    fill(house, 16)
    assert fetch(house, 15).records[0].timestamp == 15


def test_offsets_outside_are_an_error_that_says_what_there_is(house: House) -> None:
    fill(house, 3)
    for offset in (-1, 4):
        error = house.failed(house.broker.reader.fetch("t", 0, offset, 1, 1))
        assert isinstance(error, OffsetOutOfRange)
        assert (error.fields["start"], error.fields["end"]) == (0, 3)
    for number in (-1, 2):
        unknown = house.failed(house.broker.reader.fetch("t", number, 0, 1, 1))
        assert isinstance(unknown, PartitionUnknown)
    assert isinstance(house.failed(house.broker.reader.fetch("x", 0, 0, 1, 1)), TopicUnknown)
    reserved = house.failed(house.broker.reader.fetch("__topics", 0, 0, 1, 1))
    assert isinstance(reserved, TopicReserved)


def test_whole_batches_are_given_as_they_are(house: House) -> None:
    fill(house, 3, 4)
    data = house.done(house.broker.reader.read_batches("t", 0, 4, 1 << 20))
    ((_, header),) = batches.walk(data)
    assert (header.base_offset, header.count) == (3, 4)
    assert house.done(house.broker.reader.read_batches("t", 0, 7, 1 << 20)) == b""


def test_an_offset_by_time(house: House) -> None:
    for time in (100, 200, 300):
        house.done(house.broker.publisher.publish("t", [Outgoing(None, b"", (), time, 1)]))
    found = {
        time: house.done(house.broker.reader.offset_at("t", 1, time))
        for time in (0, 100, 101, 200, 300, 301)
    }
    assert found == {0: 0, 100: 0, 101: 1, 200: 1, 300: 2, 301: 3}
    assert house.done(house.broker.reader.offset_at("t", 0, 0)) == 0


def test_what_compaction_removed_is_passed_over() -> None:
    house = local_house(upkeep=UpkeepSettings(compaction_interval_s=5.0)).start()
    settings = {"compact": True, "segment_bytes": "64K", "message_bytes_max": "200K"}
    house.done(house.broker.topics.create("t", 1, settings))
    random, newest = Random(3), dict[bytes, int]()
    for _ in range(80):
        keys = [b"%d" % random.randrange(9) for _ in range(4)]
        records = [Outgoing(key, b"x" * 2000) for key in keys]
        placed = house.done(house.broker.publisher.publish("t", records)).placed
        newest |= {key: one.offset for key, one in zip(keys, placed, strict=True)}
    # A message larger than a segment has one for itself.
    house.done(house.broker.publisher.publish_one("t", b"large", b"x" * 150_000))
    house.scheduler.advance(20)
    for count_max in (1, 3, 1000):
        offset, seen = 0, dict[bytes | None, int]()
        while fetched := fetch(house, offset, count_max, 5000).records:
            seen |= {record.key: record.offset for record in fetched}
            assert fetched[0].offset >= offset
            offset = fetched[-1].offset + 1
        assert {key: at for key, at in seen.items() if key != b"large"} == newest
        assert b"large" in seen
    assert len(fetch(house, 0, 1000, 1 << 30).records) < 150


# ---- waiting


def test_a_wait_ends_when_there_is_something(house: House) -> None:
    waiting = house.broker.reader.wait("t", {0: 0, 1: 0}, 10.0)
    house.scheduler.run()
    assert not waiting.pending.is_done
    fill(house, 1, number=1)
    assert house.done(waiting.pending) is True
    assert house.done(house.broker.reader.wait("t", {1: 0}, 10.0).pending) is True


def test_a_wait_ends_when_the_time_is_over(house: House) -> None:
    waiting = house.broker.reader.wait("t", {0: 0}, 10.0)
    house.scheduler.advance(9.9)
    assert not waiting.pending.is_done
    house.scheduler.advance(0.2)
    assert house.done(waiting.pending) is False


def test_a_wait_can_be_given_up(house: House) -> None:
    timers = len(house.timers)
    waits = [house.broker.reader.wait("t", {0: 0, 1: 0}, 10.0) for _ in range(10)]
    for waiting in waits:
        waiting.cancel()
        assert waiting.pending.result() is False
    assert len(house.timers) == timers
    fill(house, 1)


def test_a_wait_ends_when_the_topic_goes(house: House) -> None:
    waiting = house.broker.reader.wait("t", {0: 0}, 10.0)
    house.done(house.broker.topics.delete("t"))
    assert house.done(waiting.pending) is True
    with pytest.raises(TopicUnknown):
        house.broker.reader.wait("t", {0: 0}, 1.0)
