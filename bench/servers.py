"""The servers that workloads measure: a broker and a Redis, each in a process and a folder."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.harness import Bench, NotMeasured

START_SECONDS = 60.0


@contextmanager
def broker(scratch: Path, *flags: str, folder: str = "broker") -> Iterator[str]:
    """A broker on a free port; its folder goes with it."""
    data = scratch / folder
    try:
        with running_broker(data, *flags) as url:
            yield url
    finally:
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def running_broker(data: Path, *flags: str) -> Iterator[str]:
    """The same, on a folder that stays."""
    port = free_port()
    program = [sys.executable, "-m", "millstream", "serve", "--log-level", "error"]
    places = ["--data", str(data), "--http", f"127.0.0.1:{port}", "--metrics", "off"]
    process = subprocess.Popen([*program, *places, *flags])
    try:
        wait_for(port, "the broker", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def redis(scratch: Path, *flags: str) -> Iterator[int]:
    port = free_port()
    folder = scratch / f"redis-{port}"
    folder.mkdir()
    program = ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([*program, *flags], stdout=subprocess.DEVNULL)
    try:
        wait_for(port, "redis-server", process)
        yield port
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def redis_or_why(bench: Bench, stack: ExitStack, *flags: str) -> tuple[int | None, str | None]:
    """Its port, or why there is none."""
    for program, package in (("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")):
        if shutil.which(program) is None:
            return None, f"{program} is missing: apt-get install {package}"
    return stack.enter_context(redis(bench.scratch, *flags)), None


def wait_for(port: int, what: str, process: subprocess.Popen[bytes]) -> None:
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


def require(program: str) -> None:
    if shutil.which(program) is None:
        raise NotMeasured(f"{program} is missing: apt-get install {program}")


def found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in {text[:200]!r}")
    return match.group(1)


def wrk(script: Path, url: str, connections: int, seconds: float) -> float:
    """Requests a second; an answer that is no success fails the run."""
    span = f"{max(1, round(seconds))}s"
    program = ["wrk", "-t1", f"-c{connections}", f"-d{span}", "-s", str(script), url]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"{url} refused requests:\n{output}")
    return float(found(r"Requests/sec:\s+([\d.]+)", output))
