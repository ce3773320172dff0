"""The fields of a JSON value, as SQL writes the columns of a table: `id BIGINT, total DOUBLE`.

Spark parses them too, but only inside of the table's whole schema, where its error names no option.
So they are looked at here first, alone: names, brackets and types. What Spark knows better, such as
collations, is left to it.

    fields   field, field, …
    field    name [:] type [NOT NULL] [COMMENT 'text']
    type     ARRAY<type>, MAP<type, type>, STRUCT<fields>, or a plain one: BIGINT, DECIMAL(12, 2), …
"""

from __future__ import annotations

import difflib
import re
from typing import NoReturn

_PLAIN = (
    "BIGINT",
    "BINARY",
    "BOOLEAN",
    "BYTE",
    "DATE",
    "DEC",
    "DECIMAL",
    "DOUBLE",
    "FLOAT",
    "INT",
    "INTEGER",
    "LONG",
    "NUMERIC",
    "REAL",
    "SHORT",
    "SMALLINT",
    "STRING",
    "TIME",
    "TIMESTAMP",
    "TIMESTAMP_LTZ",
    "TIMESTAMP_NTZ",
    "TINYINT",
    "VOID",
)
# Spark has these too, and no reader of JSON in Python can give them.
_REFUSED = ("CHAR", "CHARACTER", "INTERVAL", "VARCHAR", "VARIANT")
_NESTED = ("ARRAY", "MAP", "STRUCT")
# These may have words after them: `STRING COLLATE UNICODE`, `TIMESTAMP WITHOUT TIME ZONE`.
_WORDY = ("STRING", "TIME", "TIMESTAMP")
_DECIMALS = ("DEC", "DECIMAL", "NUMERIC")
_DIGITS_MAX = 38

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<name>`(?:[^`]|``)+`|[A-Za-z0-9_]+)
      | (?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")
      | (?P<sign>[<>(),:])
      | (?P<other>\S)
    )""",
    re.VERBOSE | re.DOTALL,
)


def fields_of(schema: str) -> str:
    """`id BIGINT, total DOUBLE`, also where it was written as `STRUCT<…>`. ValueError, with what is
    wrong, when it is neither."""
    opening = re.match(r"\s*STRUCT\s*<", schema, re.IGNORECASE)
    reader = _Reader(schema[opening.end() :] if opening else schema)
    reader.fields()
    if opening:
        reader.expect(">")
    if reader.ahead:
        reader.fail(f"{reader.ahead!r} is too much")
    return schema[opening.end() : schema.rindex(">")] if opening else schema


class _Reader:
    """Goes over the text token by token; `ahead` is the one that comes next, empty at the end."""

    def __init__(self, text: str) -> None:
        found = [one for one in _TOKEN.finditer(text) if one.lastgroup is not None]
        self._tokens = [(one[one.lastgroup or 0], one.lastgroup or "") for one in found]
        self._at = 0
        # The field that is read, for errors.
        self._path: list[str] = []

    @property
    def ahead(self) -> str:
        return self._tokens[self._at][0] if self._at < len(self._tokens) else ""

    @property
    def kind(self) -> str:
        return self._tokens[self._at][1] if self._at < len(self._tokens) else "end"

    def fields(self) -> None:
        names = set()
        while True:
            name = self._name()
            if name in names:
                self.fail(f"the field {name!r} is there twice")
            names.add(name)
            self._path.append(name)
            self._has(":")
            self._type()
            if self._has("NOT"):
                self.expect("NULL")
            if self._has("COMMENT"):
                if self.kind != "text":
                    self.fail("a COMMENT is a text in quotes")
                self._at += 1
            if self.kind == "name" or self.ahead == "(":
                self.fail(f"{self.ahead!r} is too much after a type")
            self._path.pop()
            if not self._has(","):
                return

    def _name(self) -> str:
        if self.kind != "name":
            self.fail(f"a field's name is missing before {self._shown()}")
        name = self.ahead
        self._at += 1
        if self.kind == "other":
            self.fail(f"the name {name + self.ahead}… needs backquotes around it")
        return name[1:-1].replace("``", "`") if name.startswith("`") else name

    def _type(self) -> str:
        word = self.ahead.upper()
        if self.kind != "name":
            self.fail(f"a type is missing before {self._shown()}")
        if word in _REFUSED:
            self.fail(f"a value cannot be read as {word}; use STRING")
        if word not in _PLAIN and word not in _NESTED:
            self._fail_unknown(self.ahead)
        self._at += 1
        if word == "ARRAY":
            self.expect("<")
            self._type()
            self.expect(">")
        elif word == "MAP":
            self.expect("<")
            if self._type() != "STRING":
                self.fail("the keys of a MAP are STRING in JSON")
            self.expect(",")
            self._type()
            self.expect(">")
        elif word == "STRUCT":
            self.expect("<")
            self.fields()
            self.expect(">")
        else:
            self._details(word)
        return word

    def _details(self, word: str) -> None:
        numbers = []
        if self._has("("):
            while self.ahead.isdecimal():
                numbers.append(int(self.ahead))
                self._at += 1
                if not self._has(","):
                    break
            self.expect(")")
        if word in _DECIMALS and numbers and not 0 < numbers[0] <= _DIGITS_MAX:
            self.fail(f"a DECIMAL has 1 to {_DIGITS_MAX} digits")
        while word in _WORDY and self.kind == "name" and self.ahead.upper() not in _AFTER_TYPES:
            self._at += 1

    # ---- tokens

    def _has(self, wanted: str) -> bool:
        is_next = self.ahead.upper() == wanted
        self._at += is_next
        return is_next

    def expect(self, wanted: str) -> None:
        if not self._has(wanted):
            self.fail(f"a {wanted!r} is missing before {self._shown()}")

    def _shown(self) -> str:
        return repr(self.ahead) if self.ahead else "its end"

    def _fail_unknown(self, word: str) -> NoReturn:
        near = difflib.get_close_matches(word.upper(), [*_PLAIN, *_NESTED], n=1)
        hint = f"did you mean {near[0]}?" if near else "use a type such as BIGINT or STRING"
        self.fail(f"there is no type {word!r}; {hint}")

    def fail(self, why: str) -> NoReturn:
        where = f"of the field {'.'.join(self._path)}: " if self._path else ""
        raise ValueError(where + why)


_AFTER_TYPES = ("NOT", "COMMENT")
