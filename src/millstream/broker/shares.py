"""Shares: topics that groups receive from by lease, and who waits for records of them.

A share is a group's part in a topic: a ledger for each partition. Where a group stands in a
partition is its first record that is not settled. That is also its committed offset: it is written
there a moment later, and before anybody looks at the offsets of groups.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import structlog

from millstream.broker.breaker import Breaker
from millstream.broker.crew import Crew
from millstream.broker.delivery_values import DeliveryOptions
from millstream.broker.group_values import Commit, check_group_name
from millstream.broker.lanes import LaneTurns
from millstream.broker.lease_journal import LeaseJournal
from millstream.broker.ledger import LEASED, WAITING, Ledger, Open
from millstream.engine.pending import Pending, follow
from millstream.errors import (
    GroupUsesLeases,
    GroupUsesOffsets,
    LeasesRefused,
    TopicUnknown,
)
from millstream.log.partition import FsyncMode, PartitionId

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from millstream.broker.delivery_values import LeaseStart, Received
    from millstream.broker.group_offsets import GroupOffsets
    from millstream.broker.lanes import LaneIndex, Lanes
    from millstream.broker.ledger import Grant
    from millstream.broker.polling import Polling
    from millstream.broker.surroundings import Surroundings
    from millstream.broker.topics import Topic
    from millstream.engine.protocol import Engine, Offsets

MODES: tuple[FsyncMode, ...] = ("every", "interval", "none")
# How late the committed offsets of groups may be on disk; whoever asks for them sees them at once.
MIRROR_SECONDS = 1.0


class Share:
    __slots__ = (
        "_engine",
        "_ids",
        "_is_waking",
        "_news",
        "_next",
        "_watched",
        "beginning",
        "crew",
        "is_gone",
        "ledgers",
        "topic",
        "turns",
        "waiting",
    )

    def __init__(self, engine: Engine, crew: Crew, topic: Topic) -> None:
        self._engine = engine
        self.crew = crew
        self.topic = topic
        self.ledgers: list[Ledger] = []
        self._ids: list[PartitionId] = []
        # Which lane is next; None while the topic has never used lanes.
        self.turns: LaneTurns | None = None
        self.waiting: OrderedDict[Polling[Received], None] = OrderedDict()
        # Partitions whose next new record we are told of, whether somebody waits by then or not.
        self._watched: dict[int, Pending[None]] = {}
        self._next = 0
        self._news = 0
        self._is_waking = False
        self.is_gone = False
        # Of a group that is new: where it begins is not durable yet.
        self.beginning: Pending[None] | None = None

    @property
    def open_count(self) -> int:
        return sum(len(ledger.open) + len(ledger.acking) for ledger in self.ledgers)

    def add(self, ledger: Ledger) -> None:
        ledger.tally = self.crew.tally
        ledger.tally.open += len(ledger.open)
        self.ledgers.append(ledger)
        self._ids.append(PartitionId(self.topic.name, ledger.partition))

    def id(self, ledger: Ledger) -> PartitionId:
        return self._ids[ledger.partition]

    def offsets(self, ledger: Ledger) -> Offsets:
        """What there is of it now."""
        return self._engine.offsets(self._ids[ledger.partition])

    def in_turn(self) -> list[Ledger]:
        """All partitions, each time beginning with another one."""
        ledgers, first = self.ledgers, self._next
        if len(ledgers) == 1:
            return ledgers
        self._next = (first + 1) % len(ledgers)
        return ledgers[first:] + ledgers[:first]

    # ---- waiting

    def wait(self, polling: Polling[Received]) -> None:
        self.waiting[polling] = None
        if len(self._watched) < len(self.ledgers):
            for ledger in self.ledgers:
                if ledger.partition not in self._watched:
                    self._watch(ledger)

    def _watch(self, ledger: Ledger) -> None:
        id = self._ids[ledger.partition]
        one = self._engine.wait(id, self._engine.offsets(id).high_watermark)
        self._watched[ledger.partition] = one

        def woken(_: Pending[None]) -> None:
            if self._watched.get(ledger.partition) is not one:
                return
            del self._watched[ledger.partition]
            self.news()
            if self.waiting and not self.is_gone and ledger.partition not in self._watched:
                # Whoever was woken may have all that it wanted, and not come back soon.
                self._watch(ledger)

        one.then(woken)

    def leave(self, polling: Polling[Received]) -> None:
        self.waiting.pop(polling, None)

    def news(self) -> None:
        """There may be something for one that waits; it wakes the next, if there is more."""
        self._news += 1
        if self._is_waking:
            # By one that was just woken; a thousand of them must not nest.
            return
        self._is_waking = True
        while self._news and self.waiting:
            self._news -= 1
            self.waiting.popitem(last=False)[0].wake()
        self._is_waking = False
        self._news = 0

    def end(self) -> None:
        """The group has no part in the topic any more."""
        self.is_gone = True
        watched, self._watched = self._watched, {}
        for number, one in watched.items():
            if not one.is_done:
                self._engine.forget(self._ids[number], one)

    def news_for_all(self) -> None:
        waiting, self.waiting = self.waiting, OrderedDict()
        for one in waiting:
            one.wake()


class Shares:
    """All of them, with what is kept of them and what they need."""

    __slots__ = (
        "_check_new",
        "_dirty",
        "_engine",
        "_has_stopped",
        "_is_mirror_due",
        "_offsets",
        "around",
        "crews",
        "journals",
        "lanes",
        "options",
        "refused",
    )

    def __init__(
        self,
        engine: Engine,
        around: Surroundings,
        offsets: GroupOffsets,
        lanes: Lanes,
        options: DeliveryOptions,
        *,
        check_new: Callable[[str], None],
    ) -> None:
        """`check_new` raises when a group would be one too many."""
        self._check_new = check_new
        self._engine = engine
        self._offsets = offsets
        self.around = around
        self.lanes = lanes
        self.options = options
        self.crews: dict[str, Crew] = {}
        # Settlings with receipts of no group that there is.
        self.refused = 0
        self.journals = {mode: LeaseJournal(engine, around, mode) for mode in MODES}
        # Ledgers whose start may have moved since it was written to the committed offsets.
        self._dirty: dict[Ledger, Share] = {}
        self._is_mirror_due = False
        self._has_stopped = False
        around.topics.watch_deleted(self._topic_deleted)
        around.topics.watch_partitions(self._topic_grown)
        around.topics.watch_purged(self._topic_purged)
        offsets.lease_by(self)

    def __iter__(self) -> Iterator[Share]:
        for crew in self.crews.values():
            yield from crew.shares.values()

    # ---- finding and making

    def find(self, group: str, topic: str) -> Share | None:
        crew = self.crews.get(group)
        share = crew.shares.get(topic) if crew is not None else None
        if share is not None:
            known = self.around.topics.by_name.get(topic)
            if known is None:
                return None
            share.topic = known
        return share

    def renew(self, shares: Sequence[Share]) -> None:
        """After a wait: a topic may have other settings by now, or use lanes."""
        for share in shares:
            if not share.is_gone:
                share.topic = self.around.topics.by_name.get(share.topic.name, share.topic)

    def get(self, group: str, topic: str, start: LeaseStart) -> Share:
        """Made when the group receives from the topic for the first time."""
        share = self.find(group, topic)
        if share is not None:
            return share
        found = self.check(group, topic)
        share = self._make(self._crew(group), found)
        for number in range(found.partitions):
            self._add_ledger(share, number, start)
        if start == "latest":
            # After a crash the end would be another, behind records that it was to have.
            share.beginning = self._write_begin(share)
        return share

    def check(self, group: str, topic: str) -> Topic:
        """Raises when the group may not receive from the topic."""
        check_group_name(group)
        found = self.around.topics.get(topic)
        if found.settings.compact:
            raise LeasesRefused(
                f"topic {topic} is compacted, so its records may go at any time; read it by offset",
                topic=topic,
            )
        members = self._offsets.count_members(group)
        if members:
            raise GroupUsesOffsets(
                f"group {group} has {members} members that read by offset; take another group, "
                "or let them leave first",
                group=group,
                topic=topic,
                members=members,
            )
        self._check_new(group)
        return found

    def begin(self, share: Share) -> Generator[Pending[Any], Any, None]:
        """Before the first answer: where the group begins is durable."""
        if share.beginning is not None and share.beginning.error is not None:
            share.beginning = self._write_begin(share)
        if share.beginning is not None:
            yield share.beginning
        share.beginning = None

    def _write_begin(self, share: Share) -> Pending[None]:
        return self.journal(share, share.ledgers[0]).write_state(share.ledgers)

    def _crew(self, group: str) -> Crew:
        crew = self.crews.get(group)
        if crew is None:
            options = self.options
            crew = self.crews[group] = Crew(
                group,
                Breaker(
                    options.breaker_settlings_min,
                    options.breaker_window_ms / 1000,
                    options.breaker_failures_percent,
                ),
                lambda: self.open_max(group),
                lambda: self.member_max(group),
            )
        return crew

    def _make(self, crew: Crew, topic: Topic) -> Share:
        share = crew.shares[topic.name] = Share(self._engine, crew, topic)
        return share

    def _add_ledger(self, share: Share, number: int, start: LeaseStart) -> None:
        """A group goes on where it has committed. A partition that is new begins at its start."""
        topic, group = share.topic, share.crew.name
        first, end = self.around.reader.offsets(topic.name, number)
        position = self._offsets.position(group, topic.name, number)
        if position is None:
            position = end if start == "latest" else first
        ledger = Ledger(group, topic.uuid.bytes, number, min(max(position, first), end))
        share.add(ledger)
        self.moved(share, ledger)

    # ---- what is set for a group goes before what its topics and the broker say

    def open_max(self, group: str) -> int:
        return self._offsets.settings(group).inflight_max or self.options.group_inflight_max

    def member_max(self, group: str) -> int:
        """How many records one member may have leased."""
        return self._offsets.settings(group).member_inflight_max or self.options.member_inflight_max

    def visibility_ms(self, share: Share) -> int:
        set_ms = self._offsets.settings(share.crew.name).visibility_ms
        return set_ms or share.topic.settings.visibility_ms

    def limits_changed(self, group: str) -> None:
        crew = self.crews.get(group)
        if crew is not None:
            crew.limits_changed()

    # ---- what happens to leases

    def journal(self, share: Share, ledger: Ledger) -> LeaseJournal:
        """The one of the topic's mode, which may have changed."""
        journal = self.journals[share.topic.settings.fsync]
        if ledger.journal is not journal:
            # All of them, so that after a crash none begins where its group never did.
            for one in share.ledgers:
                journal.adopt(one)
            journal.write_state(share.ledgers)
        return journal

    def end_lease(self, crew: Crew, one: Open) -> None:
        """Of a record that is leased: nobody has it any more."""
        grant = one.grant
        if grant is not None:
            one.grant = None
            self.end_leases(crew, grant, 1)

    def end_leases(self, crew: Crew, grant: Grant, count: int) -> None:
        """The same of so many records of a grant."""
        if grant.member is not None:
            crew.end(grant.member, count)
        grant.left -= count
        if grant.left == 0 and grant.timer is not None:
            self.around.timers.cancel(grant.timer)
            grant.timer = None

    def _void(self, share: Share, ledger: Ledger, cursor: int) -> None:
        """All leases of a ledger end, and it begins anew at an offset."""
        for one in ledger.clear(cursor):
            self.end_lease(share.crew, one)
            if one.timer is not None:
                self.around.timers.cancel(one.timer)

    # ---- lanes

    def index(self, share: Share, ledger: Ledger) -> LaneIndex | None:
        """Which offsets belong to which lane; None while the topic has never used lanes."""
        offset, group = ledger.first_cursor, share.crew.name
        index = self.lanes.index(share.topic, ledger.partition, offset, group)
        if index is not None and share.turns is None:
            settings = share.topic.settings
            now = self.around.clock.monotonic()
            share.turns = LaneTurns(settings.lane_weights, settings.lane_boost_ms / 1000, now)
        if index is not None:
            ledger.use_lanes()
        return index

    # ---- committed offsets

    def moved(self, share: Share, ledger: Ledger) -> None:
        """Where a group stands in a partition may be another place now."""
        self._dirty[ledger] = share
        if not self._is_mirror_due and not self._has_stopped:
            self._is_mirror_due = True
            self.around.timers.after(MIRROR_SECONDS, self._mirror_due)

    def _mirror_due(self) -> None:
        self._is_mirror_due = False
        self.mirror()

    def mirror(self) -> None:
        """Write where groups stand to their committed offsets."""
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        commits: dict[str, list[Commit]] = {}
        for ledger, share in dirty.items():
            if share.is_gone:
                continue
            start = self.start_of(share, ledger)
            name = share.topic.name
            if self._offsets.position(ledger.group, name, ledger.partition) != start:
                commits.setdefault(ledger.group, []).append(Commit(name, ledger.partition, start))
            if share.turns is not None:
                self._forget_lanes(share, ledger)
        for group, moved in commits.items():
            self._offsets.write(group, moved)

    def _forget_lanes(self, share: Share, ledger: Ledger) -> None:
        """What lies behind the group need not be known any more. A lane that has no records ahead
        moves along, or it would keep the index from ever forgetting."""
        index = self.index(share, ledger)
        if index is not None:
            ledger.cursors = _nexts(index, ledger)
            index.forget_before(ledger.first_cursor)

    def start_of(self, share: Share, ledger: Ledger) -> int:
        """The first record that is not settled, or would be next."""
        first = ledger.first_open()
        start = ledger.first_cursor
        if len(ledger.cursors) > 1:
            index = self.index(share, ledger)
            if index is not None:
                start = min(_nexts(index, ledger))
        return start if first is None else min(first, start)

    def lowest(self, topic: str, partition: int) -> int | None:
        """The first record that some group has yet to settle; None when no group has a part."""
        found: list[int] = []
        for crew in self.crews.values():
            share = crew.shares.get(topic)
            if share is not None and partition < len(share.ledgers):
                ledger = share.ledgers[partition]
                first = ledger.first_open()
                found += [ledger.first_cursor] if first is None else [first, ledger.first_cursor]
        return min(found, default=None)

    # ---- as the offsets of groups know us

    def is_busy(self, group: str) -> bool:
        """Whether somebody works with it, or waits to."""
        crew = self.crews.get(group)
        return crew is not None and any(
            share.open_count or share.waiting for share in crew.shares.values()
        )

    def refuse(self, group: str, topics: Sequence[str]) -> Pending[None]:
        """Somebody wants to use topics by offset: raises while there are leases. When there are
        none the group's share ends, and goes on where it was by offset. Done when that is durable:
        before, a restart would put the group back to where its share was."""
        self.mirror()
        for topic in topics:
            share = self.find(group, topic)
            if share is None:
                continue
            leases = share.open_count
            if leases or share.waiting:
                raise GroupUsesLeases(
                    f"group {group} receives from {topic} by lease, and {leases} records are in "
                    "flight; settle them first, or take another group",
                    group=group,
                    topic=topic,
                    leases=leases,
                )
        for topic in topics:
            self.drop(group, topic)
        return follow(self._dropped())

    def reset(self, group: str, topic: str, offsets: Mapping[int, int]) -> Pending[None]:
        """Where the group goes on; all of its leases there end."""
        share = self.find(group, topic)
        if share is None:
            return Pending.of(None)
        pending: Pending[None] = Pending.of(None)
        for number, offset in offsets.items():
            ledger = share.ledgers[number]
            self._void(share, ledger, offset)
            pending = self.journal(share, ledger).write_state((ledger,))
            self.moved(share, ledger)
        share.news_for_all()
        share.crew.wake_limited()
        return pending

    def drop(self, group: str, topic: str | None = None) -> Pending[None]:
        """The group does not receive there any more, and has no leases. Done when that is
        durable."""
        crew = self.crews.get(group)
        if crew is None:
            # It may have been dropped a moment ago, and that was refused.
            return follow(self._dropped())
        names = [topic] if topic is not None else list(crew.shares)
        gone = [crew.shares.pop(name) for name in names if name in crew.shares]
        for share in gone:
            self._end(share)
        if not crew.shares:
            del self.crews[group]
        return follow(self._dropped())

    def _dropped(self) -> Generator[Pending[Any], Any, None]:
        for journal in self.journals.values():
            yield journal.dropped()

    def _end(self, share: Share) -> None:
        share.end()
        self.lanes.forget_group(share.topic, share.crew.name)
        for ledger in share.ledgers:
            self._void(share, ledger, 0)
            self._dirty.pop(ledger, None)
            if ledger.journal is not None:
                ledger.journal.drop(ledger)
        share.news_for_all()
        for polling in share.crew.limited():
            polling.wake()

    # ---- topics that change

    def _topic_deleted(self, topic: Topic) -> None:
        for crew in list(self.crews.values()):
            if topic.name in crew.shares:
                self.drop(crew.name, topic.name)

    def _topic_grown(self, topic: Topic) -> None:
        for crew in self.crews.values():
            share = crew.shares.get(topic.name)
            if share is not None:
                share.topic = topic
                for number in range(len(share.ledgers), topic.partitions):
                    self._add_ledger(share, number, "earliest")
                share.news_for_all()

    def _topic_purged(self, topic: Topic) -> None:
        for crew in self.crews.values():
            if topic.name in crew.shares:
                ends = {
                    number: self.around.reader.offsets(topic.name, number).high_watermark
                    for number in range(topic.partitions)
                }
                self.reset(crew.name, topic.name, ends)

    # ---- the start

    def load(self) -> Pending[list[Share]]:
        """After views, topics and committed offsets: every share as it was, leases not armed."""
        return follow(self._load())

    def _load(self) -> Generator[Pending[Any], Any, list[Share]]:
        newest: dict[tuple[str, bytes, int], Ledger] = {}
        for journal in self.journals.values():
            yield journal.load()
            for ledger in list(journal.ledgers.values()):
                place = (ledger.group, ledger.topic, ledger.partition)
                other = newest.get(place)
                if other is not None and other.version > ledger.version:
                    journal.drop(ledger)
                    continue
                if other is not None and other.journal is not None:
                    other.journal.drop(other)
                newest[place] = ledger
        topics = {topic.uuid.bytes: topic for topic in self.around.topics.by_name.values()}
        found: dict[tuple[str, str], dict[int, Ledger]] = {}
        for ledger in newest.values():
            topic = topics.get(ledger.topic)
            if topic is not None and ledger.partition < topic.partitions:
                found.setdefault((ledger.group, topic.name), {})[ledger.partition] = ledger
            elif ledger.journal is not None:
                ledger.journal.drop(ledger)
        shares = [self._restore(*place, ledgers) for place, ledgers in found.items()]
        for journal in self.journals.values():
            yield journal.settled()
        self.mirror()
        return shares

    def _restore(self, group: str, topic: str, ledgers: dict[int, Ledger]) -> Share:
        share = self._make(self._crew(group), self.around.topics.get(topic))
        outside = 0
        clamped: list[Ledger] = []
        for number in range(share.topic.partitions):
            ledger = ledgers.get(number)
            if ledger is None:
                self._add_ledger(share, number, "earliest")
                continue
            if ledger.clamp(*self.around.reader.offsets(topic, number)):
                outside += 1
                clamped.append(ledger)
            ledger.loaded()
            share.add(ledger)
            self.moved(share, ledger)
        for ledger in clamped:
            self.journal(share, ledger).write_state((ledger,))
        if outside:
            _logger().warning(
                "leases lay outside of their partitions, and ended",
                group=group,
                topic=topic,
                partitions=outside,
            )
        return share

    def stop(self) -> None:
        self.mirror()
        self._has_stopped = True
        for journal in self.journals.values():
            journal.stop()


def _nexts(index: LaneIndex, ledger: Ledger) -> list[int]:
    """Of each lane: where its next record is, or where that would be found."""
    nexts = []
    for lane, cursor in enumerate(ledger.cursors):
        run = index.next_run(lane, cursor)
        nexts.append(run[0] if run is not None else max(cursor, index.end))
    return nexts


def waiting_or_leased(share: Share) -> tuple[int, int, int]:
    """How many records are leased, wait to come back, and are ready again."""
    leased = waiting = ready = 0
    for ledger in share.ledgers:
        for one in ledger.find_all():
            if one.state == LEASED:
                leased += 1
            elif one.state == WAITING:
                waiting += 1
            else:
                ready += 1
    return leased, waiting, ready


def refuse_gone(shares: Sequence[Share]) -> None:
    for share in shares:
        if share.is_gone:
            raise TopicUnknown(
                f"topic {share.topic.name} was deleted, or the group's part in it ended",
                topic=share.topic.name,
            )


def _logger() -> structlog.stdlib.BoundLogger:
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("millstream.broker")
    return logger
