"""Style is a test: what reviewers would otherwise have to say again and again."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import millstream
from millstream.config_docs import settings_page

ROOT = Path(__file__).parent.parent

# One screen or two: longer functions do more than one thing. Longer files hold more than one noun.
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 700
COLUMNS_MAX = 100

# Work that is put off is an issue, not a comment. Spelled so that this file does not match.
MARKERS = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b")


def files(*suffixes: str) -> Iterator[Path]:
    for room in ("src", "tests", "bench"):
        for directory, below, names in os.walk(ROOT / room):
            below[:] = [name for name in below if name not in ("__pycache__", "build")]
            yield from (Path(directory, name) for name in names if name.endswith(suffixes))


def test_functions_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines"
        for path in files(".py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert not long, "\n".join(long)


def test_files_are_short_and_narrow() -> None:
    wrong = []
    for path in files(".py", ".pyx", ".pxi", ".pyi"):
        lines = path.read_text(encoding="utf-8").splitlines()
        name = path.relative_to(ROOT)
        if len(lines) > FILE_LINES_MAX:
            wrong.append(f"{name} has {len(lines)} lines")
        wrong += [
            f"{name}:{number} has {len(line)} columns"
            for number, line in enumerate(lines, 1)
            if len(line) > COLUMNS_MAX
        ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_put_off() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number} {line.strip()}"
        for path in files(".py", ".pyx", ".pxi", ".pyi")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MARKERS.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_page_of_settings_is_fresh() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "docs/settings.md is stale: run `make docs`"


def test_the_public_names_are_these() -> None:
    assert sorted(millstream.__all__) == ["MillstreamError", "__version__"]
    assert all(hasattr(millstream, name) for name in millstream.__all__)


def test_pins_are_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wrong = [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[0-9][\w.!+]*", line)]
    assert not wrong
    assert lines == sorted(lines, key=lambda line: line.partition("==")[0])


@pytest.mark.parametrize("link", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"])
def test_what_a_visitor_looks_for_is_there(link: str) -> None:
    assert (ROOT / link).stat().st_size > 0


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]
    broken = [
        f"{page.relative_to(ROOT)} → {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)
