"""Batches that get their place, and the bytes that are made of them; each test on both twins."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faults.simulated_disk import SimulatedDisk
from log.making import NOW_MS, Sender, batch, header_of
from log.placing_twins import both_twins
from millstream.log._batch_layout import PLACE_BYTES
from millstream.log._placing_layout import ENTRY, key_of
from millstream.log.index import SPAN_MAX
from millstream.log.partition import PartitionSettings
from millstream.log.segment import Intervals, Segment

UUID = bytes(range(16))
BASE = 700
EPOCH = 9


def new_end(twin: Any, settings: PartitionSettings | None = None) -> Any:
    disk = SimulatedDisk()
    disk.make_directory("/p")
    segment = Segment(disk, "/p", BASE)
    segment.create(NOW_MS, Intervals())
    end = twin.End(key_of(UUID, 3), settings or PartitionSettings(), EPOCH)
    end.segments = [segment]
    end.epochs = [(EPOCH, BASE)]
    end.next_offset = end.high_watermark = BASE
    return end


def put(end: Any, data: Any, now_ms: int = NOW_MS) -> Any:
    return end.place(data, header_of(data), now_ms)


@both_twins
def test_batches_follow_each_other_in_offsets_and_bytes(twin: Any) -> None:
    end = new_end(twin)
    two, one = batch(b"a", b"b"), batch(b"c")
    first, second = put(end, two), put(end, one)
    assert (first.base_offset, first.position, first.size) == (BASE, 0, len(two))
    assert (second.base_offset, second.position) == (BASE + 2, len(two))
    assert (second.next_offset, end.next_offset) == (BASE + 3, BASE + 3)
    assert end.tail == len(two) + len(one)
    assert first.segment is end.segments[0]
    assert end.changed


@both_twins
def test_what_needs_more_than_a_place_gets_none_and_changes_nothing(twin: Any) -> None:
    data = batch(bytes(40))
    tight = PartitionSettings(segment_bytes=2 * len(data), segment_age_ms=1000)

    def other(change: str) -> Any:
        end = new_end(twin, tight)
        assert put(end, data) is not None
        if change == "closed":
            end.is_closed = True
        elif change == "stuck":
            end.unapplied, end.is_stuck = [put(end, data)], True
        elif change == "no epoch":
            end.epochs = []
        elif change == "another epoch":
            end.leader_epoch += 1
        elif change == "full":
            assert put(end, data) is not None
        elif change == "span":
            end.next_offset = BASE + SPAN_MAX
        return end

    for change in ("closed", "stuck", "no epoch", "another epoch", "full", "span"):
        end = other(change)
        before = (end.mark(), end.tail, end.next_offset)
        assert put(end, data) is None, change
        assert (end.mark(), end.tail, end.next_offset) == before, change
    assert put(other(""), data, NOW_MS + 999) is not None
    assert put(other(""), data, NOW_MS + 1000) is None
    assert put(other(""), batch(b"s", sender=Sender(7))) is None
    assert put(other(""), batch(bytes(41))) is None


@both_twins
def test_new_settings_and_a_new_segment_count_from_the_next_batch_on(twin: Any) -> None:
    end = new_end(twin)
    data = batch(b"a")
    assert put(end, data) is not None
    end.settings = PartitionSettings(segment_bytes=len(data))
    assert put(end, data) is None
    segment = Segment(end.segments[0].disk, "/p", end.next_offset)
    segment.create(NOW_MS, Intervals())
    end.segments.append(segment)
    end.tail = 0
    assert put(end, data).segment is segment


@both_twins
def test_the_first_batch_of_a_segment_may_be_larger_than_it_should_be(twin: Any) -> None:
    end = new_end(twin, PartitionSettings(segment_bytes=10, segment_age_ms=1000))
    assert put(end, batch(bytes(100)), NOW_MS + 5000) is not None


@both_twins
def test_marks_of_the_same_place_are_equal(twin: Any) -> None:
    end = new_end(twin)
    before = end.mark()
    assert before == end.mark()
    put(end, batch(b"a"))
    after = end.mark()
    assert before != after
    assert (after.next_offset, after.segments, after.epochs, after.undo) == (BASE + 1, 1, 1, 0)


@both_twins
def test_readers_see_what_was_advanced_to_and_never_less(twin: Any) -> None:
    end = new_end(twin)
    first, second = put(end, batch(b"a")), put(end, batch(b"b"))
    end.advance(second)
    assert end.high_watermark == BASE + 2
    assert end.visible == (end.segments[0], end.tail)
    with pytest.raises(AssertionError):
        end.advance(first)


@both_twins
@given(sizes=st.lists(st.integers(0, 300), min_size=1, max_size=8), notes=st.booleans())
def test_entries_hold_place_and_batch(twin: Any, sizes: list[int], notes: bool) -> None:
    end = new_end(twin)
    made = [batch(bytes(size)) for size in sizes]
    # As it comes from a producer's request: any kind of buffer.
    kinds = (bytes, bytearray, memoryview)
    run = [put(end, kinds[at % 3](data)) for at, data in enumerate(made)]
    entries = [*run, b"note", memoryview(b"view")] if notes else run
    body = twin.joined_entries(entries, 5)
    assert len(body) == 5 + twin.body_bytes(entries)
    assert body[:5] == bytes(5)
    at = 5
    for placed, data in zip(run, made, strict=True):
        kind, uuid, number, segment, place, offset, size = ENTRY.unpack_from(body, at)
        assert (kind, uuid, number, segment) == (1, UUID, 3, BASE)
        assert (place, offset, size) == (placed.position, placed.base_offset, len(data))
        assert bytes(body[at : at + ENTRY.size]) == placed.entry_head()
        at += ENTRY.size
        stored = bytes(body[at : at + size])
        header = header_of(stored)
        assert (header.base_offset, header.leader_epoch) == (offset, EPOCH)
        assert header.size == len(data)
        assert stored[:PLACE_BYTES] == placed.prefix()
        assert stored[PLACE_BYTES:] == data[PLACE_BYTES:]
        at += size
    assert bytes(body[at:]) == (b"noteview" if notes else b"")
    joined = b"".join(one.prefix() + bytes(one.data)[PLACE_BYTES:] for one in run)
    assert twin.joined_batches(run) == joined


@both_twins
def test_a_batch_without_a_key_has_no_entry(twin: Any) -> None:
    data = batch(b"a")
    segment = new_end(twin).segments[0]
    placed = twin.Placed(segment, 0, 5, leader_epoch=2, data=data, header=header_of(data))
    assert placed.next_offset == 6
    assert twin.joined_batches([placed])[PLACE_BYTES:] == data[PLACE_BYTES:]
    with pytest.raises(ValueError, match="not for the journal"):
        placed.entry_head()
    with pytest.raises(ValueError, match="not for the journal"):
        twin.joined_entries([placed], 0)


@both_twins
@given(
    times=st.lists(st.integers(0, 6), min_size=1, max_size=12),
    at=st.integers(0, 12),
    last_indexed=st.integers(-1, 400),
    newest=st.integers(-1, 6),
)
def test_an_index_hears_of_what_is_far_from_the_last_or_newer(
    twin: Any, times: list[int], at: int, last_indexed: int, newest: int
) -> None:
    end = new_end(twin)
    run = [put(end, batch(bytes(20), timestamp=time)) for time in times]
    expected = [
        number
        for number, (placed, time) in enumerate(zip(run, times, strict=True))
        if number >= at
        and (last_indexed < 0 or placed.position - last_indexed >= 150 or time > newest)
    ]
    found = twin.next_noted(run, at, last_indexed, 150, newest)
    assert found == (expected[0] if expected else max(at, len(run)))
