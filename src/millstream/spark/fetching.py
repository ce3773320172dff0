"""Reading one partition over the Kafka protocol: the path that every record takes.

The request is built by hand, and the records of an answer stay where the socket wrote them. The
next request leaves before the records of an answer are looked at, so that the broker reads while
they are decoded.

    request and response: `wire/kafka/fetch.py`, versions 4 to 12, from the other side
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from struct import Struct
from typing import NamedTuple

from millstream.errors import BatchInvalid, BrokerUnreachable
from millstream.log import batch as batches
from millstream.log.batch import Header
from millstream.spark.kafka_client import (
    Again,
    Broken,
    Connection,
    Kafka,
    code_name,
    refused,
)
from millstream.spark.patience import PAUSE_S, PAUSE_S_MAX
from millstream.spark.positions import Part
from millstream.wire.kafka import fetch as wire
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.primitives import Cursor, count, nullable_string, string
from millstream.wire.retry import RetryPolicy

WAIT_MS = 500
# So often a broker says that nothing is there, although offsets follow, before that is believed:
# compaction took the records, and a broker that is busy may give nothing once.
EMPTY_TRIES = 3
NO_OFFSET = -1
# A log that is damaged says so in the words of a disk that fails, which may pass.
STORAGE_TRIES = 3

_REQUEST = Struct(">hhi")
_HEAD_4 = Struct(">iiiib")
_HEAD_7 = Struct(">iiiibii")
_PART_4, _PART_5, _PART_9, _PART_12 = (
    Struct(">iqi"),
    Struct(">iqqi"),
    Struct(">iiqqi"),
    Struct(">iiqiqi"),
)
_GIVEN_4, _GIVEN_5 = Struct(">ihqq"), Struct(">ihqqq")
_ABORTED = Struct(">qq")
_INT32 = Struct(">i")


class Found(NamedTuple):
    """Whole batches, one after the other, and what is known of each."""

    data: memoryview
    headers: list[tuple[int, Header]]
    # Of transactions that were given up: producer, and the offset of its first record.
    aborted: list[tuple[int, int]]


class OutOfRange(Exception):
    """The offset is not in the log: before its start, or past its end."""


class Gone(Exception):
    """There is no such topic or partition any more."""


class Throttled(Again):
    """The broker gave nothing, because a quota is used up, and said for how long."""

    def __init__(self, after_s: float) -> None:
        super().__init__(f"a quota is used up for {after_s:g} s")
        self.after_s = after_s


class _Answer(NamedTuple):
    code: int
    high_watermark: int
    # Records before are of transactions that have ended.
    stable_offset: int
    aborted: list[tuple[int, int]]
    records: memoryview


def read(
    kafka: Kafka,
    part: Part,
    start: int,
    end: int,
    *,
    bytes_max: int,
    is_gone: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Found]:
    """Batches with records of [start, end), while the broker comes and goes. The first and the
    last may have others too. OutOfRange or Gone when that is so, at the offset that was reached;
    `is_gone` is asked when the broker does not know the topic, as happens while it starts."""
    position = start
    policy = RetryPolicy(kafka.place.patience_s, PAUSE_S, PAUSE_S_MAX)
    pauses, deadline = policy.pauses(), clock() + policy.timeout_s
    storage_tries = empty_tries = 0
    stream: _Stream | None = None
    while position < end:
        try:
            if stream is None:
                stream = _Stream(kafka.leader(part), kafka.isolation, part, bytes_max)
            answer = stream.next(position)
            if answer.code == Code.KAFKA_STORAGE_ERROR and storage_tries < STORAGE_TRIES:
                storage_tries += 1
                raise Again("the broker could not read its disk")
            _check(answer.code, part, is_gone)
        except (Broken, Again) as error:
            after_s = error.after_s if isinstance(error, Throttled) else None
            if after_s is None:
                stream = None
                kafka.close()
                kafka.forget(part[0])
            pause_s = pauses.next_s(after_s)
            if clock() + pause_s >= deadline:
                raise kafka.unreachable(error) from error
            sleep(pause_s)
            continue
        found = _whole(answer, position)
        if found is None:
            empty_tries = empty_tries + 1 if _reach(answer, kafka) >= end else 0
            if empty_tries == EMPTY_TRIES:
                return
            if clock() >= deadline:
                raise _silent(answer, kafka, part, position)
            continue
        position = found.headers[-1][1].next_offset
        if position < end:
            try:
                stream.ask(position)
            except Broken:
                stream = None
        yield found
        # Time that others took for what was read is not the broker's.
        pauses, deadline = policy.pauses(), clock() + policy.timeout_s
        storage_tries = empty_tries = 0


def sample(kafka: Kafka, part: Part, offset: int, bytes_max: int) -> float | None:
    """About how many bytes an offset has from there on; None when there is nothing."""
    stream = _Stream(kafka.leader(part), kafka.isolation, part, bytes_max)
    answer = stream.next(offset)
    found = None if answer.code else _whole(answer, offset)
    if found is None:
        return None
    span = found.headers[-1][1].next_offset - found.headers[0][1].base_offset
    return len(found.data) / span


def _check(code: int, part: Part, is_gone: Callable[[], bool]) -> None:
    what = f"the records of {part[0]}/{part[1]}"
    if code == Code.OFFSET_OUT_OF_RANGE:
        raise OutOfRange
    if code in (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID):
        if is_gone():
            raise Gone
        raise Again(f"the broker answered {code_name(code)} for {what}")
    if code:
        raise refused(code, what)


def _reach(answer: _Answer, kafka: Kafka) -> int:
    """Up to where a reader of this isolation is given records."""
    return answer.stable_offset if kafka.isolation else answer.high_watermark


def _silent(answer: _Answer, kafka: Kafka, part: Part, position: int) -> BrokerUnreachable:
    reach = _reach(answer, kafka)
    why = f"its log ends at {reach}"
    if reach < answer.high_watermark:
        why = f"a transaction is open at offset {reach}"
    return BrokerUnreachable(
        f"no record of {part[0]}/{part[1]} came at offset {position} for "
        f"{kafka.place.patience_s:g} s (the option kafkaConsumer.pollTimeoutMs): {why}",
        server=", ".join(kafka.servers),
    )


def _whole(answer: _Answer, position: int) -> Found | None:
    """None when there is no whole batch with this offset, or a later one."""
    data = answer.records
    scan = batches.scan(data, 0, 0, exact=False)
    if scan.reason == "invalid":
        # Says what is wrong with it.
        size = batches.read_header(data, scan.end).size
        batches.verify(data[scan.end : scan.end + size], bytes_max=len(data), exact_count=False)
        raise BatchInvalid(f"a batch at offset {scan.next_offset} cannot be read")
    headers = [one for one in scan.batches if one[1].next_offset > position]
    if not headers:
        return None
    return Found(data[: scan.end], headers, answer.aborted)


class _Stream:
    """Fetches on one connection, at most one of them under way."""

    __slots__ = ("_asked", "_build", "_connection", "_version")

    def __init__(self, connection: Connection, isolation: int, part: Part, bytes_max: int) -> None:
        self._connection = connection
        self._version = connection.version_of(wire.KEY, wire.VERSIONS[1])
        self._build = _requests(self._version, isolation, part, bytes_max)
        self._asked: int | None = None

    def ask(self, offset: int) -> None:
        self._connection.send(self._build(offset))
        self._asked = offset

    def next(self, offset: int) -> _Answer:
        """What comes at an offset; it may have been asked for already."""
        if self._asked != offset:
            assert self._asked is None
            self.ask(offset)
        frame = self._connection.receive()
        self._asked = None
        return _read_answer(frame, self._version)


def _requests(version: int, isolation: int, part: Part, bytes_max: int) -> Callable[[int], bytes]:
    """All but the offset is the same each time."""
    flexible = version >= wire.FLEXIBLE_FROM
    head = _REQUEST.pack(wire.KEY, version, 0) + nullable_string("millstream-spark", False)
    tags = b"\0" if flexible else b""
    head += tags
    if version >= wire.SESSIONS_FROM:
        head += _HEAD_7.pack(
            -1, WAIT_MS, 1, bytes_max, isolation, wire.NO_SESSION, wire.FINAL_EPOCH
        )
    else:
        head += _HEAD_4.pack(-1, WAIT_MS, 1, bytes_max, isolation)
    head += count(1, flexible) + string(part[0], flexible) + count(1, flexible)
    tail = tags + tags
    if version >= wire.SESSIONS_FROM:
        tail += count(0, flexible)
    if version >= 11:
        tail += string("", flexible)
    tail += tags

    def build(offset: int) -> bytes:
        number = part[1]
        if version >= 12:
            one = _PART_12.pack(number, -1, offset, -1, -1, bytes_max)
        elif version >= 9:
            one = _PART_9.pack(number, -1, offset, -1, bytes_max)
        elif version >= 5:
            one = _PART_5.pack(number, offset, -1, bytes_max)
        else:
            one = _PART_4.pack(number, offset, bytes_max)
        return _INT32.pack(len(head) + len(one) + len(tail)) + head + one + tail

    return build


def _read_answer(frame: memoryview, version: int) -> _Answer:
    """Of the one partition that was asked for; Throttled when there is nothing of it."""
    flexible = version >= wire.FLEXIBLE_FROM
    cursor = Cursor(frame, 4, flexible=flexible)
    cursor.skip_tags()
    (throttle_ms,) = cursor.unpack(_INT32)
    if version >= wire.SESSIONS_FROM:
        code = int.from_bytes(cursor.take(2), "big", signed=True)
        cursor.take(4)
        if code:
            return _Answer(code, NO_OFFSET, NO_OFFSET, [], frame[:0])
    if cursor.count(1) == 0:
        raise Throttled(max(throttle_ms, 0) / 1000)
    cursor.string()
    cursor.count(1)
    given = cursor.unpack(_GIVEN_5 if version >= 5 else _GIVEN_4)
    aborted = []
    for _ in range(cursor.count(_ABORTED.size)):
        producer, first = cursor.unpack(_ABORTED)
        aborted.append((producer, first))
        cursor.skip_tags()
    if version >= 11:
        cursor.take(4)
    records = cursor.nullable_bytes()
    code, high_watermark, stable_offset = given[1:4]
    if stable_offset == NO_OFFSET:
        # The broker does not tell.
        stable_offset = high_watermark
    data = frame[:0] if records is None else records
    return _Answer(code, high_watermark, stable_offset, aborted, data)
