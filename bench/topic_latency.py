"""How long a publish takes at half of the highest rate, open loop.

Requests are due at even distances, whatever the broker does; the latency of each counts from when
it was due, so that a broker that stalls cannot hide it by slowing the load down.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench import topics
from bench.harness import Bench, Goal, Line, Unit
from bench.harness import make_line as line_of
from bench.open_load import Load, on_time
from bench.open_load import run as run_load
from bench.servers import CONNECTIONS, broker

MILLISECONDS = Unit("ms", is_higher_better=False)
PARTITIONS = 3
# A tenth of the goal for the slowest hundredth. Answers come in bundles, one for each sync, and
# reading one takes the program a few tenths of a millisecond.
CALM_MS = 1.0


def publish_latency(bench: Bench) -> Iterator[Line]:
    seconds = max(1.0, bench.scale.seconds)
    with broker(bench.scratch) as ours:
        topics.create(ours.url, "t", PARTITIONS, "every")
        highest = max(
            topics.publish_rate(bench.scratch, ours.url, "t", bench.scale.seconds)
            for _ in range(min(3, bench.scale.runs))
        )
        rate = round(highest / 2)
        load = Load(ours.port, "http-publish", rate, round(rate * seconds), CONNECTIONS)
        runs = [run_load(load) for _ in range(bench.scale.many_runs)]
    calm, note = on_time(runs, CALM_MS)
    for name, values, goal in (
        ("latency.p50", [run.p50 for run in calm], 1.0),
        ("latency.p99", [run.p99 for run in calm], 10.0),
    ):
        yield line_of(
            name,
            mode="fsync every",
            unit=MILLISECONDS,
            values=values,
            taken="median",
            goal=Goal("value at most", goal),
            note=f"{rate:,} publishes/s, half of the highest, from when each was due; {note}",
        )
