"""The tree of errors is part of the API: codes are stable and tell errors apart."""

from __future__ import annotations

import json
import re

from millstream import errors
from millstream.errors import MillstreamError
from millstream.wire.refusals import refusal


def every_error() -> list[type[MillstreamError]]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in classes if issubclass(kind, MillstreamError)]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [kind.code for kind in every_error()]
    assert len(codes) > 20
    assert sorted(set(codes)) == sorted(codes)
    assert all("code" in vars(kind) for kind in every_error())


# Codes that clients of older queues know.
GIVEN = {errors.QueueUnknown: "queue_not_found", errors.SnapshotUnknown: "snapshot_not_found"}


def test_a_code_is_the_name_in_snake_case() -> None:
    assert all(kind.code == code for kind, code in GIVEN.items())
    for kind in every_error():
        if kind is MillstreamError or kind in GIVEN:
            continue
        assert kind.code == re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def test_every_error_says_what_it_is() -> None:
    assert all(kind.__doc__ for kind in every_error())


def test_an_error_carries_its_message_and_fields() -> None:
    error = errors.TopicUnknown("there is no topic orders", topic="orders")
    assert str(error) == error.message == "there is no topic orders"
    assert error.fields == {"topic": "orders"}
    assert not error.retriable
    assert errors.EngineBusy("later", limit_bytes=1).retriable


def test_a_client_knows_every_error_of_a_broker() -> None:
    for kind in every_error():
        if kind is not MillstreamError:
            body = json.dumps({"error": kind.code, "message": "so"}).encode()
            assert type(refusal("http://x", 400, body)) is kind
