"""Staged batches as they travel: what one attempt of a task hands to the broker, as one body.

A body is entries, one after the other. An entry is a ready-made batch and where it is to go:

    topic         2 bytes, big-endian: how many bytes its name has; then the name, UTF-8
    partition     4 bytes, big-endian; -1 only with a time: that of the key, when it is due
    deliver at    8 bytes, big-endian: milliseconds since 1970, or 0 for now
    batch         a record batch; how long it is, stands in it
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from millstream.errors import BatchInvalid, BatchLengthInvalid, BodyInvalid
from millstream.log.batch import HEADER_BYTES, read_header

# What one request may carry, unless it is one entry: that may be as large as any body. And a
# writer's name.
BODY_BYTES_MAX = 8 * 1024 * 1024
WRITER_NAME = r"[A-Za-z0-9._-]{1,249}"
# The handle of a part that nobody needs any more: its batch is committed already.
NO_PART = "-"

_LENGTH = struct.Struct(">H")
_PLACE = struct.Struct(">iq")


class StagedEntry(NamedTuple):
    """A batch that is to go to a partition, once it is committed."""

    topic: str
    partition: int
    deliver_at_ms: int
    batch: bytes


def join_entries(entries: Iterable[StagedEntry]) -> bytes:
    """One body."""
    pieces: list[bytes] = []
    for topic, partition, deliver_at_ms, batch in entries:
        name = topic.encode()
        pieces += (_LENGTH.pack(len(name)), name, _PLACE.pack(partition, deliver_at_ms), batch)
    return b"".join(pieces)


def is_too_large(body: bytes) -> bool:
    """Whether it has more bytes than several entries may have, and is several."""
    if len(body) <= BODY_BYTES_MAX:
        return False
    start: int = _LENGTH.size + _LENGTH.unpack_from(body)[0] + _PLACE.size
    try:
        return start + read_header(body, start).size < len(body)
    except BatchInvalid:
        return True


def split_entries(body: bytes) -> list[StagedEntry]:
    """What is inside a batch is not looked at. Errors have the index of the bad one in `entry`."""
    entries: list[StagedEntry] = []
    position, size = 0, len(body)
    while position < size:
        at = len(entries)
        name_at = position + _LENGTH.size
        if name_at > size:
            raise _ends_early(at)
        place_at = name_at + _LENGTH.unpack_from(body, position)[0]
        start = place_at + _PLACE.size
        if start + HEADER_BYTES > size:
            raise _ends_early(at)
        try:
            topic = body[name_at:place_at].decode()
        except UnicodeDecodeError:
            raise BodyInvalid(f"the topic of entry {at} is not UTF-8", entry=at) from None
        try:
            end = start + read_header(body, start).size
        except BatchInvalid as error:
            error.fields["entry"] = at
            raise
        if not start + HEADER_BYTES <= end <= size:
            raise BatchLengthInvalid(
                f"the length of the batch of entry {at} does not fit the body", entry=at
            )
        partition, deliver_at_ms = _PLACE.unpack_from(body, place_at)
        entries.append(StagedEntry(topic, partition, deliver_at_ms, body[start:end]))
        position = end
    return entries


def _ends_early(at: int) -> BodyInvalid:
    return BodyInvalid(f"the body ends inside the head of entry {at}", entry=at)
