"""The OpenAPI page as a page: whole, without loose ends. What it says is tested by sending it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from broker_process import BrokerProcess
from millstream.listeners.http.openapi import ALWAYS

HOT = [
    ("post", "/enqueue"),
    ("get", "/dequeue"),
    ("post", "/queues/{name}/enqueue"),
    ("post", "/queues/{name}/enqueue/batch"),
    ("get", "/queues/{name}/dequeue"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with BrokerProcess(str(tmp_path_factory.mktemp("openapi"))) as broker:
        return broker.wait_until_ready().get("/openapi.json").json()


def operations(page: Any) -> Iterator[tuple[str, str, Any]]:
    for path, item in page["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


@pytest.mark.parametrize(("method", "path"), HOT)
def test_hot_routes_are_described_like_all_others(page: Any, method: str, path: str) -> None:
    assert page["paths"][path][method]["summary"]


def test_every_operation_says_what_it_is(page: Any) -> None:
    tags = {tag["name"] for tag in page["tags"]}
    for method, path, operation in operations(page):
        assert operation["summary"], path
        assert set(operation["tags"]) <= tags, path
        in_path = set(re.findall(r"{(\w+)}", path))
        described = {one["name"] for one in operation.get("parameters", ()) if one["in"] == "path"}
        assert described == in_path, path
        assert all(one["description"] for one in operation.get("parameters", ())), (method, path)


def test_names_of_operations_are_unique(page: Any) -> None:
    names = [operation["operationId"] for _, _, operation in operations(page)]
    assert len(names) == len(set(names))
    # All of them: those of queues, of topics and of the broker.
    assert len(names) > 50


def test_every_operation_lists_its_errors_in_the_one_shape(page: Any) -> None:
    for method, path, operation in operations(page):
        responses = operation["responses"]
        assert {str(status) for status in ALWAYS} <= set(responses), path
        assert "422" not in responses, path
        if method == "head":
            continue
        for status in {*map(str, ALWAYS), "404", "429"} & set(responses):
            schema = responses[status]["content"]["application/json"]["schema"]
            if "$ref" in schema:
                schema = page["components"]["schemas"]["Error"]
            assert schema["required"] == ["error", "message"], (path, status)
            assert all(
                schema["properties"][name]["type"] == "string" for name in schema["required"]
            )


def test_every_shape_that_is_named_is_there_and_is_used(page: Any) -> None:
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(page)))
    assert named == set(page["components"]["schemas"])
