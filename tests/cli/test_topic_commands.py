"""`mill topic` and `mill group` against a running broker: transcripts in `transcripts/`."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from cli_transcripts import mill, replay
from millstream.client import Client
from millstream.log import batch as batches
from millstream.wire.staged import StagedEntry, join_entries

FOLDER = Path(__file__).parent / "transcripts"
KINDS = ("topic", "group", "schedule", "writer")
TRANSCRIPTS = sorted(path for kind in KINDS for path in FOLDER.glob(f"{kind}-*.txt"))


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerProcess]:
    """A fresh broker, which commands find by themselves."""
    with BrokerProcess(str(tmp_path)) as process:
        monkeypatch.setenv("MILLSTREAM_SERVER", process.wait_until_ready().url(""))
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")
        yield process


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_transcript_is_what_happens(path: Path, broker: BrokerProcess) -> None:
    if path.stem.startswith("group"):
        fill_group(broker.url(""))
    if path.stem.startswith("writer"):
        fill_writers(broker.url(""))
    transcript = path.read_text(encoding="utf-8")
    now = "\n".join(replay(transcript, broker.url(""))) + "\n"
    if os.environ.get("MILLSTREAM_WRITE_TRANSCRIPTS"):
        path.write_text(now, encoding="utf-8")
    assert now == transcript


def fill_writers(server: str) -> None:
    data = batches.encode([(1, None, b"a", ()), (1, None, b"b", ())])
    body = join_entries([StagedEntry("totals", 0, 0, data)])
    with Client(server) as client:
        client.topics.create("totals", partitions=1)
        parts = [client.writers.stage("sums", 12, task, 0, body).part for task in range(2)]
        client.writers.commit("sums", 12, parts)
        client.writers.stage("sums", 13, 0, 0, body)
        client.writers.stage("new", 0, 0, 0, body)


def fill_group(server: str) -> None:
    with Client(server) as client:
        client.topics.create("orders", partitions=1)
        with client.consumer("orders", group="billing", auto_offset_reset="earliest") as consumer:
            for number in range(3):
                client.publish("orders", number)
            for record in consumer:
                if record.offset == 2:
                    break


# ---- what a transcript cannot show


def test_a_pipe_of_many_lines_goes_in_order(broker: BrokerProcess) -> None:
    mill("topic", "create", "t", "--partitions", "1")
    given = b"".join(b"%d\n" % number for number in range(5000))
    assert mill("topic", "publish", "t", given=given) == (0, b"published 5,000\n", "")
    assert mill("topic", "read", "t") == (0, given, "")
    code, out, _ = mill("topic", "read", "t", "--json", "--offset", "4990")
    assert code == 0
    assert [json.loads(line)["value"] for line in out.splitlines()] == [
        str(number) for number in range(4990, 5000)
    ]


def test_bytes_come_out_as_they_went_in(broker: BrokerProcess) -> None:
    line = bytes(sorted(set(range(256)) - {10, 13}))
    assert mill("topic", "publish", "t", given=line + b"\n")[0] == 0
    assert mill("topic", "read", "t") == (0, line + b"\n", "")


def test_what_was_read_as_json_can_be_published_again(broker: BrokerProcess) -> None:
    with Client(broker.url("")) as client:
        client.topics.create("t", partitions=1)
        client.publish("t", {"a": [1.5, "ü"]}, key=b"\xff", headers={"h": b"\x00", "n": None})
        client.publish("t", b"\xfe", key="key")
        client.publish("t", "text", timestamp_ms=1_700_000_000_000)
        client.publish("t", None, key="gone")
        lines = mill("topic", "read", "t", "--json")[1]
        client.topics.create("u", partitions=1)
        assert mill("topic", "publish", "u", "--ndjson", given=lines)[0] == 0
        first, second = ([*client.read(name)] for name in ("t", "u"))
        # All but the topic: times too.
        assert [one[1:] for one in first] == [one[1:] for one in second]


def test_tail_goes_on_after_a_restart(tmp_path: Path) -> None:
    broker = BrokerProcess(str(tmp_path)).wait_until_ready()
    address = broker.url("").removeprefix("http://")
    environment = plain_environment({"MILLSTREAM_SERVER": broker.url("")})
    out = tmp_path / "out"
    try:
        with Client(broker.url("")) as client, out.open("wb") as file:
            client.topics.create("t", partitions=1)
            client.publish("t", "one")
            tail = subprocess.Popen(
                [*MILL, "topic", "tail", "t", "--last", "5", "--max", "2"],
                stdout=file,
                env=environment,
            )
            try:
                wait_until(lambda: out.read_bytes() == b"one\n", "the first record")
                broker.process.kill()
                broker.process.wait()
                broker = BrokerProcess(str(tmp_path), "--http", address).wait_until_ready()
                client.publish("t", "two")
                assert tail.wait(2 * PATIENCE_SECONDS) == 0
            finally:
                tail.kill()
            assert out.read_bytes() == b"one\ntwo\n"
    finally:
        broker.process.kill()
        broker.process.wait()


def test_a_pipe_that_is_closed_early_is_no_error(broker: BrokerProcess) -> None:
    given = b"x" * 1000 + b"\n"
    mill("topic", "publish", "t", given=given * 3000)
    reading = subprocess.Popen(
        [*MILL, "topic", "read", "t"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
    )
    assert reading.stdout is not None
    assert reading.stdout.readline() == given
    reading.stdout.close()
    assert reading.stderr is not None
    assert reading.stderr.read() == b""
    assert reading.wait(PATIENCE_SECONDS) == 0


def test_no_broker_is_said_plainly() -> None:
    for command in (["list"], ["publish", "t", "x"], ["read", "t"], ["tail", "t"]):
        code, _, err = mill("topic", *command, "--server", "http://127.0.0.1:1")
        assert code == 1
        assert err.startswith("mill: broker_unreachable: no broker answers at http://127.0.0.1:1")


@pytest.mark.parametrize("module", ["millstream.cli.topic", "millstream.cli.group"])
def test_the_commands_need_nothing_of_the_server(module: str) -> None:
    program = (
        f"import sys, {module}\n"
        "print(sorted({'fastapi', 'uvicorn', 'uvloop', 'structlog', 'crc32c', 'rich.progress',"
        " 'asyncio', 'prometheus_client', 'httptools'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_a_group_is_described_with_its_members_and_its_lag(broker: BrokerProcess) -> None:
    fill_group(broker.url(""))
    mill("group", "reset", "billing", "--topic", "orders", "--to", "1")
    with Client(broker.url("")) as client, client.consumer("orders", group="billing") as consumer:
        member = consumer.statistics().member_id
        code, out, _ = mill("group", "describe", "billing")
        assert code == 0
        lines = out.decode().splitlines()
        assert lines[5].startswith("lag         2 records, ")
        assert lines[8] == f"{member}  python  orders 0"
        page = json.loads(mill("group", "describe", "billing", "--json")[1])
        assert page["lag"]["messages"] == 2
        assert page["lag"]["partitions"][0]["seconds"] > 0
        assert page["members"][0]["member_id"] == member
        code, _, err = mill("group", "delete", "billing")
        assert (code, err.split(":")[1]) == (1, " group_not_empty")


def test_a_person_sees_a_bar_and_a_pipe_does_not(broker: BrokerProcess) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [*MILL, "topic", "publish", "t"],
            input=b"x\n" * 2000,
            stdout=subprocess.PIPE,
            stderr=follower,
            env=plain_environment({"MILLSTREAM_SERVER": broker.url(""), "TERM": "xterm"}),
            timeout=2 * PATIENCE_SECONDS,
            check=False,
        )
        shown = os.read(leader, 65536)
    finally:
        os.close(leader)
        os.close(follower)
    assert (done.returncode, done.stdout) == (0, b"published 2,000\n")
    assert b"stored" in shown


@pytest.mark.parametrize(
    ("words", "answer", "is_left", "status"),
    [
        (("delete", "t"), b"\n", True, 1),
        (("delete", "t"), b"n\n", True, 1),
        (("delete", "t"), b"y\n", False, 0),
        (("delete", "t", "--yes"), b"", False, 0),
        (("purge", "t"), b"\n", True, 1),
        (("purge", "t"), b"yes\n", False, 0),
    ],
)
def test_a_person_is_asked_before_records_are_gone(
    broker: BrokerProcess, words: tuple[str, ...], answer: bytes, is_left: bool, status: int
) -> None:
    mill("topic", "publish", "t", "x")
    leader, follower = pty.openpty()
    try:
        process = subprocess.Popen(
            [*MILL, "topic", *words],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
        )
        if answer:
            shown = b""
            while b"[y/N]" not in shown:
                shown += os.read(leader, 4096)
            os.write(leader, answer)
        assert process.wait(PATIENCE_SECONDS) == status
    finally:
        os.close(leader)
        os.close(follower)
    assert (mill("topic", "read", "t")[1] == b"x\n") == is_left


def test_a_record_that_is_not_stored_is_said_once(broker: BrokerProcess) -> None:
    mill("topic", "create", "t")
    done = subprocess.run(
        [*MILL, "topic", "publish", "t", "hello", "--partition", "77"],
        capture_output=True,
        text=True,
        env=plain_environment({"MILLSTREAM_SERVER": broker.url("")}),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("mill: partition_unknown: ")
