"""How a run shows what it does: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TextIO

# Between two lines where there is no terminal.
LINE_S = 10.0


class Progress(Protocol):
    """Told by a run, with totals so far: it may be told the same twice."""

    def show(self, records: int, behind: int | None) -> None:
        """So many records are done; about so many are known to be left."""

    def say(self, text: str) -> None:
        """Something that the user should see and that stays."""

    def aside(self) -> AbstractContextManager[None]:
        """While something else is written to the terminal."""

    def close(self) -> None: ...


class SilentProgress:
    """For programs and tests."""

    def show(self, records: int, behind: int | None) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class LineProgress:
    """Lines, for logs: one when something is said, and one every few seconds."""

    def __init__(
        self, name: str, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._stream = stream
        self._clock = clock
        self._last = clock()
        self._shown: tuple[int, int | None] | None = None

    def show(self, records: int, behind: int | None) -> None:
        now = self._clock()
        if now - self._last < LINE_S or (records, behind) == self._shown:
            return
        self._last, self._shown = now, (records, behind)
        left = "" if behind is None else f", {behind:,} to go"
        self.say(f"{records:,} records{left}")

    def say(self, text: str) -> None:
        print(f"{self._name}: {text}", file=self._stream, flush=True)

    def aside(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        pass


class BarProgress:
    """A bar that fills as a catch-up goes on; without a known end, a count and a rate."""

    def __init__(self, name: str, console: Any) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(name, total=None, told="starting Spark")
        self._bar.start()

    def show(self, records: int, behind: int | None) -> None:
        speed = self._bar.tasks[0].speed
        told = f"{records:,} records"
        if speed:
            told += f", {speed:,.0f}/s"
        if behind:
            told += f", {behind:,} to go"
        total = None if behind is None else records + behind
        self._bar.update(self._task, completed=records, total=total, told=told)

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    @contextmanager
    def aside(self) -> Iterator[None]:
        self._bar.stop()
        yield
        self._bar.start()

    def close(self) -> None:
        self._bar.stop()


def progress_for(name: str, stream: TextIO, *, is_quiet: bool = False) -> Progress:
    """What fits where the output goes."""
    if is_quiet:
        return SilentProgress()
    if not stream.isatty():
        return LineProgress(name, stream)
    from rich.console import Console

    return BarProgress(name, Console(file=stream))
