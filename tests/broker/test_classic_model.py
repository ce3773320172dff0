"""Classic groups under members that come, go, die, hang and come back in any order.

The members do as Kafka's clients do. While things happen, generations only rise, and of two
members in the same generation no two have a partition. Once nothing happens any more, everybody
who lives is in one generation, and all partitions are dealt out.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import pytest

from broker.kafka_members import (
    REBALANCE_S,
    SESSION_S,
    Classic,
    assignment,
    facts,
    kafka_house,
    pass_time,
    subscription,
)
from broker.making import House
from millstream.engine.pending import Pending
from millstream.errors import MemberIdRequired, MillstreamError
from millstream.wire.kafka.consumer_protocol import assigned_partitions

PARTITIONS = 7
STEPS = 120
HEARTBEAT_S = 3.0
PROTOCOLS = ((("range", subscription("orders")),), (("range", subscription("orders", "x")),))


@dataclass
class Robot:
    member: Classic
    random: Random
    # Generations that somebody has dealt out.
    dealt: set[int]
    at: Literal["out", "joining", "syncing", "in"] = "out"
    syncing: Pending[Any] | None = None
    parts: frozenset[int] = frozenset()
    # It does nothing, as one whose machine is busy.
    is_hanging: bool = False
    is_fenced: bool = False

    def step(self) -> None:
        if self.is_hanging or self.is_fenced:
            return
        match self.at:
            case "out":
                knows = self.member.id is not None or self.member.instance_id is not None
                self.member.start(must_know_id=not knows)
                self.at = "joining"
                self._join()
            case "joining":
                self._join()
            case "syncing":
                self._sync()
            case "in":
                self._beat()

    def _join(self) -> None:
        joining = self.member.joining
        assert joining is not None
        if not joining.is_done:
            return
        if joining.error is not None:
            self._refused(joining.error)
            return
        before = self.member.told.generation if self.member.told is not None else 0
        told = self.member.hear()
        assert told.generation >= before
        given: dict[str, bytes] = {}
        if self.member.leads and told.members:
            assert told.generation not in self.dealt
            self.dealt.add(told.generation)
            ids = [one.member_id for one in told.members]
            for place, id in enumerate(ids):
                given[id] = assignment("orders", *range(place, PARTITIONS, len(ids)))
            # A leader may forget somebody.
            if len(ids) > PARTITIONS:
                given.pop(ids[-1])
        self.syncing = self.member.sync(given)
        self.at = "syncing"

    def _sync(self) -> None:
        assert self.syncing is not None
        if not self.syncing.is_done:
            return
        if self.syncing.error is not None:
            self._refused(self.syncing.error)
            return
        blob = self.syncing.result().assignment
        assert blob
        self.parts = frozenset(n for _, numbers in assigned_partitions(blob) for n in numbers)
        self.at = "in"

    def _beat(self) -> None:
        code = self.member.heartbeat()
        if code is not None:
            self._told(code)

    def _refused(self, error: BaseException) -> None:
        assert isinstance(error, MillstreamError), error
        if isinstance(error, MemberIdRequired):
            self.member.id = str(error.fields["member_id"])
        self._told(error.code)

    def _told(self, code: str) -> None:
        self.at, self.parts = "out", frozenset()
        if code == "member_unknown":
            self.member.id = None
        elif code == "member_fenced":
            self.is_fenced = True
        else:
            assert code in ("rebalance_under_way", "stale_generation", "member_id_required"), code


class Crew:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.house: House = kafka_house(forming_ms=500)
        self.robots: list[Robot] = []
        self.dealt: set[int] = set()

    def run(self) -> None:
        for _ in range(STEPS):
            self._happen()
            self._turn(self.random.choice((0.05, 0.5, HEARTBEAT_S)))
        for robot in self.robots:
            robot.is_hanging = False
        # What hung is out or back, and what died is forgotten.
        for _ in range(int((SESSION_S + REBALANCE_S) * 2 / HEARTBEAT_S) + 10):
            self._turn(HEARTBEAT_S)
        self._settled()

    def _happen(self) -> None:
        what = self.random.random()
        alive = [one for one in self.robots if not one.is_fenced]
        if what < 0.15 and len(alive) < 9:
            self._arrive()
        elif not alive:
            return
        elif what < 0.22:
            # It dies without a word.
            self.robots.remove(self.random.choice(alive))
        elif what < 0.29:
            robot = self.random.choice(alive)
            if robot.member.id is not None:
                robot.member.leave()
            self.robots.remove(robot)
        elif what < 0.34:
            robot = self.random.choice(alive)
            robot.is_hanging = not robot.is_hanging
        elif what < 0.38:
            # It wants something else at its next join, which is now.
            robot = self.random.choice(alive)
            robot.member.protocols = self.random.choice(PROTOCOLS)
            robot.at, robot.parts = "out", frozenset()
        elif what < 0.41:
            # Its answer is lost, and it asks again.
            robot = self.random.choice(alive)
            robot.at, robot.parts = "out", frozenset()

    def _arrive(self) -> None:
        instance_id = self.random.choice((None, None, "one", "two"))
        member = Classic(self.house, instance_id=instance_id)
        self.robots.append(Robot(member, self.random, self.dealt))

    def _turn(self, seconds: float) -> None:
        for robot in self.random.sample(self.robots, len(self.robots)):
            robot.step()
            self.house.scheduler.run()
            self._apart()
        pass_time(self.house, seconds)

    def _apart(self) -> None:
        """Who is in the same generation shares nothing."""
        taken: dict[tuple[int, int], Robot] = {}
        for robot in self.robots:
            if robot.at != "in" or robot.is_fenced or robot.is_hanging:
                continue
            if robot.member.heartbeat() not in (None, "rebalance_under_way"):
                continue
            for number in robot.parts:
                other = taken.setdefault((robot.member.generation, number), robot)
                assert other is robot

    def _settled(self) -> None:
        alive = [one for one in self.robots if not one.is_fenced]
        found = facts(self.house)
        assert (found is None) == (not alive)
        if found is None:
            return
        assert [one.at for one in alive] == ["in"] * len(alive)
        assert {one.member.generation for one in alive} == {found.generation}
        assert {one.member_id for one in found.members} == {one.member.id for one in alive}
        dealt = sorted(number for one in alive for number in one.parts)
        assert dealt == list(range(PARTITIONS))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_members_do_the_group_comes_to_rest(seed: int) -> None:
    Crew(seed).run()
