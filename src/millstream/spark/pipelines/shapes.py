"""The shape of an error: its text without what differs from one time to the next.

    timeout after 132 ms for order 'A-17'   →   timeout after <n> ms for order <text>

Errors of one shape have one cause, most of the time. The rules are regular expressions that Java
and Python read alike, because Spark applies them to columns and tests to texts.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column

# Of a shape that is longer, this much is compared and shown.
SHAPE_CHARACTERS = 160
NO_ERROR = "(no error text)"
# What a placeholder looks like; between two of them a shape has the error's own words.
PLACEHOLDER = r"<[a-z]+>"
# A text to search for that is shorter would be found anywhere.
FRAGMENT_CHARACTERS_MIN = 4

# In this order: an address in a quoted text is part of that text, a number in a time of that time.
RULES = (
    # Of a Python traceback the last line says what happened.
    (r"(?s)^.*Traceback \(most recent call last\):.*\n(?=[^\s])", ""),
    (r"(?<![A-Za-z0-9_])\"[^\"]*\"(?![A-Za-z0-9_])", "<text>"),
    (r"(?<![A-Za-z0-9_])'[^']*'(?![A-Za-z0-9_])", "<text>"),
    (r"`[^`]*`", "<text>"),
    (r"[a-z]+://[^\s,;)\]>]+", "<url>"),
    (r"[A-Za-z0-9._+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+", "<email>"),
    (
        r"(?<![A-Za-z0-9])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![A-Za-z0-9])",
        "<id>",
    ),
    (
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
        r"(?:[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]+)?)?(?:Z|[+-][0-9]{2}:?[0-9]{2})?)?",
        "<time>",
    ),
    (r"(?<![0-9.])[0-9]{1,3}(?:\.[0-9]{1,3}){3}(?::[0-9]{1,5})?(?![0-9.])", "<address>"),
    (r"0x[0-9a-fA-F]+", "<id>"),
    (r"(?<![A-Za-z0-9])(?=[a-f]*[0-9])(?=[0-9]*[a-f])[0-9a-f]{8,}(?![A-Za-z0-9])", "<id>"),
    # Letters between digits: a serial number, a hash in base 32.
    (r"(?<![A-Za-z0-9])[A-Za-z]*[0-9]+[A-Za-z]+[0-9][A-Za-z0-9]*", "<id>"),
    (r"(?<![A-Za-z0-9])-?[0-9]+(?:[.,][0-9]+)*", "<n>"),
    (r"[0-9]+(?:[.,][0-9]+)*", "<n>"),
    (r"\s+", " "),
    (r"^ | $", ""),
)
_RULES = [(re.compile(pattern, re.ASCII), put) for pattern, put in RULES]


def shape_of(error: str | None) -> str:
    """The shape of one text."""
    for pattern, put in _RULES:
        error = error and pattern.sub(put, error)
    return error[:SHAPE_CHARACTERS] if error else NO_ERROR


def shape_column(error: Column) -> Column:
    """The same of a column."""
    from pyspark.sql import functions as sql

    for pattern, put in RULES:
        error = sql.regexp_replace(error, pattern, put)
    cut = sql.substring(error, 1, SHAPE_CHARACTERS)
    return sql.when(sql.length(cut) > 0, cut).otherwise(sql.lit(NO_ERROR))


def shape_id(topic: str, group: str, reason: str, shape: str) -> str:
    """A short name for dead letters that belong together: the same one in every report."""
    named = f"{topic}\0{group}\0{reason}\0{shape}"
    return hashlib.sha256(named.encode()).hexdigest()[:8]


def fragments(shape: str) -> list[str]:
    """The error's own words in a shape, the longest first: what a search for it may look for. A
    space may have been several, and what was cut off may have been anything."""
    if shape == NO_ERROR:
        return []
    pieces = [piece.strip() for piece in re.split(PLACEHOLDER, shape)]
    words = {word for piece in pieces for word in (piece, *piece.split(" "))}
    long = {one for one in words if len(one) >= FRAGMENT_CHARACTERS_MIN}
    return sorted(long, key=lambda one: (-len(one), one))
