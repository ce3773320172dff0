"""Parameters of a request, read strictly: each once, plain digits, within bounds.

Python's own `int` takes underscores, spaces and the digits of every script, and a client that
sends those has a mistake that should be told, not guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TypeVar
from urllib.parse import parse_qsl

from millstream.errors import ParameterInvalid

# More than any route has; a query with thousands of them is no query.
PARAMETERS_MAX = 100
# Of a bad value, what is said back.
SHOWN_MAX = 40
OFFSET_MAX = 2**63 - 1
PARTITION_MAX = 2**31 - 1

_WHOLE = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,20}(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_TRUTHS = {"true": True, "false": False}

Default = TypeVar("Default")


class Parameters:
    """What a query names. `many` are the names that may be given more than once, and `raw` those
    whose values may be any bytes: those that are no UTF-8 are escaped as Python does it."""

    __slots__ = ("_given", "_many")

    def __init__(
        self,
        query: bytes,
        known: Collection[str],
        many: Collection[str] = frozenset(),
        raw: Collection[str] = frozenset(),
    ) -> None:
        self._given: dict[str, str] = {}
        self._many: dict[str, list[str]] = {}
        if not query:
            return
        for name, value in _pairs(query):
            if not _is_text(name) or not (name in raw or _is_text(value)):
                raise ParameterInvalid("the query is not UTF-8", parameter="")
            if name not in known:
                listed = ", ".join(sorted(known)) or "none"
                raise ParameterInvalid(
                    f"there is no parameter {name[:SHOWN_MAX]!r} here; there are: {listed}",
                    parameter=name[:SHOWN_MAX],
                )
            if name in many:
                self._many.setdefault(name, []).append(value)
            elif name in self._given:
                raise ParameterInvalid(f"{name} is given twice", parameter=name)
            else:
                self._given[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def needed(self, name: str) -> str:
        text = self._given.get(name)
        if text is None:
            raise ParameterInvalid(f"the parameter {name} is needed", parameter=name)
        return text

    def text(self, name: str, default: Default) -> str | Default:
        return self._given.get(name, default)

    def texts(self, name: str) -> list[str]:
        return self._many.get(name, [])

    def whole(self, name: str, default: Default, least: int, most: int) -> int | Default:
        text = self._given.get(name)
        return default if text is None else whole(name, text, least, most)

    def seconds(self, name: str, most: float) -> float:
        """A time in seconds, by default none."""
        text = self._given.get(name)
        if text is None:
            return 0.0
        number = float(text) if _NUMBER.fullmatch(text) else -1.0
        if not 0 <= number <= most:
            raise ParameterInvalid(
                f"{name} is {text[:SHOWN_MAX]!r}; it must be a number from 0 to {most:g}",
                parameter=name,
                least=0,
                most=most,
            )
        return number

    def choice(self, name: str, default: Default, offers: Collection[str]) -> str | Default:
        text = self._given.get(name)
        if text is None:
            return default
        if text not in offers:
            raise ParameterInvalid(
                f"{name} is {text[:SHOWN_MAX]!r}; it must be one of {', '.join(offers)}",
                parameter=name,
            )
        return text

    def truth(self, name: str, default: bool) -> bool:
        return _TRUTHS[self.choice(name, "true" if default else "false", _TRUTHS)]


def whole(name: str, text: str, least: int, most: int) -> int:
    """A whole number within bounds, in plain digits."""
    if _WHOLE.fullmatch(text) and least <= (number := int(text)) <= most:
        return number
    raise ParameterInvalid(
        f"{name} is {text[:SHOWN_MAX]!r}; it must be a whole number from {least} to {most}",
        parameter=name,
        least=least,
        most=most,
    )


def _pairs(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query.decode("latin-1"),
            keep_blank_values=True,
            errors="surrogateescape",
            max_num_fields=PARAMETERS_MAX,
        )
    except ValueError as error:
        raise ParameterInvalid(
            f"the query has more than {PARAMETERS_MAX} parameters", parameter=""
        ) from error


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
