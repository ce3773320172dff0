"""Sequential consumers over HTTP: opened once, then `next` and `ack`."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from millstream.engine.pending import Pending, follow
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import NO_CONTENT, json_of, read_body
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import listed, shown
from millstream.listeners.http.parameters import Parameters

if TYPE_CHECKING:
    from millstream.broker.sequential import Delivered, Sequential, SequentialConsumer
    from millstream.listeners.http.messages import Shown
    from millstream.listeners.http.route import Call
    from millstream.listeners.http.waits import Waits

NEXT_PARAMETERS = frozenset(("limit", "timeout"))
NEXT_COUNT_MAX = 1000
TIMEOUT_S_MAX = 30.0


class Opening(msgspec.Struct, forbid_unknown_fields=True):
    consumer_id: str | None = None
    partition: int | None = None
    start: Literal["earliest", "latest"] | int = "earliest"


class Acking(msgspec.Struct, forbid_unknown_fields=True):
    partition: int
    offset: int


_opening = msgspec.json.Decoder(Opening)
_acking = msgspec.json.Decoder(Acking)


class ConsumerAnswers:
    __slots__ = ("_sequential", "_waits")

    def __init__(self, sequential: Sequential, waits: Waits) -> None:
        self._sequential = sequential
        self._waits = waits

    def open(self, call: Call, topic: str) -> Later:
        Parameters(call.query, ())
        said = read_body(_opening, call.body, '{"consumer_id": …, "start": …}')
        opened = self._sequential.open(topic, said.consumer_id, said.partition, said.start)

        def answer(consumer: SequentialConsumer) -> Answer:
            page = {
                "topic": topic,
                "consumer_id": consumer.id,
                "positions": positions_page(consumer.positions()),
            }
            return json_of(page, 201 if consumer.is_new else 200)

        return later(opened, answer)

    def next(self, call: Call, topic: str, consumer_id: str) -> Pending[Answer]:
        parameters = Parameters(call.query, NEXT_PARAMETERS)
        count = parameters.whole("limit", 1, 1, NEXT_COUNT_MAX)
        timeout_s = parameters.seconds("timeout", TIMEOUT_S_MAX)

        def steps() -> Generator[Pending[Any], Any, Answer]:
            consumer: SequentialConsumer = yield self._sequential.find(topic, consumer_id)
            found: list[Delivered] = yield consumer.next(count)
            has_more = False
            if not found and timeout_s:
                has_more = yield self._waits.until(call, consumer.wait(timeout_s))
            if has_more:
                found = yield consumer.next(count)
            if not found:
                return NO_CONTENT
            messages = msgspec.Raw(listed(delivered(found)))
            return json_of({"topic": topic, "consumer_id": consumer.id, "messages": messages})

        return follow(steps())

    def ack(self, call: Call, topic: str, consumer_id: str) -> Pending[Answer]:
        Parameters(call.query, ())
        said = read_body(_acking, call.body, '{"partition": …, "offset": …}')

        def steps() -> Generator[Pending[Any], Any, Answer]:
            consumer: SequentialConsumer = yield self._sequential.find(topic, consumer_id)
            position: int = yield consumer.ack(said.partition, said.offset)
            return json_of(
                {
                    "topic": topic,
                    "consumer_id": consumer.id,
                    "partition": said.partition,
                    "position": position,
                }
            )

        return follow(steps())

    def delete(self, call: Call, topic: str, consumer_id: str) -> Later:
        Parameters(call.query, ())
        return later(self._sequential.delete(topic, consumer_id), lambda _: NO_CONTENT)


def delivered(found: list[Delivered]) -> list[Shown]:
    return [message for one in found for message in shown(one.partition, (one.record,))]


def positions_page(positions: dict[int, int]) -> list[dict[str, int]]:
    return [{"partition": number, "offset": offset} for number, offset in positions.items()]
