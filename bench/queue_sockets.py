"""Queues over WebSocket: one producer and one consumer, and many consumers that only wait.

The client is `bench/socket_client.py`, in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

from bench.harness import Bench, Goal, Line, Measurement, Unit, alternate, make_line
from bench.servers import QUEUE_ROOM, Broker, broker, environment
from bench.socket_client import BATCH, MESSAGE_BYTES

IDLE = 1000
# A queue that every broker has.
QUEUE = "default"

MESSAGES_PER_SECOND = Unit("messages/s")
MEBIBYTES = Unit("MiB", is_higher_better=False)


def through(bench: Bench) -> Iterator[Line]:
    """Messages from one producer, through a queue, to one consumer."""
    with broker(bench.scratch, *QUEUE_ROOM) as server:
        values = alternate(
            {
                "text": lambda: _through(server, "text", bench.scale.seconds),
                "batch": lambda: _through(server, "batch", bench.scale.seconds),
            },
            bench.scale.runs,
        )
    for name, form, goal, what in (
        ("ws.single", "text", 120_000, "one message a frame, each confirmed"),
        ("ws.batch", "batch", 400_000, f"{BATCH} messages a frame, each frame confirmed"),
    ):
        yield make_line(
            name,
            mode="memory",
            unit=MESSAGES_PER_SECOND,
            values=values[form],
            goal=Goal("value at least", goal),
            note=f"JSON of {MESSAGE_BYTES} bytes, {what}",
        )


def idle(bench: Bench) -> Iterator[Line]:
    """What consumers cost that have nothing to do."""
    count = IDLE if bench.scale.name != "smoke" else 50
    with broker(bench.scratch, *QUEUE_ROOM) as server:
        before = server.resident_mib()
        client = subprocess.Popen(
            _client(server, "idle", str(count)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
        )
        with client:
            assert client.stdin is not None
            assert client.stdout is not None
            try:
                if client.stdout.readline() != b"%d\n" % count:
                    raise RuntimeError(f"the client did not open {count} connections")
                grown = server.resident_mib() - before
            finally:
                client.stdin.close()
    yield make_line(
        f"ws.idle-{IDLE}",
        mode="memory",
        unit=MEBIBYTES,
        values=[grown * IDLE / count],
        goal=Goal("value at most", 50 * 1e6 / 2**20),
        note=f"for {IDLE} consumers that wait, from {count}",
    )


MEASUREMENTS = (
    Measurement(("ws.single", "ws.batch"), through),
    Measurement((f"ws.idle-{IDLE}",), idle),
)


def _through(server: Broker, form: str, seconds: float) -> float:
    program = _client(server, "through", form, str(seconds))
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, env=environment(), timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"the client failed: {done.stderr.strip()}")
    return float(done.stdout)


def _client(server: Broker, command: str, *rest: str) -> list[str]:
    program = [sys.executable, "-m", "bench.socket_client"]
    return [*program, command, str(server.port), QUEUE, *rest]
