"""Pictures of a report, drawn without a screen.

Nothing of matplotlib's global state is used or changed, and no settings file of the user's, so a
picture is the same bytes wherever it is made with the same version.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's, which people who see fewer colours can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#999999", "#000000")
# A picture with more has the largest of them.
SERIES_MAX = len(COLOURS)
BARS_MAX = 20
LABEL_CHARACTERS = 44
# A picture over time has at most so many steps, each as long as one of these.
STEPS_MAX = 60
STEPS_S = (1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 86400, 7 * 86400)
LEGEND_COLUMNS, LEGEND_INCHES = 2, 0.22
WIDTH_INCHES, LINES_INCHES, BAR_INCHES = 9.0, 3.4, 0.3
DPI = 110

Point: TypeAlias = tuple[datetime, float]


@dataclass(frozen=True, slots=True)
class Bars:
    """One bar a label, the first on top."""

    file: str
    title: str
    unit: str
    bars: Sequence[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Lines:
    """Values over time, a line for each name; or, when they are parts of a whole, stacked."""

    file: str
    title: str
    unit: str
    series: Mapping[str, Sequence[Point]]
    is_stacked: bool = False


def step_s(begin_ms: int, end_ms: int) -> int:
    """How long a step of a picture is that shows all between two times."""
    span_s = (end_ms - begin_ms) / 1000
    return next((one for one in STEPS_S if span_s / one <= STEPS_MAX), STEPS_S[-1])


def draw(plot: Bars | Lines, path: Path) -> None:
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(), warnings.catch_warnings():
        # A script that the font does not have is shown as boxes, which is all that can be done.
        warnings.filterwarnings("ignore", message="Glyph")
        mpl.rcdefaults()
        mpl.rcParams["axes.spines.top"] = mpl.rcParams["axes.spines.right"] = False
        height = LINES_INCHES
        if isinstance(plot, Lines) and len(plot.series) > 1:
            height += LEGEND_INCHES * math.ceil(min(len(plot.series), SERIES_MAX) / LEGEND_COLUMNS)
        if isinstance(plot, Bars):
            height = 1.1 + BAR_INCHES * max(len(plot.bars[:BARS_MAX]), 1)
        figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
        axes = figure.subplots()
        axes.set_title(_label(plot.title), loc="left", parse_math=False)
        if isinstance(plot, Bars):
            _draw_bars(axes, plot)
        else:
            _draw_lines(axes, plot)
        # Without the version of what drew it.
        FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def _draw_bars(axes: Axes, plot: Bars) -> None:
    bars = plot.bars[:BARS_MAX]
    places = range(len(bars))
    drawn = axes.barh(places, [value for _, value in bars], color=COLOURS[0], height=0.7)
    axes.bar_label(drawn, [f" {_short(value)}" for _, value in bars])
    axes.set_yticks(places, [_label(name) for name, _ in bars], parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel(plot.unit)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_xlim(left=0)


def _draw_lines(axes: Axes, plot: Lines) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter, date2num

    kept = sorted(plot.series.items(), key=lambda one: -max((y for _, y in one[1]), default=0.0))
    kept = kept[:SERIES_MAX]
    if plot.is_stacked:
        times, layers = aligned([points for _, points in kept])
        if times:
            days = [float(date2num(one)) for one in times]
            _draw_layers(axes, days, layers)
    else:
        for (_, points), colour in zip(kept, COLOURS, strict=False):
            days = [float(date2num(when)) for when, _ in points]
            axes.plot(days, [value for _, value in points], color=colour, linewidth=1.6)
    if len(kept) > 1:
        handles: Any = axes.containers if plot.is_stacked else axes.lines
        # A name that begins with an underscore would be left out, so each has a space in front.
        names = [f" {_label(name)}" for name, _ in kept]
        figure = axes.get_figure(root=True)
        assert figure is not None
        place: Any = "outside lower left"
        legend = figure.legend(handles, names, loc=place, ncols=LEGEND_COLUMNS, frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)
    locator = AutoDateLocator(tz=UTC)
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))
    axes.yaxis.set_major_formatter(lambda value, _: _short(value))
    axes.set_ylabel(plot.unit)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)


def _draw_layers(axes: Axes, days: list[float], layers: list[list[float]]) -> None:
    width = min((after - one for one, after in itertools.pairwise(days)), default=1 / 24 / 60)
    below = [0.0] * len(days)
    for layer, colour in zip(layers, COLOURS, strict=False):
        axes.bar(days, layer, width=width * 0.9, align="edge", bottom=below, color=colour)
        below = [a + b for a, b in zip(below, layer, strict=True)]


def aligned(series: Sequence[Sequence[Point]]) -> tuple[list[datetime], list[list[float]]]:
    """All times that any of them has, and the values of each at these; 0 where it has none."""
    times = sorted({when for points in series for when, _ in points})
    layers = []
    for points in series:
        values = dict(points)
        layers.append([values.get(when, 0.0) for when in times])
    return times, layers


def _label(text: str) -> str:
    line = "".join(one if one.isprintable() else " " for one in text)
    return line if len(line) <= LABEL_CHARACTERS else line[: LABEL_CHARACTERS - 1] + "…"


def _short(value: float) -> str:
    """A number as few characters say it: 950, 1.2k, 3.4M."""
    for limit, sign in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{sign}"
    return f"{value:.3g}"
