"""TLS from outside: what a broker with a certificate says, to whom, and how it is changed."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from certificates import AUTHORITY, Pair


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.fixture
def broker(tmp_path: Path, pair: Pair) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path), *pair.flags) as process:
        yield process.wait_until_ready()


def place_of(broker: BrokerProcess, listener: str = "http") -> tuple[str, int]:
    host, port = broker.url("", listener=listener).removeprefix("https://").split(":")
    return host, int(port)


def certificate_of(broker: BrokerProcess, pair: Pair, name: str = "localhost") -> int:
    """The serial number that a new connection gets."""
    with (
        socket.create_connection(place_of(broker), PATIENCE_SECONDS) as plain,
        pair.trust().wrap_socket(plain, server_hostname=name) as secure,
    ):
        found = secure.getpeercert()
        assert found is not None
        return int(str(found["serialNumber"]), 16)


def test_both_listeners_speak_tls(broker: BrokerProcess, pair: Pair) -> None:
    assert [message["tls"] for message in broker.messages("listening")] == [True, True]
    for listener in ("http", "metrics"):
        answer = httpx.get(
            broker.url("/livez", listener=listener), verify=pair.trust(), timeout=PATIENCE_SECONDS
        )
        assert answer.json() == {"status": "ok"}


def test_messages_pass_in_the_fast_lane_and_elsewhere(broker: BrokerProcess, pair: Pair) -> None:
    with httpx.Client(base_url=broker.url(""), verify=pair.trust(), timeout=60) as client:
        assert client.post("/enqueue", content=b"x" * 100_000).status_code == 202
        assert client.get("/queues/default").json()["bytes"] == 100_000
        assert client.get("/dequeue").content == b"x" * 100_000
        # What a browser sends from a page of the broker's own.
        origin = {"Origin": broker.url("").replace("127.0.0.1", "localhost")}
        host = {"Host": origin["Origin"].removeprefix("https://")}
        assert client.get("/dequeue", headers=origin | host).status_code == 204


def test_a_waiting_dequeue_is_answered(broker: BrokerProcess, pair: Pair) -> None:
    with httpx.Client(base_url=broker.url(""), verify=pair.trust(), timeout=60) as client:
        taken: list[bytes] = []
        waiting = threading.Thread(
            target=lambda: taken.append(client.get("/dequeue?timeout=30").content)
        )
        waiting.start()
        wait_until(
            lambda: client.get("/queues/default").json()["waiting"] == 1, "a dequeue that waits"
        )
        client.post("/enqueue", content=b"here")
        waiting.join(PATIENCE_SECONDS)
        assert taken == [b"here"]


def test_a_websocket_may_be_secure(broker: BrokerProcess, pair: Pair) -> None:
    url = broker.url("/queues/jobs/").replace("https", "wss")
    with connect(url + "enqueue", ssl=pair.trust()) as producer:
        for number in range(100):
            producer.send(f'{{"payload":{number}}}')
        assert [b'"queued":true' in _bytes(producer.recv()) for _ in range(100)] == [True] * 100
    with connect(url + "dequeue", ssl=pair.trust()) as consumer:
        for number in range(100):
            assert _bytes(consumer.recv()).startswith(b'{"payload":%d,' % number)


def test_plain_http_gets_no_answer_and_harms_nobody(broker: BrokerProcess, pair: Pair) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(broker.url("/livez").replace("https", "http"), timeout=PATIENCE_SECONDS)
    assert (
        httpx.get(broker.url("/livez"), verify=pair.trust(), timeout=PATIENCE_SECONDS).status_code
        == 200
    )
    # It happens every day, on every port that can be reached: no reason to wake anybody.
    assert not [one for one in broker.messages() if one["level"] == "error"]


def test_a_crowd_that_never_begins_to_talk_leaves_the_broker_its_files(
    tmp_path: Path, pair: Pair
) -> None:
    with BrokerProcess(str(tmp_path), *pair.flags, "--open-files", "256") as broker:
        url = broker.wait_until_ready().url("")
        with (
            httpx.Client(base_url=url, verify=pair.trust(), timeout=60) as client,
            ExitStack() as s,
        ):
            client.post("/enqueue", content=b"kept")
            for _ in range(300):
                s.enter_context(socket.create_connection(place_of(broker), PATIENCE_SECONDS))
            # Who is in is served, and there is a file for what has to be written.
            for _ in range(20):
                assert client.post("/persist").status_code == 200
        assert httpx.get(f"{url}/dequeue", verify=pair.trust(), timeout=60).content == b"kept"
        assert not [one for one in broker.messages() if one["level"] == "error"]
        assert broker.stop() == 0


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
def test_tls_older_than_1_2_is_refused(broker: BrokerProcess, pair: Pair) -> None:
    old = pair.trust()
    # So that it is the broker that refuses, not this side.
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        socket.create_connection(place_of(broker), PATIENCE_SECONDS) as plain,
        pytest.raises((ssl.SSLError, ConnectionResetError)),
    ):
        old.wrap_socket(plain, server_hostname="localhost")


# ---- a new certificate


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_signal_changes_the_certificate_of_new_connections(
    broker: BrokerProcess, pair: Pair, name: str
) -> None:
    """Also of clients that call it by its address, which name no server in the handshake."""
    old = certificate_of(broker, pair, name)
    with httpx.Client(
        base_url=broker.url(""), verify=pair.trust(), timeout=PATIENCE_SECONDS
    ) as client:
        client.post("/enqueue", content=b"before")
        pair.renew()
        broker.process.send_signal(signal.SIGHUP)
        broker.wait_for("certificate read again")
        assert certificate_of(broker, pair, name) != old
        # A connection from before goes on.
        assert client.get("/dequeue").content == b"before"


def test_a_broken_new_pair_is_refused_and_the_old_one_stays(
    broker: BrokerProcess, pair: Pair
) -> None:
    old = certificate_of(broker, pair)
    pair.key.write_bytes(AUTHORITY.issue_cert("localhost").private_key_pem.bytes())
    broker.process.send_signal(signal.SIGHUP)
    refused = broker.wait_for("certificate refused, the old one stays")
    assert "does not belong to the certificate" in refused["why"]
    assert certificate_of(broker, pair) == old
    pair.renew()
    broker.process.send_signal(signal.SIGHUP)
    broker.wait_for("certificate read again")
    assert certificate_of(broker, pair) != old


def test_without_tls_the_signal_changes_nothing(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        broker.wait_until_ready().process.send_signal(signal.SIGHUP)
        broker.wait_for("nothing to read again: there is no TLS")
        assert broker.get("/livez").status_code == 200


# ---- what is wrong at start


def start_error(tmp_path: Path, *flags: str) -> str:
    with BrokerProcess(str(tmp_path), *flags) as broker:
        assert broker.process.wait(PATIENCE_SECONDS) == 2
        output = broker.output()
    assert "mill: setting_invalid: " in output
    assert "Traceback" not in output
    return output


def test_one_without_the_other_is_refused(tmp_path: Path, pair: Pair) -> None:
    assert "tls_key = ''" in start_error(tmp_path, *pair.flags[:2])
    assert "tls_cert = ''" in start_error(tmp_path, *pair.flags[2:])


def test_a_file_that_is_not_there_is_named(tmp_path: Path, pair: Pair) -> None:
    pair.key.unlink()
    assert f"tls_key = '{pair.key}' (flag --tls-key) is not there" in start_error(
        tmp_path, *pair.flags
    )


def test_a_key_of_another_certificate_is_refused(tmp_path: Path, pair: Pair) -> None:
    pair.key.write_bytes(AUTHORITY.issue_cert("localhost").private_key_pem.bytes())
    assert "does not belong to the certificate" in start_error(tmp_path, *pair.flags)


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("certificate", "cert.pem' is not a certificate in PEM"),
        ("key", "key.pem' is not a private key in PEM"),
    ],
)
def test_what_is_not_pem_is_named(tmp_path: Path, pair: Pair, file: str, complaint: str) -> None:
    getattr(pair, file).write_bytes(b"\x00 something else")
    assert complaint in start_error(tmp_path, *pair.flags)


def test_a_key_with_a_passphrase_is_refused_instead_of_asked_for(
    tmp_path: Path, pair: Pair
) -> None:
    from cryptography.hazmat.primitives import serialization as forms

    key = forms.load_pem_private_key(pair.key.read_bytes(), password=None)
    pair.key.write_bytes(
        key.private_bytes(
            forms.Encoding.PEM,
            forms.PrivateFormat.PKCS8,
            forms.BestAvailableEncryption(b"secret"),
        )
    )
    assert "is encrypted" in start_error(tmp_path, *pair.flags)


def test_the_pair_can_come_from_the_environment(tmp_path: Path, pair: Pair) -> None:
    environment = {
        "MILLSTREAM_TLS_CERT": str(pair.certificate),
        "MILLSTREAM_TLS_KEY": str(pair.key),
    }
    with BrokerProcess(str(tmp_path), environment=environment) as broker:
        assert broker.wait_until_ready().url("").startswith("https://")


# ---- the end


def test_a_stop_ends_waiting_dequeues_and_does_not_wait_for_silent_clients(
    tmp_path: Path, pair: Pair
) -> None:
    """An hour to drain: a stop that waited for any of them would not end in this test."""
    with BrokerProcess(str(tmp_path), *pair.flags, "--drain-timeout", "1h") as broker:
        url = broker.wait_until_ready().url("/dequeue?timeout=30")
        answers: list[int] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                httpx.get(url, verify=pair.trust(), timeout=60).status_code
            )
        )
        waiting.start()
        with (
            httpx.Client(
                base_url=broker.url(""), verify=pair.trust(), timeout=PATIENCE_SECONDS
            ) as client,
            # One that never began the handshake, and one that is idle and never says goodbye.
            socket.create_connection(place_of(broker)),
            socket.create_connection(place_of(broker)) as plain,
            pair.trust().wrap_socket(plain, server_hostname="localhost"),
        ):
            wait_until(
                lambda: client.get("/queues/default").json()["waiting"] == 1, "one that waits"
            )
            assert broker.stop() == 0
        waiting.join(PATIENCE_SECONDS)
        assert answers == [204]


# ---- the command line


def mill(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MILL, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=plain_environment(environment),
        check=False,
    )


def test_mill_talks_to_a_broker_with_a_certificate_of_ones_own(
    broker: BrokerProcess, pair: Pair
) -> None:
    server = broker.url("")
    done = mill(
        "queue", "enqueue", "jobs", "hello", "--server", server, "--ca", str(pair.authority)
    )
    assert (done.returncode, done.stdout) == (0, "enqueued 1\n"), done.stderr
    done = mill(
        "queue", "dequeue", "jobs", MILLSTREAM_SERVER=server, MILLSTREAM_CA=str(pair.authority)
    )
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr


def test_topics_and_groups_are_reached_the_same_way(broker: BrokerProcess, pair: Pair) -> None:
    where = {"MILLSTREAM_SERVER": broker.url(""), "MILLSTREAM_CA": str(pair.authority)}
    done = mill("topic", "publish", "orders", "hello", "--json", **where)
    assert done.returncode == 0, done.stderr
    assert "orders" in mill("topic", "list", **where).stdout
    assert mill("topic", "read", "orders", **where).stdout == "hello\n"
    tail = ("topic", "tail", "orders", "--last", "1", "--max", "1")
    assert mill(*tail, **where).stdout == "hello\n"
    assert mill("group", "list", **where).returncode == 0


def test_mill_does_not_talk_to_a_broker_that_it_does_not_trust(broker: BrokerProcess) -> None:
    done = mill("queue", "list", "--server", broker.url(""))
    assert done.returncode == 1
    assert "broker_unreachable: the certificate of " in done.stderr
    assert "--ca" in done.stderr


def test_mill_says_when_the_other_side_speaks_tls_or_does_not(
    broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    done = mill("queue", "list", "--server", broker.url("").replace("https", "http"))
    assert done.returncode == 1
    assert "a broker that speaks TLS is called by https://" in done.stderr
    with BrokerProcess(str(tmp_path_factory.mktemp("plain"))) as plain:
        server = plain.wait_until_ready().url("").replace("http", "https")
        done = mill("queue", "list", "--server", server)
    assert done.returncode == 1
    assert "a broker that speaks no TLS is called by http://" in done.stderr


def test_mill_names_a_file_of_authorities_that_cannot_be_used(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    done = mill("queue", "list", "--server", broker.url(""), "--ca", os.devnull)
    assert done.returncode == 2
    assert "--ca is '/dev/null'" in done.stderr


def _bytes(frame: str | bytes) -> bytes:
    return frame.encode() if isinstance(frame, str) else frame
