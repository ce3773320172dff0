"""Batches as an Arrow record batch, for Spark; the one place here that knows pyarrow.

The broker never imports this. The columns are decoded straight into Arrow's own layout, so
wrapping them copies nothing but the lane's names.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pyarrow as pa

from millstream.log.batch import (
    INFLATED_BYTES_MAX,
    LANES,
    BinaryColumn,
    Columns,
    Data,
    decode_columns,
)

# Made once: pyarrow takes longer for a type than for an array.
_INT64 = pa.int64()
_TIMESTAMP = pa.timestamp("ms", tz="UTC")
_BINARY = pa.binary()
_STRING = pa.string()
_HEADER = pa.struct([pa.field("key", _STRING, nullable=False), pa.field("value", _BINARY)])
_HEADERS = pa.list_(_HEADER)

SCHEMA = pa.schema(
    [
        pa.field("offset", _INT64, nullable=False),
        pa.field("timestamp", _TIMESTAMP, nullable=False),
        pa.field("key", _BINARY),
        pa.field("value", _BINARY),
        pa.field("headers", _HEADERS, nullable=False),
        pa.field("lane", _STRING),
    ]
)


def to_record_batch(
    data: Data,
    *,
    from_offset: int | None = None,
    until_offset: int | None = None,
    check_crc: bool = True,
    inflated_bytes_max: int = INFLATED_BYTES_MAX,
) -> pa.RecordBatch:
    """Many whole batches as one record batch of `SCHEMA`; see `decode_columns`."""
    return wrapped(
        decode_columns(
            data,
            from_offset=from_offset,
            until_offset=until_offset,
            check_crc=check_crc,
            inflated_bytes_max=inflated_bytes_max,
        )
    )


def wrapped(columns: Columns) -> pa.RecordBatch:
    """The columns as a record batch of `SCHEMA`, which then owns their buffers."""
    arrays = [
        _fixed(_INT64, columns.rows, columns.offset),
        _fixed(_TIMESTAMP, columns.rows, columns.timestamp),
        _binary(_BINARY, columns.rows, columns.key),
        _binary(_BINARY, columns.rows, columns.value),
        _headers(columns),
        _lanes(columns),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _fixed(kind: Any, rows: int, data: Data) -> Any:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(data)], null_count=0)


def _binary(kind: Any, rows: int, column: BinaryColumn) -> Any:
    validity = None if column.validity is None else pa.py_buffer(column.validity)
    buffers = [validity, pa.py_buffer(column.offsets), pa.py_buffer(column.data)]
    return pa.Array.from_buffers(kind, rows, buffers, null_count=column.nulls)


def _headers(columns: Columns) -> Any:
    pairs = pa.StructArray.from_buffers(
        _HEADER,
        columns.header_count,
        [None],
        null_count=0,
        children=[
            _binary(_STRING, columns.header_count, columns.header_key),
            _binary(_BINARY, columns.header_count, columns.header_value),
        ],
    )
    return pa.ListArray.from_buffers(
        _HEADERS,
        columns.rows,
        [None, pa.py_buffer(columns.header_offsets)],
        null_count=0,
        children=[pairs],
    )


def _lanes(columns: Columns) -> Any:
    if columns.lane_nulls == columns.rows:
        return pa.nulls(columns.rows, _STRING)
    validity = None if columns.lane_validity is None else pa.py_buffer(columns.lane_validity)
    indexes = pa.Array.from_buffers(
        pa.int8(), columns.rows, [validity, pa.py_buffer(columns.lane)], columns.lane_nulls
    )
    return pa.DictionaryArray.from_arrays(indexes, _lane_names()).cast(_STRING)


@cache
def _lane_names() -> pa.StringArray:
    # Not before it is needed: to look at a list pyarrow imports pandas, for a fifth of a second.
    return pa.array(LANES)
