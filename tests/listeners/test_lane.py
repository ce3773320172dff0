"""The fast lane over real sockets: order, limits, and clients that misbehave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from broker_process import BrokerProcess

REQUEST = b"POST /queues/q/enqueue HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
ENQUEUE = b"POST /enqueue HTTP/1.1\r\nhost: localhost\r\n"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    data: Path = tmp_path_factory.mktemp("lane")
    with BrokerProcess(str(data)) as running:
        running.wait_for("ready")
        yield running


def connect(broker: BrokerProcess) -> closing[socket.socket]:
    listening = [one for one in broker.messages("listening") if one["listener"] == "http"]
    host, _, port = str(listening[0]["address"]).rpartition(":")
    return closing(socket.create_connection((host, int(port)), timeout=PATIENCE_S))


def message(number: int) -> bytes:
    body = json.dumps({"payload": number}).encode()
    return REQUEST % (len(body), body)


def read_answers(connection: socket.socket, count: int) -> list[tuple[int, bytes]]:
    """Status and body of the next answers, by their lengths."""
    found: list[tuple[int, bytes]] = []
    data = b""
    while len(found) < count:
        while (end := data.find(b"\r\n\r\n")) < 0:
            more = connection.recv(65536)
            assert more, f"closed after {len(found)} answers"
            data += more
        head, data = data[:end].decode(), data[end + 4 :]
        status = int(head.split(" ")[1])
        lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:])
        length = int(lines.get("content-length", "0"))
        while len(data) < length:
            data += connection.recv(65536)
        found.append((status, data[:length]))
        data = data[length:]
    return found


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def test_a_request_may_be_split_at_any_byte(broker: BrokerProcess) -> None:
    whole = message(7) + get("/queues/q/dequeue")
    with connect(broker) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(1, len(whole)):
            connection.sendall(whole[:at])
            connection.sendall(whole[at:])
            (first, _), (second, body) = read_answers(connection, 2)
            assert (first, second) == (200, 200)
            assert json.loads(body)["payload"] == 7


def test_pipelined_answers_come_in_order_though_one_has_to_wait(broker: BrokerProcess) -> None:
    with connect(broker) as waiting, connect(broker) as other:
        other.sendall(REQUEST.replace(b"/q/", b"/slow/") % (13, b'{"payload":0}'))
        read_answers(other, 1)
        waiting.sendall(
            get("/queues/slow/dequeue")
            + get("/queues/slow/dequeue?timeout=30")
            + get("/health")
            + get("/queues/none/dequeue")
        )
        [(status, body)] = read_answers(waiting, 1)
        assert (status, json.loads(body)["payload"]) == (200, 0)
        other.sendall(REQUEST.replace(b"/q/", b"/slow/") % (13, b'{"payload":1}'))
        read_answers(other, 1)
        answers = read_answers(waiting, 3)
    assert [status for status, _ in answers] == [200, 200, 404]
    assert json.loads(answers[0][1])["payload"] == 1
    assert b"uptime_seconds" in answers[1][1]


def test_a_hundred_pipelined_requests_are_answered_in_order(broker: BrokerProcess) -> None:
    with connect(broker) as connection:
        connection.sendall(b"".join(message(number) for number in range(100)))
        sizes = [json.loads(body)["queue_size"] for _, body in read_answers(connection, 100)]
        assert sizes == list(range(1, 101))
        connection.sendall(get("/queues/q/dequeue") * 100)
        taken = [json.loads(body)["payload"] for _, body in read_answers(connection, 100)]
    assert taken == list(range(100))


def test_a_waiter_that_goes_away_takes_nothing_along(broker: BrokerProcess) -> None:
    with connect(broker) as connection:
        connection.sendall(REQUEST.replace(b"/q/", b"/gone/") % (13, b'{"payload":1}'))
        connection.sendall(get("/queues/gone/dequeue"))
        read_answers(connection, 2)
        with connect(broker) as leaving:
            leaving.sendall(get("/queues/gone/dequeue?timeout=30"))
            wait_for_waiters(connection, "gone", 1)
        wait_for_waiters(connection, "gone", 0)
        connection.sendall(REQUEST.replace(b"/q/", b"/gone/") % (13, b'{"payload":2}'))
        connection.sendall(get("/queues/gone/dequeue"))
        _, (status, body) = read_answers(connection, 2)
    assert (status, json.loads(body)["payload"]) == (200, 2)


def wait_for_waiters(connection: socket.socket, queue: str, count: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        connection.sendall(get(f"/queues/{queue}"))
        [(_, body)] = read_answers(connection, 1)
        if json.loads(body)["waiting"] == count:
            return
    pytest.fail(f"never {count} waiters")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (ENQUEUE + b"content-length: 999999999\r\n\r\n" + b"x" * 200_000, 413),
        (ENQUEUE + b"transfer-encoding: chunked\r\n\r\n30d40\r\n" + b"x" * 200_000, 413),
        (ENQUEUE + b"x: " + b"y" * 100_000, 431),
        (ENQUEUE + b"x: " + b"y" * 65_600 + b"\r\ncontent-length: 0\r\n\r\n", 431),
        (b"what is this\r\n\r\n", 400),
    ],
)
def test_what_is_too_much_is_refused_and_ends(
    broker: BrokerProcess, request_: bytes, status: int
) -> None:
    with connect(broker) as connection:
        connection.sendall(request_)
        [(answered, body)] = read_answers(connection, 1)
        assert answered == status
        assert json.loads(body)["error"]
        while connection.recv(65536):
            pass


def test_a_client_that_expects_to_be_told_is_told_to_go_on(broker: BrokerProcess) -> None:
    with connect(broker) as connection:
        head = b"POST /enqueue HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
        connection.sendall(head + b"content-length: 2\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.sendall(b"hi")
        assert read_answers(connection, 1) == [(202, b"")]
        connection.sendall(get("/dequeue"))
        assert read_answers(connection, 1) == [(200, b"hi")]


def test_a_batch_may_be_larger_than_one_message(broker: BrokerProcess) -> None:
    body = json.dumps({"payloads": ["x" * 1000] * 300}).encode()
    with connect(broker) as connection:
        head = b"POST /queues/many/enqueue/batch HTTP/1.1\r\nhost: localhost\r\n"
        connection.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        [(status, answer)] = read_answers(connection, 1)
    assert status == 200
    assert json.loads(answer)["queued"] == 300


def test_the_setting_bounds_the_connections(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--connections-max", "1") as small:
        small.wait_for("ready")
        with connect(small) as first:
            first.sendall(get("/livez"))
            [(status, _)] = read_answers(first, 1)
            assert status == 200
            with connect(small) as second:
                [(status, body)] = read_answers(second, 1)
                assert (status, json.loads(body)["error"]) == (503, "too_many_connections")
                assert second.recv(100) == b""
        assert small.wait_for("too many connections")["connections_max"] == 1


@pytest.mark.parametrize("header", [b"origin: http://evil.example", b"sec-fetch-site: cross-site"])
def test_web_pages_from_elsewhere_drain_no_queue(broker: BrokerProcess, header: bytes) -> None:
    with connect(broker) as connection:
        connection.sendall(b"GET /dequeue HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n\r\n")
        [(status, body)] = read_answers(connection, 1)
    assert status == 403
    assert json.loads(body)["error"] == "foreign_request"
