"""Workloads, each measured against peers in the same run: `mill bench NAME`.

Not part of the installed package: they run from a clone. `docs/benchmarks.md` says how to read
what they print.
"""

# To add one: a row here, with the module whose MEASUREMENTS it consists of.
WORKLOADS = {
    "log": "bench.log",
    "queues": "bench.queues",
    "topics": "bench.topics",
    "delivery": "bench.delivery",
    "kafka": "bench.kafka",
    "spark": "bench.spark",
}
