"""One partition: reserve, write, advance; rolling, sealing, trimming, retention."""

from __future__ import annotations

import pytest

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, Sender, batch, header_of, offsets, values
from millstream.errors import LogDamaged, OffsetOutOfRange, SequenceOutOfOrder
from millstream.log.index import SPAN_MAX
from millstream.log.partition import DAY_MS, Partition, PartitionId, PartitionSettings
from millstream.log.placing import Placed
from millstream.log.segment import Segment

SMALL = PartitionSettings(segment_bytes=500)


def new_partition(
    settings: PartitionSettings = SMALL, disk: SimulatedDisk | None = None, base_offset: int = 0
) -> Partition:
    disk = disk or SimulatedDisk()
    disk.make_directory("/p")
    partition = Partition(
        disk, "/p", id=PartitionId("t", 0), uuid=bytes(16), settings=settings, leader_epoch=4
    )
    partition.start_empty(NOW_MS, base_offset)
    return partition


def reserve(partition: Partition, data: bytes, now_ms: int = NOW_MS) -> Placed:
    return partition.reserve(data, header_of(data), now_ms)


def seal_all(partition: Partition) -> None:
    while (job := partition.next_seal()) is not None:
        job.run()
        partition.sealed()


def filled(count: int, settings: PartitionSettings = SMALL) -> Partition:
    partition = new_partition(settings)
    for n in range(count):
        partition.append(batch(b"%d" % n, bytes(40)), NOW_MS)
    seal_all(partition)
    return partition


# ---- the three steps


def test_nothing_is_read_before_the_high_watermark_moves() -> None:
    partition = new_partition()
    one, two = (reserve(partition, batch(b"%d" % n)) for n in range(2))
    partition.write([one, two])
    assert partition.plan_read(0, 1) is None
    with pytest.raises(OffsetOutOfRange):
        partition.plan_read(1, 1)
    partition.advance(one)
    assert values(partition.read(0, 1 << 20).data) == [b"0"]
    partition.advance(two)
    assert values(partition.read(0, 1 << 20).data) == [b"0", b"1"]


def test_a_batch_gets_its_offset_and_the_epoch_of_the_leader() -> None:
    partition = new_partition(base_offset=70)
    partition.append(batch(b"a", b"b"), NOW_MS)
    partition.append(batch(b"c"), NOW_MS)
    header = header_of(partition.read(72, 1).data)
    assert (header.base_offset, header.leader_epoch) == (72, 4)
    assert partition.epochs == [(4, 70)]


def test_what_was_reserved_is_taken_back() -> None:
    partition = new_partition()
    partition.append(batch(b"a", sender=Sender(7)), NOW_MS)
    mark = partition.mark()
    for n in range(1, 20):
        reserve(partition, batch(bytes(60), sender=Sender(7, 0, n)))
    assert len(partition.segments) > 2
    partition.rollback(mark)
    assert partition.mark() == mark
    assert len(partition.segments) == 1
    assert partition.closing == []
    assert partition.disk.list_directory("/p") == ["0" * 20 + ".log"]
    assert partition.append(batch(b"b", sender=Sender(7, 0, 1)), NOW_MS) == 1
    with pytest.raises(SequenceOutOfOrder):
        partition.append(batch(b"c", sender=Sender(7, 0, 20)), NOW_MS)


def test_a_write_that_failed_is_repeated_from_where_it_was() -> None:
    disk = SimulatedDisk()
    partition = new_partition(disk=disk)
    run = [reserve(partition, batch(bytes(60))) for _ in range(12)]
    writes = 0

    def fail(_index: int, name: str) -> None:
        nonlocal writes
        writes += name == "write"
        if writes == 2:
            raise OSError(28, "no space")

    disk.on_operation = fail
    with pytest.raises(OSError, match="no space"):
        partition.write(run)
    disk.on_operation = None
    partition.write(run)
    partition.settle()
    partition.advance(run[-1])
    assert sum(len(partition.read(at.base_offset, 1).data) for at in run) == sum(
        placed.size for placed in run
    )


def test_an_append_that_failed_leaves_nothing() -> None:
    disk = SimulatedDisk()
    partition = new_partition(disk=disk)
    partition.append(batch(b"a"), NOW_MS)
    before = disk.files()

    def fail(_index: int, name: str) -> None:
        if name == "write":
            raise OSError(28, "no space")

    disk.on_operation = fail
    for size in (10, 490):
        with pytest.raises(OSError, match="no space"):
            partition.append(batch(bytes(size), sender=Sender(7)), NOW_MS)
    disk.on_operation = None
    assert disk.files() == before
    assert partition.append(batch(b"b", sender=Sender(7)), NOW_MS) == 1


def test_batches_of_the_journal_are_written_before_they_are_read() -> None:
    partition = new_partition()
    placed = reserve(partition, batch(b"a"))
    partition.unapplied.append(placed)
    partition.settle()
    partition.advance(placed)
    assert partition.active.size == 0
    assert values(partition.read(0, 1).data) == [b"a"]
    assert partition.unapplied == []


def test_readers_wait_for_batches_that_have_no_room_in_their_segment() -> None:
    disk = SimulatedDisk()
    partition = new_partition(disk=disk)
    partition.append(batch(b"a"), NOW_MS)
    placed = reserve(partition, batch(b"b"))
    partition.unapplied.append(placed)
    partition.advance(placed)

    def fail(_index: int, name: str) -> None:
        if name == "write":
            raise OSError(28, "no space")

    disk.on_operation = fail
    assert values(partition.read(0, 1 << 20).data) == [b"a"]
    assert not len(partition.read(1, 1).data)
    disk.on_operation = None
    assert values(partition.read(0, 1 << 20).data) == [b"a", b"b"]


# ---- rolling and sealing


def test_a_segment_ends_when_the_next_batch_does_not_fit() -> None:
    size = len(batch(bytes(100)))
    partition = new_partition(PartitionSettings(segment_bytes=3 * size))
    for _ in range(7):
        partition.append(batch(bytes(100)), NOW_MS)
    assert [segment.base_offset for segment in partition.segments] == [0, 3, 6]


def test_a_batch_larger_than_a_segment_has_one_of_its_own() -> None:
    partition = new_partition()
    for size in (10, 2000, 10):
        partition.append(batch(bytes(size)), NOW_MS)
    assert [segment.base_offset for segment in partition.segments] == [0, 1, 2]
    assert len(offsets(partition.read(1, 1).data)) == 1


def test_a_segment_ends_by_age_at_the_next_append() -> None:
    partition = new_partition(PartitionSettings(segment_age_ms=1000))
    partition.append(batch(b"a"), NOW_MS)
    partition.append(batch(b"b"), NOW_MS + 999)
    partition.append(batch(b"c"), NOW_MS + 1000)
    assert [segment.base_offset for segment in partition.segments] == [0, 2]


def test_a_segment_spans_no_more_offsets_than_an_index_entry_can_say() -> None:
    partition = new_partition(PartitionSettings())
    partition.append(batch(b"a"), NOW_MS)
    wide = header_of(batch(b"a"))._replace(last_offset_delta=SPAN_MAX - 2)
    assert partition.reserve(batch(b"a"), wide, NOW_MS).segment.base_offset == 0
    placed = reserve(partition, batch(b"b"))
    assert placed.segment.base_offset == SPAN_MAX


def test_a_segment_is_sealed_once_its_last_batch_is_written() -> None:
    partition = new_partition()
    first = reserve(partition, batch(bytes(300)))
    second = reserve(partition, batch(bytes(300)))
    assert first.segment is not second.segment
    assert partition.next_seal() is None
    partition.write([first])
    job = partition.next_seal()
    assert job is not None
    job.run()
    partition.sealed()
    assert first.segment.sealed
    assert partition.next_seal() is None


def test_every_offset_is_read_across_segments() -> None:
    partition = filled(40)
    assert len(partition.segments) > 5
    for offset in range(80):
        for bytes_max in (1, 300, 5000):
            chunk = partition.read(offset, bytes_max)
            found = offsets(chunk.data)
            assert found[0] == offset - offset % 2
            assert chunk.next_offset == found[-1] + 1


def test_a_gap_has_an_error_that_names_it() -> None:
    partition = filled(40)
    lost = partition.segments.pop(2)
    assert partition.gaps() == [(lost.base_offset, lost.next_offset - 1)]
    with pytest.raises(LogDamaged) as caught:
        partition.read(lost.base_offset + 1, 1)
    assert caught.value.fields["first"] == lost.base_offset
    assert caught.value.fields["last"] == lost.next_offset - 1
    assert offsets(partition.read(lost.next_offset, 1).data)[0] == lost.next_offset


# ---- trimming and retention


def test_trim_lets_go_of_whole_segments() -> None:
    partition = filled(40)
    middle = partition.segments[3].base_offset + 1
    partition.trim(middle, now=5.0, now_ms=NOW_MS)
    assert partition.start_offset == middle
    assert partition.segments[0].base_offset == middle - 1
    assert len(partition.doomed) == 3
    assert partition.sweep(before=5.0).run() == 0
    assert partition.sweep(before=5.1).run() == 3
    assert partition.doomed == []
    logs = [name for name in partition.disk.list_directory("/p") if name.endswith(".log")]
    assert len(logs) == len(partition.segments)


def test_a_purge_ends_the_active_segment() -> None:
    partition = filled(3)
    partition.trim(partition.high_watermark, now=0.0, now_ms=NOW_MS)
    seal_all(partition)
    partition.drop_trimmed(1.0)
    assert (partition.start_offset, partition.high_watermark) == (6, 6)
    assert partition.size_bytes == 0
    assert not len(partition.read(6, 1).data)
    assert partition.append(batch(b"next"), NOW_MS) == 6
    assert values(partition.read(6, 1).data) == [b"next"]


def test_epochs_before_the_start_are_forgotten() -> None:
    partition = new_partition()
    for epoch in (4, 6, 9):
        partition.leader_epoch = epoch
        partition.append(batch(b"a", b"b"), NOW_MS)
    assert partition.epochs == [(4, 0), (6, 2), (9, 4)]
    assert [partition.epoch_end(epoch) for epoch in (3, 4, 5, 6, 8, 9, 99)] == [
        (-1, -1),
        (4, 2),
        (4, 2),
        (6, 4),
        (6, 4),
        (9, 6),
        (9, 6),
    ]
    partition.trim(3, now=0.0, now_ms=NOW_MS)
    assert partition.epochs == [(6, 3), (9, 4)]


def test_retention_by_bytes_never_goes_below_the_limit() -> None:
    for limit in (0, 1, 300, 499, 500, 1000, 2000, 10**9):
        partition = filled(40, PartitionSettings(segment_bytes=500, retention_bytes=limit))
        keep = partition.retained_from(NOW_MS)
        left = sum(one.size for one in partition.segments if one.next_offset > keep)
        total = partition.size_bytes
        assert left >= min(limit, total)
        first = next(one for one in partition.segments if one.next_offset > keep)
        if first is not partition.active:
            assert left - first.size < limit


def test_retention_by_age_stops_at_the_first_segment_that_is_young() -> None:
    partition = new_partition(PartitionSettings(segment_bytes=200, retention_age_ms=DAY_MS))
    for age_days in (5, 4, 3, 0, 4, 0):
        partition.append(batch(bytes(100), timestamp=NOW_MS - age_days * DAY_MS), NOW_MS)
    seal_all(partition)
    assert partition.retained_from(NOW_MS) == 3
    assert partition.retained_from(NOW_MS - 3 * DAY_MS) == 1


def test_a_record_from_the_future_does_not_hold_what_is_old() -> None:
    partition = new_partition(PartitionSettings(segment_bytes=200, retention_age_ms=DAY_MS))
    far = NOW_MS + 100_000 * DAY_MS
    for day, timestamp in enumerate((NOW_MS, far, NOW_MS + 2 * DAY_MS + 1000, far, far)):
        partition.append(batch(bytes(100), timestamp=timestamp), NOW_MS + day * DAY_MS)
    seal_all(partition)
    # The second one ended when the third began, on the second day.
    assert partition.retained_from(NOW_MS + 3 * DAY_MS) == 1
    assert partition.retained_from(NOW_MS + 3 * DAY_MS + 1) == 2
    assert partition.retained_from(NOW_MS + 5 * DAY_MS + 1) == 4
    # After a restart it is known when the last segment began, and no other.
    for segment in partition.segments[:-1]:
        segment.created_ms = 0
    assert partition.retained_from(NOW_MS + 5 * DAY_MS) == 1
    assert partition.retained_from(NOW_MS + 5 * DAY_MS + 1) == 4


def test_retention_takes_only_what_is_sealed() -> None:
    partition = new_partition(PartitionSettings(segment_bytes=200, retention_bytes=0))
    for _ in range(6):
        partition.append(batch(bytes(100)), NOW_MS)
    assert partition.retained_from(NOW_MS) == 0
    seal_all(partition)
    assert partition.retained_from(NOW_MS) == 5
    assert not partition.rolls_by_age(NOW_MS)
    assert partition.rolls_by_age(NOW_MS + 8 * DAY_MS)


# ---- swapping


def test_a_compacted_segment_stands_for_what_a_trim_left_of_its_sources() -> None:
    partition = filled(40)
    old = partition.segments[:3]
    new = new_like(partition, old[0].base_offset, old[-1].next_offset)
    partition.trim(old[1].base_offset, now=1.0, now_ms=NOW_MS)
    assert partition.swap(old, new, now=2.0)
    assert partition.segments[0] is new
    assert {one.segment for one in partition.doomed} == set(old)
    assert partition.compacted_to == old[-1].next_offset


def test_a_compacted_segment_is_void_when_all_its_sources_are_gone() -> None:
    partition = filled(40)
    old = partition.segments[:3]
    new = new_like(partition, old[0].base_offset, old[-1].next_offset)
    partition.trim(old[-1].next_offset, now=1.0, now_ms=NOW_MS)
    assert not partition.swap(old, new, now=2.0)
    assert new not in partition.segments


def new_like(partition: Partition, base_offset: int, next_offset: int) -> Segment:
    segment = Segment(partition.disk, "/p", base_offset, 1)
    segment.next_offset, segment.sealed = next_offset, True
    return segment
