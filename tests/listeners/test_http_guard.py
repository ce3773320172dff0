"""Which requests are a web page's from elsewhere."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from millstream.listeners.http.guard import KNOWN_MAX, Guard


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("not called")


def objection(*hosts: str, **headers: str) -> str | None:
    guard = Guard(nobody, listener="http", hosts=hosts)
    return guard.objection(Headers({k.replace("_", "-"): v for k, v in headers.items()}))


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8080", "localhost", "LOCALHOST:8080", "[::1]:8080", "10.1.2.3", "localhost.:80"],
)
def test_addresses_and_localhost_are_always_ours(host: str) -> None:
    assert objection(host=host) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", "[::1", "a@b"]
)
def test_a_name_that_nobody_listed_is_refused(host: str) -> None:
    assert "allowed_hosts" in (objection(host=host) or "")


def test_listed_names_are_ours() -> None:
    assert objection("broker.example", host="Broker.Example:8080") is None
    assert objection(".internal", host="a.b.internal") is None
    assert objection(".internal", host="internal") is not None
    assert objection("*", host="anything.example") is None


def test_a_request_without_a_host_is_no_browsers() -> None:
    assert objection() is None


@pytest.mark.parametrize(
    ("origin", "host", "foreign"),
    [
        ("http://localhost:8080", "localhost:8080", False),
        ("http://localhost", "localhost:80", False),
        ("https://localhost", "localhost", False),
        ("http://localhost:3000", "localhost:8080", True),
        ("http://127.0.0.1:8080", "localhost:8080", True),
        ("null", "localhost:8080", True),
        ("", "localhost:8080", True),
        ("http://[::1", "localhost:8080", True),
        ("http://localhost:port", "localhost:8080", True),
    ],
)
def test_an_origin_must_be_where_it_calls(origin: str, host: str, foreign: bool) -> None:
    assert (objection(origin=origin, host=host) is not None) == foreign


def test_an_origin_without_a_host_is_foreign() -> None:
    assert objection(origin="http://localhost") is not None


@pytest.mark.parametrize(
    ("site", "foreign"),
    [("cross-site", True), ("same-origin", False), ("none", False)],
)
def test_the_browsers_own_word_is_heard(site: str, foreign: bool) -> None:
    assert (objection(sec_fetch_site=site, host="localhost") is not None) == foreign


def test_what_was_asked_before_is_known_within_bounds() -> None:
    guard = Guard(nobody, listener="http", hosts=())
    for number in range(KNOWN_MAX + 10):
        for _ in range(2):
            assert guard.hot_objection([(b"host", b"h%d.example" % number)]) is not None
    assert guard.hot_objection([(b"host", b"localhost")]) is None
    assert guard.hot_objection([(b"host", b"x" * 10_000)]) is not None
    assert len(guard._known) <= KNOWN_MAX
    assert sum(len(value) for asked in guard._known for _, value in asked) < 100_000
    assert (guard.requests, guard.refused) == (2 * (KNOWN_MAX + 10) + 2, 2 * (KNOWN_MAX + 10) + 1)
