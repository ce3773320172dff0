"""`mill queue` against a running broker: transcripts in `transcripts/queue-*.txt`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker_process import MILL, PATIENCE_SECONDS, BrokerProcess, plain_environment
from cli_transcripts import mill, replay

TRANSCRIPTS = sorted(Path(__file__).parent.joinpath("transcripts").glob("queue-*.txt"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A fresh broker, which commands find by themselves."""
    with BrokerProcess(str(tmp_path)) as broker:
        url = broker.wait_until_ready().url("")
        monkeypatch.setenv("MILLSTREAM_SERVER", url)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("NO_COLOR", "1")
        yield url


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_the_transcript_is_what_happens(path: Path, server: str) -> None:
    transcript = path.read_text(encoding="utf-8")
    now = "\n".join(replay(transcript, server)) + "\n"
    if os.environ.get("MILLSTREAM_WRITE_TRANSCRIPTS"):
        path.write_text(now, encoding="utf-8")
    assert now == transcript


# ---- what a transcript cannot show


def test_bytes_come_out_as_they_went_in(server: str) -> None:
    line = bytes(sorted(set(range(256)) - {10, 13}))
    assert mill("queue", "enqueue", "q", given=line + b"\n")[:2] == (0, b"enqueued 1\n")
    assert mill("queue", "dequeue", "q") == (0, line + b"\n", "")


def test_a_pipe_of_many_lines_goes_in_order(server: str) -> None:
    lines = [json.dumps({"number": number, "text": "x" * 300}) for number in range(450)]
    given = "\n".join(lines).encode()
    assert mill("queue", "enqueue", "q", "--payload", given=given)[1] == b"enqueued 450\n"
    out = mill("queue", "dequeue", "q", "--max", "1000")[1]
    assert out.decode().splitlines() == lines


def test_json_is_json(server: str) -> None:
    for arguments in (
        ("create", "q", "--capacity", "7", "--max-bytes", "1K"),
        ("show", "q"),
        ("list",),
        ("enqueue", "q", "hello"),
        ("persist", "q", "--file", "q.json"),
        ("load", "q", "--file", "q.json"),
        ("dequeue", "q"),
        ("clear", "q"),
    ):
        code, out, _ = mill("queue", *arguments, "--json")
        assert code == 0
        assert json.loads(out)
    shown = json.loads(mill("queue", "show", "q", "--json")[1])
    assert (shown["capacity"], shown["max_bytes"]) == (7, 1024)


def test_a_name_is_escaped_on_its_way(server: str) -> None:
    code, _, err = mill("queue", "show", "a b?c")
    assert (code, err.split(":")[1]) == (1, " queue_name_invalid")


def test_watch_shows_rates_and_ends_when_told(server: str) -> None:
    mill("queue", "enqueue", "emails", "hello")
    code, out, err = mill("queue", "watch", "--interval", "0.1", "--count", "2")
    assert (code, err) == (0, "")
    assert re.search(r"queue\s+size\s+used\s+bytes\s+waiting\s+in/s\s+out/s\s+full", out.decode())
    assert re.search(r"emails\s+1\s+0%\s+5\s+0\s+0\s+0\s+0", out.decode())


def test_watch_prints_a_table_each_time_when_nobody_sits_before_it(server: str) -> None:
    mill("queue", "enqueue", "emails", "hello")
    watching = subprocess.Popen(
        [*MILL, "queue", "watch", "--interval", "0.1", "--server", server],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=plain_environment(),
    )
    # It has no end: what it says has to come while it runs.
    timer = threading.Timer(PATIENCE_SECONDS, watching.kill)
    timer.start()
    try:
        assert watching.stdout is not None
        assert watching.stderr is not None
        seen: list[list[str]] = []
        for line in watching.stdout:
            seen.append(line.split())
            if len(seen) == 2:
                mill("queue", "enqueue", "emails", "again")
            if seen[-1][:2] == ["emails", "2"]:
                break
        head = ["queue", "size", "used", "bytes", "waiting", "in/s", "out/s", "full"]
        assert seen[:2] == [head, ["emails", "1", "0%", "5", "0", "0", "0", "0"]]
        # The second table comes after an empty line.
        assert seen[seen.index([]) + 1] == head
        assert watching.poll() is None
        # Whoever has seen enough hangs up, as `head` does.
        watching.stdout.close()
        watching.wait(PATIENCE_SECONDS)
        assert watching.stderr.read() == ""
    finally:
        timer.cancel()
        watching.kill()
        watching.wait()


def test_no_broker_is_said_plainly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, out, err = mill("queue", "list", "--server", f"http://127.0.0.1:{port}")
    assert (code, out) == (1, b"")
    assert err == (
        f"mill: broker_unreachable: no broker answers at http://127.0.0.1:{port}: Connection "
        "refused; start one with `mill serve`, or name another with --server or MILLSTREAM_SERVER\n"
    )


@pytest.mark.parametrize("server", ["127.0.0.1:8080", "ftp://x", "http://", "http://x:port", ""])
def test_a_server_that_is_no_url_is_a_usage_error(server: str) -> None:
    code, _, err = mill("queue", "list", "--server", server)
    assert code == 2
    assert "setting_invalid" in err


def test_what_is_no_broker_is_said_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as strange:
        url = f"http://127.0.0.1:{strange.getsockname()[1]}"
        asking = subprocess.Popen(
            [*MILL, "queue", "list", "--server", url],
            stderr=subprocess.PIPE,
            text=True,
            env=plain_environment(),
        )
        strange.settimeout(PATIENCE_SECONDS)
        connection, _ = strange.accept()
        with connection:
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nNope")
            _, err = asking.communicate(timeout=PATIENCE_SECONDS)
    assert asking.returncode == 1
    assert f"what answers at {url} is no broker" in err


def test_the_commands_need_nothing_of_the_server() -> None:
    program = (
        "import sys, millstream.cli.queue\n"
        "print(sorted({'fastapi', 'uvicorn', 'uvloop', 'structlog', 'crc32c', 'rich.live',"
        " 'prometheus_client', 'httptools'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
