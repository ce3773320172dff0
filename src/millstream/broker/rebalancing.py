"""What happens to members between their calls: sessions end, partitions move, commits fall due.

`membership.py` decides who has what; here it meets time, committed offsets and polls that wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import structlog

from millstream.broker.group_values import Commit, Committed
from millstream.broker.membership import Membership
from millstream.errors import MillstreamError, OffsetOutOfRange, OffsetUnknown, TopicUnknown
from millstream.log.partition import PartitionId

if TYPE_CHECKING:
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.group_values import GroupProtocol
    from millstream.broker.joining import GroupOptions
    from millstream.broker.polling import Session
    from millstream.broker.surroundings import Surroundings
    from millstream.engine.pending import Pending

# join, leave, expired: who came or went. subscription: a member wants other topics. topics: one
# was made, grew or was deleted. revoked: a member took too long to give up.
Reason: TypeAlias = Literal["join", "leave", "expired", "subscription", "topics", "revoked"]

# Pairs of group and topic whose records are counted apart; the rest are counted together.
CONSUMED_MAX = 1000
OTHERS = ("", "")
DURATION_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0)


class Group:
    """A group that has members."""

    __slots__ = ("is_waking", "membership", "name", "protocol", "sessions", "since")

    def __init__(self, name: str, protocol: GroupProtocol, membership: Membership) -> None:
        self.name = name
        self.protocol = protocol
        self.membership = membership
        self.sessions: dict[str, Session] = {}
        # When the rebalance under way began, on the monotonic clock.
        self.since: float | None = None
        self.is_waking = False


@dataclass(slots=True)
class GroupCounts:
    """Plain numbers; the metrics page reads them."""

    rebalances: Counter[str] = field(default_factory=Counter)
    # How long they took: one more than there are bounds.
    durations: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    duration_sum_s: float = 0.0
    auto_commits: int = 0
    auto_commits_failed: int = 0
    # Positions that were not there: never committed, or removed by retention.
    resets_unset: int = 0
    resets_removed: int = 0
    # Records that retention took before their group read them.
    expired_records: int = 0
    records: Counter[tuple[str, str]] = field(default_factory=Counter)

    def consumed(self, group: str, topic: str, count: int) -> None:
        key = (group, topic)
        if key not in self.records and len(self.records) >= CONSUMED_MAX:
            key = OTHERS
        self.records[key] += count

    def took(self, seconds: float) -> None:
        self.durations[bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.duration_sum_s += seconds


class Rebalancing:
    __slots__ = (
        "_clock",
        "_offsets",
        "_options",
        "_reader",
        "_timers",
        "_turns",
        "counts",
        "groups",
    )

    def __init__(self, around: Surroundings, offsets: GroupOffsets, options: GroupOptions) -> None:
        self._offsets = offsets
        self._reader = around.reader
        self._clock = around.clock
        self._timers = around.timers
        self._turns = around.turns
        self._options = options
        self.groups: dict[str, Group] = {}
        self.counts = GroupCounts()

    def count_members(self, name: str, protocol: GroupProtocol) -> int:
        group = self.groups.get(name)
        return len(group.sessions) if group is not None and group.protocol == protocol else 0

    def get_or_create(self, name: str, protocol: GroupProtocol) -> Group:
        group = self.groups.get(name)
        if group is None:
            generation = self._offsets.generation(name)
            membership = Membership(name, self._options.assignor, generation)
            group = self.groups[name] = Group(name, protocol, membership)
        return group

    # ---- sessions

    def open(self, group: Group, session: Session, reason: Reason | None) -> None:
        group.sessions[session.member.id] = session
        self._watch(group, session, session.timeout_ms / 1000)
        self.changed(group, reason)

    def close(self, session: Session) -> None:
        """The session ends, once nothing belongs to it any more: a poll under way is answered
        here and now, with what there is to say then."""
        session.is_gone = True
        for timer in (session.timer, session.commit_timer, session.revoke_timer):
            if timer is not None:
                self._timers.cancel(timer)
        if session.polling is not None:
            session.polling.end()

    def remove(self, group: Group, session: Session, reason: Reason) -> None:
        """The member goes, and the group with its last one."""
        del group.sessions[session.member.id]
        group.membership.remove(session.member)
        self.close(session)
        if group.sessions:
            self.changed(group, reason)
            return
        self.counts.rebalances[reason] += 1
        del self.groups[group.name]
        self._offsets.give_back(group.name, group.membership.generation)

    def called(self, session: Session) -> None:
        session.last_call = self._clock.monotonic()
        session.has_left = False

    def _watch(self, group: Group, session: Session, seconds: float) -> None:
        session.timer = self._timers.after(seconds, lambda: self._look(group, session))

    def _look(self, group: Group, session: Session) -> None:
        """One timer a session, set again for the rest: nothing to do at each call."""
        idle = self._clock.monotonic() - session.last_call
        # Who waits in a poll is there: its listener cancels the poll when the client is not.
        rest = session.timeout_ms / 1000 - (idle if session.polling is None else 0.0)
        if rest > 0:
            self._watch(group, session, rest)
        else:
            self.remove(group, session, "leave" if session.has_left else "expired")

    # ---- partitions

    def reconcile(self, group: Group, session: Session) -> bool:
        """Tell a member what changed for it; whether anything did."""
        member = session.member
        has_changed = group.membership.reconcile(member)
        # Also when nothing changed: the last time may have been refused.
        self._reserve(group)
        if not has_changed:
            return False
        self.place(group, session, [id for id in member.owned if id not in session.positions])
        if member.revoking and session.revoke_timer is None:
            self._give_time(group, session)
        if session.polling is not None:
            # It waits for records in partitions that it had before.
            session.polling.wake()
        self.changed(group, None)
        return True

    def acknowledge(self, group: Group, session: Session, generation: int) -> None:
        """What the member gives up by its call is committed as far as it is handled, then free."""
        member = session.member
        given_up = group.membership.acknowledged_by(member, generation)
        if given_up:
            self.commit_handled(group, session, given_up)
        self._acknowledge(group, session, generation, given_up)

    def _acknowledge(
        self, group: Group, session: Session, generation: int, given_up: list[PartitionId]
    ) -> None:
        session.positions.drop(given_up)
        if group.membership.acknowledge(session.member, generation):
            if not session.member.revoking and session.revoke_timer is not None:
                self._timers.cancel(session.revoke_timer)
                session.revoke_timer = None
            self.changed(group, None)

    def confirm(
        self, group: Group, session: Session, generation: int, owned: Collection[PartitionId] | None
    ) -> None:
        """The member heard of a generation, and has these partitions; None: as it said before.
        Only what it says it does not have any more is free: it may take its time over that."""
        member = session.member
        member.acknowledged = max(member.acknowledged, generation)
        if owned is not None and not member.revoking.keys() & owned:
            given_up = group.membership.acknowledged_by(member, generation)
            self._acknowledge(group, session, generation, given_up)

    def _give_time(self, group: Group, session: Session) -> None:
        """How long a member may take to give up what it has been told to until now."""
        told = session.member.generation

        def take() -> None:
            session.revoke_timer = None
            given_up = group.membership.acknowledged_by(session.member, told)
            if given_up and group.protocol == "consumer":
                # It knows the newest generation, and would not hear that they were taken.
                self.remove(group, session, "revoked")
                return
            if given_up:
                self.counts.rebalances["revoked"] += 1
                self._acknowledge(group, session, told, given_up)
            if session.member.revoking:
                self._give_time(group, session)

        timeout_ms = session.rebalance_timeout_ms
        if timeout_ms is None:
            timeout_ms = self._options.rebalance_timeout_ms
        session.revoke_timer = self._timers.after(timeout_ms / 1000, take)

    def set_partitions(self, topic: str, count: int) -> None:
        """A topic was made, grew, or is gone."""
        for group in self.groups.values():
            if not group.membership.wants(topic):
                continue
            if not group.membership.set_partitions(topic, count):
                continue
            for session in group.sessions.values():
                if not count:
                    session.positions.drop_topic(topic)
            self.changed(group, "topics")

    def changed(self, group: Group, reason: Reason | None) -> None:
        """After every change of a group: numbers reserved, counted, and who waits is woken."""
        self._reserve(group)
        if reason is not None:
            self.counts.rebalances[reason] += 1
            if group.since is None:
                group.since = self._clock.monotonic()
        if not group.is_waking:
            group.is_waking = True
            self._turns.soon(lambda: self._wake(group))

    def _wake(self, group: Group) -> None:
        group.is_waking = False
        membership = group.membership
        if membership.is_settled:
            if group.since is not None:
                self.counts.took(self._clock.monotonic() - group.since)
                group.since = None
            return
        for session in list(group.sessions.values()):
            if session.polling is not None and membership.has_news(session.member):
                session.polling.wake()

    def _reserve(self, group: Group) -> None:
        self._offsets.reserve(group.name, group.membership.generation)

    # ---- positions

    def place(self, group: Group, session: Session, ids: Iterable[PartitionId]) -> None:
        """Give partitions a position: what is committed, or what `auto_offset_reset` says. The
        latter is committed at once: if the member goes before it commits, nothing is skipped."""
        pins: list[Commit] = []
        for id in ids:
            try:
                committed = self._offsets.position(group.name, id.topic, id.number)
                start, end = self._reader.offsets(id.topic, id.number)
            except TopicUnknown:
                # It is being deleted; the group hears of it in a moment.
                continue
            if committed is not None and start <= committed <= end:
                session.positions.place(id, committed)
                continue
            if session.auto_offset_reset != "none":
                self._count_reset(committed, start)
                offset = start if session.auto_offset_reset == "earliest" else end
                session.positions.place(id, offset)
                pins.append(Commit(id.topic, id.number, offset))
        if pins:
            self._pin(group, session, pins)

    def out_of_range(self, group: Group, session: Session, id: PartitionId) -> None:
        """Retention removed what a member would have read next."""
        start, end = self._reader.offsets(id.topic, id.number)
        position = session.positions[id]
        session.positions.drop((id,))
        if session.auto_offset_reset == "none":
            return
        self._count_reset(position, start)
        offset = start if session.auto_offset_reset == "earliest" else end
        session.positions.place(id, offset)
        self._pin(group, session, [Commit(id.topic, id.number, offset)])

    def no_position(self, group: Group, id: PartitionId) -> MillstreamError:
        """What a member is told that wants no position made up."""
        committed = self._offsets.position(group.name, id.topic, id.number)
        start, end = self._reader.offsets(id.topic, id.number)
        self._count_reset(committed, start)
        what_to_do = "auto_offset_reset is `none`; reset the group, or commit where to begin"
        if committed is None:
            return OffsetUnknown(
                f"group {group.name} has committed nothing in {id}, and {what_to_do}",
                group=group.name,
                topic=id.topic,
                partition=id.number,
            )
        return OffsetOutOfRange(
            f"{id} has offsets {start} to {end}; {committed}, where group {group.name} stood, "
            f"was removed, and {what_to_do}",
            group=group.name,
            topic=id.topic,
            partition=id.number,
            offset=committed,
            start=start,
            end=end,
        )

    def _count_reset(self, position: int | None, start: int) -> None:
        if position is None:
            self.counts.resets_unset += 1
        else:
            self.counts.resets_removed += 1
            self.counts.expired_records += max(0, start - position)

    def _pin(self, group: Group, session: Session, pins: list[Commit]) -> None:
        session.pins += 1

        def done(written: Pending[list[Committed]]) -> None:
            if written.error is not None:
                session.positions.drop(PartitionId(one.topic, one.partition) for one in pins)

        self._offsets.write(group.name, pins).then(done)

    # ---- commits by the broker

    def commit_when_due(self, group: Group, session: Session) -> None:
        """After a poll said what is handled: at most one commit an interval."""
        if session.auto_commit_s is None or session.commit_timer is not None:
            return
        if not session.positions.has_handled:
            return
        rest = session.last_commit + session.auto_commit_s - self._clock.monotonic()
        if rest <= 0:
            self.commit_handled(group, session)
            return

        def due() -> None:
            session.commit_timer = None
            self.commit_handled(group, session)

        session.commit_timer = self._timers.after(rest, due)

    def commit_handled(
        self, group: Group, session: Session, among: Iterable[PartitionId] | None = None
    ) -> None:
        """What was handled in these partitions, or in all, if the broker commits for the member.
        When it cannot, it tries again next time."""
        if session.auto_commit_s is None:
            return
        if among is None:
            session.last_commit = self._clock.monotonic()
        handled = session.positions.take_handled(among)
        commits = [Commit(*id, offset) for id, offset in handled.items()]
        if not commits:
            return
        self.counts.auto_commits += len(commits)

        def done(written: Pending[list[Committed]]) -> None:
            if written.error is None:
                return
            self.counts.auto_commits_failed += len(commits)
            session.positions.put_back_handled(handled)
            error = written.error
            why = error.message if isinstance(error, MillstreamError) else repr(error)
            _logger().warning("not committed; tried again later", group=group.name, why=why)

        self._offsets.write(group.name, commits).then(done)


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
