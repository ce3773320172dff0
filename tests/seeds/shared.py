"""What the tests of all seeds use: a broker for a whole module, and plain requests."""

from __future__ import annotations

import itertools
import re
from typing import Any

import httpx

from broker_process import BrokerProcess

_numbers = itertools.count()


def fresh_name(word: str = "queue") -> str:
    """A queue that no other test has."""
    return f"{word}-{next(_numbers)}"


class Client:
    """One connection to a broker, kept open."""

    def __init__(self, broker: BrokerProcess) -> None:
        self.broker = broker
        self._http = httpx.Client(base_url=broker.url(""), timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self._http.get(path, headers=headers)

    def post(self, path: str, body: bytes = b"", **headers: str) -> httpx.Response:
        return self._http.post(path, content=body, headers=headers)

    def put(self, path: str, page: Any) -> httpx.Response:
        return self._http.put(path, json=page)

    def delete(self, path: str) -> httpx.Response:
        return self._http.delete(path)

    def enqueue(self, queue: str, payload: Any) -> httpx.Response:
        return self._http.post(f"/queues/{queue}/enqueue", json={"payload": payload})

    def json(self, path: str) -> Any:
        answer = self.get(path, accept="application/json")
        assert answer.status_code == 200, answer.text
        return answer.json()

    def metric(self, sample: str, path: str = "/metrics") -> float:
        """The value of one sample of a page in Prometheus text, named with its labels."""
        found = re.search(rf"^{re.escape(sample)} (\S+)$", self.get(path).text, re.MULTILINE)
        assert found, f"{path} has no {sample}"
        return float(found[1])

    def close(self) -> None:
        self._http.close()
