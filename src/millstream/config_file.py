"""Settings files: TOML, or YAML with `${VAR:default}`.

A file is flat: one line a setting, under the names of `docs/settings.md`. In YAML,
`${VAR:default}` stands for an environment variable; without `:default` the variable must be set.
Values are substituted after parsing, so a variable cannot add settings of its own.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass

from millstream.errors import SettingInvalid

# A settings file is a page of text. More is a wrong path (a log, a disk image), not settings.
FILE_BYTES_MAX = 1 << 20

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why the settings cannot be used, with what would be right."""

    setting: str
    value: str
    origin: str
    why: str
    right: str

    def __str__(self) -> str:
        return f"{self.setting} = {self.value!r} ({self.origin}) {self.why}; {self.right}"


def read_settings_file(
    path: str, environment: Mapping[str, str]
) -> tuple[dict[str, str], list[Problem]]:
    """Setting names with their values as text, not judged yet; and what is no such text."""
    parsed = _parse(path)
    if parsed is None:
        return {}, []
    if not isinstance(parsed, dict):
        raise _refuse(path, "is not a list of settings; use one `name: value` a line")
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for name, value in parsed.items():
        try:
            text = _text(value)
            values[str(name)] = text if _is_toml(path) else _substitute(text, environment)
        except _NotText as error:
            problems.append(Problem(str(name), str(value), f"file {path}", *error.args))
    return values, problems


class _NotText(Exception):
    """Why a value is no text, and what would be right."""


def _is_toml(path: str) -> bool:
    return path.lower().endswith(".toml")


def _parse(path: str) -> object:
    if not path.lower().endswith((".toml", ".yaml", ".yml")):
        raise _refuse(path, "has an unknown extension; use .toml, .yaml or .yml")
    try:
        with open(path, "rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _refuse(path, f"cannot be read: {error.strerror}") from error
    if len(content) > FILE_BYTES_MAX:
        raise _refuse(path, f"is larger than {FILE_BYTES_MAX} bytes, so it is no settings file")
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _refuse(path, f"is not UTF-8 text: {error}") from error
    return _parse_toml(path, text) if _is_toml(path) else _parse_yaml(path, text)


def _parse_toml(path: str, text: str) -> object:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _refuse(path, f"is not TOML: {error}") from error


def _parse_yaml(path: str, text: str) -> object:
    # The light client has no YAML reader, and TOML needs none.
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise _refuse(
            path, "is YAML, which needs pyyaml; use TOML, or pip install 'millstream[server]'"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise _refuse(path, f"is not YAML: {' '.join(str(error).split())}") from error


def _text(value: object) -> str:
    if isinstance(value, bool):
        # YAML reads a bare `off` as false; for us it is the word that closes a listener.
        return "on" if value else "off"
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)
    if value is None:
        raise _NotText("has no value", "give it one, or leave the line out")
    raise _NotText("is a section", "settings are flat: write one `name: value` a line")


def _substitute(text: str, environment: Mapping[str, str]) -> str:
    def value_of(match: re.Match[str]) -> str:
        value = environment.get(match[1], match[2])
        if value is None:
            raise _NotText(
                f"uses {match[1]}, which is not set", f"set it, or write ${{{match[1]}:default}}"
            )
        return value

    return _VARIABLE.sub(value_of, text)


def _refuse(path: str, why: str) -> SettingInvalid:
    return SettingInvalid(f"the settings file {path} {why}", setting="config", value=path)
