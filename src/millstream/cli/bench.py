"""`mill bench`: measure this machine, against peers in the same run."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import msgspec
import typer
from rich.console import Console

import millstream
from millstream.cli.main import EXIT_FAILED, EXIT_USAGE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.harness import Measurement, Scale

PAGE_COLUMNS = 160

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench(  # noqa: PLR0917 — typer calls it by name
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="What to measure: log, queues, topics, delivery, kafka or spark."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything: a minute.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Only show that it runs; the figures mean nothing.")
    ] = False,
    only: Annotated[
        Optional[str],  # noqa: UP045 — read at run time
        typer.Option("--only", metavar="NAME", help="Only lines whose name starts with this."),
    ] = None,
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="On which disk; it is left as it was.")
    ] = Path(),
) -> None:
    """Measure ours and its peers in turn, and print their ratios.

    The benchmarks run from a clone. Missing a goal is no failure: the machine may be busy.
    """
    _find_benchmarks()
    from bench import WORKLOADS
    from bench.harness import FULL, QUICK, SMOKE

    if name not in WORKLOADS:
        _end(f"there is no benchmark {name}; there is: {', '.join(WORKLOADS)}", EXIT_USAGE)
    measurements: Sequence[Measurement] = importlib.import_module(WORKLOADS[name]).MEASUREMENTS
    if not any(measurement.is_wanted(only) for measurement in measurements):
        names = ", ".join(line for measurement in measurements for line in measurement.names)
        _end(f"no line starts with {only}; there are: {names}", EXIT_USAGE)
    scale = SMOKE if smoke else QUICK if quick else FULL
    _measure(name, measurements, scale, only, directory, as_json=as_json)


def _measure(
    name: str,
    measurements: Sequence[Measurement],
    scale: Scale,
    only: str | None,
    directory: Path,
    *,
    as_json: bool,
) -> None:
    from bench.harness import Bench, Report, run_all
    from bench.machine import look, scratch_in
    from bench.show import show

    progress = Console(stderr=True)
    start = time.monotonic()
    with scratch_in(directory) as scratch, progress.status("the machine") as status:
        machine = look(scratch)
        lines = list(run_all(measurements, Bench(scale, scratch), only, status.update))
    report = Report(name, scale.name, round(time.monotonic() - start, 1), machine, lines)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        # Into a file the rows go unbroken.
        show(report, Console(width=None if sys.stdout.isatty() else PAGE_COLUMNS))
    if report.has_failed:
        raise typer.Exit(EXIT_FAILED)


def _find_benchmarks() -> None:
    """They lie beside `src` in a clone, which is not where Python looks by itself."""
    clone = Path(millstream.__file__).parents[2]
    if not (clone / "bench" / "harness.py").exists():
        _end(
            "the benchmarks are not part of the installed package; clone the repository and "
            "run `make bench` there",
            EXIT_FAILED,
        )
    sys.path.insert(0, str(clone))


def _end(why: str, status: int) -> None:
    typer.echo(f"mill: {why}", err=True)
    raise typer.Exit(status)
