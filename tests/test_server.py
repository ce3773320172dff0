"""A broker from outside: its start, its pages, its end. Every test has a process of its own."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from millstream.config import load_settings
from millstream.engine.local import LocalOptions
from millstream.server import engine_options

# A broker whose engine does what the test says: {start}, {stop} and {health} are its bodies.
STAND_IN = """
import asyncio, collections
import millstream.server
from millstream.cli.main import main
from millstream.engine.memory import MemoryEngine

Metric = collections.namedtuple("Metric", "name kind help value labels", defaults=((),))

class Health:
    ok, reason = {health}

class Engine(MemoryEngine):
    async def start(self):
        await super().start()
        {start}
    async def stop(self): {stop}
    def health(self): return Health()
    def metrics(self): return [Metric("millstream_log_appends", "counter", "Appends.", 3)]

millstream.server.open_engine = lambda settings, clock, turns: Engine()
main()
"""


def broker_with_engine(
    tmp_path: Path,
    *flags: str,
    start: str = "pass",
    stop: str = "pass",
    health: str = "(True, None)",
) -> BrokerProcess:
    program = STAND_IN.format(start=start, stop=stop, health=health)
    return BrokerProcess(str(tmp_path), *flags, program=(sys.executable, "-c", program))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path)) as process:
        yield process.wait_until_ready()


def test_a_broker_says_where_it_listens_and_answers_there(broker: BrokerProcess) -> None:
    assert {m["listener"] for m in broker.messages("listening")} == {"http", "metrics"}
    for listener in ("http", "metrics"):
        assert broker.get("/livez", listener=listener).status_code == 200
        assert broker.get("/readyz", listener=listener).status_code == 200


def test_health_is_json_or_the_word_ok(broker: BrokerProcess) -> None:
    page = broker.get("/health").json()
    assert page["status"] == "healthy"
    assert page["phase"] == "ready"
    text = broker.get("/health", headers={"Accept": "text/plain"})
    assert text.text == "ok"
    assert text.headers["content-type"].startswith("text/plain")


def test_metrics_are_prometheus_text_or_json(broker: BrokerProcess) -> None:
    text = broker.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "# TYPE millstream_ready gauge\nmillstream_ready 1.0\n" in text.text
    page = broker.get("/metrics", headers={"Accept": "application/json"}).json()
    assert page["millstream_ready"] == 1
    assert page["millstream_http_requests_total"] == [
        {"labels": {"listener": "http"}, "value": 2},
        {"labels": {"listener": "metrics"}, "value": 0},
    ]


def test_errors_of_http_have_one_shape(broker: BrokerProcess) -> None:
    unknown = broker.get("/nothing")
    assert (unknown.status_code, unknown.json()["error"]) == (404, "not_found")
    wrong = httpx.post(broker.url("/health"), timeout=PATIENCE_SECONDS)
    assert (wrong.status_code, wrong.json()["error"]) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"]
    # Of all routes of the path, not of the first one only.
    assert (
        httpx.post(broker.url("/queues/q"), timeout=PATIENCE_SECONDS).headers["allow"]
        == "DELETE, GET, PUT"
    )
    assert set(unknown.json()) == set(wrong.json()) == {"error", "message"}


def test_the_api_describes_itself_without_the_internet(broker: BrokerProcess) -> None:
    assert "/health" in broker.get("/openapi.json").json()["paths"]
    assert "docs/docs.js" in broker.get("/docs").text


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
def test_a_web_page_from_elsewhere_is_refused(
    broker: BrokerProcess, headers: dict[str, str]
) -> None:
    for listener in ("http", "metrics"):
        answer = broker.get("/health", listener=listener, headers=headers)
        assert answer.status_code == 403
        assert answer.json()["error"] == "foreign_request"


def test_an_allowed_host_is_served(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--allowed-hosts", "broker.example") as broker:
        broker.wait_until_ready()
        assert broker.get("/health", headers={"Host": "broker.example:8080"}).status_code == 200


def test_a_second_broker_is_refused_with_the_first_ones_process_id(broker: BrokerProcess) -> None:
    directory = os.path.dirname(broker.data)
    with BrokerProcess(directory) as second:
        assert second.process.wait(PATIENCE_SECONDS) == 1
        complaint = second.output().splitlines()[-1]
    assert complaint.startswith("mill: store_locked: ")
    assert f"process id {broker.process.pid};" in complaint
    assert broker.get("/health").status_code == 200


def test_a_second_broker_on_the_same_addresses_is_told_of_the_directory(
    broker: BrokerProcess,
) -> None:
    address = broker.url("").removeprefix("http://")
    with BrokerProcess(os.path.dirname(broker.data), "--http", address) as second:
        assert second.process.wait(PATIENCE_SECONDS) == 1
        assert "mill: store_locked: " in second.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_releases_the_lock(tmp_path: Path, number: signal.Signals) -> None:
    with BrokerProcess(str(tmp_path)) as first:
        first.wait_until_ready()
        assert first.stop(number) == 0
        events = [message["event"] for message in first.messages()]
        assert events[-3:] == ["told to stop", "draining", "stopped"]
    with BrokerProcess(str(tmp_path)) as second:
        second.wait_until_ready()
        assert second.stop() == 0


def test_a_killed_broker_leaves_no_lock(broker: BrokerProcess) -> None:
    broker.stop(signal.SIGKILL)
    with BrokerProcess(os.path.dirname(broker.data)) as second:
        second.wait_until_ready()


def test_an_address_in_use_is_named_with_its_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with BrokerProcess(str(tmp_path), "--metrics", address) as broker:
            assert broker.process.wait(PATIENCE_SECONDS) == 1
            complaint = broker.output().splitlines()[-1]
    assert complaint.startswith(
        f"mill: address_unavailable: cannot listen on {address}, the setting metrics: "
    )


def test_wrong_settings_end_the_start_with_all_of_them(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), "--grpc", "127.0.0.1:9000", "--fsync", "no") as broker:
        assert broker.process.wait(PATIENCE_SECONDS) == 2
        output = broker.output()
    assert "grpc = '127.0.0.1:9000' (flag --grpc)" in output
    assert "fsync = 'no' (flag --fsync)" in output
    assert "Traceback" not in output
    assert not os.path.exists(broker.data)


def test_a_data_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    flags = ["--data", str(tmp_path / "file" / "below"), "--http", "off", "--metrics", "off"]
    done = subprocess.run(
        [*MILL, "serve", *flags],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=plain_environment(),
        check=False,
    )
    assert done.returncode == 2
    assert "mill: setting_invalid: the data directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_lack_of_access_control_is_said_at_start(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        broker.wait_until_ready()
        said = [m for m in broker.messages() if "no access control" in m["event"]]
        assert [m["level"] for m in said] == ["warning"]
        assert "exposed" not in said[0]
        broker.stop()
    with BrokerProcess(str(tmp_path), "--http", "0.0.0.0:0") as broker:
        broker.wait_until_ready()
        said = [m for m in broker.messages() if "no access control" in m["event"]]
        assert said[0]["exposed"] == ["http 0.0.0.0:0"]


def test_the_soft_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = 300 if hard == resource.RLIM_INFINITY else min(300, hard)
    with BrokerProcess(str(tmp_path), "--open-files", str(limit)) as broker:
        assert broker.wait_for("starting")["open_files"] == limit
        broker.wait_until_ready()
        assert broker.get("/health").status_code == 200


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told(tmp_path: Path, abstract: bool) -> None:
    # The name of a socket is short, and a test's own directory is not.
    with (
        tempfile.TemporaryDirectory() as short,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager,
    ):
        name = os.path.join(short, "notify")
        manager.bind("\0" + name if abstract else name)
        manager.settimeout(PATIENCE_SECONDS)
        environment = {"NOTIFY_SOCKET": "@" + name if abstract else name}
        with BrokerProcess(str(tmp_path), environment=environment) as broker:
            assert b"READY=1" in manager.recv(1024).split(b"\n")
            assert broker.stop() == 0
            assert b"STOPPING=1" in manager.recv(1024).split(b"\n")


def test_an_unknown_variable_is_a_warning(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), environment={"MILLSTREAM_FSINK": "every"}) as broker:
        broker.wait_until_ready()
        warnings = [m["event"] for m in broker.messages() if m["level"] == "warning"]
    assert any("did you mean MILLSTREAM_FSYNC?" in warning for warning in warnings)


def test_a_broker_that_recovers_is_alive_and_not_ready(tmp_path: Path) -> None:
    with broker_with_engine(tmp_path, start="await asyncio.sleep(3600)") as broker:
        assert broker.get("/livez", listener="metrics").status_code == 200
        ready = broker.get("/readyz", listener="metrics")
        assert (ready.status_code, ready.json()["error"]) == (503, "starting")
        # No client gets in before recovery is done.
        assert [m["listener"] for m in broker.messages("listening")] == ["metrics"]
        assert broker.stop() == 0
        assert not broker.messages("ready")


def test_a_draining_broker_is_not_ready_and_a_second_signal_ends_it(tmp_path: Path) -> None:
    with broker_with_engine(
        tmp_path, "--drain-timeout", "1h", stop="await asyncio.sleep(3600)"
    ) as broker:
        broker.wait_until_ready()
        broker.process.send_signal(signal.SIGTERM)
        broker.wait_for("draining")
        wait_until(
            lambda: broker.get("/readyz", listener="metrics").status_code == 503, "not ready"
        )
        assert broker.get("/readyz", listener="metrics").json()["error"] == "draining"
        assert broker.stop(signal.SIGTERM) == 128 + signal.SIGTERM


def test_an_engine_that_does_not_stop_is_left_behind_within_the_bound(tmp_path: Path) -> None:
    with broker_with_engine(
        tmp_path, "--drain-timeout", "100ms", stop="await asyncio.sleep(3600)"
    ) as broker:
        broker.wait_until_ready()
        assert broker.stop() == 0
        assert any("did not stop in time" in m["event"] for m in broker.messages())


def test_an_unhealthy_engine_shows_on_the_health_page(tmp_path: Path) -> None:
    with broker_with_engine(tmp_path, health="(False, 'the disk failed a sync')") as broker:
        broker.wait_until_ready()
        page = broker.get("/health")
        assert page.status_code == 503
        assert page.json()["error"] == "unhealthy"
        assert page.json()["message"] == "the disk failed a sync"
        text = broker.get("/health", headers={"Accept": "text/plain"})
        assert (text.status_code, text.text) == (503, "the disk failed a sync")
        assert broker.get("/livez").status_code == 200


def test_the_engines_numbers_are_on_the_metrics_page(tmp_path: Path) -> None:
    with broker_with_engine(tmp_path) as broker:
        broker.wait_until_ready()
        assert "\nmillstream_log_appends_total 3.0\n" in broker.get("/metrics").text


def test_a_start_that_fails_ends_with_its_error(tmp_path: Path) -> None:
    failing = "raise __import__('millstream.errors').errors.LogDamaged('a hole')"
    with broker_with_engine(tmp_path, start=failing) as broker:
        assert broker.process.wait(PATIENCE_SECONDS) == 1
        assert broker.output().splitlines()[-1] == "mill: log_damaged: a hole"


def test_the_server_imports_neither_pyarrow_nor_pyspark() -> None:
    program = "import sys, millstream.server; print({'pyarrow', 'pyspark'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_the_defaults_of_the_engine_are_those_of_the_table() -> None:
    options = engine_options(load_settings(flags={}, environment={}))
    plain = LocalOptions()
    assert options.store.settings_for("any") == plain.store.settings_for("any")
    assert options.upkeep == plain.upkeep
    assert options.bypass_bytes == plain.bypass_bytes
    assert options.store.journal_file_bytes == plain.store.journal_file_bytes
    assert options.store.producer_expiry_ms == plain.store.producer_expiry_ms
