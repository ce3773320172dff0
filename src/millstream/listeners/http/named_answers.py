"""What HTTP says to named schedules, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from millstream.broker.named_schedules import NAME_LENGTH_MAX, NamedSchedules
from millstream.broker.named_schedules import Plan as NamedPlan
from millstream.errors import ScheduleInvalid
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import (
    LISTED_PARAMETERS,
    NO_CONTENT,
    json_of,
    page_of,
    read_body,
)
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import Message, encoded, outgoing, shown
from millstream.listeners.http.parameters import Parameters
from millstream.log.batch import Record
from millstream.wire.lanes import LANES
from millstream.wire.times import delay_ms_of

if TYPE_CHECKING:
    from millstream.broker.named_schedules import Named
    from millstream.listeners.http.route import Call

_OF_A_RECORD = ("key", "key_encoding", "value", "encoding", "headers")


class Asked(msgspec.Struct, forbid_unknown_fields=True):
    topic: str
    message: Message
    every: str | int | float | None = None
    cron: str | None = None
    time_zone: str = "UTC"
    paused: bool = False


_asked = msgspec.json.Decoder(Asked)


class NamedAnswers:
    __slots__ = ("_schedules",)

    def __init__(self, schedules: NamedSchedules) -> None:
        self._schedules = schedules

    def put(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        asked = read_body(_asked, call.body, '{"topic": …, "every": …, "message": {…}}')
        record = outgoing(asked.message)
        if (record.timestamp_ms, record.delay_ms, record.deliver_at_ms) != (None, None, None):
            raise ScheduleInvalid(
                f"the message of {name[:NAME_LENGTH_MAX]} has a time; each run has its own"
            )
        plan = NamedPlan(
            name=name,
            topic=asked.topic,
            every_ms=None if asked.every is None else delay_ms_of(asked.every),
            cron=asked.cron,
            time_zone=asked.time_zone,
            is_paused=asked.paused,
            key=record.key,
            value=record.value,
            headers=list(record.headers),
            lane=record.lane,
            partition=record.partition,
        )
        return later(self._schedules.put(plan), _answer)

    def get(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        return later(self._schedules.get(name), _answer)

    def delete(self, call: Call, name: str) -> Later:
        Parameters(call.query, ())
        return later(self._schedules.delete(name), lambda _: NO_CONTENT)

    def list(self, call: Call) -> Later:
        parameters = Parameters(call.query, LISTED_PARAMETERS)

        def answer(found: dict[str, Named]) -> Answer:
            names, after = page_of(sorted(found), parameters)
            return json_of({"schedules": [_page(found[name]) for name in names], "next": after})

        return later(self._schedules.all(), answer)


def _answer(named: Named) -> Answer:
    return json_of(_page(named))


def _page(named: Named) -> dict[str, object]:
    plan = named.plan
    (one,) = shown(0, (Record(0, 0, plan.key, plan.value, tuple(plan.headers)),))
    whole = msgspec.json.decode(encoded(one), type=dict[str, msgspec.Raw])
    message: dict[str, object] = {name: whole[name] for name in _OF_A_RECORD if name in whole}
    message["lane"] = LANES[plan.lane]
    if plan.partition is not None:
        message["partition"] = plan.partition
    return {
        "name": plan.name,
        "topic": plan.topic,
        "every_ms": plan.every_ms,
        "cron": plan.cron,
        "time_zone": plan.time_zone,
        "paused": plan.is_paused,
        "message": message,
        "created_ms": named.created_ms,
        "next_ms": None if plan.is_paused else named.next_ms,
        "last_ms": named.last_ms,
        "runs": named.runs,
        "error": named.error,
    }
