"""What retention may not remove, in topics that wait for their groups.

The setting `retention_hold = groups` keeps records that a group has yet to do, whatever their age
and size: those from the lowest committed offset on, and from the first one that is not settled
where a group receives by lease. A group counts in a partition as soon as it has committed or
received there, and until it is deleted or its offsets are forgotten. A topic without groups keeps
nothing longer.

Until everything is loaded at a start, nothing is removed of any topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.shares import Shares
    from millstream.broker.topics import Topics
    from millstream.engine.protocol import Engine
    from millstream.log.partition import PartitionId


class RetentionHold:
    __slots__ = ("_offsets", "_shares", "_topics", "is_loaded")

    def __init__(
        self, engine: Engine, topics: Topics, offsets: GroupOffsets, shares: Shares
    ) -> None:
        self._topics = topics
        self._offsets = offsets
        self._shares = shares
        self.is_loaded = False
        engine.hold(self.first_kept)

    def first_kept(self, id: PartitionId) -> int | None:
        """From here on everything is kept; None when retention need not wait."""
        if not self.is_loaded:
            return 0
        topic = self._topics.by_name.get(id.topic)
        if topic is None or topic.settings.retention_hold != "groups":
            return None
        committed = self._offsets.table.lowest(topic.uuid.bytes, id.number)
        leased = self._shares.lowest(topic.name, id.number)
        return min((one for one in (committed, leased) if one is not None), default=None)
