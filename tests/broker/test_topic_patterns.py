"""Patterns of topic names, held against Python's own where those can be trusted."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.topic_patterns import (
    CHARACTERS_MAX,
    DEPTH_MAX,
    PLACES_MAX,
    SETS_MAX,
    TopicPattern,
)
from millstream.errors import PatternInvalid

NAMES = (
    "",
    "a",
    "b",
    "ab",
    "aab",
    "abab",
    "orders",
    "orders.eu",
    "orders-1",
    "0",
    "12",
    "_x",
    "A.b",
)


@pytest.mark.parametrize(
    "source",
    [
        "orders",
        "^orders.*",
        "orders.*$",
        "^(orders|a).*",
        "(?:a|b)+",
        "[a-c]*",
        "[^0-9]+",
        r"\d+",
        r"[\w]+",
        r"\W?orders\.eu",
        "a{2}b",
        "(ab){1,2}",
        "(a|ab){0,}b?",
        "a??b*?",
        "",
        "|a",
        "(a|)b",
        "[]a]b",
        "[a-]b",
        r"orders[\-.]\w+",
        "a^b",
        "(^a|b)$",
        "((a*)*)*b",
        "_.",
    ],
)
def test_a_pattern_fits_the_names_that_it_should(source: str) -> None:
    pattern = TopicPattern(source)
    expected = re.compile(source)
    for name in NAMES:
        assert pattern.matches(name) == (expected.fullmatch(name) is not None), name
        assert pattern.matches(name) == (expected.fullmatch(name) is not None), name


_part = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", "^", "$"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("({0[0]}|{0[1]})".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{1,2}"])).map("(?:{0[0]}){0[1]}".format),
    ),
    max_leaves=6,
)


@given(_part, st.lists(st.text("ab0", max_size=5), min_size=1, max_size=5))
def test_any_pattern_fits_what_pythons_own_fits(source: str, names: list[str]) -> None:
    pattern = TopicPattern(source)
    for name in names:
        assert pattern.matches(name) == (re.fullmatch(source, name) is not None), (source, name)


@pytest.mark.parametrize(
    "source",
    [
        "(",
        ")",
        "(a",
        "a)",
        "[a",
        "[",
        "*a",
        "a**",
        "a{",
        "a{2,1}",
        "a{x}",
        "(?i)a",
        "(?=a)",
        "(?P<n>a)",
        r"\b",
        r"\1",
        "\\",
        "[z-a]",
        "[[:alpha:]]",
        r"[a-\d]",
        "a" * (CHARACTERS_MAX + 1),
        "(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1),
        f"(ab){{{PLACES_MAX}}}",
        "((a{100}){100}){100}",
    ],
)
def test_what_is_no_pattern_or_too_much_is_refused(source: str) -> None:
    with pytest.raises(PatternInvalid):
        TopicPattern(source)


def test_what_is_just_not_too_much_is_taken() -> None:
    assert TopicPattern("a" * CHARACTERS_MAX).matches("a" * CHARACTERS_MAX)
    assert TopicPattern("(" * (DEPTH_MAX - 1) + "a" + ")" * (DEPTH_MAX - 1)).matches("a")
    assert TopicPattern(f"a{{{PLACES_MAX - 1}}}").matches("a" * (PLACES_MAX - 1))


def test_a_pattern_that_would_take_others_for_ever_is_done_at_once() -> None:
    pattern = TopicPattern("(a|aa)*(a|aa)*(a|aa)*c")
    assert not pattern.matches("a" * 249)
    assert pattern.matches("a" * 248 + "c")


def test_nothing_many_times_is_nothing() -> None:
    assert TopicPattern("((((){9999}){9999}){9999}){9999}a").matches("a")


def test_what_is_remembered_of_names_is_bounded() -> None:
    pattern = TopicPattern("(a|b)*a(a|b){12}")
    for number in range(3000):
        name = f"{number:020b}".replace("0", "a").replace("1", "b")
        assert pattern.matches(name) == (name[-13] == "a")
        assert len(pattern._sets) <= SETS_MAX
