"""The page `docs/http.md` is what the routes say of themselves."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

from millstream import http_docs
from millstream.http_docs import http_page
from millstream.listeners.http.schemas import shown, text, whole

ROOT = Path(__file__).parent.parent.parent


def page() -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return http_page()


def test_the_page_of_routes_is_fresh() -> None:
    stored = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
    assert stored == page(), "docs/http.md is stale: run `make docs`"


def test_two_forms_of_one_title_are_refused() -> None:
    forms: dict[str, http_docs.Page] = {}
    one = shown("Thing", size=whole(0, 5))
    http_docs._kind(one, forms)
    http_docs._kind(shown("Thing", size=whole(0, 5)), forms)
    with pytest.raises(ValueError, match="title Thing"):
        http_docs._kind(shown("Thing", size=text()), forms)


def test_numbers_have_all_their_digits_and_null_is_said_once_and_last() -> None:
    at_most_a_day = {"type": "integer", "minimum": 0.0, "maximum": 86_400_000.0}
    choice = {"anyOf": [{"type": "null"}, {"anyOf": [at_most_a_day, {"type": "null"}]}]}
    assert http_docs._kind(choice, {}) == "whole number from 0 to 86400000 or null"


def test_every_form_that_is_named_is_described_once() -> None:
    text = page()
    titles = [line[4:].lower() for line in text.splitlines() if line.startswith("### ")]
    headings = [line[3:].lower().replace(" ", "-") for line in text.splitlines()
                if line.startswith("## ")]  # fmt: skip
    named = set(re.findall(r"\]\(#([a-z]+)\)", text))
    assert named
    for name in named:
        assert (titles + headings).count(name) == 1, name
