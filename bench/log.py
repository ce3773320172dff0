"""`mill bench log`: the log and its engine, line by line."""

from __future__ import annotations

from bench import codec
from bench.appending import big_batches, shared_syncs
from bench.compacting import beside_compaction
from bench.harness import Measurement
from bench.opening import clean_stores
from bench.reading import sequential

MEASUREMENTS = (
    Measurement(("append.64k",), big_batches),
    *codec.MEASUREMENTS,
    Measurement(("every.1-partition", "every.64-partitions"), shared_syncs),
    Measurement(("open.time", "open.memory"), clean_stores),
    Measurement(("read.engine", "read.partition", "read.first-pass"), sequential),
    Measurement(("append.beside-compaction",), beside_compaction),
)
