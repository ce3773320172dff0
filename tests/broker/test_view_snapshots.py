"""When snapshots of views are taken, and that a start uses them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.making import House, local_house, options
from faults.simulated_disk import SimulatedDisk
from faults.view_plug import SETTINGS

FOLDER = "/data/views/topics"


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.views.INTERNAL_SETTINGS", SETTINGS)


def started(disk: SimulatedDisk | None = None) -> House:
    return local_house(disk, replace(options(), view_snapshot_interval_s=10.0)).start()


def disk_of(house: House) -> SimulatedDisk:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    return disk


def make_topics(house: House, first: int, count: int) -> None:
    for number in range(first, first + count):
        house.done(house.broker.topics.create(f"t{number}", 1))


def test_they_are_taken_now_and_then_where_something_is_new() -> None:
    house = started()
    snapshots = house.broker.view_snapshots
    house.scheduler.advance(11)
    assert snapshots.taken == 0
    make_topics(house, 0, 40)
    house.scheduler.advance(11)
    assert snapshots.taken == 1
    (first,) = disk_of(house).list_directory(FOLDER)
    house.scheduler.advance(11)
    assert disk_of(house).list_directory(FOLDER) == [first]
    make_topics(house, 40, 40)
    house.scheduler.advance(11)
    (second,) = disk_of(house).list_directory(FOLDER)
    assert second > first
    assert (snapshots.taken, snapshots.failed) == (2, 0)
    again = started(disk_of(house).crash("nothing"))
    assert again.broker.topics.by_name == house.broker.topics.by_name


def test_one_that_fails_is_taken_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    house = started()
    make_topics(house, 0, 40)

    rename = SimulatedDisk.rename

    def no_room(self: SimulatedDisk, source: str, target: str) -> None:
        if target.startswith(FOLDER):
            raise OSError(28, "no room")
        rename(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedDisk, "rename", no_room)
        house.scheduler.advance(5)
        house.scheduler.advance(6)
    snapshots = house.broker.view_snapshots
    assert (snapshots.taken, snapshots.failed) == (0, 1)
    house.scheduler.advance(11)
    assert snapshots.taken == 1


def test_after_the_stop_there_are_no_more() -> None:
    house = started()
    make_topics(house, 0, 40)
    house.broker.stop()
    house.scheduler.advance(60)
    assert house.broker.view_snapshots.taken == 0
