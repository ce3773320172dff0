"""What a turn of the loop gathers for a partition and lane: one batch, and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import structlog

from millstream.broker.outgoing import Placed, Published
from millstream.broker.publish_calls import SCHEDULED

if TYPE_CHECKING:
    from collections.abc import Callable

    from millstream.broker.traffic import TopicTraffic
    from millstream.engine.pending import Pending
    from millstream.log import batch as batches
    from millstream.log.partition import PartitionId


class Waiter(Protocol):
    """Who waits for the place of one record."""

    def placed(self, partition: int, offset: int, timestamp_ms: int) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Gathering:
    """The batch that a turn makes for a partition, and who waits for it."""

    __slots__ = ("calls", "fields", "id", "lane", "ones", "size", "traffic", "waiters")

    def __init__(self, id: PartitionId, traffic: TopicTraffic, lane: int) -> None:
        self.id = id
        self.lane = lane
        self.traffic = traffic
        self.fields: list[batches.Fields] = []
        self.size = 0
        # Publishes of one record: where it is in the batch.
        self.ones: list[tuple[Pending[Placed], int]] = []
        # As these, for who waits by something lighter.
        self.waiters: list[tuple[Waiter, int]] = []
        # Others: where the first is, and how many.
        self.calls: list[tuple[Pending[Published], int, int]] = []

    def done(self, appended: Pending[int]) -> None:
        fields, error = self.fields, appended.error
        if error is not None:
            self.traffic.messages_failed += len(fields)
            for one, _ in self.ones:
                one.fail(error)
            for waiter, _ in self.waiters:
                _guarded(waiter.fail, error)
            for call, _, _ in self.calls:
                call.fail(error)
            return
        is_scheduled = self.lane == SCHEDULED[1]
        if not is_scheduled:
            self.traffic.messages_in += len(fields)
        self.traffic.bytes_in += self.size
        base, number = appended.result(), self.id.number
        for one, at in self.ones:
            one.succeed(Placed(number, base + at, fields[at][0]))
        for waiter, at in self.waiters:
            _guarded(waiter.placed, number, base + at, fields[at][0])
        for call, first, count in self.calls:
            placed = [
                Placed(number, base + at, fields[at][0]) for at in range(first, first + count)
            ]
            scheduled = frozenset(range(count)) if is_scheduled else frozenset()
            call.succeed(Published(placed, scheduled=scheduled))


def _guarded(tell: Callable[..., None], *outcome: Any) -> None:
    """One that cannot be told must not keep it from the others."""
    try:
        tell(*outcome)
    except Exception:  # noqa: BLE001
        structlog.get_logger("millstream.broker").exception("a waiter failed")
