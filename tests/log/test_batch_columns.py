"""Batches as columns: the same records, in Arrow's buffers."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.batch_twins import COMPILED, PURE, Fields, both_twins, several_fields, some_fields
from millstream.errors import (
    BatchChecksumMismatch,
    BatchLengthInvalid,
    BatchRecordInvalid,
    BatchTooLarge,
)
from millstream.log import batch
from millstream.log.arrow import SCHEMA, to_record_batch, wrapped

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def as_rows(records: list[Any]) -> list[dict[str, object]]:
    return [
        {
            "offset": record.offset,
            "timestamp": EPOCH + timedelta(milliseconds=record.timestamp),
            "key": record.key,
            "value": record.value,
            "headers": [{"key": name, "value": value} for name, value in record.headers],
            "lane": record.lane,
        }
        for record in records
    ]


def arrow_rows(columns: Any) -> Any:
    table = wrapped(columns)
    table.validate(full=True)
    assert table.schema == SCHEMA
    return table.to_pylist()


lanes = st.sampled_from([*batch.LANES, "urgent", ""])
runs = st.lists(
    st.tuples(several_fields, st.sampled_from(batch.COMPRESSIONS), lanes, st.integers(0, 3)),
    max_size=4,
)


@both_twins
@given(runs, st.integers(-1, 60), st.integers(-1, 60))
def test_columns_hold_what_decoding_each_batch_gives(
    twin: Any, run: list[tuple[list[Fields], str, str, int]], start: int, end: int
) -> None:
    blob, expected, next_offset = b"", [], 5
    for records, compression, lane, gap in run:
        with_lane = [
            (when, key, value, [*headers, ("ms-lane", lane.encode())][: 3 if gap else None])
            for when, key, value, headers in records
        ]
        data = twin.encode(with_lane, base_offset=next_offset, compression=compression)
        expected += twin.decode(data)
        blob += data
        next_offset += len(records) + gap
    everything = arrow_rows(twin.decode_columns(blob))
    assert everything == as_rows(expected)
    some = twin.decode_columns(blob, from_offset=start, until_offset=end)
    assert arrow_rows(some) == [row for row in everything if start <= row["offset"] < end]


@both_twins
def test_null_and_empty_are_told_apart_in_more_rows_than_a_bitmap_byte_holds(twin: Any) -> None:
    choices: list[bytes | None] = [None, b"", b"x"]
    records: list[Fields] = [
        (0, choices[n % 3], choices[n // 3 % 3], [("h", choices[n // 9 % 3])]) for n in range(100)
    ]
    blob = twin.encode(records[:37]) + twin.encode(records[37:], base_offset=37)
    rows = arrow_rows(twin.decode_columns(blob))
    assert [(row["key"], row["value"], row["headers"][0]["value"]) for row in rows] == [
        (key, value, headers[0][1]) for _, key, value, headers in records
    ]


@both_twins
def test_without_anything_missing_there_is_no_bitmap(twin: Any) -> None:
    columns = twin.decode_columns(twin.encode([(1, b"k", b"v", [("ms-lane", b"low")])] * 9))
    assert (columns.key.nulls, columns.key.validity) == (0, None)
    assert (columns.value.nulls, columns.lane_nulls, columns.lane_validity) == (0, 0, None)
    missing = twin.decode_columns(twin.encode([(1, None, None, ())] * 9))
    assert (missing.key.nulls, missing.value.nulls, missing.lane_nulls) == (9, 9, 9)


@both_twins
def test_no_batches_are_no_rows(twin: Any) -> None:
    columns = twin.decode_columns(b"")
    assert columns.rows == 0
    assert arrow_rows(columns) == []


@both_twins
def test_control_batches_are_left_out(twin: Any) -> None:
    blob = (
        twin.encode(some_fields(2))
        + twin.encode([(1, b"\0\0\0\1", b"\0\0\0\0\0\0", ())], base_offset=2, control=True)
        + twin.encode(some_fields(2), base_offset=3)
    )
    assert [row["offset"] for row in arrow_rows(twin.decode_columns(blob))] == [0, 1, 3, 4]


@both_twins
def test_header_names_in_columns_are_always_utf8(twin: Any) -> None:
    name = b"a\xff\xe2\x82-\xc3\xa9".decode("utf-8", "surrogateescape")
    rows = arrow_rows(twin.decode_columns(twin.encode([(1, None, None, [(name, b"")])])))
    assert rows[0]["headers"][0]["key"] == "a\ufffd\ufffd-é"


@both_twins
def test_damage_is_seen_unless_the_checksum_was_waived(twin: Any) -> None:
    data = bytearray(twin.encode([(1, None, b"value", ())]))
    data[-3] ^= 1
    with pytest.raises(BatchChecksumMismatch):
        twin.decode_columns(data)
    assert twin.decode_columns(data, check_crc=False).rows == 1
    # A control flag that a flipped bit set must not make records vanish.
    hidden = bytearray(twin.encode([(1, None, b"value", ())]))
    hidden[22] ^= batch.CONTROL_MASK
    with pytest.raises(BatchChecksumMismatch):
        twin.decode_columns(hidden)


@both_twins
def test_columns_need_whole_batches(twin: Any) -> None:
    data = twin.encode(some_fields(2))
    for cut in range(1, len(data)):
        with pytest.raises(BatchLengthInvalid):
            twin.decode_columns(data + data[:cut])


@both_twins
def test_a_wrong_record_in_a_later_batch_is_an_error(twin: Any) -> None:
    data = twin.encode([(1, None, b"value", ())])
    wrong = bytearray(data)
    wrong[61] += 2
    with pytest.raises(BatchRecordInvalid):
        twin.decode_columns(data + wrong, check_crc=False)


@both_twins
@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd"])
def test_the_limit_on_growth_holds_for_each_batch(twin: Any, compression: str) -> None:
    data = twin.encode([(1, None, bytes(5000), ())] * 10, compression=compression)
    size = len(twin.encode([(1, None, bytes(5000), ())] * 10)) - batch.HEADER_BYTES
    assert twin.decode_columns(data * 3, inflated_bytes_max=size).rows == 30
    with pytest.raises(BatchTooLarge) as caught:
        twin.decode_columns(data * 3, inflated_bytes_max=size - 1)
    assert caught.value.fields["limit_bytes"] == size - 1


def test_the_record_batch_is_made_of_the_twin_in_use() -> None:
    data = batch.encode(some_fields(10), base_offset=3)
    assert to_record_batch(data, from_offset=5).to_pylist() == as_rows(batch.decode(data)[2:])


def test_the_batch_module_does_not_load_pyarrow() -> None:
    program = "import sys, millstream.log.batch; sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(COMPILED is None, reason="the compiled twin is not built")
def test_columns_outlive_the_bytes_they_came_from() -> None:
    assert COMPILED is not None
    data = bytearray(PURE.encode(some_fields(100)))
    expected = as_rows(PURE.decode(bytes(data)))
    table = wrapped(COMPILED.decode_columns(data))
    data[:] = bytes(len(data))
    del data
    assert table.to_pylist() == expected
