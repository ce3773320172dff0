"""The servers that workloads measure: a broker and a Redis, each in a process and a folder; and
`wrk`, which loads whatever speaks HTTP."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.harness import Bench, NotMeasured

CONNECTIONS = 64
# Flags for queues with room for more than any run enqueues: a full one would be measured as a
# quick one.
QUEUE_ROOM = (
    *("--queue-capacity", "50000000"),
    *("--queue-bytes-max", "16G"),
    *("--queues-bytes-max", "16G"),
)
START_SECONDS = 60.0


class Broker(NamedTuple):
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: bytes = b"") -> None:
        request = urllib.request.Request(self.url + path, body, method="POST")
        urllib.request.urlopen(request).read()

    def get(self, path: str) -> bytes:
        content: bytes = urllib.request.urlopen(self.url + path).read()
        return content

    def resident_mib(self) -> float:
        page = self.get("/metrics").decode()
        return float(found(r"(?m)^millstream_process_resident_memory_bytes (\S+)", page)) / 2**20

    def cpu_s(self) -> float:
        """What all its threads have had of the processors."""
        tasks = Path(f"/proc/{self.pid}/task")
        if not tasks.exists():
            raise NotMeasured("only Linux says how much of a processor a program had")
        return (
            sum(int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()) / 1e9
        )


@contextmanager
def broker(scratch: Path, *flags: str) -> Iterator[Broker]:
    """A broker on a free port; its folder goes with it."""
    data = scratch / "broker"
    try:
        with running_broker(data, *flags) as one:
            yield one
    finally:
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def running_broker(data: Path, *flags: str) -> Iterator[Broker]:
    """The same, on a folder that stays."""
    port = free_port()
    program = [sys.executable, "-m", "millstream", "serve", "--log-level", "error"]
    places = ["--data", str(data), "--http", f"127.0.0.1:{port}", "--metrics", "off"]
    process = subprocess.Popen([*program, *places, *flags])
    try:
        _wait_for(port, "the broker", process)
        yield Broker(port, process.pid)
    finally:
        process.terminate()
        process.wait()


def redis_or_why(bench: Bench, stack: ExitStack, *flags: str) -> tuple[int | None, str | None]:
    """The port of one that was started, or how to get it."""
    for program, package in (("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")):
        if shutil.which(program) is None:
            return None, f"{program} is missing: apt-get install {package}"
    return stack.enter_context(_redis(bench.scratch, *flags)), None


@contextmanager
def _redis(scratch: Path, *flags: str) -> Iterator[int]:
    port = free_port()
    folder = scratch / f"redis-{port}"
    folder.mkdir()
    program = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([*program, *flags], stdout=subprocess.DEVNULL)
    try:
        _wait_for(port, "redis-server", process)
        yield port
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(port: int, what: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.002)
        else:
            return
    raise NotMeasured(f"{what} did not start")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """`mill bench` finds this package beside its own; a new process has to be told."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# ---- loads


class LoadRun(NamedTuple):
    """What a load program found out."""

    rate: float
    p50_us: float


def wrk(
    scratch: Path,
    url: str,
    body: bytes | None,
    seconds: float,
    *,
    connections: int = CONNECTIONS,
    media: str | None = None,
) -> LoadRun:
    """A POST of a body, or a GET."""
    lines = ['wrk.method = "GET"'] if body is None else ['wrk.method = "POST"']
    if body is not None:
        lines.append(f"wrk.body = {json.dumps(body.decode())}")
    if media is not None:
        lines.append(f'wrk.headers["Content-Type"] = "{media}"')
    return wrk_script(scratch, url, "\n".join(lines), seconds, connections=connections)


def wrk_script(
    scratch: Path, url: str, text: str, seconds: float, *, connections: int = CONNECTIONS
) -> LoadRun:
    """What a script in Lua asks for. An answer that is no success fails the run, and so does a
    connection that breaks."""
    if shutil.which("wrk") is None:
        raise NotMeasured("wrk is missing: apt-get install wrk")
    script = scratch / "request.lua"
    script.write_text(text)
    span = f"{max(1, round(seconds))}s"
    program = ["wrk", "-t1", f"-c{connections}", f"-d{span}", "--latency", "-s", str(script), url]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    # It counts answers that took longer than two seconds too; those are no fault.
    if re.search(r"Non-2xx|Socket errors:.*(connect|read|write) [1-9]", output):
        raise RuntimeError(f"{url} refused requests:\n{output}")
    p50_us = float(found(r"50%\s+([\d.]+)", output))
    p50_us *= {"us": 1, "ms": 1e3, "s": 1e6}[found(r"50%\s+[\d.]+(us|ms|s)", output)]
    return LoadRun(float(found(r"Requests/sec:\s+([\d.]+)", output)), p50_us)


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in {text[:200]!r}")
    return match.group(1)
