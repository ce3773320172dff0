"""`/v1/topics/{topic}/stream`: publish, next and ack in one WebSocket, by another client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from broker.making import loop_broker
from broker_process import BrokerProcess
from listeners.http_scene import run, until
from listeners.v1_client import V1
from millstream.engine.memory import MemoryEngine
from millstream.listeners.http.stream_sockets import StreamSockets
from millstream.listeners.http.websocket import SocketCounts, WebSocket
from millstream.wire import stream
from millstream.wire.frames import TEXT

PATIENCE_S = 60.0
HANDSHAKE = [
    (b"connection", b"upgrade"),
    (b"upgrade", b"websocket"),
    (b"sec-websocket-version", b"13"),
    (b"sec-websocket-key", b"AAAAAAAAAAAAAAAAAAAAAA=="),
]


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    directory = str(tmp_path_factory.mktemp("broker"))
    with BrokerProcess(directory, "--body-bytes-max", "2M") as broker:
        client = V1(broker.wait_until_ready())
        yield client
        client.close()


class Socket:
    """One stream, in JSON."""

    def __init__(self, v1: V1, topic: str, query: str = "") -> None:
        url = v1.broker.url(f"/v1/topics/{topic}/stream{query}").replace("http", "ws", 1)
        self._connecting = connect(url, max_size=None)
        self.connection: ClientConnection

    def __enter__(self) -> Self:
        self.connection = self._connecting.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def say(self, **message: Any) -> None:
        self.connection.send(json.dumps(message))

    def hear(self) -> dict[str, Any]:
        page: dict[str, Any] = json.loads(self.connection.recv(PATIENCE_S))
        return page

    def ask(self, **message: Any) -> dict[str, Any]:
        self.say(**message)
        return self.hear()

    def hear_values(self, count: int) -> list[Any]:
        pages = [self.hear() for _ in range(count)]
        assert {page["type"] for page in pages} == {"message"}, pages
        return [page["value"] for page in pages]


def test_publish_next_and_ack_in_one_connection(v1: V1) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as one:
        published = one.ask(type="publish", id=1, messages=[{"value": "a"}, {"value": {"b": 1}}])
        assert (published["type"], published["id"]) == ("published", 1)
        assert [place["offset"] for place in published["placed"]] == [0, 1]
        opened = one.ask(type="open", id=2)
        assert (opened["type"], opened["positions"]) == ("opened", [{"partition": 0, "offset": 0}])
        one.say(type="next", credit=10)
        assert one.hear_values(2) == ["a", {"b": 1}]
        acked = one.ask(type="ack", id=3, partition=0, offset=1)
        assert acked == {"type": "acked", "id": 3, "partition": 0, "position": 2}
        one.say(type="publish", id=4, messages=[{"value": "late", "key": "k"}])
        kinds = {page["type"]: page for page in (one.hear(), one.hear())}
        assert kinds["published"]["id"] == 4
        assert (kinds["message"]["value"], kinds["message"]["key"]) == ("late", "k")


def test_no_more_comes_than_there_is_credit_for(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, *range(10))
    with Socket(v1, topic) as one:
        one.ask(type="open", id=1)
        one.say(type="next", credit=3)
        assert one.hear_values(3) == [0, 1, 2]
        # The answer to this comes first, because nothing else may.
        assert one.ask(type="ack", id=2, partition=0, offset=0)["type"] == "acked"
        one.say(type="next", credit=1)
        one.say(type="next", credit=100)
        assert one.hear_values(7) == list(range(3, 10))


def test_a_consumer_that_comes_back_goes_on_after_what_it_acked(v1: V1) -> None:
    topic = v1.topic()
    v1.publish(topic, *range(6))
    with Socket(v1, topic) as one:
        id = one.ask(type="open", id=1)["consumer_id"]
        one.say(type="next", credit=4)
        assert one.hear_values(4) == [0, 1, 2, 3]
        one.ask(type="ack", id=2, partition=0, offset=1)
    with Socket(v1, topic) as back:
        opened = back.ask(type="open", id=1, consumer_id=id)
        assert (opened["consumer_id"], opened["positions"][0]["offset"]) == (id, 2)
        back.say(type="next", credit=4)
        assert back.hear_values(4) == [2, 3, 4, 5]


def test_a_position_survives_a_killed_broker(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        v1.publish(topic, *range(4))
        with Socket(v1, topic) as one:
            id = one.ask(type="open", id=1)["consumer_id"]
            one.say(type="next", credit=4)
            one.hear_values(4)
            one.ask(type="ack", id=2, partition=0, offset=2)
            broker.process.kill()
            broker.process.wait(PATIENCE_S)
    with BrokerProcess(str(tmp_path)) as broker:
        again = V1(broker.wait_until_ready())
        with Socket(again, topic) as back:
            back.ask(type="open", id=1, consumer_id=id)
            back.say(type="next", credit=5)
            assert back.hear_values(1) == [3]


def test_the_same_id_in_a_second_connection_fences_the_first(v1: V1) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as first, Socket(v1, topic) as second:
        id = first.ask(type="open", id=1)["consumer_id"]
        second.ask(type="open", id=1, consumer_id=id)
        v1.publish(topic, "x")
        second.say(type="next", credit=1)
        assert second.hear_values(1) == ["x"]
        first.say(type="next", credit=1)
        fenced = first.hear()
        assert (fenced["type"], fenced["error"]) == ("error", "consumer_fenced")
        late = first.ask(type="ack", id=2, partition=0, offset=0)
        assert (late["type"], late["error"]) == ("error", "consumer_fenced")
        # The connection is still good for publishing.
        assert first.ask(type="publish", id=3, messages=[{"value": 1}])["type"] == "published"


def test_who_waits_hears_that_it_was_fenced_without_a_new_record(v1: V1) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as first, Socket(v1, topic) as second:
        id = first.ask(type="open", id=1)["consumer_id"]
        first.say(type="next", credit=1)
        v1.publish(topic, "x")
        assert first.hear_values(1) == ["x"]
        first.say(type="next", credit=1)
        second.ask(type="open", id=1, consumer_id=id)
        assert first.hear()["error"] == "consumer_fenced"


def test_a_connected_consumer_is_held_until_its_connection_ends() -> None:
    async def scenario() -> None:
        engine = MemoryEngine()
        await engine.start()
        broker = loop_broker(engine=engine)
        await broker.start()
        await broker.topics.create("orders", 1)
        sockets = StreamSockets(broker, 2**20, SocketCounts())
        asked = sockets.upgrade(b"GET", b"/v1/topics/orders/stream", HANDSHAKE)
        assert isinstance(asked, WebSocket)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_accepted_socket(asyncio.Protocol, ours)
        asked.take_over(transport, set(), b"")
        asked.on_messages([(TEXT, b'{"type":"open"}')])
        theirs.settimeout(PATIENCE_S)
        heard = b""
        while b'"consumer_id":"' not in heard:
            heard += await asyncio.to_thread(theirs.recv, 4096)
        id = heard.split(b'"consumer_id":"')[1][:24].decode()
        consumer = await broker.sequential.find("orders", id)
        assert consumer.is_held
        assert not consumer.is_fenced
        theirs.close()
        await until(lambda: consumer.is_fenced, "the consumer to be let go")
        broker.stop()
        await engine.stop()

    run(scenario())


def test_answers_come_in_the_order_of_requests(v1: V1) -> None:
    topic = v1.topic(partitions=3)
    with Socket(v1, topic) as one:
        for number in range(500):
            if number % 7:
                one.say(type="publish", id=number, messages=[{"value": number}])
            else:
                one.say(type="ack", id=number, partition=0, offset=0)
        answers = [one.hear() for _ in range(500)]
    assert [page["id"] for page in answers] == list(range(500))
    refused = [page["id"] for page in answers if page["type"] == "error"]
    assert refused == list(range(0, 500, 7))
    assert len(v1.values(topic, limit=10_000)) == 500 - len(refused)


def test_binary_and_json_say_the_same(v1: V1) -> None:
    topic = v1.topic()
    url = v1.broker.url(f"/v1/topics/{topic}/stream?format=binary").replace("http", "ws", 1)
    with connect(url, max_size=None) as one:

        def ask(message: stream.Message) -> stream.Message:
            one.send(stream.encode(message))
            return hear()

        def hear() -> stream.Message:
            data = one.recv(PATIENCE_S)
            assert isinstance(data, bytes)
            return stream.decode(data)

        records = [
            stream.Record(b"\xff", b"\x00\x01", (("h", b"v"), ("n", None)), 77, 0),
            stream.Record(None, b"7", (("ms-type", b"json"),)),
        ]
        published = ask(stream.Publish(1, records, idempotency_key="once"))
        assert isinstance(published, stream.Published)
        assert [place.offset for place in published.placed] == [0, 1]
        again = ask(stream.Publish(2, records, idempotency_key="once"))
        assert again == stream.Published(2, published.placed, is_duplicate=True)
        opened = ask(stream.Open(3))
        assert isinstance(opened, stream.Opened)
        assert opened.positions == {0: 0}
        found = ask(stream.Next(5))
        assert isinstance(found, stream.Messages)
        assert [(one.key, one.value, tuple(one.headers)) for one in found.records] == [
            (b"\xff", b"\x00\x01", (("h", b"v"), ("n", None))),
            (None, b"7", (("ms-type", b"json"),)),
        ]
        assert ask(stream.Ack(4, 0, 1)) == stream.Acked(4, 0, 2)
        failed = ask(stream.Ack(5, 7, 0))
        assert isinstance(failed, stream.Failed)
        assert (failed.id, json.loads(failed.error)["error"]) == (5, "partition_unknown")
        bad = ask(stream.Publish(6, [stream.Record(None, b"x", (("ms-lane", b"x"),))]))
        assert isinstance(bad, stream.Failed)
        assert json.loads(bad.error)["record"] == 0
        # A text is answered in the form that the connection asked for.
        one.send(json.dumps({"type": "publish", "id": 9, "messages": [{"value": 1}]}))
        assert {type(hear()), type(hear())} == {stream.Published, stream.Messages}
    assert v1.values(topic, offset=1) == [7, 1]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "body_invalid"),
        ("{", "body_invalid"),
        ("[]", "body_invalid"),
        ('{"type":"dance"}', "body_invalid"),
        ('{"messages":[]}', "body_invalid"),
        ('{"type":"publish","id":1}', "body_invalid"),
        ('{"type":"publish","id":1,"messages":[]}', "body_invalid"),
        ('{"type":"publish","id":-1,"messages":[{"value":1}]}', "body_invalid"),
        ('{"type":"publish","messages":[{"value":1}],"acks":"some"}', "body_invalid"),
        ('{"type":"publish","messages":[{"value":1,"partition":9}]}', "partition_unknown"),
        (
            '{"type":"publish","messages":[{"value":1}],"acks":"none","idempotency_key":"a b"}',
            "idempotency_key_invalid",
        ),
        ('{"type":"next","credit":0}', "body_invalid"),
        ('{"type":"next","credit":1000001}', "body_invalid"),
        ('{"type":"next"}', "body_invalid"),
        ('{"type":"ack","partition":0,"offset":0}', "parameter_invalid"),
        ('{"type":"open","consumer_id":"mine"}', "consumer_unknown"),
        ('{"type":"open","partition":9}', "partition_unknown"),
        ('{"type":"open","start":5}', "offset_out_of_range"),
    ],
)
def test_what_is_wrong_is_told_and_the_connection_goes_on(v1: V1, text: str, code: str) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as one:
        one.connection.send(text)
        error = one.hear()
        assert (error["type"], error["error"]) == ("error", code)
        assert one.ask(type="publish", id=7, messages=[{"value": "ok"}])["id"] == 7
    assert v1.values(topic) == ["ok"]


def test_a_bad_message_of_a_publish_stores_none_and_names_it(v1: V1) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as one:
        bad = [{"value": 1}, {"value": 2, "headers": {"ms-x": "y"}}]
        error = one.ask(type="publish", id=5, messages=bad)
        assert (error["id"], error["error"], error["record"]) == (5, "header_invalid", 1)
        error = one.ask(type="publish", id=6, messages=[{"value": 1}, {"value": 2, "key": 3}])
        assert (error["id"], error["error"], error["record"]) == (6, "body_invalid", 1)
        one.connection.send(b"\x01 no frame of ours")
        assert one.hear()["error"] == "body_invalid"
    assert v1.values(topic) == []


def test_a_connection_has_one_consumer(v1: V1) -> None:
    with Socket(v1, v1.topic()) as one:
        assert one.ask(type="open", id=1)["type"] == "opened"
        error = one.ask(type="open", id=2)
        assert (error["id"], error["error"]) == (2, "parameter_invalid")


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("topics/nowhere/stream", 404, "topic_unknown"),
        ("topics/__offsets/stream", 403, "topic_reserved"),
        ("topics/a%20b/stream", 400, "topic_name_invalid"),
        ("topics/{topic}/stream?format=xml", 400, "parameter_invalid"),
        ("topics/{topic}/stream?what=1", 400, "parameter_invalid"),
        ("topics/{topic}/messages", 404, "not_found"),
    ],
)
def test_what_is_no_stream_is_refused(v1: V1, path: str, status: int, code: str) -> None:
    url = v1.broker.url("/v1/" + path.format(topic=v1.topic())).replace("http", "ws", 1)
    with pytest.raises(InvalidStatus) as refused:
        connect(url)
    answer = refused.value.response
    assert answer.status_code == status
    assert json.loads(answer.body or b"")["error"] == code


def test_a_plain_request_hears_that_a_stream_is_a_websocket(v1: V1) -> None:
    path = f"/topics/{v1.topic()}/stream"
    page = v1.refused(426, "upgrade_required", "GET", path)
    assert "WebSocket" in page["message"]
    assert v1.call("GET", path).headers["upgrade"] == "websocket"


def test_a_deleted_topic_ends_its_consumers(v1: V1) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as one:
        one.ask(type="open", id=1)
        one.say(type="next", credit=1)
        assert one.ask(type="publish", id=2, messages=[{"value": 1}])["type"] in (
            "published",
            "message",
        )
        one.hear()
        one.say(type="next", credit=1)
        v1.good("DELETE", f"/topics/{topic}")
        with pytest.raises(ConnectionClosed) as closed:
            one.hear()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "the topic was deleted")


@pytest.mark.parametrize("is_open", [True, False])
def test_a_deleted_topic_ends_connections_that_want_nothing(v1: V1, is_open: bool) -> None:
    topic = v1.topic()
    with Socket(v1, topic) as one, Socket(v1, v1.topic()) as other:
        if is_open:
            one.ask(type="open", id=1)
        else:
            one.ask(type="publish", id=1, messages=[{"value": 1}])
        v1.good("DELETE", f"/topics/{topic}")
        with pytest.raises(ConnectionClosed) as closed:
            one.hear()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "the topic was deleted")
        assert other.ask(type="open", id=1)["type"] == "opened"


def test_a_stop_answers_what_was_asked_and_says_goodbye(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        with Socket(v1, topic) as one:
            one.ask(type="open", id=0)
            one.say(type="next", credit=1)
            one.ask(type="publish", id=1, messages=[{"value": 1}])
            one.hear()
            v1.close()
            assert broker.stop() == 0
            with pytest.raises(ConnectionClosed) as closed:
                one.hear()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001


def test_more_than_a_connection_holds_comes_whole_and_in_order(v1: V1) -> None:
    topic = v1.topic(fsync="none")
    for first in range(0, 5000, 1000):
        v1.publish(topic, *[f"{number} {'x' * 1000}" for number in range(first, first + 1000)])
    with Socket(v1, topic) as one:
        one.ask(type="open", id=1)
        one.say(type="next", credit=1_000_000)
        assert [int(value.split()[0]) for value in one.hear_values(5000)] == list(range(5000))
