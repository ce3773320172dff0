"""Which partition a key belongs to. Client and broker must agree, and so must Kafka's clients.

Kafka's Java client and librdkafka (as `murmur2_random`) hash a key with murmur2, seed 0x9747b28c,
clear the sign bit and take the remainder. Ours is the same to the bit. Murmur3 is the 32-bit
variant for x86, seed 0, with the sign bit cleared likewise.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

from millstream.log.batch import murmur2

__all__ = ["Partitioner", "murmur2", "murmur3", "partition_of_key"]

Partitioner: TypeAlias = Literal["murmur2", "murmur3"]

_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


def partition_of_key(key: bytes, partitions: int, partitioner: Partitioner = "murmur2") -> int:
    number = murmur2(key) if partitioner == "murmur2" else murmur3(key)
    return (number & _POSITIVE) % partitions


def murmur3(key: bytes) -> int:
    """32 bits without a sign."""
    size = len(key)
    number = 0
    whole = size >> 2
    for word in struct.unpack_from(f"<{whole}I", key):
        number ^= _mixed3(word)
        number = ((number << 13) | (number >> 19)) & _MASK
        number = (number * 5 + 0xE6546B64) & _MASK
    rest = size & 3
    if rest:
        number ^= _mixed3(int.from_bytes(key[-rest:], "little"))
    number ^= size
    number ^= number >> 16
    number = (number * 0x85EBCA6B) & _MASK
    number ^= number >> 13
    number = (number * 0xC2B2AE35) & _MASK
    return number ^ (number >> 16)


def _mixed3(word: int) -> int:
    word = (word * 0xCC9E2D51) & _MASK
    word = ((word << 15) | (word >> 17)) & _MASK
    return (word * 0x1B873593) & _MASK
