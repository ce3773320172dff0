"""What the benchmarks of queues run: a broker, a Redis, and programs that load them."""

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
from typing import Any, NamedTuple

from bench.harness import Bench, NotMeasured

CONNECTIONS = 64
MESSAGE_BYTES = 100
# More than any run enqueues: a full queue would be measured as a quick one.
CAPACITY = 50_000_000
BYTES_MAX = "16G"
START_SECONDS = 20.0


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

    def queue_size(self, name: str) -> int:
        page: dict[str, Any] = json.loads(self.get(f"/queues/{name}"))
        return int(page["size"])

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
    port = free_port()
    program = [sys.executable, "-m", "millstream", "serve", "--log-level", "error"]
    places = ["--data", str(scratch / "broker"), "--http", f"127.0.0.1:{port}", "--metrics", "off"]
    room = ["--queue-capacity", str(CAPACITY), "--queue-bytes-max", BYTES_MAX]
    process = subprocess.Popen([*program, *places, *room, "--queues-bytes-max", BYTES_MAX, *flags])
    try:
        _wait_for(port, "the broker")
        yield Broker(port, process.pid)
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(scratch / "broker", ignore_errors=True)


def redis_or_why(bench: Bench, stack: ExitStack) -> tuple[int | None, str | None]:
    """The port of one that was started, or how to get it."""
    for program, package in (("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")):
        if shutil.which(program) is None:
            return None, f"{program} is missing: apt-get install {package}"
    return stack.enter_context(_redis(bench.scratch)), None


@contextmanager
def _redis(scratch: Path) -> Iterator[int]:
    port = free_port()
    process = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--dir", str(scratch)],
        stdout=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, "redis-server")
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait_for(port: int, what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise NotMeasured(f"{what} did not start")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- loads


class Wrk(NamedTuple):
    """What `wrk` found out."""

    rate: float
    p50_us: float


def wrk(
    scratch: Path, url: str, body: bytes | None, seconds: float, connections: int = CONNECTIONS
) -> Wrk:
    """An answer that is no success fails the run."""
    if shutil.which("wrk") is None:
        raise NotMeasured("wrk is missing: apt-get install wrk")
    script = scratch / "request.lua"
    if body is None:
        script.write_text('wrk.method = "GET"\n')
    else:
        script.write_text(f'wrk.method = "POST"\nwrk.body = {json.dumps(body.decode())}\n')
    span = f"{max(1, round(seconds))}s"
    program = ["wrk", "-t1", f"-c{connections}", f"-d{span}", "--latency", "-s", str(script), url]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output:
        raise RuntimeError(f"{url} refused requests:\n{output}")
    p50_us = float(found(r"50%\s+([\d.]+)", output))
    p50_us *= {"us": 1, "ms": 1e3, "s": 1e6}[found(r"50%\s+[\d.]+(us|ms|s)", output)]
    return Wrk(float(found(r"Requests/sec:\s+([\d.]+)", output)), p50_us)


class RedisRun(NamedTuple):
    """What `redis-benchmark` found out."""

    rate: float
    p50_us: float


def redis_benchmark(
    port: int, command: str, count: int, connections: int = CONNECTIONS
) -> RedisRun:
    program = ["redis-benchmark", "-p", str(port), "-t", command, "-c", str(connections)]
    program += ["-n", str(max(1000, count)), "-d", str(MESSAGE_BYTES), "--csv"]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    row = found(rf'(?m)^("{command.upper()}.*)$', output).replace('"', "").split(",")
    # Name, rate, and in milliseconds: average, least, p50, p95, p99, most.
    return RedisRun(float(row[1]), float(row[4]) * 1000)


def raw_body() -> bytes:
    return b"x" * MESSAGE_BYTES


def json_body(count: int) -> bytes:
    payload = "x" * (MESSAGE_BYTES - 2)
    body = {"payload": payload} if count == 1 else {"payloads": [payload] * count}
    return json.dumps(body).encode()


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in {text[:200]!r}")
    return match.group(1)


def environment() -> dict[str, str]:
    """`mill bench` finds this package beside its own; a new process has to be told."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
