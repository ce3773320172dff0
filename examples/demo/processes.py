"""Programs that the demo starts, and ends: each is in a session of its own, so that a Ctrl-C meets
only the demo, which then ends them in order, and with them whatever they started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

START_S_MAX = 60.0
END_S_MAX = 20.0


class Child:
    """A Python program, with what it says on its standard error in a file."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        heard: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.name = name
        self._arguments = arguments
        self._heard = heard
        self._process: subprocess.Popen[str] | None = None
        self._log: Path | None = None

    def start(self, folder: Path, stack: ExitStack) -> None:
        """It ends with the stack."""
        self._log = folder / f"{self.name}.log"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603  the demo's own programs
                [sys.executable, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if self._heard else log,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        stack.callback(self.end)
        if self._heard is not None:
            threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """What it tells on its standard output, a JSON object a line."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._heard is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._heard(json.loads(line))

    def tell(self, word: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log else []
        return lines[-1] if lines else "it said nothing"

    def kill(self) -> None:
        """At once, as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """In order if it can be, and then all that it has started."""
        assert self._process is not None
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S_MAX)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(broker: Child, server: str) -> None:
    deadline = time.monotonic() + START_S_MAX
    while broker.is_alive() and time.monotonic() < deadline:
        with suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(f"{server}/readyz", timeout=1).close()  # noqa: S310  http
            return
        time.sleep(0.05)
    raise RuntimeError(f"the broker did not start: {broker.last_words()}")


# ---- on the other side


def hear(word: str, then: Callable[[], None]) -> None:
    """Listen for a word of the parent, in a thread; without a parent there is nothing to do."""

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == word:
                then()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()


def end_with_parent() -> None:
    hear("", lambda: None)
