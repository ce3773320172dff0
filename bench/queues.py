"""`mill bench queues`: queues over HTTP and WebSocket, against Redis lists over its own protocol.

The load comes from programs that are quicker than either server: `wrk` for HTTP and
`redis-benchmark` for Redis, with 64 connections and one message a request, or with one connection;
and from `open_load.py` where requests come whether or not there are answers.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack

from bench import queue_sockets
from bench.harness import Bench, Goal, Line, Measurement, Peer, Unit, alternate
from bench.harness import make_line as line_of
from bench.open_load import Load, Times, on_time
from bench.open_load import run as run_load
from bench.servers import (
    CONNECTIONS,
    QUEUE_ROOM,
    Broker,
    LoadRun,
    broker,
    found,
    redis_or_why,
    wrk,
)

MESSAGE_BYTES = 100
BATCH = 100
# Messages a request, when a queue is only to be filled.
FILL = 10_000
# Of the open load; the goals hold at this rate.
RATE = 10_000
# A load program that is later than this was held up by the machine, and so were its answers.
CALM_MS = 0.1
# Messages a second that no run takes out of a queue, one by one and in batches.
RATE_MOST = 300_000
BATCH_RATE_MOST = 2_000_000

MESSAGES_PER_SECOND = Unit("messages/s")
MEBIBYTES = Unit("MiB", is_higher_better=False)
MILLISECONDS = Unit("ms", is_higher_better=False)
MICROSECONDS = Unit("us", is_higher_better=False)
PERCENT = Unit("% of a core", is_higher_better=False)


def single_messages(bench: Bench) -> Iterator[Line]:
    """One message a request, in and out, as raw bytes and as JSON."""
    seconds, scratch = bench.scale.seconds, bench.scratch
    with ExitStack() as stack:
        ours = stack.enter_context(broker(scratch, *QUEUE_ROOM))
        peer, why = redis_or_why(bench, stack)
        count = round(80_000 * seconds)
        if peer is not None:
            redis_benchmark(peer, "lpush", 2 * count)

        def dequeue() -> float:
            _fill(ours, "default", RATE_MOST, seconds)
            rate = wrk(scratch, f"{ours.url}/dequeue", None, seconds).rate
            _must_hold(ours, "default", 1)
            return rate

        sides = {
            "in": lambda: wrk(scratch, f"{ours.url}/enqueue", raw_body(), seconds).rate,
            "out": dequeue,
            "json": lambda: (
                wrk(scratch, f"{ours.url}/queues/j/enqueue", json_body(1), seconds).rate
            ),
        }
        if peer is not None:
            sides["lpush"] = lambda: redis_benchmark(peer, "lpush", count).rate
            sides["rpop"] = lambda: redis_benchmark(peer, "rpop", count).rate
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


def one_connection(bench: Bench) -> Iterator[Line]:
    """One request at a time: what a program sees that waits for each answer."""
    seconds, scratch = bench.scale.seconds, bench.scratch
    with ExitStack() as stack:
        ours = stack.enter_context(broker(scratch, *QUEUE_ROOM))
        peer, why = redis_or_why(bench, stack)
        count = round(10_000 * seconds)

        def dequeue() -> float:
            _fill(ours, "default", RATE_MOST, seconds)
            p50_us = wrk(scratch, f"{ours.url}/dequeue", None, seconds, connections=1).p50_us
            _must_hold(ours, "default", 1)
            return p50_us

        sides = {
            "in": lambda: (
                wrk(scratch, f"{ours.url}/enqueue", raw_body(), seconds, connections=1).p50_us
            ),
            "out": dequeue,
        }
        if peer is not None:
            sides["lpush"] = lambda: redis_benchmark(peer, "lpush", count, 1).p50_us
            sides["rpop"] = lambda: redis_benchmark(peer, "rpop", count, 1).p50_us
        values = alternate(sides, bench.scale.runs)
    for name, side, command in (("enqueue", "in", "lpush"), ("dequeue", "out", "rpop")):
        yield line_of(
            f"http.one-connection-{name}",
            mode="memory",
            unit=MICROSECONDS,
            values=values[side],
            peer=Peer(f"Redis {command.upper()}, p50", values.get(command, ()), why),
            goal=Goal("ratio at most", 2),
            taken="median",
            note="p50",
        )


def open_load(bench: Bench) -> Iterator[Line]:
    """Ten thousand requests a second, whether or not answers come."""
    count = round(RATE * min(bench.scale.seconds, 1.0))
    with ExitStack() as stack:
        ours = stack.enter_context(broker(bench.scratch, *QUEUE_ROOM))
        peer, why = redis_or_why(bench, stack)
        loads = {
            "http-enqueue": Load(ours.port, "http-enqueue", RATE, count),
            "http-dequeue": Load(ours.port, "http-dequeue", RATE, count),
        }
        if peer is not None:
            loads["redis-lpush"] = Load(peer, "redis-lpush", RATE, count)
            loads["redis-rpop"] = Load(peer, "redis-rpop", RATE, count)
        # In before out, of each: then a queue never runs dry.
        rounds = [
            {side: run_load(load) for side, load in loads.items()}
            for _ in range(bench.scale.many_runs)
        ]
    times = {side: [one[side] for one in rounds] for side in loads}
    for name, side, command, share, goal_ms in (
        ("enqueue-p50", "http-enqueue", "redis-lpush", "p50", 0.2),
        ("enqueue-p99", "http-enqueue", "redis-lpush", "p99", 1.0),
        ("dequeue-p99", "http-dequeue", "redis-rpop", "p99", 1.0),
    ):
        calm, note = on_time(times[side], CALM_MS)
        calm_peer, _ = on_time(times.get(command, []), CALM_MS)
        yield line_of(
            f"http.open-{name}",
            mode="memory",
            unit=MILLISECONDS,
            values=[_of(one, share) for one in calm],
            peer=Peer(f"Redis, {share}", [_of(one, share) for one in calm_peer], why),
            goal=Goal("value at most", goal_ms),
            taken="median",
            note=f"{RATE} requests/s; {note}",
        )


def _of(times: Times, share: str) -> float:
    return times.p50 if share == "p50" else times.p99


def batches(bench: Bench) -> Iterator[Line]:
    """A hundred messages a request."""
    seconds, scratch = bench.scale.seconds, bench.scratch
    with broker(scratch, *QUEUE_ROOM) as ours:
        path = "/queues/many"
        body = json_body(BATCH)

        def enqueue() -> float:
            ours.post(f"{path}/enqueue/batch", json_body(2))
            ours.post(f"{path}/clear")
            return BATCH * wrk(scratch, f"{ours.url}{path}/enqueue/batch", body, seconds).rate

        def dequeue() -> float:
            _fill(ours, "many", BATCH_RATE_MOST, seconds / 2)
            url = f"{ours.url}{path}/dequeue?max={BATCH}"
            rate = BATCH * wrk(scratch, url, None, seconds / 2).rate
            # Every answer had all its messages, unless the last ones are gone.
            _must_hold(ours, "many", BATCH)
            return rate

        enqueue()
        values = alternate({"in": enqueue, "out": dequeue}, bench.scale.runs)
    for name, side in (("http.enqueue-batch", "in"), ("http.dequeue-batch", "out")):
        yield line_of(
            name,
            mode="memory",
            unit=MESSAGES_PER_SECOND,
            values=values[side],
            goal=Goal("value at least", 500_000),
            note=f"{BATCH} messages a request",
        )


def memory(bench: Bench) -> Iterator[Line]:
    """A broker that does nothing, and one that holds a million messages."""
    count = 1_000_000 if bench.scale.name == "full" else 100_000
    with broker(bench.scratch, *QUEUE_ROOM) as ours:
        idle = ours.resident_mib()
        seconds = 5 * bench.scale.seconds
        before_s = ours.cpu_s()
        time.sleep(seconds)
        share = 100 * (ours.cpu_s() - before_s) / seconds
        body = json_body(1000)
        for _ in range(count // 1000):
            ours.post("/queues/held/enqueue/batch", body)
        held = ours.resident_mib() - idle
    yield line_of(
        "memory.idle",
        mode="memory",
        unit=MEBIBYTES,
        values=[idle],
        goal=Goal("value at most", 80 * 1e6 / 2**20),
    )
    yield line_of(
        "cpu.idle",
        mode="memory",
        unit=PERCENT,
        values=[share],
        goal=Goal("value at most", 1),
        note=f"over {seconds:g} s",
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
    with broker(bench.scratch, "--queues-max", "20000") as ours:
        for number in range(count):
            ours.post(f"/queues/q{number}/enqueue", json_body(1))
        times = []
        for _ in range(10):
            start = time.perf_counter()
            ours.get("/metrics")
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
    Measurement(("http.one-connection-enqueue", "http.one-connection-dequeue"), one_connection),
    Measurement(
        ("http.open-enqueue-p50", "http.open-enqueue-p99", "http.open-dequeue-p99"), open_load
    ),
    Measurement(("http.enqueue-batch", "http.dequeue-batch"), batches),
    Measurement(("memory.idle", "cpu.idle", "memory.messages"), memory),
    Measurement(("metrics.10000-queues",), many_queues),
    *queue_sockets.MEASUREMENTS,
)


# ---- loads


def _fill(ours: Broker, name: str, rate: int, seconds: float) -> None:
    """Enough for a run of `wrk`, which takes whole seconds, at that rate."""
    missing = rate * max(1, round(seconds)) - _size(ours, name)
    body = json_body(FILL)
    for _ in range(missing // FILL + 1):
        ours.post(f"/queues/{name}/enqueue/batch", body)


def _must_hold(ours: Broker, name: str, count: int) -> None:
    if _size(ours, name) < count:
        raise RuntimeError(f"the queue {name} ran dry: some answers had no messages")


def _size(ours: Broker, name: str) -> int:
    return int(json.loads(ours.get(f"/queues/{name}"))["size"])


def redis_benchmark(port: int, command: str, count: int, connections: int = CONNECTIONS) -> LoadRun:
    program = ["redis-benchmark", "-p", str(port), "-t", command, "-c", str(connections)]
    program += ["-n", str(max(1000, count)), "-d", str(MESSAGE_BYTES), "--csv"]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    row = found(rf'(?m)^("{command.upper()}.*)$', output).replace('"', "").split(",")
    # Name, rate, and in milliseconds: average, least, p50, p95, p99, most.
    return LoadRun(float(row[1]), float(row[4]) * 1000)


def raw_body() -> bytes:
    return b"x" * MESSAGE_BYTES


def json_body(count: int) -> bytes:
    payload = "x" * (MESSAGE_BYTES - 2)
    body = {"payload": payload} if count == 1 else {"payloads": [payload] * count}
    return json.dumps(body).encode()
