"""Sparse indexes, and the checksums of blocks."""

from __future__ import annotations

from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from log.effort import effort
from millstream.log.checks import BLOCK_BYTES, BlockChecks
from millstream.log.index import NO_TIMESTAMP, SPAN_MAX, OffsetIndex, TimeIndex

rising = st.lists(st.integers(0, SPAN_MAX), min_size=1, max_size=30, unique=True).map(sorted)


def offset_index(offsets: list[int], positions: list[int]) -> OffsetIndex:
    index = OffsetIndex()
    for offset, position in zip(offsets, positions, strict=True):
        index.add(offset, position)
    return index


# ---- offsets


def test_an_empty_index_points_to_the_first_byte() -> None:
    index = OffsetIndex()
    assert index.floor(10) == index.boundary(10) == (0, 0)
    assert index.encode() == b""


@effort(100)
@given(rising, rising, st.integers(0, SPAN_MAX))
def test_an_index_gives_the_last_entry_at_or_before(
    offsets: list[int], positions: list[int], wanted: int
) -> None:
    count = min(len(offsets), len(positions))
    pairs = list(zip(offsets[:count], positions[:count], strict=True))
    index = offset_index(offsets[:count], positions[:count])
    before = [pair for pair in pairs if pair[0] <= wanted]
    assert index.floor(wanted) == (before[-1] if before else (0, 0))
    before = [pair for pair in pairs if pair[1] <= wanted]
    assert index.boundary(wanted) == (before[-1] if before else (0, 0))


@effort(100)
@given(rising, st.data())
def test_an_index_is_read_back_as_it_was_written(values: list[int], data: st.DataObject) -> None:
    index = offset_index(values, values)
    first = data.draw(st.integers(0, len(values)))
    # The file grows by what is new since the last time.
    written = index.encode()[: 8 * first] + index.encode(first)
    again = OffsetIndex.decode(written)
    assert again is not None
    assert (again.offsets, again.positions) == (index.offsets, index.positions)


def test_truncating_keeps_the_first_entries() -> None:
    index = offset_index([0, 5, 9], [0, 100, 200])
    index.truncate(1)
    assert (list(index.offsets), list(index.positions)) == ([0], [0])


def test_bytes_that_are_no_index_are_not_taken_for_one() -> None:
    good = offset_index([0, 5, 9], [0, 100, 200]).encode()
    assert OffsetIndex.decode(good[:-1]) is None
    assert OffsetIndex.decode(good[8:] + good[:8]) is None
    assert OffsetIndex.decode(good + good[-8:]) is None


# ---- times


@effort(100)
@given(rising, st.integers(-5, SPAN_MAX))
def test_a_time_index_gives_the_last_entry_that_is_older(times: list[int], wanted: int) -> None:
    index = TimeIndex()
    for offset, timestamp in enumerate(times):
        index.add(timestamp, offset)
    older = [(timestamp, at) for at, timestamp in enumerate(times) if timestamp < wanted]
    assert index.before(wanted) == (older[-1] if older else (NO_TIMESTAMP, 0))
    assert index.newest == times[-1]
    again = TimeIndex.decode(index.encode())
    assert again is not None
    assert (again.timestamps, again.offsets) == (index.timestamps, index.offsets)


def test_a_time_index_holds_times_before_1970() -> None:
    index = TimeIndex()
    index.add(-(2**63), 0)
    index.add(2**63 - 1, 1)
    again = TimeIndex.decode(index.encode())
    assert again is not None
    assert list(again.timestamps) == [-(2**63), 2**63 - 1]


def test_bytes_that_are_no_time_index_are_not_taken_for_one() -> None:
    index = TimeIndex()
    assert index.newest == NO_TIMESTAMP
    for offset in range(3):
        index.add(offset * 10, offset)
    good = index.encode()
    assert TimeIndex.decode(good[:-1]) is None
    assert TimeIndex.decode(good[12:] + good[:12]) is None
    index.truncate(1)
    assert index.encode() == good[:12]


# ---- blocks


@effort(30)
@given(st.lists(st.integers(0, 3 * BLOCK_BYTES), max_size=6), st.integers(0, 255))
def test_checksums_do_not_depend_on_how_the_bytes_arrive(sizes: list[int], seed: int) -> None:
    pieces = [bytes([seed ^ (at & 0xFF)]) * size for at, size in enumerate(sizes)]
    whole = b"".join(pieces)
    checks = BlockChecks()
    for piece in pieces:
        checks.extend(piece)
    assert checks.size == len(whole)
    blocks = [whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES)]
    for number, block in enumerate(blocks):
        assert checks.is_right(number, block)
        assert checks.block_end(number) == min((number + 1) * BLOCK_BYTES, len(whole))
    assert list(checks.whole) == [crc32c(one) for one in blocks if len(one) == BLOCK_BYTES]


def test_a_changed_byte_is_seen_in_its_block_alone() -> None:
    data = bytearray(2 * BLOCK_BYTES + 10)
    checks = BlockChecks()
    checks.extend(data)
    for place in (0, BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES + 9):
        data[place] ^= 1
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        wrong = [n for n, block in enumerate(blocks) if not checks.is_right(n, bytes(block))]
        assert wrong == [place // BLOCK_BYTES]
        data[place] ^= 1


def test_a_copy_goes_its_own_way() -> None:
    checks = BlockChecks()
    checks.extend(bytes(BLOCK_BYTES + 5))
    copy = checks.copy()
    checks.extend(b"more")
    assert (copy.size, copy.partial) == (BLOCK_BYTES + 5, crc32c(bytes(5)))
    assert copy.is_right(1, bytes(5))
