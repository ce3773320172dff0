"""What HTTP says to topics and back: management, publishing and offsets.

Handlers are the same for the fast lane and for ASGI (`route.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from millstream.broker.outgoing import ACKS
from millstream.broker.publishing import Outgoing
from millstream.engine.pending import Pending, follow
from millstream.errors import ParameterInvalid, TimestampInvalid
from millstream.listeners.http.answer import RAW, Answer
from millstream.listeners.http.bodies import (
    LISTED_PARAMETERS,
    NO_CONTENT,
    json_of,
    page_of,
    read_body,
    whole_numbers,
)
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import (
    delay_said,
    header_name,
    idempotency_key,
    lane_said,
    read_message,
    read_messages,
)
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters
from millstream.wire.lanes import NORMAL

if TYPE_CHECKING:
    from millstream.broker.publishing import Acks, Published, Publisher
    from millstream.broker.reading import Reader
    from millstream.broker.topics import Topic, Topics
    from millstream.listeners.http.route import Call

# A query is a line; who has more to say has a body for it.
HEADERS_IN_QUERY_MAX = 20
ACKS_PARAMETERS = frozenset(("acks",))
PUBLISH_PARAMETERS = frozenset(
    (
        "acks",
        "key",
        "partition",
        "timestamp_ms",
        "header",
        "lane",
        "priority",
        "delay",
        "deliverAt",
    )
)
OFFSETS_PARAMETERS = frozenset(("partition", "time"))
_KEY = frozenset(("key",))
_HEADER = frozenset(("header",))
_PLACED = b'{"partition":%d,"offset":%d,"timestamp_ms":%d}'


class NewTopic(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    partitions: int | None = None
    settings: dict[str, object] | None = None


class Changes(msgspec.Struct, forbid_unknown_fields=True):
    settings: dict[str, object]


class Growth(msgspec.Struct, forbid_unknown_fields=True):
    partitions: int


_new_topic = msgspec.json.Decoder(NewTopic)
_changes = msgspec.json.Decoder(Changes)
_growth = msgspec.json.Decoder(Growth)


class TopicAnswers:
    """The handlers of topics, and of publishing to them."""

    __slots__ = ("_publisher", "_reader", "_topics")

    def __init__(self, topics: Topics, publisher: Publisher, reader: Reader) -> None:
        self._topics = topics
        self._publisher = publisher
        self._reader = reader

    # ---- management

    def create(self, call: Call) -> Later:
        Parameters(call.query, ())
        wanted = read_body(_new_topic, call.body, '{"name": …, "partitions": …, "settings": …}')
        settings = _settings(wanted.settings or {})
        made = self._topics.create(wanted.name, wanted.partitions, settings)
        return later(made, lambda topic: self._described(topic.name, 201))

    def list(self, call: Call) -> Answer:
        names, after = page_of(self._topics.names(), Parameters(call.query, LISTED_PARAMETERS))
        topics = [_topic_page(self._topics.get(name)) for name in names]
        return json_of({"topics": topics, "next": after})

    def describe(self, call: Call, name: str) -> Answer:
        Parameters(call.query, ())
        return self._described(name, 200)

    def alter(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        changes = read_body(_changes, call.body, '{"settings": {…}}')
        altered = self._topics.alter(name, _settings(changes.settings))
        return later(altered, lambda _: self._described(name, 200))

    def grow(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        count = read_body(_growth, call.body, '{"partitions": …}').partitions
        grown = self._topics.add_partitions(name, count)
        return later(grown, lambda _: self._described(name, 200))

    def purge(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        return later(self._topics.purge(name), lambda _: NO_CONTENT)

    def delete(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        return later(self._topics.delete(name), lambda _: NO_CONTENT)

    def _described(self, name: str, status: int) -> Answer:
        topic, partitions = self._topics.describe(name)
        details = [facts._asdict() for facts in partitions]
        return json_of({**_topic_page(topic), "details": details}, status)

    # ---- publishing

    def publish(self, call: Call, name: str) -> Later:
        """One message: as JSON, or as the raw bytes of its value."""
        acks: Acks = "all"
        is_raw, key = False, None
        for header, text in call.headers:
            if header == b"content-type":
                is_raw = text.lower().startswith(RAW)
            elif header == b"idempotency-key":
                key = idempotency_key(text.decode("latin-1"))
        record = Outgoing(None, call.body) if is_raw else read_message(call.body)
        if call.query:
            parameters = Parameters(call.query, PUBLISH_PARAMETERS, _HEADER, _KEY)
            record, acks = _completed(record, parameters), acks_of(parameters)
        is_later = record.delay_ms is not None or record.deliver_at_ms is not None
        if key is not None or acks == "none" or is_later:
            published = self._publisher.publish(name, (record,), acks=acks, idempotency_key=key)
            return later(published, _one_answer(name, acks))
        head = b'{"topic":"%b",' % name.encode() + _PLACED[1:]
        return later(
            self._publisher.publish_one(name, *record),
            lambda placed: Answer(200, head % placed),
        )

    def publish_many(self, call: Call, name: str) -> Later:
        """All of them, or none."""
        acks = acks_of(Parameters(call.query, ACKS_PARAMETERS))
        records = read_messages(call.body)
        key = dict(call.headers).get(b"idempotency-key")
        published = self._publisher.publish(
            name,
            records,
            acks=acks,
            idempotency_key=None if key is None else idempotency_key(key.decode("latin-1")),
        )
        return later(published, _many_answer(name, acks))

    # ---- offsets

    def offsets(self, call: Call, name: str) -> Pending[Answer]:
        """Where each partition begins and ends, and where a time is."""
        parameters = Parameters(call.query, OFFSETS_PARAMETERS)
        time_ms = parameters.whole("time", None, 0, OFFSET_MAX)
        partition = parameters.whole("partition", None, 0, PARTITION_MAX)
        return follow(self._offsets(name, partition, time_ms))

    def _offsets(
        self, name: str, partition: int | None, time_ms: int | None
    ) -> Generator[Pending[Any], Any, Answer]:
        numbers: Sequence[int] = (partition,) if partition is not None else ()
        found: list[dict[str, int]] = []
        for number in numbers or range(self._topics.get(name).partitions):
            start, end = self._reader.offsets(name, number)
            page = {"partition": number, "start": start, "end": end}
            if time_ms is not None:
                page["offset"] = yield self._reader.offset_at(name, number, time_ms)
            found.append(page)
        return json_of({"topic": name, "offsets": found})


def _settings(given: dict[str, object]) -> dict[str, object]:
    return {name: whole_numbers(value) for name, value in given.items()}


def _topic_page(topic: Topic) -> dict[str, object]:
    return {
        "name": topic.name,
        "uuid": str(topic.uuid),
        "partitions": topic.partitions,
        "created_ms": topic.created_ms,
        "settings": topic.settings,
    }


def acks_of(parameters: Parameters) -> Acks:
    return cast("Acks", parameters.choice("acks", "all", ACKS))


def _completed(record: Outgoing, parameters: Parameters) -> Outgoing:
    """What the body does not say, the query may."""
    key, value, headers, timestamp_ms, partition, lane, delay_ms, deliver_at_ms = record
    if key is None and "key" in parameters:
        key = parameters.text("key", "").encode(errors="surrogateescape")
    given_headers = parameters.texts("header")
    if len(given_headers) > HEADERS_IN_QUERY_MAX:
        raise ParameterInvalid(
            f"there are {len(given_headers)} headers; a query takes {HEADERS_IN_QUERY_MAX}, a body "
            "in JSON more",
            parameter="header",
        )
    for text in given_headers:
        name, colon, data = text.partition(":")
        if not colon:
            raise ParameterInvalid(
                f"header is {text[:40]!r}; it must be of the form name:value", parameter="header"
            )
        headers += ((header_name(name), data.encode()),)
    given_ms = parameters.whole("timestamp_ms", None, -OFFSET_MAX, OFFSET_MAX)
    if given_ms is not None and given_ms < 0:
        raise TimestampInvalid(
            f"{given_ms} is not a time in milliseconds since 1970", timestamp_ms=given_ms
        )
    given = parameters.whole("partition", None, 0, PARTITION_MAX)
    if "lane" in parameters and "priority" in parameters:
        raise ParameterInvalid(
            "lane and priority say the same thing; name one of them", parameter="priority"
        )
    given_lane = lane_said(parameters.text("lane", None), parameters.text("priority", None))
    return Outgoing(
        key,
        value,
        headers,
        given_ms if timestamp_ms is None else timestamp_ms,
        given if partition is None else partition,
        lane if given_lane == NORMAL or lane != NORMAL else given_lane,
        *_later(delay_ms, deliver_at_ms, parameters),
    )


def _later(
    delay_ms: int | None, deliver_at_ms: int | None, parameters: Parameters
) -> tuple[int | None, int | None]:
    """What the body says, else the query."""
    if delay_ms is not None or deliver_at_ms is not None:
        return delay_ms, deliver_at_ms
    return delay_said(parameters.text("delay", None), parameters.text("deliverAt", None))


def _one_answer(name: str, acks: Acks) -> Callable[[Published], Answer]:
    def answer(published: Published) -> Answer:
        placed = _placed(published, 0)
        duplicate = b',"duplicate":true' if published.is_duplicate else b""
        body = b'{"topic":"%b",%b%b}' % (name.encode(), placed[1:-1], duplicate)
        return Answer(202 if acks == "none" else 200, body)

    return answer


def _placed(published: Published, at: int) -> bytes:
    page = _PLACED % published.placed[at]
    return page if at not in published.scheduled else page[:-1] + b',"scheduled":true}'


def _many_answer(name: str, acks: Acks) -> Callable[[Published], Answer]:
    def answer(published: Published) -> Answer:
        if published.scheduled:
            listed = b",".join([_placed(published, at) for at in range(len(published.placed))])
        else:
            listed = b",".join([_PLACED % placed for placed in published.placed])
        duplicate = b',"duplicate":true' if published.is_duplicate else b""
        body = b'{"topic":"%b","count":%d,"placed":[%b]%b}' % (
            name.encode(),
            len(published.placed),
            listed,
            duplicate,
        )
        return Answer(202 if acks == "none" else 200, body)

    return answer
