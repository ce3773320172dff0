"""What is known of idempotent producers in topics that are inspected.

Their batches are opened, and the log sees others of the broker's own making, without sequences. So
the checks of `log.producers` are done here, when a batch comes. A producer is known either here or
to the log: its first batch after `inspect` was changed moves what is known of it. This is memory
only: after a restart a producer may go on at any sequence and epoch, as one that the log has
forgotten; what it repeats is known by idempotency keys for a while.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from millstream.log.producers import BATCHES_REMEMBERED, Producer, Producers, Sent

if TYPE_CHECKING:
    from millstream.log.batch import Header

# Of all partitions together; each takes up to a kilobyte. Who wrote least recently is forgotten
# first.
PRODUCERS_MAX = 20_000
# In the place of an offset that is not known yet.
ON_ITS_WAY = -2
# The same of one that could not be stored, and has later ones behind it.
FAILED = -3

# UUID of a topic, and partition.
Place: TypeAlias = "tuple[bytes, int]"


class InspectedProducers:
    __slots__ = ("_by_place", "_producers_max", "_recent")

    def __init__(self, producers_max: int = PRODUCERS_MAX) -> None:
        self._producers_max = producers_max
        self._by_place: dict[Place, Producers] = {}
        # Who wrote where, least recently first.
        self._recent: dict[tuple[Place, int], None] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def check(self, place: Place, header: Header) -> int | None:
        """The base offset that a repeated batch was given, or ON_ITS_WAY; None for a new one.
        Raises for an older epoch, a gap, and a repeat of long ago."""
        producers = self._by_place.get(place)
        return None if producers is None else producers.check(header)

    def note(self, place: Place, header: Header, now_ms: int) -> None:
        """Of a new batch that is on its way."""
        self._by_place.setdefault(place, Producers()).note(header, ON_ITS_WAY, now_ms)
        self._touch((place, header.producer_id))

    def _touch(self, who: tuple[Place, int]) -> None:
        self._recent.pop(who, None)
        self._recent[who] = None
        if len(self._recent) > self._producers_max:
            self._forget(next(iter(self._recent)))

    def of(self, place: Place, producer_id: int) -> Producer | None:
        producers = self._by_place.get(place)
        return None if producers is None else producers.by_id.get(producer_id)

    def falling_out(self, place: Place, header: Header) -> list[tuple[int, int]]:
        """Epoch and first sequence of those that are not remembered any more when this new batch
        is: a client does not repeat them."""
        known = self.of(place, header.producer_id)
        if known is None:
            return []
        count = len(known.sent)
        if known.epoch == header.producer_epoch:
            count -= BATCHES_REMEMBERED - 1
        return [(known.epoch, one.first_sequence) for one in known.sent[: max(count, 0)]]

    def put(self, place: Place, producer_id: int, known: Producer) -> None:
        """As the log knows it, which is to forget it."""
        self._by_place.setdefault(place, Producers()).put(producer_id, known)
        self._touch((place, producer_id))

    def take(self, place: Place, producer_id: int) -> Producer | None:
        """It is forgotten here; the log is to know it."""
        known = self.of(place, producer_id)
        if known is not None:
            self._forget((place, producer_id))
        return known

    def settled(self, place: Place, header: Header, base_offset: int) -> None:
        """It is stored there; or on its way again."""
        known = self.of(place, header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return
        own = (header.base_sequence, header.last_sequence)
        sent = [
            Sent(*own, base_offset) if (one.first_sequence, one.last_sequence) == own else one
            for one in known.sent
        ]
        # As if they had not come: what follows is refused until they come again.
        while sent and sent[-1].base_offset == FAILED:
            sent.pop()
        if not sent:
            self._forget((place, header.producer_id))
            return
        changed = Producer(known.epoch, known.last_ms, tuple(sent))
        self._by_place[place].put(header.producer_id, changed)

    def failed(self, place: Place, header: Header) -> None:
        """It is not stored, and will come again."""
        self.settled(place, header, FAILED)

    def forget(self, uuid: bytes, partitions: int) -> None:
        """A topic is gone."""
        for number in range(partitions):
            producers = self._by_place.get((uuid, number))
            for id in list(producers.by_id if producers is not None else ()):
                self._forget(((uuid, number), id))

    def _forget(self, who: tuple[Place, int]) -> None:
        place, id = who
        del self._recent[who]
        producers = self._by_place[place]
        del producers.by_id[id]
        if not producers.by_id:
            del self._by_place[place]
