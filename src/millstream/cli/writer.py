"""`mill writer`: who writes in batches that appear once, and how far each is."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from millstream.cli.printing import print_json, print_page, print_table, show_time
from millstream.cli.remote import Ca, Remote, Server
from millstream.kinds import show_size
from millstream.wire.places import DEFAULT_SERVER

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Writers of staged batches, such as queries of Spark: which batch was the last, and what "
    "is staged.",
)

Name = Annotated[str, typer.Argument(metavar="WRITER", help="The writer's name.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
NOTHING = "–"


@app.command("list")
def list_writers(server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print all writers, one a line."""
    remote = Remote(server, ca)
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        page = remote.call("GET", f"/v1/writers?{urlencode({'after': after})}").json()
        found += page["writers"]
        after = page["next"]
    if as_json:
        print_json(found)
        return
    columns = ("writer", "committed", "committing", "last batch", "parts", "staged")
    print_table(columns, [_row(one) for one in found], texts=3)


@app.command()
def show(name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print a writer."""
    page = Remote(server, ca).call("GET", _path(name)).json()
    if as_json:
        print_json(page)
        return
    last = page["last"] or {}
    skipped = ", ".join(f"{count} {why}" for why, count in last.get("skipped", {}).items())
    print_page(
        {
            "writer": page["writer"],
            "last batch": last.get("batch", NOTHING),
            "records": last.get("records", NOTHING),
            "skipped": skipped or NOTHING,
            "owner": last.get("owner") or NOTHING,
            "committed": _committed(page),
            "committing": _committing(page),
            "trouble": (page["committing"] or {}).get("trouble") or NOTHING,
            "staged parts": page["staged_parts"],
            "staged": show_size(page["staged_bytes"]),
        }
    )


@app.command()
def forget(name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None) -> None:
    """Forget a writer that will not write again, with what it has staged.

    Should it write all the same, a batch that it repeats is taken for a new one."""
    Remote(server, ca).call("DELETE", _path(name))


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    last = NOTHING if one["last"] is None else f"{one['last']['batch']:,}"
    parts, size = f"{one['staged_parts']:,}", show_size(one["staged_bytes"])
    return one["writer"], _committed(one), _committing(one), last, parts, size


def _committed(one: dict[str, Any]) -> str:
    return NOTHING if one["last"] is None else show_time(one["last"]["committed_ms"])


def _committing(one: dict[str, Any]) -> str:
    running = one["committing"]
    return NOTHING if running is None else f"{running['batch']}, {running['done']}/{running['of']}"


def _path(name: str) -> str:
    return f"/v1/writers/{quote(name, safe='')}"
