"""Receives and acks whose heads were seen before, over connections as a busy worker has them."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1, fresh

# Heads are known from the second time on.
TIMES = 6


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    directory = str(tmp_path_factory.mktemp("broker"))
    with BrokerProcess(directory, "--member-inflight-max", "3") as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


def post(path: str, body: object) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST /v1{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


def connected(v1: V1) -> socket.socket:
    url = v1.http.base_url
    return socket.create_connection((url.host, url.port or 80), timeout=60)


def answer(stream: BinaryIO) -> tuple[int, Any]:
    status = int(stream.readline().split()[1])
    length = 0
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    return status, json.loads(stream.read(length))


def talk(v1: V1, *requests: bytes) -> list[tuple[int, Any]]:
    """All at once over one connection."""
    with closing(connected(v1)) as connection, connection.makefile("rb") as stream:
        connection.sendall(b"".join(requests))
        return [answer(stream) for _ in requests]


def test_pipelined_receives_and_acks(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, *range(TIMES))
    receive = post(f"/groups/{group}/receive", {"topics": [topic]})
    found = talk(v1, *[receive] * (TIMES + 2))
    messages = [page["messages"] for _, page in found]
    assert [status for status, _ in found] == [200] * (TIMES + 2)
    assert [len(one) for one in messages] == [1] * TIMES + [0, 0]
    assert sorted(one[0]["value"] for one in messages[:TIMES]) == list(range(TIMES))
    assert {page["group"] for _, page in found} == {group}
    receipts = [one[0]["receipt"] for one in messages[:TIMES]]
    acks = [post("/messages/ack", {"receipt": one}) for one in receipts]
    assert talk(v1, *acks) == [(200, {"outcome": "acked"})] * TIMES
    again = talk(v1, *acks)
    assert {(status, page["error"]) for status, page in again} == {(409, "receipt_stale")}


def test_acks_of_one_group_take_no_receipts_of_another(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, "a")
    ((_, page),) = talk(v1, post(f"/groups/{group}/receive", {"topics": [topic]}))
    receipt = {"receipt": page["messages"][0]["receipt"]}
    foreign = talk(v1, *[post("/groups/other/ack", receipt)] * TIMES)
    assert {page["error"] for _, page in foreign} == {"receipt_unknown"}
    own = talk(v1, *[post(f"/groups/{group}/ack", receipt)] * TIMES)
    assert [status for status, _ in own] == [200] + [409] * (TIMES - 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/groups/g/receive", {"topics": ["nowhere"]}, 404, "topic_unknown"),
        ("/groups/g/receive", {"topics": []}, 400, "parameter_invalid"),
        ("/groups/g/receive", b"{", 400, "body_invalid"),
        ("/groups/g/receive", {"topics": ["t"], "limits": 1}, 400, "body_invalid"),
        ("/groups/__g/receive", {"topics": ["t"]}, 400, "group_name_invalid"),
        ("/groups/__g/ack", {"receipt": "x"}, 400, "group_name_invalid"),
        ("/messages/ack", {}, 400, "body_invalid"),
        ("/messages/ack", {"receipt": "a", "receipts": ["b"]}, 400, "body_invalid"),
        ("/messages/ack", {"receipt": "made up"}, 400, "receipt_invalid"),
    ],
)
def test_errors_are_those_of_the_long_way(
    v1: V1, path: str, body: object, status: int, code: str
) -> None:
    found = talk(v1, *[post(path, body)] * TIMES)
    assert {(status, page["error"]) for status, page in found} == {(status, code)}


def test_many_of_one_member_are_limited_together(v1: V1) -> None:
    topic, group = v1.topic(), fresh("group")
    v1.publish(topic, *range(10))
    receive = post(f"/groups/{group}/receive", {"topics": [topic], "member": "m"})
    with ExitStack() as stack:
        connections = [stack.enter_context(closing(connected(v1))) for _ in range(8)]
        # So that the head is known.
        talk(v1, *[post(f"/groups/{group}/receive", {"topics": [topic], "member": "m"})] * 2)
        for connection in connections:
            connection.sendall(receive)
        pages = []
        for connection in connections:
            with connection.makefile("rb") as stream:
                pages.append(answer(stream)[1])
    assert sum(len(page["messages"]) for page in pages) == 1
    assert {page["limited_by"] for page in pages if not page["messages"]} == {"member"}


def test_a_stop_answers_what_it_took(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        v1.publish(topic, *range(100))
        receive = post("/groups/g/receive", {"topics": [topic]})
        with closing(connected(v1)) as connection, connection.makefile("rb") as stream:
            connection.sendall(receive * 100)
            first = answer(stream)
            broker.process.terminate()
            rest = stream.read()
        v1.close()
        wait_until(lambda: broker.process.poll() is not None, "the broker's end")
    assert first[0] == 200
    # Whole answers, or none.
    assert rest.count(b"HTTP/1.1 200") == rest.count(b'"messages":[')
