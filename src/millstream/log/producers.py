"""What a partition remembers of idempotent producers, so that a repeated batch is stored once.

For each producer id: its epoch, and sequences and offsets of its last five batches (a Kafka
client has at most five requests in flight). The state is part of the log: it changes with an
append, is undone with it, and is recovered from a snapshot and the headers after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from millstream.errors import ProducerFenced, SequenceDuplicate, SequenceOutOfOrder

if TYPE_CHECKING:
    from millstream.log.batch import Header

# As many as a client may have in flight; an older repeat is told that it is a duplicate.
BATCHES_REMEMBERED = 5

SEQUENCE_MASK = 2**31 - 1


def has_sequence(header: Header) -> bool:
    """Whether a batch is one of an idempotent producer. Control batches have its id, and no
    sequence of their own."""
    return header.producer_id >= 0 and header.base_sequence >= 0


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One batch that was appended."""

    first_sequence: int
    last_sequence: int
    base_offset: int


class Producer(msgspec.Struct, frozen=True, array_like=True):
    """Replaced, never changed, so that undoing an append is putting the old one back."""

    epoch: int
    last_ms: int
    sent: tuple[Sent, ...]


class Producers:
    __slots__ = ("by_id",)

    def __init__(self) -> None:
        self.by_id: dict[int, Producer] = {}

    def check(self, header: Header) -> int | None:
        """The base offset that a repeated batch was given; None for one that is new.

        An unknown producer may start at any sequence: retention may have removed its past.
        """
        known = self.by_id.get(header.producer_id)
        if known is None:
            return None
        if header.producer_epoch < known.epoch:
            raise ProducerFenced(
                f"producer {header.producer_id} has moved on to epoch {known.epoch}; "
                "this one must stop",
                producer_id=header.producer_id,
                epoch=known.epoch,
            )
        if header.producer_epoch > known.epoch:
            _expect(header, 0)
            return None
        for sent in known.sent:
            if sent.first_sequence == header.base_sequence:
                if sent.last_sequence == header.last_sequence:
                    return sent.base_offset
                break
        expected = (known.sent[-1].last_sequence + 1) & SEQUENCE_MASK
        if _is_behind(header.base_sequence, expected):
            raise SequenceDuplicate(
                f"producer {header.producer_id} sent sequence {header.base_sequence} before",
                producer_id=header.producer_id,
            )
        _expect(header, expected)
        return None

    def note(self, header: Header, base_offset: int, now_ms: int) -> Producer | None:
        """Remember an append; answers what was known before, for `undo`."""
        before = self.by_id.get(header.producer_id)
        sent = Sent(header.base_sequence, header.last_sequence, base_offset)
        if before is not None and before.epoch == header.producer_epoch:
            past = before.sent[-(BATCHES_REMEMBERED - 1) :]
        else:
            past = ()
        producer = Producer(header.producer_epoch, now_ms, (*past, sent))
        self.by_id[header.producer_id] = producer
        return before

    def undo(self, producer_id: int, before: Producer | None) -> None:
        if before is None:
            self.by_id.pop(producer_id, None)
        else:
            self.by_id[producer_id] = before

    def put(self, producer_id: int, known: Producer | None) -> None:
        """What is known of one from now on; with None, nothing."""
        self.undo(producer_id, known)

    def forget_before(self, offset: int) -> None:
        """Forget those whose last batch lies before an offset."""
        gone = [id_ for id_, known in self.by_id.items() if known.sent[-1].base_offset < offset]
        for id_ in gone:
            del self.by_id[id_]

    def expire(self, older_than_ms: int) -> int:
        """Forget producers that were silent for long; answers how many."""
        gone = [id_ for id_, known in self.by_id.items() if known.last_ms < older_than_ms]
        for id_ in gone:
            del self.by_id[id_]
        return len(gone)


def _is_behind(sequence: int, expected: int) -> bool:
    """Whether a sequence lies before the expected one, counting round the 31-bit circle."""
    return 0 < ((expected - sequence) & SEQUENCE_MASK) < 2**30


def _expect(header: Header, expected: int) -> None:
    if header.base_sequence != expected:
        raise SequenceOutOfOrder(
            f"producer {header.producer_id} sent sequence {header.base_sequence}, "
            f"and {expected} would be next; an earlier batch is missing",
            producer_id=header.producer_id,
            expected=expected,
            got=header.base_sequence,
        )
