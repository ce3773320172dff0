"""Topics: made, changed, purged, deleted; and what a restart knows of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from broker.making import House, RefusingDisk, local_house, memory_house, options
from faults.simulated_disk import SimulatedDisk
from millstream.broker.topics import Topic
from millstream.engine.pending import Pending
from millstream.errors import (
    DiskFull,
    PartitionCountInvalid,
    PartitionUnknown,
    TooManyTopics,
    TopicExists,
    TopicNameInvalid,
    TopicReserved,
    TopicSettingInvalid,
    TopicUnknown,
)
from millstream.log.partition import PartitionId
from millstream.log.store import PARTITIONS_MAX

if TYPE_CHECKING:
    from millstream.log.disk import Disk

DAY_MS = 24 * 60 * 60 * 1000


@pytest.fixture
def house() -> House:
    return memory_house()


def restarted(house: House) -> House:
    """The broker again, on what a power failure left at this moment."""
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    return local_house(disk.crash("nothing"), house.options).start()


def test_a_topic_is_made_with_the_defaults(house: House) -> None:
    topic = house.done(house.broker.topics.create("orders"))
    assert (topic.name, topic.partitions, topic.given) == ("orders", 3, {})
    assert topic.settings.retention_ms == 7 * DAY_MS
    assert topic.created_ms == house.scheduler.clock.now_ms
    assert house.broker.topics.get("orders") == topic
    assert house.broker.topics.names() == ["orders"]


def test_settings_are_numbers_or_text_and_reach_the_engine() -> None:
    house = local_house().start()
    topics = house.broker.topics
    given = {"retention_ms": "2d", "segment_bytes": 1 << 20, "fsync": "none", "compact": True}
    topic = house.done(topics.create("orders", 2, given))
    assert topic.given == {**given, "retention_ms": 2 * DAY_MS}
    assert topic.settings.compact
    store = house.engine._store  # type: ignore[union-attr]
    assert store is not None
    for number in range(2):
        settings = store.partition(PartitionId("orders", number)).settings
        assert (settings.fsync, settings.compact) == ("none", True)
        assert settings.retention_age_ms == 2 * DAY_MS


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"retention": "1d"}, "retention"),
        ({"retention_ms": -1}, "retention_ms"),
        ({"retention_ms": "10"}, "retention_ms"),
        ({"retention_ms": True}, "retention_ms"),
        ({"retention_bytes": 1.5}, "retention_bytes"),
        ({"segment_bytes": "1"}, "segment_bytes"),
        ({"fsync": "sometimes"}, "fsync"),
        ({"compact": "maybe"}, "compact"),
        ({"compact": 1}, "compact"),
        ({"message_bytes_max": 0}, "message_bytes_max"),
        ({"message_bytes_max": 1 << 40}, "message_bytes_max"),
        ({"partitioner": "crc"}, "partitioner"),
        ({"fsync": ["every"]}, "fsync"),
    ],
)
def test_a_wrong_setting_is_named_and_nothing_is_made(
    house: House, settings: dict[str, object], setting: str
) -> None:
    error = house.failed(house.broker.topics.create("orders", 1, settings))
    assert isinstance(error, TopicSettingInvalid)
    assert error.fields["setting"] == setting
    assert house.broker.topics.names() == []
    assert not [topic for topic in house.engine.topics() if topic.name == "orders"]


@pytest.mark.parametrize("name", ["", ".", "..", "a b", "ä", "a/b", "x" * 250, "a\n"])
def test_names_are_those_that_kafka_allows(house: House, name: str) -> None:
    assert isinstance(house.failed(house.broker.topics.create(name)), TopicNameInvalid)
    with pytest.raises(TopicNameInvalid):
        house.broker.topics.get(name)


def test_the_longest_name_and_every_letter_are_allowed(house: House) -> None:
    for name in ("x" * 249, "aZ0._-", "..."):
        assert house.done(house.broker.topics.create(name)).name == name


@pytest.mark.parametrize("name", ["__topics", "__", "__mine"])
def test_the_brokers_own_topics_are_not_for_clients(house: House, name: str) -> None:
    topics = house.broker.topics
    pendings: list[Pending[Any]] = [
        topics.create(name),
        topics.delete(name),
        topics.purge(name),
        topics.alter(name, {}),
        topics.add_partitions(name, 4),
        topics.ensure(name),
    ]
    for pending in pendings:
        assert isinstance(house.failed(pending), TopicReserved)
    with pytest.raises(TopicReserved):
        topics.get(name)
    assert not [one for one in topics.names() if one.startswith("__")]


def test_what_is_not_there_is_unknown(house: House) -> None:
    topics = house.broker.topics
    pendings: list[Pending[Any]] = [
        topics.delete("t"),
        topics.purge("t"),
        topics.alter("t", {}),
        topics.add_partitions("t", 4),
    ]
    for pending in pendings:
        assert isinstance(house.failed(pending), TopicUnknown)
    house.done(topics.create("t"))
    for number in (-1, 3):
        with pytest.raises(PartitionUnknown):
            topics.partition_of("t", number)


def test_counts_of_partitions_have_limits() -> None:
    house = memory_house(options(partitions_max=10, partitions_total_max=12, topics_max=3))
    topics = house.broker.topics
    for count in (0, -1, 11, PARTITIONS_MAX + 1):
        assert isinstance(house.failed(topics.create("t", count)), PartitionCountInvalid)
    house.done(topics.create("t", 9))
    assert isinstance(house.failed(topics.create("u", 4)), TooManyTopics)
    assert isinstance(house.failed(topics.add_partitions("t", 8)), PartitionCountInvalid)
    # Two that would fit one by one, but not together.
    first, second = topics.create("u", 2), topics.create("v", 2)
    house.done(first)
    assert isinstance(house.failed(second), TooManyTopics)
    house.done(topics.create("v", 1))
    assert isinstance(house.failed(topics.create("w", 1)), TooManyTopics)
    house.done(topics.delete("v"))
    house.done(topics.create("w", 1))


def test_of_two_who_make_the_same_topic_one_does(house: House) -> None:
    topics = house.broker.topics
    first, second = topics.create("t", 1), topics.create("t", 2)
    assert house.done(first).partitions == 1
    assert isinstance(house.failed(second), TopicExists)
    assert topics.get("t").partitions == 1


def test_those_who_need_a_topic_at_once_share_its_making(house: House) -> None:
    pendings = [house.broker.topics.ensure("t") for _ in range(5)]
    found = {house.done(pending).uuid for pending in pendings}
    assert len(found) == 1


def test_without_auto_creation_nothing_is_made() -> None:
    house = memory_house(options(is_auto_create=False))
    assert isinstance(house.failed(house.broker.topics.ensure("t")), TopicUnknown)
    assert house.broker.topics.names() == []


def test_settings_are_changed_and_taken_back(house: House) -> None:
    topics = house.broker.topics
    before = house.done(topics.create("t", 1, {"fsync": "none", "retention_ms": 5000}))
    after = house.done(topics.alter("t", {"fsync": None, "retention_ms": "unlimited"}))
    assert after.settings.fsync == "every"
    assert after.settings.retention_ms is None
    assert (after.uuid, after.created_ms) == (before.uuid, before.created_ms)
    assert isinstance(house.failed(topics.alter("t", {"fsync": "?"})), TopicSettingInvalid)
    assert topics.get("t") == after


def test_a_small_retention_has_small_segments(house: House) -> None:
    topic = house.done(house.broker.topics.create("t", 1, {"retention_bytes": "1M"}))
    assert topic.settings.segment_bytes == 256 * 1024
    both = {"retention_bytes": "1M", "segment_bytes": "2M"}
    assert house.done(house.broker.topics.alter("t", both)).settings.segment_bytes == 2 << 20


def test_partitions_are_added_and_watchers_are_told(house: House) -> None:
    topics = house.broker.topics
    seen: list[Topic] = []
    topics.watch_partitions(seen.append)
    made = house.done(topics.create("t", 1))
    more = house.done(topics.add_partitions("t", 4))
    assert more.partitions == topics.get("t").partitions == 4
    assert seen == [made, more]
    assert house.engine.offsets(PartitionId("t", 3)).high_watermark == 0


def test_a_description_has_every_partition() -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 2))
    house.done(house.broker.publisher.publish_one("t", None, b"x" * 100, partition=1))
    description = house.broker.topics.describe("t")
    assert [one[:3] for one in description.partitions] == [(0, 0, 0), (1, 0, 1)]
    assert description.partitions[1].bytes > 100
    assert description.partitions[1].segments == 1


def test_a_purge_removes_what_is_there_and_offsets_go_on(house: House) -> None:
    publisher, topics = house.broker.publisher, house.broker.topics
    for name in ("t", "neighbour"):
        house.done(topics.create(name, 2))
        for number in range(2):
            house.done(publisher.publish_one(name, None, b"x", partition=number))
    house.done(topics.purge("t"))
    assert [house.broker.reader.offsets("t", n) for n in range(2)] == [(1, 1), (1, 1)]
    assert [house.broker.reader.offsets("neighbour", n) for n in range(2)] == [(0, 1), (0, 1)]
    placed = house.done(publisher.publish_one("t", None, b"y", partition=0))
    assert placed.offset == 1


def test_a_topic_made_again_inherits_nothing() -> None:
    house = local_house().start()
    topics = house.broker.topics
    deleted: list[Topic] = []
    topics.watch_deleted(deleted.append)
    first = house.done(topics.create("t", 2, {"fsync": "interval"}))
    house.done(house.broker.publisher.publish_one("t", None, b"old", partition=0))
    house.done(topics.delete("t"))
    assert deleted == [first]
    second = house.done(topics.create("t", 1))
    assert second.uuid != first.uuid
    assert second.given == {}
    for where in (house, restarted(house)):
        assert where.broker.topics.get("t") == second
        assert where.broker.reader.offsets("t", 0) == (0, 0)


def test_changes_of_one_topic_wait_for_each_other(house: House) -> None:
    topics = house.broker.topics
    house.done(topics.create("t", 1))
    pendings: list[Pending[Any]] = [
        topics.alter("t", {"fsync": "none"}),
        topics.delete("t"),
        topics.create("t", 2, {"fsync": "interval"}),
        topics.add_partitions("t", 3),
    ]
    for pending in pendings:
        house.done(pending)
    topic = topics.get("t")
    assert (topic.partitions, topic.given) == (3, {"fsync": "interval"})


def test_a_restart_knows_topics_and_settings() -> None:
    house = local_house().start()
    topics = house.broker.topics
    house.done(topics.create("a", 1, {"retention_ms": "unlimited", "fsync": "none"}))
    house.done(topics.create("b", 2))
    house.done(topics.alter("b", {"message_bytes_max": "2K"}))
    house.done(topics.create("c", 1))
    house.done(topics.delete("c"))
    again = restarted(house)
    assert again.broker.topics.by_name == topics.by_name
    store = again.engine._store  # type: ignore[union-attr]
    assert store is not None
    assert store.partition(PartitionId("a", 0)).settings.fsync == "none"
    assert store.partition(PartitionId("a", 0)).settings.retention_age_ms is None


def test_a_topic_that_another_program_made_has_the_defaults() -> None:
    house = local_house().start()
    house.done(house.engine.create("t", 1, house.options.topic_defaults.partition))
    topic = restarted(house).broker.topics.get("t")
    assert (topic.partitions, topic.given, topic.created_ms) == (1, {}, 0)


def test_settings_of_a_topic_that_is_gone_are_taken_away_at_the_start() -> None:
    house = local_house().start()
    house.done(house.broker.topics.create("t", 1))
    view = house.broker.topics._view
    # As a crash between the two steps of a deletion leaves it.
    house.done(house.engine.delete("t"))
    assert list(view.entries())
    again = restarted(house)
    assert again.broker.topics.names() == []
    assert not list(again.broker.topics._view.entries())


def test_a_topic_that_the_engine_refuses_leaves_no_settings() -> None:
    house = local_house().start()
    house.done(house.engine.create("t", 1, house.options.topic_defaults.partition))
    assert isinstance(house.failed(house.broker.topics.create("t", 1)), TopicExists)
    house.scheduler.run()
    assert not list(house.broker.topics._view.entries())


def test_a_full_disk_does_not_keep_a_topic_from_going() -> None:
    disks: list[RefusingDisk] = []

    def through(disk: SimulatedDisk) -> Disk:
        disks.append(RefusingDisk(disk))
        return cast("Disk", disks[0])

    house = local_house(through=through).start()
    topics = house.broker.topics
    house.done(topics.create("t", 1))
    disks[0].is_full = True
    house.done(topics.delete("t"))
    assert isinstance(house.failed(topics.create("u", 1)), DiskFull)
    assert topics.names() == []
    disks[0].is_full = False
    house.done(topics.create("t", 1))
    assert topics.names() == ["t"]


def test_settings_that_this_version_does_not_know_are_left_out() -> None:
    house = local_house().start()
    topic = house.done(house.broker.topics.create("t", 1, {"fsync": "none"}))
    value = b'{"name":"t","created_ms":5,"settings":{"fsync":"none","colour":"red"}}'
    broker = house.broker
    house.done(broker.views.change(broker.topics._view, [(topic.uuid.bytes, value)]))
    again = restarted(house).broker.topics.get("t")
    assert (again.given, again.created_ms) == ({"fsync": "none"}, 5)
