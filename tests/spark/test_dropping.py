"""What is left out: records of transactions that were given up, and the marks of their ends."""

from __future__ import annotations

from typing import Any

from millstream.log import batch as batches
from millstream.spark.fetching import Found
from millstream.spark.slices import Dropping, chunks

ABORT, COMMIT = b"\0\0\0\0", b"\0\0\0\1"


class Answers:
    """Batches as a broker stores them, given out in answers."""

    def __init__(self) -> None:
        self._end = 0
        self._batches: list[bytes] = []

    def add(self, *values: bytes, producer: int = -1, **more: Any) -> None:
        records: list[Any] = [(1, None, value, []) for value in values]
        self._keep(records, producer, **more)

    def mark(self, producer: int, key: bytes) -> None:
        self._keep([(1, key, b"\0" * 6, [])], producer, control=True)

    def _keep(self, records: list[Any], producer: int, **more: Any) -> None:
        given: dict[str, Any] = {"producer_id": producer, "transactional": producer >= 0} | more
        self._batches.append(batches.encode(records, base_offset=self._end, **given))
        self._end += len(records)

    def take(self, aborted: list[tuple[int, int]]) -> Found:
        """All since the last answer."""
        data = memoryview(b"".join(self._batches))
        self._batches.clear()
        return Found(data, list(batches.scan(data, 0, 0, exact=False).batches), aborted)


def offsets(found: Found, dropping: Dropping) -> list[int]:
    """Of the records that are given."""
    given = []
    for chunk in chunks(found, dropping):
        for at, header in batches.scan(chunk.data, 0, 0, exact=False).batches:
            if not header.is_control:
                records = batches.decode(chunk.data[at : at + header.size])
                given += [record.offset for record in records]
    return given


def test_only_the_transaction_that_was_given_up_is_dropped() -> None:
    made = Answers()
    made.add(b"a")
    made.add(b"x", b"x", producer=7)
    made.add(b"b", producer=8)
    made.add(b"c")
    made.mark(7, ABORT)
    made.mark(8, COMMIT)
    made.add(b"d", producer=7)
    made.mark(7, COMMIT)
    assert offsets(made.take([(7, 1)]), Dropping()) == [0, 3, 4, 7]


def test_a_producer_that_gives_up_twice_loses_both_and_keeps_what_is_between() -> None:
    made = Answers()
    made.add(b"x", producer=7)
    made.mark(7, ABORT)
    made.add(b"a", producer=7)
    made.mark(7, COMMIT)
    made.add(b"x", producer=7)
    made.mark(7, ABORT)
    assert offsets(made.take([(7, 0), (7, 4)]), Dropping()) == [2]


def test_a_transaction_that_reaches_over_answers_is_dropped_in_all_of_them() -> None:
    made, dropping = Answers(), Dropping()
    made.add(b"x", producer=7)
    assert offsets(made.take([(7, 0)]), dropping) == []
    # Told of again, and then not any more.
    made.add(b"x", producer=7)
    made.add(b"a")
    assert offsets(made.take([(7, 0)]), dropping) == [2]
    made.add(b"x", producer=7)
    made.mark(7, ABORT)
    made.add(b"b", producer=7)
    assert offsets(made.take([(7, 0)]), dropping) == [5]


def test_nothing_is_dropped_of_who_only_writes_idempotently() -> None:
    made = Answers()
    made.add(b"a", producer=7, transactional=False, producer_epoch=0, base_sequence=0)
    assert offsets(made.take([(7, 0)]), Dropping()) == [0]
