"""What the pages about Kafka's clients show is what happens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, plain_environment, wait_until
from clients.making import make_topic, produce
from clients.readers import require_kcat

DOCS = Path(__file__).parents[2] / "docs"
# What commands and programs find under these names is the broker of a test.
KAFKA, HTTP = "127.0.0.1:9092", "http://127.0.0.1:8080"


def blocks(page: str, language: str = "") -> list[str]:
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shell(broker: BrokerProcess, folder: Path, command: str) -> str:
    mill = folder / "mill"
    mill.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m millstream "$@"\n')
    mill.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-c", command.replace(KAFKA, broker.kafka).replace(HTTP, broker.url(""))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        env=plain_environment({"MILLSTREAM_SERVER": broker.url(""), "PATH": path}),
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def test_the_commands_of_the_page_do_what_it_says(broker: BrokerProcess, tmp_path: Path) -> None:
    require_kcat()
    shown = [one for one in blocks("kafka.md") if one[:2] == "$ "]
    serve, first, read, lanes, advertised, tls = shown
    for one in (serve, advertised, tls):
        # Flags that a broker takes; the one of this test has ports of its own.
        flags = re.findall(r"--[a-z-]+", one)
        assert flags
        told = shell(broker, tmp_path, "mill serve --help")
        assert all(flag in told for flag in flags)
    fill, consume = first.split("$ ")[1:]
    shell(broker, tmp_path, fill)
    command, *printed = consume.splitlines()
    # Records without a key go wherever their producer likes.
    assert sorted(shell(broker, tmp_path, command).splitlines()) == sorted(printed)
    command, answer = read.removeprefix("$ ").splitlines()
    page, expected = json.loads(shell(broker, tmp_path, command)), json.loads(answer)
    assert page.keys() == expected.keys()
    assert page["messages"][0].keys() == expected["messages"][0].keys()
    for command in lanes.removeprefix("$ ").splitlines():
        shell(broker, tmp_path, command.removeprefix("$ "))
    delayed = broker.get("/v1/topics/orders/delayed").json()["delayed"]
    assert [one["value"] for one in delayed] == ["call back"]
    url = broker.url("/v1/topics/orders/messages?limit=10")
    messages = httpx.get(url, timeout=PATIENCE_SECONDS).json()["messages"]
    assert [one["value"] for one in messages if one["lane"] == "critical"] == ["at once"]


@contextmanager
def running(broker: BrokerProcess, program: str) -> Iterator[subprocess.Popen[str]]:
    """A program of a page, until the test has seen enough of it."""
    source = program.replace(KAFKA, broker.kafka)
    with subprocess.Popen(
        [sys.executable, "-u", "-c", source],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["classic", "share"])
def test_the_programs_of_the_page_about_groups_work(broker: BrokerProcess, kind: str) -> None:
    classic, share = blocks("kafka-groups.md", "python")
    program, topic, group = {
        "classic": (classic, "orders-of-groups", "billing"),
        "share": (share, "mails", "mailers"),
    }[kind]
    make_topic(broker, topic, 3)
    produce(broker, topic, [b"hello"])
    with running(broker, program.replace('"orders"', f'"{topic}"')) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "b'hello'\n"
        if kind == "share":
            path = f"/v1/groups/{group}/offsets"
            wait_until(
                lambda: (
                    {"mails", 0, 1}
                    <= {
                        value
                        for one in broker.get(path).json()["offsets"]
                        for value in one.values()
                    }
                ),
                "the record to be done",
            )
