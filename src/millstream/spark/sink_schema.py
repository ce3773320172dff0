"""Which columns the sink takes, and of which types."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from millstream.errors import ColumnInvalid

CONTENT = ("binary", "string")
HEADERS = "array<struct<key:string,value:binary>>"
COLUMNS = {
    "key": CONTENT,
    "value": CONTENT,
    "headers": (HEADERS,),
    "topic": ("string",),
    "partition": ("int",),
    "lane": ("string", "int"),
    "deliver_at": ("timestamp",),
    "timestamp": ("timestamp",),
}
# Rows of the source are written as they were read; what a topic gives them anew is let pass.
IGNORED = ("offset", "timestampType", "dead_letter")
# Types of columns that JSON shows as a whole.
_NESTED = ("array<", "map<", "struct<", "variant")
# What Spark makes of `lit(None)`.
NULLS = "void"
# Only Millstream can keep a record back, or prefer it.
OWN = ("lane", "deliver_at")


def check_columns(
    fields: Iterable[tuple[str, str]], *, has_topic: bool, is_millstream: bool
) -> None:
    """Names and types, as Spark's `simpleString` says them; raises ColumnInvalid."""
    found = dict(fields)
    for name, kind in found.items():
        if name in IGNORED:
            continue
        if name not in COLUMNS:
            raise _invalid(name, f"the sink has no column {name!r}; {_hint(name)}")
        right = COLUMNS[name]
        if kind in right or (kind == NULLS and name != "value"):
            continue
        raise _invalid(name, f"the column {name} is {kind}; it must be {_cast(name, kind, right)}")
    if "value" not in found:
        raise _invalid(
            "value",
            "there is no column value, which is what a record holds; make one, for example with "
            "to_json(struct(*)) AS value",
        )
    if not has_topic and found.get("topic", NULLS) == NULLS:
        raise _invalid(
            "topic", "nothing says where rows go; set the option topic, or add a column topic"
        )
    if is_millstream:
        return
    for name in OWN:
        if found.get(name, NULLS) != NULLS:
            raise _invalid(
                name,
                f"the column {name} works with Millstream alone, and this broker is another; "
                "leave it out",
            )


def _cast(name: str, kind: str, right: tuple[str, ...]) -> str:
    if name == "headers":
        return f"{HEADERS}, with these names inside"
    shown = " or ".join(right)
    if right is CONTENT:
        # Spark makes no bytes of a number by itself.
        is_nested = kind.startswith(_NESTED)
        return f"{shown}: use {f'to_json({name})' if is_nested else f'CAST({name} AS STRING)'}"
    return f"{shown}: use CAST({name} AS {right[0].upper()})"


def _hint(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), COLUMNS, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"it has {', '.join(COLUMNS)}; select those, or put it into the value"


def _invalid(column: str, message: str) -> ColumnInvalid:
    return ColumnInvalid(message, column=column)
