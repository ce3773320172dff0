"""Placed batches and their bytes, in Python; `_placing.pyx` is the compiled twin."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from millstream.log._batch_layout import LENGTH_END, PLACE, PLACE_BYTES
from millstream.log._placing_layout import ENTRY, ENTRY_PLACE
from millstream.log.index import SPAN_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream.log._batch_layout import Data, Header
    from millstream.log.partition import PartitionSettings
    from millstream.log.producers import Producer
    from millstream.log.segment import Segment


class Mark(NamedTuple):
    """Where a partition stood before a round of appends."""

    next_offset: int
    tail: int
    segments: int
    epochs: int
    undo: int


class End:
    """The end of a partition: what placing batches there, and showing them, has to know."""

    __slots__ = (
        "changed",
        "entry_key",
        "epochs",
        "high_watermark",
        "is_closed",
        "is_stuck",
        "leader_epoch",
        "next_offset",
        "queued",
        "segments",
        "settings",
        "tail",
        "unapplied",
        "undo",
        "visible",
    )

    def __init__(self, entry_key: bytes, settings: PartitionSettings, leader_epoch: int) -> None:
        # What its entries in the journal begin with.
        self.entry_key = entry_key
        self.settings = settings
        self.leader_epoch = leader_epoch
        self.segments: list[Segment] = []
        # The first offset of each leader epoch that wrote here.
        self.epochs: list[tuple[int, int]] = []
        # The end as reserved: the next offset to give, and its position in the last segment.
        self.next_offset = 0
        self.tail = 0
        # The end as readers see it: an offset, and the segment and position that it means.
        self.high_watermark = 0
        self.visible: tuple[Segment | None, int] = (None, 0)
        # What the reservations that are not final changed of the producers.
        self.undo: list[tuple[int, Producer | None]] = []
        # Durable in the journal, not yet in the segment: written before the next read.
        self.unapplied: list[Placed] = []
        # Whether there was no room for them: then no more are taken until there is.
        self.is_stuck = False
        # Appends that wait for a round of the engine: those that follow must wait too.
        self.queued = 0
        # Whether the checkpoint's entry for this partition is out of date.
        self.changed = True
        self.is_closed = False

    def mark(self) -> Mark:
        return Mark(
            self.next_offset, self.tail, len(self.segments), len(self.epochs), len(self.undo)
        )

    def begins_segment(self, size: int, last_offset_delta: int, now_ms: int) -> bool:
        """Whether a batch has to go to a segment of its own."""
        active, settings = self.segments[-1], self.settings
        return self.tail > 0 and (
            self.tail + size > settings.segment_bytes
            or now_ms - active.created_ms >= settings.segment_age_ms
            or self.next_offset + last_offset_delta + 1 - active.base_offset > SPAN_MAX
        )

    def place(self, data: Data, header: Header, now_ms: int) -> Placed | None:
        """Give a batch its offset and place, when that is all it takes; None for one that has a
        sequence, or begins a segment or an epoch, or comes after one that has no room."""
        if (
            self.is_closed
            or header.producer_id >= 0
            or (self.is_stuck and self.unapplied)
            or not self.epochs
            or self.epochs[-1][0] != self.leader_epoch
            or self.begins_segment(len(data), header.last_offset_delta, now_ms)
        ):
            return None
        return self.reserve_place(data, header)

    def reserve_place(self, data: Data, header: Header) -> Placed:
        active = self.segments[-1]
        placed = Placed(
            active,
            self.tail,
            self.next_offset,
            leader_epoch=self.leader_epoch,
            data=data,
            header=header,
            entry_key=self.entry_key,
        )
        self.tail += placed.size
        self.next_offset = placed.next_offset
        self.changed = True
        return placed

    def settle(self) -> None:
        """The reservations since the last call are final."""
        self.undo.clear()

    def advance(self, placed: Placed) -> None:
        """Readers may now see this batch and all before it."""
        next_offset = placed.next_offset
        assert next_offset > self.high_watermark
        self.high_watermark = next_offset
        self.visible = (placed.segment, placed.position + placed.size)


class Placed:
    """A batch that has been given its place: what goes to the journal and to the segment."""

    __slots__ = (
        "base_offset",
        "data",
        "entry_key",
        "header",
        "leader_epoch",
        "position",
        "segment",
        "size",
    )

    def __init__(
        self,
        segment: Segment,
        position: int,
        base_offset: int,
        *,
        leader_epoch: int,
        data: Data,
        header: Header,
        entry_key: bytes = b"",
    ) -> None:
        self.segment = segment
        self.position = position
        self.base_offset = base_offset
        self.leader_epoch = leader_epoch
        self.data = data
        self.header = header
        self.size = len(data)
        # What its entry in the journal begins with; empty when it is to have none.
        self.entry_key = entry_key

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.header.last_offset_delta + 1

    def prefix(self) -> bytes:
        """Its first bytes, with offset and epoch as they are here."""
        return PLACE.pack(self.base_offset, self.size - LENGTH_END, self.leader_epoch)

    def entry_head(self) -> bytes:
        """What stands before it in the journal."""
        if not self.entry_key:
            raise ValueError("this batch is not for the journal")
        return self.entry_key + ENTRY_PLACE.pack(
            self.segment.base_offset, self.position, self.base_offset, self.size
        )


def body_bytes(entries: Sequence[Placed | Data]) -> int:
    """The length of a frame's body."""
    return sum(
        ENTRY.size + entry.size if isinstance(entry, Placed) else len(entry) for entry in entries
    )


def joined_entries(entries: Sequence[Placed | Data], gap: int) -> bytearray:
    """A frame's body in one piece, behind a gap for the frame's head."""
    body = bytearray(gap)
    for entry in entries:
        if isinstance(entry, Placed):
            body += entry.entry_head()
            body += entry.prefix()
            body += memoryview(entry.data)[PLACE_BYTES:]
        else:
            body += entry
    return body


def joined_batches(run: Sequence[Placed]) -> bytearray:
    """The bytes of a segment in one piece."""
    body = bytearray()
    for one in run:
        body += one.prefix()
        body += memoryview(one.data)[PLACE_BYTES:]
    return body


def next_noted(
    run: Sequence[Placed], at: int, last_indexed: int, index_bytes: int, max_timestamp: int
) -> int:
    """The first batch, from `at` on, that an index has to hear of; the end when there is none."""
    while at < len(run):
        one = run[at]
        if (
            last_indexed < 0
            or one.position - last_indexed >= index_bytes
            or one.header.max_timestamp > max_timestamp
        ):
            break
        at += 1
    return at
