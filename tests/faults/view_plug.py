"""Pulls the plug on a view, any view, at any moment of its life.

A script changes the view at random, turn after turn, while the log under it rolls, is compacted
and gets snapshots. At some disk operations the disk is crashed, opened again, and the view loaded
from what is left. It must be what it was after some turn: one that is not before the last that
was acknowledged, whole, and without anything of a turn that was never begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from engine.manual import ManualScheduler
from faults.ledger import ROOT
from faults.simulated_disk import SURVIVALS, SimulatedDisk, Survival
from millstream.broker import views as views_module
from millstream.broker.views import Change, View, Views
from millstream.clock import ManualClock
from millstream.engine.local import LocalEngine, LocalOptions
from millstream.engine.pending import Pending
from millstream.engine.upkeep import UpkeepSettings
from millstream.log.partition import PartitionSettings
from millstream.log.segment import Intervals
from millstream.log.store import StoreOptions

# So small that segments end, and tombstones go, many times in a script.
SETTINGS = PartitionSettings(
    segment_bytes=1500,
    segment_age_ms=60_000,
    intervals=Intervals(index_bytes=256, time_ms=100),
    retention_age_ms=None,
    compact=True,
    tombstone_age_ms=2_000,
)
UPKEEP = UpkeepSettings(
    checkpoint_interval_s=6.0,
    journal_bytes=10_000,
    retention_interval_s=3.0,
    compaction_interval_s=4.0,
    file_delete_delay_s=2.0,
)
WAYS = (*SURVIVALS, "killed")


class Case(NamedTuple):
    """A view, and changes that it may be given."""

    name: str
    make: Callable[[], View]
    changes: Callable[[Random], Sequence[Change]]

    def __str__(self) -> str:
        return self.name


@dataclass(slots=True)
class House:
    """A view on the local log, on a loop that does one call at a time."""

    engine: LocalEngine
    scheduler: ManualScheduler
    views: Views
    view: View


def survivor(disk: SimulatedDisk, way: str, random: Random) -> SimulatedDisk:
    """`killed` is the process alone: the page cache lives on."""
    if way == "killed":
        return disk.copy()
    survival: Survival = next(one for one in SURVIVALS if one == way)
    return disk.crash(survival, random)


def open_house(case: Case, disk: SimulatedDisk, now_ms: int) -> House:
    scheduler = ManualScheduler(disk, ManualClock(now_ms))
    options = LocalOptions(
        store=StoreOptions(settings_for=lambda _: SETTINGS, journal_file_bytes=4096),
        upkeep=UPKEEP,
        bypass_bytes=700,
    )
    engine = LocalEngine(disk, ROOT, scheduler.clock, options, scheduler)
    engine.open()
    view = case.make()
    views = Views(engine, scheduler.clock, scheduler)
    views.add(view)
    loading = views.load()
    scheduler.run()
    loading.result()
    return House(engine, scheduler, views, view)


State = dict[bytes, bytes | None]


def state_of(view: View) -> State:
    return dict(view.entries())


class Puller:
    """One run of a script. `every` says how rarely the plug is pulled."""

    def __init__(self, case: Case, seed: int, every: int) -> None:
        self.case = case
        self.random = Random(seed)
        self.every = every
        self.disk = SimulatedDisk()
        self.house = open_house(case, self.disk, 1_700_000_000_000)
        # What the view was after each turn; the last that is acknowledged; those that are begun.
        self.states: list[State] = [state_of(self.house.view)]
        self.acknowledged = 0
        self.pulled = 0
        self.snapshots = 0
        # Kept, because it is raised inside the engine, which may take it for an error of a job.
        self.trouble: BaseException | None = None

    def run(self, steps: int) -> None:
        self.disk.on_operation = self._before
        try:
            for _ in range(steps):
                self._step()
        finally:
            self.disk.on_operation = None
            if self.trouble is not None:
                raise self.trouble
        self.house.scheduler.run()
        assert self.acknowledged == len(self.states) - 1
        self._check(self.disk.crash("nothing"), "at the end")

    def _step(self) -> None:
        house, kind = self.house, self.random.random()
        if kind < 0.75:
            for _ in range(self.random.choice((1, 1, 1, 3))):
                pending = house.views.change(house.view, self.case.changes(self.random))
            self.states.append(state_of(house.view))
            pending.then(self._acknowledge(len(self.states) - 1))
            # To the end of the turn, so that the next step is another one.
            house.scheduler.turn()
        elif kind < 0.85:
            house.scheduler.advance(self.random.choice((0.5, 1.0, 3.0)))
        elif kind < 0.95:
            house.scheduler.run()
        else:
            house.scheduler.run()
            saving = house.engine.save_view(house.view.partition, house.view.name)
            house.scheduler.run()
            self.snapshots += saving.result() is not None

    def _acknowledge(self, turn: int) -> Callable[[Pending[None]], None]:
        def done(pending: Pending[None]) -> None:
            pending.result()
            self.acknowledged = turn

        return done

    def _before(self, index: int, name: str) -> None:
        if self.random.randrange(self.every):
            return
        way = self.random.choice(WAYS)
        seed = self.random.getrandbits(32)
        disk = survivor(self.disk, way, Random(seed))
        try:
            self._check(disk, f"before operation {index}, {name}: {way}, {seed=}")
        except BaseException as error:
            self.trouble = self.trouble or error
            raise

    def _check(self, disk: SimulatedDisk, when: str) -> None:
        self.pulled += 1
        now_ms = self.house.scheduler.clock.now_ms
        # What the turn that is being gathered will have; it may not be in `states` yet.
        candidates = [*self.states[self.acknowledged :], state_of(self.house.view)]
        try:
            house = open_house(self.case, disk, now_ms)
            found = state_of(house.view)
            assert found in candidates
            self._check_going_on(house)
            again = open_house(self.case, disk.crash("nothing"), now_ms)
            assert state_of(again.view) == state_of(house.view)
        except BaseException as error:
            error.add_note(f"pulled {when}")
            raise

    def _check_going_on(self, house: House) -> None:
        """What is answered after a recovery counts like all else."""
        pending = house.views.change(house.view, self.case.changes(Random(self.pulled)))
        house.scheduler.run()
        pending.result()


def pull(case: Case, monkeypatch_settings: Callable[[str, object], None], *, seed: int) -> None:
    """The default set for one view: small, with everything in it."""
    monkeypatch_settings(f"{views_module.__name__}.INTERNAL_SETTINGS", SETTINGS)
    puller = Puller(case, seed, every=15)
    puller.run(400)
    assert puller.pulled > 20
    assert puller.snapshots > 2
