"""Batches that come ready-made: checked from outside and from inside, and stored as they came.

They are opened once, because what does not open would stop every reader that comes to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.lanes import LANE_COUNT, NORMAL, lane_of
from millstream.broker.outgoing import key_required
from millstream.broker.topics import partition_unknown
from millstream.broker.views import Entry
from millstream.errors import BatchCountInvalid, BatchInvalid
from millstream.log import batch as batches
from millstream.log.batch import LANE_HEADER, LANES
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.broker.topics import Topic


def check_batches(
    topic: Topic, entries: Sequence[tuple[int, bytes]], bytes_max: int
) -> list[Entry]:
    """All of them; the error of the first that is wrong has its index in the field `batch`."""
    if not entries:
        raise BatchCountInvalid("there is no batch to publish")
    return [_check(topic, number, data, bytes_max, at) for at, (number, data) in enumerate(entries)]


def _check(topic: Topic, number: int, data: bytes, bytes_max: int, at: int) -> Entry:
    if not 0 <= number < topic.partitions:
        error = partition_unknown(topic, number)
        error.fields["batch"] = at
        raise error
    try:
        header = batches.examine(data, bytes_max=bytes_max)
        if header.is_control:
            raise BatchInvalid("a control batch is for the broker to write, not for a client")
        if header.is_transactional:
            raise BatchInvalid("there are no transactions; send the batch without one")
        if topic.settings.compact:
            _require_keys(topic, batches.keys(data))
        if header.attributes & batches.LANE_MASK:
            _check_lane(header, data)
    except BatchInvalid as error:
        error.fields["batch"] = at
        raise
    return Entry(PartitionId(topic.name, number), data, header)


def uses_lanes(ready: Sequence[Entry]) -> bool:
    """Whether one of them is of another lane than normal."""
    return any(lane_of(one.header.attributes) != NORMAL for one in ready)


def _check_lane(header: batches.Header, data: bytes) -> None:
    """A batch is served by what its header says, its records show what they say themselves."""
    if header.lane is None:
        number = (header.attributes & batches.LANE_MASK) >> batches.LANE_SHIFT
        raise BatchInvalid(f"attribute bits 8 to 10 are {number}; lanes are 1 to {LANE_COUNT}")
    for at, record in enumerate(batches.decode(data)):
        lane = record.lane
        if lane != header.lane and (lane is not None or header.lane != LANES[NORMAL]):
            raise BatchInvalid(
                f"the batch is of lane {header.lane}, and record {at} in it says {lane}; each "
                f"record needs the header {LANE_HEADER} with the lane of its batch",
                record=at,
            )


def _require_keys(topic: Topic, keys: list[tuple[int, bytes | None, bool]]) -> None:
    for at, (_, key, _) in enumerate(keys):
        if key is None:
            raise key_required(topic, at)
