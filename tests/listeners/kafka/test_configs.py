"""What the configs of the broker say to a client that came to it one way or another."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millstream.kinds import Address
from millstream.listeners.kafka.configs import STRING, Config, with_http
from millstream.listeners.kafka.context import Context


def url(http: Address | None, *, advertised: Address | None = None, is_secure: bool = False) -> Any:
    nothing: Any = None
    context = Context(
        nothing, nothing, nothing, nothing, 1, advertised, http=http, is_secure=is_secure
    )
    call: Any = SimpleNamespace(here=Address("10.1.1.1", 9092))
    return context.http_url(call)


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_http_that_listens_everywhere_is_where_the_client_came_to(everywhere: str) -> None:
    http = Address(everywhere, 8080)
    assert url(http) == "http://10.1.1.1:8080"
    assert url(http, advertised=Address("broker.example", 19092)) == "http://broker.example:8080"


def test_http_is_where_it_listens() -> None:
    assert url(Address("127.0.0.1", 8080)) == "http://127.0.0.1:8080"
    assert url(Address("::1", 8080), is_secure=True) == "https://[::1]:8080"
    assert url(None) is None


def test_without_http_there_is_no_config_that_says_where_it_is() -> None:
    one = Config("millstream.http", "off", STRING, 4, True, "where")
    other = Config("millstream.kafka", "127.0.0.1:9092", STRING, 4, True, "where")
    assert with_http([one, other], None) == [other]
    assert with_http([one, other], "http://x:1") == [one._replace(value="http://x:1"), other]
