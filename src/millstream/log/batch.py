"""The batch: the unit of the wire and of the disk, and the records inside.

A batch is Kafka's record batch, magic 2: a header of 61 bytes (layout: `_batch_layout.py`), then
the records, compressed as a whole (layout: `_batch_pure.py`). Most of the broker never opens one:
`verify` checks a batch from outside, `placed` gives it its offsets, `scan` finds how far a file
is whole. `examine` opens a batch that nobody vouches for, to see whether anybody could. `encode`
and `decode` are for those who must see records, `decode_columns` and `encode_columns` for Spark.

There are two implementations with the same answers and the same errors: a compiled one, taken
where it was built, and one in plain Python, also taken when `MILLSTREAM_PURE` is set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from millstream.log._batch_compression import opened
from millstream.log._batch_layout import (
    APPEND_TIME_MASK,
    COMPRESSION_MASK,
    COMPRESSIONS,
    CONTROL_MASK,
    DELETE_HORIZON_MASK,
    HEADER,
    HEADER_BYTES,
    INFLATED_BYTES_MAX,
    LANE_HEADER,
    LANE_MASK,
    LANE_SHIFT,
    LANES,
    PLACE_BYTES,
    TRANSACTIONAL_MASK,
    BinaryColumn,
    Columns,
    Data,
    Header,
    Headers,
    RowColumns,
    Scan,
    placed,
    read_header,
    sealed,
    stamped,
    walk,
)
from millstream.log._batch_pure import Fields

IMPLEMENTATION: Literal["compiled", "pure"]

if TYPE_CHECKING:
    from millstream.log._batch_pure import (
        Record,
        decode,
        decode_columns,
        encode,
        encode_columns,
        examine,
        key_partitions,
        keys,
        murmur2,
        murmur3,
        retain,
        scan,
        verify,
    )
else:
    try:
        if os.environ.get("MILLSTREAM_PURE", "") not in ("", "0"):
            raise ImportError("the pure twin was asked for")
        from millstream.log import _batch as _twin

        IMPLEMENTATION = "compiled"
    except ImportError:
        from millstream.log import _batch_pure as _twin

        IMPLEMENTATION = "pure"
    Record = _twin.Record
    decode = _twin.decode
    decode_columns = _twin.decode_columns
    encode = _twin.encode
    encode_columns = _twin.encode_columns
    examine = _twin.examine
    key_partitions = _twin.key_partitions
    keys = _twin.keys
    murmur2 = _twin.murmur2
    murmur3 = _twin.murmur3
    retain = _twin.retain
    scan = _twin.scan
    verify = _twin.verify

__all__ = [
    "APPEND_TIME_MASK",
    "COMPRESSIONS",
    "COMPRESSION_MASK",
    "CONTROL_MASK",
    "DELETE_HORIZON_MASK",
    "HEADER",
    "HEADER_BYTES",
    "IMPLEMENTATION",
    "INFLATED_BYTES_MAX",
    "LANES",
    "LANE_HEADER",
    "LANE_MASK",
    "LANE_SHIFT",
    "PLACE_BYTES",
    "TRANSACTIONAL_MASK",
    "BinaryColumn",
    "Columns",
    "Data",
    "Fields",
    "Header",
    "Headers",
    "Record",
    "RowColumns",
    "Scan",
    "decode",
    "decode_columns",
    "encode",
    "encode_columns",
    "examine",
    "key_partitions",
    "keys",
    "murmur2",
    "murmur3",
    "opened",
    "placed",
    "read_header",
    "retain",
    "scan",
    "sealed",
    "stamped",
    "verify",
    "walk",
]
