"""Workers that take one record at a time, gathered by turns of the loop.

A receive of one record costs nearly what a receive of a hundred does, and so does an ack. Those
that come in one turn and want the same are one call: what it answers is dealt out again, one to
each. So a broker under load does a few large calls where it would do many small ones, and an idle
one answers as soon as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import structlog

from millstream.broker.delivery_values import Received, Settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from millstream.broker.delivery import Delivery
    from millstream.broker.delivery_values import Delivered, Receive, Settled
    from millstream.engine.pending import Pending
    from millstream.engine.turns import Turns


class Receiver(Protocol):
    """Who waits for one record."""

    def received(self, one: Delivered | None, found: Received) -> bool:
        """The record, when there is one. Answers whether somebody is there to work on it."""
        ...

    def fail(self, error: BaseException) -> None: ...


class Acker(Protocol):
    """Who waits until one ack is durable."""

    def settled(self, one: Settled) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class Asking:
    """What many receives of a group say in the same words, and who says it in this turn."""

    __slots__ = ("group", "receive", "receivers")

    def __init__(self, group: str, receive: Receive) -> None:
        """`receive` says neither how many nor how long: one record, if there is one now."""
        self.group = group
        self.receive = receive
        self.receivers: list[Receiver] = []


class WorkTurns:
    __slots__ = ("_acks", "_asked", "_delivery", "_is_ending", "_records_max", "_turns")

    def __init__(self, delivery: Delivery, turns: Turns, records_max: int) -> None:
        """`records_max` is what one receive gives at most."""
        self._delivery = delivery
        self._turns = turns
        self._records_max = records_max
        self._is_ending = False
        self._asked: list[Asking] = []
        # By the group whose receipts are taken; None takes all.
        self._acks: dict[str | None, tuple[list[Settle], list[Acker]]] = {}

    def receive(self, receiver: Receiver, asking: Asking) -> None:
        if not asking.receivers:
            self._asked.append(asking)
            self._soon()
        asking.receivers.append(receiver)

    def ack(self, acker: Acker, receipt: str, group: str | None) -> None:
        """With a group, receipts of others are refused."""
        gathered = self._acks.get(group)
        if gathered is None:
            gathered = self._acks[group] = ([], [])
            self._soon()
        gathered[0].append(Settle("ack", receipt))
        gathered[1].append(acker)

    def _soon(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._turns.at_end(self._end_turn)

    def _end_turn(self) -> None:
        self._is_ending = False
        acks, self._acks = self._acks, {}
        asked = [(one, one.receivers) for one in self._asked]
        self._asked = []
        # All of them before anything is called: whatever fails, they are gathered anew.
        for asking, _ in asked:
            asking.receivers = []
        # Acks first: they make room for what is received.
        for group, (settles, ackers) in acks.items():
            self._settle(group, settles, ackers)
        for asking, receivers in asked:
            for at in range(0, len(receivers), self._records_max):
                several = receivers[at : at + self._records_max]
                self._receive(asking.group, asking.receive, several)

    def _settle(self, group: str | None, settles: list[Settle], ackers: list[Acker]) -> None:
        def done(settled: Pending[list[Settled]]) -> None:
            if settled.error is not None:
                for acker in ackers:
                    _guarded(acker.fail, settled.error)
                return
            for acker, one in zip(ackers, settled.result(), strict=True):
                try:
                    acker.settled(one)
                except Exception:  # noqa: BLE001  as `_guarded`, without a call for each ack
                    _untold()

        self._delivery.settle(settles, group).then(done)

    def _receive(self, group: str, receive: Receive, receivers: list[Receiver]) -> None:
        def done(receiving: Pending[Received]) -> None:
            if receiving.error is not None:
                for receiver in receivers:
                    _guarded(receiver.fail, receiving.error)
                return
            self._deal(group, receive, receivers, receiving.result())

        many = receive._replace(count_max=len(receivers))
        self._delivery.receive(group, many).pending.then(done)

    def _deal(
        self, group: str, receive: Receive, receivers: list[Receiver], found: Received
    ) -> None:
        records = found.records
        unseen = []
        for receiver, one in zip(receivers, records, strict=False):
            try:
                is_seen = receiver.received(one, found)
            except Exception:  # noqa: BLE001  as `_guarded`, without a call for each record
                is_seen = _untold()
            if not is_seen:
                unseen.append(one)
        if unseen:
            self._delivery.give_back(found._replace(records=unseen))
        rest = receivers[len(records) :]
        if rest and records and found.limited_by is None:
            # So many bytes are one answer; the others look again, as if they had come alone.
            self._receive(group, receive, rest)
            return
        for receiver in rest:
            _guarded(receiver.received, None, Received([], 0, found.limited_by))


def _guarded(tell: Callable[..., Any], *outcome: Any) -> Any:
    """One that cannot be told must not keep it from the others."""
    try:
        return tell(*outcome)
    except Exception:  # noqa: BLE001
        return _untold()


def _untold() -> bool:
    structlog.get_logger("millstream.broker").exception("a worker could not be answered")
    return False
