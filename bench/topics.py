"""`mill bench topics`: topics over HTTP and through the Python client, against Redis streams.

The load on HTTP comes from `wrk`, that on Redis from `redis-benchmark`: both are quicker than
either server. The Python client has redis-py as its peer, in the same process.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench import topic_groups, topic_latency
from bench.harness import Bench, Goal, Line, Measurement, NotMeasured, Peer, Unit, alternate
from bench.harness import make_line as line_of
from bench.servers import CONNECTIONS, broker, found, redis_or_why, running_broker, wrk
from bench.topic_groups import ready_seconds
from millstream.client import AsyncClient, Client

SMALL_BYTES = 100
LARGE_BYTES = 1024
PIPELINE = 500
# What an XRANGE asks for at a time: more of it was not quicker.
RANGE = 1000
ALWAYS = ("--appendonly", "yes", "--appendfsync", "always")
NEVER = ("--appendonly", "no")

RECORDS_PER_SECOND = Unit("records/s")
SECONDS = Unit("s", is_higher_better=False)


def http_publish(bench: Bench) -> Iterator[Line]:
    """One record a request, each on disk before its answer."""
    seconds = bench.scale.seconds
    with ExitStack() as stack:
        url = stack.enter_context(broker(bench.scratch)).url
        for partitions in (1, 3, 64):
            create(url, f"t{partitions}", partitions, "every")
        port, why = redis_or_why(bench, stack, *ALWAYS)
        sides: dict[str, Callable[[], float]] = {
            str(partitions): partial(publish_rate, bench.scratch, url, f"t{partitions}", seconds)
            for partitions in (1, 3, 64)
        }
        if port is not None:
            sides["xadd"] = lambda: xadd_rate(port, seconds)
        values = alternate(sides, bench.scale.runs)
    redis = "Redis XADD, appendfsync always, 64 clients, unpipelined"
    yield line_of(
        "http.publish",
        mode="fsync every",
        unit=RECORDS_PER_SECOND,
        values=values["3"],
        peer=Peer(redis, values.get("xadd", ()), why),
        goal=Goal("ratio at least", 0.9),
        note="3 partitions, 64 connections",
    )
    yield line_of(
        "http.publish-64-partitions",
        mode="fsync every",
        unit=RECORDS_PER_SECOND,
        values=values["64"],
        peer=Peer("the same on 1 partition", values["1"]),
        goal=Goal("ratio at least", 0.8),
    )


def client_publish(bench: Bench) -> Iterator[Line]:
    """The Python client's producer, with its own batches."""
    count = _count(bench, 400_000)
    value = b"x" * SMALL_BYTES
    with ExitStack() as stack:
        url = stack.enter_context(broker(bench.scratch)).url
        create(url, "t", 3, "none")
        redis, why = redis_py(bench, stack, *NEVER)
        sides = {"ours": lambda: asyncio.run(produce(url, value, count))}
        if redis is not None:
            sides["xadd"] = lambda: _xadd_pipelines(redis, value, count)
        values = alternate(sides, bench.scale.runs)
    yield line_of(
        "client.publish",
        mode="fsync none",
        unit=RECORDS_PER_SECOND,
        values=values["ours"],
        peer=Peer(f"redis-py XADD, pipelines of {PIPELINE}", values.get("xadd", ()), why),
        goal=Goal("ratio at least", 2.0),
        note=f"{SMALL_BYTES} B, 3 partitions",
    )


def client_read(bench: Bench) -> Iterator[Line]:
    """Records of 1 KiB, to the end."""
    count = _count(bench, 100_000)
    value = b"x" * LARGE_BYTES
    with ExitStack() as stack:
        url = stack.enter_context(broker(bench.scratch)).url
        create(url, "t", 1, "none")
        asyncio.run(produce(url, value, count))
        redis, why = redis_py(bench, stack, *NEVER)
        sides = {"ours": lambda: asyncio.run(_consume(url, count))}
        if redis is not None:
            _xadd_pipelines(redis, value, count)
            sides["xrange"] = lambda: _xrange(redis, count)
        values = alternate(sides, bench.scale.runs)
    yield line_of(
        "client.read",
        mode="fsync none",
        unit=RECORDS_PER_SECOND,
        values=values["ours"],
        peer=Peer(f"redis-py XRANGE, {RANGE} at a time", values.get("xrange", ()), why),
        goal=Goal("ratio at least", 2.0),
        note=f"{LARGE_BYTES} B",
    )


def many_partitions(bench: Bench) -> Iterator[Line]:
    """A thousand partitions, against ten; and how long a start takes with them."""
    many = 1000 if bench.scale.name != "smoke" else 50
    data = bench.scratch / "many"
    with running_broker(data) as ours:
        for name, partitions in (("few", 10), ("many", many)):
            create(ours.url, name, partitions, "none")
        values = alternate(
            {
                name: partial(publish_rate, bench.scratch, ours.url, name, bench.scale.seconds)
                for name in ("few", "many")
            },
            bench.scale.runs,
        )
    starts = [ready_seconds(data) for _ in range(min(3, bench.scale.runs))]
    yield line_of(
        "partitions.throughput",
        mode="fsync none",
        unit=RECORDS_PER_SECOND,
        values=values["many"],
        peer=Peer("the same on 10 partitions", values["few"]),
        goal=Goal("ratio at least", 0.8),
        note=f"{many} partitions, one record a request",
    )
    yield line_of(
        "partitions.start",
        mode="fsync none",
        unit=SECONDS,
        values=starts,
        taken="median",
        goal=Goal("value at most", 3.0),
        note=f"{many} partitions, until the broker is ready",
    )


MEASUREMENTS = (
    Measurement(("http.publish", "http.publish-64-partitions"), http_publish),
    Measurement(("client.publish",), client_publish),
    Measurement(("client.read",), client_read),
    Measurement(("latency.p50", "latency.p99"), topic_latency.publish_latency),
    Measurement(("partitions.throughput", "partitions.start"), many_partitions),
    Measurement(("rebalance.join", "rebalance.leave", "rebalance.kill"), topic_groups.rebalances),
    Measurement(("offsets.start",), topic_groups.many_offsets),
)


# ---- loads


def create(url: str, name: str, partitions: int, fsync: str) -> None:
    with Client(url) as client:
        client.topics.create(name, partitions=partitions, settings={"fsync": fsync})


def publish_rate(scratch: Path, url: str, topic: str, seconds: float) -> float:
    body = b"x" * SMALL_BYTES
    path = f"/v1/topics/{topic}/messages"
    return wrk(scratch, url + path, body, seconds, media="application/octet-stream").rate


def xadd_rate(port: int, seconds: float) -> float:
    """One record a command, as many clients as connections."""
    count = max(5_000, round(40_000 * seconds))
    program = ["redis-benchmark", "-p", str(port), "-c", str(CONNECTIONS), "-n", str(count)]
    program += ["--csv", "xadd", "t", "*", "v", "x" * SMALL_BYTES]
    output = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    return float(found(r'(?m)^"xadd[^"]*","([\d.]+)"', output))


async def produce(url: str, value: bytes, count: int, topic: str = "t") -> float:
    async with AsyncClient(url) as client, client.producer() as producer:
        await (await producer.send(topic, value))
        start = time.perf_counter()
        for _ in range(count):
            await producer.send(topic, value)
        await producer.flush()
        seconds = time.perf_counter() - start
        if producer.statistics().delivered != count + 1:
            raise RuntimeError(f"not all were delivered: {producer.statistics()}")
    return count / seconds


async def _consume(url: str, count: int) -> float:
    async with AsyncClient(url) as client:
        start = time.perf_counter()
        got = 0
        async for _ in client.read("t"):
            got += 1
        seconds = time.perf_counter() - start
    if got < count:
        raise RuntimeError(f"read {got} of {count}")
    return got / seconds


def redis_py(bench: Bench, stack: ExitStack, *flags: str) -> tuple[Any, str | None]:
    try:
        import redis
    except ImportError:
        return None, "redis-py is missing: pip install redis"
    port, why = redis_or_why(bench, stack, *flags)
    return (None, why) if port is None else (redis.Redis(port=port), None)


def _xadd_pipelines(redis: Any, value: bytes, count: int) -> float:
    redis.delete("t")
    start = time.perf_counter()
    for _ in range(count // PIPELINE):
        pipeline = redis.pipeline(transaction=False)
        for _ in range(PIPELINE):
            pipeline.xadd("t", {"v": value})
        pipeline.execute()
    return count // PIPELINE * PIPELINE / (time.perf_counter() - start)


def _xrange(redis: Any, count: int) -> float:
    start = time.perf_counter()
    got, position = 0, "-"
    while rows := redis.xrange("t", position, "+", count=RANGE):
        got += len(rows)
        position = "(" + rows[-1][0].decode()
    seconds = time.perf_counter() - start
    if got < count // PIPELINE * PIPELINE:
        raise NotMeasured(f"Redis gave {got} of {count}")
    return got / seconds


def _count(bench: Bench, full: int) -> int:
    return {"full": full, "quick": full // 4, "smoke": 2 * PIPELINE}[bench.scale.name]
