"""The columns of rows for the sink, as the codec takes them: binary, from item 0 on, times as
numbers, headers flat."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millstream.wire.lanes import LANE_HEADER, LANES

BINARY, INT32, INT64 = pa.binary(), pa.int32(), pa.int64()
HEADERS = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", BINARY)]))
# What a header takes beside its name and value, about; the broker counts it so.
HEADER_OVERHEAD_BYTES = 4
_LANE_WORDS = pa.array([*LANES, *map(str, range(len(LANES)))])


@dataclass(slots=True)
class Parts:
    """The columns of some rows. None: there is no such column, or nothing is in it."""

    rows: int
    key: Any
    value: Any
    header_offsets: memoryview | None
    header_count: int
    header_key: Any | None
    header_value: Any | None
    partition: Any | None  # int32
    lane: Any | None  # int32, index in LANES; null: normal, or a word that is none
    lane_word: Any | None
    deliver_at: Any | None  # int64, microseconds
    timestamp: Any | None  # int64, microseconds
    # Key, value and headers of each row, as the limit of messages counts them; and of all.
    sizes: Any
    bytes: int

    def row_of_header(self, header: int) -> int:
        assert self.header_offsets is not None
        return bisect_right(self.header_offsets.cast("B").cast("i"), header) - 1


def flat(column: Any) -> Any:
    """The same from item 0 of its buffers on, in one piece."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if column.offset == 0 else pa.concat_arrays([column])


def parts_of(chunk: Any) -> Parts:
    rows = chunk.num_rows
    columns = dict(zip(chunk.schema.names, chunk.columns, strict=True))
    key = _binary(columns.get("key"), rows)
    value = _binary(columns["value"], rows)
    headers = _given(columns.get("headers"))
    word = _given(columns.get("lane"))
    word = None if word is None else word.cast(pa.string())
    if headers is not None:
        headers, word = _lane_from_headers(flat(headers), word)
    offsets = names = contents = None
    sizes = pc.add(_lengths(key), _lengths(value))
    if headers is not None and len(headers.values):
        offsets, names, contents = _taken_apart(headers)
        sizes = pc.add(sizes, _header_sizes(offsets, names, contents))
    lane = None
    if word is not None:
        index = pc.index_in(word, value_set=_LANE_WORDS)
        lane = pc.if_else(
            pc.greater_equal(index, len(LANES)), pc.subtract(index, len(LANES)), index
        )
    return Parts(
        rows=rows,
        key=key,
        value=value,
        header_offsets=None if offsets is None else memoryview(offsets.buffers()[1]),
        header_count=0 if names is None else len(names),
        header_key=names,
        header_value=contents,
        partition=_numbers(columns.get("partition"), INT32),
        lane=lane,
        lane_word=word,
        deliver_at=_micros(columns.get("deliver_at")),
        timestamp=_micros(columns.get("timestamp")),
        sizes=sizes,
        bytes=pc.sum(sizes).as_py() or 0,
    )


def _given(column: Any | None) -> Any | None:
    """Nothing but nulls is as good as no column."""
    return None if column is None or column.null_count == len(column) else column


def _binary(column: Any | None, rows: int) -> Any:
    if column is None:
        return pa.nulls(rows, BINARY)
    return flat(column if column.type == BINARY else column.cast(BINARY))


def _numbers(column: Any | None, kind: Any) -> Any | None:
    column = _given(column)
    return None if column is None else flat(column.cast(kind))


def _micros(column: Any | None) -> Any | None:
    column = _given(column)
    if column is None:
        return None
    if column.type.unit != "us":
        column = column.cast(pa.timestamp("us", column.type.tz))
    return flat(column.cast(INT64))


def _lengths(column: Any) -> Any:
    return pc.fill_null(pc.cast(pc.binary_length(column), INT64), 0)


# ---- headers


def _taken_apart(headers: Any) -> tuple[Any, Any, Any]:
    """Offsets, names and values; the offsets count from the first header that is there."""
    offsets, pairs = headers.offsets, headers.values
    first = offsets[0].as_py()
    if first or len(pairs) != offsets[-1].as_py():
        pairs = pairs[first : offsets[-1].as_py()]
        offsets = pc.subtract(offsets, first)
    if pairs.null_count:
        # A header that is null has no name either.
        names, contents = pc.struct_field(pairs, "key"), pc.struct_field(pairs, "value")
    else:
        names, contents = pairs.field(0), pairs.field(1)
    return flat(offsets), _binary(names, len(names)), _binary(contents, len(contents))


def _header_sizes(offsets: Any, names: Any, contents: Any) -> Any:
    each = pc.add(pc.add(_lengths(names), _lengths(contents)), HEADER_OVERHEAD_BYTES)
    sums = pa.concat_arrays([pa.array([0], INT64), pc.cumulative_sum(each)])
    ends = sums.take(offsets)
    return pc.subtract(ends[1:], ends[:-1])


def _lane_from_headers(headers: Any, word: Any | None) -> tuple[Any, Any | None]:
    """Rows that were read with their headers have their lane among them. It is taken out there,
    and counts where the column says nothing: a record has one lane."""
    starts = headers.offsets
    lengths = pc.subtract(starts[1:], starts[:-1])
    hidden = pc.and_(pc.is_null(headers), pc.greater(lengths, 0))
    names = pc.struct_field(headers.values, "key")
    has_lane = len(names) > 0 and pc.any(pc.equal(names, LANE_HEADER)).as_py()
    if not has_lane and not pc.any(hidden).as_py():
        return headers, word
    words = [None] * len(headers) if word is None else word.to_pylist()
    lists: list[Any] = []
    for row, pairs in enumerate(headers.to_pylist()):
        kept = []
        for pair in pairs or ():
            if pair is not None and pair["key"] == LANE_HEADER:
                content = pair["value"]
                if word is None or word[row].as_py() is None:
                    words[row] = (content or b"").decode("utf-8", "replace")
            else:
                kept.append(pair)
        lists.append(kept)
    all_words = pa.array(words, pa.string())
    return pa.array(lists, HEADERS), _given(all_words)
