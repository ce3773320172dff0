"""Reading messages over HTTP: what is asked for, where it begins, and one answer of it.

A place in a topic is a position in each of its partitions, as text `5e35c0de:0:13,1:41`: the
beginning of the topic's UUID, and the offsets that come next. Every answer says the one after it,
so a client can go on without a consumer that the broker would have to remember. A place in a topic
that was deleted is the start of the one that has its name now. A client that writes a place itself
may leave the UUID out.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from millstream.engine.pending import Pending, follow
from millstream.errors import ParameterInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.batch_answers import READ_BYTES_DEFAULT, TIMEOUT_S_MAX
from millstream.listeners.http.messages import Shown, listed, shown
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters, whole

if TYPE_CHECKING:
    from millstream.broker.reading import Fetched, Reader
    from millstream.broker.topics import Topic, Topics
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.waits import Waits

LIMIT_DEFAULT = 500
LIMIT_MAX = 10_000
# Less than of ready-made batches: making JSON of messages holds up everybody else.
MESSAGES_BYTES_MAX = 4 * 1024 * 1024
READ_PARAMETERS = frozenset(
    ("partition", "offset", "time", "positions", "limit", "bytes", "timeout", "follow")
)
_POSITIONS = re.compile(
    r"(?:([0-9a-f]{8}):)?([0-9]{1,10}:[0-9]{1,19}(?:,[0-9]{1,10}:[0-9]{1,19})*)", re.ASCII
)
TOPIC_DIGITS = 8

_ENDS: dict[str, Literal["earliest", "latest"]] = {"earliest": "earliest", "latest": "latest"}

Positions = dict[int, int]
Steps = Generator[Pending[Any], Any, Positions]


class Place(NamedTuple):
    """What a client says of where it was."""

    # The beginning of the topic's UUID, if that was said.
    topic: str | None
    positions: Positions

    def is_of(self, topic: Topic) -> bool:
        return self.topic is None or self.topic == _digits(topic)


class Wish(NamedTuple):
    """What a client wants to read. `positions` count before a time, and a time before `offset`."""

    partition: int | None
    offset: int | Literal["earliest", "latest"]
    time_ms: int | None
    positions: Place | None
    limit: int | None
    bytes_max: int
    timeout_s: float
    is_following: bool
    # What a stream of events is to go on after; it counts before everything else.
    resumed: Place | None


def read_wish(call: Call, *, is_following: bool) -> Wish:
    parameters = Parameters(call.query, READ_PARAMETERS)
    last = call.header(b"last-event-id")
    resumed = read_positions("Last-Event-ID", last.decode("latin-1")) if last else None
    positions = parameters.text("positions", None)
    return Wish(
        parameters.whole("partition", None, 0, PARTITION_MAX),
        _offset(parameters.text("offset", "earliest")),
        parameters.whole("time", None, 0, OFFSET_MAX),
        None if positions is None else read_positions("positions", positions),
        parameters.whole("limit", None, 1, LIMIT_MAX),
        parameters.whole("bytes", READ_BYTES_DEFAULT, 1, MESSAGES_BYTES_MAX),
        parameters.seconds("timeout", TIMEOUT_S_MAX),
        parameters.truth("follow", is_following),
        resumed,
    )


def _offset(text: str) -> int | Literal["earliest", "latest"]:
    return _ENDS.get(text) or whole("offset", text, 0, OFFSET_MAX)


def read_positions(name: str, text: str) -> Place:
    positions: Positions = {}
    found = _POSITIONS.fullmatch(text)
    for pair in found[2].split(",") if found else ():
        partition, _, offset = pair.partition(":")
        number = whole(name, partition, 0, PARTITION_MAX)
        if number in positions:
            raise ParameterInvalid(f"{name} names partition {number} twice", parameter=name)
        positions[number] = whole(name, offset, 0, OFFSET_MAX)
    if found is None:
        raise ParameterInvalid(
            f"{name} is {text[:40]!r}; it must be `next` of an answer or the id of an event, or of "
            "the form 0:13,1:41, a partition and an offset each",
            parameter=name,
        )
    return Place(found[1], positions)


def write_positions(topic: Topic, positions: Positions) -> str:
    listed = ",".join([f"{partition}:{offset}" for partition, offset in positions.items()])
    return f"{_digits(topic)}:{listed}"


def _digits(topic: Topic) -> str:
    return topic.uuid.hex[:TOPIC_DIGITS]


class Readings:
    """The handler of `GET /v1/topics/{topic}/messages` as JSON, and what streams share with it."""

    __slots__ = ("_turn", "reader", "topics", "waits")

    def __init__(self, topics: Topics, reader: Reader, waits: Waits) -> None:
        self.topics = topics
        self.reader = reader
        self.waits = waits
        # Which partition is asked first, so that a busy one does not keep others waiting.
        self._turn = 0

    def read(self, call: Call, topic: str) -> Pending[Answer]:
        wish = read_wish(call, is_following=False)
        if wish.is_following:
            raise ParameterInvalid(
                "follow is for streams: send Accept: application/x-ndjson or text/event-stream, or "
                "wait with timeout",
                parameter="follow",
            )
        return follow(self._read(call, topic, wish))

    def _read(self, call: Call, topic: str, wish: Wish) -> Generator[Pending[Any], Any, Answer]:
        found = self.topics.get(topic)
        positions = yield from self.start(topic, wish)
        limit = wish.limit or LIMIT_DEFAULT
        messages = yield from self.gather(topic, positions, limit, wish.bytes_max)
        if not messages and wish.timeout_s:
            waiting = self.reader.wait(topic, positions, wish.timeout_s)
            if (yield self.waits.until(call, waiting)):
                messages = yield from self.gather(topic, positions, limit, wish.bytes_max)
        return Answer(
            200,
            b'{"topic":"%b","messages":%b,"next":"%b"}'
            % (topic.encode(), listed(messages), write_positions(found, positions).encode()),
        )

    def start(self, topic: str, wish: Wish) -> Steps:
        """Where reading begins, in each partition that is read."""
        found = self.topics.get(topic)
        if wish.partition is not None:
            self.topics.partition_of(topic, wish.partition)
        numbers = range(found.partitions) if wish.partition is None else (wish.partition,)
        if wish.positions is not None:
            if wish.positions.is_of(found):
                return self._given(topic, wish.positions.positions, wish.partition)
            return {number: self.reader.offsets(topic, number)[0] for number in numbers}
        if wish.time_ms is not None:
            positions: Positions = {}
            for number in numbers:
                positions[number] = yield self.reader.offset_at(topic, number, wish.time_ms)
            return positions
        if wish.offset == "earliest":
            return {number: self.reader.offsets(topic, number)[0] for number in numbers}
        if wish.offset == "latest":
            return {number: self.reader.offsets(topic, number)[1] for number in numbers}
        return dict.fromkeys(numbers, wish.offset)

    def _given(self, topic: str, positions: Positions, partition: int | None) -> Positions:
        for number in positions:
            self.topics.partition_of(topic, number)
        if partition is None:
            return dict(positions)
        if partition not in positions:
            raise ParameterInvalid(
                f"positions says nothing of partition {partition}, which is the one to read",
                parameter="positions",
            )
        return {partition: positions[partition]}

    def gather(
        self, topic: str, positions: Positions, limit: int, bytes_max: int
    ) -> Generator[Pending[Any], Any, list[Shown]]:
        """What there is, in order within a partition, with a fair share for each; `positions`
        move on."""
        messages: list[Shown] = []
        ready = self._ready(topic, positions)
        while ready and limit > 0 and bytes_max > 0:
            share, share_bytes = max(1, limit // len(ready)), max(1, bytes_max // len(ready))
            more: list[int] = []
            for number in ready:
                if limit <= 0 or bytes_max <= 0:
                    break
                fetched: Fetched = yield self.reader.fetch(
                    topic, number, positions[number], min(share, limit), share_bytes
                )
                is_ahead = fetched.next_offset > positions[number]
                positions[number] = fetched.next_offset
                messages += shown(number, fetched.records)
                limit -= len(fetched.records)
                bytes_max -= sum(
                    [len(one.key or b"") + len(one.value or b"") for one in fetched.records]
                )
                if is_ahead and fetched.next_offset < fetched.high_watermark:
                    more.append(number)
            ready = more
        return messages

    def _ready(self, topic: str, positions: Positions) -> list[int]:
        """Partitions with something to read, or with something to complain about."""
        ready = [
            number
            for number, offset in positions.items()
            if self.reader.offsets(topic, number)[1] != offset
        ]
        self._turn += 1
        first = self._turn % len(ready) if ready else 0
        return ready[first:] + ready[:first]
