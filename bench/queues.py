"""`mill bench queues`: queues over HTTP, against Redis lists over its own protocol.

The load comes from programs that are quicker than either server: `wrk` for HTTP and
`redis-benchmark` for Redis, both with 64 connections and one message a request.
"""

from __future__ import annotations

import json
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

from bench.harness import Bench, Goal, Line, Measurement, NotMeasured, Peer, Unit, alternate
from bench.harness import make_line as line_of

CONNECTIONS = 64
MESSAGE_BYTES = 100
BATCH = 100
# More than any run enqueues: a full queue would be measured as a quick one.
CAPACITY = 50_000_000
BYTES_MAX = "16G"
START_SECONDS = 20.0

MESSAGES_PER_SECOND = Unit("messages/s")
MEBIBYTES = Unit("MiB", is_higher_better=False)
MILLISECONDS = Unit("ms", is_higher_better=False)


def single_messages(bench: Bench) -> Iterator[Line]:
    """One message a request, in and out, as raw bytes and as JSON."""
    _require("wrk")
    seconds = bench.scale.seconds
    with ExitStack() as stack:
        broker = stack.enter_context(_broker(bench.scratch))
        peer, why = _redis_or_why(bench, stack)
        fill = bench.scale.seconds * 4
        _wrk(bench.scratch, f"{broker}/enqueue", _raw_body(), fill)
        sides = {
            "in": lambda: _wrk(bench.scratch, f"{broker}/enqueue", _raw_body(), seconds),
            "out": lambda: _wrk(bench.scratch, f"{broker}/dequeue", None, seconds),
            "json": lambda: _wrk(
                bench.scratch, f"{broker}/queues/json/enqueue", _json_body(1), seconds
            ),
        }
        if peer is not None:
            sides["lpush"] = lambda: _redis_benchmark(peer, "lpush", seconds)
            sides["rpop"] = lambda: _redis_benchmark(peer, "rpop", seconds)
        values = alternate(sides, bench.scale.runs)
    for name, side, command, goal in (
        ("http.enqueue", "in", "lpush", 1.0),
        ("http.dequeue", "out", "rpop", 1.0),
        ("http.enqueue-json", "json", "lpush", 0.7),
    ):
        yield line_of(
            name,
            mode="memory",
            unit=MESSAGES_PER_SECOND,
            values=values[side],
            peer=Peer(f"Redis {command.upper()}, unpipelined", values.get(command, ()), why),
            goal=Goal("ratio at least", goal),
        )


def batches(bench: Bench) -> Iterator[Line]:
    """A hundred messages a request."""
    _require("wrk")
    with _broker(bench.scratch) as broker:
        url = f"{broker}/queues/many"
        values = alternate(
            {
                "in": lambda: (
                    BATCH
                    * _wrk(
                        bench.scratch,
                        f"{url}/enqueue/batch",
                        _json_body(BATCH),
                        bench.scale.seconds,
                    )
                ),
                "out": lambda: (
                    BATCH
                    * _wrk(
                        bench.scratch, f"{url}/dequeue?max={BATCH}", None, bench.scale.seconds / 2
                    )
                ),
            },
            bench.scale.runs,
        )
    for name, side in (("http.enqueue-batch", "in"), ("http.dequeue-batch", "out")):
        yield line_of(
            name,
            mode="memory",
            unit=MESSAGES_PER_SECOND,
            values=values[side],
            note="batches of 100; the goal is 500,000 messages/s",
        )


def memory(bench: Bench) -> Iterator[Line]:
    """A broker that does nothing, and one that holds a million messages."""
    count = 1_000_000 if bench.scale.name == "full" else 100_000
    with _broker(bench.scratch) as broker:
        idle = _resident_mib(broker)
        body = _json_body(1000)
        for _ in range(count // 1000):
            _post(f"{broker}/queues/held/enqueue/batch", body)
        held = _resident_mib(broker) - idle
    yield line_of(
        "memory.idle",
        mode="memory",
        unit=MEBIBYTES,
        values=[idle],
        goal=Goal("value at most", 80 * 1e6 / 2**20),
    )
    yield line_of(
        "memory.messages",
        mode="memory",
        unit=MEBIBYTES,
        values=[held * 1_000_000 / count],
        goal=Goal("value at most", 250 * 1e6 / 2**20),
        note=f"for a million messages of {MESSAGE_BYTES} bytes, from {count}",
    )


def many_queues(bench: Bench) -> Iterator[Line]:
    """The metrics page of a broker with ten thousand queues."""
    count = 10_000 if bench.scale.name != "smoke" else 100
    with _broker(bench.scratch, "--queues-max", "20000") as broker:
        for number in range(count):
            _post(f"{broker}/queues/q{number}/enqueue", _json_body(1))
        times = []
        for _ in range(10):
            start = time.perf_counter()
            _get(f"{broker}/metrics")
            times.append((time.perf_counter() - start) * 1000)
    yield line_of(
        "metrics.10000-queues",
        mode="memory",
        unit=MILLISECONDS,
        values=times,
        taken="median",
        goal=Goal("value at most", 50),
    )


MEASUREMENTS = (
    Measurement(("http.enqueue", "http.dequeue", "http.enqueue-json"), single_messages),
    Measurement(("http.enqueue-batch", "http.dequeue-batch"), batches),
    Measurement(("memory.idle", "memory.messages"), memory),
    Measurement(("metrics.10000-queues",), many_queues),
)


# ---- servers


@contextmanager
def _broker(scratch: Path, *flags: str) -> Iterator[str]:
    port = _free_port()
    program = [sys.executable, "-m", "millstream", "serve", "--log-level", "error"]
    places = ["--data", str(scratch / "broker"), "--http", f"127.0.0.1:{port}", "--metrics", "off"]
    room = ["--queue-capacity", str(CAPACITY), "--queue-bytes-max", BYTES_MAX]
    process = subprocess.Popen([*program, *places, *room, "--queues-bytes-max", BYTES_MAX, *flags])
    try:
        _wait_for(port, "the broker")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
        shutil.rmtree(scratch / "broker", ignore_errors=True)


def _redis_or_why(bench: Bench, stack: ExitStack) -> tuple[int | None, str | None]:
    for program, package in (("redis-server", "redis-server"), ("redis-benchmark", "redis-tools")):
        if shutil.which(program) is None:
            return None, f"{program} is missing: apt-get install {package}"
    return stack.enter_context(_redis(bench.scratch)), None


@contextmanager
def _redis(scratch: Path) -> Iterator[int]:
    port = _free_port()
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- loads


def _require(program: str) -> None:
    if shutil.which(program) is None:
        raise NotMeasured(f"{program} is missing: apt-get install {program}")


def _raw_body() -> bytes:
    return b"x" * MESSAGE_BYTES


def _json_body(count: int) -> bytes:
    payload = "x" * (MESSAGE_BYTES - 2)
    body = {"payload": payload} if count == 1 else {"payloads": [payload] * count}
    return json.dumps(body).encode()


def _wrk(scratch: Path, url: str, body: bytes | None, seconds: float) -> float:
    """Requests a second; an answer that is no success fails the run."""
    script = scratch / "request.lua"
    if body is None:
        script.write_text('wrk.method = "GET"\n')
    else:
        script.write_text(f'wrk.method = "POST"\nwrk.body = {json.dumps(body.decode())}\n')
    span = f"{max(1, round(seconds))}s"
    program = ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{span}", "-s", str(script), url]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output:
        raise RuntimeError(f"{url} refused requests:\n{output}")
    return float(_found(r"Requests/sec:\s+([\d.]+)", output))


def _redis_benchmark(port: int, command: str, seconds: float) -> float:
    count = max(10_000, round(80_000 * seconds))
    program = ["redis-benchmark", "-p", str(port), "-t", command, "-c", str(CONNECTIONS)]
    program += ["-n", str(count), "-d", str(MESSAGE_BYTES), "--csv"]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return float(_found(rf'"{command.upper()}[^"]*","([\d.]+)"', output))


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"no {pattern} in {text[:200]!r}")
    return match.group(1)


def _post(url: str, body: bytes) -> None:
    urllib.request.urlopen(urllib.request.Request(url, body, method="POST")).read()


def _get(url: str) -> bytes:
    content: bytes = urllib.request.urlopen(url).read()
    return content


def _resident_mib(broker: str) -> float:
    page = _get(f"{broker}/metrics").decode()
    found = _found(r"(?m)^millstream_process_resident_memory_bytes ([\d.e+]+)", page)
    return float(found) / 2**20
