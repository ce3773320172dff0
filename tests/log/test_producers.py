"""What a partition remembers of idempotent producers."""

from __future__ import annotations

import pytest

from log.making import Sender, batch, header_of
from millstream.errors import ProducerFenced, SequenceDuplicate, SequenceOutOfOrder
from millstream.log.producers import BATCHES_REMEMBERED, Producers, has_sequence
from millstream.log.state import decode_state, encode_state

LAST_SEQUENCE = 2**31 - 1


class Book:
    """Producers, with offsets given one after the other."""

    def __init__(self) -> None:
        self.producers = Producers()
        self.next_offset = 0

    def send(self, sequence: int, count: int = 1, *, epoch: int = 0, id_: int = 7) -> int:
        """The offset, that of the original for a repeat."""
        sender = Sender(id_, epoch, sequence)
        header = header_of(batch(*(b"x" for _ in range(count)), sender=sender))
        original = self.producers.check(header)
        if original is not None:
            return original
        self.producers.note(header, self.next_offset, 1000)
        self.next_offset += count
        return self.next_offset - count


def test_sequences_follow_each_other() -> None:
    book = Book()
    assert [book.send(0, 3), book.send(3, 2), book.send(5)] == [0, 3, 5]
    with pytest.raises(SequenceOutOfOrder) as caught:
        book.send(7)
    assert caught.value.fields == {"producer_id": 7, "expected": 6, "got": 7}


def test_an_unknown_producer_may_start_anywhere() -> None:
    book = Book()
    assert book.send(1000) == 0
    assert book.send(1001) == 1


def test_the_last_five_batches_are_known_by_their_offset() -> None:
    book = Book()
    for n in range(8):
        book.send(2 * n, 2)
    for n in range(8 - BATCHES_REMEMBERED, 8):
        assert book.send(2 * n, 2) == 2 * n
    for n in range(8 - BATCHES_REMEMBERED):
        with pytest.raises(SequenceDuplicate):
            book.send(2 * n, 2)
    assert book.next_offset == 16


def test_a_repeat_with_another_length_is_no_repeat() -> None:
    book = Book()
    book.send(0, 3)
    book.send(3, 3)
    for first, count in ((0, 2), (3, 4), (1, 2), (4, 1)):
        with pytest.raises(SequenceDuplicate):
            book.send(first, count)
    assert book.send(6) == 6


def test_sequences_wrap_to_zero() -> None:
    book = Book()
    assert book.send(LAST_SEQUENCE - 1, 4) == 0
    # 2^31 - 2, 2^31 - 1, 0, 1: the next is 2.
    assert book.send(2) == 4
    assert book.send(LAST_SEQUENCE - 1, 4) == 0
    with pytest.raises(SequenceDuplicate):
        book.send(LAST_SEQUENCE)
    with pytest.raises(SequenceOutOfOrder):
        book.send(4)


def test_a_batch_that_ends_at_the_last_sequence_is_followed_by_zero() -> None:
    book = Book()
    book.send(LAST_SEQUENCE)
    assert book.send(0) == 1
    with pytest.raises(SequenceOutOfOrder):
        book.send(2)


def test_a_newer_epoch_starts_at_zero_and_fences_the_older() -> None:
    book = Book()
    book.send(0)
    book.send(1)
    with pytest.raises(SequenceOutOfOrder):
        book.send(2, epoch=1)
    assert book.send(0, epoch=1) == 2
    # What the older epoch sent is no repeat for the newer.
    assert book.send(1, epoch=1) == 3
    with pytest.raises(ProducerFenced) as caught:
        book.send(2)
    assert caught.value.fields == {"producer_id": 7, "epoch": 1}


def test_producers_are_apart() -> None:
    book = Book()
    assert [book.send(0, id_=1), book.send(0, id_=2), book.send(1, id_=1)] == [0, 1, 2]


def test_an_append_is_undone() -> None:
    producers = Producers()
    first, second = (header_of(batch(b"x", sender=Sender(7, 0, n))) for n in range(2))
    before_first = producers.note(first, 0, 1000)
    before_second = producers.note(second, 1, 1000)
    producers.undo(7, before_second)
    assert producers.check(second) is None
    assert producers.check(first) == 0
    producers.undo(7, before_first)
    assert producers.by_id == {}


def test_silent_producers_are_forgotten() -> None:
    producers = Producers()
    for id_ in range(5):
        producers.note(header_of(batch(b"x", sender=Sender(id_))), id_, now_ms=id_ * 10)
    assert producers.expire(older_than_ms=20) == 2
    assert sorted(producers.by_id) == [2, 3, 4]


def test_batches_without_a_sequence_are_not_remembered() -> None:
    assert not has_sequence(header_of(batch(b"x")))
    assert not has_sequence(header_of(batch(b"x", sender=Sender(7, 0, -1), control=True)))
    assert has_sequence(header_of(batch(b"x", sender=Sender(0))))


def test_the_state_is_read_back_as_it_was_written() -> None:
    book = Book()
    for n in range(10):
        book.send(n, id_=n % 3 + 2**40) if n < 3 else book.send(n - 3, id_=2**62)
    epochs = [(0, 0), (3, 17)]
    restored = decode_state(encode_state(book.producers, epochs))
    assert restored is not None
    assert restored[0].by_id == book.producers.by_id
    assert restored[1] == epochs


@pytest.mark.parametrize("data", [b"", b"\0", b"\x92\x01\x02", b"text"])
def test_bytes_that_are_no_state_are_not_taken_for_one(data: bytes) -> None:
    assert decode_state(data) is None
