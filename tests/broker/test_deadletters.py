"""Where dead letters go, and what they say."""

from __future__ import annotations

import pytest

from broker.making import House, local_house, memory_house, options
from millstream.broker.dead_letter_values import HEADERS_BYTES_MAX
from millstream.broker.deadletters import (
    DeadFacts,
    DeadLetter,
    dead_letter_topic,
    is_dead_letter_topic,
)
from millstream.broker.topics import Topic
from millstream.errors import TooManyTopics
from millstream.log import batch as batches
from millstream.log.batch import LANES, Record
from millstream.log.partition import PartitionId

FACTS = DeadFacts("billing", 4, "deliveries", "no such account", 1_000, 9_000)
NORMAL = LANES.index("normal")
DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def house() -> House:
    return memory_house()


def make(house: House, name: str = "orders", **settings: object) -> Topic:
    return house.done(house.broker.topics.create(name, 3, settings))


def letter(
    offset: int = 7,
    *,
    partition: int = 1,
    lane: int = NORMAL,
    facts: DeadFacts = FACTS,
    headers: batches.Headers = (("a", b"b"),),
    value: bytes | None = b"value",
) -> DeadLetter:
    return DeadLetter(partition, Record(offset, 123, b"key", value, headers), lane, facts)


def put(house: House, topic: Topic, *letters: DeadLetter) -> Topic:
    dead_letters = house.broker.dead_letters
    dlq = house.done(dead_letters.ensure(topic))
    house.done(house.engine.append_atomic(dead_letters.entries(topic, dlq, letters)))
    return dlq


def stored(house: House, dlq: Topic, partition: int) -> list[tuple[batches.Header, list[Record]]]:
    data = house.done(house.engine.read(PartitionId(dlq.name, partition), 0, 1 << 26)).data
    return [
        (header, batches.decode(data[at : at + header.size])) for at, header in batches.walk(data)
    ]


# ---- the topic


def test_a_dead_letter_topic_is_made_like_its_topic(house: House) -> None:
    topic = make(house, fsync="interval", message_bytes_max=5000, retention_ms=3 * DAY_MS)
    dlq = house.done(house.broker.dead_letters.ensure(topic))
    assert (dlq.name, dlq.partitions) == ("orders.dlq", 3)
    assert dlq.settings.fsync == "interval"
    assert dlq.settings.message_bytes_max == 5000 + HEADERS_BYTES_MAX
    assert dlq.settings.retention_ms == 6 * DAY_MS
    assert house.done(house.broker.dead_letters.ensure(topic)) is dlq


def test_a_topic_that_keeps_for_ever_keeps_its_dead_letters_for_ever(house: House) -> None:
    topic = make(house, retention_ms="unlimited")
    dlq = house.done(house.broker.dead_letters.ensure(topic))
    assert dlq.settings.retention_ms is None


def test_many_who_need_it_at_once_get_the_same(house: House) -> None:
    topic = make(house)
    pendings = [house.broker.dead_letters.ensure(topic) for _ in range(5)]
    house.scheduler.run()
    assert len({one.result().uuid for one in pendings}) == 1


def test_it_grows_with_its_topic(house: House) -> None:
    topic = make(house)
    house.done(house.broker.dead_letters.ensure(topic))
    topic = house.done(house.broker.topics.add_partitions("orders", 5))
    assert house.done(house.broker.dead_letters.ensure(topic)).partitions == 5


def test_one_that_was_made_by_hand_is_made_to_fit(house: House) -> None:
    topic = make(house)
    house.done(
        house.broker.topics.create("orders.dlq", 1, {"compact": True, "message_bytes_max": 10})
    )
    dlq = house.done(house.broker.dead_letters.ensure(topic))
    assert dlq.partitions == 3
    assert not dlq.settings.compact
    assert dlq.settings.message_bytes_max > topic.settings.message_bytes_max


def test_the_largest_message_that_can_be_set_is_not_passed(house: House) -> None:
    topic = make(house, message_bytes_max="64M")
    dlq = house.done(house.broker.dead_letters.ensure(topic))
    assert dlq.settings.message_bytes_max == 64 * 1024 * 1024


def test_no_room_for_another_topic_is_said_and_tried_again() -> None:
    house = memory_house(options(topics_max=1))
    topic = make(house)
    ensure = house.broker.dead_letters.ensure
    assert isinstance(house.failed(ensure(topic)), TooManyTopics)
    assert isinstance(house.failed(ensure(topic)), TooManyTopics)


def test_dead_letter_topics_are_known_by_their_name() -> None:
    assert is_dead_letter_topic("orders.dlq")
    assert not is_dead_letter_topic("orders")
    assert not is_dead_letter_topic(".dlq")
    assert not is_dead_letter_topic("orders.dlq.more")


def test_a_long_name_is_cut_and_told_apart(house: House) -> None:
    assert dead_letter_topic("a" * 245) == "a" * 245 + ".dlq"
    long, other = "a" * 246, "a" * 245 + "b"
    names = {dead_letter_topic(long), dead_letter_topic(other), dead_letter_topic("a" * 245)}
    assert len(names) == 3
    assert {len(name) for name in names} == {249}
    assert all(is_dead_letter_topic(name) for name in names)
    dlq = put(house, make(house, long), letter())
    assert dlq.name == dead_letter_topic(long)
    [(_, [record])] = stored(house, dlq, 1)
    assert ("ms-dead-topic", long.encode()) in record.headers


# ---- the records


def test_a_dead_letter_is_the_record_with_why(house: House) -> None:
    dlq = put(house, make(house), letter())
    [(header, [record])] = stored(house, dlq, 1)
    assert (record.timestamp, record.key, record.value) == (123, b"key", b"value")
    assert record.headers == (
        ("a", b"b"),
        ("ms-dead-topic", b"orders"),
        ("ms-dead-partition", b"1"),
        ("ms-dead-offset", b"7"),
        ("ms-dead-group", b"billing"),
        ("ms-dead-deliveries", b"4"),
        ("ms-dead-reason", b"deliveries"),
        ("ms-dead-error", b"no such account"),
        ("ms-dead-first-failure", b"1000"),
        ("ms-dead-last-failure", b"9000"),
    )
    assert header.attributes == 0
    assert stored(house, dlq, 0) == stored(house, dlq, 2) == []


def test_a_batch_holds_one_lane_and_keeps_the_order(house: House) -> None:
    high = LANES.index("high")
    lane_header = (("ms-lane", b"high"),)
    dlq = put(
        house,
        make(house),
        letter(1),
        letter(2, lane=high, headers=lane_header),
        letter(3),
        letter(4, lane=high, headers=lane_header),
        letter(5, partition=0),
    )
    seen = [
        (header.attributes >> batches.LANE_SHIFT, [origin(record) for record in records])
        for header, records in stored(house, dlq, 1)
    ]
    assert sorted(seen) == [(0, [1, 3]), (high + 1, [2, 4])]
    [(_, [record])] = stored(house, dlq, 0)
    assert origin(record) == 5


def origin(record: Record) -> int:
    return int(dict(record.headers)["ms-dead-offset"] or b"")


def test_a_lane_that_only_the_batch_had_is_in_the_headers_too(house: House) -> None:
    dlq = put(house, make(house), letter(lane=LANES.index("low"), headers=()))
    [(_, [record])] = stored(house, dlq, 1)
    assert ("ms-lane", b"low") in record.headers


def test_facts_of_an_earlier_end_give_way(house: House) -> None:
    headers = (("ms-dead-reason", b"rejected"), ("ms-dead-of-old", b"x"), ("ms-redriven", b"2"))
    dlq = put(house, make(house), letter(headers=headers))
    [(_, [record])] = stored(house, dlq, 1)
    names = [name for name, _ in record.headers]
    assert len(names) == len(set(names)) == 10
    assert dict(record.headers)["ms-dead-reason"] == b"deliveries"
    assert dict(record.headers)["ms-redriven"] == b"2"


def test_an_error_text_is_cut_and_never_fails_to_be_written(house: House) -> None:
    long = "\U0001f4a5\ud800" * 1000
    facts = FACTS._replace(error=long, group="g" * 255)
    topic = make(house, "t" * 249)
    dlq = put(house, topic, letter(facts=facts, headers=(), partition=2))
    [(_, [record])] = stored(house, dlq, 2)
    text = (dict(record.headers)["ms-dead-error"] or b"").decode()
    assert text == "\U0001f4a5?" * 200
    added = sum(len(name) + len(value or b"") + 8 for name, value in record.headers)
    assert added < HEADERS_BYTES_MAX


def test_many_are_several_batches(house: House) -> None:
    letters = [letter(n, value=b"x" * 1000) for n in range(1000)]
    dlq = put(house, make(house), *letters)
    batches_ = stored(house, dlq, 1)
    assert len(batches_) > 3
    assert all(header.size < 300_000 for header, _ in batches_)
    assert [origin(record) for _, records in batches_ for record in records] == list(range(1000))


def test_a_record_as_large_as_an_append_may_be_is_compressed() -> None:
    house = local_house().start()
    dlq = put(house, make(house), letter(value=b"x" * 67_000_000))
    [(header, [record])] = stored(house, dlq, 1)
    assert header.compression == "zstd"
    assert record.value is not None
    assert len(record.value) == 67_000_000
