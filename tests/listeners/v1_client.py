"""Plain requests to `/v1`, for tests: what was sent, what came back, and nothing in between."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import httpx

from broker_process import BrokerProcess

_numbers = itertools.count()


def fresh(word: str) -> str:
    """A name that no other test has."""
    return f"{word}-{next(_numbers)}"


class V1:
    """One connection to a broker, kept open."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self.http = httpx.Client(base_url=broker.url("/v1"), timeout=90)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        **query: Any,
    ) -> httpx.Response:
        given: dict[str, Any] = dict(headers or {})
        if raw is not None:
            given.setdefault("content-type", "application/octet-stream")
        return self.http.request(
            method, path, json=body, content=raw, headers=given, params=query or None
        )

    def good(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        """What a request is answered when all is well."""
        answer = self.call(method, path, body, **more)
        assert answer.status_code in (200, 201, 202, 204), f"{answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def refused(
        self, status: int, code: str, method: str, path: str, body: Any = None, **more: Any
    ) -> dict[str, Any]:
        """The error, with the status and the code that it must have."""
        answer = self.call(method, path, body, **more)
        page: dict[str, Any] = answer.json()
        assert (answer.status_code, page["error"]) == (status, code), page
        assert page["message"]
        return page

    def topic(self, partitions: int = 1, **settings: Any) -> str:
        """A new topic."""
        name = fresh("topic")
        body = {"name": name, "partitions": partitions, "settings": settings}
        self.good("POST", "/topics", body)
        return name

    def publish(self, topic: str, *values: Any, **more: Any) -> list[dict[str, Any]]:
        messages = [{"value": value, **more} for value in values]
        placed: list[dict[str, Any]] = self.good(
            "POST", f"/topics/{topic}/batch", {"messages": messages}
        )["placed"]
        return placed

    def values(self, topic: str, **query: Any) -> list[Any]:
        """Of all messages that a read gives."""
        page = self.good("GET", f"/topics/{topic}/messages", **query)
        return [one["value"] for one in page["messages"]]

    def close(self) -> None:
        self.http.close()
