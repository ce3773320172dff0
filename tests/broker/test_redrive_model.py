"""Dead letters against lists: buried, redriven by any filter, deleted, over restarts."""

from __future__ import annotations

from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from broker.burying import bury, job, left, listed, make, stored, wish
from broker.making import House, local_house
from faults.simulated_disk import SimulatedDisk
from log.effort import effort

PARTITIONS = 2
TOPICS = ("orders", "other")
WHENS = (1_000, 2_000, 3_000)
FILTERS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "reason": st.sampled_from(["deliveries", "rejected"]),
        "group": st.sampled_from(["g", "h"]),
        "key": st.sampled_from([b"k", b"l"]),
        "text": st.sampled_from(["odd", "7"]),
        "since_ms": st.sampled_from(WHENS),
        "until_ms": st.sampled_from(WHENS),
    },
)


class Dead(NamedTuple):
    value: str
    partition: int
    offset: int
    reason: str
    group: str
    key: bytes | None
    lane: str
    when_ms: int

    def is_meant(self, wanted: dict[str, Any]) -> bool:
        return (
            wanted.get("reason", self.reason) == self.reason
            and wanted.get("group", self.group) == self.group
            and wanted.get("key", self.key) == self.key
            and wanted.get("text", "") in self.value
            and wanted.get("since_ms", 0) <= self.when_ms < wanted.get("until_ms", 1 << 60)
        )


class Letters(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.house: House = local_house().start()
        for name in TOPICS:
            make(self.house, name, PARTITIONS)
        self.serial = 0
        self.ends = [0] * PARTITIONS
        self.dead: list[Dead] = []
        # Of each topic: what went there, by the partition of the dead letters that it was in.
        self.moved: dict[tuple[str, int], list[str]] = {}

    @rule(
        partition=st.integers(0, PARTITIONS - 1),
        count=st.integers(1, 5),
        reason=st.sampled_from(["deliveries", "rejected"]),
        group=st.sampled_from(["g", "h"]),
        key=st.sampled_from([None, b"k", b"l"]),
        lane=st.sampled_from(["normal", "normal", "high", "low"]),
        when_ms=st.sampled_from(WHENS),
    )
    def die(self, count: int, partition: int, **how: Any) -> None:
        values = []
        for _ in range(count):
            self.serial += 1
            values.append(f"{'odd' if self.serial % 2 else 'even'} {self.serial}")
        bury(self.house, *values, partition=partition, **how)
        for value in values:
            self.dead.append(Dead(value, partition, self.ends[partition], **how))
            self.ends[partition] += 1

    @rule(wanted=FILTERS, to=st.sampled_from([None, "other"]), rate=st.sampled_from([None, 7]))
    def redrive(self, wanted: dict[str, Any], to: str | None, rate: int | None) -> None:
        begun = self.house.done(
            self.house.broker.redrive.begin("orders", wish(to=to, rate=rate, **wanted))
        )
        if rate is not None:
            self.house.scheduler.advance(1 + len(self.dead) / rate)
        meant = [one for one in self.dead if one.is_meant(wanted)]
        found = job(self.house, begun.id).progress
        assert (found.state, found.seen) == ("done", len(self.dead))
        assert found.matched == found.moved == len(meant)
        self.move(meant, to)

    def move(self, meant: list[Dead], to: str | None) -> None:
        for one in sorted(meant, key=lambda one: (one.partition, one.offset)):
            self.dead.remove(one)
            self.moved.setdefault((to or "orders", one.partition), []).append(one.value)

    @rule(wanted=FILTERS)
    def dry_run(self, wanted: dict[str, Any]) -> None:
        begun = self.house.done(
            self.house.broker.redrive.begin("orders", wish(is_dry_run=True, **wanted))
        )
        meant = [one for one in self.dead if one.is_meant(wanted)]
        assert job(self.house, begun.id).progress.matched == len(meant)

    @rule(wanted=FILTERS)
    def list_some(self, wanted: dict[str, Any]) -> None:
        meant = [one for one in self.in_order() if one.is_meant(wanted)]
        assert left(self.house, count_max=1000, **wanted) == [one.value for one in meant]

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.dead:
            one = data.draw(st.sampled_from(self.dead))
            reading = self.house.broker.dead_letter_reading
            self.house.done(reading.delete("orders", [(one.partition, one.offset)]))
            self.dead.remove(one)

    @rule(
        wanted=FILTERS, seconds=st.floats(0, 3), way=st.sampled_from(["nothing", "all", "prefix"])
    )
    def restart_during_a_redrive(self, wanted: dict[str, Any], seconds: float, way: str) -> None:
        begun = self.house.done(self.house.broker.redrive.begin("orders", wish(rate=3, **wanted)))
        meant = [one for one in self.dead if one.is_meant(wanted)]
        self.house.scheduler.advance(seconds)
        self.restart(way)
        self.house.scheduler.advance(1 + len(self.dead))
        found = job(self.house, begun.id).progress
        assert (found.state, found.moved) == ("done", len(meant))
        self.move(meant, None)

    @rule(way=st.sampled_from(["nothing", "all", "prefix"]))
    def restart(self, way: str) -> None:
        self.house.scheduler.run()
        disk = self.house.scheduler.disk
        assert isinstance(disk, SimulatedDisk)
        now_ms = self.house.scheduler.clock.now_ms
        self.house = local_house(disk.crash(way), now_ms=now_ms).start()  # type: ignore[arg-type]

    def in_order(self) -> list[Dead]:
        return sorted(self.dead, key=lambda one: (one.partition, one.offset))

    @invariant()
    def the_broker_has_what_the_model_has(self) -> None:
        self.house.scheduler.run()
        page = listed(self.house, count_max=1000)
        assert [(one.partition, one.record.offset) for one in page.letters] == [
            (one.partition, one.offset) for one in self.in_order()
        ]
        assert page.total == len(self.dead)

    @invariant()
    def each_came_once_and_in_its_order(self) -> None:
        for topic in TOPICS:
            expected = [
                value
                for (name, _), values in self.moved.items()
                if name == topic
                for value in values
            ]
            found = [
                (one.value or b"").decode()
                for n in range(PARTITIONS)
                for one in stored(self.house, topic, n)
            ]
            assert sorted(found) == sorted(expected)
        for number in range(PARTITIONS):
            found = [(one.value or b"").decode() for one in stored(self.house, "orders", number)]
            assert found == self.moved.get(("orders", number), [])


Letters.TestCase.settings = effort(30, steps=25)
TestLetters = Letters.TestCase
