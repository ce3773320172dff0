"""Marks of dead letters against a set of offsets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.dead_letter_view import CHUNK_OFFSETS, DeadLetterView, Place

PLACE = Place(bytes(16), 3)
OFFSETS = st.one_of(
    st.integers(0, 40),
    st.integers(CHUNK_OFFSETS - 5, CHUNK_OFFSETS + 5),
    st.integers(0, 3 * CHUNK_OFFSETS),
)
RUNS = st.tuples(OFFSETS, st.integers(1, CHUNK_OFFSETS + 100)).map(
    lambda run: range(run[0], run[0] + run[1])
)


def view_of(gone: set[int]) -> DeadLetterView:
    view = DeadLetterView()
    view.apply(view.marked(PLACE, gone))
    return view


def check(view: DeadLetterView, gone: set[int], start: int) -> None:
    first = start
    while first in gone:
        first += 1
    assert view.first_left(PLACE, start) == first
    assert view.count(PLACE, start) == sum(offset >= start for offset in gone)
    for offset in (start, first, *list(gone)[:5]):
        assert view.is_gone(PLACE, offset) == (offset in gone)


@given(st.lists(st.one_of(OFFSETS.map(lambda one: range(one, one + 1)), RUNS), max_size=8), OFFSETS)
def test_marks_are_a_set_of_offsets(runs: list[range], start: int) -> None:
    view, gone = DeadLetterView(), set[int]()
    for run in runs:
        view.apply(view.marked(PLACE, run))
        gone |= set(run)
    check(view, gone, start)
    assert not view.is_gone(Place(bytes(16), 4), start)
    again = DeadLetterView()
    again.apply(view.entries())
    check(again, gone, start)
    for key, value in view.entries():
        assert view.value_of(key) == value
        assert value is None or len(value) <= CHUNK_OFFSETS // 8


@given(st.lists(RUNS, max_size=6), OFFSETS, st.integers(1, 5))
def test_marks_are_told_as_runs(runs: list[range], start: int, count: int) -> None:
    gone = {offset for run in runs for offset in run}
    found: list[tuple[int, int]] = []
    for offset in sorted(one for one in gone if one >= start):
        if found and found[-1][1] == offset - 1:
            found[-1] = (found[-1][0], offset)
        else:
            found.append((offset, offset))
    view = view_of(gone)
    assert view.runs(PLACE, start, len(found) + 1) == found
    assert view.runs(PLACE, start, count) == found[:count]
    assert view.runs(Place(bytes(16), 4), start, count) == []


@given(RUNS, RUNS, OFFSETS)
def test_marks_past_an_end_and_before_a_start_are_forgotten(
    one: range, other: range, offset: int
) -> None:
    gone = set(one) | set(other)
    view = view_of(gone)
    view.apply(view.past(PLACE, offset))
    check(view, {one for one in gone if one < offset}, 0)
    view = view_of(gone)
    view.apply(view.before(PLACE, offset))
    left = {one for one in gone if one >= offset // CHUNK_OFFSETS * CHUNK_OFFSETS}
    check(view, left, offset)


def test_nothing_is_kept_of_a_partition_without_marks() -> None:
    view = view_of({1, 2})
    view.apply(view.past(PLACE, 0))
    assert view.places() == []
    assert list(view.entries()) == []
