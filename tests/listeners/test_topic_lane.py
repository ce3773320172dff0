"""Topics on the fast lane: heads that were seen before mean the same, and answers keep order."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from listeners.v1_client import V1

# A head is known from its third time on.
ROUNDS = 6


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    directory: Path = tmp_path_factory.mktemp("broker")
    with BrokerProcess(str(directory)) as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


def test_requests_with_one_head_go_to_the_topic_they_name(v1: V1) -> None:
    first, second = v1.topic(), v1.topic()
    with _connect(v1) as connection:
        for number in range(ROUNDS):
            for topic in (first, second):
                connection.sendall(_publish(topic, f'{{"value":"{topic}-{number}"}}'))
                (answer,) = _answers(connection, 1)
                assert (answer["topic"], answer["offset"]) == (topic, number)
    for topic in (first, second):
        assert v1.values(topic) == [f"{topic}-{number}" for number in range(ROUNDS)]


def test_pipelined_publishes_are_answered_in_order(v1: V1) -> None:
    topic = v1.topic()
    good = [_publish(topic, f'{{"value":{number}}}') for number in range(ROUNDS)]
    bad = _publish(topic, '{"value":')
    with _connect(v1) as connection:
        connection.sendall(b"".join([*good, bad, _publish(topic, '{"value":9}')]))
        answers = _answers(connection, ROUNDS + 2)
    *placed, refused, last = answers
    assert [one["offset"] for one in placed] == list(range(ROUNDS))
    assert refused["error"] == "body_invalid"
    assert last["offset"] == ROUNDS
    assert v1.values(topic) == [*range(ROUNDS), 9]


def test_a_known_head_means_the_topic_that_has_the_name_now(v1: V1) -> None:
    topic = v1.topic()
    with _connect(v1) as connection:
        for number in range(ROUNDS):
            connection.sendall(_publish(topic, '{"value":1}'))
            assert _answers(connection, 1)[0]["offset"] == number
        list_groups = b"GET /v1/groups HTTP/1.1\r\nhost: localhost\r\n\r\n"
        v1.good("DELETE", f"/topics/{topic}")
        v1.good("POST", "/topics", {"name": topic, "partitions": 1})
        connection.sendall(list_groups + _publish(topic, '{"value":2}'))
        groups, placed = _answers(connection, 2)
    assert "groups" in groups
    assert placed["offset"] == 0
    assert v1.values(topic) == [2]


def _connect(v1: V1) -> socket.socket:
    host, port = v1.broker.url("")[len("http://") :].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _publish(topic: str, body: str) -> bytes:
    head = f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nhost: localhost\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n{body}".encode()


def _answers(connection: socket.socket, count: int) -> list[dict[str, object]]:
    """The bodies of so many answers, in the order in which they come."""
    found: list[dict[str, object]] = []
    buffer = b""
    while len(found) < count:
        head, end, rest = buffer.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        size = int(length[1]) if length else 0
        if not end or len(rest) < size:
            received = connection.recv(65536)
            assert received, f"closed after {len(found)} answers"
            buffer += received
            continue
        found.append(json.loads(rest[:size]))
        buffer = rest[size:]
    return found
