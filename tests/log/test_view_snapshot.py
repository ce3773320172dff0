"""Snapshots of views: from the log, from the one before, and what is not taken for one."""

from __future__ import annotations

from random import Random

import pytest

from engine.engines import T0, LoopHouse, ManualHouse
from faults.simulated_disk import SimulatedDisk
from log.making import records
from millstream.log import batch as batches
from millstream.log.partition import PartitionSettings
from millstream.log.view_snapshot import ViewSnapshot, newest_snapshot, read_snapshot

SMALL = PartitionSettings(segment_bytes=2000, compact=True, tombstone_age_ms=0)
FOLDER = "/data/views/v"


def fill(house: ManualHouse | LoopHouse, seed: int, batches_: int = 40) -> dict[bytes, bytes]:
    """Changes of a few keys; answers what they add up to."""
    random, state = Random(seed), dict[bytes, bytes]()
    for _ in range(batches_):
        fields: list[batches.Fields] = []
        for _ in range(3):
            key = b"%d" % random.randrange(20)
            value = None if random.random() < 0.2 else random.randbytes(random.randrange(100))
            fields.append((0, key, value, ()))
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
        house.done(house.engine.append(T0, batches.encode(fields)))
    if isinstance(house, ManualHouse):
        # What the journal has is written to the segments after a moment, and then they are sealed.
        house.scheduler.advance(1)
    return state


def loaded(house: ManualHouse | LoopHouse) -> ViewSnapshot:
    snapshot = house.done(house.engine.load_view(T0, "v"))
    assert snapshot is not None
    return snapshot


def restored(house: ManualHouse | LoopHouse, snapshot: ViewSnapshot) -> dict[bytes, bytes]:
    """The snapshot, and the log after it."""
    found = {record.key: record.value for record in records(snapshot.data)}
    offset, end = snapshot.offset, house.engine.offsets(T0).high_watermark
    while offset < end:
        chunk = house.done(house.engine.read(T0, offset, 1 << 20))
        found |= {one.key: one.value for one in records(chunk.data) if one.offset >= offset}
        offset = chunk.next_offset
    return {key: value for key, value in found.items() if key is not None and value is not None}


@pytest.fixture
def house() -> ManualHouse:
    house = ManualHouse(settings_for=lambda _: SMALL)
    house.create(SMALL)
    return house


def test_a_snapshot_has_the_newest_of_each_key_in_sealed_segments(house: ManualHouse) -> None:
    state = fill(house, 1)
    offset = house.done(house.engine.save_view(T0, "v"))
    snapshot = loaded(house)
    assert snapshot.offset == offset == house.partition().segments[-1].base_offset
    assert restored(house, snapshot) == state
    keys = [record.key for record in records(snapshot.data)]
    assert len(keys) == len(set(keys))
    assert all(record.value is not None for record in records(snapshot.data))


def test_the_next_one_starts_from_the_last_and_replaces_it(house: ManualHouse) -> None:
    fill(house, 1)
    house.done(house.engine.save_view(T0, "v"))
    (first,) = house.disk.list_directory(FOLDER)
    fill(house, 2)
    house.done(house.engine.save_view(T0, "v"))
    (second,) = house.disk.list_directory(FOLDER)
    assert second > first
    from_log_alone = restored(house, ViewSnapshot(0, memoryview(b"")))
    assert restored(house, loaded(house)) == from_log_alone


def test_nothing_new_is_nothing_to_do(house: ManualHouse) -> None:
    assert house.done(house.engine.save_view(T0, "v")) is None
    fill(house, 1)
    assert house.done(house.engine.save_view(T0, "v")) is not None
    assert house.done(house.engine.save_view(T0, "v")) is None


@pytest.mark.parametrize("at", [0, 10, 24, 40, 60, -1])
def test_a_damaged_one_is_none(house: ManualHouse, at: int) -> None:
    fill(house, 1)
    house.done(house.engine.save_view(T0, "v"))
    (name,) = house.disk.list_directory(FOLDER)
    path = f"{FOLDER}/{name}"
    good = bytearray(house.disk.files()[path])
    good[at] ^= 1
    house.disk.put(path, bytes(good))
    again = house.again(house.disk.copy())
    assert again.done(again.engine.load_view(T0, "v")) is None
    again.disk.put(path, bytes(good[:30]))
    assert again.done(again.engine.load_view(T0, "v")) is None


def test_one_of_another_topic_or_of_the_future_is_none(house: ManualHouse) -> None:
    fill(house, 1)
    offset = house.done(house.engine.save_view(T0, "v"))
    assert offset is not None
    uuid = house.partition().uuid
    assert newest_snapshot(house.disk, FOLDER, uuid, 0, offset) is not None
    assert newest_snapshot(house.disk, FOLDER, uuid, 0, offset - 1) is None
    assert newest_snapshot(house.disk, FOLDER, uuid, offset + 1, offset + 9) is None
    assert newest_snapshot(house.disk, FOLDER, b"x" * 16, 0, offset) is None
    assert read_snapshot(house.disk, f"{FOLDER}/none", uuid) is None
    (name,) = house.disk.list_directory(FOLDER)
    # Under another name it says another offset than it has.
    house.disk.put(f"{FOLDER}/{'9'.zfill(20)}.snapshot", house.disk.files()[f"{FOLDER}/{name}"])
    found = newest_snapshot(house.disk, FOLDER, uuid, 0, 9)
    assert found is None


def test_one_from_before_a_compaction_is_not_used(house: ManualHouse) -> None:
    """Compaction may have removed the mark that one of its keys is gone."""
    house.append(batches.encode([(0, b"gone", b"x", ())]))
    fill(house, 1)
    house.done(house.engine.save_view(T0, "v"))
    house.append(batches.encode([(0, b"gone", None, ())]))
    state = fill(house, 2, 80)
    house.scheduler.advance(3600)
    house.upkeep.compact()
    house.run()
    assert any(segment.generation for segment in house.partition().segments)
    again = house.again(house.disk.copy())
    assert again.done(again.engine.load_view(T0, "v")) is None
    # The next one is made from the log alone, and is good.
    house.done(house.engine.save_view(T0, "v"))
    again = house.again(house.disk.copy())
    found = restored(again, loaded(again))
    assert b"gone" not in found
    assert state.items() <= found.items()


def test_a_full_disk_leaves_the_old_one(house: ManualHouse) -> None:
    fill(house, 1)
    first = house.done(house.engine.save_view(T0, "v"))
    fill(house, 2)

    def broken(self: SimulatedDisk, source: str, target: str) -> None:
        raise OSError(28, "no room")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedDisk, "rename", broken)
        pending = house.engine.save_view(T0, "v")
        house.run()
    assert isinstance(pending.error, OSError)
    assert not any(segment.readers for segment in house.partition().segments)
    assert loaded(house.again(house.disk.copy())).offset == first


def test_a_child_process_writes_it(tmp_path: object) -> None:
    house = LoopHouse(f"{tmp_path}/data")
    try:
        house.done(house.engine.create("t", 1, SMALL))
        state = fill(house, 3)
        store = house.engine._store
        assert store is not None
        partition = store.partition(T0)
        house.until(lambda: partition.segments[0].sealed)
        assert house.done(house.engine.save_view(T0, "v"))
        assert restored(house, loaded(house)) == state
    finally:
        house.stop()
