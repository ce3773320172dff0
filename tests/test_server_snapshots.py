"""Queues that outlive a broker: at its stop, at intervals, and what a crash leaves."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, wait_until

AT_STOP = ("--snapshot-at-stop", "on")
OWN = Path("data", "snapshots", ".own")


def enqueue(broker: BrokerProcess, queue: str, text: str) -> None:
    url = broker.url(f"/queues/{queue}/enqueue")
    assert httpx.post(url, json={"payload": text}, timeout=PATIENCE_SECONDS).status_code == 200


def taken(broker: BrokerProcess, queue: str) -> list[str]:
    answer = broker.get(f"/queues/{queue}/dequeue?max=1000")
    return [one["payload"] for one in answer.json()["messages"]] if answer.content else []


def test_queues_are_gone_at_restart_unless_a_setting_says_otherwise(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        enqueue(broker.wait_until_ready(), "emails", "1")
        assert broker.stop() == 0
    with BrokerProcess(str(tmp_path)) as broker:
        assert broker.wait_until_ready().get("/queues/emails").status_code == 404


def test_a_stop_keeps_queues_with_their_limits(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        url = broker.wait_until_ready().url("/queues/emails")
        httpx.put(url, json={"capacity": 5, "max_bytes": 500}, timeout=PATIENCE_SECONDS)
        for text in ("1", "2", "3"):
            enqueue(broker, "emails", text)
        enqueue(broker, "empty", "x")
        assert taken(broker, "empty") == ["x"]
        assert broker.stop() == 0
        assert broker.messages("queues kept")[0]["messages"] == 3
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        page = broker.wait_until_ready().get("/queues/emails").json()
        assert (page["size"], page["capacity"], page["max_bytes"]) == (3, 5, 500)
        assert taken(broker, "emails") == ["1", "2", "3"]
        assert taken(broker, "empty") == []
        assert broker.stop() == 0
    # And what was taken since does not come again.
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        assert taken(broker.wait_until_ready(), "emails") == []
        assert broker.stop() == 0
        # Nothing changed, so nothing was written.
        assert broker.messages("queues kept") == []


def test_an_interval_keeps_queues_for_a_crash(tmp_path: Path) -> None:
    flags = ("--snapshot-interval", "1s")
    with BrokerProcess(str(tmp_path), *flags) as broker:
        enqueue(broker.wait_until_ready(), "emails", "1")
        wait_until((tmp_path / OWN / "_emails.snapshot").exists, "a snapshot")
        broker.stop(signal.SIGKILL)
    with BrokerProcess(str(tmp_path), *flags) as broker:
        assert taken(broker.wait_until_ready(), "emails") == ["1"]


def test_a_link_among_the_snapshots_is_not_loaded(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path)) as broker:
        enqueue(broker.wait_until_ready(), "emails", "1")
        url = broker.url("/queues/emails")
        httpx.post(f"{url}/persist?file=q", timeout=PATIENCE_SECONDS)
        folder = tmp_path / "data" / "snapshots"
        (folder / "q").rename(tmp_path / "outside")
        (folder / "q").symlink_to(tmp_path / "outside")
        for file in ("q", "../q"):
            answer = httpx.post(f"{url}/load", params={"file": file}, timeout=PATIENCE_SECONDS)
            assert (answer.status_code, answer.json()["error"]) == (400, "snapshot_invalid")


def test_a_damaged_snapshot_is_reported_and_kept_and_the_broker_starts(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        enqueue(broker.wait_until_ready(), "emails", "1")
        enqueue(broker, "orders", "2")
        assert broker.stop() == 0
    file = tmp_path / OWN / "_emails.snapshot"
    damaged = file.read_bytes()[:-1] + b"?"
    file.write_bytes(damaged)
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        broker.wait_until_ready()
        assert broker.messages("snapshot refused")[0]["file"] == "_emails.snapshot"
        assert taken(broker, "orders") == ["2"]
        assert broker.stop() == 0
    assert (tmp_path / OWN / "_emails.snapshot.refused").read_bytes() == damaged


def test_a_start_that_fails_takes_nothing_away(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        enqueue(broker.wait_until_ready(), "emails", "1")
        assert broker.stop() == 0
    (tmp_path / "data" / "format").write_text("millstream 999\n")
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        assert broker.process.wait(30) == 1
    (tmp_path / "data" / "format").write_text("millstream 1\n")
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        assert taken(broker.wait_until_ready(), "emails") == ["1"]


def test_limits_of_the_default_queue_outlive_a_restart(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        url = broker.wait_until_ready().url("/queues/default")
        httpx.put(url, json={"capacity": 5, "max_bytes": 500}, timeout=PATIENCE_SECONDS)
        assert broker.stop() == 0
    with BrokerProcess(str(tmp_path), *AT_STOP) as broker:
        page = broker.wait_until_ready().get("/queues/default").json()
        assert (page["capacity"], page["max_bytes"]) == (5, 500)


# ---- a disk that hangs: nothing ends by itself, so a stop that waited would not end in a test


HANGING = """
import threading
from millstream.cli.main import main
from millstream.log.snapshot import SnapshotFolder

SnapshotFolder.{operation} = lambda *_: threading.Event().wait()
main()
"""


def hanging(tmp_path: Path, operation: str) -> BrokerProcess:
    program = (sys.executable, "-c", HANGING.format(operation=operation))
    flags = (*AT_STOP, "--drain-timeout", "1s")
    return BrokerProcess(str(tmp_path), *flags, program=program)


def test_a_disk_that_hangs_while_queues_are_written_does_not_hold_up_the_stop(
    tmp_path: Path,
) -> None:
    with hanging(tmp_path, "write") as broker:
        enqueue(broker.wait_until_ready(), "emails", "1")
        with pytest.raises(httpx.TimeoutException):
            httpx.post(broker.url("/queues/emails/persist"), timeout=0.5)
        assert broker.stop() == 0
        assert "the disk took more than" in broker.messages("queues not kept")[0]["why"]


def test_a_disk_that_hangs_while_queues_are_read_does_not_hold_up_the_stop(tmp_path: Path) -> None:
    with hanging(tmp_path, "names") as broker:
        assert broker.get("/livez", listener="metrics").status_code == 200
        assert broker.stop() == 0
        assert not broker.messages("ready")
