"""The plug is pulled after every disk operation, and whatever survives is held to the ledger."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest

from faults.ledger import Promises, check_promises, open_engine
from faults.script import Script, options
from faults.simulated_disk import SURVIVALS, PlugPulled, SimulatedDisk, Survival
from millstream.engine.slices import SLICE_S

IS_FULL = os.environ.get("MILLSTREAM_FAULTS") == "full"

# `killed` is the process alone: the page cache lives on, and nothing more is durable than before.
WAYS = (*SURVIVALS, "killed")

# The full set is done in parts, because all operations in all ways take a quarter of an hour.
PARTS = 8

# On a clock that stands still while the loop works, either all steps of a checkpoint, or of other
# upkeep, are one slice, or each of them is.
SLICES = (SLICE_S, 0.0)

# A recovery of these scripts takes about as many operations.
RECOVERY_OPERATIONS = 80


def survivor(disk: SimulatedDisk, way: str, random: Random) -> SimulatedDisk:
    if way == "killed":
        return disk.copy()
    survival: Survival = next(one for one in SURVIVALS if one == way)
    return disk.crash(survival, random)


def interrupted(disk: SimulatedDisk, promises: Promises, random: Random) -> SimulatedDisk:
    """The disk after the plug was pulled once more, at some moment of the recovery."""
    disk.stop_at = disk.operations + random.randint(0, RECOVERY_OPERATIONS)
    with suppress(PlugPulled):
        open_engine(disk, options(), promises.now_ms, promises.now_monotonic)
    way = random.choice(WAYS[:-1])
    return survivor(disk, way, random)


class Puller:
    """Pulls the plug of a running script, again and again, and lets it run on."""

    def __init__(self, script: Script, seed: int) -> None:
        self.script = script
        self.random = Random(seed)
        self.pulled = 0
        # Kept, because it is raised inside the engine, which may take it for an error of a job.
        self.trouble: BaseException | None = None

    def run(self, steps: int) -> None:
        try:
            self.script.open()
            self.script.run(steps)
        finally:
            if self.trouble is not None:
                raise self.trouble

    def pull(self, way: str, *, twice: bool) -> None:
        self.pulled += 1
        seed = self.random.getrandbits(32)
        random = Random(seed)
        promises = self.script.promises()
        disk = survivor(self.script.disk, way, random)
        if twice:
            disk = interrupted(disk, promises, random)
        try:
            check_promises(disk, promises, options())
        except BaseException as error:
            operation = self.script.disk.operations
            error.add_note(f"pulled before operation {operation}: {way}, {twice=}, {seed=}")
            self.trouble = self.trouble or error
            raise


def ways_of_operation(index: int, part: int) -> Iterator[tuple[str, bool]]:
    """All ways, once and twice; in the default set mostly one of them, in turn."""
    if IS_FULL and index % PARTS != part:
        return
    if IS_FULL or index % 90 == 0:
        for way in WAYS:
            yield way, False
            yield way, True
    else:
        yield WAYS[index % len(WAYS)], index // len(WAYS) % 2 == 0


def run_with_few_pulls(seed: int, steps: int, pulls: int) -> None:
    """A random script that is crashed at a few random moments."""
    script = Script(seed, slice_s=SLICES[seed % 2])
    puller = Puller(script, seed)
    share = pulls / (steps * 7)

    def before(_index: int, _name: str) -> None:
        if puller.random.random() < share:
            puller.pull(puller.random.choice(WAYS), twice=puller.random.random() < 0.5)

    script.disk.on_operation = before
    puller.run(steps)


@pytest.mark.parametrize("slice_s", SLICES)
@pytest.mark.parametrize("part", range(PARTS if IS_FULL else 1))
def test_the_plug_is_pulled_after_every_operation(part: int, slice_s: float) -> None:
    script = Script(1, slice_s=slice_s)
    puller = Puller(script, part)

    def before(index: int, _name: str) -> None:
        for way, twice in ways_of_operation(index, part):
            puller.pull(way, twice=twice)

    script.disk.on_operation = before
    puller.run(300 if IS_FULL else 120)
    assert puller.pulled > 900


@pytest.mark.parametrize("first", range(0, 1200 if IS_FULL else 40, 20))
def test_the_plug_is_pulled_at_random_moments_of_random_scripts(first: int) -> None:
    for seed in range(first, first + 20):
        try:
            run_with_few_pulls(1000 + seed, 60, 5)
        except BaseException as error:
            error.add_note(f"seed {1000 + seed}")
            raise
