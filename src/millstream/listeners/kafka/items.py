"""How many items a request has, by kafka-python's schema of it, without opening it into objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.wire.kafka.primitives import INT16, INT32, Cursor

if TYPE_CHECKING:
    from collections.abc import Iterable

SIZES = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "int32": 4,
    "bitfield": 4,
    "int64": 8,
    "float64": 8,
    "uuid": 16,
}
NULL = b"\xff"


def check_items(request: Any, body: memoryview, version: int) -> None:
    """RequestInvalid when there are too many, or when the request ends before they do."""
    cursor = Cursor(body, flexible=request.flexible_version_q(version))
    _pass_struct(cursor, request.fields.values(), version)


def _pass_struct(cursor: Cursor, fields: Iterable[Any], version: int) -> None:
    for field in fields:
        if field.for_version_q(version) and not field.tagged_field_q(version):
            _pass(cursor, field, version)
    cursor.skip_tags()


def _pass(cursor: Cursor, field: Any, version: int) -> None:
    if field.is_array():
        for _ in range(cursor.count(1)):
            if field.is_struct_array():
                _pass_struct(cursor, field.fields.values(), version)
            else:
                _pass_value(cursor, field.array_of.type_str)
    elif field.is_struct():
        if not field.nullable_for_version_q(version) or cursor.take(1) != NULL:
            _pass_struct(cursor, field.fields.values(), version)
    else:
        _pass_value(cursor, field.type_str)


def _pass_value(cursor: Cursor, kind: str) -> None:
    size = SIZES.get(kind)
    if size is None:
        length = INT16 if kind == "string" else INT32
        size = cursor.varint() - 1 if cursor.flexible else cursor.unpack(length)[0]
        size = max(size, 0)
    cursor.take(size)
