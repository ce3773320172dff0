"""Batches that are right from outside: length, CRC, magic and count. Only opening them tells."""

from __future__ import annotations

from typing import NamedTuple

from millstream.errors import (
    BatchCompressionInvalid,
    BatchCountInvalid,
    BatchInvalid,
    BatchRecordInvalid,
    BatchTooLarge,
)
from millstream.log import batch as batches
from millstream.log._batch_layout import sealed

_GOOD = batches.read_header(batches.encode([(0, b"k", b"v" * 20, [])]))
_ZSTD = batches.COMPRESSIONS.index("zstd")


class Bad(NamedTuple):
    data: bytes
    error: type[BatchInvalid]


def _with_body(body: bytes, **fields: int) -> bytes:
    return sealed(_GOOD._replace(**fields), body)


UNOPENABLE = {
    "bomb": Bad(
        batches.encode([(0, b"k", bytes(65 * 1024 * 1024), [])], compression="zstd"),
        BatchTooLarge,
    ),
    "not compressed": Bad(
        _with_body(b"these are no frames of zstd", attributes=_ZSTD), BatchCompressionInvalid
    ),
    "endless varint": Bad(_with_body(b"\xff" * 30), BatchRecordInvalid),
    "length past the end": Bad(_with_body(b"\x20" + bytes(12)), BatchRecordInvalid),
    # One record, at delta 1 of a batch that ends at delta 0.
    "delta past the last": Bad(_with_body(b"\x0c\x00\x00\x02\x01\x01\x00"), BatchRecordInvalid),
    # Two are counted; the one there is takes the bytes of both.
    "fewer than counted": Bad(
        _with_body(b"\x1a\x00\x00\x00\x01\x0e1234567\x00", count=2, last_offset_delta=1),
        BatchCountInvalid,
    ),
    "more than counted": Bad(_with_body(b"\x0c\x00\x00\x00\x01\x01\x00" * 2), BatchRecordInvalid),
}
