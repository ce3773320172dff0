"""Committed offsets against a dictionary: commits, resets, deletions, restarts, in any order."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.grouping import publish
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from log.effort import effort
from millstream.broker.group_offsets import ResetTo
from millstream.broker.group_values import Commit
from millstream.errors import GroupUnknown, MillstreamError, OffsetOutOfRange, TopicUnknown

GROUPS = st.sampled_from(["g", "h"])
TOPICS = st.sampled_from(["a", "b"])
PARTITIONS = 3


class Offsets(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house: House = local_house().start()
        # Where each topic ends, and what each group has committed.
        self.ends: dict[str, list[int]] = {}
        self.committed: dict[tuple[str, str, int], tuple[int, str]] = {}
        self.make("a")

    def done(self, pending: object, error: type[MillstreamError] | None) -> bool:
        """Whether it was done; it must fail exactly when it is said to."""
        self.house.scheduler.run()
        failure = pending.error  # type: ignore[attr-defined]
        if error is None:
            assert failure is None, failure
        else:
            assert isinstance(failure, error), failure
        return error is None

    @rule(topic=TOPICS)
    def make(self, topic: str) -> None:
        if topic not in self.ends:
            self.done(self.house.broker.topics.create(topic, PARTITIONS), None)
            self.ends[topic] = [0] * PARTITIONS

    @rule(topic=TOPICS)
    def delete_topic(self, topic: str) -> None:
        is_there = self.ends.pop(topic, None) is not None
        deleting = self.house.broker.topics.delete(topic)
        self.done(deleting, None if is_there else TopicUnknown)
        self.committed = {key: one for key, one in self.committed.items() if key[1] != topic}

    @rule(topic=TOPICS, partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 4))
    def publish(self, topic: str, partition: int, count: int) -> None:
        if topic in self.ends:
            publish(self.house, *"wxyz"[:count], topic=topic, partition=partition)
            self.ends[topic][partition] += count

    @rule(
        group=GROUPS,
        offsets=st.lists(
            st.tuples(TOPICS, st.integers(0, PARTITIONS - 1), st.integers(-1, 6)), max_size=3
        ),
        metadata=st.sampled_from(["", "note"]),
    )
    def commit(self, group: str, offsets: list[tuple[str, int, int]], metadata: str) -> None:
        error: type[MillstreamError] | None = None
        for topic, partition, offset in offsets:
            if topic not in self.ends:
                error = error or TopicUnknown
            elif not 0 <= offset <= self.ends[topic][partition]:
                error = error or OffsetOutOfRange
        commits = [Commit(*one, metadata) for one in offsets]
        if self.done(self.house.broker.groups.commit(group, commits), error):
            for topic, partition, offset in offsets:
                self.committed[group, topic, partition] = (offset, metadata)

    @rule(group=GROUPS, topic=TOPICS, kind=st.sampled_from(["earliest", "latest"]))
    def reset(self, group: str, topic: str, kind: str) -> None:
        to = ResetTo(kind)  # type: ignore[arg-type]
        resetting = self.house.broker.group_offsets.reset(group, topic, to)
        if self.done(resetting, None if topic in self.ends else TopicUnknown):
            for partition, end in enumerate(self.ends[topic]):
                self.committed[group, topic, partition] = (end if kind == "latest" else 0, "")

    @rule(group=GROUPS)
    def delete_group(self, group: str) -> None:
        deleting = self.house.broker.groups.delete(group)
        is_there = any(key[0] == group for key in self.committed)
        self.done(deleting, None if is_there else GroupUnknown)
        self.committed = {key: one for key, one in self.committed.items() if key[0] != group}

    @rule(way=st.sampled_from(["nothing", "all", "prefix"]))
    def restart(self, way: str) -> None:
        disk = self.house.scheduler.disk
        assert isinstance(disk, SimulatedDisk)
        now_ms = self.house.scheduler.clock.now_ms
        self.house = local_house(disk.crash(way), now_ms=now_ms).start()  # type: ignore[arg-type]

    @invariant()
    def the_broker_has_what_the_model_has(self) -> None:
        self.house.scheduler.run()
        found: dict[tuple[str, str, int], tuple[int, str]] = {}
        for group in ("g", "h"):
            reading = self.house.broker.group_offsets.committed(group)
            is_there = any(key[0] == group for key in self.committed)
            if self.done(reading, None if is_there else GroupUnknown):
                for one in reading.result():
                    found[group, one.topic, one.partition] = (one.offset, one.metadata)
        assert found == self.committed
        assert self.house.broker.group_offsets.table.count == len(found)


Offsets.TestCase.settings = effort(40, steps=30)
TestOffsets = Offsets.TestCase
