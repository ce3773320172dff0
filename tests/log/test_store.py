"""The data directory: topics, names, the lock, the format, opening again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, Sender, batch, values
from millstream.errors import (
    FormatUnsupported,
    MillstreamError,
    OffsetOutOfRange,
    PartitionCountInvalid,
    PartitionUnknown,
    StoreLocked,
    TopicExists,
    TopicNameInvalid,
    TopicUnknown,
)
from millstream.log.disk import SystemDisk
from millstream.log.partition import PartitionId, PartitionSettings
from millstream.log.store import (
    PARTITIONS_MAX,
    Store,
    StoreOptions,
    check_partition_count,
    check_topic_name,
    new_uuid,
    open_store,
    topic_directory,
)

if TYPE_CHECKING:
    from pathlib import Path

    from millstream.log.disk import Disk

ROOT = "/data"
PLAIN = PartitionSettings()
SMALL = PartitionSettings(segment_bytes=400)
T0 = PartitionId("t", 0)


def opened(disk: Disk, root: str = ROOT) -> Store:
    options = StoreOptions(settings_for=lambda _: SMALL, journal_file_bytes=4096)
    return open_store(disk, root, NOW_MS, options)


def create(store: Store, name: str, partitions: int = 1) -> bytes:
    return store.create_topic(name, new_uuid(), partitions, SMALL, NOW_MS).uuid


def stop(store: Store) -> None:
    store.checkpoint(NOW_MS)
    store.close()


# ---- names


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "a/b", "../a", "@", "a@b", "\0", "a\0", "a\n", " ", "a b", "é", "~", "+a"],
)
def test_a_bad_name_is_refused_and_nothing_is_written(name: str) -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    operations = disk.operations
    with pytest.raises(TopicNameInvalid) as caught:
        create(store, name)
    assert caught.value.fields == {"topic": name}
    assert disk.operations == operations
    assert store.topics == {}


def test_a_name_has_at_most_249_characters() -> None:
    check_topic_name("a" * 249)
    for length in (250, 100_000):
        with pytest.raises(TopicNameInvalid) as caught:
            check_topic_name("a" * length)
        # What is sent back is bounded.
        assert len(str(caught.value.fields["topic"])) <= 260


@pytest.mark.parametrize("length", [1, 221, 222, 223, 248, 249])
def test_names_of_every_length_fit_a_real_file_system(tmp_path: Path, length: int) -> None:
    name = "".join(chr(ord("a") + at % 26) for at in range(length))
    other = name[:-1] + "Z"
    store = opened(SystemDisk(), str(tmp_path))
    uuids = {one: create(store, one) for one in (name, other)}
    for one in (name, other):
        store.partition(PartitionId(one, 0)).append(batch(one.encode()), NOW_MS)
    stop(store)
    store = opened(SystemDisk(), str(tmp_path))
    assert {topic.name: topic.uuid for topic in store.topics.values()} == uuids
    for one in (name, other):
        chunk = store.partition(PartitionId(one, 0)).read(0, 1 << 20)
        assert values(chunk.data) == [one.encode()]
        store.remove_topic_files(store.forget_topic(one))
    stop(store)
    assert list((tmp_path / "topics").iterdir()) == []


def test_a_directory_has_the_name_of_its_topic_and_its_uuid() -> None:
    uuid = bytes(range(16))
    assert topic_directory("orders", uuid) == "orders@000102030405060708090a0b0c0d0e0f"
    assert len(topic_directory("a" * 249, uuid)) == 255


# ---- counts


def test_a_topic_has_one_to_ten_thousand_partitions() -> None:
    for count in (1, PARTITIONS_MAX):
        check_partition_count(count)
    for count in (-1, 0, PARTITIONS_MAX + 1):
        with pytest.raises(PartitionCountInvalid) as caught:
            check_partition_count(count)
        assert caught.value.fields == {"partitions": count}


def test_refusals_write_nothing() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t", 2)
    operations = disk.operations
    refusals: list[tuple[type[MillstreamError], object]] = []
    for call in (
        lambda: create(store, "t"),
        lambda: create(store, "u", 0),
        lambda: store.more_partitions("t", 1, NOW_MS),
        lambda: store.more_partitions("t", PARTITIONS_MAX + 1, NOW_MS),
        lambda: store.more_partitions("u", 2, NOW_MS),
        lambda: store.forget_topic("u"),
        lambda: store.partition(PartitionId("u", 0)),
        lambda: store.partition(PartitionId("t", 2)),
        lambda: store.partition(PartitionId("t", -1)),
        lambda: store.partition(T0).read(-1, 1),
        lambda: store.partition(T0).read(1, 1),
    ):
        with pytest.raises(MillstreamError) as caught:
            call()
        refusals.append((caught.type, None))
    assert [kind for kind, _ in refusals] == [
        TopicExists,
        PartitionCountInvalid,
        PartitionCountInvalid,
        PartitionCountInvalid,
        TopicUnknown,
        TopicUnknown,
        TopicUnknown,
        PartitionUnknown,
        PartitionUnknown,
        OffsetOutOfRange,
        OffsetOutOfRange,
    ]
    assert disk.operations == operations


# ---- topics and crashes


def test_a_topic_is_there_with_all_partitions_or_not_at_all() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    seen: set[int] = set()

    def crash(_index: int, _name: str) -> None:
        for survival in ("nothing", "all"):
            after = opened(disk.crash("all" if survival == "all" else "nothing"))
            seen.add(after.topics["t"].partitions if "t" in after.topics else 0)

    disk.on_operation = crash
    create(store, "t", 3)
    disk.on_operation = None
    assert seen == {0, 3}
    assert opened(disk.crash("nothing")).topics["t"].partitions == 3


def test_added_partitions_are_there_in_order_after_any_crash() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t", 1)
    seen: set[int] = set()
    disk.on_operation = lambda _index, _name: seen.update(
        opened(disk.crash("nothing", names=names)).topics["t"].partitions
        for names in ("nothing", "all")
    )
    growth = store.more_partitions("t", 4, NOW_MS)
    growth.run()
    store.take_in(growth)
    disk.on_operation = None
    assert seen <= {1, 2, 3, 4}
    assert opened(disk.crash("nothing")).topics["t"].partitions == 4


def test_a_deleted_topic_does_not_come_back() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t", 2)
    gone = store.forget_topic("t")
    for survival in ("nothing", "all"):
        crashed = disk.crash("all" if survival == "all" else "nothing")
        assert opened(crashed).topics == {}
        assert crashed.list_directory(f"{ROOT}/topics") == []
    store.remove_topic_files(gone)
    assert disk.list_directory(f"{ROOT}/topics") == []


def test_a_topic_made_again_inherits_nothing_from_journal_or_checkpoint() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t")
    partition = store.partition(T0)
    for n in range(20):
        partition.append(batch(b"%d" % n, sender=Sender(7, 0, n)), NOW_MS)
    store.checkpoint(NOW_MS)
    store.remove_topic_files(store.forget_topic("t"))
    create(store, "t")
    again = opened(disk.crash("nothing"))
    fresh = again.partition(T0)
    assert (fresh.start_offset, fresh.high_watermark) == (0, 0)
    assert fresh.producers.by_id == {}
    assert fresh.epochs == []


def test_directories_that_are_no_topics_are_left_alone() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t")
    stop(store)
    for name in ("notes", "t@123", "t@" + "g" * 32, "lost+found"):
        disk.put(f"{ROOT}/topics/{name}/0/x", b"x")
    store = opened(disk)
    assert list(store.topics) == ["t"]
    assert disk.files()[f"{ROOT}/topics/notes/0/x"] == b"x"


# ---- opening


def test_a_store_that_was_closed_after_a_checkpoint_has_nothing_to_report() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t", 3)
    for n in range(50):
        store.partition(PartitionId("t", n % 3)).append(batch(b"%d" % n), NOW_MS)
    stop(store)
    again = opened(disk)
    assert again.findings == []
    assert again.leader_epoch == store.leader_epoch + 1
    found = [values(again.partition(PartitionId("t", n)).read(0, 1)[0])[0] for n in range(3)]
    assert found == [b"0", b"1", b"2"]


def test_without_a_checkpoint_everything_is_read_again() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t")
    for n in range(50):
        store.partition(T0).append(batch(b"%d" % n, sender=Sender(7, 0, n)), NOW_MS)
    stop(store)
    disk.unlink(f"{ROOT}/checkpoint")
    again = opened(disk)
    partition = again.partition(T0)
    assert partition.high_watermark == 50
    assert again.leader_epoch > store.leader_epoch
    assert partition.append(batch(b"49", sender=Sender(7, 0, 49)), NOW_MS) == 49
    assert partition.append(batch(b"50", sender=Sender(7, 0, 50)), NOW_MS) == 50


def test_either_copy_of_the_checkpoint_is_enough() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    create(store, "t")
    store.partition(T0).append(batch(b"a"), NOW_MS)
    stop(store)
    content = disk.files()[f"{ROOT}/checkpoint"]
    for at in (20, len(content) // 2 + 20):
        damaged = disk.copy()
        damaged.put(
            f"{ROOT}/checkpoint", content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        )
        again = opened(damaged)
        assert again.leader_epoch == store.leader_epoch + 1
        assert again.partition(T0).high_watermark == 1


def test_the_lock_tells_who_has_it_and_is_given_up() -> None:
    disk = SimulatedDisk()
    store = opened(disk)
    disk.put(f"{ROOT}/lock", b"4711\n")
    with pytest.raises(StoreLocked, match="4711") as caught:
        opened(disk)
    assert caught.value.fields == {"path": ROOT, "pid": "4711"}
    store.close()
    opened(disk).close()


def test_a_store_that_cannot_be_opened_gives_up_the_lock_and_every_file() -> None:
    disk = SimulatedDisk()
    stop(opened(disk))

    def fail(_index: int, name: str) -> None:
        if name == "rename":
            raise OSError(5, "broken")

    disk.on_operation = fail
    with pytest.raises(OSError, match="broken"):
        opened(disk)
    disk.on_operation = None
    assert disk._handles == {}
    opened(disk).close()


def test_a_foreign_directory_is_refused_and_left_alone() -> None:
    disk = SimulatedDisk()
    disk.put(f"{ROOT}/topics/mine", b"x")
    before = disk.files()
    with pytest.raises(FormatUnsupported):
        opened(disk)
    assert disk.files() == before


def test_opening_writes_the_format_and_makes_the_rooms() -> None:
    disk = SimulatedDisk()
    opened(disk, "/deep/down/data").close()
    after = disk.crash("nothing")
    assert after.files()["/deep/down/data/format"] == b"millstream 1\n"
    names = set(after.list_directory("/deep/down/data"))
    assert {"format", "lock", "checkpoint", "journal", "topics", "quarantine"} <= names
