"""What ZapQ promises, one test each, over real sockets.

Where the design decides otherwise it is said in the test: names of settings are ours, limits are
those of the design, `/metrics` is JSON when a client asks for it, and a snapshot's file is a plain
name in the snapshot folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until
from millstream.config import Settings, load_settings
from millstream.kinds import Address
from seeds.shared import Client

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = str(tmp_path_factory.mktemp("zapq"))
    with BrokerProcess(directory) as broker:
        client = Client(broker.wait_until_ready())
        yield client
        client.close()


@pytest.fixture
def zapq(running: Client) -> Client:
    """With an empty queue."""
    running.put("/queues/default", {"capacity": 100_000, "max_bytes": 256 * MIB})
    assert running.post("/clear").status_code == 200
    return running


# ---- POST /enqueue


def test_enqueue_answers_202(zapq: Client) -> None:
    answer = zapq.post("/enqueue", b"hello")
    assert (answer.status_code, answer.content) == (202, b"")


def test_a_message_may_be_any_bytes(zapq: Client) -> None:
    body = bytes(range(256))
    zapq.post("/enqueue", body)
    assert zapq.get("/dequeue").content == body


def test_a_message_may_be_empty(zapq: Client) -> None:
    assert zapq.post("/enqueue", b"").status_code == 202
    answer = zapq.get("/dequeue")
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_message_of_128_kib_is_taken(zapq: Client) -> None:
    assert zapq.post("/enqueue", b"x" * 128 * KIB).status_code == 202
    assert len(zapq.get("/dequeue").content) == 128 * KIB


def test_a_message_of_one_byte_more_is_413(zapq: Client) -> None:
    answer = httpx.post(
        zapq.broker.url("/enqueue"), content=b"x" * (128 * KIB + 1), timeout=PATIENCE_SECONDS
    )
    assert answer.status_code == 413
    assert answer.json()["error"] == "message_too_large"
    assert answer.json()["limit_bytes"] == 128 * KIB


def test_a_queue_full_by_count_is_429(zapq: Client) -> None:
    zapq.put("/queues/default", {"capacity": 2})
    assert [zapq.post("/enqueue", b"x").status_code for _ in range(3)] == [202, 202, 429]


def test_a_queue_full_by_bytes_is_429(zapq: Client) -> None:
    zapq.put("/queues/default", {"max_bytes": 10})
    answers = [zapq.post("/enqueue", b"xxxxx") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert answers[-1].json()["error"] == "queue_full"


def test_a_429_says_when_to_try_again(zapq: Client) -> None:
    zapq.put("/queues/default", {"capacity": 1})
    zapq.post("/enqueue", b"x")
    assert int(zapq.post("/enqueue", b"x").headers["retry-after"]) >= 1


def test_after_a_429_there_is_room_again_once_something_was_taken(zapq: Client) -> None:
    zapq.put("/queues/default", {"capacity": 1})
    zapq.post("/enqueue", b"1")
    assert zapq.post("/enqueue", b"2").status_code == 429
    zapq.get("/dequeue")
    assert zapq.post("/enqueue", b"2").status_code == 202


# ---- GET /dequeue


def test_dequeue_answers_200_with_the_raw_bytes(zapq: Client) -> None:
    zapq.post("/enqueue", b"hello")
    answer = zapq.get("/dequeue")
    assert (answer.status_code, answer.content) == (200, b"hello")
    assert answer.headers["content-type"] == "application/octet-stream"


def test_dequeue_of_an_empty_queue_is_204(zapq: Client) -> None:
    answer = zapq.get("/dequeue")
    assert (answer.status_code, answer.content) == (204, b"")


# An address in full is answered outside the fast lane.
@pytest.mark.parametrize("target", ["/dequeue", "http://localhost/dequeue?timeout=0.01"])
def test_dequeue_is_204_also_after_the_queue_was_deleted(zapq: Client, target: str) -> None:
    assert zapq.delete("/queues/default").status_code == 204
    with httpx.Client(base_url=zapq.broker.url(""), timeout=PATIENCE_SECONDS) as client:
        request = client.build_request("GET", "/", extensions={"target": target.encode()})
        assert client.send(request).status_code == 204


def test_first_in_is_first_out(zapq: Client) -> None:
    for number in range(20):
        zapq.post("/enqueue", str(number).encode())
    assert [int(zapq.get("/dequeue").content) for _ in range(20)] == list(range(20))


def test_many_clients_at_once_get_every_message_once(zapq: Client) -> None:
    url = zapq.broker.url("")
    taken: list[bytes] = []

    def produce(worker: int) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            for number in range(25):
                sent = client.post("/enqueue", content=f"{worker}/{number}".encode())
                assert sent.status_code == 202

    def consume() -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while (answer := client.get("/dequeue")).status_code == 200:
                taken.append(answer.content)

    for crowd in (
        [threading.Thread(target=produce, args=(worker,)) for worker in range(8)],
        [threading.Thread(target=consume) for _ in range(8)],
    ):
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
    everything = [f"{worker}/{number}".encode() for worker in range(8) for number in range(25)]
    assert sorted(taken) == sorted(everything)


# ---- POST /clear


def test_clear_answers_200_and_drops_everything(zapq: Client) -> None:
    zapq.post("/enqueue", b"x")
    assert zapq.post("/clear").status_code == 200
    assert zapq.get("/dequeue").status_code == 204
    assert zapq.json("/metrics")["queue_bytes"] == 0


def test_clear_says_what_it_dropped(zapq: Client) -> None:
    for body in (b"1", b"22"):
        zapq.post("/enqueue", body)
    page = zapq.post("/clear").json()
    assert page == {"queue_name": "default", "messages": 2, "bytes": 3}


def test_clear_leaves_the_counters_as_they_are(zapq: Client) -> None:
    """There it resets them; here a counter only grows, because that is how Prometheus reads it."""
    zapq.post("/enqueue", b"x")
    before = zapq.json("/metrics")["enqueue_count"]
    zapq.post("/clear")
    assert zapq.json("/metrics")["enqueue_count"] == before


# ---- POST /persist and /load


def test_persist_answers_200_and_writes_json_for_people(zapq: Client) -> None:
    zapq.post("/enqueue", b"hello")
    answer = zapq.post("/persist?file=path.json")
    assert answer.status_code == 200
    assert (answer.json()["file"], answer.json()["messages"]) == ("path.json", 1)
    path = os.path.join(zapq.broker.data, "snapshots", "path.json")
    page = json.loads(Path(path).read_text(encoding="utf-8"))
    assert page["messages"][0]["payload"] == "aGVsbG8="


def test_persist_leaves_the_queue_as_it_is(zapq: Client) -> None:
    zapq.post("/enqueue", b"hello")
    zapq.post("/persist?file=path.json")
    assert zapq.get("/dequeue").content == b"hello"


@pytest.mark.parametrize("file", ["queue.json", "queue.bin"])
def test_load_replaces_what_is_there(zapq: Client, file: str) -> None:
    for body in (b"1", b"\xff\x00"):
        zapq.post("/enqueue", body)
    zapq.post(f"/persist?file={file}")
    zapq.post("/clear")
    zapq.post("/enqueue", b"other")
    answer = zapq.post(f"/load?file={file}")
    assert answer.status_code == 200
    assert (answer.json()["messages"], answer.json()["bytes"]) == (2, 3)
    assert zapq.json("/metrics")["queue_bytes"] == 3
    assert [zapq.get("/dequeue").content for _ in range(3)] == [b"1", b"\xff\x00", b""]


def test_load_checks_the_file(zapq: Client) -> None:
    zapq.post("/enqueue", b"stays")
    zapq.post("/persist?file=broken.json")
    path = Path(zapq.broker.data, "snapshots", "broken.json")
    path.write_bytes(path.read_bytes()[:-5])
    answer = zapq.post("/load?file=broken.json")
    assert (answer.status_code, answer.json()["error"]) == (400, "snapshot_invalid")
    assert zapq.get("/dequeue").content == b"stays"


def test_load_of_a_file_that_is_not_there_is_404(zapq: Client) -> None:
    answer = zapq.post("/load?file=nothing.json")
    assert (answer.status_code, answer.json()["error"]) == (404, "snapshot_not_found")


def test_a_persist_that_the_disk_refuses_is_500(zapq: Client) -> None:
    os.makedirs(os.path.join(zapq.broker.data, "snapshots", "taken"), exist_ok=True)
    answer = zapq.post("/persist?file=taken")
    assert (answer.status_code, answer.json()["error"]) == (500, "snapshot_failed")


def test_a_load_that_the_disk_refuses_is_500(zapq: Client) -> None:
    os.makedirs(os.path.join(zapq.broker.data, "snapshots", "folder"), exist_ok=True)
    answer = zapq.post("/load?file=folder")
    assert (answer.status_code, answer.json()["error"]) == (500, "snapshot_failed")


@pytest.mark.parametrize("file", ["queue.json", "queue.bin"])
def test_persist_and_load_say_what_they_did(zapq: Client, file: str) -> None:
    for body in (b"1", b"22"):
        zapq.post("/enqueue", body)
    size = {"messages": 2, "bytes": 3}
    written = zapq.post(f"/persist?file={file}").json()
    path = Path(zapq.broker.data, "snapshots", file)
    place = {"file": file, "queue_name": "default", "file_bytes": path.stat().st_size}
    assert written == size | place
    assert zapq.post(f"/load?file={file}").json() == written


@pytest.mark.parametrize("file", ["../x.json", "/etc/passwd", "a%2Fb", "..", "", "x%00", "x" * 300])
@pytest.mark.parametrize("route", ["/persist", "/load"])
def test_a_file_is_a_plain_name(zapq: Client, route: str, file: str) -> None:
    answer = zapq.post(f"{route}?file={file}")
    assert (answer.status_code, answer.json()["error"]) == (400, "snapshot_invalid")


def test_without_a_name_the_file_is_that_of_the_queue(zapq: Client) -> None:
    assert zapq.post("/persist").json()["file"] == "default.snapshot"
    assert zapq.post("/load").json()["file"] == "default.snapshot"


# ---- GET /metrics


def test_metrics_are_json_for_a_client_that_asks_for_it(zapq: Client) -> None:
    answer = zapq.get("/metrics", accept="application/json")
    assert answer.headers["content-type"] == "application/json"


def test_metrics_have_queue_length_and_queue_bytes(zapq: Client) -> None:
    for _ in range(3):
        zapq.post("/enqueue", b"four")
    page = zapq.json("/metrics")
    assert (page["queue_length"], page["queue_bytes"]) == (3, 12)


def test_metrics_have_uptime_sec(zapq: Client) -> None:
    first = zapq.json("/metrics")["uptime_sec"]
    assert first > 0
    wait_until(lambda: zapq.json("/metrics")["uptime_sec"] > first, "time to pass")


def test_metrics_count_enqueues_dequeues_and_misses(zapq: Client) -> None:
    before = zapq.json("/metrics")
    zapq.post("/enqueue", b"x")
    zapq.post("/enqueue", b"x")
    for _ in range(3):
        zapq.get("/dequeue")
    after = zapq.json("/metrics")
    names = ("enqueue_count", "dequeue_count", "dequeue_misses")
    assert [after[name] - before[name] for name in names] == [2, 2, 1]


def test_metrics_have_threads(zapq: Client) -> None:
    assert zapq.json("/metrics")["threads"] >= 1


def test_metrics_have_open_files(zapq: Client) -> None:
    host, port = zapq.broker.url("")[7:].split(":")
    extra = [socket.create_connection((host, int(port))) for _ in range(20)]
    for one in extra:
        # Answered, hence accepted.
        one.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert one.recv(100)
    before = zapq.json("/metrics")["open_files"]
    assert before > 20
    for one in extra:
        one.close()
    wait_until(lambda: zapq.json("/metrics")["open_files"] <= before - 20, "files that are closed")


# ---- GET /health


def test_health_is_the_word_ok(zapq: Client) -> None:
    answer = zapq.get("/health", accept="text/plain")
    assert (answer.status_code, answer.text) == (200, "ok")


# ---- settings


def settings(flags: dict[str, str], **environment: str) -> Settings:
    return load_settings(flags=flags, environment=environment)


def test_addr_is_http() -> None:
    assert str(settings({"http": "0.0.0.0:8080"}).http) == "0.0.0.0:8080"


def test_by_default_it_listens_on_port_8080() -> None:
    assert settings({}).http == Address("127.0.0.1", 8080)


def test_max_bytes_is_queue_bytes_max_256m_by_default() -> None:
    assert settings({}).queue_bytes_max == 256 * MIB
    two = settings({"queue_bytes_max": "2G"})
    assert two.queue_bytes_max == 2048 * MIB
    assert settings({}, MILLSTREAM_QUEUE_BYTES_MAX="2G").queue_bytes_max == 2048 * MIB


@pytest.mark.parametrize(("text", "size"), [("1048576", MIB), ("5M", 5 * MIB), ("1G", 1024 * MIB)])
def test_sizes_are_bytes_or_have_units(text: str, size: int) -> None:
    assert settings({"queue_bytes_max": text}).queue_bytes_max == size


def test_tls_cert_and_tls_key_make_it_https(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    flags = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with BrokerProcess(str(tmp_path), *flags) as broker:
        url = broker.wait_until_ready().url("/health")
        assert url.startswith("https://")
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        assert (
            httpx.get(
                url, headers={"Accept": "text/plain"}, verify=trust, timeout=PATIENCE_SECONDS
            ).text
            == "ok"
        )


def test_max_msgs_is_queue_capacity(tmp_path: Path) -> None:
    """50,000 by default there; 100,000 by the design."""
    assert settings({}).queue_capacity == 100_000
    with BrokerProcess(str(tmp_path), "--queue-capacity", "1") as broker:
        client = Client(broker.wait_until_ready())
        assert [client.post("/enqueue", b"x").status_code for _ in range(2)] == [202, 429]
        client.close()


def test_flags_beat_the_environment() -> None:
    both = settings({"queue_capacity": "1"}, MILLSTREAM_QUEUE_CAPACITY="2")
    assert both.queue_capacity == 1
    alone = settings({}, MILLSTREAM_QUEUE_CAPACITY="2")
    assert alone.queue_capacity == 2


def test_the_limit_of_a_message_can_be_changed(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--message-bytes-max", "10") as broker:
        client = Client(broker.wait_until_ready())
        assert client.post("/enqueue", b"x" * 10).status_code == 202
        assert client.post("/enqueue", b"x" * 11).status_code == 413
        client.close()


# ---- the end


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly_and_requests_in_flight_are_answered(
    tmp_path: Path, number: signal.Signals
) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        url = broker.wait_until_ready().url("/dequeue?timeout=30")
        answers: list[int] = []
        waiting = threading.Thread(
            target=lambda: answers.append(httpx.get(url, timeout=60).status_code)
        )
        waiting.start()
        client = Client(broker)
        while client.metric("millstream_queue_waiting") < 1:
            pass
        client.close()
        assert broker.stop(number) == 0
        waiting.join()
        assert answers == [204]
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, timeout=PATIENCE_SECONDS)


def test_requests_in_flight_have_10_seconds_by_default() -> None:
    assert settings({}).drain_timeout_ms == 10_000


def test_messages_can_outlive_a_restart(tmp_path: Path) -> None:
    """What a cron job with `/persist` was for."""
    for expected in (204, 200):
        with BrokerProcess(str(tmp_path), "--snapshot-at-stop", "on") as broker:
            client = Client(broker.wait_until_ready())
            assert client.get("/dequeue").status_code == expected
            client.post("/enqueue", b"kept")
            client.close()
            assert broker.stop() == 0
