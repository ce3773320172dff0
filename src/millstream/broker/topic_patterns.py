"""Patterns of topic names, as consumers of Kafka subscribe to them: the part of RE2's language that
makes sense for names.

    a .            a character of a name; any of them
    [a-z] [^0-9]   one of these, or none of these; \\d \\w and \\D \\W, also inside
    xy  x|y        one after the other; one or the other
    (x) (?:x)      a group
    x* x+ x?       as often as there are; at least once; at most once. Also followed by `?`
    x{2} x{2,} x{2,5}
    ^ $            the beginning and the end; a pattern has to fit a whole name anyway

Python's own patterns can take for ever for a few characters. These are run through all at once,
character by character, on sets of places in the pattern; each set is made once and remembered, so a
look at a name costs a step for each of its characters.
"""

from __future__ import annotations

import re
import string
from typing import NamedTuple, TypeAlias

from millstream.errors import PatternInvalid

# All that a topic's name may consist of.
LETTERS = frozenset(string.ascii_letters + string.digits + "._-")
DIGITS = frozenset(string.digits)
WORD = frozenset(string.ascii_letters + string.digits + "_")
_CLASSES = {"d": DIGITS, "D": LETTERS - DIGITS, "w": WORD, "W": LETTERS - WORD}
# Longer ones are lists of names, and those have a field of their own.
CHARACTERS_MAX = 1000
# Places in a pattern; what stands in braces counts as often as it says.
PLACES_MAX = 2000
DEPTH_MAX = 50
# Sets that are remembered; a pattern that has more is run as if each were new.
SETS_MAX = 1000

_COUNTS = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")


class _Letter(NamedTuple):
    """One of these characters."""

    letters: frozenset[str]


class _Row(NamedTuple):
    parts: tuple[_Node, ...]


class _Choice(NamedTuple):
    parts: tuple[_Node, ...]


class _Repeat(NamedTuple):
    part: _Node
    least: int
    # None: no end.
    most: int | None


class _Edge(NamedTuple):
    is_end: bool


_Node: TypeAlias = "_Letter | _Row | _Choice | _Repeat | _Edge"


class TopicPattern:
    """Raises PatternInvalid for what is none, or asks for more than the above."""

    __slots__ = ("_ends", "_last", "_places", "_sets", "source")

    def __init__(self, source: str) -> None:
        self.source = source
        # Of each place: the characters that lead on from it and where to; or where it leads to
        # without one, and whether only at the beginning or at the end.
        self._places: list[tuple[frozenset[str], int] | tuple[None, tuple[int, ...], str]] = []
        tree = _Reader(source).read()
        first = self._add_end()
        self._last = first
        start = self._place(tree, first)
        self._sets: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self._ends = self._reached({start}, "^")

    def matches(self, name: str) -> bool:
        places = self._ends
        for letter in name:
            places = self._step(places, letter)
            if not places:
                return False
        return self._last in self._reached(places, "$" if name else "^$")

    # ---- running

    def _step(self, places: frozenset[int], letter: str) -> frozenset[int]:
        found = self._sets.get((places, letter))
        if found is None:
            after = {
                one[1]
                for one in (self._places[place] for place in places)
                if one[0] is not None and letter in one[0]
            }
            found = self._reached(after, "")
            if len(self._sets) >= SETS_MAX:
                self._sets.clear()
            self._sets[places, letter] = found
        return found

    def _reached(self, places: set[int] | frozenset[int], edges: str) -> frozenset[int]:
        """Where these lead without a character."""
        found = set(places)
        waiting = list(places)
        while waiting:
            one = self._places[waiting.pop()]
            if one[0] is None and (not one[2] or one[2] in edges):
                new = [place for place in one[1] if place not in found]
                found.update(new)
                waiting += new
        return frozenset(found)

    # ---- making

    def _add_end(self) -> int:
        self._places.append((None, (), ""))
        return 0

    def _add(self, place: tuple[frozenset[str], int] | tuple[None, tuple[int, ...], str]) -> int:
        if len(self._places) >= PLACES_MAX:
            raise _invalid(self.source, "it is too large")
        self._places.append(place)
        return len(self._places) - 1

    def _place(self, node: _Node, after: int) -> int:
        """Where a part begins that leads to `after`."""
        match node:
            case _Letter(letters):
                return self._add((letters, after))
            case _Edge(is_end):
                return self._add((None, (after,), "$" if is_end else "^"))
            case _Choice(parts):
                return self._add((None, tuple(self._place(one, after) for one in parts), ""))
            case _Row(parts):
                for one in reversed(parts):
                    after = self._place(one, after)
                return after
            case _Repeat(part, least, most):
                return self._repeat(part, least, most, after)

    def _repeat(self, part: _Node, least: int, most: int | None, after: int) -> int:
        if most is None:
            loop = self._add((None, (), ""))
            self._places[loop] = (None, (self._place(part, loop), after), "")
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = self._add((None, (self._place(part, after), end), ""))
        for _ in range(least):
            before, after = after, self._place(part, after)
            if after == before:
                # Nothing, however often.
                break
        return after


class _Reader:
    """From text to a tree."""

    __slots__ = ("_at", "_depth", "_text")

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> _Node:
        if len(self._text) > CHARACTERS_MAX:
            raise _invalid(self._text, f"it has more than {CHARACTERS_MAX} characters")
        tree = self._choice()
        if self._at < len(self._text):
            raise self._wrong("there is a `)` too many")
        return tree

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise self._wrong(f"its groups are more than {DEPTH_MAX} deep")
        parts = [self._row()]
        while self._taken("|"):
            parts.append(self._row())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Choice(tuple(parts))

    def _row(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._one()))
        return _Row(tuple(parts))

    def _one(self) -> _Node:
        letter = self._text[self._at]
        self._at += 1
        match letter:
            case "(":
                if self._taken("?") and not self._taken(":"):
                    raise self._wrong("only groups of the forms (x) and (?:x) are known")
                node = self._choice()
                if not self._taken(")"):
                    raise self._wrong("a `)` is missing")
                return node
            case "[":
                return _Letter(self._class())
            case ".":
                return _Letter(LETTERS)
            case "^" | "$":
                return _Edge(letter == "$")
            case "\\":
                return _Letter(self._escaped())
            case "*" | "+" | "?" | "{":
                raise self._wrong(f"there is nothing before `{letter}`")
        return _Letter(frozenset(letter))

    def _repeated(self, node: _Node) -> _Node:
        if self._taken("*"):
            node = _Repeat(node, 0, None)
        elif self._taken("+"):
            node = _Repeat(node, 1, None)
        elif self._taken("?"):
            node = _Repeat(node, 0, 1)
        elif self._text.startswith("{", self._at):
            node = self._counted(node)
        else:
            return node
        # Whether as much or as little as possible is taken is the same where all has to fit.
        self._taken("?")
        if self._text[self._at : self._at + 1] in ("*", "+", "?", "{"):
            raise self._wrong("what is repeated is repeated again; put it into a group")
        return node

    def _counted(self, node: _Node) -> _Node:
        found = _COUNTS.match(self._text, self._at)
        if found is None:
            raise self._wrong("`{` is followed by one number, or two")
        self._at = found.end()
        least = int(found[1])
        most: int | None = least
        if found[2]:
            most = int(found[3]) if found[3] else None
        if most is not None and most < least:
            raise self._wrong(f"{least} is more than {most}")
        return _Repeat(node, least, most)

    def _class(self) -> frozenset[str]:
        is_not = self._taken("^")
        found: set[str] = set()
        is_first = True
        while is_first or not self._text.startswith("]", self._at):
            if self._at >= len(self._text):
                raise self._wrong("a `]` is missing")
            if self._text.startswith("[:", self._at):
                raise self._wrong("classes with names, such as [:alpha:], are not known")
            found |= self._range()
            is_first = False
        self._at += 1
        return LETTERS - found if is_not else frozenset(found)

    def _range(self) -> frozenset[str]:
        first = self._text[self._at]
        self._at += 1
        if first == "\\":
            letters = self._escaped()
            if len(letters) != 1:
                return letters
            (first,) = letters
        rest = self._text[self._at : self._at + 2]
        if len(rest) < 2 or rest[0] != "-" or rest[1] == "]":
            return frozenset(first)
        self._at += 2
        last = rest[1]
        if last == "\\":
            letters = self._escaped()
            if len(letters) != 1:
                raise self._wrong("a range ends with one character")
            (last,) = letters
        if last < first:
            raise self._wrong(f"{first} comes after {last}")
        return frozenset(one for one in LETTERS if first <= one <= last)

    def _escaped(self) -> frozenset[str]:
        letter = self._text[self._at : self._at + 1]
        self._at += 1
        if letter in _CLASSES:
            return _CLASSES[letter]
        if not letter or letter.isalnum():
            raise self._wrong(f"`\\{letter}` is not known")
        return frozenset(letter)

    def _taken(self, letter: str) -> bool:
        if not self._text.startswith(letter, self._at):
            return False
        self._at += 1
        return True

    def _wrong(self, why: str) -> PatternInvalid:
        return _invalid(self._text, f"{why}, at character {self._at}")


def _invalid(source: str, why: str) -> PatternInvalid:
    return PatternInvalid(
        f"{source[:200]!r} is no pattern of topic names: {why}", pattern=source[:CHARACTERS_MAX]
    )
