"""Groups that the broker deals out to, under members that come, go, die, hang, take their time to
give up, and lose answers.

No two members that the group knows ever have the same partition, as far as they know themselves.
Once nothing happens any more, all partitions are read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from broker.kafka_members import kafka_house, pass_time
from broker.making import House
from millstream.broker.consumer_groups import Beat
from millstream.errors import MillstreamError
from millstream.log.partition import PartitionId

STEPS = 150
HEARTBEAT_S = 3.0
SESSION_S = 30.0
REBALANCE_S = 12.0


@dataclass
class Robot:
    house: House
    random: Random
    id: str
    epoch: int = 0
    owned: set[PartitionId] = field(default_factory=set)
    target: frozenset[PartitionId] = frozenset()
    # What the broker has heard that it has; None: nothing yet.
    told: frozenset[PartitionId] | None = None
    # Steps until it has given up what it was told to.
    busy: int = 0
    is_hanging: bool = False

    def step(self) -> None:
        if self.is_hanging:
            return
        if self.busy:
            self.busy -= 1
        elif self.epoch:
            self.owned = set(self.target)
        self._beat()

    def _beat(self) -> None:
        is_joining = self.epoch == 0
        owned = frozenset(self.owned)
        beat = Beat(
            self.id,
            self.epoch,
            rebalance_timeout_ms=int(REBALANCE_S * 1000) if is_joining else None,
            topics=frozenset(("orders",)) if is_joining else None,
            # Only what is new, and only when all of it is done.
            owned=owned if is_joining or (owned != self.told and not self.busy) else None,
        )
        beating = self.house.broker.consumer_groups.heartbeat("g", beat)
        self.house.scheduler.run()
        if self.random.random() < 0.1:
            # The answer is lost; it asks again.
            return
        if beating.error is not None:
            assert isinstance(beating.error, MillstreamError), beating.error
            assert beating.error.code in ("member_unknown", "stale_generation")
            self.epoch, self.owned, self.told, self.busy = 0, set(), None, 0
            self.target = frozenset()
            return
        beaten = beating.result()
        self.epoch = beaten.epoch
        if beat.owned is not None:
            self.told = beat.owned
        if beaten.assignment is not None:
            self._aim(frozenset(beaten.assignment))

    def _aim(self, target: frozenset[PartitionId]) -> None:
        if target == self.target:
            return
        self.target = target
        # What has to be given up takes a while; what is new is taken with it.
        self.busy = self.random.choice((0, 1, 2)) if self.owned - target else 0
        # It has to tell, also when it never got round to taking what it got in between.
        self.told = None


class Crew:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.house = kafka_house()
        self.robots: list[Robot] = []

    def run(self) -> None:
        for step in range(STEPS):
            self._happen(step)
            self._turn(self.random.choice((0.1, HEARTBEAT_S)))
        for robot in self.robots:
            robot.is_hanging = False
        for _ in range(int((SESSION_S + REBALANCE_S) / HEARTBEAT_S) * 2 + 20):
            self._turn(HEARTBEAT_S)
        partitions = self.house.broker.topics.get("orders").partitions
        owned = sorted(one.number for robot in self.robots for one in robot.owned)
        assert owned == (list(range(partitions)) if self.robots else [])

    def _happen(self, step: int) -> None:
        what = self.random.random()
        topics = self.house.broker.topics
        if what < 0.15 and len(self.robots) < 7:
            self.robots.append(Robot(self.house, self.random, f"m{step}"))
        elif what < 0.17:
            count = topics.get("orders").partitions
            if count < 12:
                self.house.done(topics.add_partitions("orders", count + 1))
        elif not self.robots:
            return
        elif what < 0.23:
            self.robots.remove(self.random.choice(self.robots))
        elif what < 0.29:
            robot = self.random.choice(self.robots)
            self.robots.remove(robot)
            self.house.broker.consumer_groups.heartbeat("g", Beat(robot.id, -1))
        elif what < 0.34:
            robot = self.random.choice(self.robots)
            robot.is_hanging = not robot.is_hanging
        elif what < 0.37:
            robot = self.random.choice(self.robots)
            # It starts anew, and has forgotten what it had.
            robot.epoch, robot.owned, robot.told, robot.busy = 0, set(), None, 0
            robot.target = frozenset()

    def _turn(self, seconds: float) -> None:
        for robot in self.random.sample(self.robots, len(self.robots)):
            robot.step()
            self._apart()
        pass_time(self.house, seconds)

    def _apart(self) -> None:
        taken: dict[PartitionId, Robot] = {}
        for robot in self.robots:
            if not robot.epoch or not self._is_known(robot):
                continue
            for one in robot.owned:
                other = taken.setdefault(one, robot)
                assert other is robot, (one, other.id, robot.id)

    def _is_known(self, robot: Robot) -> bool:
        try:
            self.house.broker.consumer_groups.check_commit("g", robot.id, robot.epoch)
        except MillstreamError:
            return False
        return True


@pytest.mark.parametrize("seed", range(40))
def test_no_two_members_have_a_partition_and_all_are_read_in_the_end(seed: int) -> None:
    Crew(seed).run()
