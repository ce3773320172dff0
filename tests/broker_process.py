"""A real broker in a process of its own, on free ports, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import httpx

# Long enough for a busy machine; a wait ends as soon as its condition holds.
PATIENCE_SECONDS = 60.0

MILL = (sys.executable, "-m", "millstream")


def wait_until(
    condition: Callable[[], object], what: str, seconds: float = PATIENCE_SECONDS
) -> None:
    """Wait for a condition, and fail with what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.01)


def plain_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without settings of whoever runs the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    kept.pop("NOTIFY_SOCKET", None)
    return kept | dict(extra or {})


class BrokerProcess:
    """`mill serve` with its data and its messages in a directory."""

    def __init__(
        self,
        directory: str,
        *flags: str,
        environment: Mapping[str, str] | None = None,
        program: tuple[str, ...] = MILL,
    ) -> None:
        self.data = os.path.join(directory, "data")
        self._messages_path = os.path.join(directory, f"messages-{time.monotonic_ns()}")
        arguments = ["--data", self.data, "--log-format", "json"]
        for listener in ("--http", "--metrics"):
            if listener not in flags:
                arguments += [listener, "127.0.0.1:0"]
        with open(self._messages_path, "wb") as messages:
            self.process = subprocess.Popen(
                [*program, "serve", *arguments, *flags],
                stdout=subprocess.DEVNULL,
                stderr=messages,
                env=plain_environment(environment),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_SECONDS)

    def output(self) -> str:
        with open(self._messages_path, encoding="utf-8") as messages:
            return messages.read()

    def messages(self, event: str | None = None) -> list[dict[str, Any]]:
        """What the broker logged, or only the messages of one event."""
        lines = [line for line in self.output().splitlines() if line.startswith("{")]
        messages = [json.loads(line) for line in lines if line.endswith("}")]
        return [message for message in messages if event in (None, message["event"])]

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first message of an event, once it is there."""

        def logged_or_ended() -> bool:
            return bool(self.messages(event)) or self.process.poll() is not None

        wait_until(logged_or_ended, f"the message {event!r}")
        found = self.messages(event)
        assert found, f"the broker ended without the message {event!r}:\n{self.output()}"
        return found[0]

    def wait_until_ready(self) -> Self:
        self.wait_for("ready")
        return self

    def url(self, path: str, *, listener: str = "http") -> str:
        wait_until(lambda: self._address(listener), f"the listener {listener}")
        scheme = "https" if self.messages("listening")[0]["tls"] else "http"
        return f"{scheme}://{self._address(listener)}{path}"

    @property
    def kafka(self) -> str:
        """Where Kafka's clients begin; the flag `--kafka` starts the listener."""
        wait_until(lambda: self._address("kafka"), "the listener kafka")
        return str(self._address("kafka"))

    @property
    def kafka_tls(self) -> str:
        """Where those begin that speak TLS, when there is `--kafka-tls`."""
        wait_until(lambda: self._address("kafka_tls"), "the listener kafka_tls")
        return str(self._address("kafka_tls"))

    def get(
        self, path: str, *, listener: str = "http", headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return httpx.get(
            self.url(path, listener=listener), headers=dict(headers or {}), timeout=PATIENCE_SECONDS
        )

    def put(self, path: str, page: object) -> httpx.Response:
        answer = httpx.put(self.url(path), json=page, timeout=PATIENCE_SECONDS)
        assert answer.status_code == 200, answer.text
        return answer

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; answers the exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_SECONDS)

    def _address(self, listener: str) -> str | None:
        listening = self.messages("listening")
        found = [str(m["address"]) for m in listening if m["listener"] == listener]
        return found[0] if found else None
