"""What HTTP says of records that are scheduled, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.schedule_state import LATENESS_BOUNDS_S
from millstream.broker.schedule_values import State
from millstream.listeners.http.answer import Answer
from millstream.listeners.http.bodies import json_of
from millstream.listeners.http.later import Later, later
from millstream.listeners.http.messages import encoded, shown
from millstream.listeners.http.parameters import OFFSET_MAX, PARTITION_MAX, Parameters, whole
from millstream.log.batch import Record

if TYPE_CHECKING:
    from millstream.broker.schedule_values import Plan
    from millstream.broker.schedules import Page, Schedules
    from millstream.listeners.http.route import Call

LIMIT_DEFAULT = 100
LIMIT_MAX = 1000
SKIP_MAX = 10_000
LIST_PARAMETERS = frozenset(("limit", "skip", "after"))


class ScheduleAnswers:
    __slots__ = ("_schedules",)

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    def delayed(self, call: Call, topic: str) -> Later:
        """Those of a topic that are pending, page by page."""
        parameters = Parameters(call.query, LIST_PARAMETERS)
        limit = parameters.whole("limit", LIMIT_DEFAULT, 1, LIMIT_MAX)
        skip = parameters.whole("skip", 0, 0, SKIP_MAX)
        after = parameters.whole("after", None, 0, OFFSET_MAX)

        def answer(page: Page) -> Answer:
            listed = b",".join([_shown(State.PENDING, plan) for plan in page.plans])
            following = b"null" if page.next is None else b'"%d"' % page.next
            return Answer(
                200,
                b'{"topic":"%b","count":%d,"delayed":[%b],"next":%b}'
                % (topic.encode(), self._schedules.count(topic), listed, following),
            )

        return later(self._schedules.page(topic, limit, after, skip), answer)

    def show(self, call: Call, topic: str, partition: str, offset: str) -> Later:
        """One of them, and what became of it."""
        Parameters(call.query, ())
        found = self._schedules.find(topic, *_id(partition, offset))
        return later(found, lambda one: Answer(200, _shown(*one)))

    def cancel(self, call: Call, topic: str, partition: str, offset: str) -> Later:
        Parameters(call.query, ())
        cancelled = self._schedules.cancel(topic, *_id(partition, offset))
        return later(cancelled, lambda plan: Answer(200, _shown(State.CANCELLED, plan)))

    def statistics(self, call: Call) -> Answer:
        Parameters(call.query, ())
        found = self._schedules.statistics()
        page = found._asdict()
        bounds = [*map(str, LATENESS_BOUNDS_S), "+Inf"]
        page["lateness"] = [
            {"seconds_max": bound, "count": count}
            for bound, count in zip(bounds, found.lateness, strict=True)
        ]
        return json_of(page)


def _id(partition: str, offset: str) -> tuple[int, int]:
    number = whole("partition", partition, 0, PARTITION_MAX)
    return number, whole("offset", offset, 0, OFFSET_MAX)


def _shown(state: State, plan: Plan) -> bytes:
    """As a message is shown; offset and time are those of the schedule."""
    record = Record(plan.id, plan.due_ms, plan.key, plan.value, plan.headers)
    (message,) = shown(0, (record,))
    why = b"" if state.why is None else b',"why":"%b"' % state.why.encode()
    return b'{"state":"%b","deliver_at_ms":%d%b,%b' % (
        state.word.encode(),
        plan.due_ms,
        why,
        encoded(message)[1:],
    )
