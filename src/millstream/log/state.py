"""What the batches of a partition add up to: producers, and leader epochs.

A snapshot of it lies beside each sealed segment (`.state`, as of the segment's end) and in the
checkpoint. From the newest one on, the headers of the batches tell the rest.
"""

from __future__ import annotations

import msgspec

from millstream.log.producers import Producer, Producers


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    producers: dict[int, Producer]
    epochs: list[tuple[int, int]]


_decoder = msgspec.msgpack.Decoder(_Snapshot)


def encode_state(producers: Producers, epochs: list[tuple[int, int]]) -> bytes:
    return msgspec.msgpack.encode(_Snapshot(producers.by_id, epochs))


def decode_state(data: bytes) -> tuple[Producers, list[tuple[int, int]]] | None:
    """None when the bytes are not a snapshot."""
    try:
        snapshot = _decoder.decode(data)
    except msgspec.MsgspecError:
        return None
    producers = Producers()
    producers.by_id = snapshot.producers
    return producers, snapshot.epochs
