"""Leases are held to their promises: at random, and with the plug pulled at any moment."""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest

from faults.lease_script import Script, dead_letters, slow_reads
from millstream.broker import lease_journal, ledger

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"


@pytest.mark.parametrize("with_lanes", [False, True], ids=["plain", "lanes"])
@pytest.mark.parametrize("order", ["none", "key"])
@pytest.mark.parametrize("seed", range(300 if IS_FULL else 2))
def test_what_workers_do_at_random_agrees_with_the_model(
    seed: int, order: str, with_lanes: bool
) -> None:
    script = Script(seed, every=0, order=order, with_lanes=with_lanes)
    script.run(1200)
    assert script.deliveries > 100
    assert script.refused > 5
    assert script.restarts > 5
    assert script.turned > 0


@pytest.mark.parametrize("with_lanes", [False, True], ids=["plain", "lanes"])
@pytest.mark.parametrize("order", ["none", "key"])
@pytest.mark.parametrize("seed", range(100 if IS_FULL else 1))
def test_reads_that_take_their_time_change_nothing(seed: int, order: str, with_lanes: bool) -> None:
    script = Script(seed, every=0, order=order, with_lanes=with_lanes)
    with slow_reads(script):
        script.run(1200)
    assert script.deliveries > 100


@pytest.mark.parametrize("mode", ["every", "interval", "none"])
@pytest.mark.parametrize("seed", range(60 if IS_FULL else 2))
def test_the_plug_is_pulled_while_workers_settle(seed: int, mode: str) -> None:
    order, with_lanes = ("none", "key")[seed % 2], seed % 4 > 1
    script = Script(seed, every=15, mode=mode, order=order, with_lanes=with_lanes)
    script.run(400)
    assert script.pulled > 15
    assert script.deliveries > 50


@pytest.mark.parametrize("mode", ["every", "none"])
@pytest.mark.parametrize("seed", range(30 if IS_FULL else 1))
def test_the_plug_is_pulled_while_states_are_written_in_many_parts(
    seed: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "PIECE_RECORDS", 2)
    monkeypatch.setattr(lease_journal, "PART_BYTES", 60)
    monkeypatch.setattr(lease_journal, "PARCEL_BYTES", 200)
    monkeypatch.setattr(lease_journal, "CUT_BYTES", 300)
    real, parts = lease_journal.LeaseJournal._states, count()

    def states(journal: Any, parcel: Any, needing: Any) -> Any:
        values = real(journal, parcel, needing)
        if needing:
            next(parts)
        return values

    monkeypatch.setattr(lease_journal.LeaseJournal, "_states", states)
    script = Script(seed, every=8, mode=mode, order=("none", "key")[seed % 2])
    script.run(400)
    assert script.pulled > 15
    assert script.deliveries > 50
    assert next(parts) > 20


@pytest.mark.parametrize("mode", ["every", "interval", "none"])
@pytest.mark.parametrize("seed", range(20 if IS_FULL else 1))
def test_the_plug_is_pulled_before_every_disk_operation(seed: int, mode: str) -> None:
    script = Script(seed, every=1, mode=mode, order=("none", "key")[seed % 2])
    script.run(12, in_order=True)
    assert script.pulled > 20
    # Among them are settlings, and moves to the dead letters.
    assert dead_letters(script.house)
    assert any(fate.settled == "acked" for fate in script.fates.values())
