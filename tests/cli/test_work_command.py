"""`mill work`: a program for each record."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import millstream.client
from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from cli_transcripts import mill, replay
from millstream.client import Client

TRANSCRIPT = Path(__file__).parent / "transcripts" / "work.txt"


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path), "--retry-delay", "1h", "--retry-delay-max", "1h") as process:
        monkeypatch.setenv("MILLSTREAM_SERVER", process.wait_until_ready().url(""))
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[Client]:
    with Client(broker.url("")) as made:
        made.topics.create("jobs", partitions=1)
        yield made


def test_the_transcript_is_what_happens(broker: BrokerProcess) -> None:
    transcript = TRANSCRIPT.read_text(encoding="utf-8")
    now = "\n".join(replay(transcript, broker.url(""))) + "\n"
    if os.environ.get("MILLSTREAM_WRITE_TRANSCRIPTS"):
        TRANSCRIPT.write_text(now, encoding="utf-8")
    assert now == transcript


def test_the_program_finds_in_its_environment_what_the_record_is(client: Client) -> None:
    client.publish("jobs", b"\x00\xff", key="k", headers={"h": "1"}, lane="high")
    program = 'cat; echo "$MILLSTREAM_TOPIC $MILLSTREAM_PARTITION $MILLSTREAM_OFFSET"; '
    program += 'echo "$MILLSTREAM_KEY $MILLSTREAM_LANE $MILLSTREAM_DELIVERIES $MILLSTREAM_HEADERS"'
    code, out, _ = mill("work", "jobs", "g", "--count", "1", "--", "sh", "-c", program)
    assert code == 0
    assert out == b'\x00\xffjobs 0 0\nk high 1 {"h":"1"}\n'


def test_a_program_that_takes_no_input_may_do_so(client: Client) -> None:
    client.publish("jobs", b"x" * 1_000_000)
    code, _, err = mill("work", "jobs", "g", "--count", "1", "--", "true")
    assert (code, err) == (0, "1 acked, 0 nacked, 0 rejected, 0 released\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_work_in_order(
    broker: BrokerProcess, client: Client, tmp_path: Path, number: signal.Signals
) -> None:
    for value in ("a", "b", "c", "d"):
        client.publish("jobs", value)
    begun = tmp_path / "begun"
    program = f"touch {begun}; exec sleep 1000"
    command = (*MILL, "work", "jobs", "g", "--grace", "100ms", "--", "sh", "-c", program)
    worker = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
    )
    wait_until(begun.exists, "the first run")
    worker.send_signal(number)
    _, err = worker.communicate(timeout=PATIENCE_SECONDS)
    assert (worker.returncode, err) == (0, "0 acked, 0 nacked, 0 rejected, 1 released\n")
    # All are there for others, and nothing counted; what was on its way to the worker comes back
    # when the broker sees that it has gone.
    again: list[tuple[str, int]] = []

    def are_all_back() -> bool:
        found = client.receive("jobs", group="g", count=10)
        again.extend((one.text, one.deliveries) for one in found)
        return len(again) >= 4

    wait_until(are_all_back, "all records")
    assert sorted(again) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]


def test_a_run_that_takes_longer_than_the_lease_is_no_failure(
    broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    client.publish("jobs", "slow")
    go_on = tmp_path / "go-on"
    program = f"while ! test -e {go_on}; do sleep 0.05; done"
    command = (*MILL, "work", "jobs", "g", "--visibility", "1s", "--count", "1")
    worker = subprocess.Popen(
        (*command, "--", "sh", "-c", program),
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
        stderr=subprocess.DEVNULL,
    )

    wait_until(lambda: totals(broker)["extended"] >= 4, "the lease to be extended past its time")
    go_on.touch()
    assert worker.wait(PATIENCE_SECONDS) == 0
    found = totals(broker)
    assert (found["acked"], found["timeouts"], found["delivered"]) == (1, 0, 1)


def test_the_last_run_of_a_count_has_all_the_time_that_it_needs(
    broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    client.publish("jobs", "slow")
    go_on = tmp_path / "go-on"
    program = f"while ! test -e {go_on}; do sleep 0.05; done"
    command = (*MILL, "work", "jobs", "g", "--visibility", "300ms", "--count", "1")
    worker = subprocess.Popen(
        (*command, "--grace", "1ms", "--", "sh", "-c", program),
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
        stderr=subprocess.PIPE,
        text=True,
    )

    def is_kept_or_over() -> bool:
        found = totals(broker)
        return found["extended"] >= 2 or worker.poll() is not None

    wait_until(is_kept_or_over, "the lease to be extended")
    go_on.touch()
    _, err = worker.communicate(timeout=PATIENCE_SECONDS)
    assert (worker.returncode, err) == (0, "1 acked, 0 nacked, 0 rejected, 0 released\n")


def test_a_signal_gives_the_last_run_of_a_count_no_more_than_its_time(
    broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    client.publish("jobs", "endless")
    begun = tmp_path / "begun"
    program = f"touch {begun}; exec sleep 1000"
    worker = subprocess.Popen(
        (*MILL, "work", "jobs", "g", "--count", "1", "--grace", "100ms", "--", "sh", "-c", program),
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(begun.exists, "the run")
    worker.send_signal(signal.SIGTERM)
    _, err = worker.communicate(timeout=PATIENCE_SECONDS)
    assert (worker.returncode, err) == (0, "0 acked, 0 nacked, 0 rejected, 1 released\n")
    (again,) = client.receive("jobs", group="g")
    assert again.deliveries == 1


def test_work_that_is_idle_because_the_broker_is_away_is_not_over(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        server = broker.wait_until_ready().url("")
        with Client(server) as client:
            client.topics.create("jobs", partitions=1)
            for value in "abcd":
                client.publish("jobs", value)
        begun, go_on, done = (tmp_path / name for name in ("begun", "go-on", "done"))
        program = f"touch {begun}; while ! test -e {go_on}; do sleep 0.05; done; cat >> {done}"
        worker = subprocess.Popen(
            (*MILL, "work", "jobs", "g", "--idle-exit", "50ms", "--", "sh", "-c", program),
            env=plain_environment({"MILLSTREAM_SERVER": server}),
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_until(begun.exists, "the first run")
        wait_until(lambda: totals(broker)["delivered"] >= 2, "one that waits its turn")
        broker.stop(signal.SIGKILL)
        go_on.touch()
        wait_until(lambda: done.exists() and done.read_text() == "ab", "what was there")
        with BrokerProcess(str(tmp_path), "--http", server.removeprefix("http://")) as again:
            again.wait_until_ready()
            _, err = worker.communicate(timeout=PATIENCE_SECONDS)
    assert (worker.returncode, err) == (0, "4 acked, 0 nacked, 0 rejected, 0 released\n")
    assert done.read_text() == "abcd"


def test_work_that_is_to_end_when_idle_says_that_there_is_no_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    impatient = functools.partial(millstream.client.AsyncClient, retry_s=0.1)
    monkeypatch.setattr(millstream.client, "AsyncClient", impatient)
    asked = ("work", "jobs", "g", "--server", "http://127.0.0.1:1", "--idle-exit", "10ms")
    code, _, err = mill(*asked, "--", "cat")
    assert code == 1
    assert "no broker answers at http://127.0.0.1:1" in err


def test_what_the_broker_did_not_take_is_not_said_to_be_done(
    broker: BrokerProcess, client: Client, tmp_path: Path
) -> None:
    client.publish("jobs", "a")
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    program = f"touch {begun}; while ! test -e {go_on}; do sleep 0.05; done"
    worker = subprocess.Popen(
        (*MILL, "work", "jobs", "g", "--count", "1", "--", "sh", "-c", program),
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(begun.exists, "the run")
    client.groups.reset("g", "jobs", "earliest")
    go_on.touch()
    _, err = worker.communicate(timeout=PATIENCE_SECONDS)
    assert err == ("1 acked, 0 nacked, 0 rejected, 0 released, 1 of them not taken by the broker\n")


def test_a_group_that_is_described_shows_its_leases(client: Client) -> None:
    client.publish("jobs", "a")
    client.receive("jobs", group="g", member="me")
    code, out, _ = mill("group", "describe", "g")
    row = out.decode().splitlines()[-1].split()
    assert (code, row[:7]) == (0, ["jobs", "0", "0", "leased", "me", "1", "normal"])
    assert "by lease    1 leased, 0 waiting, 0 ready" in out.decode().splitlines()


def totals(broker: BrokerProcess) -> dict[str, Any]:
    page = httpx.get(broker.url("/v1/reliability/stats")).json()
    found: dict[str, Any] = page["totals"]
    return found
