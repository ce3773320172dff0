"""What the demo shows: tables that change on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orders import TOPIC
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from spark_side import TOTALS
from workers import GROUP

from millstream.client import Client
from millstream.errors import GroupUnknown

NOTES_SHOWN = 6
WINDOWS_SHOWN = 6
LINE_S = 5.0


@dataclass(slots=True)
class Facts:
    """How things are. The broker is asked; Spark tells."""

    seconds: float
    folder: Path
    begin: float = field(default_factory=time.monotonic)
    # What the demo says that it sent: urgent orders, later ones and broken ones.
    sent: Counter[str] = field(default_factory=Counter)
    published: int = 0
    later: int = 0
    behind: int = 0
    done: int = 0
    failed: int = 0
    rejected: int = 0
    again: int = 0
    ran_out: int = 0
    dead: int = 0
    # The pipeline that runs.
    spark: str = "starts"
    rolled_up: int = 0
    archived: int = 0
    windows: list[dict[str, Any]] = field(default_factory=list)
    notes: deque[str] = field(default_factory=lambda: deque(maxlen=1000))
    # Where the results are, once Spark is done.
    report: str = ""
    lake: str = ""
    totals: str = ""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.begin

    @property
    def is_work_left(self) -> bool:
        return self.behind > 0 or self.later > 0

    def note(self, text: str) -> None:
        self.notes.append(f"{self.elapsed_s:5.1f} s  {text}")

    def heard(self, told: Mapping[str, Any]) -> None:
        """Something that Spark tells."""
        what = told["what"]
        if what == "spark":
            self.note("Spark is ready: rollup and archive take turns")
        elif what == "begin":
            self.spark = told["pipeline"]
        elif what == "rollup":
            self.rolled_up = told["records"]
        elif what == "archive":
            self.archived = told["records"]
        elif what == "report":
            self.archived, self.lake, self.totals = told["archived"], told["lake"], told["totals"]
            self.report, self.spark = told["page"], "done"

    def take(self, client: Client) -> None:
        """Something that the broker knows."""
        self.published = sum(one.end for one in client.topics.offsets(TOPIC))
        self.later = client.schedules.count(TOPIC)
        self.dead = client.dead_letters.count(TOPIC)
        try:
            self.behind = client.groups.lag(GROUP).messages
        except GroupUnknown:
            self.behind = self.published
        for one in client.groups.deliveries():
            if one.group == GROUP:
                self.done, self.failed, self.rejected = one.acked, one.nacked, one.rejected
                self.again, self.ran_out = one.redelivered, one.timeouts
        newest = client.read(TOTALS, last=WINDOWS_SHOWN)
        self.windows = sorted(
            (json.loads(record.text) for record in newest),
            key=lambda window: (window["start"], str(window["country"])),
        )

    def line(self) -> str:
        return (
            f"{self.elapsed_s:5.1f} s  {self.published:,} orders, {self.sent['urgent']:,} urgent, "
            f"{self.sent['broken']:,} broken, {self.later:,} for later; "
            f"{self.done:,} done, {self.failed:,} failed, {self.again:,} again, "
            f"{self.dead:,} dead letters; Spark rolled up {self.rolled_up:,}, "
            f"archived {self.archived:,}"
        )

    def summary(self) -> str:
        pictures = ", ".join(path.name for path in sorted(Path(self.report).parent.glob("*.png")))
        return "\n".join(
            (
                "",
                f"{self.published:,} orders were published: {self.sent['urgent']:,} urgent, "
                f"{self.sent['later']:,} with a delay, {self.sent['broken']:,} broken.",
                f"Workers got {self.done:,} of them done. {self.failed:,} deliveries failed, and "
                f"{self.ran_out:,} were with a worker that was killed; {self.again:,} were tried "
                "again.",
                f"{self.dead:,} are dead letters, {self.rejected:,} of them refused at once.",
                f"Spark archived {self.archived:,} of {self.published:,} orders.",
                "",
                f"  the lake, in Parquet     {self.lake}",
                f"  totals, in Parquet       {self.totals}",
                f"  what failed, and why     {self.report}",
                f"  its pictures             {pictures}",
                "",
                f"All that ran has ended. Delete {self.folder} when you have seen enough.",
            )
        )


class Screen(Protocol):
    def show(self, facts: Facts) -> None: ...


@contextmanager
def screen_for(facts: Facts, *, is_plain: bool) -> Iterator[Screen]:
    console = Console()
    if is_plain or not console.is_terminal:
        screen = Lines()
        try:
            yield screen
        finally:
            screen.show_notes(facts)
        return
    with Live(console=console, refresh_per_second=4, transient=True) as live:
        yield Tables(live)


class Lines:
    def __init__(self) -> None:
        self._shown_at = time.monotonic()
        self._notes = 0

    def show(self, facts: Facts) -> None:
        self.show_notes(facts)
        if time.monotonic() - self._shown_at >= LINE_S:
            self._shown_at = time.monotonic()
            print(facts.line(), flush=True)

    def show_notes(self, facts: Facts) -> None:
        notes = list(facts.notes)
        for note in notes[self._notes :]:
            print(note, flush=True)
        sys.stdout.flush()
        self._notes = len(notes)


class Tables:
    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, facts: Facts) -> None:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(self._broker(facts), self._workers(facts))
        grid.add_row(self._spark(facts), self._totals(facts))
        bar = ProgressBar(total=facts.seconds, completed=min(facts.elapsed_s, facts.seconds))
        notes = "\n".join(list(facts.notes)[-NOTES_SHOWN:])
        self._live.update(Group(bar, grid, Panel(notes, title="what happened", title_align="left")))

    def _broker(self, facts: Facts) -> Panel:
        return _panel(
            "broker",
            ("orders published", facts.published),
            ("of them urgent", facts.sent["urgent"]),
            ("of them broken", facts.sent["broken"]),
            ("for later", facts.later),
            ("waiting or leased", facts.behind),
        )

    def _workers(self, facts: Facts) -> Panel:
        return _panel(
            "workers",
            ("done", facts.done),
            ("failed, and tried again", facts.failed),
            ("refused", facts.rejected),
            ("tried again after a crash", facts.ran_out),
            ("dead letters", facts.dead),
        )

    def _spark(self, facts: Facts) -> Panel:
        return _panel(
            "Spark",
            ("orders in windows", facts.rolled_up),
            ("orders in the lake", facts.archived),
            ("report", Path(facts.report).name or "at the end"),
            ("at work on", facts.spark),
        )

    def _totals(self, facts: Facts) -> Panel:
        table = Table(box=None, expand=True, pad_edge=False)
        for name in ("window", "country", "orders", "total", "p95"):
            table.add_column(name, justify="left" if name in ("window", "country") else "right")
        for window in facts.windows:
            table.add_row(
                window["start"][11:19],
                window["country"] or "–",
                f"{window['records']:,}",
                f"{window['sum_amount'] or 0:,.2f}",
                f"{window['p95_amount'] or 0:,.2f}",
            )
        return Panel(table, title=f"topic {TOTALS}", title_align="left")


def _panel(title: str, *rows: tuple[str, int | str]) -> Panel:
    table = Table.grid(expand=True)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, f"{value:,}" if isinstance(value, int) else value)
    return Panel(table, title=title, title_align="left")
