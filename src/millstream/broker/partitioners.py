"""Which partition a record goes to: that of its key, or, without one, the one whose turn it is.

Records without a key stay together for one turn of the loop, so that they make one batch and not
one for each partition. The next turn goes to the partition that got the fewest bytes so far.
"""

from __future__ import annotations

from heapq import heapify, heapreplace


class Rotation:
    """Whose turn it is among the partitions of a topic."""

    __slots__ = ("_given", "current")

    def __init__(self, partitions: int) -> None:
        # Bytes given so far, and the partition: a heap, so the next one is found in no time.
        self._given = [(0, number) for number in range(partitions)]
        self.current = 0

    def give(self, size: int) -> None:
        """The current partition got so much; on to the next."""
        given, number = self._given[0]
        heapreplace(self._given, (given + size, number))
        self.current = self._given[0][1]

    def grow(self, partitions: int) -> None:
        """New partitions start where the others are: they do not have to catch up."""
        least = self._given[0][0]
        self._given += [(least, number) for number in range(len(self._given), partitions)]
        heapify(self._given)
        self.current = self._given[0][1]
