"""One publish of several records: which make a batch together, and where each came to lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from millstream.broker.outgoing import Placed, Published
from millstream.broker.schedule_values import BATCH_RECORDS_MAX as SCHEDULES_IN_BATCH

if TYPE_CHECKING:
    from millstream.broker.publishing import Target
    from millstream.log import batch as batches

# A batch of a turn ends here; what follows is the next one.
BATCH_BYTES = 256 * 1024
# As many as BATCH_BYTES has room for.
BATCH_RECORDS = BATCH_BYTES
# The place of a record that is to be in its topic later.
SCHEDULED = (-1, -1)
# Partition and lane, and the indexes of a call's records that make one batch there.
Part: TypeAlias = tuple[tuple[int, int], list[int]]
# About what a record takes in a batch beside its key, value and headers.
RECORD_OVERHEAD_BYTES = 20


class Call:
    """One publish of several records, each with its place: its partition and its lane."""

    __slots__ = ("fields", "places", "size", "sizes", "target")

    def __init__(
        self,
        target: Target,
        fields: list[batches.Fields],
        places: list[tuple[int, int]],
        sizes: list[int],
    ) -> None:
        self.target = target
        self.fields = fields
        self.places = places
        self.sizes = sizes
        self.size = sum(sizes) + RECORD_OVERHEAD_BYTES * len(sizes)

    def numbers(self) -> set[int]:
        return {number for number, _ in self.places}

    def parts(self) -> list[Part]:
        """Places, each with the indexes of its records; several times when they are too many for
        one batch."""
        parts: list[Part] = []
        # Of each place, the part that is not full, and its size.
        last: dict[tuple[int, int], tuple[list[int], int]] = {}
        for at, place in enumerate(self.places):
            more = self.sizes[at] + RECORD_OVERHEAD_BYTES
            part, size = last.get(place, ([], BATCH_BYTES))
            if size + more > BATCH_BYTES or len(part) == count_max(place):
                part, size = [], 0
                parts.append((place, part))
            part.append(at)
            last[place] = (part, size + more)
        return parts

    def placed(self, parts: list[Part], offsets: list[int]) -> Published:
        places: dict[int, Placed] = {}
        for ((number, _), part), base in zip(parts, offsets, strict=True):
            for delta, at in enumerate(part):
                places[at] = Placed(max(0, number), base + delta, self.fields[at][0])
        placed = [places[at] for at in range(len(places))]
        return Published(placed, scheduled=scheduled_in(self.places))

    def unplaced(self) -> Published:
        """For who does not wait: the offsets are not known."""
        return Published(
            [
                Placed(max(0, number), -1, one[0])
                for (number, _), one in zip(self.places, self.fields, strict=True)
            ],
            scheduled=scheduled_in(self.places),
        )


def count_max(place: tuple[int, int]) -> int:
    """Of one batch there."""
    return SCHEDULES_IN_BATCH if place == SCHEDULED else BATCH_RECORDS


def scheduled_in(places: list[tuple[int, int]]) -> frozenset[int]:
    if SCHEDULED not in places:
        return frozenset()
    return frozenset(at for at, place in enumerate(places) if place == SCHEDULED)
