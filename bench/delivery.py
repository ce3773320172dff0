"""`mill bench delivery`: work queues, against consumer groups of Redis streams.

Every grant and every settling is journalled, as the topic's mode says; Redis logs both likewise
where it syncs (`appendfsync always`), and nowhere where it does not.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

from bench import delivery_lanes, schedules, topics
from bench.harness import Bench, Goal, Line, Measurement, Peer, Unit, alternate
from bench.harness import make_line as line_of
from bench.servers import CONNECTIONS, broker, found, redis_or_why, wrk_script
from millstream.client import AsyncClient

SMALL_BYTES = 100
BATCH = 100
PIPELINE = 500
PARTITIONS = 3
# More than any run has in flight, so that the settings limit none.
FLAGS = ("--group-inflight-max", "1000000", "--receive-records-max", "1000")
# Of each record that Redis acknowledges, so many are pending: 39 of 40 draws find one.
PENDING_SHARE = 20
# One group reads what the other has been given already.
REDIS_STREAM = """
local count, value = %d, string.rep("x", %d)
redis.call("DEL", "t")
for number = 1, count do redis.call("XADD", "t", "0-" .. number, "v", value) end
redis.call("XGROUP", "CREATE", "t", "g", "0")
redis.call("XGROUP", "CREATE", "t", "h", "0")
redis.call("XREADGROUP", "GROUP", "h", "c", "COUNT", count, "STREAMS", "t", ">")
return count
"""
MODES = {"none": topics.NEVER, "every": topics.ALWAYS}

RECORDS_PER_SECOND = Unit("records/s")

# Receives one record and acknowledges it with the next request: `wrk` calls `response` for each
# answer, and `request` for what a free connection sends next, whichever that is. Requests are put
# together by hand, because `wrk.format` costs more than a broker takes to answer.
ONE_BY_ONE = """
local receipts, left = {}, 0
local find, sub = string.find, string.sub
local receive, ack
function init()
  local head = {["Content-Type"] = "application/json"}
  receive = wrk.format("POST", "/v1/groups/%(group)s/receive", head,
                       '{"topics":["%(topic)s"],"visibility_ms":600000}')
  ack = "POST /v1/messages/ack HTTP/1.1\\r\\nHost: " .. wrk.headers["Host"] ..
        "\\r\\nContent-Type: application/json\\r\\nContent-Length: "
end
function request()
  if left == 0 then return receive end
  local receipt = receipts[left]
  left = left - 1
  return ack .. (#receipt + 14) .. '\\r\\n\\r\\n{"receipt":"' .. receipt .. '"}'
end
function response(status, headers, body)
  local _, before = find(body, '"receipt":"', 80, true)
  if before ~= nil then
    left = left + 1
    receipts[left] = sub(body, before + 1, find(body, '"', before + 1, true) - 1)
  end
end
"""


def batches(bench: Bench) -> Iterator[Line]:
    """A worker that receives a hundred and acknowledges a hundred, through the Python client."""
    for mode, flags in MODES.items():
        count = _count(bench, 100_000 if mode == "none" else 50_000)
        with ExitStack() as stack:
            url = stack.enter_context(broker(bench.scratch, *FLAGS)).url
            feed = _Feed(url, mode, bench.scale.runs * count)
            redis, why = topics.redis_py(bench, stack, *flags)
            sides: dict[str, Callable[[], float]] = {
                "ours": lambda feed=feed, count=count: feed.work(count)  # type: ignore[misc]
            }
            if redis is not None:
                _fill_stream(redis, bench.scale.runs * count)
                sides["redis"] = partial(_read_group, redis, count)
            values = alternate(sides, bench.scale.runs)
        yield line_of(
            f"batches.{mode}",
            mode=f"fsync {mode}",
            unit=RECORDS_PER_SECOND,
            values=values["ours"],
            peer=Peer(f"redis-py XREADGROUP + XACK, {_redis(mode)}", values.get("redis", ()), why),
            goal=Goal("ratio at least", 1.0),
            note=f"{SMALL_BYTES} B, received and acknowledged in batches of {BATCH}",
        )


def one_by_one(bench: Bench) -> Iterator[Line]:
    """One record a request over HTTP, and another request for its acknowledgement."""
    seconds = bench.scale.seconds
    for mode, flags in MODES.items():
        with ExitStack() as stack:
            url = stack.enter_context(broker(bench.scratch, *FLAGS)).url
            # Nothing is so quick that it would come to the end.
            feed = _Feed(url, mode, round(bench.scale.runs * max(1.0, seconds) * 60_000))
            script = ONE_BY_ONE % {"group": "g", "topic": feed.topic}
            port, why = redis_or_why(bench, stack, *flags)
            sides: dict[str, Callable[[], float]] = {
                "ours": lambda url=url, script=script: (  # type: ignore[misc]
                    wrk_script(bench.scratch, url, script, seconds).rate / 2
                )
            }
            if port is not None:
                sides["redis"] = partial(_redis_pairs, port, seconds)
            values = alternate(sides, bench.scale.runs)
        yield line_of(
            f"single.{mode}",
            mode=f"fsync {mode}",
            unit=RECORDS_PER_SECOND,
            values=values["ours"],
            peer=Peer(
                f"Redis XREADGROUP + XACK, {_redis(mode)}, {CONNECTIONS} clients, unpipelined",
                values.get("redis", ()),
                why,
            ),
            goal=Goal("ratio at least", 0.7),
            note=f"HTTP, {CONNECTIONS} connections, two requests a record",
        )


def members(bench: Bench) -> Iterator[Line]:
    """One worker, and many that share the same topic."""
    count = _count(bench, 100_000)
    crowd = (1, 8, 64)
    with broker(bench.scratch, *FLAGS) as ours:
        feed = _Feed(ours.url, "none", len(crowd) * bench.scale.runs * count)
        values = alternate(
            {str(number): partial(feed.work, count, members=number) for number in crowd},
            bench.scale.runs,
        )
    for number in crowd[1:]:
        yield line_of(
            f"members.{number}",
            mode="fsync none",
            unit=RECORDS_PER_SECOND,
            values=values[str(number)],
            peer=Peer("the same with 1 member", values["1"]),
            goal=Goal("ratio at least", 0.8),
        )


def backlog(bench: Bench) -> Iterator[Line]:
    """A worker with little before it, and one with millions of records."""
    count = _count(bench, 100_000)
    many = {"full": 10_000_000, "quick": 2_000_000, "smoke": 5_000}[bench.scale.name]
    with broker(bench.scratch, *FLAGS) as ours:
        sides = {
            "few": _Feed(ours.url, "none", bench.scale.runs * count, topic="few"),
            "many": _Feed(ours.url, "none", many, topic="many"),
        }
        values = alternate(
            {name: partial(feed.work, count) for name, feed in sides.items()}, bench.scale.runs
        )
        resident = ours.resident_mib()
    yield line_of(
        "backlog",
        mode="fsync none",
        unit=RECORDS_PER_SECOND,
        values=values["many"],
        peer=Peer("the same with only what is received", values["few"]),
        goal=Goal("ratio at least", 0.8),
        note=f"{many:,} records; the broker has {resident:,.0f} MiB then",
    )


MEASUREMENTS = (
    Measurement(("batches.none", "batches.every"), batches),
    Measurement(("single.none", "single.every"), one_by_one),
    Measurement(("members.8", "members.64"), members),
    Measurement(("backlog",), backlog),
    Measurement(("lanes.shares", "lanes.longest-gap"), delivery_lanes.shares),
    Measurement(("lanes.critical-p99",), delivery_lanes.critical_wait),
    *schedules.MEASUREMENTS,
)


# ---- loads


class _Feed:
    """A topic with records enough for all runs, and the group that works them off."""

    def __init__(self, url: str, mode: str, count: int, topic: str = "t") -> None:
        self.url = url
        self.topic = topic
        topics.create(url, topic, PARTITIONS, mode)
        asyncio.run(topics.produce(url, b"x" * SMALL_BYTES, count, topic=topic))

    def work(self, count: int, *, members: int = 1) -> float:
        """Records a second that are received and acknowledged."""
        return asyncio.run(self._work(count, members))

    async def _work(self, count: int, members: int) -> float:
        left = count

        async def member(name: str) -> None:
            nonlocal left
            while left > 0:
                # Taken before it is asked for, so that no two members want the same rest.
                wanted = min(BATCH, left)
                left -= wanted
                while wanted:
                    messages = await client.receive(
                        self.topic, group="g", count=wanted, wait_s=5.0, member=name
                    )
                    if not messages:
                        raise RuntimeError("the topic has no more records")
                    refused = [one for one in await client.ack(messages) if one.error]
                    if refused:
                        raise RuntimeError(f"not acknowledged: {refused[0].error}")
                    wanted -= len(messages)

        async with AsyncClient(self.url, connections_max=max(8, members)) as client:
            start = time.perf_counter()
            await asyncio.gather(*(member(f"m{number}") for number in range(members)))
            return count / (time.perf_counter() - start)


def _redis(mode: str) -> str:
    return "appendfsync always" if mode == "every" else "no append-only file"


def _fill_stream(redis: Any, count: int) -> None:
    redis.delete("t")
    for first in range(0, count, PIPELINE):
        pipeline = redis.pipeline(transaction=False)
        for _ in range(min(PIPELINE, count - first)):
            pipeline.xadd("t", {"v": b"x" * SMALL_BYTES})
        pipeline.execute()
    redis.xgroup_create("t", "g", id="0")


def _read_group(redis: Any, count: int) -> float:
    start = time.perf_counter()
    done = 0
    while done < count:
        ((_, rows),) = redis.xreadgroup("g", "c", {"t": ">"}, count=BATCH)
        redis.xack("t", "g", *(id for id, _ in rows))
        done += len(rows)
    return done / (time.perf_counter() - start)


def _redis_pairs(port: int, seconds: float) -> float:
    """Records a second, when each takes one XREADGROUP and one XACK: they are measured one after
    the other, because redis-benchmark cannot send what it was answered. What it acknowledges is
    drawn from many more records that are pending, so that nearly every XACK has one to end."""
    count = max(5_000, round(20_000 * seconds))
    pending = PENDING_SHARE * count
    script = REDIS_STREAM % (pending, SMALL_BYTES)
    fill = ["redis-cli", "-p", str(port), "eval", script, "0"]
    subprocess.run(fill, capture_output=True, check=True)
    read = _redis_commands(
        port, count, "xreadgroup", "group", "g", "c", "count", "1", "streams", "t", ">"
    )
    acked = _redis_commands(port, count, "-r", str(pending), "xack", "t", "h", "0-__rand_int__")
    return 1 / (1 / read + 1 / acked)


def _redis_commands(port: int, count: int, *command: str) -> float:
    clients = min(CONNECTIONS, count)
    program = ["redis-benchmark", "-p", str(port), "-c", str(clients), "-n", str(count), "--csv"]
    output = subprocess.run([*program, *command], capture_output=True, text=True, check=True).stdout
    return float(found(r'(?m)^"(?!test")[^"]*","([\d.]+|inf)"', output))


def _count(bench: Bench, full: int) -> int:
    return {"full": full, "quick": full // 4, "smoke": 5 * BATCH}[bench.scale.name]
