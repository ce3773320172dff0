"""Forms of answers, and the table from errors to statuses."""

from __future__ import annotations

import pytest

from millstream import errors
from millstream.listeners.http.answers import JSON_TYPE, answer_to, preferred


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (None, JSON_TYPE),
        ("", JSON_TYPE),
        ("*/*", JSON_TYPE),
        ("text/plain", "text/plain"),
        ("text/*", "text/plain"),
        ("application/json;q=0.5, text/plain", "text/plain"),
        ("application/json, text/plain;q=0.5", JSON_TYPE),
        ("application/json;q=oops, text/plain;q=0.1", "text/plain"),
        ("image/png", JSON_TYPE),
    ],
)
def test_a_client_gets_the_form_it_wants(accept: str | None, wanted: str) -> None:
    assert preferred(accept, JSON_TYPE, "text/plain") == wanted


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.TopicUnknown("there is none"), 404),
        (errors.BatchTooLarge("too large"), 413),
        (errors.BatchChecksumMismatch("wrong"), 400),
        (errors.EngineBusy("later"), 429),
        (errors.DiskFull("full"), 507),
        (errors.OutcomeUnknown("maybe"), 504),
    ],
)
def test_an_error_has_its_status_and_code(error: errors.MillstreamError, status: int) -> None:
    answer = answer_to(error)
    assert answer.status_code == status
    assert bytes(answer.body) == (
        f'{{"error":"{error.code}","message":"{error.message}"}}'.encode()
    )
