"""Options of the form NAME=VALUE, and those that set and unset."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from millstream.errors import SettingInvalid

Unset = Annotated[
    Optional[list[str]],  # noqa: UP045  read at run time
    typer.Option("--unset", metavar="NAME", help="Back to the default. Can be given again."),
]


def changes_of(set_: list[str] | None, unset: list[str] | None) -> dict[str, str | None]:
    """As the broker takes them: None goes back to the default."""
    return pairs_of(set_ or [], "--set") | dict.fromkeys(unset or [])


def pairs_of(texts: list[str], flag: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise SettingInvalid(
                f"{flag} is {text!r}; use NAME=VALUE", setting=flag.lstrip("-"), value=text
            )
        pairs[name] = value
    return pairs
