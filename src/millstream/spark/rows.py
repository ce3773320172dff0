"""Batches of records as rows of Spark.

Spark takes Arrow columns only when their schema is exactly the one that it made of the table's:
the same names in the same order, the same types, all of them nullable. So columns are wrapped as
that schema says, and those that are the same in every row (topic, partition) are made once and cut
to length. What nobody asked for is not made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.log.arrow import to_record_batch
from millstream.log.batch import Data
from millstream.spark.positions import Part
from millstream.spark.typed_values import CORRUPT, Values

# As SQL writes them; Spark reads the columns of a table from this.
_DEAD_LETTER_FIELDS = (
    ("topic", "STRING"),
    ("partition", "INT"),
    ("offset", "BIGINT"),
    ("group", "STRING"),
    ("deliveries", "INT"),
    ("reason", "STRING"),
    ("error", "STRING"),
    ("first_failure", "TIMESTAMP"),
    ("last_failure", "TIMESTAMP"),
)
_DEAD_LETTER_SQL = ", ".join(f"`{name}`: {kind}" for name, kind in _DEAD_LETTER_FIELDS)
SQL_TYPES = {
    "key": "BINARY",
    "value": "BINARY",
    "topic": "STRING",
    "partition": "INT",
    "offset": "BIGINT",
    "timestamp": "TIMESTAMP",
    "timestampType": "INT",
    "headers": "ARRAY<STRUCT<key: STRING, value: BINARY>>",
    "lane": "STRING",
    "dead_letter": f"STRUCT<{_DEAD_LETTER_SQL}>",
    CORRUPT: "STRING",
}
KAFKA_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")

_TIMESTAMP = pa.timestamp("us", tz="UTC")
_ARROW = {
    "BINARY": pa.binary(),
    "STRING": pa.string(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "TIMESTAMP": _TIMESTAMP,
}
_DEAD_LETTER = pa.struct([(name, _ARROW[kind]) for name, kind in _DEAD_LETTER_FIELDS])
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
# What a column must be; `value` may be text or typed as well.
ARROW_TYPES = {name: _ARROW[kind] for name, kind in SQL_TYPES.items() if kind in _ARROW} | {
    "headers": _HEADERS,
    "dead_letter": _DEAD_LETTER,
}
_US_MAX_IN_MS = (2**63 - 1) // 1000
# Headers that say why a record is a dead letter.
_DEAD_PREFIX = "ms-dead-"


@dataclass(frozen=True, slots=True)
class Shape:
    """The columns that are wanted, and how values are read."""

    schema: Any  # a pa.Schema, as Spark made it
    value_format: str = "bytes"
    is_failing_fast: bool = False

    @property
    def names(self) -> list[str]:
        names: list[str] = self.schema.names
        return names


@dataclass(slots=True)
class Rows:
    """Makes rows of one partition."""

    shape: Shape
    part: Part
    _constants: dict[str, Any] = field(default_factory=dict)

    def make(self, data: Data, start: int, end: int, *, is_append_time: bool) -> Any:
        """A pa.RecordBatch of the records in [start, end). The CRCs have been looked at."""
        decoded = to_record_batch(data, from_offset=start, until_offset=end, check_crc=False)
        names = self.shape.names
        made: dict[str, Any] = {}
        if "value" in names or CORRUPT in names:
            made = self._values(decoded, names)
        arrays = [
            made[name] if name in made else self._column(name, decoded, is_append_time)
            for name in names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=self.shape.schema)

    def _values(self, decoded: Any, names: list[str]) -> dict[str, Any]:
        shape = self.shape
        column = decoded.column("value")
        kind = shape.schema.field("value").type if "value" in names else None
        values = Values(shape.value_format, kind, shape.is_failing_fast, self.part)
        return values.read(column, decoded.column("offset"))

    def _column(self, name: str, decoded: Any, is_append_time: bool) -> Any:
        count = decoded.num_rows
        match name:
            case "key" | "offset":
                return decoded.column(name)
            case "timestamp":
                return _microseconds(decoded.column("timestamp"))
            case "topic":
                return self._constant(name, count, pa.scalar(self.part[0], pa.string()))
            case "partition":
                return self._constant(name, count, pa.scalar(self.part[1], pa.int32()))
            case "timestampType":
                word = f"{name}{int(is_append_time)}"
                return self._constant(word, count, pa.scalar(int(is_append_time), pa.int32()))
            case "headers":
                return _headers(decoded.column("headers"), self.shape.schema.field(name).type)
            case "lane":
                return pc.fill_null(decoded.column("lane"), "normal")
            case "dead_letter":
                return dead_letters(decoded.column("headers"))
        raise AssertionError(f"there is no column {name}")

    def _constant(self, name: str, count: int, scalar: Any) -> Any:
        known = self._constants.get(name)
        if known is None or len(known) < count:
            known = self._constants[name] = pa.repeat(scalar, max(count, 1))
        return known if len(known) == count else known.slice(0, count)


def _microseconds(milliseconds: Any) -> Any:
    try:
        return milliseconds.cast(_TIMESTAMP)
    except pa.ArrowInvalid:
        # Nobody's clock: a producer wrote some number there.
        numbers = milliseconds.cast(pa.int64())
        fits = pc.less_equal(pc.abs(numbers), _US_MAX_IN_MS)
        return pc.if_else(fits, numbers, None).cast(pa.timestamp("ms", tz="UTC")).cast(_TIMESTAMP)


def _headers(column: Any, kind: Any) -> Any:
    """The same buffers under Spark's type; a record without headers has null, as in Spark's own
    connector."""
    pairs = column.values
    struct = kind.value_type
    children = [pairs.field(0), pairs.field(1)]
    wrapped = pa.StructArray.from_buffers(
        struct, len(pairs), [None], null_count=0, children=children
    )
    has_some = pc.greater(pc.list_value_length(column), 0).buffers()[1]
    offsets = column.buffers()[1]
    return pa.ListArray.from_buffers(kind, len(column), [has_some, offsets], children=[wrapped])


def dead_letters(headers: Any) -> Any:
    """Why each record is a dead letter; null for one that is none."""
    pairs = headers.values
    keys = pairs.field(0)
    if not pc.any(pc.starts_with(keys, _DEAD_PREFIX)).as_py():
        return pa.nulls(len(headers), _DEAD_LETTER)
    return pa.array([_dead_letter(row) for row in headers.to_pylist()], _DEAD_LETTER)


def _dead_letter(headers: list[Mapping[str, Any]] | None) -> dict[str, object] | None:
    facts: dict[str, object] = {}
    for header in headers or ():
        name = header["key"]
        if not name.startswith(_DEAD_PREFIX) or header["value"] is None:
            continue
        word = name.removeprefix(_DEAD_PREFIX).replace("-", "_")
        kind = _DEAD_KINDS.get(word)
        if kind is not None:
            facts[word] = _fact(header["value"], kind)
    return facts or None


_DEAD_KINDS = dict(_DEAD_LETTER_FIELDS)


def _fact(raw: bytes, kind: str) -> object:
    """Anybody may have written such a header; what does not fit is null."""
    text = raw.decode("utf-8", "replace")
    if kind == "STRING":
        return text
    digits = text.removeprefix("-")
    if not digits.isdecimal() or not digits.isascii() or len(digits) > 18:
        return None
    number = int(text)
    if kind == "INT":
        return number if -(2**31) <= number < 2**31 else None
    if kind == "TIMESTAMP":
        return number * 1000 if abs(number) <= _US_MAX_IN_MS else None
    return number
