"""What one task of the sink does with a broker that is not Millstream: it produces its rows.

The producer is idempotent, so a request that is sent again is stored once. A task that is tried
again writes its rows again, and so does a micro-batch that is replayed: rows are there at least
once, as Spark's own connector has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from millstream.errors import KafkaAnswerInvalid, KafkaRefused, RowInvalid
from millstream.log.batch import HEADER_BYTES, Header, Record, decode, read_header, sealed
from millstream.spark.encoding import Encoder, TopicShape
from millstream.spark.kafka_client import Connection, Kafka, code_name, refused
from millstream.spark.sink_options import SinkOptions
from millstream.spark.staging import CHUNK_BYTES, TaskDone, TaskPlace, chunks, shown
from millstream.wire.kafka import produce_request as wire
from millstream.wire.kafka.codes import Code
from millstream.wire.kafka.primitives import RequestInvalid
from millstream.wire.staged import StagedEntry

Part: TypeAlias = tuple[str, int]

REQUEST_MS = 30_000
# The config of a topic that says how large a batch may be, as it is sent; and a batch where nobody
# says. What is too large for the broker, it refuses.
BATCH_LIMIT = "max.message.bytes"
NO_LIMIT = 2**31 - 1
# Of several batches in one request; a broker of Kafka takes a hundred mebibytes.
REQUEST_BYTES_MAX = 16 * 1024 * 1024
# What an answer says when the batch was stored by an earlier try.
DUPLICATE_SEQUENCE = 46
# The broker knows nothing of the producer (any more), or of what came before.
OUT_OF_ORDER_SEQUENCE, INVALID_PRODUCER_EPOCH, UNKNOWN_PRODUCER_ID = 45, 47, 59
STRANGERS = frozenset((OUT_OF_ORDER_SEQUENCE, INVALID_PRODUCER_EPOCH, UNKNOWN_PRODUCER_ID))
SEQUENCES = 2**31
# So often in a row a producer is introduced anew before a task gives up.
RENEWALS_MAX = 5


def produce_rows(
    batches: Iterable[Any], options: SinkOptions, place: TaskPlace, now_ms: Callable[[], int]
) -> TaskDone:
    with Kafka(options.place, options.place.servers) as kafka:
        shapes = Shapes(kafka, options)
        producer = IdempotentProducer(kafka, options.request_bytes or REQUEST_BYTES_MAX)
        encoder = Encoder(
            topic=options.topic,
            compression=options.compression,
            batch_bytes=options.batch_bytes,
            shape_of=shapes.of,
            now_ms=now_ms,
            first_turn=place.task + place.batch,
        )
        rows = 0
        for chunk in chunks(batches, CHUNK_BYTES):
            encoded = encoder.encode(shown(chunk, options), rows)
            if encoded.bad:
                bad = encoded.bad[0]
                raise RowInvalid(
                    f"row {bad.row} of task {place.task}, counted from 0, cannot be written: "
                    f"{bad.reason}",
                    row=bad.row,
                    topic=bad.topic,
                )
            for entry in encoded.entries:
                if len(entry.batch) > shapes.limit(entry.topic):
                    raise _too_large(entry, shapes.limit(entry.topic), chunk, rows, place.task)
            producer.send(encoded.entries)
            rows += chunk.num_rows
    return TaskDone(place.writer, place.batch, (), rows, 0)


def _too_large(entry: StagedEntry, limit: int, chunk: Any, first_row: int, task: int) -> RowInvalid:
    """A batch of one row, for several are kept smaller. Which row it is, its bytes tell."""
    [record] = decode(entry.batch)
    row = first_row + _place_of(record, chunk)
    return RowInvalid(
        f"row {row} of task {task}, counted from 0, cannot be written: as a batch it has "
        f"{len(entry.batch)} bytes, and topic {entry.topic} takes {limit}; raise its {BATCH_LIMIT},"
        " compress, or make the value smaller",
        row=row,
        topic=entry.topic,
    )


def _place_of(record: Record, chunk: Any) -> int:
    for row in range(chunk.num_rows):
        if all(
            name not in chunk.schema.names
            or _bytes_of(chunk.column(name)[row].as_py()) == getattr(record, name)
            for name in ("value", "key")
        ):
            return row
    raise AssertionError("a batch is of the rows that it was made of")


def _bytes_of(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


class Shapes:
    """What is known of topics. The rest a broker says when it refuses a batch."""

    __slots__ = ("_found", "_is_compressed", "_kafka", "_limits", "_row_bytes_max")

    def __init__(self, kafka: Kafka, options: SinkOptions) -> None:
        self._kafka = kafka
        self._is_compressed = options.compression != "none"
        self._row_bytes_max = options.request_bytes or NO_LIMIT
        self._found: dict[str, TopicShape | None] = {}
        self._limits: dict[str, int] = {}

    def of(self, topic: str) -> TopicShape | None:
        if topic not in self._found:
            facts = self._kafka.metadata([topic]).topics.get(topic)
            self._found[topic] = (
                None
                if facts is None or not facts.leaders
                else TopicShape(
                    topic,
                    len(facts.leaders),
                    "murmur2",
                    self._row_bytes_max,
                    False,
                    self._several_bytes_max(topic),
                    "the option kafka.max.request.size",
                )
            )
        return self._found[topic]

    def limit(self, topic: str) -> int:
        """The most bytes of a batch as it is sent."""
        if topic not in self._limits:
            text = self._kafka.topic_config(topic, BATCH_LIMIT)
            self._limits[topic] = NO_LIMIT if text is None else int(text)
        return self._limits[topic]

    def _several_bytes_max(self, topic: str) -> int:
        """Of a batch of several rows before it is compressed: what cannot be made smaller becomes
        a sixth larger by the worst of the compressions, and a little."""
        limit = self.limit(topic)
        return limit - limit // 6 - 64 if self._is_compressed else limit


class IdempotentProducer:
    """Batches with the numbers by which a broker knows those that it has."""

    __slots__ = ("_kafka", "_producer", "_renewals", "_request_bytes", "_sequences")

    def __init__(self, kafka: Kafka, request_bytes: int = REQUEST_BYTES_MAX) -> None:
        self._kafka = kafka
        self._request_bytes = request_bytes
        self._producer: wire.Producer | None = None
        self._sequences: dict[Part, int] = {}
        self._renewals = 0

    def send(self, entries: Iterable[StagedEntry]) -> None:
        """Store all of them; each partition's in their order."""
        lines: dict[Part, deque[bytes]] = {}
        for entry in entries:
            lines.setdefault((entry.topic, entry.partition), deque()).append(entry.batch)
        while lines:
            self._store(self._of_one_request(lines))
            lines = {part: line for part, line in lines.items() if line}

    def _of_one_request(self, lines: Mapping[Part, deque[bytes]]) -> dict[Part, bytes]:
        """One batch for a partition, and of as many partitions as there is room for."""
        taken: dict[Part, bytes] = {}
        room = self._request_bytes
        for part, line in lines.items():
            room -= len(line[0])
            if taken and room < 0:
                break
            taken[part] = line.popleft()
        return taken

    def _store(self, batches: Mapping[Part, bytes]) -> None:
        left = {part: self._numbered(part, batch) for part, batch in batches.items()}

        def attempt() -> None:
            for connection, parts in self._by_leader(left):
                some = {part: left[part] for part in parts if part in left}
                answers = _produced(connection, self._kafka.place.client_id, some)
                # All of them first: what is stored is not renewed.
                strangers = [one for one in answers if not self._is_known(one, left)]
                if strangers:
                    self._renew(left)

        while left:
            self._kafka.retried(attempt)
        self._renewals = 0

    def _is_known(self, one: wire.Answered, left: dict[Part, bytes]) -> bool:
        """Take what became of a batch; False when the broker knows nothing of the producer."""
        if one.code in (0, DUPLICATE_SEQUENCE):
            left.pop((one.topic, one.partition), None)
            return True
        if one.code in STRANGERS and self._renewals < RENEWALS_MAX:
            return False
        self._kafka.forget(one.topic)
        raise refused(one.code, f"a batch for {one.topic}/{one.partition}")

    def _renew(self, left: dict[Part, bytes]) -> None:
        """Go on as a new producer: what was on its way may be there twice."""
        self._renewals += 1
        self._producer = None
        self._sequences.clear()
        for part, batch in list(left.items()):
            left[part] = self._numbered(part, batch)

    def _by_leader(self, left: Mapping[Part, bytes]) -> list[tuple[Connection, list[Part]]]:
        found: dict[int, tuple[Connection, list[Part]]] = {}
        for part in left:
            connection = self._kafka.leader(part)
            found.setdefault(id(connection), (connection, []))[1].append(part)
        return list(found.values())

    def _numbered(self, part: Part, batch: bytes) -> bytes:
        """The batch with the producer's number and its own."""
        if self._producer is None:
            self._producer = self._kafka.retried(lambda: self._introduced(part))
        header = read_header(batch)
        sequence = self._sequences.get(part, 0)
        self._sequences[part] = (sequence + header.count) % SEQUENCES
        return numbered(batch, header, self._producer, sequence)

    def _introduced(self, part: Part) -> wire.Producer:
        """Any broker gives out producer ids."""
        connection, client_id = self._kafka.leader(part), self._kafka.place.client_id
        body = wire.init_producer_id_request(REQUEST_MS)
        key, version = wire.INIT_PRODUCER_ID, wire.INIT_PRODUCER_ID_VERSION
        frame = _exchanged(connection, key, version, client_id, body)
        try:
            code, producer = wire.read_producer(frame)
        except RequestInvalid as error:
            raise _unreadable(error) from error
        if code:
            raise refused(code, "a producer id")
        return producer


def numbered(batch: bytes, header: Header, producer: wire.Producer, sequence: int) -> bytes:
    header = header._replace(
        producer_id=producer.id, producer_epoch=producer.epoch, base_sequence=sequence
    )
    return sealed(header, memoryview(batch)[HEADER_BYTES:])


def _produced(
    connection: Connection, client_id: str, batches: Mapping[Part, bytes]
) -> list[wire.Answered]:
    body = wire.produce_request(batches, REQUEST_MS)
    frame = _exchanged(connection, wire.PRODUCE, wire.PRODUCE_VERSION, client_id, body)
    try:
        return wire.read_produced(frame)
    except RequestInvalid as error:
        raise _unreadable(error) from error


def _exchanged(
    connection: Connection, key: int, version: int, client_id: str, body: bytes
) -> memoryview:
    spoken = connection.version_of(key, version)
    if spoken != version:
        raise KafkaRefused(
            f"the broker speaks version {spoken} of the Kafka request {key}, and {version} is "
            "needed; use a broker of Kafka 2.1 or newer",
            kafka_code=int(Code.UNSUPPORTED_VERSION),
            kafka_error=code_name(Code.UNSUPPORTED_VERSION),
        )
    # Answers come in the order of the requests: they need no number.
    connection.send(wire.framed(key, version, 0, client_id, body))
    return connection.receive()


def _unreadable(error: RequestInvalid) -> KafkaAnswerInvalid:
    return KafkaAnswerInvalid(f"the broker's answer cannot be read: {error}")
