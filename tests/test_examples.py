"""The examples do what they say, against a running broker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker_process import PATIENCE_SECONDS, BrokerProcess, plain_environment

EXAMPLES = Path(__file__).parent.parent / "examples"
# `go run` compiles first.
EXAMPLE_SECONDS = 4 * PATIENCE_SECONDS
# How a language's examples are run, and the program that must be there.
LANGUAGES = {
    "curl": (("sh",), "sh", "curl"),
    "python": ((sys.executable,), "py", sys.executable),
    "javascript": (("node",), "mjs", "node"),
    "go": (("go", "run"), "go", "go"),
    "ruby": (("ruby",), "rb", "ruby"),
}
# A machine without these fails; the others are skipped there.
ALWAYS = ("curl", "python", "javascript")
USERS = ("ada", "bob", "eve")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(str(tmp_path_factory.mktemp("examples"))) as process:
        yield process.wait_until_ready()


def environment(broker: BrokerProcess) -> dict[str, str]:
    return plain_environment({"MILLSTREAM_SERVER": broker.url("")})


def run(broker: BrokerProcess, language: str, verb: str) -> list[str]:
    program, suffix, needed = LANGUAGES[language]
    if shutil.which(needed) is None:
        assert language not in ALWAYS, f"{needed} is not installed"
        pytest.skip(f"{needed} is not installed, so the {language} examples were not run")
    done = subprocess.run(
        [*program, str(EXAMPLES / language / f"{verb}.{suffix}")],
        capture_output=True,
        text=True,
        timeout=EXAMPLE_SECONDS,
        env=environment(broker),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_produced_is_consumed(broker: BrokerProcess, language: str) -> None:
    assert run(broker, language, "produce") == [f"sent {user}@example.com" for user in USERS]
    assert run(broker, language, "consume") == [f"got {user}@example.com" for user in USERS]


def test_one_language_consumes_what_another_produced(broker: BrokerProcess) -> None:
    run(broker, "python", "produce")
    assert run(broker, "javascript", "consume") == [f"got {user}@example.com" for user in USERS]


def test_topics_with_the_client(broker: BrokerProcess) -> None:
    stored = run(broker, "python", "publish")
    assert len(stored) == 3
    assert all(line.startswith("stored in partition ") for line in stored)
    got = sorted(f"got {user}@example.com" for user in USERS)
    assert sorted(run(broker, "python", "subscribe")) == got
    assert run(broker, "python", "subscribe") == []
    first, *lines, last = run(broker, "python", "ordered")
    assert first.startswith("consumer ")
    assert (sorted(lines), last) == (got, "nothing more for now")


def test_the_page_in_a_browser_reaches_the_queue_through_its_own_site(
    broker: BrokerProcess,
) -> None:
    with subprocess.Popen(
        ["node", str(EXAMPLES / "javascript" / "site.mjs")],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(broker) | {"PORT": "0"},
    ) as site:
        try:
            assert site.stdout is not None
            url = site.stdout.readline().strip()
            assert 'fetch("/queues/emails/enqueue"' in httpx.get(url, timeout=PATIENCE_SECONDS).text
            # What a browser adds to the requests of that page.
            headers = {"Origin": url, "Sec-Fetch-Site": "same-origin"}
            sent = httpx.post(
                f"{url}/queues/emails/enqueue",
                content='{"payload":{"to":"x"}}',
                headers=headers,
                timeout=PATIENCE_SECONDS,
            )
            assert sent.status_code == 200
            taken = httpx.get(
                f"{url}/queues/emails/dequeue?timeout=20", headers=headers, timeout=PATIENCE_SECONDS
            )
            assert taken.json()["payload"] == {"to": "x"}
        finally:
            site.kill()


def test_every_example_is_on_the_page() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [
        os.path.relpath(path, EXAMPLES)
        for path in EXAMPLES.glob("*/*")
        if path.suffix not in (".html", ".pyc") and path.is_file()
    ]
    assert len(names) >= 11
    assert [name for name in names if name not in page] == []
