"""How far a member has been given records, and what it has done with them.

A partition of a member has a position: the next offset to give. What one answer gives is taken
as handled when the member polls again, because a member polls when it is done. An answer that was
lost on its way is taken back: the member says which answer was the last to come through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.log.partition import PartitionId


class Positions:
    __slots__ = ("_given", "_handled", "_next", "number")

    def __init__(self) -> None:
        # The number of the last answer.
        self.number = 0
        self._next: dict[PartitionId, int] = {}
        # What the last answer gave: the position before and after it.
        self._given: dict[PartitionId, tuple[int, int]] = {}
        # Up to where records were handled since the last commit.
        self._handled: dict[PartitionId, int] = {}

    def __contains__(self, id: object) -> bool:
        return id in self._next

    def __getitem__(self, id: PartitionId) -> int:
        return self._next[id]

    def place(self, id: PartitionId, offset: int) -> None:
        """Where to begin, or to go on after records that are gone."""
        self._next[id] = offset
        self._given.pop(id, None)

    def skip(self, id: PartitionId, offset: int) -> None:
        """Over offsets that have no record."""
        self._next[id] = offset

    def give(self, ends: Mapping[PartitionId, int]) -> int:
        """An answer with records up to these ends goes out; its number."""
        self._given = {id: (self._next[id], end) for id, end in ends.items()}
        self._next.update(ends)
        self.number += 1
        return self.number

    def receive(self, number: int | None) -> None:
        """The member calls again, and this was the last answer that it got. None: the last."""
        if number is not None and number < self.number:
            self.take_back()
            return
        for id, (_, end) in self._given.items():
            self._handled[id] = end
        self._given = {}

    def take_back(self) -> None:
        """The last answer did not arrive: give it again."""
        for id, (before, end) in self._given.items():
            if self._next.get(id) == end:
                self._next[id] = before
        self._given = {}

    def take_handled(self, among: Iterable[PartitionId] | None = None) -> dict[PartitionId, int]:
        """What there is to commit, in these partitions or in all."""
        if among is None:
            handled, self._handled = self._handled, {}
            return handled
        return {id: self._handled.pop(id) for id in among if id in self._handled}

    def put_back_handled(self, handled: Mapping[PartitionId, int]) -> None:
        """It could not be committed; it still has to be, unless more was handled since."""
        for id, offset in handled.items():
            if id in self._next:
                self._handled.setdefault(id, offset)

    def committed(self, id: PartitionId) -> None:
        """The member has committed something by itself."""
        self._handled.pop(id, None)

    @property
    def has_handled(self) -> bool:
        return bool(self._handled)

    def drop(self, ids: Iterable[PartitionId]) -> None:
        """These are no longer the member's."""
        for id in ids:
            self._next.pop(id, None)
            self._given.pop(id, None)
            self._handled.pop(id, None)

    def drop_topic(self, topic: str) -> None:
        self.drop([id for id in self._next if id.topic == topic])
