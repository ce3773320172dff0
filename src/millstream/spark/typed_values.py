"""Values as bytes, as text, or as the fields that a schema names.

JSON goes through Arrow's own reader, a chunk at a time, and only a chunk in which something does
not fit is read again value by value. A field that is missing is null, and one that nobody named is
left out, so producers may add and drop fields. A value that is no object, or has a field of
another type, is what the mode says: `permissive` keeps the fields that fit and puts the whole text
into `_corrupt_record`; `failfast` ends the query.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.errors import ValueInvalid
from millstream.spark.positions import Part

CORRUPT = "_corrupt_record"
# Of a value that does not fit, so much is said back.
SHOWN_BYTES = 200
_OPEN, _CLOSE = b"{", b"}"


@dataclass(frozen=True, slots=True)
class Values:
    """Reads the values of one partition. `kind` is the Arrow type wanted, if any."""

    format: str
    kind: Any
    is_failing_fast: bool
    part: Part

    def read(self, column: Any, offsets: Any) -> dict[str, Any]:
        """The columns `value` and `_corrupt_record`."""
        if self.format == "bytes":
            return {"value": column, CORRUPT: pa.nulls(len(column), pa.string())}
        if self.format == "text":
            return self._texts(column, offsets)
        return self._objects(column, offsets)

    # ---- text

    def _texts(self, column: Any, offsets: Any) -> dict[str, Any]:
        corrupt = pa.nulls(len(column), pa.string())
        try:
            return {"value": column.cast(pa.string()), CORRUPT: corrupt}
        except pa.ArrowInvalid:
            if self.is_failing_fast:
                for row, raw in enumerate(column.to_pylist()):
                    if raw is not None and not _is_text(raw):
                        raise self._invalid(offsets[row].as_py(), raw, "it is not UTF-8") from None
        texts = [None if raw is None else _text(raw) for raw in column.to_pylist()]
        return {"value": pa.array(texts, pa.string()), CORRUPT: corrupt}

    # ---- JSON

    def _objects(self, column: Any, offsets: Any) -> dict[str, Any]:
        quick = self._quick(column)
        if quick is not None:
            return {"value": quick, CORRUPT: pa.nulls(len(column), pa.string())}
        values, corrupt = [], []
        for row, raw in enumerate(column.to_pylist()):
            value, why = (None, None) if raw is None else self._object(raw)
            if why is not None and self.is_failing_fast:
                raise self._invalid(offsets[row].as_py(), raw, why)
            values.append(value)
            corrupt.append(None if why is None else _text(raw))
        return {"value": pa.array(values, self.kind), CORRUPT: pa.array(corrupt, pa.string())}

    def _quick(self, column: Any) -> Any:
        """None unless every value is one object of the schema.

        Each begins with a brace and ends with one, and none has a line break inside: so no text
        within one can reach into the next, and as many objects as values means one each.
        """
        if self.kind is None or len(column) == 0:
            return None if len(column) else pa.nulls(0, self.kind)
        present = column.drop_null() if column.null_count else column
        if len(present) == 0:
            return pa.nulls(len(column), self.kind)
        if not (_all(pc.starts_with, present, _OPEN) and _all(pc.ends_with, present, _CLOSE)):
            return None
        if pc.any(pc.match_substring(present, b"\n")).as_py():
            return None
        lines = pc.binary_join(
            pa.ListArray.from_arrays(pa.array([0, len(present)], pa.int32()), present), b"\n"
        )[0].as_buffer()
        try:
            table = pj.read_json(
                io.BytesIO(lines),
                read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
                parse_options=pj.ParseOptions(
                    explicit_schema=pa.schema(list(self.kind)),
                    unexpected_field_behavior="ignore",
                    newlines_in_values=False,
                ),
            )
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            return None
        if table.num_rows != len(present):
            return None
        names = [one.name for one in self.kind]
        fields = [table.column(name).combine_chunks() for name in names]
        found = pa.StructArray.from_arrays(fields, fields=list(self.kind))
        if len(present) == len(column):
            return found
        rows = pc.subtract(pc.cumulative_sum(column.is_valid().cast(pa.int32())), 1)
        return found.take(pc.if_else(column.is_valid(), rows, None))

    def _object(self, raw: bytes) -> tuple[object, str | None]:
        """What of it fits, and why not all of it does."""
        try:
            page = msgspec.json.decode(raw)
        except msgspec.DecodeError as error:
            return None, f"it is no JSON: {error}"
        if not isinstance(page, dict):
            return None, "it is no JSON object"
        if self.kind is None:
            return None, None
        fitting = _Fitting()
        value = fitting.struct(page, self.kind, "")
        return value, fitting.why

    def _invalid(self, offset: int, raw: bytes, why: str) -> ValueInvalid:
        topic, partition = self.part
        shown = _text(raw[:SHOWN_BYTES])
        return ValueInvalid(
            f"the value at {topic}/{partition}, offset {offset}, does not fit: {why}: {shown!r}; "
            "set valueMode to permissive to keep such values as text in _corrupt_record",
            topic=topic,
            partition=partition,
            offset=offset,
        )


def _all(ask: Any, column: Any, pattern: bytes) -> bool:
    return bool(pc.all(ask(column, pattern)).as_py())


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class _Fitting:
    """One value against its schema; the first misfit is remembered."""

    __slots__ = ("why",)

    def __init__(self) -> None:
        self.why: str | None = None

    def struct(self, page: dict[str, object], kind: Any, path: str) -> dict[str, object]:
        return {one.name: self.value(page.get(one.name), one.type, path + one.name) for one in kind}

    def value(self, value: object, kind: Any, path: str) -> object:
        if value is None:
            return None
        if pa.types.is_struct(kind):
            if isinstance(value, dict):
                return self.struct(value, kind, path + ".")
        elif pa.types.is_list(kind):
            if isinstance(value, list):
                return [self.value(one, kind.value_type, path) for one in value]
        elif pa.types.is_map(kind):
            if isinstance(value, dict):
                return [(key, self.value(one, kind.item_type, path)) for key, one in value.items()]
        else:
            try:
                return _scalar(value, kind)
            except (ValueError, TypeError, OverflowError, pa.ArrowException):
                pass
        if self.why is None:
            self.why = f"the field {path} is no {kind}"
        return None


def _scalar(value: object, kind: Any) -> object:
    """The value as Arrow's Python side takes it; raises for one of another type."""
    if pa.types.is_string(kind):
        # As Spark's own reader: what is no text becomes its JSON.
        return value if isinstance(value, str) else msgspec.json.encode(value).decode()
    if pa.types.is_boolean(kind):
        if isinstance(value, bool):
            return value
        raise TypeError
    if isinstance(value, bool):
        raise TypeError
    if pa.types.is_integer(kind):
        if not isinstance(value, int):
            raise TypeError
        return pa.scalar(value, kind).as_py()
    if pa.types.is_floating(kind):
        if not isinstance(value, int | float):
            raise TypeError
        return float(value)
    if pa.types.is_binary(kind):
        raise TypeError
    # Times, dates and decimals, written as text or, a decimal, as a number.
    if pa.types.is_decimal(kind):
        return pa.scalar(str(value)).cast(kind).as_py()
    return pa.scalar(value, pa.string()).cast(kind).as_py()
