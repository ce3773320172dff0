"""What every engine promises: making, changing and deleting topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from engine.engines import T0, T1, House, all_values, finish
from log.making import Sender, batch
from millstream.errors import (
    BatchTooLarge,
    PartitionCountInvalid,
    TopicExists,
    TopicNameInvalid,
    TopicUnknown,
)
from millstream.log.partition import FsyncMode, PartitionId, PartitionSettings
from millstream.log.store import PARTITIONS_MAX, new_uuid

if TYPE_CHECKING:
    from millstream.engine.pending import Pending

PLAIN = PartitionSettings()

BAD_NAMES = {
    "empty": "",
    "dot": ".",
    "two dots": "..",
    "slash": "a/b",
    "climbing": "../a",
    "at": "a@b",
    "NUL": "a\0b",
    "newline": "a\n",
    "space": "a b",
    "not ASCII": "ä",
    "250 characters": "a" * 250,
}


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_bad_name_is_refused(house: House, name: str) -> None:
    with pytest.raises(TopicNameInvalid):
        house.done(house.engine.create(name, 1, PLAIN))
    assert house.engine.topics() == []


@pytest.mark.parametrize("name", ["a" * 249, "A.b_c-9", "__offsets", "...", "new-x", "gone-x"])
def test_a_good_name_is_taken(house: House, name: str) -> None:
    house.done(house.engine.create(name, 1, PLAIN))
    assert [topic.name for topic in house.engine.topics()] == [name]
    assert house.done(house.engine.append(PartitionId(name, 0), batch(b"a"))) == 0


@pytest.mark.parametrize("partitions", [-1, 0, PARTITIONS_MAX + 1])
def test_a_count_of_partitions_outside_the_limits_is_refused(house: House, partitions: int) -> None:
    with pytest.raises(PartitionCountInvalid):
        house.done(house.engine.create("t", partitions, PLAIN))
    assert house.engine.topics() == []


def test_a_topic_has_the_uuid_that_it_was_given(house: House) -> None:
    uuid = new_uuid()
    made = house.done(house.engine.create("t", 3, PLAIN, uuid))
    assert made == ("t", uuid, 3)
    assert house.engine.topics() == [made]


def test_a_name_is_taken_once(topic: House) -> None:
    with pytest.raises(TopicExists):
        topic.done(topic.engine.create("t", 1, PLAIN))
    assert topic.engine.topics()[0].partitions == 2


def test_partitions_are_added_and_never_taken_away(topic: House) -> None:
    topic.done(topic.engine.append(T1, batch(b"a")))
    assert topic.done(topic.engine.alter("t", partitions=4)).partitions == 4
    assert topic.done(topic.engine.append(PartitionId("t", 3), batch(b"b"))) == 0
    for count in (3, 0, PARTITIONS_MAX + 1):
        with pytest.raises(PartitionCountInvalid):
            topic.done(topic.engine.alter("t", partitions=count))
    assert topic.engine.topics()[0].partitions == 4
    assert all_values(topic, T1) == [b"a"]


def test_settings_change_for_old_and_new_partitions(topic: House) -> None:
    large, last = batch(bytes(200)), PartitionId("t", 2)
    topic.done(topic.engine.append(T0, large))
    small = PartitionSettings(batch_bytes_max=100)
    topic.done(topic.engine.alter("t", settings=small, partitions=3))
    for id in (T0, last):
        with pytest.raises(BatchTooLarge):
            topic.done(topic.engine.append(id, large))
    topic.done(topic.engine.alter("t", settings=PLAIN))
    assert topic.done(topic.engine.append(last, large)) == 0


def test_a_deleted_topic_is_gone_and_its_waits_end(topic: House) -> None:
    topic.done(topic.engine.append(T0, batch(b"a")))
    waiting = topic.engine.wait(T1, 0)
    topic.done(topic.engine.delete("t"))
    assert topic.engine.topics() == []
    assert isinstance(waiting.error, TopicUnknown)
    with pytest.raises(TopicUnknown):
        topic.done(topic.engine.append(T0, batch(b"a")))
    with pytest.raises(TopicUnknown):
        topic.done(topic.engine.delete("t"))
    with pytest.raises(TopicUnknown):
        topic.done(topic.engine.alter("t", partitions=3))


def test_a_topic_made_again_under_an_old_name_inherits_nothing(topic: House) -> None:
    old = topic.engine.topics()[0].uuid
    topic.done(topic.engine.append(T0, batch(b"a", b"b", sender=Sender(7))))
    topic.done(topic.engine.trim(T0, 1))
    topic.done(topic.engine.delete("t"))
    assert topic.done(topic.engine.create("t", 1, PLAIN)).uuid != old
    assert topic.engine.offsets(T0) == (0, 0)
    # Nor what was known of producers: this would be a repeat in the old one.
    assert topic.done(topic.engine.append(T0, batch(b"c", sender=Sender(7)))) == 0
    assert all_values(topic) == [b"c"]


@pytest.mark.parametrize("mode", get_args(FsyncMode))
def test_appends_that_a_delete_overtakes_are_answered_one_way_or_the_other(
    house: House, mode: FsyncMode
) -> None:
    house.done(house.engine.create("t", 1, PartitionSettings(fsync=mode)))
    house.done(house.engine.create("u", 1, PLAIN))
    other = house.engine.append(PartitionId("u", 0), batch(b"a"))
    appends = [house.engine.append(T0, batch(b"%d" % n)) for n in range(3)]
    gone = house.engine.delete("t")
    late = house.engine.append(T0, batch(b"late"))
    house.done(gone)
    assert house.done(other) == 0
    for pending in (*appends, late):
        if pending.error is None:
            house.done(pending)
        else:
            assert isinstance(pending.error, TopicUnknown)
    assert house.engine.health().ok
    assert house.done(house.engine.append(PartitionId("u", 0), batch(b"b"))) == 1


def test_topics_are_made_while_others_are_written(topic: House) -> None:
    pendings = [topic.engine.append(T0, batch(b"%d" % n)) for n in range(5)]
    made = topic.engine.create("u", 1, PLAIN)
    pendings += [topic.engine.append(T0, batch(b"%d" % n)) for n in range(5)]
    assert topic.done(made).name == "u"
    assert finish(topic, pendings) == list(range(10))


def test_changes_are_made_in_the_order_that_they_were_asked_for(house: House) -> None:
    engine = house.engine
    first = engine.create("t", 1, PLAIN)
    second = engine.create("t", 2, PLAIN)
    grown = engine.alter("t", partitions=3)
    gone = engine.delete("t")
    third = engine.create("t", 4, PLAIN)
    assert house.done(first).partitions == 1
    with pytest.raises(TopicExists):
        house.done(second)
    assert house.done(grown).partitions == 3
    house.done(gone)
    assert house.done(third).partitions == 4
    assert [topic.partitions for topic in engine.topics()] == [4]
    assert house.done(engine.append(PartitionId("t", 3), batch(b"a"))) == 0


def test_who_is_told_of_a_new_topic_can_use_it_at_once(house: House) -> None:
    appended: list[Pending[int]] = []
    made = house.engine.create("t", 1, PLAIN)
    made.then(lambda _: appended.append(house.engine.append(T0, batch(b"a"))))
    gone = house.engine.delete("t")
    house.done(made)
    house.done(gone)
    assert appended[0].error is None or isinstance(appended[0].error, TopicUnknown)
    assert house.engine.topics() == []
