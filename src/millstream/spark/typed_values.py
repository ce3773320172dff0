"""Values as bytes, as text, or as the fields that a schema names.

JSON goes through Arrow's own reader, a chunk at a time, and only a chunk in which something does
not fit is read again value by value. Both ways take the same for a field of a type, so a value
means the same whatever comes beside it; where only Arrow can read a value, it reads that one alone.
A field that is missing is null, and one that nobody named is left out, so producers may add and
drop fields. A value that is no object, or has a field of another type, is what the mode says:
`permissive` keeps the fields that fit and puts the whole text into `_corrupt_record`; `failfast`
ends the query.
"""

from __future__ import annotations

import io
import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
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

# Numbers keep their digits: decimals need them all, and so does a number that is read as text.
_DECODER = msgspec.json.Decoder(float_hook=Decimal)
# What is asked of the hook is `_MINUS_ZERO` alone.
_ENCODER = msgspec.json.Encoder(decimal_format="number", enc_hook=lambda _: Decimal("-0"))
# What may come of a text that is no JSON, or is JSON that nobody writes: a million brackets, a
# number with a million digits.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ArithmeticError)


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
        values: list[object] = []
        corrupt: list[str | None] = []
        alone: dict[int, Any] = {}
        for row, raw in enumerate(column.to_pylist()):
            value, why = (None, None) if raw is None else self._object(raw)
            if why is not None and value is None and raw.startswith(_OPEN):
                single = self._quick(column.slice(row, 1))
                if single is not None:
                    alone[row], why = single, None
            if why is not None and self.is_failing_fast:
                raise self._invalid(offsets[row].as_py(), raw, why)
            values.append(value)
            corrupt.append(None if why is None else _text(raw))
        made = _with(pa.array(values, self.kind), alone)
        return {"value": made, CORRUPT: pa.array(corrupt, pa.string())}

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
        try:
            found = self._parsed(present)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            return None
        if found is None or len(present) == len(column):
            return found
        rows = pc.subtract(pc.cumulative_sum(column.is_valid().cast(pa.int32())), 1)
        return found.take(pc.if_else(column.is_valid(), rows, None))

    def _parsed(self, present: Any) -> Any:
        """By Arrow's reader; None when there are more objects than values."""
        # Arrow's reader does not look whether texts are UTF-8.
        present.cast(pa.string())
        lines = pc.binary_join(
            pa.ListArray.from_arrays(pa.array([0, len(present)], pa.int32()), present), b"\n"
        )[0].as_buffer()
        table = pj.read_json(
            io.BytesIO(lines),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(lines) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([one.with_type(_written(one.type)) for one in self.kind]),
                unexpected_field_behavior="ignore",
                newlines_in_values=False,
            ),
        )
        if table.num_rows != len(present):
            return None
        fields = [table.column(one.name).combine_chunks().cast(one.type) for one in self.kind]
        return pa.StructArray.from_arrays(fields, fields=list(self.kind))

    def _object(self, raw: bytes) -> tuple[object, str | None]:
        """What of it fits, and why not all of it does."""
        try:
            page = _decoded(raw)
        except _UNREADABLE as error:
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


class _MinusZero(int):
    """`-0` is whole, and as a floating number it has its sign."""


_MINUS_ZERO = _MinusZero(0)
# Within a text as well, which does no harm.
_WHOLE_MINUS_ZERO = re.compile(rb"-0(?![0-9.eE])")


def _decoded(raw: bytes) -> object:
    page = _DECODER.decode(raw)
    if _WHOLE_MINUS_ZERO.search(raw) is None:
        return page
    # msgspec's own zero has no sign. What it took is JSON, and Python's reader takes more.
    with suppress(ValueError):  # a number with thousands of digits
        page = json.loads(raw, parse_int=_whole, parse_float=Decimal)
    return page


def _whole(text: str) -> int:
    return _MINUS_ZERO if text == "-0" else int(text)


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


def _with(values: Any, alone: dict[int, Any]) -> Any:
    """The values, some of them replaced."""
    if not alone:
        return values
    places = list(range(len(values)))
    for place, row in enumerate(alone, len(values)):
        places[row] = place
    return pa.concat_arrays([values, *alone.values()]).take(pa.array(places))


def _written(kind: Any) -> Any:
    """The type that Arrow's reader is told: it takes days and times of day for numbers, and does
    not see when a decimal has too many digits."""
    if pa.types.is_struct(kind):
        return pa.struct([one.with_type(_written(one.type)) for one in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_written(kind.value_type)))
    if pa.types.is_decimal(kind):
        return _wide(kind)
    return pa.string() if pa.types.is_date(kind) or pa.types.is_time(kind) else kind


def _wide(kind: Any) -> Any:
    return pa.decimal256(76, kind.scale)


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
    """The value as Arrow's Python side takes it; raises for one of another type.

    It takes what Arrow's reader takes for the type. A STRING takes more, as Spark's own reader
    does: what is no text becomes its JSON.
    """
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else _ENCODER.encode(value).decode()
    if pa.types.is_boolean(kind):
        if isinstance(value, bool):
            return value
        raise TypeError
    if pa.types.is_integer(kind):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError
        return pa.scalar(value, kind).as_py()
    if pa.types.is_floating(kind):
        return _floating(value, kind)
    if pa.types.is_decimal(kind):
        if isinstance(value, bool) or not isinstance(value, int | Decimal | str):
            raise TypeError
        return pa.scalar(str(value)).cast(_wide(kind)).cast(kind).as_py()
    # The rest is written as text.
    if not isinstance(value, str):
        raise TypeError
    if pa.types.is_binary(kind):
        return value.encode()
    if pa.types.is_timestamp(kind):
        return _instant(value, kind.unit)
    if pa.types.is_time(kind):
        return pa.scalar("1970-01-01T" + value).cast(pa.timestamp(kind.unit)).value
    # A day, as a number: Python's have no year 0.
    return pa.scalar(value).cast(kind).value


def _floating(value: object, kind: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        raise TypeError
    if value is _MINUS_ZERO:
        return -0.0
    if not pa.types.is_float64(kind):
        # Rounded once, from the digits.
        found: float = pa.scalar(str(value)).cast(kind).as_py()
        return found
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _instant(text: str, unit: str) -> int:
    """With a zone or without; without, it is UTC."""
    try:
        found: int = pa.scalar(text).cast(pa.timestamp(unit)).value
    except pa.ArrowInvalid:
        found = pa.scalar(text).cast(pa.timestamp(unit, "UTC")).value
    return found
