"""A report for people: one row a line, what is missed in red, notes below."""

from __future__ import annotations

from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.harness import GIB, Line, Report
from bench.machine import IN_MEMORY


def show(report: Report, console: Console) -> None:
    machine = report.machine
    console.print(
        f"{machine.cores} cores, {machine.memory_bytes / GIB:.0f} GiB of memory, "
        f"fdatasync of 16 KiB {machine.fdatasync_p50_ms} ms (p50) on {machine.file_system}, "
        f"{machine.system}, Python {machine.python}, {machine.codec} codec"
    )
    if machine.file_system in IN_MEMORY:
        console.print("The scratch folder is in memory: a sync means nothing there. Use --dir.")
    if report.scale == "smoke":
        console.print("A smoke run shows that everything works; its figures mean nothing.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("line", "mode"):
        table.add_column(title)
    for title in ("value", "unit", "ratio", "goal", "met", "of runs", "its value"):
        justify: Literal["left", "right"] = "left" if title in ("unit", "met") else "right"
        table.add_column(title, justify=justify, no_wrap=True)
    table.add_column("peer")
    for line in report.lines:
        table.add_row(*_row(line))
    console.print(table)
    for line in report.lines:
        if line.note:
            console.print(f"{line.name}: {line.note}", highlight=False, markup=False)
    console.print(f"{report.seconds:.0f} s")


def _row(line: Line) -> list[str | Text]:
    met = {True: Text("yes", "green"), False: Text("no", "bold red"), None: Text("")}[line.met]
    sign = "≥" if (line.goal_of or "").endswith("at least") else "≤"
    of_value = f" {line.unit}" if (line.goal_of or "").startswith("value") else ""
    return [
        line.name,
        line.mode,
        _number(line.value),
        line.unit,
        "" if line.ratio is None else f"{line.ratio:.2f}",
        "" if line.goal is None else f"{sign} {line.goal:g}{of_value}",
        met,
        f"{line.taken} of {line.runs}" if line.runs else "",
        _number(line.peer_value),
        line.peer or "",
    ]


def _number(number: float | None) -> str:
    if number is None:
        return "–"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
