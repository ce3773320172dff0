"""Record batches as they travel: the codec of the log, for the client and for Spark.

Millstream's own record headers begin with `ms-`. `ms-type: json` says that a value is JSON text;
without it a value is what its bytes are.

Batches for several partitions travel as one body, each of them after the number of its partition,
4 bytes, big-endian. How long a batch is, stands in the batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from millstream.errors import BatchLengthInvalid
from millstream.log.batch import (
    COMPRESSIONS,
    HEADER_BYTES,
    Data,
    Fields,
    Header,
    Headers,
    Record,
    decode,
    encode,
    read_header,
    walk,
)

TYPE_HEADER = "ms-type"
TYPE_JSON = b"json"
OWN_PREFIX = "ms-"
# Of those, what says why a record is a dead letter, or was put back, is for everybody.
DEAD_PREFIX = "ms-dead-"
REDRIVEN_HEADERS = frozenset(("ms-redrives", "ms-first-time"))

__all__ = [
    "COMPRESSIONS",
    "DEAD_PREFIX",
    "OWN_PREFIX",
    "REDRIVEN_HEADERS",
    "TYPE_HEADER",
    "TYPE_JSON",
    "Data",
    "Fields",
    "Header",
    "Headers",
    "Record",
    "decode",
    "encode",
    "is_shown_header",
    "join_batches",
    "split_batches",
    "walk",
]

_PARTITION = struct.Struct(">i")


def is_shown_header(name: str) -> bool:
    """Whether users see it."""
    if not name.startswith(OWN_PREFIX):
        return True
    return name.startswith(DEAD_PREFIX) or name in REDRIVEN_HEADERS


def join_batches(entries: Iterable[tuple[int, bytes]]) -> bytes:
    """One body of batches, each with its partition."""
    pieces: list[bytes] = []
    for partition, batch in entries:
        pieces += (_PARTITION.pack(partition), batch)
    return b"".join(pieces)


def split_batches(body: bytes) -> list[tuple[int, bytes]]:
    """Partitions and batches of a body; what is inside a batch is not looked at."""
    entries: list[tuple[int, bytes]] = []
    position = 0
    while position < len(body):
        start = position + _PARTITION.size
        if start + HEADER_BYTES > len(body):
            raise BatchLengthInvalid(
                f"the body ends inside the header of batch {len(entries)}", record=len(entries)
            )
        end = start + read_header(body, start).size
        if not start + HEADER_BYTES <= end <= len(body):
            raise BatchLengthInvalid(
                f"the length of batch {len(entries)} does not fit the body", record=len(entries)
            )
        entries.append((_PARTITION.unpack_from(body, position)[0], body[start:end]))
        position = end
    return entries
