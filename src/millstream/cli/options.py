"""Every setting as a flag of a command.

The flags are made from the table of settings, so a new row is a new flag. All are text: judging
them is left to `load_settings`, which reports every wrong value at once.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, Optional

import typer

from millstream import kinds
from millstream.config import TABLE, Setting, Settings, load_settings

_METAVARS: dict[type, str] = {
    kinds.AbsentListener: "off",
    kinds.Directory: "DIR",
    kinds.Duration: "DURATION",
    kinds.File: "FILE",
    kinds.HostNames: "NAMES",
    kinds.Integer: "NUMBER",
    kinds.ListenAddress: "HOST:PORT|off",
    kinds.Size: "SIZE",
}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command `--config` and a flag for each setting; it is called with the Settings.

    Parameters of its own come after the first, which is `settings`.
    """
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]

    @wraps(command)
    def call(**given: Any) -> None:
        flags = {s.name: given[s.name] for s in TABLE if given[s.name] is not None}
        settings: Settings = load_settings(
            flags=flags, environment=os.environ, file=given["settings_file"]
        )
        command(settings, **{parameter.name: given[parameter.name] for parameter in own})

    parameters = [*own, _config_flag(), *(_flag(setting) for setting in TABLE)]
    # typer reads the flags from here.
    call.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return call


def _config_flag() -> inspect.Parameter:
    option = typer.Option(
        "--config",
        metavar="FILE",
        help="A settings file, TOML or YAML. MILLSTREAM_CONFIG names one too.",
    )
    return _parameter("settings_file", option)


def _flag(setting: Setting) -> inspect.Parameter:
    kind = setting.kind
    metavar = "|".join(kind.words) if isinstance(kind, kinds.Choice) else _METAVARS[type(kind)]
    # The first sentence; docs/settings.md has the rest.
    text = setting.causes.split(". ")[0].rstrip(".")
    default = f" (default {setting.default})" if setting.default else ""
    option = typer.Option(
        setting.flag, metavar=metavar, help=f"{text}.{default}", rich_help_panel=setting.section
    )
    return _parameter(setting.name, option)


def _parameter(name: str, option: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Optional[str], option],  # noqa: UP045 — read at run time
    )
