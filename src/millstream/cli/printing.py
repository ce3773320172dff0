"""How commands print: tables and pages for people, JSON for scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from millstream.kinds import show_duration, show_size


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> None:
    """Rows under their columns; the first `texts` are words, the others numbers."""
    table = [tuple(columns), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            f"{text:<{width}}" if index < texts else f"{text:>{width}}"
            for index, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def print_page(page: Mapping[str, object]) -> None:
    """One thing, a line for each of its fields."""
    width = max(map(len, page))
    for name, value in page.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        print(f"{name:<{width}}  {value:,}" if is_number else f"{name:<{width}}  {value}")


def print_json(page: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(page)).decode())


def show_setting(name: str, value: object) -> str:
    """A setting in the units that its name ends with, as it can be given again."""
    if value is None:
        return "unlimited"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and name.endswith("_ms"):
        return show_duration(value)
    if isinstance(value, int) and ("_bytes" in name):
        return show_size(value)
    return str(value)


def show_time(time_ms: int) -> str:
    """To the second, in UTC."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}Z"
