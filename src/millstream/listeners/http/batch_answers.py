"""Ready-made batches over HTTP: bytes of a client that encodes and decodes them itself.

A batch is Kafka's record batch. The broker checks it from outside and does not open it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from millstream.engine.pending import Pending, follow
from millstream.errors import BatchLengthInvalid, BodyInvalid
from millstream.listeners.http.answer import RAW, Answer
from millstream.listeners.http.bodies import json_of
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters, whole
from millstream.listeners.http.topic_answers import ACKS_PARAMETERS, acks_of
from millstream.log.batch import read_header, walk
from millstream.wire.batches import split_batches

if TYPE_CHECKING:
    from millstream.broker.publishing import Acks, Publisher
    from millstream.broker.reading import Reader
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.waits import Waits

# What one request may carry; each batch is an append of its own.
BATCHES_MAX = 1000
READ_BYTES_DEFAULT = 1024 * 1024
READ_BYTES_MAX = 16 * 1024 * 1024
TIMEOUT_S_MAX = 30.0
READ_PARAMETERS = frozenset(("offset", "bytes", "timeout"))


class BatchAnswers:
    __slots__ = ("_publisher", "_reader", "_waits")

    def __init__(self, publisher: Publisher, reader: Reader, waits: Waits) -> None:
        self._publisher = publisher
        self._reader = reader
        self._waits = waits

    def publish(self, call: Call, topic: str) -> Later:
        """Batches for several partitions, each after the number of its own."""
        acks = acks_of(Parameters(call.query, ACKS_PARAMETERS))
        return self._publish(topic, split_batches(call.body), acks)

    def publish_to(self, call: Call, topic: str, partition: str) -> Later:
        """Batches for one partition, one after the other."""
        acks = acks_of(Parameters(call.query, ACKS_PARAMETERS))
        number = whole("partition", partition, 0, PARTITION_MAX)
        body = call.body
        batches = walk(body)
        end = batches[-1][0] + batches[-1][1].size if batches else 0
        if end != len(body):
            raise BatchLengthInvalid(f"the body ends inside batch {len(batches)}")
        entries = [(number, body[at : at + header.size]) for at, header in batches]
        return self._publish(topic, entries, acks)

    def _publish(self, topic: str, entries: Sequence[tuple[int, bytes]], acks: Acks) -> Later:
        if not 1 <= len(entries) <= BATCHES_MAX:
            raise BodyInvalid(
                f"the body has {len(entries)} batches; one request takes 1 to {BATCHES_MAX}",
                least=1,
                most=BATCHES_MAX,
            )

        def answer(offsets: list[int]) -> Answer:
            placed = [
                {"partition": partition, "offset": offset, "count": read_header(batch).count}
                for (partition, batch), offset in zip(entries, offsets, strict=True)
            ]
            return json_of({"topic": topic, "placed": placed}, 202 if acks == "none" else 200)

        return later(self._publisher.publish_batches(topic, entries, acks=acks), answer)

    def read(self, call: Call, topic: str, partition: str) -> Pending[Answer]:
        """Whole batches, from the one that holds an offset."""
        parameters = Parameters(call.query, READ_PARAMETERS)
        number = whole("partition", partition, 0, PARTITION_MAX)
        start, end = self._reader.offsets(topic, number)
        text = parameters.text("offset", "earliest")
        names = {"earliest": start, "latest": end}
        offset = names[text] if text in names else whole("offset", text, 0, OFFSET_MAX)
        bytes_max = parameters.whole("bytes", READ_BYTES_DEFAULT, 1, READ_BYTES_MAX)
        timeout_s = parameters.seconds("timeout", TIMEOUT_S_MAX)

        def steps() -> Generator[Pending[Any], Any, Answer]:
            data: bytes = yield self._reader.read_batches(topic, number, offset, bytes_max)
            if not data and timeout_s:
                waiting = self._reader.wait(topic, {number: offset}, timeout_s)
                if (yield self._waits.until(call, waiting)):
                    data = yield self._reader.read_batches(topic, number, offset, bytes_max)
            start, end = self._reader.offsets(topic, number)
            headers = ((b"ms-start", b"%d" % start), (b"ms-end", b"%d" % end))
            return Answer(200, data, RAW, headers)

        return follow(steps())
