"""What the user said, for the options of one pipeline: texts by name, read with what they mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from millstream.errors import SettingInvalid
from millstream.kinds import Duration
from millstream.spark.pipelines.registry import Option

_SWITCHED = {"true": True, "false": False, "on": True, "off": False}


class Options(Mapping[str, str]):
    """`options["topics"]` for the text; the methods for what else it can be.

    An option without a value is not in here, and `options[…]` of it says which flag is missing.
    """

    __slots__ = ("_known", "_values")

    def __init__(self, known: tuple[Option, ...], given: Mapping[str, str | None]) -> None:
        self._known = {option.name: option for option in known}
        self._values: dict[str, str] = {}
        for name in given:
            if name not in self._known:
                self.refuse(name, "does not exist here; there are " + ", ".join(self._known))
        values = {option.name: option.default for option in known}
        values |= {name: value for name, value in given.items() if value is not None}
        self._values = {name: value for name, value in values.items() if value is not None}
        for option in known:
            if option.is_required and not self._values.get(option.name):
                self.refuse(option.name, f"is needed: {option.help}")

    def __getitem__(self, name: str) -> str:
        try:
            return self._values[name]
        except KeyError:
            if name not in self._known:
                raise
            self.refuse(name, f"is needed: {self._known[name].help}")

    def get(self, name: str, default: Any = None) -> Any:
        """Without a value the default: `[…]` would say that the flag is missing."""
        return self._values.get(name, default)

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def names(self, name: str) -> list[str]:
        """A text with commas between."""
        return [part.strip() for part in self.get(name, "").split(",") if part.strip()]

    def number(self, name: str, *, minimum: int = 0) -> int:
        text = self[name]
        if not text.removeprefix("-").isdecimal() or int(text) < minimum:
            self.refuse(name, f"is {text!r}; it takes a whole number from {minimum} on")
        return int(text)

    def is_on(self, name: str) -> bool:
        text = self.get(name, "false")
        if text.lower() not in _SWITCHED:
            self.refuse(name, f"is {text!r}; it takes true or false")
        return _SWITCHED[text.lower()]

    def duration_ms(self, name: str) -> int:
        text = self[name]
        try:
            return Duration().parse(text) or 0
        except ValueError as error:
            self.refuse(name, f"is {text!r}, which {error}; it takes a time such as 30s or 5m")

    def refuse(self, name: str, why: str) -> NoReturn:
        """The error for an option that makes no sense."""
        raise SettingInvalid(f"--{name} {why}", setting=name, value=self._values.get(name, ""))
