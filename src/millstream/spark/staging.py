"""What one task of the sink does with Millstream: its rows become batches, and these are staged.

Nothing of it is in a topic before the whole write is committed. Staging something twice does no
harm: only the parts that are named in the commit count. While one request is on its way, the next
rows are encoded.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, Self

import pyarrow as pa

from millstream.client import Client
from millstream.errors import PartitionUnknown, RowInvalid, TopicExists, TopicUnknown
from millstream.log.batch import encode
from millstream.spark.dead_rows import bytes_wanted, dead_entries
from millstream.spark.encoding import BadRow, Encoder, TopicShape, is_topic_name
from millstream.spark.options import BrokerPlace
from millstream.spark.sink_options import SinkOptions
from millstream.wire.dead_letters import dead_letter_topic, is_dead_letter_topic
from millstream.wire.staged import BODY_BYTES_MAX, NO_PART, StagedEntry, join_entries

# So much of rows is encoded at once. Several batches of several partitions come of it, and it is
# in memory three times: as rows, as batches, and on its way.
CHUNK_BYTES = 4 * 1024 * 1024
REQUESTS_AT_ONCE = 2
# No topic has so many partitions.
NO_PARTITION = 2**31 - 1
# What a body has beside names and batches, for each entry.
ENTRY_HEAD_BYTES = 14
# One answer of the broker: what it stages is on disk by then.
ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Which attempt of which task writes which batch of which writer."""

    writer: str
    batch: int
    task: int
    attempt: int
    # The query, of a stream: under a name of its own two of them may write the same number.
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class TaskDone:
    """What a task tells the driver."""

    writer: str
    batch: int
    parts: tuple[str, ...]
    rows: int
    dead: int
    owner: str | None = None


class Broker(Protocol):
    """What is asked of a broker while rows are staged."""

    def stage(self, place: TaskPlace, body: bytes) -> str: ...
    def shape_of(self, topic: str) -> TopicShape | None: ...
    def ensure_dead_letters(self, topic: str, bytes_max: int) -> int: ...


def client_of(url: str, place: BrokerPlace, patience_s: float) -> Client:
    tls = None
    if place.ca is not None and url.startswith("https:"):
        tls = ssl.create_default_context()
        tls.load_verify_locations(place.ca)
    return Client(url, retry_s=patience_s, answer_s=ANSWER_S, tls=tls)


class MillstreamBroker:
    """A broker over HTTP."""

    __slots__ = ("_client", "_shapes")

    def __init__(self, client: Client) -> None:
        self._client = client
        self._shapes: dict[str, TopicShape | None] = {}

    def stage(self, place: TaskPlace, body: bytes) -> str:
        return self._client.writers.stage(
            place.writer, place.batch, place.task, place.attempt, body, owner=place.owner
        ).part

    def shape_of(self, topic: str) -> TopicShape | None:
        if topic not in self._shapes:
            self._shapes[topic] = self._find(topic)
        return self._shapes[topic]

    def _find(self, topic: str) -> TopicShape | None:
        if not is_topic_name(topic):
            return None
        try:
            facts = self._client.topics.describe(topic)
        except TopicUnknown:
            if not self._can_be_made(topic):
                return None
            facts = self._client.topics.describe(topic)
        settings = facts.settings
        return TopicShape(
            name=topic,
            partitions=facts.partitions,
            partitioner=settings["partitioner"],
            message_bytes_max=settings["message_bytes_max"],
            is_compacted=settings["compact"],
        )

    def _can_be_made(self, topic: str) -> bool:
        """Whether the broker makes topics when something comes for them, and then it has made
        this one: something came, for a partition that there cannot be."""
        probe = StagedEntry(topic, NO_PARTITION, 0, encode([(0, b"", b"", ())]))
        try:
            self._client.writers.stage("spark-probe", 0, 0, 0, join_entries([probe]))
        except PartitionUnknown:
            return True
        except TopicUnknown:
            return False
        raise AssertionError("a partition that there cannot be was taken")

    def ensure_dead_letters(self, topic: str, bytes_max: int) -> int:
        """How many partitions the topic of its dead letters has, which then takes such records."""
        facts = self._client.topics.describe(topic)
        name = dead_letter_topic(topic)
        settings = {
            "fsync": facts.settings["fsync"],
            "message_bytes_max": bytes_max,
            "compact": False,
            "retention_ms": _twice(facts.settings["retention_ms"]),
        }
        try:
            found = self._client.topics.describe(name)
        except TopicUnknown:
            found = self._make(name, facts.partitions, settings)
        if found.partitions < facts.partitions:
            found = self._client.topics.add_partitions(name, facts.partitions)
        if found.settings["message_bytes_max"] < bytes_max or found.settings["compact"]:
            self._client.topics.alter(name, {"message_bytes_max": bytes_max, "compact": False})
        return found.partitions

    def _make(self, name: str, partitions: int, settings: dict[str, object]) -> Any:
        try:
            return self._client.topics.create(name, partitions=partitions, settings=settings)
        except TopicExists:
            # Another task has made it meanwhile.
            return self._client.topics.describe(name)


def _twice(retention_ms: object) -> object:
    """A dead letter keeps the time of its record: it would be gone soon after it came."""
    return 2 * retention_ms if isinstance(retention_ms, int) else "unlimited"


# ---- a task


def stage_rows(
    batches: Iterable[Any],
    options: SinkOptions,
    place: TaskPlace,
    broker: Broker,
    now_ms: Callable[[], int],
) -> TaskDone:
    """Stage all rows of a task; RowInvalid for the first that cannot be a record, unless they are
    to go to the dead letters."""
    encoder = Encoder(
        topic=options.topic,
        compression=options.compression,
        batch_bytes=options.batch_bytes,
        shape_of=broker.shape_of,
        now_ms=now_ms,
        first_turn=place.task + place.batch,
    )
    rows = dead = 0
    with _Requests(broker, place) as requests:
        for chunk in chunks(batches, CHUNK_BYTES):
            if requests.is_needless:
                # The batch is committed: rows are only counted.
                rows += chunk.num_rows
                continue
            encoded = encoder.encode(shown(chunk, options), rows)
            entries = encoded.entries
            if encoded.bad:
                if not options.to_dead_letters:
                    raise _row_invalid(encoded.bad[0], place, broker)
                entries += _dead(chunk, encoded.bad, place, broker, now_ms())
                dead += len(encoded.bad)
            requests.add(entries)
            rows += chunk.num_rows
        parts = requests.finish()
    return TaskDone(place.writer, place.batch, parts, rows, dead, place.owner)


def shown(chunk: Any, options: SinkOptions) -> Any:
    """Without the columns that are not to be written."""
    if options.include_headers or "headers" not in chunk.schema.names:
        return chunk
    return chunk.drop_columns(["headers"])


def _row_invalid(bad: BadRow, place: TaskPlace, broker: Broker) -> RowInvalid:
    what = f"row {bad.row} of task {place.task}, counted from 0, cannot be written: {bad.reason}"
    if _has_dead_letters(bad.topic, broker):
        what += (
            ". With the option onError = deadletter such rows go to the dead letters of their topic"
        )
    return RowInvalid(what, row=bad.row, topic=bad.topic)


def _has_dead_letters(topic: str | None, broker: Broker) -> bool:
    """Whether they can take a row of the topic."""
    return (
        topic is not None
        and topic != ""
        and not is_dead_letter_topic(topic)
        and broker.shape_of(topic) is not None
    )


def _dead(
    chunk: Any, bad: list[BadRow], place: TaskPlace, broker: Broker, now_ms: int
) -> list[StagedEntry]:
    entries: list[StagedEntry] = []
    for topic, rows in groupby(sorted(bad, key=_topic_of), key=_topic_of):
        those = list(rows)
        if not _has_dead_letters(topic, broker):
            first = min(those)
            raise RowInvalid(
                f"row {first.row} of task {place.task}, counted from 0, cannot be written: "
                f"{first.reason}. There is no topic whose dead letters could take it",
                row=first.row,
                topic=topic or None,
            )
        partitions = broker.ensure_dead_letters(topic, bytes_wanted(those))
        entries += dead_entries(
            chunk, those, topic, writer=place.writer, partitions=partitions, now_ms=now_ms
        )
    return entries


def _topic_of(bad: BadRow) -> str:
    return bad.topic or ""


def chunks(batches: Iterable[Any], bytes_max: int) -> Iterator[Any]:
    """The same rows in record batches of about so many bytes, at least a row in each."""
    kept: list[Any] = []
    size = 0
    for batch in batches:
        more = batch.get_total_buffer_size() if batch.num_rows else 0
        for piece in _sliced(batch, more, bytes_max):
            kept.append(piece)
            size += more * piece.num_rows // batch.num_rows
            if size >= bytes_max:
                yield _joined(kept)
                kept, size = [], 0
    if kept:
        yield _joined(kept)


def _sliced(batch: Any, size: int, bytes_max: int) -> Iterator[Any]:
    if size <= 2 * bytes_max:
        if batch.num_rows:
            yield batch
        return
    rows = max(1, batch.num_rows * bytes_max // size)
    for at in range(0, batch.num_rows, rows):
        yield batch.slice(at, rows)


def _joined(batches: list[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    [joined] = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


class _Requests:
    """Entries on their way to the broker, a few requests at a time."""

    __slots__ = ("_broker", "_flying", "_open", "_open_bytes", "_parts", "_place", "_pool")

    def __init__(self, broker: Broker, place: TaskPlace) -> None:
        self._broker = broker
        self._place = place
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, "millstream-stage")
        self._flying: deque[Future[str]] = deque()
        self._open: list[StagedEntry] = []
        self._open_bytes = 0
        self._parts: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def is_needless(self) -> bool:
        """Whether the broker said that the whole batch is committed already."""
        return NO_PART in self._parts

    def add(self, entries: Iterable[StagedEntry]) -> None:
        for entry in entries:
            size = ENTRY_HEAD_BYTES + len(entry.topic.encode()) + len(entry.batch)
            if self._open and self._open_bytes + size > BODY_BYTES_MAX:
                self._send()
            self._open.append(entry)
            self._open_bytes += size
        if self._open_bytes >= BODY_BYTES_MAX // 2:
            self._send()

    def finish(self) -> tuple[str, ...]:
        if self._open:
            self._send()
        while self._flying:
            self._parts.append(self._flying.popleft().result())
        return tuple(self._parts)

    def _send(self) -> None:
        body = join_entries(self._open)
        self._open, self._open_bytes = [], 0
        while len(self._flying) >= REQUESTS_AT_ONCE:
            self._parts.append(self._flying.popleft().result())
        self._flying.append(self._pool.submit(self._broker.stage, self._place, body))
