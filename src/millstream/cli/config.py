"""`mill config`: the settings in force, and the page that describes them."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from millstream.cli.options import with_settings
from millstream.config import Settings, settings_in_force
from millstream.config_docs import settings_page

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Show the settings in force, and where they came from.",
)


@app.command()
@with_settings
def show(
    settings: Settings,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Print every setting, its value, and where it came from.

    It takes the flags of `mill serve`, so that a start can be tried before it is made.
    """
    rows = [(setting.name, value, origin) for setting, value, origin in settings_in_force(settings)]
    for warning in settings.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if as_json:
        page = {name: {"value": value, "from": origin} for name, value, origin in rows}
        print(msgspec.json.format(msgspec.json.encode(page)).decode())
        return
    names = max(len(name) for name, _, _ in rows)
    values = max(len(value) for _, value, _ in rows)
    for name, value, origin in rows:
        print(f"{name:<{names}}  {value:<{values}}  {origin}")


@app.command()
def docs() -> None:
    """Print the page `docs/settings.md`, made from the table of settings."""
    print(settings_page(), end="")
