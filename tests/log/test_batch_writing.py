"""Columns as batches: the way back from `decode_columns`, the same from both twins."""

from __future__ import annotations

from array import array
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from log.batch_twins import (
    COMPILED,
    PURE,
    Fields,
    both_twins,
    contents,
    fields,
    needs_compiled,
    some_fields,
)
from millstream.errors import BatchCompressionInvalid, BatchRecordInvalid
from millstream.log import batch
from millstream.log.batch import BinaryColumn, RowColumns

BYTES_MAX = 2**20
LANES = (None, *batch.LANES)


def binary_column(items: list[bytes | None]) -> BinaryColumn:
    column = pa.array(items, pa.binary())
    validity, offsets, data = column.buffers()
    if offsets is None:
        offsets = b"\0\0\0\0"
    return BinaryColumn(column.null_count, validity, offsets, data or b"")


def columns_of(records: list[Fields], *, with_headers: bool = True) -> RowColumns:
    headers = [header for record in records for header in record[3]] if with_headers else []
    starts = array("i", [0])
    for record in records:
        starts.append(starts[-1] + len(record[3]))
    return RowColumns(
        rows=len(records),
        timestamp=memoryview(array("q", [record[0] for record in records])),
        key=binary_column([record[1] for record in records]),
        value=binary_column([record[2] for record in records]),
        header_offsets=memoryview(starts) if with_headers else None,
        header_count=len(headers),
        header_key=binary_column([name.encode() for name, _ in headers]) if with_headers else None,
        header_value=binary_column([value for _, value in headers]) if with_headers else None,
    )


def plain_fields(records: Any) -> list[Fields]:
    return [(r.timestamp, r.key, r.value, list(r.headers)) for r in records]


def in_lane(record: Fields, lane: str | None) -> Fields:
    own = [] if lane is None else [("ms-lane", lane.encode())]
    return (*record[:3], [*record[3], *own])


grouped = st.lists(st.tuples(fields, st.integers(-1, len(LANES) - 1)), max_size=40)


@both_twins
@given(grouped, st.integers(0, 400), st.sampled_from(batch.COMPRESSIONS))
def test_each_row_comes_out_of_its_group_in_order(
    twin: Any, rows: list[tuple[Fields, int]], batch_bytes: int, compression: str
) -> None:
    groups = array("i", [group for _, group in rows])
    found = twin.encode_columns(
        columns_of([record for record, _ in rows]),
        groups,
        lanes=LANES,
        batch_bytes=batch_bytes,
        compression=compression,
    )
    assert len(found) == len(LANES)
    for number, (lane, batches) in enumerate(zip(LANES, found, strict=True)):
        decoded = []
        for data in batches:
            header = twin.examine(data, bytes_max=BYTES_MAX)
            assert header.lane == lane
            assert header.compression == compression
            records = twin.decode(data, check_crc=True)
            assert header.max_timestamp == max(record.timestamp for record in records)
            if compression == "none":
                assert len(data) <= batch_bytes or header.count == 1
            decoded += plain_fields(records)
        assert decoded == [in_lane(record, lane) for record, group in rows if group == number]


@needs_compiled
@given(grouped, st.integers(0, 400), st.sampled_from(batch.COMPRESSIONS))
def test_both_twins_write_the_same_batches(
    rows: list[tuple[Fields, int]], batch_bytes: int, compression: str
) -> None:
    assert COMPILED is not None
    columns = columns_of([record for record, _ in rows])
    groups = array("i", [group for _, group in rows])
    compiled, pure = (
        twin.encode_columns(
            columns, groups, lanes=LANES, batch_bytes=batch_bytes, compression=compression
        )
        for twin in (COMPILED, PURE)
    )
    assert compiled == pure


@both_twins
def test_a_batch_has_the_bytes_that_encoding_its_records_gives(twin: Any) -> None:
    records = some_fields(200)
    (batches,) = twin.encode_columns(
        columns_of(records), array("i", [0] * 200), lanes=[None], batch_bytes=BYTES_MAX
    )
    assert batches == [batch.encode(records)]
    (batches,) = twin.encode_columns(
        columns_of(records, with_headers=False),
        array("i", [0] * 200),
        lanes=["low"],
        batch_bytes=BYTES_MAX,
        compression="lz4",
    )
    lowered = [in_lane((*record[:3], []), "low") for record in records]
    assert batches == [batch.encode(lowered, lane="low", compression="lz4")]


@both_twins
def test_what_is_read_as_columns_is_written_as_it_was(twin: Any) -> None:
    data = batch.encode(some_fields(100))
    read = twin.decode_columns(data)
    columns = RowColumns(
        rows=read.rows,
        timestamp=read.timestamp,
        key=read.key,
        value=read.value,
        header_offsets=read.header_offsets,
        header_count=read.header_count,
        header_key=read.header_key,
        header_value=read.header_value,
    )
    groups = array("i", [0] * read.rows)
    assert twin.encode_columns(columns, groups, lanes=[None], batch_bytes=BYTES_MAX) == [[data]]


@both_twins
def test_a_batch_takes_what_fits_to_the_byte_and_a_large_row_is_alone(twin: Any) -> None:
    rows: list[Fields] = [(5, b"k", b"v" * 50, [])] * 3
    whole = len(batch.encode(rows))

    def sizes(batch_bytes: int, records: list[Fields]) -> list[int]:
        groups = array("i", [0] * len(records))
        (batches,) = twin.encode_columns(
            columns_of(records), groups, lanes=[None], batch_bytes=batch_bytes
        )
        return [batch.read_header(data).count for data in batches]

    assert sizes(whole, rows) == [3]
    assert sizes(whole - 1, rows) == [2, 1]
    large: Fields = (5, None, b"x" * 300_000, [])
    assert sizes(whole, [rows[0], large, rows[0], rows[0]]) == [1, 1, 2]


@both_twins
def test_nothing_gives_no_batch(twin: Any) -> None:
    assert twin.encode_columns(columns_of([]), b"", lanes=[], batch_bytes=100) == []
    nobody = array("i", [-1, -1])
    some = columns_of(some_fields(2))
    assert twin.encode_columns(some, nobody, lanes=[None, "low"], batch_bytes=100) == [[], []]


@both_twins
def test_columns_that_do_not_fit_each_other_are_refused(twin: Any) -> None:
    good = columns_of(some_fields(4))
    groups = array("i", [0] * 4)

    def encode(columns: RowColumns, groups: Any = groups, **options: Any) -> Any:
        return twin.encode_columns(
            columns, groups, **{"lanes": [None], "batch_bytes": 1000, **options}
        )

    short = memoryview(array("i", [0, 3]))
    past = good.value._replace(offsets=memoryview(array("i", [0, 1, 2, 3, 2**30])))
    backwards = good.value._replace(offsets=memoryview(array("i", [0, 5, 2, 5, 6])), validity=None)
    nameless = good._replace(header_key=binary_column([None] * good.header_count))
    for wrong in (
        good._replace(timestamp=memoryview(array("q", [1]))),
        good._replace(key=good.key._replace(offsets=short)),
        good._replace(value=past._replace(validity=None)),
        good._replace(value=backwards),
        good._replace(header_offsets=memoryview(array("i", [0, 1, 2, 3, 99]))),
        nameless,
    ):
        with pytest.raises(ValueError):
            encode(wrong)
    with pytest.raises(ValueError):
        encode(good, array("i", [0, 0]))
    with pytest.raises(ValueError):
        encode(good, array("i", [0, 0, 1, 0]))
    with pytest.raises(ValueError):
        encode(good, lanes=["urgent"])
    with pytest.raises(BatchCompressionInvalid):
        encode(good, compression="brotli")


@both_twins
def test_times_that_are_too_far_apart_are_refused(twin: Any) -> None:
    rows: list[Fields] = [(2**63 - 1, None, b"", []), (-(2**63), None, b"", [])]
    with pytest.raises(BatchRecordInvalid):
        twin.encode_columns(
            columns_of(rows), array("i", [0, 0]), lanes=[None], batch_bytes=BYTES_MAX
        )


# ---- keys


@both_twins
@given(
    st.lists(contents, max_size=30),
    st.integers(1, 1000),
    st.sampled_from(["murmur2", "murmur3"]),
    st.tuples(st.integers(0, 50), st.integers(1, 5)),
)
def test_keys_find_their_partitions_and_others_take_turns(
    twin: Any, keys: list[bytes | None], partitions: int, partitioner: str, turns: tuple[int, int]
) -> None:
    first, run = turns
    found = twin.key_partitions(
        binary_column(keys), len(keys), partitions, partitioner=partitioner, first=first, run=run
    )
    hashed = PURE.murmur2 if partitioner == "murmur2" else PURE.murmur3
    expected = []
    keyless = 0
    for key in keys:
        if key is None:
            expected.append((first + keyless // run) % partitions)
            keyless += 1
        else:
            expected.append((hashed(key) & 0x7FFFFFFF) % partitions)
    assert array("i", bytes(found)).tolist() == expected


@both_twins
def test_partitions_must_be_possible(twin: Any) -> None:
    keys = binary_column([b"k"])
    for options in ({"partitioner": "md5"}, {"run": 0}):
        with pytest.raises(ValueError):
            twin.key_partitions(keys, 1, 3, **options)
    with pytest.raises(ValueError):
        twin.key_partitions(keys, 1, 0)
    with pytest.raises(ValueError):
        twin.key_partitions(keys, 100, 3)


@both_twins
@given(st.binary(max_size=100))
def test_both_twins_give_the_same_murmur3(twin: Any, key: bytes) -> None:
    assert twin.murmur3(key) == PURE.murmur3(key)


@both_twins
def test_a_known_murmur3(twin: Any) -> None:
    assert twin.murmur3(b"Hello, world!") == 0xC0363E43
