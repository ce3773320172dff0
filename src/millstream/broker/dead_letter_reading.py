"""Dead letters as people look at them: listed and filtered, one by one, counted, deleted.

Listing goes through the log, and a filter that matches little goes through much of it. So one call
looks at so many records at most, and says where the next one goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from millstream.broker import dead_letter_values as values
from millstream.broker.dead_letter_view import Place
from millstream.broker.deadletters import dead_letter_topic, is_dead_letter_topic
from millstream.broker.topics import partition_unknown
from millstream.engine.pending import Pending, follow
from millstream.errors import DeadLetterUnknown, ParameterInvalid

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from millstream.broker.dead_letter_marks import DeadLetterMarks
    from millstream.broker.topics import Topic
    from millstream.log.batch import Record

LIST_MAX = 1_000
LIST_BYTES_MAX = 4 * 1024 * 1024
# What one list looks at: about 50 ms of work, with others in between.
SCAN_RECORDS = 20_000
SCAN_STEP = 250
SCAN_BYTES = 256 * 1024
DELETE_MAX = 1_000
# Longer texts are not looked for: they have to be kept with the job.
FILTER_TEXT_MAX = 1_000
_NUMBER_DIGITS = 19


class LetterFacts(NamedTuple):
    """What a dead letter says of its end. Somebody may have written one by hand: then it says
    less."""

    topic: str | None
    partition: int | None
    offset: int | None
    group: str | None
    deliveries: int | None
    reason: str | None
    error: str | None
    first_failure_ms: int | None
    last_failure_ms: int | None
    # How often it was put back before.
    redrives: int


class Letter(NamedTuple):
    """One dead letter, where it lies now."""

    partition: int
    record: Record
    lane: str
    facts: LetterFacts


class LetterPage(NamedTuple):
    dead_letter_topic: str
    letters: list[Letter]
    # Where to go on: partition and offset.
    next: tuple[int, int] | None
    # Of all, whatever the filter.
    total: int


class GoneRun(NamedTuple):
    """Dead letters that were deleted or put back, and still lie in the log."""

    partition: int
    first: int
    last: int


class GonePage(NamedTuple):
    dead_letter_topic: str
    runs: list[GoneRun]
    # Where to go on: partition and offset.
    next: tuple[int, int] | None


class LetterCount(NamedTuple):
    topic: str
    dead_letter_topic: str
    letters: int


class LetterFilter(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which dead letters are meant; without anything, all. Times are those of the last failure."""

    reason: str | None = None
    group: str | None = None
    key: bytes | None = None
    # Part of the value or of the error.
    text: str | None = None
    since_ms: int | None = None
    # Not included.
    until_ms: int | None = None

    def check(self) -> None:
        if self.text is not None and not 1 <= len(self.text) <= FILTER_TEXT_MAX:
            raise ParameterInvalid(
                f"text has {len(self.text)} characters; it may have 1 to {FILTER_TEXT_MAX}",
                parameter="text",
            )
        if self.key is not None and len(self.key) > FILTER_TEXT_MAX:
            raise ParameterInvalid(
                f"key has {len(self.key)} bytes; it may have {FILTER_TEXT_MAX}", parameter="key"
            )

    def matches(self, record: Record) -> bool:
        """Looks at no more than it must: a redrive asks this of every dead letter."""
        if self == _ALL:
            return True
        headers = dict(record.headers)
        return (
            _is(self.reason, headers.get(values.REASON_HEADER))
            and _is(self.group, headers.get(values.GROUP_HEADER))
            and (self.key is None or record.key == self.key)
            and self._is_in_time(record, headers)
            and self._has_text(record, headers)
        )

    def _is_in_time(self, record: Record, headers: Mapping[str, bytes | None]) -> bool:
        if self.since_ms is None and self.until_ms is None:
            return True
        failed_ms = _number(headers.get(values.LAST_FAILURE_HEADER))
        time_ms = record.timestamp if failed_ms is None else failed_ms
        since_ms, until_ms = self.since_ms, self.until_ms
        return (since_ms is None or time_ms >= since_ms) and (
            until_ms is None or time_ms < until_ms
        )

    def _has_text(self, record: Record, headers: Mapping[str, bytes | None]) -> bool:
        if self.text is None:
            return True
        text = self.text.encode()
        return text in (record.value or b"") or text in (headers.get(values.ERROR_HEADER) or b"")


_ALL = LetterFilter()


def _is(wanted: str | None, found: bytes | None) -> bool:
    return wanted is None or found == wanted.encode()


class Where(NamedTuple):
    """The dead letters of a topic. Without any there may be no topic for them."""

    origin: str
    dlq: Topic | None

    @property
    def dlq_name(self) -> str:
        return dead_letter_topic(self.origin) if self.dlq is None else self.dlq.name


class DeadLetterReading:
    __slots__ = ("_marks",)

    def __init__(self, marks: DeadLetterMarks) -> None:
        self._marks = marks

    # ---- looking

    def where(self, name: str) -> Where:
        """By the name of a topic, which may be gone, or of its dead letters themselves."""
        topics = self._marks.around.topics
        if is_dead_letter_topic(name):
            return Where(name.removesuffix(values.SUFFIX), topics.get(name))
        dlq = topics.by_name.get(dead_letter_topic(name))
        if dlq is None:
            topics.get(name)
        return Where(name, dlq)

    def left(self, name: str) -> int:
        """How many dead letters a topic has; not before they are settled may a client be told."""
        dlq = self.where(name).dlq
        return 0 if dlq is None else self._marks.left(dlq)

    def counts(self) -> Pending[list[LetterCount]]:
        """Of every topic that has some, by name."""
        return follow(self._counts())

    def _counts(self) -> Generator[Pending[Any], Any, list[LetterCount]]:
        topics = self._marks.around.topics
        found = [topics.get(name) for name in topics.names() if is_dead_letter_topic(name)]
        counts = [
            LetterCount(one.name.removesuffix(values.SUFFIX), one.name, self._marks.left(one))
            for one in found
        ]
        yield self._settled()
        return [one for one in counts if one.letters]

    def list(
        self,
        name: str,
        wanted: LetterFilter,
        *,
        count_max: int = 100,
        partition: int | None = None,
        at: tuple[int, int] = (0, 0),
    ) -> Pending[LetterPage]:
        """Those that a filter means, by partition and offset, from a place on."""
        return follow(self._list(name, wanted, count_max, partition, at))

    def _list(
        self,
        name: str,
        wanted: LetterFilter,
        count_max: int,
        partition: int | None,
        at: tuple[int, int],
    ) -> Generator[Pending[Any], Any, LetterPage]:
        wanted.check()
        _check_between("limit", count_max, 1, LIST_MAX)
        origin, dlq = where = self.where(name)
        del origin
        if dlq is None:
            return LetterPage(where.dlq_name, [], None, 0)
        if partition is not None and not 0 <= partition < dlq.partitions:
            raise partition_unknown(dlq, partition)
        found: list[Letter] = []
        left_bytes, left_records = LIST_BYTES_MAX, SCAN_RECORDS
        number, offset = at
        if partition is not None:
            number, offset = at if at[0] == partition else (partition, 0)
        end_number = dlq.partitions if partition is None else partition + 1
        next_: tuple[int, int] | None = None
        while number < end_number:
            start, end = self._marks.around.reader.offsets(dlq.name, number)
            offset = max(offset, start)
            if offset >= end:
                number, offset = number + 1, 0
                continue
            if len(found) >= count_max or left_bytes <= 0 or left_records <= 0:
                next_ = (number, offset)
                break
            records, offset = yield from self._scan(dlq, number, offset)
            left_records -= SCAN_STEP
            for record in records:
                if not wanted.matches(record):
                    continue
                letter = self._letter(dlq, number, record)
                if letter is None:
                    continue
                found.append(letter)
                left_bytes -= len(record.value or b"") + len(record.key or b"")
                if len(found) >= count_max or left_bytes <= 0:
                    offset = record.offset + 1
                    break
        yield self._settled()
        if not self._marks.is_there(dlq):
            return LetterPage(dlq.name, [], None, 0)
        # What went while others were looked at is not shown.
        found = [one for one in found if self._letter(dlq, one.partition, one.record) is not None]
        return LetterPage(dlq.name, found, next_, self._marks.left(dlq))

    def _scan(
        self, dlq: Topic, number: int, offset: int
    ) -> Generator[Pending[Any], Any, tuple[Sequence[Record], int]]:
        around = self._marks.around
        fetched = yield around.reader.fetch(dlq.name, number, offset, SCAN_STEP, SCAN_BYTES)
        breath: Pending[None] = Pending()
        around.turns.soon(lambda: breath.succeed(None))
        yield breath
        return fetched.records, fetched.next_offset

    def _letter(self, dlq: Topic, number: int, record: Record) -> Letter | None:
        """None when it is gone."""
        start, _ = self._marks.around.reader.offsets(dlq.name, number)
        place = Place(dlq.uuid.bytes, number)
        if record.offset < start or self._marks.view.is_gone(place, record.offset):
            return None
        return letter_of(number, record)

    def gone(
        self, name: str, *, count_max: int = LIST_MAX, at: tuple[int, int] = (0, 0)
    ) -> Pending[GonePage]:
        """What a reader of the log itself has to leave out, by partition and offset."""
        return follow(self._gone(name, count_max, at))

    def _gone(
        self, name: str, count_max: int, at: tuple[int, int]
    ) -> Generator[Pending[Any], Any, GonePage]:
        _check_between("limit", count_max, 1, LIST_MAX)
        where = self.where(name)
        dlq = where.dlq
        if dlq is None:
            return GonePage(where.dlq_name, [], None)
        runs: list[GoneRun] = []
        next_: tuple[int, int] | None = None
        for number in range(at[0], dlq.partitions):
            start, _ = self._marks.around.reader.offsets(dlq.name, number)
            begin = max(start, at[1] if number == at[0] else 0)
            # One more than there is room for tells whether there are more.
            room = count_max - len(runs)
            found = self._marks.view.runs(Place(dlq.uuid.bytes, number), begin, room + 1)
            runs += [GoneRun(number, first, last) for first, last in found[:room]]
            if len(found) > room:
                next_ = (number, found[room][0])
                break
        yield self._settled()
        return GonePage(dlq.name, runs, next_)

    def get(self, name: str, partition: int, offset: int) -> Pending[Letter]:
        return follow(self._get(name, partition, offset))

    def _get(self, name: str, partition: int, offset: int) -> Generator[Pending[Any], Any, Letter]:
        dlq = self._dlq_with(name, partition, offset)
        fetched = yield self._marks.around.reader.fetch(dlq.name, partition, offset, 1, 1)
        letter = None
        if fetched.records and fetched.records[0].offset == offset:
            letter = self._letter(dlq, partition, fetched.records[0])
        yield self._settled()
        if letter is None:
            raise _unknown(name, partition, offset)
        return letter

    def _dlq_with(self, name: str, partition: int, offset: int) -> Topic:
        """The topic of dead letters that has one at a place; raises where there is none."""
        dlq = self.where(name).dlq
        if dlq is None or not 0 <= partition < dlq.partitions:
            raise _unknown(name, partition, offset)
        start, end = self._marks.around.reader.offsets(dlq.name, partition)
        is_gone = self._marks.view.is_gone(Place(dlq.uuid.bytes, partition), offset)
        if not start <= offset < end or is_gone:
            raise _unknown(name, partition, offset)
        return dlq

    def _settled(self) -> Pending[None]:
        return self._marks.around.views.settled(self._marks.view)

    # ---- deleting

    def delete(self, name: str, places: Sequence[tuple[int, int]]) -> Pending[None]:
        """All of them, by partition and offset, or none: when one is not there."""
        return follow(self._delete(name, places))

    def _delete(
        self, name: str, places: Sequence[tuple[int, int]]
    ) -> Generator[Pending[Any], Any, None]:
        if not 1 <= len(places) <= DELETE_MAX:
            raise ParameterInvalid(
                f"there are {len(places)} places; a request deletes 1 to {DELETE_MAX}",
                parameter="places",
            )
        dlq = self._dlq_with(name, *places[0])
        yield from self._marks.free(dlq)
        for place in places:
            dlq = self._dlq_with(name, *place)
        by_partition: dict[int, list[int]] = {}
        for partition, offset in places:
            by_partition.setdefault(partition, []).append(offset)
        with self._marks.changing(dlq):
            view, uuid = self._marks.view, dlq.uuid.bytes
            changes = [
                change
                for partition, offsets in by_partition.items()
                for change in view.marked(Place(uuid, partition), offsets)
            ]
            yield self._marks.around.views.change(view, changes)
        for partition in by_partition:
            self._marks.tidy(dlq, partition)

    def purge(self, name: str) -> Pending[None]:
        """All there are now."""
        return follow(self._purge(name))

    def _purge(self, name: str) -> Generator[Pending[Any], Any, None]:
        dlq = self.where(name).dlq
        if dlq is not None:
            yield self._marks.around.topics.purge(dlq.name)


def letter_of(partition: int, record: Record) -> Letter:
    return Letter(partition, record, record.lane or "normal", facts_of(record))


def facts_of(record: Record) -> LetterFacts:
    """Of a header that stands twice, the last."""
    found = dict(record.headers)
    return LetterFacts(
        _text(found.get(values.TOPIC_HEADER)),
        _number(found.get(values.PARTITION_HEADER)),
        _number(found.get(values.OFFSET_HEADER)),
        _text(found.get(values.GROUP_HEADER)),
        _number(found.get(values.DELIVERIES_HEADER)),
        _text(found.get(values.REASON_HEADER)),
        _text(found.get(values.ERROR_HEADER)),
        _number(found.get(values.FIRST_FAILURE_HEADER)),
        _number(found.get(values.LAST_FAILURE_HEADER)),
        _number(found.get(values.REDRIVES_HEADER)) or 0,
    )


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else raw.decode(errors="replace")


def _number(raw: bytes | None) -> int | None:
    if raw is None or len(raw) > _NUMBER_DIGITS or not raw.isdigit():
        return None
    return int(raw)


def _check_between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ParameterInvalid(f"{name} is {least} to {most}, not {value}", parameter=name)


def _unknown(name: str, partition: int, offset: int) -> DeadLetterUnknown:
    return DeadLetterUnknown(
        f"there is no dead letter {partition}/{offset} of {name}, or it was deleted or redriven; "
        "list them to see those that are there",
        topic=name,
        partition=partition,
        offset=offset,
    )
