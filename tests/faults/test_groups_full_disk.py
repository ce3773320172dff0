"""A disk that is full while a group works: what is refused has changed nothing, and it heals."""

from __future__ import annotations

import errno

from broker.grouping import Consumer, committed, publish
from broker.making import House, local_house
from faults.failing_disk import FailingDisk
from faults.simulated_disk import SimulatedDisk
from millstream.broker.group_offsets import ResetTo
from millstream.broker.group_values import Commit, Join
from millstream.errors import DiskFull
from millstream.log.disk import Disk


def house_on_a_disk_that_fills() -> tuple[House, FailingDisk]:
    disks: list[FailingDisk] = []

    def through(disk: SimulatedDisk) -> Disk:
        disks.append(FailingDisk(disk, "write", 0, errno.ENOSPC, sticky=True))
        return disks[0]

    house = local_house(through=through).start()
    house.done(house.broker.topics.create("orders", 1))
    return house, disks[0]


def test_a_commit_that_is_refused_has_not_happened() -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, "a", "b", "c")
    member = Consumer(house).join(auto_commit=False)
    member.commit(1)
    disk.break_now()
    commits = [Commit("orders", 0, 3)]
    generation = member.standing.generation
    groups = house.broker.groups
    assert isinstance(house.failed(groups.commit("g", commits, member.id, generation)), DiskFull)
    assert committed(house) == 1
    disk.heal()
    house.scheduler.advance(1)
    house.done(groups.commit("g", commits, member.id, generation))
    assert committed(house) == 3


def test_the_broker_commits_later_what_it_could_not_commit_now() -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, "a", "b", "c")
    member = Consumer(house).join(session_timeout_ms=60_000)
    assert member.poll() == ["a", "b", "c"]
    member.poll()
    disk.break_now()
    house.scheduler.advance(6)
    assert house.broker.groups.counts.auto_commits_failed == 1
    assert committed(house) == 0
    disk.heal()
    house.scheduler.advance(6)
    member.poll()
    house.scheduler.advance(6)
    assert committed(house) == 3


def test_a_member_that_could_not_be_told_joins_when_there_is_room_again() -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, "a")
    disk.break_now()
    join = Join(("orders",), auto_offset_reset="earliest", session_timeout_ms=1_000)
    groups = house.broker.groups
    assert isinstance(house.failed(groups.join("g", join)), DiskFull)
    disk.heal()
    house.scheduler.advance(3)
    assert Consumer(house).join().poll() == ["a"]


def test_a_generation_is_told_only_when_it_will_not_come_again() -> None:
    house, disk = house_on_a_disk_that_fills()
    first = Consumer(house).join()
    mark = house.broker.group_offsets.table.mark
    reserved = mark("g")
    assert reserved is not None
    # As if all that were reserved were given out; one more is needed, on a full disk.
    house.done(house.broker.topics.add_partitions("orders", 2))
    rebalancing = house.broker.groups._rebalancing
    rebalancing.groups["g"].membership.generation = reserved.generation
    disk.break_now()
    generation = first.standing.generation
    beating = house.broker.groups.heartbeat("g", first.id, generation)
    assert isinstance(house.failed(beating), DiskFull)
    disk.heal()
    house.scheduler.advance(1)
    standing = first.heartbeat()
    now = mark("g")
    assert now is not None
    assert generation < standing.generation <= now.generation


def test_a_sequential_consumer_and_a_reset_that_are_refused_have_not_moved() -> None:
    house, disk = house_on_a_disk_that_fills()
    publish(house, "a", "b")
    reader = house.done(house.broker.sequential.open("orders"))
    house.done(reader.next(2))
    house.done(house.broker.groups.commit("g", [Commit("orders", 0, 1)]))
    disk.break_now()
    assert isinstance(house.failed(reader.ack(0, 1)), DiskFull)
    resetting = house.broker.group_offsets.reset("g", "orders", ResetTo("latest"))
    assert isinstance(house.failed(resetting), DiskFull)
    assert reader.positions() == {0: 0}
    disk.heal()
    house.scheduler.advance(1)
    assert committed(house) == 1
    assert house.done(reader.ack(0, 1)) == 2
