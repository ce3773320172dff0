"""`mill dlq` against a running broker: a transcript in `transcripts/`, and what it cannot show."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment
from cli_transcripts import mill, replay
from listeners.letters import bury
from listeners.v1_client import V1

TRANSCRIPT = Path(__file__).parent / "transcripts" / "dlq.txt"


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    """A fresh broker, which commands find by themselves."""
    with BrokerProcess(str(tmp_path)) as process:
        monkeypatch.setenv("MILLSTREAM_SERVER", process.wait_until_ready().url(""))
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")
        yield process


def fill(broker: BrokerProcess) -> None:
    v1 = V1(broker)
    v1.good("POST", "/topics", {"name": "orders", "partitions": 1})
    facts: dict[str, Any] = {"error": "card expired", "when_ms": 1_767_225_600_000}
    bury(v1, "orders", '{"to": "Lima"}', '{"to": "Oslo"}', key=b"ada", lane="high", **facts)
    bury(v1, "orders", '{"to": "Lima"}', "soup", "salt", reason="rejected", **facts)
    v1.close()


def test_the_transcript_is_what_happens(broker: BrokerProcess) -> None:
    fill(broker)
    transcript = TRANSCRIPT.read_text(encoding="utf-8")
    now = "\n".join(replay(transcript, broker.url(""))) + "\n"
    if os.environ.get("MILLSTREAM_WRITE_TRANSCRIPTS"):
        TRANSCRIPT.write_text(now, encoding="utf-8")
    assert now == transcript


def test_a_redrive_that_nobody_waits_for_runs_and_can_be_cancelled(broker: BrokerProcess) -> None:
    fill(broker)
    code, out, _ = mill("dlq", "redrive", "orders", "--rate", "1", "--json")
    job = json.loads(out)
    assert (code, job["state"]) == (0, "running")
    code, out, _ = mill("dlq", "cancel", job["id"])
    assert code == 0
    assert out.startswith(b"cancelled: put ")
    listed = json.loads(mill("dlq", "list", "orders", "--json")[1])
    jobs = json.loads(mill("dlq", "jobs", "--json")[1])
    assert len(listed) == 5 - jobs[0]["moved"]


def test_many_letters_are_listed_over_several_pages(broker: BrokerProcess) -> None:
    v1 = V1(broker)
    v1.good("POST", "/topics", {"name": "orders", "partitions": 1})
    bury(v1, "orders", *(str(n) for n in range(1200)))
    v1.close()
    listed = json.loads(mill("dlq", "list", "orders", "--json", "--max", "1100")[1])
    assert [one["message"]["value"] for one in listed] == [str(n) for n in range(1100)]
    assert mill("dlq", "list", "orders", "--max", "5")[1].endswith(b"5 of 1,200 dead letters\n")


def test_a_value_of_bytes_is_shown_as_it_is(broker: BrokerProcess) -> None:
    v1 = V1(broker)
    v1.good("POST", "/topics", {"name": "orders", "partitions": 1})
    v1.good("POST", "/topics", {"name": "orders.dlq", "partitions": 1})
    v1.good("POST", "/topics/orders.dlq/messages", raw=b"\xff\x00")
    v1.close()
    code, out, _ = mill("dlq", "show", "orders", "0/0")
    assert code == 0
    assert out.endswith(b"\n\n\xff\x00\n")


def test_a_person_who_looks_on_sees_how_far_it_is(broker: BrokerProcess) -> None:
    fill(broker)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*MILL, "dlq", "redrive", "orders", "--rate", "4"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=PATIENCE_SECONDS,
        env=plain_environment({"MILLSTREAM_SERVER": broker.url(""), "TERM": "xterm"}),
        check=True,
    )
    os.close(theirs)
    assert done.stdout == b"done: put 5 back\n"
    seen = b""
    with suppress(OSError):
        while piece := os.read(ours, 65536):
            seen += piece
    os.close(ours)
    assert b"put back" in seen
