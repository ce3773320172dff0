"""Which columns JSON values have, told from some of them, as Spark's DDL.

What disagrees becomes text, because text can hold whatever a later value brings.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, TypeAlias

import msgspec

# `None` is a value that was null everywhere so far; a dict is an object by its fields.
Shape: TypeAlias = Any
_LONG_MAX = 2**63 - 1
# Objects with more fields are maps in disguise; they stay text.
FIELDS_MAX = 500
DEPTH_MAX = 20


def ddl_of(values: Iterable[bytes | None], taken: Container[str] = ()) -> str | None:
    """Columns for values that are JSON objects; None where most are something else. Fields whose
    names are `taken`, in lower case, are left out."""
    shape: Shape = None
    objects = others = 0
    for value in values:
        if not value:
            continue
        try:
            page = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            page = None
        if isinstance(page, dict) and page:
            objects += 1
            shape = _merged(shape, _shape_of(page, 0))
        else:
            others += 1
    if objects == 0 or others > objects or not isinstance(shape, dict):
        return None
    left = {name: inner for name, inner in shape.items() if name.lower() not in taken}
    return _columns(left, " ")


def _shape_of(value: object, depth: int) -> Shape:
    if value is None:
        return None
    if isinstance(value, bool):
        return "BOOLEAN"
    if isinstance(value, int):
        return "BIGINT" if -_LONG_MAX - 1 <= value <= _LONG_MAX else "DECIMAL(38,0)"
    if isinstance(value, float):
        return "DOUBLE"
    if isinstance(value, str) or depth >= DEPTH_MAX:
        return "STRING"
    if isinstance(value, list):
        inner: Shape = None
        for one in value:
            inner = _merged(inner, _shape_of(one, depth + 1))
        return [inner]
    assert isinstance(value, dict), value
    return {name: _shape_of(one, depth + 1) for name, one in value.items()}


_NUMBERS = ("BIGINT", "DECIMAL(38,0)", "DOUBLE")


def _merged(one: Shape, other: Shape) -> Shape:
    if one is None or one == other:
        return other
    if other is None:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        both = {name: _merged(shape, other.get(name)) for name, shape in one.items()}
        both |= {name: shape for name, shape in other.items() if name not in one}
        return both if len(both) <= FIELDS_MAX else "STRING"
    if isinstance(one, list) and isinstance(other, list):
        return [_merged(one[0], other[0])]
    if one in _NUMBERS and other in _NUMBERS:
        return max(one, other, key=_NUMBERS.index)
    return "STRING"


def _columns(shape: dict[str, Shape], between: str) -> str:
    """Fields by name. Spark takes `id` and `ID` for one, so the second is left out."""
    seen: set[str] = set()
    columns = []
    for name, inner in shape.items():
        if name.lower() in seen:
            continue
        seen.add(name.lower())
        columns.append(f"`{name.replace('`', '``')}`{between}{_type(inner)}")
    return ", ".join(columns)


def _type(shape: Shape) -> str:
    if shape is None:
        return "STRING"
    if isinstance(shape, list):
        return f"ARRAY<{_type(shape[0])}>"
    if isinstance(shape, dict):
        return f"STRUCT<{_columns(shape, ': ')}>" if shape else "STRING"
    return str(shape)
