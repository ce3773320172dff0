"""Batches that have the same number and are not the same: owners tell them apart."""

from __future__ import annotations

import msgspec
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
from millstream.broker.staged_commits import Running
from millstream.broker.staged_values import Committing, Last
from millstream.broker.staged_view import WritersView
from millstream.errors import CommitRunning, ParameterInvalid, WriterAhead
from millstream.wire.staged import NO_PART


@pytest.fixture
def house() -> House:
    return house_of()


def test_a_batch_that_another_owner_has_committed_is_refused(house: House) -> None:
    commit(house, [stage(house, entry(b"a"), owner="one")], owner="one")
    refusals = [
        house.failed(stage_soon(house, entry(b"b"), owner="other")),
        house.failed(commit_soon(house, [], owner="other")),
        house.failed(commit_soon(house, [NO_PART], owner="other")),
    ]
    for error in refusals:
        assert isinstance(error, WriterAhead)
        assert error.fields == {"writer": "w", "batch": 0, "last": 0}
        assert "for the owner one" in error.message
    assert values(house) == [b"a"]
    assert (facts(house).last_owner, facts(house).parts) == ("one", 0)


def test_an_older_batch_of_another_owner_is_refused_too(house: House) -> None:
    commit(house, [], batch=3, owner="one")
    assert isinstance(house.failed(commit_soon(house, [], batch=1, owner="other")), WriterAhead)


def test_an_owner_may_repeat_its_batch(house: House) -> None:
    commit(house, [stage(house, entry(b"a"), owner="one")], owner="one")
    assert stage(house, entry(b"a"), owner="one") == NO_PART
    assert commit(house, [NO_PART], owner="one").already
    assert values(house) == [b"a"]


def test_who_does_not_say_whose_a_batch_is_is_believed(house: House) -> None:
    commit(house, [], owner="one")
    assert stage(house, entry(b"a")) == NO_PART
    assert commit(house, []).already
    commit(house, [], batch=1)
    assert stage(house, entry(b"a"), batch=1, owner="one") == NO_PART
    assert commit(house, [], batch=1, owner="one").already


def test_another_owner_may_go_on_with_a_later_batch(house: House) -> None:
    commit(house, [stage(house, entry(b"a"), owner="one")], owner="one")
    part = stage(house, entry(b"b"), batch=1, owner="other")
    assert not commit(house, [part], batch=1, owner="other").already
    assert facts(house).last_owner == "other"
    assert values(house) == [b"a", b"b"]


def test_a_commit_that_goes_on_after_a_crash_keeps_its_owner() -> None:
    house = local_house_of()
    part = stage(house, *[entry(*names(9 * n, 9)) for n in range(9)], owner="one")
    one = commit_soon(house, [part], owner="one").result()
    assert isinstance(one, Running)
    while not one.is_stored:
        house.scheduler.turn()
    assert isinstance(commit_soon(house, [part], owner="other").error, CommitRunning)
    disk = house.scheduler.disk
    assert isinstance(disk, SimulatedDisk)
    after = local_house_of(disk.crash("prefix"))
    after.scheduler.run()
    assert facts(after).last_owner == "one"
    assert isinstance(after.failed(commit_soon(after, [part], owner="other")), WriterAhead)


def test_what_was_stored_before_there_were_owners_is_read() -> None:
    view = WritersView()
    old_last = msgspec.json.encode([4, 7, {}, 1_700_000_000_000])
    old_committing = msgspec.json.encode([5, ["x"], 1_700_000_000_000])
    view.apply([(b"ww", old_last), (b"cw", old_committing)])
    writer = view.writers["w"]
    assert writer.last == Last(4, 7, {}, 1_700_000_000_000, None, False)
    assert writer.committing == Committing(5, ["x"], 1_700_000_000_000, None, False)


@pytest.mark.parametrize("owner", ["", "a b", "ü", "x" * 250])
def test_an_owner_has_a_plain_name(house: House, owner: str) -> None:
    assert isinstance(house.failed(stage_soon(house, entry(b"a"), owner=owner)), ParameterInvalid)
    assert isinstance(house.failed(commit_soon(house, [], owner=owner)), ParameterInvalid)
