"""What ZoldyQ promises over WebSocket, one test each, with somebody else's client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from broker_process import BrokerProcess, wait_until
from seeds.shared import Client, fresh_name


@pytest.fixture(scope="module")
def zoldyq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with BrokerProcess(str(tmp_path_factory.mktemp("zoldyq"))) as broker:
        client = Client(broker.wait_until_ready())
        yield client
        client.close()


def open_socket(zoldyq: Client, queue: str, verb: str) -> ClientConnection:
    return connect(zoldyq.broker.url(f"/queues/{queue}/{verb}").replace("http", "ws", 1))


def test_a_message_sent_is_confirmed(zoldyq: Client) -> None:
    name = fresh_name()
    with open_socket(zoldyq, name, "enqueue") as socket:
        socket.send(json.dumps({"payload": {"email": "user@example.com"}}))
        page = json.loads(socket.recv(30))
    assert (page["queued"], page["queue_name"], page["queue_size"]) == (True, name, 1)
    taken = zoldyq.json(f"/queues/{name}/dequeue")
    assert taken["payload"] == {"email": "user@example.com"}


def test_a_stream_of_messages_is_confirmed_in_order(zoldyq: Client) -> None:
    with open_socket(zoldyq, fresh_name(), "enqueue") as socket:
        for number in range(50):
            socket.send(json.dumps({"payload": number}))
        sizes = [json.loads(socket.recv(30))["queue_size"] for _ in range(50)]
    assert sizes == list(range(1, 51))


def test_a_full_queue_is_answered_and_the_stream_goes_on(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {"capacity": 1})
    with open_socket(zoldyq, name, "enqueue") as socket:
        for number in range(2):
            socket.send(json.dumps({"payload": number}))
        assert json.loads(socket.recv(30))["queued"] is True
        assert json.loads(socket.recv(30))["error"] == "queue_full"
        zoldyq.get(f"/queues/{name}/dequeue")
        socket.send(json.dumps({"payload": 2}))
        assert json.loads(socket.recv(30))["queued"] is True


def test_messages_that_are_there_are_streamed_with_their_three_fields(zoldyq: Client) -> None:
    name = fresh_name()
    times = [zoldyq.enqueue(name, number).json()["enqueued_at"] for number in range(3)]
    with open_socket(zoldyq, name, "dequeue") as socket:
        pages = [json.loads(socket.recv(30)) for _ in range(3)]
    assert pages == [
        {"payload": number, "queue_name": name, "enqueued_at": times[number]} for number in range(3)
    ]


def test_an_empty_queue_is_waited_for(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {})
    with open_socket(zoldyq, name, "dequeue") as socket:
        for number in range(3):
            zoldyq.enqueue(name, number)
            assert json.loads(socket.recv(30))["payload"] == number


def test_a_client_that_leaves_takes_nothing_with_it(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {})
    with open_socket(zoldyq, name, "dequeue"):
        wait_until(lambda: zoldyq.json(f"/queues/{name}")["waiting"] == 1, "a consumer")
    wait_until(lambda: zoldyq.json(f"/queues/{name}")["waiting"] == 0, "its leaving")
    assert zoldyq.enqueue(name, 1).json()["queue_size"] == 1


def test_a_ping_is_answered(zoldyq: Client) -> None:
    name = fresh_name()
    zoldyq.put(f"/queues/{name}", {})
    with open_socket(zoldyq, name, "dequeue") as socket:
        assert socket.ping(b"hello").wait(30)


def test_a_broker_that_stops_closes_with_1001(tmp_path_factory: pytest.TempPathFactory) -> None:
    with BrokerProcess(str(tmp_path_factory.mktemp("stops"))) as broker:
        client = Client(broker.wait_until_ready())
        with open_socket(client, "default", "dequeue") as socket:
            assert broker.stop() == 0
            with pytest.raises(ConnectionClosed) as caught:
                socket.recv(30)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1001
        client.close()
