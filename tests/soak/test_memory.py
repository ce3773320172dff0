"""An hour's worth of load in minutes: what a broker holds does not grow with what it has done.

`make test-soak` passes 3.6 million messages, a thousand a second for an hour; by default it is a
short look at the same.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import httpx
import psutil
from websockets.sync.client import connect

from broker_process import BrokerProcess, wait_until
from soak.sizes import sized

BATCH = 1000
# Messages of a round: five batches, and some one by one.
ROUND = 5 * BATCH
WARM_UP = sized(4, 40)
ROUNDS = sized(6, 3_600_000 // ROUND)
# What the allocator may keep of one round or another: pieces, not messages. A thousandth of a
# message kept for each that passed would be more, in the full run.
GROWTH_BYTES_MAX = 32 << 20


def one_round(broker: BrokerProcess, client: httpx.Client, number: int) -> None:
    """What clients do, right and wrong, on a queue that is new and gone in the end."""
    queue = f"/queues/round-{number}"
    batch = {"payloads": [f"{number}-{index}" + "x" * 80 for index in range(BATCH)]}
    for _ in range(ROUND // BATCH):
        assert client.post(f"{queue}/enqueue/batch", json=batch).status_code == 200
    assert client.post(f"{queue}/persist?file=soak").status_code == 200
    for _ in range(ROUND // BATCH):
        taken = client.get(f"{queue}/dequeue", params={"max": BATCH})
        assert len(taken.json()["messages"]) == BATCH
    assert client.post(f"{queue}/load?file=soak").json()["messages"] == ROUND
    assert client.post(f"{queue}/clear").json()["messages"] == ROUND
    for index in range(20):
        assert client.post("/enqueue", content=os.urandom(index * 500)).status_code == 202
        assert client.get("/dequeue").status_code == 200
    assert client.get(f"{queue}/dequeue?timeout=0.01").status_code == 204
    _mistakes(broker, client, number)
    _sockets(broker, queue)
    assert client.delete(queue).status_code == 204


def _mistakes(broker: BrokerProcess, client: httpx.Client, number: int) -> None:
    assert client.get(f"/queues/absent-{number}/dequeue").status_code == 404
    assert client.get(f"/nothing-{number}").status_code == 404
    assert client.post(f"/queues/wrong!{number}/enqueue", content=b"{").status_code == 400
    assert client.get("/dequeue", headers={"Origin": f"http://{number}.example"}).status_code == 403
    host, _, port = broker.url("").removeprefix("http://").rpartition(":")
    for start in (b"POST /enqueue HTTP/1.1\r\ncontent-length: 9\r\n\r\n", b"\x16\x03\x01", b""):
        with socket.create_connection((host, int(port))) as broken:
            broken.sendall(start)


def _sockets(broker: BrokerProcess, queue: str) -> None:
    url = broker.url(queue).replace("http", "ws")
    with connect(f"{url}/enqueue") as producer:
        for index in range(50):
            producer.send(json.dumps({"payload": index}))
        for _ in range(50):
            producer.recv()
    with connect(f"{url}/dequeue") as consumer:
        for _ in range(50):
            consumer.recv()


def test_memory_is_flat(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        url = broker.wait_until_ready().url("")
        process = psutil.Process(broker.process.pid)
        with httpx.Client(base_url=url, timeout=120) as client:
            for number in range(WARM_UP):
                one_round(broker, client, number)
            files, before = process.num_fds(), process.memory_info().rss
            for number in range(WARM_UP, WARM_UP + ROUNDS):
                one_round(broker, client, number)
            after = process.memory_info().rss
            assert after - before < GROWTH_BYTES_MAX, f"{before} bytes before, {after} after"
            wait_until(lambda: process.num_fds() <= files + 2, "the files of clients that left")
            page = client.get("/metrics", headers={"accept": "application/json"}).json()
        assert (page["queue_length"], page["queue_bytes"]) == (0, 0)
        assert page["enqueue_count"] >= (WARM_UP + ROUNDS) * ROUND
        assert not [one for one in broker.messages() if one["level"] == "error"]
        assert broker.stop() == 0
