"""Batches of records as Arrow columns, exactly as Spark wants them. Needs no Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from millstream.errors import ValueInvalid
from millstream.log import batch as batches
from millstream.spark.rows import ARROW_TYPES, KAFKA_COLUMNS, Rows, Shape, dead_letters
from millstream.spark.typed_values import CORRUPT

END = 2**62
ORDER = pa.struct([("id", pa.int64()), ("name", pa.string()), ("at", pa.timestamp("us", tz="UTC"))])


def schema_of(*names: str, **other: Any) -> Any:
    return pa.schema([(name, other.get(name, ARROW_TYPES[name])) for name in names])


def rows_of(shape: Shape, records: list[Any], *, is_append_time: bool = False) -> Any:
    data = batches.encode(records)
    return Rows(shape, ("orders", 2)).make(data, 0, END, is_append_time=is_append_time)


def values_of(values: list[bytes | None], form: str, kind: Any = None, **more: Any) -> Any:
    schema = schema_of("value", CORRUPT, **({} if kind is None else {"value": kind}))
    shape = Shape(schema, form, **more)
    return rows_of(shape, [(1, None, value, []) for value in values]).to_pylist()


def test_a_row_is_that_of_sparks_own_connector() -> None:
    shape = Shape(schema_of(*KAFKA_COLUMNS, "headers", "lane"))
    made = rows_of(shape, [(1_000, b"k", None, [("h", b"x")]), (2_000, None, b"v", [])])
    assert made.schema.equals(shape.schema)
    assert made.to_pylist() == [
        {
            "key": b"k",
            "value": None,
            "topic": "orders",
            "partition": 2,
            "offset": 0,
            "timestamp": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
            "timestampType": 0,
            "headers": [{"key": "h", "value": b"x"}],
            "lane": "normal",
        },
        {
            "key": None,
            "value": b"v",
            "topic": "orders",
            "partition": 2,
            "offset": 1,
            "timestamp": datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC),
            "timestampType": 0,
            "headers": None,
            "lane": "normal",
        },
    ]


def test_only_records_of_the_range_are_given() -> None:
    data = batches.encode([(0, None, bytes([n]), []) for n in range(9)], base_offset=100)
    made = Rows(Shape(schema_of("offset")), ("t", 0)).make(data, 103, 105, is_append_time=False)
    assert made.column("offset").to_pylist() == [103, 104]


def test_columns_that_are_always_the_same_grow_with_their_batches() -> None:
    rows = Rows(Shape(schema_of("topic", "partition")), ("t", 5))
    for count in (1, 300, 2):
        data = batches.encode([(0, None, b"", [])] * count)
        made = rows.make(data, 0, END, is_append_time=False)
        assert made.column("topic").to_pylist() == ["t"] * count
        assert made.column("partition").to_pylist() == [5] * count


def test_a_time_that_is_no_time_is_null() -> None:
    shape = Shape(schema_of("timestamp"))
    made = rows_of(shape, [(2**62, None, b"", []), (5, None, b"", []), (-1, None, b"", [])])
    assert made.column("timestamp").cast(pa.int64()).to_pylist() == [None, 5_000, -1_000]


def test_the_kind_of_time_is_told() -> None:
    made = rows_of(Shape(schema_of("timestampType")), [(1, None, b"", [])], is_append_time=True)
    assert made.column(0).to_pylist() == [1]


def test_a_lane_is_told() -> None:
    shape = Shape(schema_of("lane"))
    made = rows_of(shape, [(1, None, b"", [("ms-lane", b"critical")]), (1, None, b"", [])])
    assert made.column(0).to_pylist() == ["critical", "normal"]


def test_dead_letters_say_why() -> None:
    headers = [
        ("ms-dead-topic", b"orders"),
        ("ms-dead-partition", b"1"),
        ("ms-dead-offset", b"77"),
        ("ms-dead-group", b"billing"),
        ("ms-dead-deliveries", b"5"),
        ("ms-dead-reason", b"deliveries"),
        ("ms-dead-error", b"no such customer"),
        ("ms-dead-first-failure", b"1000"),
        ("ms-dead-last-failure", b"never"),
    ]
    made = rows_of(Shape(schema_of("dead_letter")), [(1, None, b"", headers), (1, None, b"", [])])
    assert made.column(0).to_pylist() == [
        {
            "topic": "orders",
            "partition": 1,
            "offset": 77,
            "group": "billing",
            "deliveries": 5,
            "reason": "deliveries",
            "error": "no such customer",
            "first_failure": datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
            "last_failure": None,
        },
        None,
    ]


def test_records_without_headers_have_null_wherever_they_are() -> None:
    shape = Shape(schema_of("offset", "headers"))
    given = [[("a", b"1")] * (n % 3) for n in range(100)]
    made = rows_of(shape, [(1, None, b"", headers) for headers in given])
    made.validate(full=True)
    expected = [[{"key": "a", "value": b"1"}] * (n % 3) or None for n in range(100)]
    assert made.column("headers").to_pylist() == expected
    assert made.column("headers").null_count == 34


def test_records_of_an_archive_without_headers_are_no_dead_letters() -> None:
    headers = pa.array(
        [None, [{"key": "ms-dead-topic", "value": b"orders"}], []], ARROW_TYPES["headers"]
    )
    assert [one and one["topic"] for one in dead_letters(headers).to_pylist()] == [
        None,
        "orders",
        None,
    ]


# ---- values


def test_text_that_is_no_text_is_mended_or_refused() -> None:
    assert [row["value"] for row in values_of(["ä".encode(), None], "text", pa.string())] == [
        "ä",
        None,
    ]
    assert values_of([b"a\xff"], "text", pa.string())[0]["value"] == "a\ufffd"
    with pytest.raises(ValueInvalid) as caught:
        values_of([b"a", b"\xff"], "text", pa.string(), is_failing_fast=True)
    assert caught.value.fields["offset"] == 1


def test_json_gives_typed_columns_whatever_producers_add_or_drop() -> None:
    rows = values_of(
        [
            b'{"id": 1, "name": "a", "at": "2026-11-01T10:00:00Z"}',
            None,
            b'{"id": 2, "new": {"deep": [1]}}',
            b" ",
        ][:3],
        "json",
        ORDER,
    )
    assert [row["value"] for row in rows] == [
        {"id": 1, "name": "a", "at": datetime(2026, 11, 1, 10, tzinfo=UTC)},
        None,
        {"id": 2, "name": None, "at": None},
    ]
    assert [row[CORRUPT] for row in rows] == [None, None, None]


MISFITS = [
    (b"", None),
    (b"[1]", None),
    (b"nothing", None),
    (b'{"id": 1', None),
    (b'{"id": 1}{"id": 2}', None),
    (b'{"id": "one", "name": "a"}', {"id": None, "name": "a", "at": None}),
    (b'{"id": 1.5, "name": "a"}', {"id": None, "name": "a", "at": None}),
    (b'{"id": true, "name": "a"}', {"id": None, "name": "a", "at": None}),
    (b'{"id": 99999999999999999999, "name": "a"}', {"id": None, "name": "a", "at": None}),
    (b'{"id": 3, "at": "soon"}', {"id": 3, "name": None, "at": None}),
    (b"\xff\xfe", None),
]


@pytest.mark.parametrize(("value", "left"), MISFITS)
def test_a_value_that_does_not_fit_harms_no_other(value: bytes, left: object) -> None:
    rows = values_of([b'{"id": 1}', value, b'{"id": 2}'], "json", ORDER)
    assert [row["value"]["id"] for row in rows[::2]] == [1, 2]
    assert rows[1]["value"] == left
    assert rows[1][CORRUPT] == value.decode("utf-8", "replace")
    assert rows[0][CORRUPT] is rows[2][CORRUPT] is None


@pytest.mark.parametrize(("value", "left"), MISFITS)
def test_in_failfast_a_value_that_does_not_fit_is_named(value: bytes, left: object) -> None:
    with pytest.raises(ValueInvalid) as caught:
        values_of([b'{"id": 1}', value], "json", ORDER, is_failing_fast=True)
    assert caught.value.fields == {"topic": "orders", "partition": 2, "offset": 1}


def test_a_json_text_over_several_lines_is_one_value() -> None:
    rows = values_of([b'{\n"id": 1\n}', b'{"id": 2, "name": "a\\nb"}'], "json", ORDER)
    assert [row["value"]["id"] for row in rows] == [1, 2]
    assert rows[1]["value"]["name"] == "a\nb"


def test_nothing_but_nulls_is_no_trouble() -> None:
    assert [row["value"] for row in values_of([None, None], "json", ORDER)] == [None, None]
