"""Batches for tests, and what is in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.log import batch as batches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.log.batch import Data, Header, Record

NOW_MS = 1_700_000_000_000


class Sender(NamedTuple):
    """What an idempotent producer says of a batch."""

    id: int
    epoch: int = 0
    sequence: int = 0


def batch(
    *values: bytes | None,
    key: bytes | None = None,
    timestamp: int = NOW_MS,
    times: Sequence[int] = (),
    sender: Sender | None = None,
    control: bool = False,
    compression: str = "none",
) -> bytes:
    """A batch of these values; each at its own of `times`, if they are given."""
    at = times or [timestamp] * len(values)
    return batches.encode(
        [(time, key, value, []) for time, value in zip(at, values, strict=True)],
        producer_id=-1 if sender is None else sender.id,
        producer_epoch=-1 if sender is None else sender.epoch,
        base_sequence=-1 if sender is None else sender.sequence,
        control=control,
        compression=compression,
    )


def header_of(data: Data) -> Header:
    return batches.read_header(data)


def split(data: Data) -> list[tuple[Header, memoryview]]:
    """The whole batches of a chunk; a test fails when something is left over."""
    view = memoryview(data)
    found = [(header, view[at : at + header.size]) for at, header in batches.walk(view)]
    assert sum(len(one) for _, one in found) == len(view), "the last batch is cut"
    return found


def records(data: Data) -> list[Record]:
    return [record for _, one in split(data) for record in batches.decode(one, check_crc=True)]


def values(data: Data) -> list[bytes | None]:
    return [record.value for record in records(data)]


def offsets(data: Data) -> list[int]:
    return [record.offset for record in records(data)]
