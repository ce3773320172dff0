"""What members of share groups do with records: fetch them by lease, and acknowledge them.

A member of a group has one session at the broker. Its epoch rises with each request, so that the
broker notices one that was lost or came twice; 0 opens a session, and voids the one before; -1
ends it. A session knows which partitions its member wants, and the receipts of what it was given:
clients speak of offsets, leases of receipts.

    Kafka's word   here      because
    accept         ack
    release        nack      Kafka counts a released delivery too: it comes back after the topic's
                             backoff, and in the end is a dead letter
    reject         reject
    renew          extend
    (end of session)  release   what nobody looked at is given back, and not counted
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from millstream.broker.delivery_values import Receive, Settle
from millstream.broker.polling import Polling
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    MillstreamError,
    ParameterInvalid,
    ReceiptStale,
    ShareSessionEpochInvalid,
    ShareSessionUnknown,
)
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from millstream.broker.delivery import Delivery
    from millstream.broker.delivery_values import Delivered, Received, Settled, SettleKind
    from millstream.broker.share_groups import ShareGroups
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.wheel import Timer

OPENING, ENDING = 0, -1
EPOCH_MAX = 2**31 - 1
# Kafka's numbers for what became of a record. 0 is an offset at which there is none.
GAP, RENEW = 0, 4
SETTLES: Mapping[int, SettleKind] = {1: "ack", 2: "nack", 3: "reject", RENEW: "extend"}
# Offsets that one request may acknowledge: as many as it may settle.
ACKNOWLEDGED_MAX = 100_000
# A client that closes says good-bye to the group and, on another connection, what became of its
# last records: the session waits so long for the latter.
GOODBYE_SECONDS = 5.0
# How long a fetch pauses that was given nothing but records of partitions that it did not ask for.
PAUSE_SECONDS = 0.1
# Receipts that a session keeps before it looks for those whose leases are over. It looks again when
# there are twice as many as were left: so it keeps hardly more than are in flight.
HELD_LOOK = 1000
# Leases begin before their receipts are here, and end as much later as this is for safety.
LEASE_GRACE_MS = 1000
# What the id of a member may have and the name of one who leases may not.
UNWANTED = re.compile(r"[^A-Za-z0-9._:-]")


class Acknowledgement(NamedTuple):
    """Of offsets `first` to `last`: what became of each, or one word for all."""

    id: PartitionId
    first: int
    last: int
    kinds: bytes | tuple[int, ...]


# Of each partition that was acknowledged, what went wrong.
Outcomes: TypeAlias = "dict[PartitionId, MillstreamError | None]"


class ShareFetch(NamedTuple):
    epoch: int
    # Partitions that the session has from now on, and has no longer.
    added: tuple[PartitionId, ...] = ()
    dropped: tuple[PartitionId, ...] = ()
    acknowledged: tuple[Acknowledgement, ...] = ()
    count_max: int = 500
    bytes_max: int = 1 << 20
    wait_ms: int = 0
    # It only renews: no records are wanted.
    is_renewal: bool = False


class ShareFetched(NamedTuple):
    outcomes: Outcomes
    records: list[Delivered]


class _Held(NamedTuple):
    receipt: str
    # When its lease is over, and the receipt good for nothing.
    until_ms: int


class _Session:
    __slots__ = ("_count", "_look_at", "epoch", "held", "partitions", "timer", "voided")

    def __init__(self, voided: Pending[Any]) -> None:
        # Done when what the session before had is given back.
        self.voided = voided
        # Ends it, once its member has left.
        self.timer: Timer | None = None
        # That of the next request.
        self.epoch = 1
        self.partitions: set[PartitionId] = set()
        # The receipts of what the member has, by offset; and how many, some that are settled by
        # now included.
        self.held: dict[PartitionId, dict[int, _Held]] = {}
        self._count = 0
        self._look_at = HELD_LOOK

    def hold(self, id: PartitionId, offset: int, held: _Held) -> None:
        self.held.setdefault(id, {})[offset] = held
        self._count += 1

    def forget_ended(self, now_ms: int) -> None:
        """A member that acknowledges nothing must not make this grow."""
        if self._count < self._look_at:
            return
        for id, held in list(self.held.items()):
            live = {offset: one for offset, one in held.items() if one.until_ms > now_ms}
            if live:
                self.held[id] = live
            else:
                del self.held[id]
        self._count = sum(len(held) for held in self.held.values())
        self._look_at = max(HELD_LOOK, 2 * self._count)


class ShareSessions:
    __slots__ = ("_clock", "_delivery", "_groups", "_sessions", "_timers", "_topics")

    def __init__(self, around: Surroundings, groups: ShareGroups, delivery: Delivery) -> None:
        self._clock = around.clock
        self._timers = around.timers
        self._topics = around.topics
        self._groups = groups
        self._delivery = delivery
        # Never more than there are members, and those that have just left.
        self._sessions: dict[tuple[str, str], _Session] = {}
        groups.watch_gone(self._member_gone)

    def __len__(self) -> int:
        return len(self._sessions)

    # ---- requests

    def fetch(self, group: str, member_id: str, fetch: ShareFetch) -> Polling[ShareFetched]:
        """Records, leased. It waits while there are none. Cancel it when the client went away."""
        try:
            session = self._enter(group, member_id, fetch.epoch, bool(fetch.acknowledged))
            settles = self._settles(session, fetch.acknowledged)
        except MillstreamError as error:
            return Polling.failed(error)
        receiving: list[Polling[Received]] = []
        polling = _Fetching(receiving)
        steps = self._fetch((group, member_id), session, fetch, settles, polling)
        follow(steps).then(lambda done: _pass(done, polling.pending))
        return polling

    def _fetch(
        self,
        place: tuple[str, str],
        session: _Session,
        fetch: ShareFetch,
        settles: _Settles,
        polling: _Fetching,
    ) -> Generator[Pending[Any], Any, ShareFetched]:
        group, member_id = place
        yield session.voided
        outcomes: Outcomes = yield follow(self._settle(group, session, settles))
        if fetch.epoch == ENDING:
            self._end(group, member_id)
            return ShareFetched(outcomes, [])
        session.partitions.update(fetch.added)
        session.partitions.difference_update(fetch.dropped)
        topics = sorted({id.topic for id in session.partitions} & self._topics.by_name.keys())
        if fetch.is_renewal or fetch.count_max <= 0 or not topics or polling.is_over:
            return ShareFetched(outcomes, [])
        # What was settled is told at once: its client may wait for that.
        wait_ms = 0 if settles.count else fetch.wait_ms
        receive = Receive(
            tuple(topics),
            count_max=fetch.count_max,
            bytes_max=max(fetch.bytes_max, 1),
            wait_ms=wait_ms,
            member=UNWANTED.sub("_", member_id),
        )
        receiving = self._delivery.receive(group, self._delivery.bounded(receive))
        polling.receiving.append(receiving)
        received: Received = yield receiving.pending
        if self._sessions.get(place) is not session:
            # It was voided meanwhile.
            receiving.cancel()
            return ShareFetched(outcomes, [])
        known = self._hold(group, session, received)
        if received.records and not known:
            # Its client has yet to hear of these partitions; it must not ask again at once.
            yield self._pause()
        return ShareFetched(outcomes, known)

    def _pause(self) -> Pending[None]:
        pending: Pending[None] = Pending()
        self._timers.after(PAUSE_SECONDS, lambda: pending.succeed(None))
        return pending

    def acknowledge(
        self, group: str, member_id: str, epoch: int, acknowledged: Sequence[Acknowledgement]
    ) -> Pending[Outcomes]:
        try:
            if epoch == OPENING:
                raise _epoch_invalid(group, epoch)
            session = self._enter(group, member_id, epoch, has_acknowledged=True)
            settles = self._settles(session, acknowledged)
        except MillstreamError as error:
            return Pending.failed(error)
        return follow(self._acknowledge((group, member_id), session, epoch, settles))

    def _acknowledge(
        self, place: tuple[str, str], session: _Session, epoch: int, settles: _Settles
    ) -> Generator[Pending[Any], Any, Outcomes]:
        outcomes: Outcomes = yield follow(self._settle(place[0], session, settles))
        if epoch == ENDING:
            self._end(*place)
        return outcomes

    # ---- sessions

    def _enter(self, group: str, member_id: str, epoch: int, has_acknowledged: bool) -> _Session:
        if epoch == OPENING:
            self._groups.require(group, member_id)
            if has_acknowledged:
                raise ParameterInvalid(
                    "a new session has nothing to acknowledge yet", parameter="epoch"
                )
            session = _Session(self._end(group, member_id))
            self._sessions[group, member_id] = session
            return session
        found = self._sessions.get((group, member_id))
        if found is None:
            raise ShareSessionUnknown(
                f"member {member_id} of group {group} has no session; open one with epoch 0",
                group=group,
                member_id=member_id,
            )
        if epoch not in (ENDING, found.epoch):
            raise _epoch_invalid(group, epoch)
        found.epoch = found.epoch + 1 if found.epoch < EPOCH_MAX else 1
        return found

    def _end(self, group: str, member_id: str) -> Pending[Any]:
        session = self._sessions.pop((group, member_id), None)
        if session is not None and session.timer is not None:
            self._timers.cancel(session.timer)
        held = session.held.values() if session is not None else ()
        receipts = [one.receipt for of_partition in held for one in of_partition.values()]
        if not receipts:
            return Pending.of(None)
        return self._delivery.settle([Settle("release", one) for one in receipts], group)

    def _member_gone(self, group: str, member_id: str, has_left: bool) -> None:
        session = self._sessions.get((group, member_id))
        if session is None:
            return
        if not has_left:
            self._end(group, member_id)
            return

        def over() -> None:
            session.timer = None
            self._end(group, member_id)

        session.timer = self._timers.after(GOODBYE_SECONDS, over)

    # ---- what a session has

    def _hold(self, group: str, session: _Session, received: Received) -> list[Delivered]:
        """Those of partitions that the member knows of; others go back."""
        known: list[Delivered] = []
        unknown: list[Settle] = []
        now_ms = self._clock.wall_ms()
        session.forget_ended(now_ms)
        for one in received.records:
            id = PartitionId(one.topic, one.partition)
            if id in session.partitions:
                topic = self._topics.by_name.get(one.topic)
                # The shortest of all, which is that of the group where it has one.
                lease_ms = received.visibility_ms
                if topic is not None:
                    lease_ms = max(lease_ms, topic.settings.visibility_ms)
                until_ms = now_ms + lease_ms + LEASE_GRACE_MS
                session.hold(id, one.record.offset, _Held(one.receipt, until_ms))
                known.append(one)
            else:
                unknown.append(Settle("release", one.receipt))
        if unknown:
            self._delivery.settle(unknown, group)
        return known

    def _settles(self, session: _Session, acknowledged: Sequence[Acknowledgement]) -> _Settles:
        settles = _Settles()
        for one in acknowledged:
            count = one.last - one.first + 1
            settles.count += count
            if count < 1 or settles.count > ACKNOWLEDGED_MAX:
                raise ParameterInvalid(
                    f"a request acknowledges 1 to {ACKNOWLEDGED_MAX} offsets, in their order",
                    parameter="acknowledgements",
                )
            if len(one.kinds) not in (1, count) or not set(one.kinds) <= {GAP, *SETTLES}:
                raise ParameterInvalid(
                    "an acknowledgement has one type for all its offsets, or one for each: 0 to 4",
                    parameter="acknowledgements",
                )
        # All are checked before any receipt is used up: a request is refused whole.
        for one in acknowledged:
            settles.gather(one, session.held.get(one.id, {}))
        return settles

    def _settle(
        self, group: str, session: _Session, settles: _Settles
    ) -> Generator[Pending[Any], Any, Outcomes]:
        outcomes = settles.outcomes
        if not settles.settles:
            return outcomes
        try:
            done: list[Settled] = yield self._delivery.settle(settles.settles, group)
        except MillstreamError:
            # Its client may ask again.
            for (id, offset), held in zip(settles.places, settles.taken, strict=True):
                session.hold(id, offset, held)
            raise
        for (id, offset), settle, settled in zip(
            settles.places, settles.settles, done, strict=True
        ):
            if settled.error is not None:
                outcomes[id] = outcomes[id] or settled.error
            if settle.kind == "extend" and settled.error is None:
                until_ms = settled.when_ms + LEASE_GRACE_MS
                session.hold(id, offset, _Held(settle.receipt, until_ms))
        return outcomes


class _Settles:
    """What a request acknowledges, as settlings of receipts."""

    __slots__ = ("count", "outcomes", "places", "settles", "taken")

    def __init__(self) -> None:
        self.count = 0
        self.settles: list[Settle] = []
        # Where each of them is.
        self.places: list[tuple[PartitionId, int]] = []
        # What the session held for each.
        self.taken: list[_Held] = []
        self.outcomes: Outcomes = {}

    def gather(self, one: Acknowledgement, held: dict[int, _Held]) -> None:
        self.outcomes.setdefault(one.id, None)
        kinds = one.kinds if len(one.kinds) > 1 else one.kinds * (one.last - one.first + 1)
        for offset, kind in zip(range(one.first, one.last + 1), kinds, strict=True):
            if kind == GAP:
                continue
            found = held.pop(offset, None)
            if found is None:
                self.outcomes[one.id] = ReceiptStale(
                    f"offset {offset} of {one.id} is not leased to this member, or no longer",
                    receipt=f"{one.id.topic}:{one.id.number}:{offset}",
                )
                continue
            self.places.append((one.id, offset))
            self.taken.append(found)
            self.settles.append(Settle(SETTLES[kind], found.receipt))


class _Fetching(Polling["ShareFetched"]):
    """A fetch under way: its records come from a receive."""

    __slots__ = ("receiving",)

    def __init__(self, receiving: list[Polling[Received]]) -> None:
        super().__init__(_give_back_all)
        self.receiving = receiving

    def end(self) -> None:
        super().end()
        for one in self.receiving:
            one.end()


def _give_back_all(fetching: Polling[ShareFetched]) -> None:
    assert isinstance(fetching, _Fetching)
    for one in fetching.receiving:
        one.cancel()


def _epoch_invalid(group: str, epoch: int) -> ShareSessionEpochInvalid:
    return ShareSessionEpochInvalid(
        f"{epoch} is not the next epoch of the session; open a new one with epoch 0",
        group=group,
        epoch=epoch,
    )


def _pass(source: Pending[ShareFetched], target: Pending[ShareFetched]) -> None:
    if source.error is not None:
        target.fail(source.error)
    else:
        target.succeed(source.result())
