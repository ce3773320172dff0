"""The batch codec against aiokafka's compiled one, on records of 100 bytes.

Both do the same work on the same bytes: a decoded record has its offset, timestamp, key, value and
headers as objects, an encoded batch is bytes with its CRC. What leads to Arrow checks the CRC and
is compared with the peer's plain decoding, which does not: the harder of the two readings.

    python -m bench.codec
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.harness import (
    FULL,
    Bench,
    Goal,
    Line,
    Measurement,
    NotMeasured,
    Peer,
    Unit,
    alternate,
    make_line,
)
from millstream.log import batch

VALUE = b"x" * 100
TIMESTAMP = 1_700_000_000_000
BATCH_RECORDS = 1000
# About 2 MiB of a partition at a time: less is lost in pyarrow's calls, more leaves the caches.
FETCH_BATCHES = 20
# A run is short, so that a disturbance spoils few of them, and there are more of them.
RUN_SHARE = 1 / 40
RUNS_FACTOR = 4

PEER = "aiokafka, compiled"
RECORDS = Unit("records/s")


def codec(bench: Bench) -> Iterator[Line]:
    """Encoding, decoding to records, decoding to Arrow; each side in turn with its peer."""
    if batch.IMPLEMENTATION != "compiled":
        raise NotMeasured("the compiled twin is not built: `make install` with a C compiler")
    theirs, why_missing = _peer_work()
    work = {**_our_work(), **theirs}
    seconds = bench.scale.seconds * RUN_SHARE
    sides = {name: _steady(work[name], seconds) for name in work}
    values = alternate(sides, bench.scale.runs * RUNS_FACTOR)
    for name, peer, goal in (
        ("codec.encode", "peer.encode", 1),
        ("codec.decode", "peer.decode", 1),
        ("codec.decode-crc", "peer.decode-crc", None),
        ("codec.arrow-crc", "peer.decode", 3),
    ):
        yield make_line(
            name,
            mode="memory",
            unit=RECORDS,
            values=values[name],
            peer=Peer(PEER, values.get(peer, ()), why_missing),
            goal=None if goal is None else Goal("ratio at least", goal),
        )


MEASUREMENTS = (
    Measurement(("codec.encode", "codec.decode", "codec.decode-crc", "codec.arrow-crc"), codec),
)


def _steady(work: Callable[[], int], seconds: float) -> Callable[[], float]:
    """A side that repeats its work for so long, and gives the records a second."""

    def run() -> float:
        work()  # warms caches and free lists
        records = 0
        start = time.perf_counter()
        end = start + seconds
        while (now := time.perf_counter()) < end or not records:
            records += work()
        return records / (now - start)

    return run


def _our_work() -> dict[str, Callable[[], int]]:
    try:
        from millstream.log.arrow import to_record_batch
    except ImportError as error:
        raise NotMeasured("pyarrow is not installed: pip install 'millstream[spark]'") from error
    data = _our_batch()
    blob = b"".join(
        part
        for index in range(FETCH_BATCHES)
        for part in batch.placed(data, index * BATCH_RECORDS, 0)
    )

    def encode() -> int:
        _our_batch()
        return BATCH_RECORDS

    def decode() -> int:
        for _ in batch.decode(data):
            pass
        return BATCH_RECORDS

    def decode_checked() -> int:
        for _ in batch.decode(data, check_crc=True):
            pass
        return BATCH_RECORDS

    def arrow() -> int:
        return int(to_record_batch(blob).num_rows)

    return {
        "codec.encode": encode,
        "codec.decode": decode,
        "codec.decode-crc": decode_checked,
        "codec.arrow-crc": arrow,
    }


def _our_batch() -> bytes:
    return batch.encode([(TIMESTAMP + n // 10, None, VALUE, ()) for n in range(BATCH_RECORDS)])


def _peer_work() -> tuple[dict[str, Callable[[], int]], str | None]:
    """What the peer does, or nothing and why."""
    try:
        from aiokafka.record._crecords.default_records import (
            DefaultRecordBatch,
            DefaultRecordBatchBuilder,
        )
    except ImportError:
        return {}, "aiokafka is not installed with its compiled codec"
    data = _our_batch()

    def build() -> bytes:
        builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 2 * len(data))
        for n in range(BATCH_RECORDS):
            builder.append(n, TIMESTAMP + n // 10, None, VALUE, [])
        return bytes(builder.build())

    assert build() == data

    def encode() -> int:
        build()
        return BATCH_RECORDS

    def decode() -> int:
        for _ in DefaultRecordBatch(data):
            pass
        return BATCH_RECORDS

    def decode_checked() -> int:
        theirs = DefaultRecordBatch(data)
        assert theirs.validate_crc()
        for _ in theirs:
            pass
        return BATCH_RECORDS

    return {
        "peer.encode": encode,
        "peer.decode": decode,
        "peer.decode-crc": decode_checked,
    }, None


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for line in codec(Bench(scale=FULL, scratch=Path(scratch))):
            ours, peer = line.value or 0, line.peer_value or 0
            print(f"{line.name:18} {ours / 1e6:6.1f} M/s  {PEER} {peer / 1e6:5.1f}  {line.ratio}")


if __name__ == "__main__":
    main()
