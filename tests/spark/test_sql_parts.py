"""What the pipeline `sql` is made of, without Spark: statements, names, and columns of JSON."""

from __future__ import annotations

import json

import pytest

from millstream.spark.pipelines.json_types import FIELDS_MAX, ddl_of
from millstream.spark.pipelines.statements import names_in, statements


def test_a_file_is_split_where_statements_end() -> None:
    text = """
    -- totals; of all
    CREATE TEMPORARY VIEW big AS SELECT ';' AS x, "a;b" FROM `o;1`; /* not; here */
    SELECT/* apart */1;
    ;
    SELECT 'it''s; \\'; fine'
    """
    assert statements(text) == [
        "CREATE TEMPORARY VIEW big AS SELECT ';' AS x, \"a;b\" FROM `o;1`",
        "SELECT 1",
        "SELECT 'it''s; \\'; fine'",
    ]
    assert statements(" ; -- nothing\n ;") == []


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT * FROM orders", ["orders"]),
        ("SELECT * FROM ORDERS o JOIN `my-users` u ON true", ["my-users", "orders"]),
        ("SELECT 'orders' FROM users -- orders", ["users"]),
        ("SELECT * FROM orders2", []),
        ("SELECT orders FROM users", ["orders", "users"]),
    ],
)
def test_topics_are_found_by_their_names(sql: str, found: list[str]) -> None:
    assert names_in(sql, ["orders", "users", "my-users"]) == found


@pytest.mark.parametrize(
    ("sql", "found"),
    [
        ("SELECT * FROM Orders", ["Orders"]),
        ("SELECT * FROM `orders`", ["orders"]),
        ("SELECT * FROM ORDERS", ["Orders", "orders"]),
        ("SELECT * FROM orders, Orders", ["Orders", "orders"]),
    ],
)
def test_of_topics_that_differ_by_case_one_that_is_written_as_it_is_counts(
    sql: str, found: list[str]
) -> None:
    assert names_in(sql, ["orders", "Orders"]) == found


def ddl(*pages: object) -> str | None:
    return ddl_of(json.dumps(page).encode() for page in pages)


def test_columns_are_those_of_the_values() -> None:
    assert ddl({"id": 1, "who": "a", "is": True, "at": None}) == (
        "`id` BIGINT, `who` STRING, `is` BOOLEAN, `at` STRING"
    )
    assert ddl({"a": {"b": [1, 2.5]}, "c": []}) == (
        "`a` STRUCT<`b`: ARRAY<DOUBLE>>, `c` ARRAY<STRING>"
    )


def test_values_that_disagree_find_a_type_that_holds_both() -> None:
    assert ddl({"n": 1}, {"n": 2.5}) == "`n` DOUBLE"
    assert ddl({"n": 1}, {"n": 2**70}) == "`n` DECIMAL(38,0)"
    assert ddl({"n": 1}, {"n": "x"}) == "`n` STRING"
    assert ddl({"n": {"a": 1}}, {"n": [1]}) == "`n` STRING"
    assert ddl({"n": None}, {"n": True}, {"m": 1}) == "`n` BOOLEAN, `m` BIGINT"


def test_names_that_spark_cannot_tell_apart_are_one_column() -> None:
    assert ddl({"id": 1, "ID": "x", "a`b": 2}) == "`id` BIGINT, `a``b` BIGINT"


def test_a_field_whose_name_is_taken_is_no_column() -> None:
    values = [json.dumps({"_Key": 1, "_key": 2, "id": {"_key": 3}}).encode()]
    assert ddl_of(values, {"_key"}) == "`id` STRUCT<`_key`: BIGINT>"


def test_values_that_are_no_objects_have_no_columns() -> None:
    assert ddl_of([]) is None
    assert ddl_of([None, b"", b"plain text", b"\xff", b"[1]"]) is None
    assert ddl_of([b"{}"]) is None
    # A few that are broken among many that are not.
    assert ddl_of([b'{"a": 1}', b'{"a": 2}', b"oops"]) == "`a` BIGINT"


def test_there_is_a_bound_to_what_is_looked_at() -> None:
    deep: object = 1
    for _ in range(100):
        deep = {"x": deep}
    assert "STRING" in (ddl({"deep": deep}) or "")
    assert ddl_of([b"[" * 100_000]) is None
    wide = {f"f{number}": number for number in range(FIELDS_MAX)}
    assert ddl({"w": wide}, {"w": {"one more": 1}}) == "`w` STRING"
