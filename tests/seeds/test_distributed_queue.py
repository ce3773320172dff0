"""What Distributed Queue promises, one test each, over its own kind of connection: WebSocket."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from websockets.sync.client import ClientConnection, connect

from broker_process import BrokerProcess, wait_until
from listeners.v1_client import V1
from millstream.wire import stream

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> Iterator[V1]:
    with BrokerProcess(str(tmp_path_factory.mktemp("distributed"))) as broker:
        v1 = V1(broker.wait_until_ready())
        yield v1
        v1.close()


class Peer:
    """A producer or a consumer, over binary frames: messages are byte arrays."""

    def __init__(self, v1: V1, topic: str) -> None:
        url = v1.broker.url(f"/v1/topics/{topic}/stream?format=binary")
        self._connecting = connect(url.replace("http", "ws", 1), max_size=None)
        self._connection: ClientConnection

    def __enter__(self) -> Self:
        self._connection = self._connecting.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def send(self, message: stream.Message) -> None:
        self._connection.send(stream.encode(message))

    def hear(self) -> stream.Message:
        data = self._connection.recv(PATIENCE_S)
        assert isinstance(data, bytes)
        return stream.decode(data)

    def enqueue(self, *values: bytes) -> list[int]:
        self.send(stream.Publish(1, [stream.Record(None, value) for value in values]))
        answer = self.hear()
        assert isinstance(answer, stream.Published), answer
        return [place.offset for place in answer.placed]

    def open(self, consumer_id: str = "", start: int = stream.EARLIEST) -> stream.Opened:
        self.send(stream.Open(2, consumer_id, start=start))
        answer = self.hear()
        assert isinstance(answer, stream.Opened), answer
        return answer

    def take(self, count: int) -> list[stream.Record]:
        self.send(stream.Next(count))
        found: list[stream.Record] = []
        while len(found) < count:
            answer = self.hear()
            assert isinstance(answer, stream.Messages), answer
            found += answer.records
        return found

    def next(self) -> bytes | None:
        return self.take(1)[0].value

    def ack(self, offset: int) -> int:
        self.send(stream.Ack(3, 0, offset))
        answer = self.hear()
        assert isinstance(answer, stream.Acked), answer
        return answer.position


def test_producers_and_consumers_connect_over_websocket(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as producer, Peer(queue, topic) as consumer:
        producer.enqueue(b"hello")
        consumer.open()
        assert consumer.next() == b"hello"


def test_messages_are_byte_arrays(queue: V1) -> None:
    topic = queue.topic()
    values = [b"", bytes(range(256)), b"\x00" * 100_000]
    with Peer(queue, topic) as peer:
        peer.enqueue(*values)
        peer.open()
        assert [record.value for record in peer.take(3)] == values


def test_a_message_has_an_id_in_one_global_order(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as one, Peer(queue, topic) as other:
        ids = [peer.enqueue(b"x")[0] for _ in range(50) for peer in (one, other)]
    assert ids == list(range(100))


def test_a_message_is_found_by_its_id(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as peer:
        ids = peer.enqueue(*[b"%d" % number for number in range(1000)])
    for id in (ids[0], ids[500], ids[-1]):
        assert queue.values(topic, offset=id, limit=1) == [str(id)]


def test_segments_roll_over_at_the_size_that_is_set(queue: V1) -> None:
    small, large = queue.topic(segment_bytes=65536), queue.topic(segment_bytes=2**26)
    for topic in (small, large):
        with Peer(queue, topic) as peer:
            for _ in range(40):
                peer.enqueue(*[b"x" * 5000] * 20)
    counts = [
        queue.good("GET", f"/topics/{topic}")["details"][0]["segments"] for topic in (small, large)
    ]
    assert counts[0] > 1
    assert counts[1] == 1


def test_the_server_gives_each_consumer_an_id_of_its_own(queue: V1) -> None:
    topic = queue.topic()
    ids = set()
    for _ in range(5):
        with Peer(queue, topic) as peer:
            ids.add(peer.open().consumer_id)
    assert len(ids) == 5


def test_consumers_get_the_next_message_each_at_its_own_place(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as slow, Peer(queue, topic) as quick:
        slow.enqueue(b"1", b"2", b"3")
        slow.open()
        quick.open()
        assert [quick.next(), quick.next(), quick.next()] == [b"1", b"2", b"3"]
        assert slow.next() == b"1"


def test_a_consumer_goes_on_after_its_last_acknowledged_message(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as peer:
        peer.enqueue(*[b"%d" % number for number in range(5)])
        id = peer.open().consumer_id
        assert [record.value for record in peer.take(4)] == [b"0", b"1", b"2", b"3"]
        assert peer.ack(1) == 2
    with Peer(queue, topic) as peer:
        assert peer.open(id).positions == {0: 2}
        assert [record.value for record in peer.take(3)] == [b"2", b"3", b"4"]


def test_a_consumer_may_keep_its_place_itself(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as peer:
        peer.enqueue(b"0", b"1", b"2")
        peer.open(start=2)
        assert peer.next() == b"2"


def test_messages_and_positions_survive_a_crash(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic()
        with Peer(v1, topic) as peer:
            peer.enqueue(*[b"%d" % number for number in range(100)])
            id = peer.open().consumer_id
            peer.take(60)
            peer.ack(49)
            broker.process.kill()
            broker.process.wait(PATIENCE_S)
        v1.close()
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        with Peer(v1, topic) as peer:
            peer.open(id)
            assert [record.value for record in peer.take(50)] == [
                b"%d" % number for number in range(50, 100)
            ]
        v1.close()


def test_an_index_that_is_lost_is_made_again_from_the_log(tmp_path: Path) -> None:
    values = [b"%06d" % number * 500 for number in range(1500)]
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        topic = v1.topic(segment_bytes=65536)
        with Peer(v1, topic) as peer:
            for first in range(0, len(values), 50):
                peer.enqueue(*values[first : first + 50])
        folder = Path(broker.data, "topics")
        wait_until(lambda: list(folder.glob(f"{topic}@*/0/*.seal")), "a sealed segment")
        v1.close()
        assert broker.stop() == 0
    caches = [*folder.glob(f"{topic}@*/0/*.index"), *folder.glob(f"{topic}@*/0/*.timeindex")]
    assert caches
    for path in (*caches, *Path(broker.data, "views").glob("*/*")):
        path.unlink()
    with BrokerProcess(str(tmp_path)) as broker:
        v1 = V1(broker.wait_until_ready())
        for number in (0, 700, 1499):
            assert v1.values(topic, offset=number, limit=1) == [values[number].decode()]
        v1.close()


def test_many_enqueue_and_dequeue_at_the_same_time(queue: V1) -> None:
    topic = queue.topic()
    producers, consumers, each = 4, 3, 100
    found: list[list[bytes | None]] = []

    def produce(number: int) -> None:
        with Peer(queue, topic) as peer:
            for index in range(each):
                peer.enqueue(b"%d-%d" % (number, index))

    def consume() -> None:
        with Peer(queue, topic) as peer:
            peer.open()
            found.append([record.value for record in peer.take(producers * each)])

    threads = [threading.Thread(target=produce, args=(n,)) for n in range(producers)]
    threads += [threading.Thread(target=consume) for _ in range(consumers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    # Everyone has seen everything, in one and the same order, and each producer's in its own.
    assert len(found) == consumers
    assert all(values == found[0] for values in found)
    assert len(set(found[0])) == producers * each
    for number in range(producers):
        mine = [value for value in found[0] if value and value.startswith(b"%d-" % number)]
        assert mine == [b"%d-%d" % (number, index) for index in range(each)]


def test_a_mistake_is_answered_and_the_connection_goes_on(queue: V1) -> None:
    topic = queue.topic()
    with Peer(queue, topic) as peer:
        for wrong in (stream.Ack(9, 0, 0), stream.Open(9, "nobody"), stream.Next(0)):
            peer.send(wrong)
            answer = peer.hear()
            assert isinstance(answer, stream.Failed)
            page: dict[str, Any] = json.loads(answer.error)
            assert page["error"]
            assert page["message"]
        assert peer.enqueue(b"still here") == [0]
