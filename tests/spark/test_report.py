"""Reports: what users wrote is shown as text, and the same report is the same bytes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from millstream.spark.pipelines.plots import (
    BARS_MAX,
    SERIES_MAX,
    STEPS_MAX,
    Bars,
    Lines,
    aligned,
    step_s,
)
from millstream.spark.pipelines.report import (
    CELL_CHARACTERS,
    Command,
    Heading,
    Part,
    Report,
    Table,
    Text,
    plain,
    printable,
    show_span,
    shown,
    write_report,
)

BEGIN = datetime(2026, 11, 1, 12, tzinfo=UTC)
HOSTILE = "a|b `c` <img src=x> [d](http://e) _f_ *g* \\ $h$ #i & \x1b[31m \u202e\njk\t~"


def at(minute: int) -> datetime:
    return BEGIN + timedelta(minutes=minute)


def report_of(name: str) -> Report:
    report = Report(f"About {name}")
    report.add(
        Heading(name),
        Text(f"All of {plain(name)}."),
        Command(f"mill dlq list {name}"),
        Table(("who", "how many", "share"), [(name, 1234, 0.25), ("b", None, 12345.6)]),
        Bars("bars.png", name, "records", [(name, 3.0), ("_b", 1e6)]),
        Lines("lines.png", name, "records", {name: [(at(0), 1.0), (at(1), 2.0)], "_b": []}),
        Lines(
            "layers.png",
            name,
            "records",
            {name: [(at(0), 1.0)], "b": [(at(1), 2.0)]},
            is_stacked=True,
        ),
    )
    return report


def test_a_page_says_its_parts_in_order_and_shows_its_pictures(tmp_path: Path) -> None:
    page = write_report(report_of("orders"), tmp_path / "new" / "folder")
    assert page.read_text() == (
        "# About orders\n\n"
        "## orders\n\n"
        "All of orders.\n\n"
        "```\n$ mill dlq list orders\n```\n\n"
        "| who | how many | share |\n"
        "| --- | --: | --: |\n"
        "| orders | 1,234 | 0.25 |\n"
        "| b | – | 12,346 |\n\n"
        "![orders](bars.png)\n\n"
        "![orders](lines.png)\n\n"
        "![orders](layers.png)\n"
    )
    for picture in ("bars.png", "lines.png", "layers.png"):
        assert (page.parent / picture).read_bytes().startswith(b"\x89PNG")


def test_the_same_report_is_the_same_bytes(tmp_path: Path) -> None:
    pages = [write_report(report_of("orders"), tmp_path / name) for name in ("one", "two")]
    one, two = (sorted(page.parent.iterdir()) for page in pages)
    assert [path.name for path in one] == ["bars.png", "layers.png", "lines.png", "report.md"]
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_what_users_wrote_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    page = write_report(report_of(HOSTILE), tmp_path).read_text()
    outside = "".join(page.split("```")[::2])
    for markup in ("<img", "`c`", "[d](", " _f_", " *g*", "\x1b", "\u202e", "http://"):
        assert markup not in outside, markup
    row = next(line for line in page.splitlines() if line.startswith("| a"))
    assert row.replace("\\|", "").count("|") == 4


def test_a_command_stays_on_its_line(tmp_path: Path) -> None:
    report = Report("x", [Command("mill dlq list\nrm -rf ~")])
    assert "$ mill dlq list rm -rf ~\n```" in write_report(report, tmp_path).read_text()


@pytest.mark.parametrize(
    ("text", "shows"),
    [
        ("orders", "orders"),
        ("a_b", "a\\_b"),
        ("1 < 2 & 3", "1 &lt; 2 &amp; 3"),
        ("  a \n b ", "a b"),
        ("x" * (CELL_CHARACTERS + 1), "x" * (CELL_CHARACTERS - 1) + "…"),
        ("x" * CELL_CHARACTERS, "x" * CELL_CHARACTERS),
        ("日本", "日本"),
    ],
)
def test_text_is_escaped_and_cut(text: str, shows: str) -> None:
    assert plain(text) == shows


def test_control_characters_are_replaced() -> None:
    assert printable("a\x00b\x7f") == "a\ufffdb\ufffd"


@pytest.mark.parametrize(
    ("cell", "shows"),
    [
        (None, "–"),
        (1234567, "1,234,567"),
        (0.12345, "0.123"),
        (98765.4, "98,765"),
        ("a|b", "a\\|b"),
    ],
)
def test_cells_are_short(cell: object, shows: str) -> None:
    assert shown(cell) == shows  # type: ignore[arg-type]


def test_pictures_of_too_much_have_the_most_of_it(tmp_path: Path) -> None:
    many = {f"series {n}": [(at(m), float(n)) for m in range(3)] for n in range(SERIES_MAX + 5)}
    report = Report("x")
    report.add(
        Bars("bars.png", "x", "y", [(str(n), float(n)) for n in range(BARS_MAX + 5)]),
        Lines("lines.png", "x", "y", many),
        Lines("stacked.png", "x", "y", many, is_stacked=True),
    )
    write_report(report, tmp_path)
    assert (tmp_path / "stacked.png").exists()


def test_pictures_of_nothing_are_drawn(tmp_path: Path) -> None:
    nothing: list[Part] = [
        Bars("bars.png", "x", "y", []),
        Lines("lines.png", "x", "y", {}),
        Lines("none.png", "x", "y", {"a": []}),
        Lines("stacked.png", "x", "y", {"a": []}, is_stacked=True),
    ]
    report = Report("x")
    report.add(*nothing)
    write_report(report, tmp_path)
    assert len(list(tmp_path.glob("*.png"))) == 4


@pytest.mark.parametrize(
    ("span_s", "step"), [(0, 1), (STEPS_MAX, 1), (STEPS_MAX + 1, 5), (86400, 3600), (10**9, 604800)]
)
def test_a_picture_has_no_more_than_so_many_steps(span_s: int, step: int) -> None:
    assert step_s(1_000, 1_000 + 1000 * span_s) == step


@pytest.mark.parametrize(
    ("seconds", "shows"), [(0, "0 s"), (90, "90 s"), (300, "5 min"), (86400, "1 d")]
)
def test_spans_are_told_in_whole_units(seconds: int, shows: str) -> None:
    assert show_span(seconds) == shows


def test_layers_have_a_value_at_every_time() -> None:
    times, layers = aligned([[(at(0), 1.0), (at(2), 2.0)], [(at(1), 5.0)]])
    assert times == [at(0), at(1), at(2)]
    assert layers == [[1.0, 0.0, 2.0], [0.0, 5.0, 0.0]]
