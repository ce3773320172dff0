"""What every workload needs: lines with goals, runs that alternate with the peer's, a report.

A machine is never quiet, and never the same twice. So ours and the peer are run in turn, several
times, in one process on one disk, and what counts is their ratio. Of the runs a line takes the
best (rates, where a disturbance only takes away) or the median (times that somebody waits for,
whose best moment nobody gets to keep); it says which. The best is also the stricter of the two: a
busy machine makes a bare loop of syncs slow long before it hurts one sync that many share.
"""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from bench.machine import Machine

Taken: TypeAlias = Literal["best", "median"]
GoalOf: TypeAlias = Literal["ratio at least", "ratio at most", "value at least", "value at most"]

# How the note of a line begins whose measurement broke.
FAILED = "failed"
# Runs of a quiet machine differ by less.
SPREAD_MAX = 2.0

MIB = 2**20
GIB = 2**30


class Goal(NamedTuple):
    of: GoalOf
    number: float
    # Of a value: what its ratio to the peer's has to be as well, from the same side. It counts
    # where the peer was measured.
    ratio: float | None = None

    def is_met(self, value: float, ratio: float | None) -> bool | None:
        """None when it cannot be told, because there is no peer to compare with."""
        is_least = self.of.endswith("at least")
        if self.of.startswith("value"):
            bounds = [(value, self.number)]
            if ratio is not None and self.ratio is not None:
                bounds.append((ratio, self.ratio))
        elif ratio is None:
            return None
        else:
            bounds = [(ratio, self.number)]
        return all(one >= bound if is_least else one <= bound for one, bound in bounds)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One thing measured. `goal` is a number, `goal_of` says what it bounds and from which side;
    both are null in a line that only informs. `note` has what a reader must know, such as why
    there is no peer."""

    name: str
    mode: str
    value: float | None
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
    goal: float | None = None
    goal_of: GoalOf | None = None
    met: bool | None = None
    runs: int = 0
    taken: Taken = "best"
    values: list[float] = []
    peer_values: list[float] = []
    note: str | None = None


class Report(msgspec.Struct, frozen=True):
    bench: str
    scale: str
    seconds: float
    machine: Machine
    lines: list[Line]

    @property
    def has_failed(self) -> bool:
        """Whether a measurement broke, which is a fault and not a slow machine."""
        return any((line.note or "").startswith(FAILED) for line in self.lines)


class Unit(NamedTuple):
    """What a number means, and whether a higher one is better."""

    name: str
    is_higher_better: bool = True


class Peer(NamedTuple):
    """What ours is compared with: its runs, or why there are none."""

    name: str
    values: Sequence[float]
    why_missing: str | None = None


class Scale(NamedTuple):
    """How much is measured. Smoke only shows that everything runs: its figures mean nothing."""

    name: Literal["full", "quick", "smoke"]
    # Runs of ours, and as many of the peer; of short ones, `many_runs`.
    runs: int
    # How long a steady load lasts; where a third of it is enough, there are three times the runs.
    seconds: float
    # What one run appends; what is read; what is compacted; what is opened.
    append_bytes: int
    read_bytes: int
    compact_bytes: int
    open_bytes: int
    # How often a compaction is measured, and the load without one around each.
    compactions: int
    calm_seconds: float

    @property
    def many_runs(self) -> int:
        """For runs of less than a second: a disturbance spoils few of them."""
        return 3 * self.runs if self.runs > 1 else 1


FULL = Scale(
    name="full",
    runs=7,
    seconds=2.0,
    append_bytes=96 * MIB,
    read_bytes=GIB,
    compact_bytes=GIB,
    open_bytes=10 * GIB,
    compactions=3,
    calm_seconds=8.0,
)
QUICK = Scale(
    name="quick",
    runs=3,
    seconds=0.6,
    append_bytes=96 * MIB,
    read_bytes=256 * MIB,
    compact_bytes=256 * MIB,
    open_bytes=GIB,
    compactions=1,
    calm_seconds=5.0,
)
SMOKE = Scale(
    name="smoke",
    runs=1,
    seconds=0.2,
    append_bytes=2 * MIB,
    read_bytes=4 * MIB,
    compact_bytes=4 * MIB,
    open_bytes=8 * MIB,
    compactions=1,
    calm_seconds=0.2,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a measurement runs, and how much of it."""

    scale: Scale
    scratch: Path


class Measurement(NamedTuple):
    """Lines that come from the same runs, and so are measured together."""

    names: tuple[str, ...]
    run: Callable[[Bench], Iterable[Line]]

    def is_wanted(self, only: str | None) -> bool:
        return only is None or any(name.startswith(only) for name in self.names)


class NotMeasured(Exception):
    """A measurement cannot be made here; the message says why."""


def run_all(
    measurements: Sequence[Measurement],
    bench: Bench,
    only: str | None,
    say: Callable[[str], None],
) -> Iterator[Line]:
    """Every line that is wanted; what cannot be measured is a line too, with why."""
    for measurement in measurements:
        if not measurement.is_wanted(only):
            continue
        say(", ".join(measurement.names))
        try:
            lines = list(measurement.run(bench))
        except NotMeasured as why:
            lines = _without_value(measurement, str(why))
        except Exception as error:  # noqa: BLE001  one that fails must not take the others with it
            traceback.print_exc()
            lines = _without_value(measurement, f"{FAILED}: {error!r}")
        yield from (line for line in lines if only is None or line.name.startswith(only))


def _without_value(measurement: Measurement, why: str) -> list[Line]:
    return [Line(name=name, mode="", value=None, unit="", note=why) for name in measurement.names]


def alternate(sides: Mapping[str, Callable[[], float]], runs: int) -> dict[str, list[float]]:
    """Run every side in turn, `runs` times; who is first changes each time."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    order = list(sides)
    for _ in range(runs):
        for name in order:
            values[name].append(sides[name]())
        order.append(order.pop(0))
    return values


def make_line(
    name: str,
    *,
    mode: str,
    unit: Unit,
    values: Sequence[float],
    peer: Peer | None = None,
    goal: Goal | None = None,
    taken: Taken = "best",
    note: str | None = None,
) -> Line:
    value = _take(values, unit, taken)
    peer_value = _take(peer.values, unit, taken) if peer and peer.values else None
    ratio = value / peer_value if peer_value else None
    restless = _restlessness([values, peer.values if peer else ()])
    notes = [text for text in (peer.why_missing if peer else None, note, restless) if text]
    return Line(
        name=name,
        mode=mode,
        value=_round(value),
        unit=unit.name,
        peer=peer.name if peer else None,
        peer_value=_round(peer_value),
        ratio=_round(ratio),
        goal=goal.number if goal else None,
        goal_of=goal.of if goal else None,
        met=goal.is_met(value, ratio) if goal else None,
        runs=len(values),
        taken=taken,
        values=[float(f"{one:.4g}") for one in values],
        peer_values=[float(f"{one:.4g}") for one in peer.values] if peer else [],
        note="; ".join(notes) or None,
    )


def _restlessness(sides: Iterable[Sequence[float]]) -> str | None:
    """A warning when runs of the same thing differ so much that something else was at work."""
    spread = max((max(one) / min(one) for one in sides if one and min(one) > 0), default=1.0)
    if spread < SPREAD_MAX:
        return None
    return f"runs differ {spread:.1f} times: the machine was busy with something else"


def _take(values: Sequence[float], unit: Unit, taken: Taken) -> float:
    if taken == "median":
        return statistics.median(values)
    return max(values) if unit.is_higher_better else min(values)


def _round(number: float | None) -> float | None:
    """Four digits: more would be noise."""
    return None if number is None else float(f"{number:.4g}")
