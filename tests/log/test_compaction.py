"""A run of compaction: which segments it makes of which, and what it leaves alone."""

from __future__ import annotations

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, batch, records
from millstream.log.compaction import (
    KEY_OVERHEAD_BYTES,
    CompactionJob,
    CompactionResult,
    Source,
    compact,
)
from millstream.log.partition import Partition, PartitionId, PartitionSettings
from millstream.log.segment import Segment, read_seal


class Desk:
    """A partition, of which the test ends the segments."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.make_directory("/p")
        self.partition = Partition(
            self.disk,
            "/p",
            id=PartitionId("t", 0),
            uuid=bytes(16),
            settings=PartitionSettings(),
            leader_epoch=0,
        )
        self.partition.start_empty(NOW_MS)

    def segment(self, *rows: tuple[bytes | None, bytes | None], timestamp: int = NOW_MS) -> None:
        """A sealed segment, with a batch for each row."""
        for key, value in rows:
            self.partition.append(batch(value, key=key, timestamp=timestamp), NOW_MS)
        self.partition.roll(NOW_MS)
        job = self.partition.next_seal()
        assert job is not None
        job.run()
        self.partition.sealed()

    def compact(
        self, *, segment_bytes: int = 1, keys_bytes_max: int = 10**9, new_from: int = 0
    ) -> CompactionResult:
        sources = [
            Source(one.base_offset, one.generation, one.next_offset, one.size)
            for one in self.partition.segments[:-1]
        ]
        job = CompactionJob(
            directory="/p",
            sources=sources,
            segment_bytes=segment_bytes,
            index_bytes=4096,
            time_ms=1000,
            tombstones_before_ms=NOW_MS,
            new_from=new_from,
            keys_bytes_max=keys_bytes_max,
        )
        return compact(self.disk, job)

    def offsets(self, base: int, generation: int) -> list[int]:
        segment = Segment(self.disk, "/p", base, generation)
        data = self.disk.files()[segment.path + ".log"]
        return [record.offset for record in records(data)]


def test_a_segment_that_loses_nothing_is_left_alone() -> None:
    desk = Desk()
    desk.segment((b"a", b"1"), (b"b", b"1"))
    desk.segment((b"c", b"1"), (b"c", b"2"))
    before = desk.disk.files()
    result = desk.compact()
    [output] = result.outputs
    assert (output.base_offset, output.generation, output.sources) == (2, 1, 1)
    assert (result.end, result.records_before, result.records_after) == (4, 4, 3)
    made = set(desk.disk.files()) - set(before)
    assert {path.rpartition("/")[2][:22] for path in made} == {"00000000000000000002.1"}
    assert all(desk.disk.files()[path] == content for path, content in before.items())


def test_small_segments_are_made_into_one() -> None:
    desk = Desk()
    for n in range(6):
        desk.segment((b"k%d" % n, b"1"), (b"same", b"%d" % n))
    sizes = [segment.size for segment in desk.partition.segments[:-1]]
    result = desk.compact(segment_bytes=sum(sizes[:3]))
    assert [(one.base_offset, one.sources) for one in result.outputs] == [(0, 3), (6, 3)]
    assert desk.offsets(0, 1) == [0, 2, 4]
    assert desk.offsets(6, 1) == [6, 8, 10, 11]


def test_the_new_segment_is_sealed_and_answers_for_all_offsets_of_its_sources() -> None:
    desk = Desk()
    desk.segment((b"a", b"1"), (b"a", b"2"))
    desk.segment((b"a", b"3"))
    desk.segment((b"a", b"4"))
    result = desk.compact(segment_bytes=10**6)
    [output] = result.outputs
    assert (output.base_offset, output.next_offset) == (0, 4)
    seal = read_seal(desk.disk, "/p/00000000000000000000.1")
    assert seal is not None
    assert (seal.base_offset, seal.next_offset, seal.size) == (0, 4, output.size)
    last = desk.partition.segments[2].path
    files = desk.disk.files()
    assert files["/p/00000000000000000000.1.state"] == files[last + ".state"]


def test_a_segment_that_loses_everything_is_empty() -> None:
    desk = Desk()
    desk.segment((b"a", b"1"))
    desk.segment((b"a", b"2"))
    result = desk.compact()
    [output] = result.outputs
    assert (output.base_offset, output.next_offset, output.size) == (0, 1, 0)
    assert output.max_timestamp == -1


def test_keys_that_do_not_fit_are_left_for_a_later_run() -> None:
    desk = Desk()
    for _ in range(4):
        desk.segment((b"a", b"1"), (b"b", b"1"))
    first = desk.compact(keys_bytes_max=KEY_OVERHEAD_BYTES)
    assert first.end == 2
    assert first.outputs == []
    second = desk.compact(keys_bytes_max=KEY_OVERHEAD_BYTES, new_from=first.end)
    # Every run gets at least one segment further, whatever there is before it.
    assert second.end == 4
    assert [one.base_offset for one in second.outputs] == [0]
    assert second.outputs[0].size == 0


def test_tombstones_of_an_earlier_run_go_in_a_later_one() -> None:
    desk = Desk()
    desk.segment((b"a", None), (b"b", b"1"), timestamp=NOW_MS - 1)
    desk.segment((b"c", b"1"))
    result = desk.compact(new_from=2)
    assert [one.base_offset for one in result.outputs] == [0]
    assert desk.offsets(0, 1) == [1]


def test_a_tombstone_is_as_old_as_the_newest_record_of_its_batch() -> None:
    desk = Desk()
    desk.segment((b"a", None), timestamp=NOW_MS)
    desk.segment((b"b", None), timestamp=NOW_MS - 1)
    result = desk.compact()
    assert [one.base_offset for one in result.outputs] == [1]


def test_a_run_closes_every_file() -> None:
    desk = Desk()
    for n in range(5):
        desk.segment((b"a", b"%d" % n))
    desk.partition.close()
    desk.compact()
    assert desk.disk._handles == {}
