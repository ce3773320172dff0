"""The layout of a journal's entry, for both twins; see `journal.py`, where it is described."""

from __future__ import annotations

import struct

ENTRY = struct.Struct(">B16siqqqI")
# Its first fields, which are the same for all batches of a partition: kind, UUID, number.
ENTRY_KEY = struct.Struct(">B16si")
# And the others: segment, place, offset, length.
ENTRY_PLACE = struct.Struct(">qqqI")

BATCH_KIND = 1


def key_of(uuid: bytes, number: int) -> bytes:
    """What each entry of a partition's batches begins with."""
    return ENTRY_KEY.pack(BATCH_KIND, uuid, number)
