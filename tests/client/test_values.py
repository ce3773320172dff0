"""What users give, as bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgspec
import pytest

from client.scripted import run
from millstream.client import AsyncClient
from millstream.client.values import encode_json, encode_value
from millstream.errors import BodyInvalid, ParameterInvalid

Reading = dataclasses.make_dataclass("Reading", [("celsius", float), ("note", object, None)])
Total = msgspec.defstruct("Total", [("per_day", float)], rename="camel")


@pytest.mark.parametrize("number", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("make", "at"),
    [
        (lambda number: number, ""),
        (lambda number: [1, number], "[1]"),
        (lambda number: {"a": None, "b": [{"c": (0, number)}]}, "b[0].c[1]"),
        (lambda number: {"id": 2**70, "n": number}, "n"),
        (lambda number: {"raw": msgspec.Raw(b"{}"), "n": number}, "n"),
        (Reading, "celsius"),
        (lambda number: [Total(number)], "[0].perDay"),
    ],
)
def test_a_number_that_json_does_not_have_is_refused_and_never_turned_into_null(
    number: float, make: Any, at: str
) -> None:
    with pytest.raises(BodyInvalid) as caught:
        encode_value(make(number))
    assert caught.value.fields == {"at": at}
    assert f"{number}" in caught.value.message
    assert at in caught.value.message


@pytest.mark.parametrize(
    ("value", "data"),
    [
        ({"a": None}, b'{"a":null}'),
        ([None, 1.5, "null"], b'[null,1.5,"null"]'),
        ({"a": 2**70, "b": None}, b'{"a":1180591620717411303424,"b":null}'),
        ({"a": msgspec.Raw(b"[null]")}, b'{"a":[null]}'),
        # These bytes are those of a NaN, but not where a number stands.
        ({"a": b"\xcb\x7f\xf8\x00\x00\x00", "b": None}, b'{"a":"y3/4AAAA","b":null}'),
        (Reading(1e308), b'{"celsius":1e308,"note":null}'),
        (None, b"null"),
    ],
)
def test_what_is_none_is_null(value: object, data: bytes) -> None:
    assert encode_json(value) == data


def test_nothing_is_sent_of_a_message_with_a_number_that_json_does_not_have() -> None:
    async def scenario() -> None:
        # Nobody is there, and nobody is asked.
        async with AsyncClient("http://127.0.0.1:1") as client:
            with pytest.raises(BodyInvalid):
                await client.publish("t", {"total": math.nan})
            with pytest.raises(BodyInvalid):
                await client.queues.enqueue("q", {"total": math.inf})

    run(scenario())


@pytest.mark.parametrize(
    ("wrong", "parameter", "named"),
    [
        ({"key": 5}, "key", "int"),
        ({"key": ["a"]}, "key", "list"),
        ({"headers": [("a", "1")]}, "headers", "list"),
        ({"headers": {"a": 1}}, "headers", "'a'"),
        ({"headers": {1: "a"}}, "headers", "1"),
    ],
)
def test_what_no_record_can_have_is_refused_by_name(
    wrong: dict[str, Any], parameter: str, named: str
) -> None:
    async def scenario() -> None:
        async with AsyncClient("http://127.0.0.1:1", retry_s=0) as client:
            producer = client.producer()
            for attempt in (
                client.publish("t", 1, **wrong),
                client.topics.publish_many("t", [{"value": 1, **wrong}]),
                producer.send("t", 1, **wrong),
            ):
                with pytest.raises(ParameterInvalid) as caught:
                    await attempt
                assert caught.value.fields["parameter"] == parameter
                assert named in caught.value.message

    run(scenario())


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (1, "message 1 is of type int"),
        ("a", "message 1 is of type str"),
        ({}, "message 1 has no value"),
        ({"value": 1, "time": 5}, "message 1 has time, which no message has"),
    ],
)
def test_one_of_many_messages_that_is_none_is_named(message: Any, why: str) -> None:
    async def scenario() -> None:
        async with AsyncClient("http://127.0.0.1:1", retry_s=0) as client:
            with pytest.raises(ParameterInvalid, match=why):
                await client.topics.publish_many("t", [{"value": 1}, message])

    run(scenario())
