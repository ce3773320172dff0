"""Filters of a query as bounds of what is read.

A filter on topic, partition or offset is kept by reading only that. One on the time says only
where to begin, because records need not be in the order of their times, so Spark looks at the rows
again. All others are left to Spark.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from millstream.spark.driver import EVERYTHING, Bounds

# Columns that are never null.
_NEVER_NULL = frozenset(("topic", "partition", "offset", "timestampType"))


def bounds_of(filters: Iterable[Filter]) -> tuple[Bounds, list[Filter]]:
    """What to read, and the filters that Spark has to look at."""
    bounds, left = EVERYTHING, []
    for one in filters:
        narrowed = _narrowed(bounds, one)
        if narrowed is None:
            left.append(one)
            continue
        bounds, is_whole = narrowed
        if not is_whole:
            left.append(one)
    return bounds, left


def _narrowed(bounds: Bounds, one: Filter) -> tuple[Bounds, bool] | None:
    """The bounds with this filter, and whether nothing of it is left to do; None when it says
    nothing to us."""
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    if len(attribute) != 1:
        return None
    name = attribute[0]
    if isinstance(one, IsNotNull):
        return (bounds, True) if name in _NEVER_NULL else None
    value = getattr(one, "value", None)
    if value is None:
        return None
    if name in ("topic", "partition"):
        return _by_name(bounds, name, one, value)
    if name == "offset" and isinstance(value, int):
        return _by_offset(bounds, one, value)
    if name == "timestamp" and isinstance(value, datetime):
        return _by_time(bounds, one, value)
    return None


def _by_name(bounds: Bounds, name: str, one: Filter, value: Any) -> tuple[Bounds, bool] | None:
    if isinstance(one, EqualTo | EqualNullSafe):
        wanted: frozenset[Any] = frozenset((value,))
    elif isinstance(one, In) and isinstance(value, list | tuple):
        wanted = frozenset(value)
    else:
        return None
    if name == "topic":
        known = bounds.topics
        return bounds._replace(topics=wanted if known is None else known & wanted), True
    numbers = bounds.partitions
    return bounds._replace(partitions=wanted if numbers is None else numbers & wanted), True


def _by_offset(bounds: Bounds, one: Filter, value: int) -> tuple[Bounds, bool] | None:
    first, end = 0, None
    if isinstance(one, EqualTo | EqualNullSafe):
        first, end = value, value + 1
    elif isinstance(one, GreaterThan):
        first = value + 1
    elif isinstance(one, GreaterThanOrEqual):
        first = value
    elif isinstance(one, LessThan):
        end = value
    elif isinstance(one, LessThanOrEqual):
        end = value + 1
    else:
        return None
    if end is not None and bounds.end_offset is not None:
        end = min(end, bounds.end_offset)
    elif end is None:
        end = bounds.end_offset
    first = max(first, bounds.first_offset)
    return bounds._replace(first_offset=first, end_offset=end), True


def _by_time(bounds: Bounds, one: Filter, value: datetime) -> tuple[Bounds, bool] | None:
    if not isinstance(one, EqualTo | EqualNullSafe | GreaterThan | GreaterThanOrEqual):
        return None
    moment = value if value.tzinfo is not None else value.replace(tzinfo=UTC)
    # Rounded down: a record of the same millisecond may be the one.
    since_1970 = moment - datetime(1970, 1, 1, tzinfo=UTC)
    timestamp_ms = (since_1970.days * 86_400 + since_1970.seconds) * 1000
    timestamp_ms = max(timestamp_ms + since_1970.microseconds // 1000, bounds.timestamp_ms or 0, 0)
    return bounds._replace(timestamp_ms=timestamp_ms), False
