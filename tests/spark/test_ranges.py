"""What a batch takes, and how it is cut into tasks."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from millstream.spark.positions import Part, Position
from millstream.spark.ranges import Range, limited_by_bytes, shared_out, tasks_of

T0, T1, T2 = ("t", 0), ("t", 1), ("t", 2)

SIZES = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)


def ranges_of(sizes: list[int]) -> list[Range]:
    return [Range(("t", number), 7, 7 + size) for number, size in enumerate(sizes)]


def test_a_limit_is_shared_out_in_proportion() -> None:
    end = shared_out(100, {T0: 0, T1: 10}, {T0: 300, T1: 110})
    assert end == {T0: 75, T1: 35}


def test_no_partition_starves() -> None:
    end = shared_out(10, {T0: 0, T1: 0, T2: 5}, {T0: 1_000_000, T1: 1, T2: 5})
    assert end[T1] == 1
    assert end[T0] == 9
    assert end[T2] == 5


def test_less_than_the_limit_is_taken_whole() -> None:
    assert shared_out(100, {T0: 0}, {T0: 100}) == {T0: 100}


@given(SIZES, st.integers(1, 20_000))
def test_a_shared_limit_is_kept_and_leads_to_the_end(sizes: list[int], limit: int) -> None:
    start: dict[Part, int] = dict.fromkeys([("t", n) for n in range(len(sizes))], 3)
    end = {part: 3 + size for part, size in zip(start, sizes, strict=True)}
    taken = shared_out(limit, start, end)
    total = sum(taken.values()) - sum(start.values())
    # One more for each partition at most, so that none starves.
    assert total <= limit + len(sizes)
    assert all(start[part] <= taken[part] <= end[part] for part in start)
    assert total >= min(limit, sum(sizes))


def test_bytes_are_limited_by_what_an_offset_weighs() -> None:
    start, end = {T0: 0, T1: 0}, {T0: 100, T1: 100}
    taken = limited_by_bytes(5000, start, end, {T0: 10.0, T1: 90.0})
    assert taken == {T0: 50, T1: 50}
    assert limited_by_bytes(10**9, start, end, {T0: 10.0, T1: 90.0}) == end
    assert limited_by_bytes(1, start, end, {T0: 10.0, T1: 90.0}) == {T0: 1, T1: 1}


def test_without_wishes_a_partition_is_a_task_and_an_empty_one_none() -> None:
    assert tasks_of(ranges_of([5, 0, 9]), None, None) == [Range(T0, 7, 12), Range(T2, 7, 16)]


def test_large_ranges_are_cut_for_more_tasks() -> None:
    tasks = tasks_of(ranges_of([1000, 10]), 5, None)
    assert [task.part for task in tasks] == [T0, T0, T0, T0, T1]
    assert sum(task.size for task in tasks) == 1010


def test_a_task_has_at_most_so_many_records() -> None:
    tasks = tasks_of(ranges_of([10, 3]), None, 4)
    assert [task.size for task in tasks] == [3, 3, 4, 3]


@given(SIZES, st.none() | st.integers(1, 50), st.none() | st.integers(1, 5_000))
def test_tasks_cover_every_offset_once(
    sizes: list[int], min_partitions: int | None, max_records: int | None
) -> None:
    tasks = tasks_of(ranges_of(sizes), min_partitions, max_records)
    at = {("t", number): 7 for number in range(len(sizes))}
    for part, start, end in tasks:
        assert at[part] == start < end
        assert max_records is None or end - start <= max_records
        at[part] = end
    assert at == {("t", number): 7 + size for number, size in enumerate(sizes)}


def test_a_position_is_written_in_one_order() -> None:
    one = Position({("b", 1): 5, ("a", 10): 2, ("a", 9): 1}, {"b": "id-b", "a": "id-a", "z": "?"})
    text = json.dumps(one.to_json())
    assert text == '{"a": {"9": 1, "10": 2}, "b": {"1": 5}, "@ids": {"a": "id-a", "b": "id-b"}}'
    again = Position.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text


def test_a_position_of_sparks_own_connector_is_understood() -> None:
    assert Position.from_json({"t": {"0": 5}}) == Position({T0: 5}, {})
