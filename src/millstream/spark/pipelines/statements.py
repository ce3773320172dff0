"""Just enough of SQL's spelling to split a file and to see which names it has."""

from __future__ import annotations

import re
from collections.abc import Iterable

# In this order: what begins inside another is part of it.
_PIECES = re.compile(
    r"""
      (?P<comment> --[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<text> '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" )
    | (?P<name> `(?:[^`]|``)*` )
    | (?P<end> ; )
    """,
    re.VERBOSE | re.DOTALL,
)


def statements(sql: str) -> list[str]:
    """The statements of a file, without comments; a `;` inside a text ends nothing."""
    found: list[str] = []
    current: list[str] = []
    at = 0
    for piece in _PIECES.finditer(sql):
        current.append(sql[at : piece.start()])
        at = piece.end()
        if piece.lastgroup == "end":
            found.append("".join(current))
            current = []
        else:
            # A comment may be all that keeps two words apart.
            current.append(" " if piece.lastgroup == "comment" else piece[0])
    found.append("".join(current) + sql[at:])
    return [stripped for one in found if (stripped := one.strip())]


def names_in(sql: str, known: Iterable[str]) -> list[str]:
    """Which of the known names are written in it, as words or between backticks.

    More than needed may be found (a column that is called like a topic), and none is missed. Names
    have no case, unless they differ by it alone: then one that is written as it is counts.
    """
    bare = _PIECES.sub(lambda piece: piece[0] if piece.lastgroup == "name" else " ", sql)
    quoted = {name[1:-1].replace("``", "`") for name in re.findall(r"`(?:[^`]|``)*`", bare)}
    written = quoted | set(re.findall(r"\w+", re.sub(r"`[^`]*`", " ", bare)))
    lower = {name.lower() for name in written}
    found = [name for name in known if name.lower() in lower]
    exact = {name.lower() for name in found if name in written}
    return sorted(name for name in found if name in written or name.lower() not in exact)
