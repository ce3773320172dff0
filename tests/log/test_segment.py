"""One segment: where reads begin and end, its seal, and finding by time."""

from __future__ import annotations

import pytest

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, batch, header_of, records, split
from millstream.errors import LogDamaged
from millstream.log import batch as batches
from millstream.log.checks import BLOCK_BYTES
from millstream.log.placing import Placed
from millstream.log.segment import (
    Intervals,
    NotCached,
    Scanner,
    Segment,
    parse_log_name,
    read_seal,
    seal_job,
    stem,
)

BASE = 1000


def new_segment(
    disk: SimulatedDisk, index_bytes: int = 4096, base: int = BASE, generation: int = 0
) -> Segment:
    if disk.size_of("/p") is None:
        disk.make_directory("/p")
    segment = Segment(disk, "/p", base, generation)
    segment.create(NOW_MS, Intervals(index_bytes=index_bytes))
    return segment


def append(segment: Segment, data: bytes, offset: int | None = None) -> None:
    offset = segment.next_offset if offset is None else offset
    header = header_of(data)
    placed = Placed(segment, segment.size, offset, leader_epoch=0, data=data, header=header)
    segment.write([placed])


def seal(segment: Segment) -> Segment:
    """The same segment, as one finds it after a restart."""
    seal_job(segment, b"state").run()
    found = Segment(segment.disk, "/p", segment.base_offset, segment.generation)
    found.size, found.next_offset = segment.size, segment.next_offset
    found.max_timestamp, found.sealed = segment.max_timestamp, True
    segment.close()
    return found


def whole(segment: Segment) -> tuple[int, int]:
    return segment.size, segment.next_offset


def sizes_of(segment: Segment) -> dict[int, int]:
    """The size of each batch, by its base offset."""
    data = segment.disk.read(segment.open().file, segment.size, 0)
    return {header.base_offset: header.size for header, _ in split(data)}


def check_read(segment: Segment, offset: int, bytes_max: int, end: tuple[int, int]) -> None:
    loaded = segment.open()
    chunk = segment.read(loaded, offset, bytes_max, end, cached=False)
    found = split(chunk.data)
    assert found[0][0].base_offset <= offset < found[0][0].next_offset
    assert chunk.next_offset == found[-1][0].next_offset
    assert chunk.next_offset <= end[1]
    assert len(chunk.data) <= bytes_max or len(found) == 1
    expected = [header.base_offset for header, _ in found]
    assert expected == sorted(expected)


# ---- reading


@pytest.mark.parametrize("index_bytes", [1, 150, 700, 4096])
@pytest.mark.parametrize("sealed", [False, True])
def test_a_read_has_whole_batches_from_the_one_that_holds_the_offset(
    index_bytes: int, sealed: bool
) -> None:
    segment = new_segment(SimulatedDisk(), index_bytes)
    for n in range(25):
        append(segment, batch(*(b"%d" % n for _ in range(n % 3 + 1)), bytes(n * 7 % 90)))
    if sealed:
        segment = seal(segment)
    limits = [1, 60, 61, 62, 100, 149, 150, 151, 300, 700, 1000, 4096, segment.size, 10**9]
    for offset in range(BASE, segment.next_offset):
        for bytes_max in limits:
            check_read(segment, offset, bytes_max, whole(segment))


def test_every_byte_limit_of_a_small_segment() -> None:
    segment = new_segment(SimulatedDisk(), 200)
    for n in range(6):
        append(segment, batch(b"a", bytes(n * 30)))
    sizes = list(sizes_of(segment).values())
    for bytes_max in range(1, segment.size + 2):
        chunk = segment.read(segment.open(), BASE, bytes_max, whole(segment), cached=False)
        # Never more than asked but for a first batch that is larger; and never nothing.
        assert len(chunk.data) >= sizes[0]
        assert len(chunk.data) <= max(bytes_max, sizes[0])
        check_read(segment, BASE, bytes_max, whole(segment))


def test_a_reader_that_goes_on_sees_every_batch_once() -> None:
    segment = new_segment(SimulatedDisk(), 300)
    for n in range(40):
        append(segment, batch(b"%d" % n, bytes(n)))
    for bytes_max in (1, 100, 333, 1000, 5000):
        offset, seen = BASE, []
        while offset < segment.next_offset:
            chunk = segment.read(segment.open(), offset, bytes_max, whole(segment), cached=False)
            seen += [record.offset for record in records(chunk.data)]
            offset = chunk.next_offset
        assert seen == list(range(BASE, BASE + 80))


def test_a_read_ends_where_readers_may_see_to() -> None:
    segment = new_segment(SimulatedDisk(), 200)
    ends = [(0, BASE)]
    for n in range(12):
        append(segment, batch(b"%d" % n, b"x"))
        ends.append(whole(segment))
    for end in ends[1:]:
        for offset in range(BASE, end[1]):
            for bytes_max in (1, 150, 10**6):
                check_read(segment, offset, bytes_max, end)


def test_offsets_that_compaction_took_are_passed_over() -> None:
    segment = new_segment(SimulatedDisk(), 100, generation=1)
    for offset in (1003, 1010, 1011, 1040):
        append(segment, batch(b"x" * 50), offset)
    segment.next_offset = 1050
    segment = seal(segment)
    for wanted, first in ((1000, 1003), (1004, 1010), (1012, 1040), (1040, 1040)):
        chunk = segment.read(segment.open(), wanted, 1, whole(segment), cached=False)
        assert header_of(chunk.data).base_offset == first
    behind = segment.read(segment.open(), 1041, 1, whole(segment), cached=False)
    assert (len(behind.data), behind.next_offset) == (0, 1050)


def test_a_cached_read_says_when_it_would_have_to_wait() -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk)
    append(segment, batch(b"a"))
    disk.cold = True
    with pytest.raises(NotCached):
        segment.read(segment.open(), BASE, 100, whole(segment), cached=True)
    assert len(segment.read(segment.open(), BASE, 100, whole(segment), cached=False).data)


# ---- damage


def test_a_changed_byte_of_a_sealed_segment_is_found_when_it_is_read() -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk)
    while segment.size < 3 * BLOCK_BYTES:
        append(segment, batch(bytes(5000)))
    path, last = segment.path + ".log", segment.next_offset - 1
    segment = seal(segment)
    content = bytearray(disk.files()[path])
    # A base offset: no batch's own CRC covers it.
    place = next(at for at, _ in batches.walk(content) if at > BLOCK_BYTES) + 7
    content[place] ^= 1
    disk.put(path, bytes(content))
    assert len(segment.read(segment.open(), BASE, 1, whole(segment), cached=False).data)
    with pytest.raises(LogDamaged) as caught:
        segment.read(segment.open(), BASE, 2 * BLOCK_BYTES, whole(segment), cached=False)
    fields = caught.value.fields
    assert isinstance(fields["first"], int)
    assert isinstance(fields["last"], int)
    assert BASE < fields["first"] <= fields["last"] < last
    # It says where to go on, and that is right.
    after = fields["last"] + 1
    chunk = segment.read(segment.open(), after, 2 * BLOCK_BYTES, whole(segment), cached=False)
    assert header_of(chunk.data).base_offset == after


def test_a_seal_that_is_missing_or_wrong_is_not_trusted() -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk)
    append(segment, batch(b"a"))
    segment = seal(segment)
    good = disk.files()[segment.path + ".seal"]
    for at in range(len(good)):
        disk.put(segment.path + ".seal", good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert read_seal(disk, segment.path) is None
        with pytest.raises(LogDamaged):
            segment.load()
    for length in range(len(good)):
        disk.put(segment.path + ".seal", good[:length])
        assert read_seal(disk, segment.path) is None
    disk.put(segment.path + ".seal", good)
    disk.put(segment.path + ".log", disk.files()[segment.path + ".log"] + b"\0")
    with pytest.raises(LogDamaged):
        segment.load()
    assert disk._handles == {}


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("change", ["deleted", "empty", "flipped"])
def test_indexes_are_caches(suffix: str, change: str) -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk, 100)
    for n in range(20):
        append(segment, batch(b"%d" % n, timestamp=NOW_MS + 2000 * n))
    segment = seal(segment)
    good = segment.load()
    content = disk.files()[segment.path + suffix]
    if change == "deleted":
        disk.unlink(segment.path + suffix)
    else:
        disk.put(segment.path + suffix, b"" if change == "empty" else b"\x40" + content[1:])
    segment.intervals = Intervals(index_bytes=100)
    rebuilt = segment.load()
    assert rebuilt.index.encode() == good.index.encode()
    assert rebuilt.times.encode() == good.times.encode()


# ---- seals and scans


def test_a_seal_tells_what_the_segment_is() -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk)
    for n in range(30):
        append(segment, batch(bytes(5000), b"b", timestamp=NOW_MS + n))
    size = segment.size
    sealed = seal(segment)
    found = read_seal(disk, sealed.path)
    assert found is not None
    assert (found.base_offset, found.next_offset) == (BASE, BASE + 60)
    assert (found.size, found.max_timestamp) == (size, NOW_MS + 29)
    assert len(found.checks.whole) == size // BLOCK_BYTES == 2
    for suffix in (".log", ".index", ".timeindex", ".state", ".seal"):
        assert disk.size_of(sealed.path + suffix) is not None


def test_a_seal_is_durable_with_all_that_it_covers() -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk)
    disk.sync_directory("/")
    for n in range(10):
        append(segment, batch(b"%d" % n))
    path = segment.path
    before = {name: content for name, content in disk.files().items() if name == path + ".log"}
    seal(segment)
    after = disk.crash("nothing").files()
    assert after[path + ".log"] == before[path + ".log"]
    for suffix in (".seal", ".index", ".timeindex", ".state"):
        assert after[path + suffix] == disk.files()[path + suffix]


@pytest.mark.parametrize("change", ["nothing", "cut", "zeroes", "flip"])
def test_a_scan_takes_every_whole_batch_up_to_the_first_that_is_not(change: str) -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk, 100)
    ends = [0]
    for n in range(10):
        append(segment, batch(b"%d" % n, b"x", timestamp=NOW_MS + n * 500))
        ends.append(segment.size)
    content = disk.files()[segment.path + ".log"]
    loaded = segment.open()
    for place in range(0, len(content), 7):
        changed = {
            "nothing": content,
            "cut": content[:place],
            "zeroes": content[:place] + bytes(len(content) - place),
            "flip": content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :],
        }[change]
        disk.put("/p/scanned", changed)
        file = disk.open("/p/scanned", "read")
        scan = Scanner(disk, file, BASE, segment.intervals)
        scan.run(len(changed), exact=True)
        disk.close(file)
        good = max(end for end in ends if end <= place) if change != "nothing" else ends[-1]
        # A leader epoch is covered by nothing but the block checksums.
        is_epoch = change == "flip" and 12 <= place - good < 16
        assert is_epoch or scan.end == good
        if scan.end == ends[-1]:
            assert scan.index.encode() == loaded.index.encode()
            assert scan.times.encode() == loaded.times.encode()
            assert scan.next_offset == segment.next_offset


# ---- times


def test_finding_by_time_is_exact_with_times_out_of_order() -> None:
    segment = new_segment(SimulatedDisk(), 150)
    times: list[int] = []
    for n in range(50):
        some = [NOW_MS + n * 400 + delta for delta in (0, -700, 350)]
        if n % 9 == 4:
            some = [time - 5000 for time in some]
        append(segment, batch(b"a", b"b", b"c", times=some))
        times += some
    segment = seal(segment)
    loaded = segment.open()
    for wanted in sorted({*times, *(time + 1 for time in times), 0}):
        for first in (BASE, BASE + 77):
            later = (
                (BASE + at, time)
                for at, time in enumerate(times)
                if time >= wanted and BASE + at >= first
            )
            assert segment.find_time(loaded, wanted, first, segment.size) == next(later, None)


def test_finding_by_time_reads_batches_larger_than_its_block() -> None:
    segment = new_segment(SimulatedDisk())
    append(segment, batch(bytes(3 << 20), timestamp=NOW_MS))
    append(segment, batch(bytes(3 << 20), timestamp=NOW_MS + 5))
    found = segment.find_time(segment.open(), NOW_MS + 3, 0, segment.size)
    assert found == (BASE + 1, NOW_MS + 5)


# ---- names


def test_names_of_log_files() -> None:
    assert parse_log_name(stem(7) + ".log") == (7, 0)
    assert parse_log_name(stem(7, 3) + ".log") == (7, 3)
    for name in ("7.log", stem(7) + ".index", stem(7) + ".x.log", "log", stem(7) + ".log.new"):
        assert parse_log_name(name) is None


def test_a_file_in_use_is_closed_when_its_last_user_is_done() -> None:
    disk = SimulatedDisk()
    segment = new_segment(disk)
    append(segment, batch(b"a"))
    segment.hold()
    segment.hold()
    segment.close()
    segment.release()
    assert disk._handles
    segment.release()
    assert not disk._handles
