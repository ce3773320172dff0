"""What errors have in common: the shape of each, as texts. The same table is held to Spark's
columns beside the pipeline."""

from __future__ import annotations

import pytest

from millstream.spark.pipelines.shapes import (
    NO_ERROR,
    SHAPE_CHARACTERS,
    fragments,
    shape_id,
    shape_of,
)

SHAPES = {
    "timeout after 132 ms": "timeout after <n> ms",
    "timeout  after\n 9.5 ms ": "timeout after <n> ms",
    "no customer 'Ada Lovelace'": "no customer <text>",
    'key "a" is missing in "b"': "key <text> is missing in <text>",
    "can't read `orders`": "can't read <text>",
    "order-4711 is -3 too much": "order-<n> is <n> too much",
    "12345678 is taken": "<n> is taken",
    "commit 0a1b2c3d4e is gone": "commit <id> is gone",
    "at 0x7ffdeadbeef": "at <id>",
    "no 57b05f31-b4ba-4a52-9f00-0123456789ab here": "no <id> here",
    "ticket K8s1xQ is closed": "ticket <id> is closed",
    "late since 2026-01-01T08:00:00.123Z": "late since <time>",
    "late since 2026-01-01": "late since <time>",
    "no route to 10.0.0.17:8080": "no route to <address>",
    "GET https://shop.example/orders/17?x=1 failed": "GET <url> failed",
    "mail to ada.l@shop.example bounced": "mail to <email> bounced",
    "version 1.2.3 wanted": "version <n> wanted",
    "größer als 7 €": "größer als <n> €",
    'Traceback (most recent call last):\n  File "a.py", line 3\nValueError: 17 is odd\n': (
        "ValueError: <n> is odd"
    ),
    "": NO_ERROR,
    "  \n": NO_ERROR,
}


@pytest.mark.parametrize(("error", "shape"), SHAPES.items())
def test_what_differs_from_time_to_time_is_left_out(error: str, shape: str) -> None:
    assert shape_of(error) == shape


def test_an_error_that_nobody_told_has_a_shape_too() -> None:
    assert shape_of(None) == NO_ERROR


def test_a_shape_has_no_more_than_so_many_characters() -> None:
    assert shape_of("x y " * 100) == ("x y " * 100)[:SHAPE_CHARACTERS]


def test_a_shape_is_named_by_all_that_makes_it_one() -> None:
    first = shape_id("orders", "billing", "rejected", "no <n>")
    assert first == shape_id("orders", "billing", "rejected", "no <n>")
    others = [
        shape_id("order", "sbilling", "rejected", "no <n>"),
        shape_id("orders", "billing", "deliveries", "no <n>"),
        shape_id("orders", "billing", "rejected", "no <id>"),
    ]
    assert len({first, *others}) == 4


def test_what_to_search_for_are_the_words_of_the_error_the_longest_first() -> None:
    found = fragments("timeout after <n> ms for order <text>")
    assert found == ["timeout after", "ms for order", "timeout", "after", "order"]
    assert fragments(NO_ERROR) == []
    assert fragments("<n> <id>") == []
