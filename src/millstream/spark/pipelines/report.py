"""Reports: a page of Markdown with its pictures beside it, to read in any viewer.

A report is data: a title and parts in their order. `write_report` makes the files, the page last
and by one rename, so that whoever looks sees the old report or the new one. What is written depends
on the report alone: the same one twice is the same bytes twice.

Names, keys and error texts come from users. `plain` is how they get onto the page: as text,
whatever they hold.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeAlias

from millstream.spark.pipelines.plots import Bars, Lines, draw

PAGE = "report.md"
# Of a text that users wrote, what a cell shows.
CELL_CHARACTERS = 120
# What Markdown, or HTML in it, would take for more than text.
_MARKUP = str.maketrans(
    {one: f"\\{one}" for one in "\\`*_[]|~#$"} | {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
)


@dataclass(frozen=True, slots=True)
class Heading:
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph in Markdown: what users wrote goes through `plain` first."""

    markdown: str


@dataclass(frozen=True, slots=True)
class Command:
    """What a reader may want to run."""

    line: str


@dataclass(frozen=True, slots=True)
class Table:
    """Cells are numbers, or texts that go through `plain`. Columns of numbers are on the right."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


Cell: TypeAlias = str | int | float | None
Part: TypeAlias = Heading | Text | Command | Table | Bars | Lines


@dataclass(slots=True)
class Report:
    title: str
    parts: list[Part] = field(default_factory=list)

    def add(self, *parts: Part) -> None:
        self.parts += parts


def write_report(report: Report, directory: Path) -> Path:
    """The page; its pictures lie beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    blocks = [f"# {plain(report.title)}"]
    for part in report.parts:
        if isinstance(part, Bars | Lines):
            draw(part, directory / part.file)
        blocks.append(_markdown(part))
    page = directory / PAGE
    new = directory / f".{PAGE}.new"
    new.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    os.replace(new, page)
    return page


def _markdown(part: Part) -> str:
    if isinstance(part, Heading):
        return f"## {plain(part.text)}"
    if isinstance(part, Text):
        return part.markdown
    if isinstance(part, Command):
        return f"```\n$ {printable(part.line)}\n```"
    if isinstance(part, Table):
        return _table(part)
    return f"![{plain(part.title)}]({part.file})"


def _table(table: Table) -> str:
    def is_numeric(column: int) -> bool:
        cells = [row[column] for row in table.rows if row[column] is not None]
        return bool(cells) and not any(isinstance(one, str) for one in cells)

    rules = ["--:" if is_numeric(at) else "---" for at in range(len(table.columns))]
    rows = [[plain(one) for one in table.columns], rules]
    rows += [[shown(one) for one in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def shown(cell: Cell) -> str:
    """A cell as it stands in a table."""
    if cell is None:
        return "–"
    if isinstance(cell, str):
        return plain(cell)
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return f"{cell:,}"


def show_time(time_ms: int) -> str:
    """To the second, in UTC."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}Z"


def show_span(seconds: int) -> str:
    """How long something takes, in the largest unit that it is a whole number of."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds and seconds % unit == 0:
            return f"{seconds // unit} {name}"
    return f"{seconds} s"


def plain(text: str, most: int = CELL_CHARACTERS) -> str:
    """A text as Markdown that shows just this text, on one line, cut where it is too long."""
    # A viewer makes links of addresses, and nobody should follow one that came in a message.
    return (
        printable(text, most).translate(_MARKUP).replace("://", "\\://").replace("www.", "www\\.")
    )


def printable(text: str, most: int | None = None) -> str:
    """On one line, without what a terminal or a viewer would obey instead of showing it."""
    cut = text if most is None or len(text) <= most else text[: most - 1] + "…"
    line = " ".join(cut.split())
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)
