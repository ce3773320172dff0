"""Writers of one batch: the broker forgets them by itself, and not before that is safe."""

from __future__ import annotations

import pytest

from broker.making import House
from broker.staging import (
    commit,
    commit_soon,
    entry,
    facts,
    house_of,
    local_house_of,
    names,
    stage,
    stage_soon,
    values,
)
from faults.simulated_disk import SimulatedDisk
from millstream.broker.staged_commits import Committed, Running
from millstream.broker.staged_values import FINAL_KEPT_MS
from millstream.errors import StagedPartUnknown, TooManyWriters

# They are looked for each minute.
KEPT_S = FINAL_KEPT_MS / 1000
LATE_S = KEPT_S + 61


@pytest.fixture
def house() -> House:
    return house_of()


def writers(house: House) -> list[str]:
    return house.broker.staged_writes.names()


def crashed(house: House) -> House:
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    after = local_house_of(disk.crash("prefix"), now_ms=house.scheduler.clock.now_ms)
    after.scheduler.run()
    return after


def test_a_writer_is_forgotten_after_its_final_batch_and_not_at_once(house: House) -> None:
    part = stage(house, entry(b"a"))
    commit(house, [part], is_final=True)
    assert facts(house).is_last_final
    # Whoever did not hear the answer asks again.
    assert commit(house, [part], is_final=True) == Committed(0, 1, {}, already=True)
    house.scheduler.advance(KEPT_S - 1)
    assert writers(house) == ["w"]
    house.scheduler.advance(LATE_S - KEPT_S + 1)
    assert writers(house) == []
    assert isinstance(house.failed(commit_soon(house, [part])), StagedPartUnknown)
    assert values(house) == [b"a"]


def test_a_writer_that_said_nothing_is_kept(house: House) -> None:
    commit(house, [stage(house, entry(b"a"))])
    house.scheduler.advance(LATE_S)
    assert writers(house) == ["w"]
    assert not facts(house).is_last_final


def test_a_final_batch_may_be_said_to_be_so_later(house: House) -> None:
    commit(house, [])
    assert commit(house, [], is_final=True).already
    house.scheduler.advance(LATE_S)
    assert writers(house) == []


def test_a_writer_that_writes_again_is_kept(house: House) -> None:
    commit(house, [], is_final=True)
    commit(house, [stage(house, entry(b"a"), batch=1)], batch=1)
    house.scheduler.advance(LATE_S)
    assert facts(house).last_batch == 1


def test_a_writer_whose_driver_died_after_the_commit_is_forgotten() -> None:
    """Nobody asks again, and the broker crashes too."""
    house = local_house_of()
    part = stage(house, *[entry(*names(9 * n, 9)) for n in range(9)])
    one = commit_soon(house, [part], is_final=True).result()
    assert isinstance(one, Running)
    while not one.is_stored:
        house.scheduler.turn()
    during = crashed(house)
    assert facts(during).is_last_final
    assert len(values(during)) == 81
    after = crashed(during)
    assert commit(after, [part], is_final=True).already
    after.scheduler.advance(LATE_S)
    assert writers(after) == []
    assert writers(crashed(after)) == []


def test_writers_of_a_final_batch_take_no_place() -> None:
    house = house_of(writers_max=2)
    for number in range(5):
        commit(house, [], writer=f"once-{number}", is_final=True)
    commit(house, [], writer="one")
    commit(house, [], writer="two")
    assert isinstance(house.failed(commit_soon(house, [], writer="x")), TooManyWriters)
    assert isinstance(house.failed(stage_soon(house, entry(b"a"), writer="x")), TooManyWriters)


def test_of_writers_of_a_final_batch_there_are_only_so_many(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.broker.staged_commits.FINALS_MAX", 3)
    commit(house, [], writer="kept")
    for number in range(6):
        commit(house, [], writer=f"once-{number}", is_final=True)
    assert writers(house) == ["kept", "once-3", "once-4", "once-5"]
