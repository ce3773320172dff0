"""What a task does: read the records of one range of offsets and give them as rows.

It goes to the segment files when it was told of them and can see them, and to the broker
otherwise, or from where the files fail it. The topic that it reads must be the one that the query
means: a topic that was deleted and made again under the same name has other records at the same
offsets. Files lie in a directory with the topic's id in its name; over the wire the id is asked
for before the first record is read and after the last.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from millstream.errors import BrokerUnreachable, DataLost, MillstreamError
from millstream.log import batch as batches
from millstream.spark import fetching, segments
from millstream.spark.fetching import Found
from millstream.spark.kafka_client import GONE_S, Kafka
from millstream.spark.manifests import Away, PartFiles, files_of, patiently
from millstream.spark.options import BrokerPlace
from millstream.spark.patience import PAUSE_S, PAUSE_S_MAX
from millstream.spark.positions import EARLIEST, LATEST, Part, show
from millstream.spark.ranges import Range
from millstream.spark.rows import Rows, Shape
from millstream.wire.retry import RetryPolicy

logger = logging.getLogger("millstream.spark")

# Spark is quickest with batches of some ten thousand rows; more bytes at once only take memory.
ROWS_MAX = 32 * 1024
CHUNK_BYTES_MAX = 4 * 2**20
# With access=files: how long files are waited for, which lie behind the broker by its flushes.
FILES_S = 10.0
FILES_PAUSE_S = 0.02

# In the key of a control record: its version, then what it says.
_ABORT = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What all tasks of a query have in common."""

    place: BrokerPlace
    servers: tuple[str, ...]
    shape: Shape
    access: str
    isolation: int
    fetch_bytes: int
    is_failing_on_loss: bool


@dataclass(frozen=True, slots=True)
class Task:
    range: Range
    # None where the broker has no ids.
    topic_id: str | None
    # None: over the wire.
    files: PartFiles | None


@dataclass(slots=True)
class Progress:
    """Where a task is; what reads for it moves it on."""

    offset: int
    # Records before are not given, though they may come in a batch with others.
    first: int


def read(
    reading: Reading,
    task: Task,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Any]:
    """The rows as pa.RecordBatches, in the order of their offsets."""
    part, start, end = task.range
    rows = Rows(reading.shape, part)
    progress = Progress(start, start)
    if task.files is not None and (reading.access == "files" or segments.can_see(task.files)):
        found = _from_files(reading, task, task.files, progress, clock=clock, sleep=sleep)
        yield from _rows(rows, found, progress, end)
    if progress.offset < end:
        found = _from_wire(reading, task, progress, clock=clock, sleep=sleep)
        yield from _rows(rows, found, progress, end)


def _rows(rows: Rows, found: Iterator[Found], progress: Progress, end: int) -> Iterator[Any]:
    dropping = Dropping()
    for one in found:
        for chunk in chunks(one, dropping):
            first, is_append_time = progress.first, chunk.is_append_time
            made = rows.make(chunk.data, first, end, is_append_time=is_append_time)
            if made.num_rows:
                yield made


# ---- batches as chunks


class Chunk(NamedTuple):
    """Whole batches that are decoded at once."""

    data: memoryview
    is_append_time: bool


class Dropping:
    """Producers whose transaction was given up, as long as its records come."""

    __slots__ = ("_known", "_open")

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._open: set[int] = set()

    def drops(self, found: Found, at: int, header: batches.Header) -> bool:
        if not found.aborted and not self._open:
            return False
        for one in found.aborted:
            # Each is told of with every answer that it reaches into, and counts once.
            if one[1] <= header.last_offset and one not in self._known:
                self._known.add(one)
                self._open.add(one[0])
        if header.is_control:
            if _says_abort(found.data[at : at + header.size]):
                self._open.discard(header.producer_id)
            return False
        return header.is_transactional and header.producer_id in self._open


def _says_abort(data: memoryview) -> bool:
    for record in batches.decode(data):
        key = record.key or b""
        return int.from_bytes(key[2:4], "big", signed=True) == _ABORT
    return False


def chunks(found: Found, dropping: Dropping) -> Iterator[Chunk]:
    """Runs of batches that are small enough, alike, and not to be dropped."""
    begin = end = rows = 0
    is_append_time = False
    for at, header in found.headers:
        is_dropped = dropping.drops(found, at, header)
        is_other = (
            is_dropped
            or header.is_append_time != is_append_time
            or rows + header.count > ROWS_MAX
            or at + header.size - begin > CHUNK_BYTES_MAX
        )
        if is_other and end > begin:
            yield Chunk(found.data[begin:end], is_append_time)
            rows = 0
        if is_other or end == 0:
            begin, rows = at, 0
            is_append_time = header.is_append_time
        if is_dropped:
            begin = end = at + header.size
        else:
            end = at + header.size
            rows += header.count
    if end > begin:
        yield Chunk(found.data[begin:end], is_append_time)


# ---- from files


def _from_files(
    reading: Reading,
    task: Task,
    files: PartFiles,
    progress: Progress,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[Found]:
    """As far as the files go. With access=files they must go all the way."""
    deadline = clock() + FILES_S
    while True:
        try:
            for found in segments.read(files, progress.offset, task.range.end):
                progress.offset = found.headers[-1][1].next_offset
                deadline = clock() + FILES_S
                yield found
            progress.offset = task.range.end
            return
        except segments.Unusable as error:
            progress.offset = max(progress.offset, error.offset)
            if reading.access != "files" and not error.is_missing:
                return
            asked_s = clock()
            try:
                again = _files_again(reading, task, clock=clock, sleep=sleep)
            except Away:
                if reading.access != "files":
                    return
                raise
            # While the broker was away, files could not come.
            deadline += clock() - asked_s
            is_hopeless = again is None or (again == files and clock() >= deadline)
            if again is None and reading.access != "files":
                return
            if again is not None and again.start_offset > progress.offset:
                skip_or_fail(reading, task.range, progress, again.start_offset, "retention")
                if progress.offset >= task.range.end:
                    return
            elif is_hopeless or clock() >= deadline:
                raise _no_files(files, task, error) from error
            files = again or files
            sleep(FILES_PAUSE_S)


def _files_again(
    reading: Reading,
    task: Task,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> PartFiles | None:
    """What there is by now; None when the topic is gone, or another. Away when the broker is, which
    is waited for where there is no other way to the bytes."""
    topic, number = task.range.part
    ask = partial(files_of, reading.place, topic, [number])
    try:
        if reading.access == "files":
            found = patiently(reading.place, ask, clock=clock, sleep=sleep)
        else:
            found = ask()
    except Away:
        raise
    except MillstreamError:
        return None
    files = found.get(number)
    before = task.files
    return files if files is not None and before and files.uuid == before.uuid else None


def _no_files(files: PartFiles, task: Task, error: segments.Unusable) -> DataLost:
    topic, number = task.range.part
    return DataLost(
        f"{show(task.range.part)} cannot be read from its files in {files.directory} at offset "
        f"{error.offset}: {error}; use access=auto or access=wire",
        topic=topic,
        partition=number,
        first=error.offset,
        last=task.range.end - 1,
    )


# ---- over the wire


def _from_wire(
    reading: Reading,
    task: Task,
    progress: Progress,
    *,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[Found]:
    part, start, end = task.range
    with Kafka(
        reading.place, reading.servers, isolation=reading.isolation, clock=clock, sleep=sleep
    ) as kafka:

        def is_gone() -> bool:
            return _is_gone(kafka, task, sleep)

        if is_gone():
            skip_or_fail(reading, task.range, progress, end, "its topic was deleted")
            return
        policy = RetryPolicy(reading.place.patience_s, PAUSE_S, PAUSE_S_MAX)
        pauses, deadline = policy.pauses(), clock() + policy.timeout_s
        reached = progress.offset
        while progress.offset < end:
            try:
                for found in fetching.read(
                    kafka,
                    part,
                    progress.offset,
                    end,
                    bytes_max=reading.fetch_bytes,
                    is_gone=is_gone,
                    clock=clock,
                    sleep=sleep,
                ):
                    progress.offset = found.headers[-1][1].next_offset
                    yield found
                progress.offset = end
            except fetching.Gone:
                skip_or_fail(reading, task.range, progress, end, "its topic was deleted")
                return
            except fetching.OutOfRange as error:
                if progress.offset != reached:
                    reached, pauses = progress.offset, policy.pauses()
                    deadline = clock() + policy.timeout_s
                if _has_skipped(kafka, reading, task, progress):
                    continue
                pause_s = pauses.next_s()
                if clock() + pause_s >= deadline:
                    raise _contradiction(reading, part, progress.offset) from error
                sleep(pause_s)
        if is_gone():
            # What was given out may be of either topic. The task is tried again, and finds out
            # before its first record.
            raise data_lost(part, start, end, "its topic was deleted meanwhile")


def _has_skipped(kafka: Kafka, reading: Reading, task: Task, progress: Progress) -> bool:
    """Past what is lost. False where the broker says that it has what is out of range, also when
    its log ends before the task does: one that follows another, or does not know the topic for a
    moment."""
    part, _, end = task.range
    earliest = kafka.list_offsets({part: EARLIEST}).get(part)
    latest = kafka.list_offsets({part: LATEST}).get(part)
    if earliest is not None and progress.offset < earliest:
        skip_or_fail(reading, task.range, progress, earliest, "retention")
    elif latest is not None and latest <= progress.offset:
        skip_or_fail(reading, task.range, progress, end, "the log's end was lost")
    else:
        return False
    return True


def _contradiction(reading: Reading, part: Part, offset: int) -> BrokerUnreachable:
    return BrokerUnreachable(
        f"the broker says that offset {offset} of {show(part)} is out of range, and also that its "
        f"log has it; it was tried for {reading.place.patience_s:g} s (the option "
        "kafkaConsumer.pollTimeoutMs)",
        server=", ".join(reading.servers),
    )


def _is_gone(kafka: Kafka, task: Task, sleep: Callable[[float], None]) -> bool:
    """Whether the topic that is meant is there no more, or another one has its name. One that the
    broker does not know is looked for twice."""
    topic, number = task.range.part
    for pause_s in (GONE_S, None):
        facts = kafka.metadata([topic]).topics.get(topic)
        if facts is not None and number in facts.leaders:
            return task.topic_id is not None and facts.id is not None and facts.id != task.topic_id
        if pause_s is not None:
            sleep(pause_s)
    return True


# ---- what is lost


def skip_or_fail(reading: Reading, wanted: Range, progress: Progress, until: int, why: str) -> None:
    """Go on at `until`, or DataLost, as the options say."""
    until = min(until, wanted.end)
    if reading.is_failing_on_loss:
        raise data_lost(wanted.part, progress.offset, until, why)
    logger.warning(
        "%s: skipped %d offsets, %d to %d, which are gone (%s)",
        show(wanted.part),
        until - progress.offset,
        progress.offset,
        until - 1,
        why,
    )
    progress.offset = progress.first = until


def data_lost(part: Part, first: int, until: int | None, why: str) -> DataLost:
    """`until` is None where nobody knows how many there were."""
    which = f"offsets {first} to {until - 1}" if until is not None else f"records from {first} on"
    return DataLost(
        f"{which} of {show(part)} are gone before they were read ({why}); "
        "to skip what is gone, set failOnDataLoss to false",
        topic=part[0],
        partition=part[1],
        first=first,
        last=None if until is None else until - 1,
    )
