"""`mill schedule`: records that are to appear later, and those that come again and again."""

from __future__ import annotations

from typing import Annotated, Any, Optional
from urllib.parse import quote, urlencode

import msgspec
import typer

from millstream.cli.printing import print_json, print_page, print_table, show_time
from millstream.cli.remote import Ca, Remote, Server
from millstream.kinds import show_duration
from millstream.wire.places import DEFAULT_SERVER

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Records that are to appear in their topic later, or again and again.",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
# What a table shows of a value.
VALUE_SHOWN_MAX = 40
PAGE = 1000


@app.command()
def add(  # noqa: PLR0917  typer calls it by name
    name: Name,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="Where the record goes.")],
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The record's value.")],
    every: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--every", metavar="TIME", help="How often: 30s, 15m, 1h, 7d."),
    ] = None,
    cron: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--cron", metavar="CRON", help="When: '30 7 * * mon-fri', or @hourly."),
    ] = None,
    zone: Annotated[
        str, typer.Option("--zone", metavar="ZONE", help="The time zone of --cron.")
    ] = "UTC",
    key: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--key", metavar="TEXT", help="The record's key."),
    ] = None,
    lane: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Option("--lane", metavar="LANE", help="critical, high, normal, low, background."),
    ] = None,
    paused: Annotated[bool, typer.Option("--paused", help="Make it, and do not run it.")] = False,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Publish a record again and again. A schedule of that name is replaced."""
    message = {"value": value, "key": key, "lane": lane}
    body = {
        "topic": topic,
        "every": every,
        "cron": cron,
        "time_zone": zone,
        "paused": paused,
        "message": message,
    }
    page = Remote(server, ca).call("PUT", _named(name), msgspec.json.encode(body)).json()
    if as_json:
        print_json(page)
    elif page["next_ms"] is None:
        print(f"{name} is paused")
    else:
        print(f"{name} runs next at {show_time(page['next_ms'])}")


@app.command("list")
def list_schedules(
    topic: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Argument(metavar="[TOPIC]", help="Print its scheduled records instead."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--max", metavar="N", min=1, help="At most so many records.")
    ] = 100,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Print named schedules; with a topic, its records that are scheduled."""
    remote = Remote(server, ca)
    if topic is not None:
        _list_delayed(remote, topic, limit, as_json=as_json)
        return
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        query = "?" + urlencode({"after": after}) if after else ""
        page = remote.call("GET", f"/v1/schedules{query}").json()
        found += page["schedules"]
        after = page["next"]
    if as_json:
        print_json(found)
        return
    rows = [
        (one["name"], one["topic"], _when(one), _next(one), f"{one['runs']:,}") for one in found
    ]
    print_table(("name", "topic", "when", "next", "runs"), rows, texts=4)
    for one in found:
        if one["error"]:
            print(f"{one['name']}: the last run was left out: {one['error']}")


@app.command()
def show(name: Name, server: Server = DEFAULT_SERVER, ca: Ca = None, as_json: Json = False) -> None:
    """Print a named schedule."""
    page = Remote(server, ca).call("GET", _named(name)).json()
    if as_json:
        print_json(page)
        return
    print_page(
        {
            "name": page["name"],
            "topic": page["topic"],
            "when": _when(page),
            "next": _next(page),
            "last": _time(page["last_ms"]),
            "runs": page["runs"],
            "error": page["error"] or "–",
            "message": msgspec.json.encode(page["message"]).decode(),
        }
    )


@app.command()
def cancel(
    name: Annotated[
        str, typer.Argument(metavar="NAME|TOPIC", help="A named schedule, or a record's topic.")
    ],
    id: Annotated[
        Optional[str],  # noqa: UP045  read at run time
        typer.Argument(metavar="[ID]", help="What publishing answered: partition/offset."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    ca: Ca = None,
) -> None:
    """End a named schedule; or, with a topic and an id, a record that is scheduled."""
    remote = Remote(server, ca)
    if id is not None:
        if not _is_id(id):
            raise typer.BadParameter(f"{id!r} is no id; it is of the form partition/offset")
        remote.call("DELETE", f"{_delayed(name)}/{id}")
        return
    if _is_id(name):
        raise typer.BadParameter(f"say of which topic: mill schedule cancel TOPIC {name}")
    remote.call("DELETE", _named(name))


def _is_id(text: str) -> bool:
    partition, slash, offset = text.partition("/")
    return bool(slash) and partition.isdecimal() and offset.isdecimal()


def _list_delayed(remote: Remote, topic: str, limit: int, *, as_json: bool) -> None:
    found: list[dict[str, Any]] = []
    after: str | None = ""
    count = 0
    while after is not None and len(found) < limit:
        asked = {"limit": min(PAGE, limit - len(found))} | ({"after": after} if after else {})
        page = remote.call("GET", f"{_delayed(topic)}?{urlencode(asked)}").json()
        found += page["delayed"]
        after, count = page["next"], page["count"]
    if as_json:
        print_json({"topic": topic, "count": count, "delayed": found})
        return
    rows = [
        (
            f"{one['partition']}/{one['offset']}",
            show_time(one["deliver_at_ms"]),
            one["lane"],
            "–" if one["key"] is None else one["key"],
            _shown(one["value"]),
        )
        for one in found
    ]
    print_table(("id", "due", "lane", "key", "value"), rows, texts=5)
    if count > len(found):
        print(f"{count:,} in all")


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_SHOWN_MAX else text[: VALUE_SHOWN_MAX - 1] + "…"


def _when(one: dict[str, Any]) -> str:
    if one["cron"] is None:
        return f"every {show_duration(one['every_ms'])}"
    return f"{one['cron']} ({one['time_zone']})"


def _next(one: dict[str, Any]) -> str:
    return "paused" if one["paused"] else _time(one["next_ms"])


def _time(time_ms: int | None) -> str:
    return "–" if time_ms is None else show_time(time_ms)


def _named(name: str) -> str:
    return "/v1/schedules/" + quote(name, safe="")


def _delayed(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/delayed"
