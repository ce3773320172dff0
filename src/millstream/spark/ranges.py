"""What a micro-batch takes, and how a batch is cut into tasks. Pure: numbers in, numbers out.

As Spark's Kafka connector does it: a limit is shared out in proportion to what each partition has,
and no partition with anything starves; `minPartitions` cuts large ranges into more tasks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from millstream.spark.positions import Part


class Range(NamedTuple):
    """Offsets from `start` up to, and without, `end`."""

    part: Part
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def shared_out(limit: int, start: Mapping[Part, int], end: Mapping[Part, int]) -> dict[Part, int]:
    """The end of a batch of `limit` offsets, or of one for each partition, if those are more."""
    sizes = {part: end[part] - start[part] for part in end if end[part] > start[part]}
    total = sum(sizes.values())
    if total <= limit:
        return dict(end)
    shares = {part: max(1, limit * size // total) for part, size in sizes.items()}
    # What rounding left over goes to the largest.
    left = max(limit - sum(shares.values()), 0)
    for part in sorted(sizes, key=lambda part: (-sizes[part], part)):
        more = min(left, sizes[part] - shares[part])
        shares[part] += more
        left -= more
    return {part: start[part] + shares[part] if part in shares else end[part] for part in end}


def limited_by_bytes(
    limit: int,
    start: Mapping[Part, int],
    end: Mapping[Part, int],
    bytes_each: Mapping[Part, float],
) -> dict[Part, int]:
    """The same for bytes, by what an offset has on the average in each partition."""
    weights = {
        part: (end[part] - start[part]) * bytes_each.get(part, 1.0)
        for part in end
        if end[part] > start[part]
    }
    total = sum(weights.values())
    if total <= limit:
        return dict(end)
    return {
        part: min(end[part], start[part] + max(1, int((end[part] - start[part]) * limit / total)))
        if part in weights
        else end[part]
        for part in end
    }


def tasks_of(
    ranges: Iterable[Range], min_partitions: int | None, max_records: int | None
) -> list[Range]:
    """Ranges that have something, cut into as many tasks as the options ask for."""
    wanted = [one for one in ranges if one.size > 0]
    if max_records is not None:
        wanted = [piece for one in wanted for piece in _cut(one, -(-one.size // max_records))]
    if min_partitions is None or len(wanted) >= min_partitions:
        return wanted
    return _spread(wanted, min_partitions)


def _spread(ranges: Sequence[Range], count: int) -> list[Range]:
    """Ranges that would be less than one task stay whole, and do not count for the others."""
    total = sum(one.size for one in ranges)
    small = {one for one in ranges if _pieces(one.size, total, count) == 1}
    rest = total - sum(one.size for one in small)
    left = max(count - len(small), 1)
    return [
        piece
        for one in ranges
        for piece in _cut(one, 1 if one in small else _pieces(one.size, rest, left))
    ]


def _pieces(size: int, total: int, count: int) -> int:
    return max(1, round(size * count / total))


def _cut(one: Range, count: int) -> list[Range]:
    """Into so many pieces as even as they can be; none is empty."""
    count = max(1, min(count, one.size))
    edges = [one.start + one.size * index // count for index in range(count + 1)]
    return [Range(one.part, edges[index], edges[index + 1]) for index in range(count)]
