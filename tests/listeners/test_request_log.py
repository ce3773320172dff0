"""The request log: one message a request, whichever way it is answered, and none by default."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until

FIELDS = {"method", "path", "status", "bytes_in", "bytes_out", "duration_ms", "peer"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = str(tmp_path_factory.mktemp("requests"))
    with BrokerProcess(directory, "--request-log", "on") as process:
        yield process.wait_until_ready()


def logged(broker: BrokerProcess, path: str) -> dict[str, Any]:
    """The one message of the one request for a path."""
    found: list[dict[str, Any]] = []

    def is_there() -> bool:
        found[:] = [one for one in broker.messages("request") if one["path"] == path]
        return bool(found)

    wait_until(is_there, f"a message of {path}")
    assert len(found) == 1
    assert set(found[0]) >= FIELDS
    return found[0]


def shown(message: dict[str, Any]) -> tuple[object, ...]:
    return tuple(message[name] for name in ("method", "status", "bytes_in", "bytes_out"))


def test_a_hot_request_is_logged(broker: BrokerProcess) -> None:
    httpx.post(
        broker.url("/queues/hot/enqueue?n=1"), content=b'{"payload":1}', timeout=PATIENCE_SECONDS
    )
    message = logged(broker, "/queues/hot/enqueue?n=1")
    assert shown(message)[:3] == ("POST", 200, 13)
    assert message["bytes_out"] > 13
    assert message["duration_ms"] >= 0
    assert message["peer"].startswith("127.0.0.1:")


def test_a_request_to_any_other_route_is_logged(broker: BrokerProcess) -> None:
    answer = httpx.put(
        broker.url("/queues/cold?n=2"), content=b'{"capacity":5}', timeout=PATIENCE_SECONDS
    )
    message = logged(broker, "/queues/cold?n=2")
    assert shown(message) == ("PUT", 200, 14, len(answer.content))
    assert message["peer"].startswith("127.0.0.1:")
    broker.get("/livez?n=3", listener="metrics")
    assert shown(logged(broker, "/livez?n=3"))[:2] == ("GET", 200)


def test_a_dequeue_that_waited_is_logged_when_it_is_answered(broker: BrokerProcess) -> None:
    httpx.put(broker.url("/queues/waits"), content=b"{}", timeout=PATIENCE_SECONDS)
    assert broker.get("/queues/waits/dequeue?timeout=0.01").status_code == 204
    assert shown(logged(broker, "/queues/waits/dequeue?timeout=0.01")) == ("GET", 204, 0, 0)


def test_a_client_that_goes_away_is_logged_without_a_status(broker: BrokerProcess) -> None:
    httpx.put(broker.url("/queues/lost"), content=b"{}", timeout=PATIENCE_SECONDS)
    host, port = broker.url("").removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as client:
        client.sendall(b"GET /queues/lost/dequeue?timeout=30 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        wait_until(lambda: broker.get("/queues/lost").json()["waiting"], "a dequeue that waits")
    assert shown(logged(broker, "/queues/lost/dequeue?timeout=30")) == ("GET", None, 0, 0)


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("GET", "/queues/absent/dequeue", b"", {}, 404),
        ("POST", "/queues/a!/enqueue", b'{"payload":1}', {}, 400),
        ("POST", "/queues/big/enqueue", b"x" * 200_000, {}, 413),
        ("GET", "/dequeue?n=4", b"", {"Origin": "http://evil.example"}, 403),
        ("GET", "/health?n=5", b"", {"Origin": "http://evil.example"}, 403),
        ("GET", "/nowhere", b"", {}, 404),
    ],
)
def test_what_is_refused_is_logged(
    broker: BrokerProcess,
    *,
    method: str,
    path: str,
    body: bytes,
    headers: dict[str, str],
    status: int,
) -> None:
    answer = httpx.request(
        method, broker.url(path), content=body, headers=headers, timeout=PATIENCE_SECONDS
    )
    assert answer.status_code == status
    message = logged(broker, path)
    assert (message["method"], message["status"]) == (method, status)
    assert message["bytes_out"] == len(answer.content)


def test_a_websocket_is_logged_when_it_begins(broker: BrokerProcess) -> None:
    with connect(broker.url("/queues/ws/enqueue").replace("http", "ws")) as client:
        client.send('{"payload":1}')
        client.recv()
    message = logged(broker, "/queues/ws/enqueue")
    assert (message["method"], message["status"]) == ("GET", 101)
    assert message["peer"].startswith("127.0.0.1:")


def test_a_long_path_is_cut(broker: BrokerProcess) -> None:
    broker.get("/" + "x" * 3000)
    logged(broker, "/" + "x" * 1023)


def test_by_default_nothing_is_logged(tmp_path_factory: pytest.TempPathFactory) -> None:
    with BrokerProcess(str(tmp_path_factory.mktemp("quiet"))) as broker:
        httpx.post(
            broker.wait_until_ready().url("/enqueue"), content=b"x", timeout=PATIENCE_SECONDS
        )
        assert broker.get("/health").status_code == 200
        assert broker.stop() == 0
        assert not broker.messages("request")
