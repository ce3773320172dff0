"""Groups against a model: whatever members do, nothing is skipped, nothing is committed that
nobody read, and in the end everything is read."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from broker.grouping import Consumer, publish
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from log.effort import effort
from millstream.broker.group_values import Join, Polled
from millstream.errors import MemberUnknown, MillstreamError, StaleGeneration

PARTITIONS_MAX = 5
SESSION_MS = 5_000


class Groups(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house: House = local_house().start()
        self.house.done(self.house.broker.topics.create("orders", 2))
        self.published: list[list[str]] = [[], []]
        # How far somebody has read each partition, and what is committed at most and at least.
        self.read = [0, 0]
        self.committed = [0, 0]
        self.consumers: list[Consumer] = []
        self.serial = 0

    # ---- steps

    @rule(number=st.integers(0, PARTITIONS_MAX - 1), count=st.integers(1, 5))
    def publish(self, number: int, count: int) -> None:
        number %= len(self.published)
        values = [f"{self.serial + n}" for n in range(count)]
        self.serial += count
        publish(self.house, *values, partition=number)
        self.published[number] += values

    @precondition(lambda self: len(self.consumers) < 4)
    @rule(auto_commit=st.booleans(), instance_id=st.sampled_from([None, None, "one"]))
    def join(self, auto_commit: bool, instance_id: str | None) -> None:
        consumer = Consumer(self.house).join(
            auto_commit=auto_commit,
            instance_id=instance_id,
            session_timeout_ms=SESSION_MS,
            auto_commit_interval_ms=1_000,
        )
        self.consumers.append(consumer)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), count=st.integers(1, 4), is_lost=st.booleans())
    def poll(self, data: st.DataObject, count: int, is_lost: bool) -> None:
        consumer = self.some(data)
        polling = consumer.start_poll(count_max=count, wait_ms=0, received=consumer.number or 0)
        polled = self.answered(consumer, polling.pending)
        if polled is not None and not is_lost:
            self.take(consumer, polled)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def poll_and_commit(self, data: st.DataObject) -> None:
        consumer = self.some(data)
        polling = consumer.start_poll(count_max=3, wait_ms=0, received=consumer.number or 0)
        polled = self.answered(consumer, polling.pending)
        if polled is None:
            return
        self.take(consumer, polled)
        for part in polled.parts:
            consumer.commit(part.next_offset, part.partition)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data(), is_lost=st.booleans())
    def heartbeat(self, data: st.DataObject, is_lost: bool) -> None:
        consumer = self.some(data)
        generation = consumer.standing.generation
        groups = self.house.broker.groups
        standing = self.answered(consumer, groups.heartbeat("g", consumer.id, generation))
        if standing is not None and not is_lost:
            consumer.standing = standing

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        consumer = self.some(data)
        leaving = self.house.broker.groups.leave("g", consumer.id, consumer.number or 0)
        self.answered(consumer, leaving)
        if consumer in self.consumers:
            self.consumers.remove(consumer)

    @precondition(lambda self: self.consumers)
    @rule(data=st.data())
    def vanish(self, data: st.DataObject) -> None:
        """A member dies without a word."""
        self.consumers.remove(self.some(data))

    @rule(seconds=st.sampled_from([0.5, 1.1, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.house.scheduler.advance(seconds)

    @precondition(lambda self: len(self.published) < PARTITIONS_MAX)
    @rule()
    def add_partition(self) -> None:
        count = len(self.published) + 1
        self.house.done(self.house.broker.topics.add_partitions("orders", count))
        self.published.append([])
        self.read.append(0)
        self.committed.append(0)

    @rule()
    def restart(self) -> None:
        """The power goes. Members find that nobody knows them."""
        disk = self.house.scheduler.disk
        assert isinstance(disk, SimulatedDisk)
        now_ms = self.house.scheduler.clock.now_ms
        self.house = local_house(disk.crash("nothing"), now_ms=now_ms).start()
        for consumer in self.consumers:
            consumer.house = self.house

    # ---- what must hold

    @invariant()
    def what_is_committed_was_read_and_never_goes_back(self) -> None:
        if not self.house.broker.group_offsets.table.has_group("g"):
            return
        for one in self.house.done(self.house.broker.group_offsets.committed("g")):
            assert self.committed[one.partition] <= one.offset <= self.read[one.partition], one
            self.committed[one.partition] = one.offset

    @invariant()
    def a_partition_is_with_one_member(self) -> None:
        if not self.house.broker.group_offsets.has_members("g"):
            return
        facts = self.house.done(self.house.broker.directory.describe("g"))
        held = [id for one in facts.members for id in (*one.assignment, *one.revoking)]
        assert len(held) == len(set(held))

    def teardown(self) -> None:
        """Those that died are found out, the others read to the end."""
        if not self.consumers:
            self.join(True, None)
        for _ in range(80):
            self.house.scheduler.advance(1)
            for consumer in list(self.consumers):
                polling = consumer.start_poll(wait_ms=0, received=consumer.number or 0)
                polled = self.answered(consumer, polling.pending)
                if polled is not None:
                    self.take(consumer, polled)
            if not self.consumers:
                self.join(True, None)
            if self.read == [len(values) for values in self.published]:
                return
        raise AssertionError(f"read {self.read} of {list(map(len, self.published))}")

    # ---- inside

    def some(self, data: st.DataObject) -> Consumer:
        return self.consumers[data.draw(st.integers(0, len(self.consumers) - 1))]

    def answered(self, consumer: Consumer, pending: Any) -> Any:
        """The answer; None when the member is told to join again, which it does."""
        self.house.scheduler.run()
        error = pending.error
        if error is None:
            return pending.result()
        assert isinstance(error, MillstreamError)
        self.consumers.remove(consumer)
        if isinstance(error, StaleGeneration):
            again = Join(("orders",), member_id=consumer.id, session_timeout_ms=SESSION_MS)
            joined = self.house.done(self.house.broker.groups.join("g", again))
            assert joined.standing.member_id == consumer.id
        else:
            assert isinstance(error, MemberUnknown) or error.code == "member_fenced", error
        return None

    def take(self, consumer: Consumer, polled: Polled) -> None:
        consumer.standing = polled.standing
        consumer.number = polled.number
        for part in polled.parts:
            for record in part.records:
                number, offset = part.partition, record.offset
                assert offset <= self.read[number], f"{number}/{offset} came too early"
                assert record.value == self.published[number][offset].encode()
                self.read[number] = max(self.read[number], offset + 1)


Groups.TestCase.settings = effort(40, steps=40)
TestGroups = Groups.TestCase
