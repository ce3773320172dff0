"""Which partition a key belongs to. Client and broker must agree, and so must Kafka's clients.

Kafka's Java client and librdkafka (as `murmur2_random`) hash a key with murmur2, seed 0x9747b28c,
clear the sign bit and take the remainder. Ours is the same to the bit. Murmur3 is the 32-bit
variant for x86, seed 0, with the sign bit cleared likewise.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from millstream.log.batch import murmur2, murmur3

__all__ = ["Partitioner", "murmur2", "murmur3", "partition_of_key"]

Partitioner: TypeAlias = Literal["murmur2", "murmur3"]

_POSITIVE = 0x7FFFFFFF


def partition_of_key(key: bytes, partitions: int, partitioner: Partitioner = "murmur2") -> int:
    number = murmur2(key) if partitioner == "murmur2" else murmur3(key)
    return (number & _POSITIVE) % partitions
