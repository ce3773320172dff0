"""Topics on the fast lane: heads that were seen before mean the same, and answers keep order."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import BrokerProcess
from listeners.v1_client import V1
from millstream.listeners.http.lane_limits import LINE_REQUESTS_MAX
from millstream.log import batch as batches

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


def test_publishes_of_one_connection_do_not_wait_for_each_other(v1: V1) -> None:
    """More of them than may be in line, several times over, and the answers keep their order."""
    topic, count = v1.topic(), 5 * LINE_REQUESTS_MAX
    with _connect(v1) as connection:
        _make_known(connection, topic)
        publishes = [_publish(topic, f'{{"value":"{n:04}"}}') for n in range(count)]
        connection.sendall(b"".join(publishes))
        answers = _answers(connection, count)
    assert [one["offset"] for one in answers] == list(range(ROUNDS, ROUNDS + count))
    assert v1.values(topic)[ROUNDS:] == [f"{n:04}" for n in range(count)]
    # In turn, each would have had a sync of its own.
    data = v1.http.get(f"/topics/{topic}/partitions/0/batches", params={"offset": ROUNDS})
    assert len(batches.walk(data.content)) < count / 8


def test_what_comes_between_publishes_keeps_its_place(v1: V1) -> None:
    topic, other = v1.topic(), v1.topic()
    with _connect(v1) as connection:
        for name in (topic, other):
            _make_known(connection, name)
        one = _publish(topic, '{"value":"0001"}')
        requests = [
            one,
            _publish(topic, '{"value":"000\\"'),
            one,
            _publish(other, '{"value":"0002"}'),
            b"GET /v1/groups HTTP/1.1\r\nhost: localhost\r\n\r\n",
            one,
            _publish(topic, '{"value":1,"lane":"high"}'),
            one,
            _publish(topic, '{"value":1}', "Idempotency-Key: a"),
            b"GET /queues HTTP/1.1\r\nhost: localhost\r\n\r\n",
            one,
        ]
        for _ in range(ROUNDS):
            connection.sendall(b"".join(requests))
            answers = _answers(connection, len(requests))
            assert [_kind(answer) for answer in answers] == [
                topic,
                "body_invalid",
                topic,
                other,
                "groups",
                topic,
                topic,
                topic,
                topic,
                "queues",
                topic,
            ]
    assert sorted(map(str, v1.values(topic))) == sorted(
        ["0000"] * ROUNDS + (["0001"] * 5 + ["1"]) * ROUNDS + ["1"]
    )


def test_a_raw_body_is_a_value_though_its_head_is_known(v1: V1) -> None:
    topic = v1.topic()
    body = "\r\n\r\nPOST /v1"
    with _connect(v1) as connection:
        for number in range(ROUNDS):
            connection.sendall(_publish(topic, body, "Content-Type: application/octet-stream"))
            assert _answers(connection, 1)[0]["offset"] == number
    assert v1.values(topic) == [body] * ROUNDS


def test_a_record_that_is_refused_takes_no_other_with_it(v1: V1) -> None:
    topic = v1.topic(message_bytes_max=100)
    good, bad = (_publish(topic, f'{{"value":"{"x" * size}"}}') for size in (10, 200))
    with _connect(v1) as connection:
        for _ in range(ROUNDS):
            connection.sendall(good + bad)
            placed, refused = _answers(connection, 2)
            assert (placed["topic"], refused["error"]) == (topic, "message_too_large")
    assert v1.values(topic) == ["x" * 10] * ROUNDS


def test_a_client_that_goes_away_takes_no_answer_of_another(v1: V1) -> None:
    topic = v1.topic()
    with _connect(v1) as leaving, _connect(v1) as staying:
        for connection in (leaving, staying):
            _make_known(connection, topic)
        one = _publish(topic, '{"value":"0001"}')
        leaving.sendall(one * 10)
        leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        leaving.close()
        staying.sendall(one * 10)
        offsets = [one["offset"] for one in _answers(staying, 10)]
    assert offsets == sorted(offsets)  # type: ignore[type-var]


def _make_known(connection: socket.socket, topic: str) -> None:
    """The head of a publish of a value of four characters."""
    for _ in range(ROUNDS):
        connection.sendall(_publish(topic, '{"value":"0000"}'))
        _answers(connection, 1)


def _kind(answer: dict[str, object]) -> object:
    return answer.get("topic") or answer.get("error") or next(iter(answer))


def _connect(v1: V1) -> socket.socket:
    host, port = v1.broker.url("")[len("http://") :].split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def _publish(topic: str, body: str, *headers: str) -> bytes:
    lines = (f"POST /v1/topics/{topic}/messages HTTP/1.1", "host: localhost", *headers, "")
    head = "\r\n".join(lines)
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
