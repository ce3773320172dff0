"""The shortest way through a receive of one record, and through its ack, for heads that are known.

As with a publish (`publish_quick.py`) a request holds a place in line, and what came in the same
turn of the loop goes through the broker together. What is unusual is left to the long way, which
answers the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from millstream.broker.delivery_values import Receive
from millstream.broker.group_values import check_group_name
from millstream.broker.work_turns import Asking
from millstream.errors import MillstreamError
from millstream.listeners.http.answers import failure
from millstream.listeners.http.bodies import UNREADABLE
from millstream.listeners.http.delivery_answers import (
    Receipts,
    ReceivedPages,
    Receiving,
    settled_answer,
)
from millstream.listeners.http.heads import Later
from millstream.listeners.http.hot import bug
from millstream.wire import leases

if TYPE_CHECKING:
    from millstream.broker.delivery_values import Delivered, Received, Settled
    from millstream.broker.work_turns import WorkTurns
    from millstream.listeners.http.answer import Answer
    from millstream.listeners.http.guard import Guard
    from millstream.listeners.http.heads import Headers
    from millstream.listeners.http.hot import Line

# Bodies of receives that are remembered: a worker sends the same one again and again.
BODIES_MAX = 256
BODY_BYTES_MAX = 1024
ACKED = b'{"outcome":"acked"}'

_receiving = msgspec.json.Decoder(Receiving)
_receipts = msgspec.json.Decoder(Receipts)


class WorkSlot:
    """The place of one request in the line of its connection. The connection takes itself out of
    it when its client goes away."""

    __slots__ = ("_pages", "answer", "line")

    def __init__(self, pages: ReceivedPages | None = None) -> None:
        """With the pages of its group where it is to receive."""
        self._pages = pages
        self.answer: bytes | Answer | None = None
        self.line: Line | None = None

    def received(self, one: Delivered | None, found: Received) -> bool:
        pages, line = self._pages, self.line
        assert pages is not None
        self.answer = pages.page(found, one)
        if line is None:
            return False
        line.on_slot(self)
        return True

    def settled(self, one: Settled) -> None:
        self.answer = ACKED if one.error is None else settled_answer(one)
        if self.line is not None:
            self.line.on_slot(self)

    def fail(self, error: BaseException) -> None:
        self.answer = failure(error) if isinstance(error, MillstreamError) else bug(error)
        if self.line is not None:
            self.line.on_slot(self)


class QuickReceive:
    """Makes the functions; each counts the requests that it takes."""

    __slots__ = ("_known", "_turns")

    def __init__(self, turns: WorkTurns) -> None:
        self._turns = turns
        # By group and body, whatever the head: they are gathered together.
        self._known: dict[tuple[str, bytes], Asking] = {}

    def __call__(self, name: str, query: bytes, headers: Headers, guard: Guard) -> Later | None:
        if query or any(pair == (b"accept", leases.MEDIA) for pair in headers):
            return None
        known, receive, pages = self._known, self._turns.receive, ReceivedPages(name)

        def take(body: bytes) -> WorkSlot | None:
            asking = known.get((name, body)) or _learn(known, name, body)
            if asking is None:
                return None
            slot = WorkSlot(pages)
            receive(slot, asking)
            guard.requests += 1
            return slot

        return Later(take)


class QuickAck:
    """With `of_group`, of the receipts of one group."""

    __slots__ = ("_of_group", "_turns")

    def __init__(self, turns: WorkTurns, *, of_group: bool = False) -> None:
        self._turns = turns
        self._of_group = of_group

    def __call__(self, name: str, query: bytes, headers: Headers, guard: Guard) -> Later | None:
        del headers
        group = name if self._of_group else None
        if query or (group is not None and not _is_group_name(group)):
            return None
        ack = self._turns.ack

        def take(body: bytes) -> WorkSlot | None:
            try:
                said = _receipts.decode(body)
            except UNREADABLE:
                return None
            if said.receipt is None or said.receipts is not None:
                return None
            slot = WorkSlot()
            ack(slot, said.receipt, group)
            guard.requests += 1
            return slot

        return Later(take)


def _learn(known: dict[tuple[str, bytes], Asking], group: str, body: bytes) -> Asking | None:
    """Of what asks for one record, and does not wait."""
    try:
        said = _receiving.decode(body)
    except UNREADABLE:
        return None
    if said.limit not in {None, 1} or said.bytes is not None or said.wait_ms:
        return None
    receive = Receive(
        tuple(said.topics),
        visibility_ms=said.visibility_ms,
        member=said.member,
        start=said.start,
    )
    asking = Asking(group, receive)
    if len(body) <= BODY_BYTES_MAX:
        if len(known) >= BODIES_MAX:
            known.clear()
        known[group, body] = asking
    return asking


def _is_group_name(name: str) -> bool:
    try:
        check_group_name(name)
    except MillstreamError:
        return False
    return True
